"""`prefill` and `decode_step`: the two jit-compiled functions that all decoding is made of.

Both return `(logits, cache)`, the logits being of the next token; the cache is a value, passed in and returned, so two
continuations may branch from one prefill. Both work inside a caller's own `jax.jit`. They compile once for each model
and set of shapes.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np

from tfm.axes import Array, Float, Int
from tfm.nn.cache import Cache
from tfm.nn.params import Params
from tfm.nn.transformer import Model


def prefill(
    model: Model,
    params: Params,
    source: Int[Array | np.ndarray, "B S"],
    source_lengths: Int[Array | np.ndarray, "B"] | None = None,
    prompt: Int[Array | np.ndarray, "B T"] | None = None,
    prompt_lengths: Int[Array | np.ndarray, "B"] | None = None,
    *,
    capacity: int,
) -> tuple[Float[Array, "B 1 V"], Cache]:
    """Reads source and prompt, once, and makes the cache.

    Args:
        model: from `tfm.nn.transformer.build_model`.
        params: its parameters.
        source: ids, padded on the right.
        source_lengths: real tokens of each source; None: all are real.
        prompt: the decoder's first tokens, starting with the start token, padded on the right; None: the start token.
        prompt_lengths: real tokens of each prompt, at least 1; None: all are real.
        capacity: the most target tokens, prompt included, that the cache will hold.

    Returns:
        The logits after each row's last prompt token, and the cache.

    Raises:
        ValueError: lengths that are not within the arrays, or more tokens than the model accepts.
    """
    inputs = complete_inputs(model, source, source_lengths, prompt, prompt_lengths)
    return _prefill(model, params, *inputs, capacity=capacity)


def complete_inputs(
    model: Model,
    source: Int[Array | np.ndarray, "B S"],
    source_lengths: Int[Array | np.ndarray, "B"] | None,
    prompt: Int[Array | np.ndarray, "B T"] | None,
    prompt_lengths: Int[Array | np.ndarray, "B"] | None,
) -> tuple[Int[Array, "B S"], Int[Array, "B"], Int[Array, "B T"], Int[Array, "B"]]:
    """Source, its lengths, prompt, its lengths, checked and as arrays: what was left out is traced as what was given.

    Raises:
        ValueError: as `prefill`.
    """
    batch = source.shape[0]
    if batch == 0:
        raise ValueError("expected at least 1 source, got 0")
    if prompt is None:
        prompt = np.full((batch, 1), model.config.start_id, np.int32)
    if prompt.shape[0] != batch:
        raise ValueError(f"expected a prompt for each of {batch} sources, got {prompt.shape[0]}")
    return (
        jnp.asarray(source),
        _lengths("source", source_lengths, source, least=0),
        jnp.asarray(prompt),
        _lengths("prompt", prompt_lengths, prompt, least=1),
    )


@functools.partial(jax.jit, static_argnames=("model", "capacity"))
def _prefill(
    model: Model,
    params: Params,
    source: Array,
    source_lengths: Array,
    prompt: Array,
    prompt_lengths: Array,
    *,
    capacity: int,
) -> tuple[Array, Cache]:
    inputs = (source, source_lengths, prompt, prompt_lengths, capacity)
    return typing.cast(tuple[Array, Cache], model.apply({"params": params}, *inputs, method="prefill"))


def decode_step(
    model: Model,
    params: Params,
    tokens: Int[Array | np.ndarray, "B T"],
    cache: Cache,
    *,
    donate_cache: bool = False,
) -> tuple[Float[Array, "B T V"], Cache]:
    """Runs the next T ≥ 1 tokens of every row.

    Args:
        model: the model of the prefill.
        params: its parameters.
        tokens: ids that follow what the cache holds. The caller keeps the rows' lengths + T within the cache's
            capacity: the lengths lie on the device, and looking at them here would stall every step.
        cache: from `prefill` or an earlier step.
        donate_cache: lets XLA write into the cache's memory instead of copying it; the cache passed in must then not
            be used again.

    Returns:
        The logits after each of the tokens, and the cache with the tokens in it.

    Raises:
        ValueError: tokens for another number of rows, or more than the cache can hold.
    """
    if tokens.shape[0] != cache.lengths.shape[0]:
        raise ValueError(f"expected tokens for the cache's {cache.lengths.shape[0]} rows, got {tokens.shape[0]}")
    if tokens.shape[1] > cache.capacity:
        raise ValueError(f"expected at most {cache.capacity} tokens (the cache's capacity), got {tokens.shape[1]}")
    step = _decode_step_donating if donate_cache else _decode_step
    return step(model, params, tokens, cache)


def _apply_decode_step(model: Model, params: Params, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
    return typing.cast(tuple[Array, Cache], model.apply({"params": params}, tokens, cache, method="decode_step"))


_decode_step = jax.jit(_apply_decode_step, static_argnames="model")
_decode_step_donating = jax.jit(_apply_decode_step, static_argnames="model", donate_argnames="cache")


def _lengths(what: str, lengths: Array | np.ndarray | None, ids: Array | np.ndarray, *, least: int) -> Array:
    """Checked lengths. Values that are only known when a caller's jit runs cannot be checked."""
    batch, longest = ids.shape
    if longest < least:
        raise ValueError(f"expected a {what} of at least {least} tokens, got {longest}")
    if lengths is None:
        return jnp.full(batch, longest, jnp.int32)
    if lengths.shape != (batch,):
        raise ValueError(f"expected {what} lengths of shape ({batch},), got {lengths.shape}")
    if not isinstance(lengths, jax.core.Tracer):
        shortest_said, longest_said = np.min(np.asarray(lengths)), np.max(np.asarray(lengths))
        if shortest_said < least or longest_said > longest:
            raise ValueError(
                f"expected {what} lengths from {least} to {longest}, got {shortest_said} to {longest_said}"
            )
    return jnp.asarray(lengths, jnp.int32)
