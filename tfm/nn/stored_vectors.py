"""What vectors lie in between decode steps: floats, or eight bits an entry with a scale for each vector."""

import typing
from typing import Literal

import flax.struct
import jax.numpy as jnp

from tfm.axes import Array, Float, Int8
from tfm.nn.products import quantize

CacheDtype = Literal["float32", "bfloat16", "int8"]
"""What keys and values, or a recurrent encoder's states, lie in between steps."""


@typing.no_type_check  # pytrees are also built from shapes, specs and other non-arrays
@flax.struct.dataclass
class Int8Vectors:
    """Vectors in eight bits an entry: entry h of a vector is values[h] · its scale, which is max |vector| / 127.

    A scale for each vector, so of keys for each row, head and position: what is written does not touch what was written
    before.
    """

    values: Int8[Array, "*B M H"]
    scales: Float[Array, "*B M 1"]


def check_cache_dtype(dtype: str) -> None:
    """Raises ValueError for a dtype that no cache has."""
    if dtype not in typing.get_args(CacheDtype):
        raise ValueError(f"expected a cache in 'float32', 'bfloat16' or 'int8', got {dtype!r}")


def stored(x: Float[Array, "*B M H"], dtype: CacheDtype) -> Float[Array, "*B M H"] | Int8Vectors:
    """Floats, as a cache of that dtype holds them."""
    if dtype != "int8":
        return x.astype(dtype)
    values, scales = quantize(x)
    return Int8Vectors(values, scales[..., None])


def no_vectors(shape: tuple[int, ...], dtype: CacheDtype) -> Array | Int8Vectors:
    """Zeros of that shape, as a cache of that dtype holds them."""
    if dtype == "int8":
        return Int8Vectors(jnp.zeros(shape, jnp.int8), jnp.zeros((*shape[:-1], 1), jnp.float32))
    return jnp.zeros(shape, dtype)


def vector_bytes(size: int, dtype: CacheDtype) -> int:
    """Of one vector of `size` entries, its scale counted."""
    return size + jnp.dtype("float32").itemsize if dtype == "int8" else size * jnp.dtype(dtype).itemsize
