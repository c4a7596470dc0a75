"""A padded batch of requests in compiled calls, however its tokens are chosen."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from tfm.axes import Array, Bool, Float, Int, KeyArray
from tfm.config import ModelConfig
from tfm.decoding.beam import BeamSearch
from tfm.decoding.constraints import Constraints
from tfm.decoding.generate import generate, generate_n_best
from tfm.decoding.mbr import MinimumBayesRisk
from tfm.decoding.sampling import Greedy, Sampler, Samples, Sampling
from tfm.decoding.stepping import Generation
from tfm.decoding.stream import stream
from tfm.nn.models import Model
from tfm.nn.params import Params

Decoding = Sampler | Samples | BeamSearch | MinimumBayesRisk
"""How answers are chosen."""


class Made(NamedTuple):
    """The hypotheses of each row, the best first; what is missing has a log-probability of -inf."""

    tokens: Int[Array, "B R T"]
    token_log_probs: Float[Array, "B R T"]
    lengths: Int[Array, "B R"]
    log_probs: Float[Array, "B R"]
    scores: Float[Array, "B R"]
    """What ranks them."""
    finished: Bool[Array, "B R"]
    unmet: Bool[Array, "B R"]


@functools.partial(jax.jit, static_argnames=("model", "capacity"))
def generate_rows(
    model: Model,
    params: Params,
    source: Int[Array, "B S"],
    source_lengths: Int[Array, "B"],
    prompt: Int[Array, "B T"],
    prompt_lengths: Int[Array, "B"],
    limits: Int[Array, "B"],
    seeds: Array,
    places: Int[Array, "B"],
    sampler: Sampler | Samples | BeamSearch,
    constraints: Constraints | None = None,
    *,
    capacity: int,
) -> Made:
    """`generate` or `generate_n_best`, with a random key for each row from its seed and place.

    One function for all models, so that equal ones share what is compiled.
    """
    inputs: dict[str, Any] = dict(
        source_lengths=source_lengths,
        prompt=prompt,
        prompt_lengths=prompt_lengths,
        max_tokens=limits,
        constraints=constraints,
        key=_keys(seeds, places),
        capacity=capacity,
    )
    if isinstance(sampler, BeamSearch | Samples):
        best = generate_n_best(model, params, source, search=sampler, **inputs)
        return Made(
            best.tokens, best.token_log_probs, best.lengths, best.log_probs, best.scores, best.finished, best.unmet
        )
    return _one_a_row(generate(model, params, source, sampler=sampler, **inputs))


def stream_rows(
    model: Model,
    params: Params,
    source: Int[np.ndarray, "B S"],
    source_lengths: Int[np.ndarray, "B"],
    prompt: Int[np.ndarray, "B T"],
    prompt_lengths: Int[np.ndarray, "B"],
    limits: Int[np.ndarray, "B"],
    seeds: np.ndarray,
    places: Int[np.ndarray, "B"],
    sampler: Sampler,
    constraints: Constraints | None = None,
    *,
    capacity: int,
) -> Iterator[Made]:
    """What `generate_rows` comes to, after each token."""
    states = stream(
        model,
        params,
        source,
        source_lengths=source_lengths,
        prompt=prompt,
        prompt_lengths=prompt_lengths,
        max_tokens=limits,
        sampler=sampler,
        key=_keys(seeds, places),
        constraints=constraints,
        capacity=capacity,
    )
    return map(_one_a_row, states)


@jax.jit
def _keys(seeds: Array, places: Int[Array, "B"]) -> KeyArray:
    each = jax.vmap(functools.partial(jax.random.key, impl="threefry2x32"))(seeds)
    return jax.vmap(jax.random.fold_in)(each, places)


def _one_a_row(made: Generation) -> Made:
    fields = (made.tokens, made.token_log_probs, made.lengths, made.scores, made.scores, made.finished, made.unmet)
    return Made(*(x[:, None] for x in fields))


def width_of(sampler: Decoding) -> int:
    """Hypotheses that are followed at once for each text."""
    if isinstance(sampler, MinimumBayesRisk):
        return sampler.num_samples
    if isinstance(sampler, Samples):
        return sampler.num_samples
    return sampler.width if isinstance(sampler, BeamSearch) else 1


def traceable(sampler: Decoding, config: ModelConfig) -> Decoding:
    """The checked sampler, each number as an array of one dtype: to jit, 1 and 1.0 are two kinds of argument.

    Raises:
        ValueError: a setting out of its range or not for this model, or not one number for all texts.
    """
    if isinstance(sampler, Greedy):
        return sampler
    if not isinstance(sampler, Sampling | Samples | BeamSearch | MinimumBayesRisk):
        raise ValueError(
            f"expected Greedy(), Sampling(…), BeamSearch(…), Samples(…) or MinimumBayesRisk(…), got {sampler!r}"
        )
    drawn = getattr(sampler, "sampler", sampler)
    if any(np.ndim(value) for value in jax.tree.leaves(drawn)):
        raise ValueError(f"expected one number for all texts in each field of the sampler, got {sampler!r}")
    if isinstance(sampler, Sampling):
        return sampler.as_arrays(batch=1)
    if isinstance(sampler, BeamSearch):
        sampler.check(1, config)
        return sampler.as_arrays()
    sampler.check()
    return dataclasses.replace(sampler, sampler=sampler.sampler.as_arrays(batch=1))
