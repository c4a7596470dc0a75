"""What callers give, of whatever type: whole numbers, numbers and lists, or something else that is to be refused."""

import math
import numbers
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tfm.axes import Array


def whole_number(value: object) -> int | None:
    """A whole number of any type, NumPy's too, but no bool; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def checked_whole_number(what: str, value: object) -> int:
    """Raises ValueError for what is no whole number; `what` names it."""
    number = whole_number(value)
    if number is None:
        raise ValueError(f"expected a whole number as {what}, got {value!r}")
    return number


def keep_whole_numbers(settings: object, *names: str) -> None:
    """Makes Python's of the whole numbers in these fields of a frozen dataclass, which decide what is compiled.

    Anything else stays as it is, to be refused when the settings are checked.
    """
    for name in names:
        if (number := whole_number(getattr(settings, name))) is not None:
            object.__setattr__(settings, name, number)


def real_numbers(value: Any) -> Array | np.ndarray | None:
    """Numbers as an array, whole numbers beyond 64 bits as floats; None for anything else, bools too."""
    try:
        array = value if isinstance(value, jax.Array) else np.asarray(value)
    except ValueError:  # rows of unequal lengths
        return None
    if isinstance(array, np.ndarray) and array.dtype == object:
        if not all(isinstance(one, numbers.Real) for one in array.flat):
            return None
        array = np.array([_nearest_float(one) for one in array.flat]).reshape(array.shape)
    is_real = jnp.issubdtype(array.dtype, jnp.integer) or jnp.issubdtype(array.dtype, jnp.floating)
    return array if is_real else None


def cast(array: Array | np.ndarray, dtype: Any) -> Array | np.ndarray:
    """The same numbers in another dtype, infinity for those that it has no room for, without a warning."""
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def several(what: str, given: Any) -> list[Any]:
    """A list of what came. Raises ValueError for a single one; `what` names them."""
    if isinstance(given, str) or not np.iterable(given):
        raise ValueError(f"expected several {what}, got {given!r}; put one into a list")
    return list(given)


def _nearest_float(number: Any) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def check_length(what: str, length: int, most: int, least: int = 0) -> None:
    """Raises ValueError for a number of tokens that a model does not accept; `what` names what has them."""
    if length > most:
        raise ValueError(f"expected a {what} of at most {most} tokens, got {length}")
    if length < least:
        raise ValueError(f"expected a {what} of at least {least} tokens, got {length}")
