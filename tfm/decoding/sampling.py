"""From logits to a token: small frozen objects whose numbers are traced, so that changing one compiles nothing."""

import dataclasses
import typing

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tfm.axes import Array, Float, Int, KeyArray
from tfm.checks import cast, keep_whole_numbers, real_numbers, whole_number
from tfm.decoding.top_k import top_k

MAX_SAMPLES = 4096
"""A row's samples are drawn side by side, each with its own part of the cache."""


def likeliest(logits: Float[Array, "B V"]) -> Int[Array, "B"]:
    """The token with the highest logit; of equals, the one with the lowest id."""
    return top_k(logits, 1)[1][:, 0].astype(jnp.int32)


@typing.no_type_check  # pytrees are also built from shapes, specs and other non-arrays
@flax.struct.dataclass
class Greedy:
    """The likeliest token; of equals, the one with the lowest id."""

    def pick(self, logits: Float[Array, "B V"], keys: KeyArray) -> Int[Array, "B"]:
        return likeliest(logits)


@typing.no_type_check
@flax.struct.dataclass
class Sampling:
    """A random token from the model's distribution, reshaped by temperature and cut to its likeliest part.

    The steps are taken in the order of the fields, each on what the one before has left. A field is one number or one
    for each row.
    """

    temperature: Float[Array, "*B"] | float = 1.0
    """At least 0. Divides the logits; below 1 sharpens. 0 is the likeliest token."""
    top_k: Int[Array, "*B"] | int = 0
    """Keeps the k likeliest tokens (Fan et al. 2018); 0 keeps all."""
    top_p: Float[Array, "*B"] | float = 1.0
    """More than 0, at most 1. Keeps the fewest likeliest tokens that have at least this probability together (Holtzman
    et al. 2020)."""
    min_p: Float[Array, "*B"] | float = 0.0
    """From 0 to 1. Keeps tokens at least this fraction as likely as the likeliest (Nguyen et al. 2024)."""

    def check(self) -> None:
        """Raises ValueError for a number out of its range; numbers that are only known later cannot be checked."""
        ranges = {
            "temperature": (lambda x: x >= 0, "at least 0"),
            "top_k": (
                lambda x: np.issubdtype(x.dtype, np.integer) & (x >= 0) & (x < 2**31),
                "a whole number from 0 to 2**31 - 1",
            ),
            "top_p": (lambda x: (x > 0) & (x <= 1), "more than 0 and at most 1"),
            "min_p": (lambda x: (x >= 0) & (x <= 1), "from 0 to 1"),
        }
        for name, (holds, wording) in ranges.items():
            value = getattr(self, name)
            if isinstance(value, jax.core.Tracer):
                continue
            number = real_numbers(value)
            if number is None or not np.all(holds(np.asarray(number))):
                raise ValueError(f"expected {name} {wording}, got {value!r}")

    def as_arrays(self, batch: int) -> "Sampling":
        """The same, checked, with each number as an array of one dtype: to jit, 1 and 1.0 are two kinds of argument."""
        self.check()
        arrays: dict[str, typing.Any] = {}
        for field in dataclasses.fields(Sampling):  # a subclass keeps its further ones as they are
            value, dtype = getattr(self, field.name), np.int32 if field.name == "top_k" else np.float32
            if jnp.shape(value) not in ((), (batch,)):
                raise ValueError(
                    f"expected one {field.name} or {batch}, one a row, got an array of shape {jnp.shape(value)}"
                )
            known = not isinstance(value, jax.core.Tracer)
            arrays[field.name] = cast(np.asarray(real_numbers(value)), dtype) if known else value.astype(dtype)
        return dataclasses.replace(self, **arrays)

    def pick(self, logits: Float[Array, "B V"], keys: KeyArray) -> Int[Array, "B"]:
        """One token a row, each from its own key, so that a row's token does not depend on its neighbours."""
        temperature = self._column(self.temperature, jnp.float32)
        # the likeliest at 0, so that a temperature near 0 sends the others to -inf and none to infinity
        scaled = (logits - logits.max(axis=-1, keepdims=True)) / jnp.where(temperature > 0, temperature, 1)
        cuts = jnp.any(jnp.asarray(self.top_k) > 0) | jnp.any(jnp.asarray(self.top_p) < 1)
        # sorting a large vocabulary takes longer than a small model's step: only where a cut needs it
        kept = jax.lax.cond(cuts, self._cut, lambda scaled: scaled, scaled)
        highest = kept.max(axis=-1, keepdims=True)
        min_p = self._column(self.min_p, jnp.float32)
        kept = jnp.where(kept >= highest + jnp.log(min_p), kept, -jnp.inf)
        drawn = jax.vmap(jax.random.categorical)(keys, kept)
        return jnp.where(temperature[:, 0] > 0, drawn, likeliest(logits)).astype(jnp.int32)

    def _cut(self, scaled: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Top-k, then top-p on what is left: what is cut becomes -inf."""
        order = jnp.argsort(scaled, axis=-1, descending=True, stable=True)
        ranked = jnp.take_along_axis(scaled, order, axis=-1)
        rank = jnp.arange(ranked.shape[-1])[None]
        top_k = self._column(self.top_k, jnp.int32)
        ranked = jnp.where((rank < top_k) | (top_k == 0), ranked, -jnp.inf)
        probability = jax.nn.softmax(ranked, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        top_p = self._column(self.top_p, jnp.float32)
        keep = (before < top_p) | (rank == 0) | (top_p >= 1)  # rounding may bring a sum of all to 1 too early
        ranked = jnp.where(keep, ranked, -jnp.inf)
        unsort = jnp.argsort(order, axis=-1)
        return jnp.take_along_axis(ranked, unsort, axis=-1)

    @staticmethod
    def _column(value: Array | float, dtype: typing.Any) -> Array:
        return jnp.atleast_1d(jnp.asarray(value, dtype))[:, None]


Sampler = Greedy | Sampling


def check_num_samples(given: object) -> int:
    """Raises ValueError for a number of samples that cannot be drawn at once."""
    number = whole_number(given)
    if number is None or not 1 <= number <= MAX_SAMPLES:
        raise ValueError(f"expected a whole number from 1 to {MAX_SAMPLES} as num_samples, got {given!r}")
    return number


@typing.no_type_check
@flax.struct.dataclass
class Samples:
    """Several random continuations of each row, drawn independently of each other, the likeliest first.

    They are ranked by their log-probability under the model as it is. Equal ones stay: how often one came is an
    estimate of how likely it is.
    """

    num_samples: int = flax.struct.field(pytree_node=False, default=4)
    """R: how many are drawn, at most 4,096; all of them lie in memory at once."""
    sampler: Sampling = Sampling()
    num_best: int | None = flax.struct.field(pytree_node=False, default=None)
    """How many are returned; None: all."""

    def __post_init__(self) -> None:
        keep_whole_numbers(self, "num_samples", "num_best")

    def check(self) -> None:
        """Raises ValueError for a setting out of its range."""
        number = check_num_samples(self.num_samples)
        best = number if self.num_best is None else whole_number(self.num_best)
        if best is None or not 1 <= best <= number:
            raise ValueError(f"expected num_best from 1 to the {number} samples, got {self.num_best!r}")
        if not isinstance(self.sampler, Sampling):
            raise ValueError(f"expected Sampling(…) as sampler of samples, got {self.sampler!r}")
        self.sampler.check()
