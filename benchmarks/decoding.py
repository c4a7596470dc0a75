"""How fast greedy decoding is, in this process; used by `benchmarks.check_accelerator`."""

import dataclasses
import statistics
import time
import typing

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import cases
from tfm.axes import Array
from tfm.config import ModelConfig
from tfm.decoding.generate import generate
from tfm.decoding.sampling import Greedy
from tfm.nn.models import build_model
from tfm.nn.params import init_params


@typing.no_type_check
@flax.struct.dataclass
class GreedyWithoutEnd(Greedy):
    """Greedy, but never the end token: random weights then give exactly as many tokens as were asked for."""

    end_id: int = flax.struct.field(pytree_node=False, default=cases.END_ID)

    def pick(self, logits: Array, keys: Array) -> Array:
        is_end = jnp.arange(logits.shape[-1])[None] == self.end_id
        return super().pick(jnp.where(is_end, -jnp.inf, logits), keys)  # a scatter would copy all logits


@dataclasses.dataclass(frozen=True)
class DecodingSpeed:
    """Medians of one set of shapes."""

    tokens_per_second: float
    """New tokens of all rows over the time of a whole call, the encoder included."""
    step_seconds: float
    """A whole call less a call for one token, by the steps between."""
    compile_seconds: float


def measure_decoding(
    config: ModelConfig, *, rows: int, source_tokens: int, new_tokens: int, dtype: str = "auto", repeats: int = 5
) -> DecodingSpeed:
    """Times `generate` with random weights, warm, from the call until its tokens are on the host.

    Raises:
        ValueError: fewer than 2 new tokens, of which no step could be timed.
    """
    if new_tokens < 2:
        raise ValueError(f"expected at least 2 new tokens, got {new_tokens}")
    model = build_model(config, dtype=dtype)
    params = init_params(model, jax.random.key(0))
    source = np.random.default_rng(0).integers(
        cases.FIRST_WORD_ID, config.source_vocab_size, (rows, source_tokens), dtype=np.int32
    )

    def seconds(max_tokens: int) -> float:
        start = time.perf_counter()
        made = jax.device_get(
            generate(
                model, params, source, max_tokens=max_tokens, sampler=GreedyWithoutEnd(config.end_id),
                capacity=new_tokens,
            )
        )  # fmt: skip
        elapsed = time.perf_counter() - start
        assert (made.lengths == max_tokens).all()
        return elapsed

    first = seconds(new_tokens)
    pairs = [(seconds(new_tokens), seconds(1)) for _ in range(repeats)]
    whole = statistics.median(whole for whole, _ in pairs)
    steps = statistics.median(whole - one for whole, one in pairs) / (new_tokens - 1)
    return DecodingSpeed(rows * new_tokens / whole, steps, first - whole)
