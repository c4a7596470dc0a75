"""What the generations cost: training speed, the time and memory of decoding by length."""

import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from benchmarks import cases
from benchmarks.decoding import measure_decoding
from tfm.batch import Batch
from tfm.config import ModelConfig
from tfm.nn.cache import cache_bytes, init_cache
from tfm.nn.models import build_model
from train.config import TrainConfig
from train.optimizer import make_optimizer
from train.step import init_state, make_train_step

ROWS = 32


def training_speeds(configs: Mapping[str, TrainConfig], *, length: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Target tokens a second of the real train step, sources and targets of one length; every model in turn."""
    draw = np.random.default_rng(0)
    steps = {}
    for name, config in configs.items():
        ids = draw.integers(4, config.model.target_vocab_size, (3, ROWS, length), dtype=np.int32)
        batch = Batch(ids[0], np.full(ROWS, length, np.int32), ids[1], ids[2], np.ones((ROWS, length), np.float32))
        model = build_model(config.model, dtype=config.dtype)
        optimizer = make_optimizer(config.optimizer, config.steps)
        steps[name] = [make_train_step(model, optimizer, config), init_state(model, optimizer, config), batch]
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, (step, state, batch) in steps.items():
            start = time.perf_counter()
            steps[name][1], _ = step(state, batch)
            jax.block_until_ready(steps[name][1])
            seconds[name] += [time.perf_counter() - start] * (turn > 0)  # the first turn compiles
    for name, times in seconds.items():
        yield {
            "record": "training speed",
            "model": name,
            "rows": ROWS,
            "length": length,
            "target_tokens_per_second": round(ROWS * length / statistics.median(times)),
        }


def decoding_costs(name: str, config: ModelConfig, *, length: int, repeats: int) -> dict[str, Any]:
    """Greedy decoding of as many tokens as the source has, 8 rows: time a step, and bytes of the cache.

    `cache_bytes` are those of the arrays; `formula_bytes` what `tfm.nn.cache.cache_bytes` says before there are any.
    """
    config = config.replace(max_source_length=2 * length, max_target_length=2 * length, end_id=cases.END_ID)
    speed = measure_decoding(config, rows=8, source_tokens=length, new_tokens=length, dtype="float32", repeats=repeats)
    cache = jax.eval_shape(lambda: init_cache(config, batch=8, source_length=length, capacity=length))
    return {
        "record": "decoding",
        "model": name,
        "length": length,
        "step_milliseconds": round(1e3 * speed.step_seconds, 3),
        "cache_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)),
        "formula_bytes": cache_bytes(config, batch=8, source_length=length, capacity=length),
    }
