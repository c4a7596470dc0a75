"""A padded batch of requests in one compiled call, however its tokens are chosen."""

import dataclasses
import functools
import typing
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tfm.axes import Array, Bool, Float, Int
from tfm.decoding.beam import BeamSearch
from tfm.decoding.constraints import Constraints
from tfm.decoding.generate import generate, generate_n_best
from tfm.decoding.sampling import Greedy, Sampler, Sampling
from tfm.nn.params import Params
from tfm.nn.transformer import Model

Decoding = Sampler | BeamSearch
"""How the tokens of an answer are chosen."""


class Made(NamedTuple):
    """The hypotheses of each row, the best first; what is missing has a log-probability of -inf."""

    tokens: Int[Array, "B R T"]
    lengths: Int[Array, "B R"]
    log_probs: Float[Array, "B R"]
    finished: Bool[Array, "B R"]


@functools.partial(jax.jit, static_argnames=("model", "capacity"))
def generate_rows(
    model: Model,
    params: Params,
    source: Int[Array, "B S"],
    source_lengths: Int[Array, "B"],
    prompt: Int[Array, "B T"],
    prompt_lengths: Int[Array, "B"],
    limits: Int[Array, "B"],
    places: Int[Array, "B"],
    seed: Array,
    sampler: Decoding,
    constraints: Constraints | None = None,
    *,
    capacity: int,
) -> Made:
    """`generate` with a key for each row, or beam search.

    One function for all models, so that equal ones share what is compiled.
    """
    inputs: dict[str, typing.Any] = dict(
        source_lengths=source_lengths,
        prompt=prompt,
        prompt_lengths=prompt_lengths,
        max_tokens=limits,
        constraints=constraints,
        capacity=capacity,
    )
    if isinstance(sampler, BeamSearch):
        best = generate_n_best(model, params, source, search=sampler, **inputs)
        return Made(best.tokens, best.lengths, best.log_probs, best.finished)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(seed, impl="threefry2x32"), places)
    made = generate(model, params, source, sampler=sampler, key=keys, **inputs)
    return Made(made.tokens[:, None], made.lengths[:, None], made.scores[:, None], made.finished[:, None])


def width_of(sampler: Decoding) -> int:
    """Hypotheses that are followed at once for each text."""
    return sampler.width if isinstance(sampler, BeamSearch) else 1


def traceable(sampler: Decoding, vocab_size: int) -> Decoding:
    """The checked sampler, each number as an array of one dtype: to jit, 1 and 1.0 are two kinds of argument."""
    if not isinstance(sampler, Greedy | Sampling | BeamSearch):
        raise ValueError(f"expected Greedy(), Sampling(…) or BeamSearch(…), got {sampler!r}")
    if isinstance(sampler, Greedy):
        return sampler
    numbers = ("alpha",) if isinstance(sampler, BeamSearch) else [field.name for field in dataclasses.fields(Sampling)]
    if any(np.ndim(getattr(sampler, name)) for name in numbers):
        raise ValueError(f"expected one number for all texts in each field of the sampler, got {sampler!r}")
    if isinstance(sampler, BeamSearch):
        sampler.check(batch=1, vocab_size=vocab_size)
        return dataclasses.replace(sampler, alpha=jnp.float32(sampler.alpha))
    return sampler.as_arrays(batch=1)
