"""The largest of many numbers, without sorting them."""

import jax
import jax.numpy as jnp

from tfm.axes import Array, Float, Int

_CHUNK = 128


def top_k(x: Float[Array, "*B V"], k: int) -> tuple[Float[Array, "*B k"], Int[Array, "*B k"]]:
    """The k largest of each row, largest first, and where they are; of equal ones the first. As `jax.lax.top_k`.

    XLA's CPU backend goes through a row one number at a time. Here that happens to few: the k largest lie in the k
    chunks with the largest maxima, and maxima of chunks are taken many at a time.
    """
    size = x.shape[-1]
    num_chunks = -(-size // _CHUNK)
    if num_chunks <= 2 * k:
        values, indices = jax.lax.top_k(x, k)
        return values, indices
    rows = x.reshape(-1, size)
    padded = jnp.pad(rows, ((0, 0), (0, num_chunks * _CHUNK - size)), constant_values=-jnp.inf)
    chunks = padded.reshape(-1, num_chunks, _CHUNK)
    _, best_chunks = jax.lax.top_k(chunks.max(axis=-1), k)
    best_chunks = jnp.sort(best_chunks, axis=-1)  # so that of equal numbers the first is first here, too
    candidates = jnp.take_along_axis(chunks, best_chunks[..., None], axis=1).reshape(-1, k * _CHUNK)
    largest, places = jax.lax.top_k(candidates, k)
    indices = jnp.take_along_axis(best_chunks, places // _CHUNK, axis=-1) * _CHUNK + places % _CHUNK
    shape = (*x.shape[:-1], k)
    return largest.reshape(shape), indices.reshape(shape)
