"""The same small runs on meshes of eight devices of a CPU, as a process of its own: results go to a folder.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python tests/sharded_process.py FOLDER
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tiny_models import compiled_fast
from tiny_run import tiny_config

from tfm.batch import Batch, make_batch
from tfm.config import ModelConfig
from tfm.decoding.beam import BeamSearch
from tfm.decoding.generate import generate, generate_n_best
from tfm.decoding.inference import _decode_step, prefill
from tfm.nn.models import build_model
from tfm.nn.params import prepare_for_inference
from tfm.sharding import Placement, make_placement
from train import loop
from train.checkpoint import Checkpoints, Progress
from train.config import BatchConfig, CheckpointConfig, DataConfig, MeshConfig, OptimizerConfig, TrainConfig
from train.optimizer import make_optimizer
from train.progress import Reporter
from train.step import init_state, make_train_step, place_batch, state_shardings

MESHES: dict[str, tuple[int, int, int] | None] = {
    "none": None, "8-1-1": (8, 1, 1), "1-8-1": (1, 8, 1), "1-1-8": (1, 1, 8), "2-2-2": (2, 2, 2), "2-1-2": (2, 1, 2),
    "1-2-1": (1, 2, 1),
}  # fmt: skip
"""data, fsdp, tensor: all of eight devices, and fewer."""
GENERATES = {"float32": ("none", "8-1-1", "1-1-8", "2-2-2"), "int8": ("none", "2-2-2")}
SHOWN = ("8-1-1", "1-1-8", "2-2-2")
"""Whose programs are looked at."""
TRAINS = {
    "adamw": ("none", "8-1-1", "1-1-8", "2-2-2", "2-1-2", "1-2-1"),
    "adafactor": ("none", "1-8-1", "2-2-2"),
}
SOURCE_VOCAB, TARGET_VOCAB, DIM = 24, 48, 128
"""Adafactor has rows and columns for matrices from 128 × 128 on."""


def model_config(**changes: Any) -> ModelConfig:
    sizes = dict(
        source_vocab_size=SOURCE_VOCAB, target_vocab_size=TARGET_VOCAB, model_dim=DIM, feed_forward_dim=DIM,
        num_heads=8, encoder_layers=1, decoder_layers=1, max_source_length=16, max_target_length=32,
        shared_embeddings="none", dropout_rate=0.0,
    )  # fmt: skip
    return ModelConfig(**{**sizes, **changes})


def run_config(optimizer: str, *, accumulation_steps: int = 1) -> TrainConfig:
    rate = {"adamw": 3e-3, "adafactor": 0.05}[optimizer]
    return TrainConfig(
        model=model_config(),
        data=DataConfig(max_source_tokens=16, max_target_tokens=16),
        batch=BatchConfig(accumulation_steps=accumulation_steps),
        optimizer=OptimizerConfig(
            name=optimizer, learning_rate=rate, schedule="constant", warmup_steps=0, weight_decay=0.01
        ),
        dtype="float32",
    )


def batch_of(config: ModelConfig) -> Batch:
    """13 pairs of unequal lengths and an empty row, which 4 and 8 do not divide."""
    random = np.random.default_rng(0)
    sources = [random.integers(4, config.source_vocab_size, random.integers(1, 8)).tolist() for _ in range(13)]
    targets = [random.integers(4, config.target_vocab_size, random.integers(1, 8)).tolist() for _ in range(13)]
    return make_batch(sources, targets, config, shape=(8, 9), rows=14)


def placement(name: str) -> Placement | None:
    if (sizes := MESHES[name]) is None:
        return None
    data, fsdp, tensor = sizes
    return make_placement(data=data, fsdp=fsdp, tensor=tensor, devices=jax.devices()[: data * fsdp * tensor])


def named(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def collectives(hlo: str) -> list[tuple[str, list[int]]]:
    """Every collective operation of a program, and the shape of each array that it makes."""
    found = []
    for line in hlo.splitlines():
        if match := re.search(r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(", line):
            for shape in re.findall(r"\w+\[([\d,]*)\]", match[1]):
                found.append((match[2], [int(size) for size in shape.split(",") if size]))
    return found


def train_steps(name: str, optimizer: str, *, accumulation_steps: int = 1) -> dict[str, Any]:
    """Three steps: their losses and norms, the parameters before and after them, how state and program look."""
    config, at = run_config(optimizer, accumulation_steps=accumulation_steps), placement(name)
    model = build_model(config.model, dtype="float32", placement=at)
    rule = make_optimizer(config.optimizer, config.steps)
    state = init_state(model, rule, config)
    first = named(state.params)
    lies = {
        path: (list(leaf.shape), list(leaf.sharding.shard_shape(leaf.shape)))
        for path, leaf in ((jax.tree_util.keystr(p), x) for p, x in jax.tree_util.tree_leaves_with_path(state))
    }
    step = make_train_step(model, rule, config)
    batch = place_batch(at, batch_of(config.model), accumulation_steps=accumulation_steps)
    program = step.lower(state, batch).compile() if name in SHOWN else step
    losses, norms = [], []
    for _ in range(3):
        state, metrics = program(state, batch)
        losses.append(float(metrics.loss))
        norms.append(float(metrics.gradient_norm))
    return {
        "first": first, "state": state, "losses": losses, "norms": norms, "lies": lies,
        "compilations": None if name in SHOWN else step._cache_size(),
        "collectives": collectives(program.as_text()) if name in SHOWN else None,
    }  # fmt: skip


def generated(name: str, params: Any, weights: str) -> dict[str, np.ndarray]:
    """Greedy and beam-4 ids of 8 sources, from parameters that leave little to chance."""
    config, at = model_config(), placement(name)
    model = build_model(config, dtype="float32", placement=at)
    prepared = prepare_for_inference(params, weights, at)
    batch = batch_of(config)
    given = dict(source_lengths=batch.source_lengths[:8], max_tokens=6)
    one = generate(model, prepared, batch.source[:8], **given)
    several = generate_n_best(model, prepared, batch.source[:8], search=BeamSearch(width=4, num_best=4), **given)
    return {"greedy": np.asarray(one.tokens), "beam": np.asarray(several.tokens), "scores": np.asarray(several.scores)}


def decode_collectives(name: str, params: Any) -> list[tuple[str, list[int]]]:
    model = build_model(model_config(), dtype="float32", placement=placement(name))
    prepared = prepare_for_inference(params, "float32", placement(name))
    batch = batch_of(model.config)
    _, cache = prefill(model, prepared, batch.source[:8], batch.source_lengths[:8], capacity=8)
    program = _decode_step.lower(model, prepared, np.ones((8, 1), np.int32), cache).compile()
    return collectives(program.as_text())


def restored(folder: Path, state: Any) -> dict[str, dict[str, np.ndarray]]:
    """A state of 2 × 2 × 2 devices, saved and restored onto four, two, one and eight devices, one after the other."""
    config, found = run_config("adafactor"), {"2-2-2": named(state)}
    rule = make_optimizer(config.optimizer, config.steps)
    here = jax.numpy.zeros(()).sharding
    shapes = jax.eval_shape(lambda: init_state(build_model(config.model, dtype="float32"), rule, config))
    for step, name in enumerate(("2-1-2", "1-2-1", "none", "1-8-1")):
        with Checkpoints(folder, CheckpointConfig()) as checkpoints:
            checkpoints.save(step, state, {}, Progress())
        at = placement(name)
        lies = jax.tree.map(lambda _: here, shapes) if at is None else state_shardings(at, shapes)
        template = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, lies)
        with Checkpoints(folder, CheckpointConfig()) as checkpoints:
            back = checkpoints.restore_latest(template)
        assert back is not None
        state = back.state
        assert jax.tree.map(lambda x: x.sharding, state) == lies
        found[name] = named(state)
    return found


def loop_rows(folder: Path) -> dict[str, list[dict]]:
    """Eight steps with validation: on one device, and on eight, the second half on another mesh of them."""
    rows = {}
    for name, meshes in {"one": [None], "eight": [dict(data=2, fsdp=2, tensor=2), dict(data=4, fsdp=2)]}.items():
        for steps, mesh in zip((8,) if meshes == [None] else (4, 8), meshes, strict=True):
            config = tiny_config(
                folder, steps=steps, log_every_steps=1, dtype="float32",
                batch=dict(max_shapes=1), validation=dict(every_steps=8, max_examples=2, samples=1),
                optimizer=dict(schedule="constant", warmup_steps=0),
                mesh=MeshConfig() if mesh is None else MeshConfig(**mesh, rules=("vocab=",)),
            )  # fmt: skip
            if mesh is None:
                place, loop.placement_of = loop.placement_of, lambda config: None
            loop.train(config, folder / name, reporter=Reporter())
            if mesh is None:
                loop.placement_of = place
        lines = (folder / name / "metrics.jsonl").read_text().splitlines()
        rows[name] = [json.loads(line) for line in lines]
    return rows


def main(folder: Path) -> None:
    jax.config.update("jax_numpy_rank_promotion", "raise")
    assert jax.device_count() == 8
    arrays: dict[str, np.ndarray] = {}
    facts: dict[str, Any] = {}
    for optimizer, name in ((optimizer, name) for optimizer, names in TRAINS.items() for name in names):
        made = train_steps(name, optimizer)
        key = f"{optimizer}/{name}"
        arrays |= {f"{key}/{path}": leaf for path, leaf in made.pop("first").items()}
        state = made.pop("state")
        facts[key] = made
        if optimizer == "adamw" and name == "none":
            # larger, so that no two tokens are near to each other
            trained = jax.tree.map(lambda leaf: np.asarray(leaf) * (3 if leaf.ndim == 2 else 1), state.params)
    made = train_steps("2-2-2", "adamw", accumulation_steps=2)
    facts["accumulated/2-2-2"] = {"losses": made["losses"], "norms": made["norms"]}
    for weights, names in GENERATES.items():
        for name in names:
            arrays |= {f"{weights}/{name}/{what}": ids for what, ids in generated(name, trained, weights).items()}
    facts["decode"] = {name: decode_collectives(name, trained) for name in ("8-1-1", "1-1-8")}
    for name, leaves in restored(folder / "checkpoints", state).items():
        arrays |= {f"restored/{name}/{path}": leaf for path, leaf in leaves.items()}
    facts["loop"] = loop_rows(folder / "loop")
    np.savez(folder / "arrays.npz", **arrays)
    (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    with compiled_fast():
        main(Path(sys.argv[1]))
