import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfm.nn.masks import Visible, causal_mask, padding_mask

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=4)


@given(LENGTHS)
def test_padding_is_on_the_right(lengths):
    mask = np.asarray(padding_mask(jnp.array(lengths, jnp.int32), 6))
    assert mask.dtype == bool
    assert mask.tolist() == [[[key < length for key in range(6)]] for length in lengths]


@given(st.lists(st.lists(st.integers(0, 7), min_size=2, max_size=2), min_size=1, max_size=3))
def test_causal_shows_a_query_its_own_position_and_those_before(positions):
    mask = np.asarray(causal_mask(jnp.array(positions, jnp.int32), 6))
    assert mask.tolist() == [[[key <= at for key in range(6)] for at in row] for row in positions]


@given(
    lengths=st.none() | st.lists(st.integers(0, 5), min_size=2, max_size=2),
    positions=st.none() | st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=2, max_size=2),
    causal=st.booleans(),
)
def test_dense_is_both_conditions_together(lengths, positions, causal):
    visible = Visible(
        key_lengths=None if lengths is None else jnp.array(lengths, jnp.int32),
        query_positions=None if positions is None else jnp.array(positions, jnp.int32),
        causal=causal,
    )
    mask = visible.dense(3, 5)
    if lengths is None and not causal:
        assert mask is None
        return
    mask = np.broadcast_to(np.asarray(mask), (2, 3, 5))
    for row, query, key in np.ndindex(2, 3, 5):
        real = lengths is None or key < lengths[row]
        at = query if positions is None else positions[row][query]
        assert mask[row, query, key] == (real and (not causal or key <= at))


def test_visible_is_a_pytree_whose_causality_is_static():
    visible = Visible(key_lengths=jnp.array([1, 2]), causal=True)
    assert len(jax.tree.leaves(visible)) == 1
    traced = jax.jit(lambda visible: visible.dense(2, 3))(visible)
    np.testing.assert_array_equal(traced, visible.dense(2, 3))


@pytest.mark.parametrize("length", [0, 1])
def test_an_empty_or_single_key_is_no_special_case(length):
    assert padding_mask(jnp.array([0, 1]), length).shape == (2, 1, length)
