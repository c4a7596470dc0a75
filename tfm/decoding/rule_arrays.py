"""Rules as arrays: what a caller gives for a field of `Constraints` is checked, and becomes a value for each row."""

import typing

import jax
import jax.numpy as jnp
import numpy as np

from tfm.axes import Array
from tfm.checks import cast, real_numbers


def as_array(value: typing.Any) -> Array | np.ndarray:
    """JAX's arrays, tracers too, as they are; anything else as NumPy's."""
    return value if isinstance(value, jax.Array) else np.asarray(value)


def known_value(value: typing.Any) -> np.ndarray | None:
    """The value, unless there is none, or it comes only when a caller's jit runs, or lies with other processes."""
    if value is None or isinstance(value, jax.core.Tracer) or not getattr(value, "is_fully_addressable", True):
        return None
    return np.asarray(value)


def for_each_row(value: Array | np.ndarray, batch: int, ndim: int) -> Array | np.ndarray:
    """One value for each row; NumPy's stays NumPy's, which compiles nothing."""
    shape = (batch, *value.shape[-ndim:]) if ndim else (batch,)
    return jnp.broadcast_to(value, shape) if isinstance(value, jax.Array) else np.broadcast_to(value, shape)


def checked_numbers(
    name: str, value: typing.Any, batch: int, dtype: typing.Any, holds: typing.Any, wording: str
) -> Array | np.ndarray:
    """Numbers, [B]. Raises ValueError where one is known not to be as `wording` says, which `holds` tells."""
    numbers, kind = real_numbers(value), jnp.integer if dtype is np.int32 else jnp.number
    if numbers is None or not jnp.issubdtype(numbers.dtype, kind):
        raise ValueError(f"expected {name} as {wording}, one or {batch}, one a row, got {value!r}")
    if numbers.shape not in ((), (batch,)):
        raise ValueError(
            f"expected {name} as {wording}, one or {batch}, one a row, got {numbers.dtype} of shape {numbers.shape}"
        )
    known = known_value(numbers)
    if known is not None and not np.all(holds(known)):
        raise ValueError(f"expected {name} {wording}, got {value}")
    return for_each_row(cast(numbers, dtype), batch, 0)


def checked_phrases(name: str, value: typing.Any, batch: int, vocab_size: int) -> Array | np.ndarray:
    """Phrases of ids, [B, P, M]. Raises ValueError for what is none, as far as values are known; `name` names them."""
    try:
        phrases = as_array(value)
    except ValueError as error:  # phrases of unequal lengths
        raise ValueError(f"expected {name} as whole numbers [P, M], padded with -1, got {error}") from error
    if (
        phrases.ndim not in (2, 3)
        or (phrases.ndim == 3 and phrases.shape[0] != batch)
        or not jnp.issubdtype(phrases.dtype, jnp.integer)
    ):
        raise ValueError(
            f"expected {name} as whole numbers [P, M] or [{batch}, P, M], padded with -1, "
            f"got {phrases.dtype} of shape {phrases.shape}"
        )
    known = known_value(phrases)
    if known is not None:
        wrong = known[(known < -1) | (known >= vocab_size)]
        if wrong.size:
            raise ValueError(f"expected ids from 0 to {vocab_size - 1} in {name}, and -1 behind them, got {wrong[0]}")
        if np.any((known[..., :-1] < 0) & (known[..., 1:] >= 0)):
            raise ValueError(f"expected -1 only behind the ids of {name}, got one before an id")
    return for_each_row(phrases.astype(np.int32), batch, 2)


def check_against_each_other(known: dict[str, np.ndarray], end_id: int) -> None:
    """Raises ValueError for rules that no output could follow."""
    least, most = known.get("min_ratio"), known.get("max_ratio")
    if least is not None and most is not None and np.any(least > most):
        raise ValueError(f"expected a max_ratio of at least min_ratio, got {most.min()} and {least.max()}")
    required = known.get("required_phrases")
    if required is None:
        return
    if np.any(required == end_id):
        raise ValueError(f"expected required_phrases without the end token {end_id}, got it in one of them")
    banned = known.get("banned_tokens")
    if banned is not None:
        forbidden = np.take_along_axis(banned[:, None], np.maximum(required, 0), axis=2) & (required >= 0)
        if forbidden.any():
            raise ValueError(f"expected required_phrases without banned tokens, got {required[forbidden][0]} in one")
    if (banned := known.get("banned_phrases")) is not None:
        for phrases in np.unique(np.concatenate([_joined(required), _joined(banned)], axis=1), axis=0):
            ours, theirs = np.split(phrases, [required[0].size])
            texts = [[t for t in phrase if t >= 0] for phrase in ours.reshape(required.shape[1:]).tolist()]
            for phrase in theirs.reshape(banned.shape[1:]).tolist():
                phrase = [t for t in phrase if t >= 0]
                starts = [(text, i) for text in texts for i in range(len(text) - len(phrase) + 1) if phrase]
                if inside := [text for text, i in starts if text[i : i + len(phrase)] == phrase]:
                    raise ValueError(f"expected required_phrases without banned ones, got {phrase} in {inside[0]}")


def _joined(phrases: np.ndarray) -> np.ndarray:
    return phrases.reshape(len(phrases), -1)
