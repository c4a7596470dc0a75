"""Who may attend to whom. Boolean, True = may attend; a mask ends in [queries, keys]."""

import jax.numpy as jnp

from tfm.axes import Array, Bool, Int


def padding_mask(lengths: Int[Array, "B"], length: int) -> Bool[Array, "B 1 M"]:
    """Keys that are real: padding is on the right.

    Example:
        >>> padding_mask(jnp.array([2, 3]), 3).astype(int).tolist()
        [[[1, 1, 0]], [[1, 1, 1]]]
    """
    return (jnp.arange(length) < lengths[:, None])[:, None, :]


def causal_mask(query_positions: Int[Array, "*B Q"], length: int) -> Bool[Array, "*B Q M"]:
    """Keys 0 … length-1 that do not come after the query.

    Rows of a cache stand at different positions, hence `query_positions` and not a triangle of fixed size:

        >>> causal_mask(jnp.array([0, 1, 2]), 3).astype(int).tolist()    # training: the triangle
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
        >>> causal_mask(jnp.array([[1], [2]]), 4).astype(int).tolist()   # a decode step of two rows
        [[[1, 1, 0, 0]], [[1, 1, 1, 0]]]
    """
    return jnp.arange(length) <= query_positions[..., None]
