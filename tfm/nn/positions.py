"""Where a token stands: absolute encodings added to embeddings, rotations of queries and keys, biases on scores.

Every function takes positions as an argument and none assumes that they start at 0, so that a decode step, whose rows
stand at different places, uses the same code as training.
"""

import bisect
import functools
import math

import jax.numpy as jnp

from tfm.axes import Array, Float, Int


def sinusoidal(positions: Int[Array, "*B T"], dim: int, *, halves: bool = False) -> Float[Array, "*B T {dim}"]:
    """Sinusoidal encodings (Vaswani et al. 2017, section 3.5), in float32.

    Entry 2i is sin(position / 10000^(2i / D)) and entry 2i + 1 the cosine of the same angle. With `halves`, as in
    Marian and many other checkpoints, all the sines come first, then all the cosines.
    """
    angles = _angles(positions, dim, base=10_000.0)
    pair = (jnp.sin(angles), jnp.cos(angles))
    if halves:
        return jnp.concatenate(pair, axis=-1)
    return jnp.stack(pair, axis=-1).reshape(*positions.shape, dim)


def rotate(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "*B T"],
    *,
    base: float = 10_000.0,
    halves: bool = False,
) -> Float[Array, "B T N H"]:
    """Rotary position embedding (Su et al. 2021, eq. 34): rotates pairs of entries by position · base^(-2i / H).

    Queries and keys are both rotated; a dot product of the two then depends on the difference of their positions only.

    Args:
        x: queries or keys.
        positions: of each token; one row of positions may serve all batch rows.
        base: of the geometric series of frequencies.
        halves: pair entry i with i + H/2 (as in GPT-NeoX and Llama checkpoints) and not 2i with 2i + 1 (the paper).
    """
    angles = _angles(positions, x.shape[-1], base=base)[..., None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    x32 = x.astype(jnp.float32)
    if halves:
        first, second = jnp.split(x32, 2, axis=-1)
    else:
        first, second = x32[..., 0::2], x32[..., 1::2]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    if halves:
        return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
    return jnp.stack(rotated, axis=-1).reshape(x.shape).astype(x.dtype)


def _angles(positions: Int[Array, "*B T"], dim: int, *, base: float) -> Float[Array, "*B T {dim//2}"]:
    """position · base^(-2i / dim) for i = 0 … dim/2 - 1."""
    frequencies = jnp.exp(jnp.arange(0, dim, 2, dtype=jnp.float32) * (-math.log(base) / dim))
    return positions[..., None].astype(jnp.float32) * frequencies.reshape((1,) * positions.ndim + (-1,))


def relative_bucket(
    offsets: Int[Array, "*B Q M"], *, bidirectional: bool, num_buckets: int, max_distance: int
) -> Int[Array, "*B Q M"]:
    """The bucket of each offset (key position - query position) in T5's relative bias (Raffel et al. 2020, sec. 2.1).

    Half of the buckets are exact, one a distance; the other half grow logarithmically up to `max_distance`, from where
    on all distances share the last. An encoder (`bidirectional`) splits them between past and future; in a decoder the
    future is masked anyway and shares bucket 0.
    """
    distance, first = jnp.maximum(-offsets, 0), jnp.zeros_like(offsets)
    if bidirectional:
        num_buckets //= 2
        distance, first = jnp.abs(offsets), jnp.where(offsets > 0, num_buckets, 0)
    starts = jnp.array(_bucket_starts(num_buckets, max_distance), offsets.dtype)
    return first + jnp.searchsorted(starts, distance, side="right", method="compare_all")


@functools.lru_cache(maxsize=16)
def _bucket_starts(num_buckets: int, max_distance: int) -> tuple[int, ...]:
    """The least distance of each bucket but the first, which begins at 0.

    With e exact buckets and s others, bucket e + k begins at distance e · (max_distance / e)^(k / s). Whole numbers
    decide it, because some boundaries are whole themselves, and a logarithm that is rounded down would miss them.
    """
    e = num_buckets // 2
    s = num_buckets - e

    def start(k: int) -> int:
        reached = e**s * max_distance**k
        return bisect.bisect_left(range(max_distance), True, key=lambda distance: distance**s * e**k >= reached)

    return (*range(1, e), *(start(k) for k in range(s)))


def alibi_slopes(num_heads: int) -> Float[Array, "N"]:
    """The slope of each head (Press et al. 2022, section 3): 2^(-8 / N), 2^(-16 / N), … for N a power of two.

    For other N the slopes of the next lower power of two come first, then every second one of the next higher power.
    """

    def geometric(n: int) -> list[float]:
        return [2 ** (-8 * (i + 1) / n) for i in range(n)]

    lower = 2 ** math.floor(math.log2(num_heads))
    slopes = geometric(lower) + geometric(2 * lower)[0::2][: num_heads - lower]
    return jnp.array(slopes, jnp.float32)


def alibi_bias(offsets: Int[Array, "*B Q M"], num_heads: int) -> Float[Array, "*B N Q M"]:
    """-slope · |key position - query position|; symmetric, so that it serves an encoder too."""
    distance = jnp.abs(offsets).astype(jnp.float32)[..., None, :, :]
    slopes = alibi_slopes(num_heads).reshape((1,) * (offsets.ndim - 2) + (num_heads, 1, 1))
    return -slopes * distance
