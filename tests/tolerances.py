"""How far apart two computations of the same numbers may lie, by the dtype that they compute in."""

import jax
import numpy as np

TOLERANCES = {
    "float32": 1e-5,
    # 8 bits of mantissa: a rounding is up to 2**-8 = 0.004 of a value, and a few of them add up on the way to a logit
    "bfloat16": 3e-2,
    # an entry is off by up to max |vector| / 254 = 0.004 of the largest, and small entries by as much
    "int8": 5e-2,
}
"""Largest difference, as an absolute and as a relative one: |a - b| ≤ tolerance · (1 + |b|)."""


def assert_close(actual, expected, *, dtype: str = "float32", times: float = 1.0) -> None:
    """Raises AssertionError where the two differ by more than `times` the tolerance of `dtype`, or in shape.

    `times` is for sums of many terms and for gradients; its use says why.
    """
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    tolerance = times * TOLERANCES[dtype]
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def assert_same_bits(actual, expected) -> None:
    """For what must not have been computed differently at all."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert actual.tobytes() == expected.tobytes()


def assert_same_but_for_rounding(actual, expected, *, times: float = 1.0) -> None:
    """For trees that two programs made: the same in whole numbers, close in floats, `times` as in `assert_close`."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        if np.issubdtype(np.asarray(other).dtype, np.floating):
            assert_close(one, other, times=times)
        else:
            assert_same_bits(one, other)
