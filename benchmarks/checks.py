"""Checks that an accelerator computes what the definition says. Each is a function of its sizes, to run anywhere."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tfm.batch import Batch, make_batch
from tfm.config import ModelConfig
from tfm.decoding.generate import generate
from tfm.decoding.inference import decode_step, prefill
from tfm.nn.attention import Kernel, dot_product_attention
from tfm.nn.cache import KeysValues
from tfm.nn.layers import compute_dtype
from tfm.nn.masks import Visible
from tfm.nn.models import Model, build_model
from train.config import LossConfig, OptimizerConfig, TokenizerConfig, TrainConfig
from train.optimizer import make_optimizer
from train.step import init_state, make_train_step

TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 5e-3}
"""Largest difference from the float32 definition, as a share of the largest entry. Products of float32 are computed in
full precision for this, not in the shorter formats that accelerators take by default. In bfloat16 (8 bits) one rounding
is 0.004, and backends that also add up in bfloat16 were seen at 0.03; a wrong mask or scale is off by 0.1 and more."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    passed: bool
    detail: str

    def __str__(self) -> str:
        return f"{'ok    ' if self.passed else 'FAILED'} {self.name}: {self.detail}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """Shapes of one attention, and what may be seen in it."""

    name: str
    rows: int = 4
    queries: int = 128
    keys: int = 128
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    causal: bool = False
    padded: bool = False
    """Rows of different lengths; the first sees nothing at all, the last everything."""


ATTENTION_CASES = (
    AttentionCase(name="self"),
    AttentionCase(name="self, padded", padded=True),
    AttentionCase(name="causal", causal=True),
    AttentionCase(name="causal, padded", causal=True, padded=True),
    AttentionCase(name="causal, 1,024 tokens", rows=1, queries=1024, keys=1024, causal=True),
    AttentionCase(name="cross, padded", queries=48, keys=80, padded=True),
    AttentionCase(name="cross, odd lengths, padded", queries=37, keys=53, padded=True),
    AttentionCase(name="one query, padded", queries=1, keys=256, padded=True),
    AttentionCase(name="grouped-query, causal", kv_heads=2, causal=True),
    AttentionCase(name="multi-query, padded", kv_heads=1, padded=True),
    AttentionCase(name="heads of 32, causal", head_dim=32, causal=True),
    AttentionCase(name="heads of 128, padded", head_dim=128, padded=True),
)


def check_attention(
    cases: Sequence[AttentionCase], kernels: Sequence[Kernel], dtypes: Sequence[str]
) -> Iterator[Check]:
    """Every kernel's result and gradients, in every dtype, against `plain` in float32 on the same numbers."""
    for case in cases:
        for dtype in dtypes:
            arguments = _attention_arguments(case, dtype)
            widened = jax.tree.map(lambda x: x.astype(jnp.float32), arguments[:4])
            expected = _attend(*widened, arguments[4], causal=case.causal, kernel="plain")
            for kernel in kernels:
                if kernel == "cudnn" and dtype == "float32":
                    continue  # it has none
                with guarded(f"attention {kernel}, {dtype}, {case.name}") as guard:
                    result = _attend(*arguments, causal=case.causal, kernel=kernel)
                    errors = {name: relative_error(result[name], expected[name]) for name in expected}
                    guard.compare(errors, TOLERANCES[dtype])
                yield guard.check


def _attention_arguments(case: AttentionCase, dtype: str) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    query_shape = (case.rows, case.queries, case.heads, case.head_dim)
    memory_shape = (case.rows, case.kv_heads, case.keys, case.head_dim)
    shapes = (query_shape, memory_shape, memory_shape, query_shape)
    arrays = [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]
    lengths = jnp.linspace(0, case.keys, case.rows).astype(jnp.int32) if case.padded else None
    return (*arrays, lengths)


@functools.partial(jax.jit, static_argnames=("causal", "kernel"))
def _attend(query: Any, keys: Any, values: Any, cotangent: Any, lengths: Any, *, causal: bool, kernel: Kernel) -> Any:
    """The result and, for a cotangent, the gradients."""

    def attend(query: Any, keys: Any, values: Any) -> Any:
        visible = Visible(key_lengths=lengths, causal=causal)
        return dot_product_attention(query, KeysValues(keys, values), visible=visible, kernel=kernel)

    with jax.default_matmul_precision("highest"):
        result, pull_back = jax.vjp(attend, query, keys, values)
        gradients = pull_back(cotangent)
    names = ("query gradient", "key gradient", "value gradient")
    return {"result": result, **dict(zip(names, gradients, strict=True))}


def relative_error(actual: Any, expected: Any) -> float:
    """The largest difference as a share of the largest expected entry; infinite where something is not finite."""
    actual, expected = (np.asarray(x.astype(jnp.float32), np.float64) for x in (actual, expected))
    if not np.isfinite(actual).all():
        return float("inf")
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


class guarded(contextlib.AbstractContextManager):  # noqa: N801 - reads as a statement
    """Makes one `Check` of a block: what it compares, or the error it raises, so that the other checks go on."""

    def __init__(self, name: str):
        self.name = name
        self.check = Check(name, False, "nothing was compared")

    def compare(self, errors: dict[str, float], limit: float) -> None:
        """Fails unless every error is at most the limit; NaN fails."""
        passed = all(error <= limit for error in errors.values())
        worst = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
        self.check = Check(self.name, passed, f"{worst} off by {errors[worst]:.2e}, at most {limit:.0e}")

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        self.check = Check(self.name, False, f"{type(error).__name__}: {error}")
        return True


REVERSE_MODEL = ModelConfig(
    source_vocab_size=16, target_vocab_size=16, model_dim=128, feed_forward_dim=256, num_heads=4, encoder_layers=2,
    decoder_layers=2, shared_embeddings="all", dropout_rate=0.0,
)  # fmt: skip


def reverse_batch(config: ModelConfig, random: np.random.Generator, *, rows: int, longest: int) -> Batch:
    """Random words of 1 to `longest` tokens, and the same backwards: what the checks train on."""
    words = [random.integers(4, config.source_vocab_size, length) for length in random.integers(1, longest + 1, rows)]
    sources = [np.append(word, config.end_id) for word in words]
    return make_batch(sources, [word[::-1] for word in words], config, shape=(longest + 1, longest + 1))


def train_to_reverse(
    config: ModelConfig, *, steps: int, dtype: str = "auto", rows: int = 128, longest: int = 6
) -> tuple[Any, float]:
    """Trains a model on new words at every step; returns its parameters and the mean loss of the last 10 steps."""
    run = TrainConfig(
        model=config,
        tokenizer=TokenizerConfig(shared=True),
        optimizer=OptimizerConfig(learning_rate=3e-3, schedule="cosine", warmup_steps=min(20, steps)),
        loss=LossConfig(label_smoothing=0.0),
        steps=steps,
    )
    model = build_model(config, dtype=dtype)
    optimizer = make_optimizer(run.optimizer, steps)
    state = init_state(model, optimizer, run)
    step = make_train_step(model, optimizer, run)
    random = np.random.default_rng(0)
    losses = []
    for _ in range(steps):
        state, metrics = step(state, reverse_batch(config, random, rows=rows, longest=longest))
        losses.append(metrics.loss)
    return state.params, float(np.mean(jax.device_get(losses[-10:])))


def check_decoding(
    model: Model, params: Any, *, right_share: float, rows: int = 128, longest: int = 6
) -> Iterator[Check]:
    """Whether a model that can reverse also does so when it generates, and whether the cache changes what it says.

    Greedy tokens may differ from those of the full forward pass only where two logits are as close as the tolerance.
    """
    config, dtype = model.config, model.dtype
    batch = reverse_batch(config, np.random.default_rng(1), rows=rows, longest=longest)
    with jax.default_matmul_precision("highest"):
        with guarded(f"decoding, {dtype}: words that come out backwards") as guard:
            made = generate(model, params, batch.source, source_lengths=batch.source_lengths, max_tokens=longest + 1)
            tokens = np.asarray(made.tokens)[:, : longest + 1]
            right = float(np.mean((tokens == batch.target_out).all(axis=1)))
            guard.check = Check(guard.name, right >= right_share, f"{right:.1%}, at least {right_share:.0%}")
        yield guard.check

        with guarded(f"decoding, {dtype}: logits with the cache against those without") as guard:
            full = _full_logits(model, params, batch.source, batch.source_lengths, batch.target_in)
            cached = _cached_logits(model, params, batch)
            guard.compare({"logits": relative_error(cached, full)}, TOLERANCES[dtype])
        yield guard.check

        with guarded(f"decoding, {dtype}: greedy tokens against the forward pass over them") as guard:
            target_in = np.concatenate([batch.target_in[:, :1], tokens[:, :-1]], axis=1)
            logits = np.asarray(_full_logits(model, params, batch.source, batch.source_lengths, target_in))
            chosen = np.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
            behind = (logits.max(axis=-1) - chosen) / np.abs(logits).max()
            is_token = np.arange(longest + 1) < np.asarray(made.lengths)[:, None]
            guard.compare({"best logit": float(np.where(is_token, behind, 0).max())}, TOLERANCES[dtype])
        yield guard.check


@functools.partial(jax.jit, static_argnames="model")
def _full_logits(model: Model, params: Any, source: Any, source_lengths: Any, target_in: Any) -> Any:
    return model.apply({"params": params}, source, source_lengths, target_in)


def _cached_logits(model: Model, params: Any, batch: Batch) -> Any:
    length = batch.target_in.shape[1]
    logits, cache = prefill(model, params, batch.source, batch.source_lengths, capacity=length)
    steps = [logits]
    for position in range(1, length):
        logits, cache = decode_step(model, params, batch.target_in[:, position : position + 1], cache)
        steps.append(logits)
    return jnp.concatenate(steps, axis=1)


def check_training(
    *, steps: int, loss_limit: float, right_share: float, config: ModelConfig = REVERSE_MODEL, rows: int = 128
) -> Iterator[Check]:
    """Trains in the backend's own dtype; the loss must fall below the limit, in nats a token. Then decodes in both."""
    params = None
    with guarded(f"training, {compute_dtype('auto')}: loss after {steps} steps of reversing words") as guard:
        params, loss = train_to_reverse(config, steps=steps, rows=rows)
        guard.check = Check(guard.name, loss < loss_limit, f"{loss:.4f}, less than {loss_limit}")
    yield guard.check
    if params is not None:
        for dtype in dict.fromkeys((compute_dtype("auto"), "float32")):
            yield from check_decoding(build_model(config, dtype=dtype), params, right_share=right_share)
