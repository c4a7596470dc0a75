"""Who may attend to whom. Boolean, True = may attend; a mask ends in [queries, keys]."""

import functools
import operator
import typing

import flax.struct
import jax.numpy as jnp

from tfm.axes import Array, Bool, Int


def padding_mask(lengths: Int[Array, "B"], length: int) -> Bool[Array, "B 1 M"]:
    """Keys that are real: padding is on the right.

    Example:
        >>> padding_mask(jnp.array([2, 3]), 3).astype(int).tolist()
        [[[1, 1, 0]], [[1, 1, 1]]]
    """
    return (jnp.arange(length)[None] < lengths[:, None])[:, None, :]


def causal_mask(query_positions: Int[Array, "*B Q"], length: int) -> Bool[Array, "*B Q M"]:
    """Keys 0 … length-1 that do not come after the query.

    Rows of a cache stand at different positions, hence `query_positions` and not a triangle of fixed size:

        >>> causal_mask(jnp.array([0, 1, 2]), 3).astype(int).tolist()    # training: the triangle
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
        >>> causal_mask(jnp.array([[1], [2]]), 4).astype(int).tolist()   # a decode step of two rows
        [[[1, 1, 0, 0]], [[1, 1, 1, 0]]]
    """
    keys_at = jnp.arange(length).reshape((1,) * query_positions.ndim + (length,))
    return keys_at <= query_positions[..., None]


def ancestor_mask(ancestors: Int[Array, "B W C"], query_positions: Int[Array, "B T"]) -> Bool[Array, "B TW CW"]:
    """Of W hypotheses a row whose keys lie together, those that each sees: its ancestors', up to its own position.

    Query t·W + w is hypothesis w at position query_positions[t]; key c·W + v is what hypothesis v wrote at position c.

    Example:
        >>> ancestors = jnp.array([[[0, 1], [0, 0]]])    # both began as hypothesis 0; then they changed places
        >>> ancestor_mask(ancestors, jnp.array([[1]])).astype(int).tolist()
        [[[1, 0, 0, 1], [1, 0, 1, 0]]]
    """
    batch, width, capacity = ancestors.shape
    is_ancestor = ancestors[..., None] == jnp.arange(width)[None, None, None]
    past = causal_mask(query_positions, capacity)
    mask_BTWCW = is_ancestor[:, None] & past[:, :, None, :, None]
    return mask_BTWCW.reshape(batch, -1, capacity * width)


@typing.no_type_check  # a pytree is also built from shapes, specs and other non-arrays
@flax.struct.dataclass
class Visible:
    """Which keys each query may see, as data that a fused kernel understands without a dense mask."""

    key_lengths: Int[Array, "B"] | None = None
    """Keys from here on are padding. None: all are real."""
    query_positions: Int[Array, "B Q"] | None = None
    """Positions of causal queries that stand somewhere in a longer cache; keys stand at 0, 1, 2, …"""
    mask: Bool[Array, "B Q M"] | None = None
    """Any other restriction."""
    causal: bool = flax.struct.field(pytree_node=False, default=False)
    """A query sees no key after its own position; its position is its index unless `query_positions` says otherwise."""

    def dense(self, num_queries: int, num_keys: int) -> Bool[Array, "*B Q M"] | None:
        """The same as a boolean mask, with a leading axis of B or 1; None where everything is visible."""
        masks = [] if self.mask is None else [self.mask]
        if self.key_lengths is not None:
            masks.append(padding_mask(self.key_lengths, num_keys))
        if self.causal:
            positions = jnp.arange(num_queries)[None] if self.query_positions is None else self.query_positions
            masks.append(causal_mask(positions, num_keys))
        return functools.reduce(operator.and_, masks) if masks else None
