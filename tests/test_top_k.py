import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tolerances import assert_same_bits

from tfm.decoding.top_k import top_k


def assert_as_jax(x: np.ndarray, k: int) -> None:
    for ours, expected in zip(top_k(jnp.asarray(x), k), jax.lax.top_k(jnp.asarray(x), k), strict=True):
        assert_same_bits(ours, expected)


@pytest.mark.parametrize("size", [1, 127, 128, 129, 513, 1000, 32_000])
@pytest.mark.parametrize("k", [1, 2, 7])
def test_the_largest_of_many_are_those_that_jax_finds(size, k):
    if k <= size:
        x = np.random.default_rng(size).standard_normal((2, 3, size)).astype(np.float32)
        assert_as_jax(x, k)
        assert_as_jax(x[0, 0], k)


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 5))
def test_of_equals_the_first_comes_first(seed, k, kinds):
    """Few different numbers among 1,300: nearly all are equal to others, infinities among them."""
    numbers = np.array([-np.inf, -1, 0, 1, np.inf], np.float32)[:kinds]
    x = np.random.default_rng(seed).choice(numbers, (2, 1300))
    assert_as_jax(x, k)


def test_a_row_of_nothing_but_minus_infinity_gives_its_first_places():
    values, indices = top_k(jnp.full((1, 1300), -jnp.inf), 3)
    assert (values == -jnp.inf).all()
    assert indices.tolist() == [[0, 1, 2]]


def test_it_works_in_lower_precision_and_under_jit_and_vmap():
    x = jax.random.normal(jax.random.key(0), (4, 3, 900)).astype(jnp.bfloat16)
    expected = jax.lax.top_k(x, 3)
    for found in (jax.jit(top_k, static_argnums=1)(x, 3), jax.vmap(lambda row: top_k(row, 3))(x)):
        for ours, theirs in zip(found, expected, strict=True):
            assert_same_bits(ours.astype(jnp.float32), theirs.astype(jnp.float32))
