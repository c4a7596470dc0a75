"""`prefill` and `decode_step`: the two jit-compiled functions that all decoding is made of.

Both return `(logits, cache)`, the logits being of the next token; the cache is a value, passed in and returned, so two
continuations may branch from one prefill. Both work inside a caller's own `jax.jit`. They compile once for each model
and set of shapes.
"""

import functools
import typing
from collections.abc import Sequence
from typing import SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np

from tfm.axes import Array, Float, Int
from tfm.checks import checked_whole_number
from tfm.nn.cache import AnyCache, Cache, RecurrentCache
from tfm.nn.models import Model
from tfm.nn.params import Params


def prefill(
    model: Model,
    params: Params,
    source: Int[Array | np.ndarray, "B S"] | Sequence[Sequence[int]],
    source_lengths: Int[Array | np.ndarray, "B"] | Sequence[int] | None = None,
    prompt: Int[Array | np.ndarray, "B T"] | Sequence[Sequence[int]] | None = None,
    prompt_lengths: Int[Array | np.ndarray, "B"] | Sequence[int] | None = None,
    *,
    capacity: SupportsIndex,
) -> tuple[Float[Array, "B 1 V"], AnyCache]:
    """Reads source and prompt, once, and makes the cache.

    Args:
        model: from `tfm.nn.models.build_model`.
        params: its parameters.
        source: ids, padded on the right.
        source_lengths: real tokens of each source; None: all are real.
        prompt: the decoder's first tokens, starting with the start token, padded on the right; None: the start token.
        prompt_lengths: real tokens of each prompt, at least 1; None: all are real.
        capacity: the most target tokens, prompt included, that the cache will hold.

    Returns:
        The logits after each row's last prompt token, and the cache.

    Raises:
        ValueError: not whole numbers of these shapes, lengths that are not within the arrays, more tokens than the
            model accepts, or real tokens that are no ids of its vocabularies. Values that are only known when a
            caller's jit runs cannot be checked; there an id out of range counts as the nearest.
    """
    number = checked_whole_number("capacity", capacity)
    inputs = complete_inputs(model, source, source_lengths, prompt, prompt_lengths)
    return _prefill(model, params, *inputs, capacity=number)


def complete_inputs(
    model: Model,
    source: typing.Any,
    source_lengths: typing.Any,
    prompt: typing.Any,
    prompt_lengths: typing.Any,
    *,
    prompt_name: str = "prompt",
) -> tuple[Int[Array, "B S"], Int[Array, "B"], Int[Array, "B T"], Int[Array, "B"]]:
    """Source, its lengths, prompt, its lengths, checked and as arrays: what was left out is traced as what was given.

    Raises:
        ValueError: as `prefill`.
    """
    source = _whole_numbers("source", "B, S", source)
    batch = source.shape[0]
    if batch == 0:
        raise ValueError("expected at least 1 source, got 0")
    if prompt is None:
        prompt = np.full((batch, 1), model.config.start_id, np.int32)
    prompt = _whole_numbers(prompt_name, "B, T", prompt)
    if prompt.shape[0] != batch:
        raise ValueError(f"expected a {prompt_name} for each of {batch} sources, got {prompt.shape[0]}")
    source_lengths = _lengths("source", source_lengths, source, least=0)
    prompt_lengths = _lengths(prompt_name, prompt_lengths, prompt, least=1)
    _check_ids("source", source, source_lengths, model.config.source_vocab_size)
    _check_ids(prompt_name, prompt, prompt_lengths, model.config.target_vocab_size)
    return jnp.asarray(source), jnp.asarray(source_lengths), jnp.asarray(prompt), jnp.asarray(prompt_lengths)


def teacher_forced(model: Model, target: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """What the decoder reads while each token of a target is predicted: the start token, then the ones before it."""
    starts = jnp.full((target.shape[0], 1), model.config.start_id, target.dtype)
    return jnp.concatenate([starts, target[:, :-1]], axis=1)


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
) -> tuple[Array, AnyCache]:
    inputs = (source, source_lengths, prompt, prompt_lengths, capacity)
    return typing.cast(tuple[Array, AnyCache], model.apply({"params": params}, *inputs, method="prefill"))


def decode_step(
    model: Model,
    params: Params,
    tokens: Int[Array | np.ndarray, "B T"] | Sequence[Sequence[int]],
    cache: AnyCache,
    *,
    donate_cache: bool = False,
) -> tuple[Float[Array, "B T V"], AnyCache]:
    """Runs the next T ≥ 1 tokens of every row.

    Args:
        model: the model of the prefill.
        params: its parameters.
        tokens: ids that follow what the cache holds. The caller keeps the rows' lengths + T within the cache's
            capacity, and a JAX array's ids within the vocabulary: both lie on the device, and looking at them here
            would stall every step.
        cache: from `prefill` or an earlier step.
        donate_cache: lets XLA write into the cache's memory instead of copying it; the cache passed in must then not
            be used again.

    Returns:
        The logits after each of the tokens, and the cache with the tokens in it.

    Raises:
        ValueError: not whole numbers [B, T], tokens for another number of rows, none, more than the cache can hold, or
            a NumPy array or list with an id that the vocabulary does not have.
    """
    if not isinstance(cache, Cache | RecurrentCache):
        raise ValueError(f"expected the cache of a prefill or of an earlier step, got {cache!r}")
    tokens = _whole_numbers("tokens", "B, T", tokens)
    rows = cache.lengths.shape[0] * cache.width
    if tokens.shape[0] != rows:
        raise ValueError(f"expected tokens for the cache's {rows} rows, got {tokens.shape[0]}")
    if not 1 <= tokens.shape[1] <= cache.capacity:
        raise ValueError(f"expected 1 to {cache.capacity} tokens (the cache's capacity), got {tokens.shape[1]}")
    if isinstance(tokens, np.ndarray):
        _check_ids("token", tokens, np.full(len(tokens), tokens.shape[1]), model.config.target_vocab_size)
    step = _decode_step_donating if donate_cache else _decode_step
    return step(model, params, tokens, cache)


def _apply_decode_step(model: Model, params: Params, tokens: Array, cache: AnyCache) -> tuple[Array, AnyCache]:
    return typing.cast(tuple[Array, AnyCache], model.apply({"params": params}, tokens, cache, method="decode_step"))


_decode_step = jax.jit(_apply_decode_step, static_argnames="model")
_decode_step_donating = jax.jit(_apply_decode_step, static_argnames="model", donate_argnames="cache")


def _whole_numbers(what: str, axes: str, x: typing.Any) -> Array | np.ndarray:
    """x, if it is an array of whole numbers with these axes; a list becomes a NumPy array."""
    if not isinstance(x, jax.Array | np.ndarray):
        try:
            x = np.asarray(x)
        except ValueError as error:  # rows of unequal lengths
            raise ValueError(f"expected {what} as whole numbers [{axes}], got {error}") from error
    if x.ndim != len(axes.split(", ")) or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"expected {what} as whole numbers [{axes}], got {x.dtype} of shape {x.shape}")
    return x


def _lengths(what: str, lengths: typing.Any, ids: Array | np.ndarray, *, least: int) -> Array | np.ndarray:
    """Checked lengths, as far as their values are known."""
    batch, longest = ids.shape
    if longest < least:
        raise ValueError(f"expected a {what} of at least {least} tokens, got {longest}")
    if lengths is None:
        return np.full(batch, longest, np.int32)
    lengths = _whole_numbers(f"{what} lengths", "B", lengths)
    if lengths.shape != (batch,):
        raise ValueError(f"expected {what} lengths of shape ({batch},), got {lengths.shape}")
    known = _known(lengths)
    if known is not None and not (least <= known.min() and known.max() <= longest):
        raise ValueError(f"expected {what} lengths from {least} to {longest}, got {known.min()} to {known.max()}")
    return lengths.astype(jnp.int32)


def _check_ids(what: str, ids: Array | np.ndarray, lengths: Array | np.ndarray, vocab_size: int) -> None:
    """Raises ValueError for a real token that the vocabulary does not have, as far as the values are known."""
    known_ids, known_lengths = _known(ids), _known(lengths)
    if known_ids is None or known_lengths is None:
        return
    real = known_ids[np.arange(ids.shape[1])[None] < known_lengths[:, None]]
    wrong = real[(real < 0) | (real >= vocab_size)]
    if wrong.size:
        raise ValueError(f"expected {what} ids from 0 to {vocab_size - 1}, got {wrong[0]}")


def _known(x: Array | np.ndarray) -> np.ndarray | None:
    """The values, unless they come only when a caller's jit runs, or lie with other processes."""
    if isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True):
        return None
    return np.asarray(x)
