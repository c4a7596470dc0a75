import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_close

from tfm.nn.positions import alibi_bias, alibi_slopes, relative_bucket, rotate, sinusoidal

POSITIONS = np.array([[0, 1, 2, 3, 50], [7, 3, 1000, 999, 0]], np.int32)
"""Two rows that neither start at 0 nor ascend."""


@pytest.mark.parametrize("halves", [False, True])
def test_sinusoidal_is_the_papers_formula(halves):
    dim = 12
    expected = np.zeros((*POSITIONS.shape, dim))
    for row, column in np.ndindex(POSITIONS.shape):
        for i in range(dim // 2):
            angle = POSITIONS[row, column] / 10_000 ** (2 * i / dim)
            sine_at, cosine_at = (i, dim // 2 + i) if halves else (2 * i, 2 * i + 1)
            expected[row, column, sine_at] = math.sin(angle)
            expected[row, column, cosine_at] = math.cos(angle)
    # an angle near 1,000 is rounded to 6e-5 in float32, and so is its sine
    assert_close(sinusoidal(jnp.array(POSITIONS), dim, halves=halves), expected, times=10)


def test_sinusoidal_is_float32_and_takes_one_row_or_many():
    one = sinusoidal(jnp.arange(4), 8)
    assert one.dtype == jnp.float32
    assert_close(sinusoidal(jnp.arange(4)[None], 8)[0], one)


def rotated_in_complex_numbers(x, positions, base, halves):
    """Each pair as one complex number times exp(i · position · frequency)."""
    dim = x.shape[-1]
    x = x.astype(np.float64)
    pairs = x[..., : dim // 2] + 1j * x[..., dim // 2 :] if halves else x[..., 0::2] + 1j * x[..., 1::2]
    frequencies = base ** (-2.0 * np.arange(dim // 2) / dim)
    pairs = pairs * np.exp(1j * positions[..., None, None] * frequencies)
    if halves:
        return np.concatenate([pairs.real, pairs.imag], axis=-1)
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("base", [10_000.0, 500.0])
def test_rope_is_a_multiplication_of_complex_numbers(halves, base):
    x = np.random.default_rng(0).standard_normal((2, 5, 3, 8)).astype(np.float32)
    actual = rotate(jnp.array(x), jnp.array(POSITIONS), base=base, halves=halves)
    assert_close(actual, rotated_in_complex_numbers(x, POSITIONS, base, halves), times=20)  # angles up to 1,000


def test_one_row_of_positions_serves_all_batch_rows():
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 8))
    row = jnp.array(POSITIONS[1:])
    assert_close(rotate(x, row), rotate(x, jnp.broadcast_to(row, (2, 5))))


@pytest.mark.parametrize("halves", [False, True])
@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
@settings(max_examples=20)
def test_rope_dot_products_depend_on_offsets_only(halves, query_at, key_at, shift):
    query, key = jax.random.normal(jax.random.key(1), (2, 1, 1, 1, 16))

    def score(query_at, key_at):
        at = (jnp.full((1, 1), position, jnp.int32) for position in (query_at, key_at))
        return (rotate(query, next(at), halves=halves) * rotate(key, next(at), halves=halves)).sum()

    # sums of 16 products, of angles up to 1,000
    assert_close(score(query_at, key_at), score(query_at + shift, key_at + shift), times=100)


def test_rope_dot_products_do_depend_on_the_offset():
    query, key = jax.random.normal(jax.random.key(1), (2, 1, 1, 1, 16))
    scores = [(query * rotate(key, jnp.full((1, 1), at))).sum() for at in range(5)]
    assert np.ptp(scores) > 0.1


def test_rope_in_halves_is_the_interleaved_one_permuted():
    x = jax.random.normal(jax.random.key(2), (2, 5, 3, 8))
    at = jnp.array(POSITIONS)
    interleaved_first = np.concatenate([np.arange(0, 8, 2), np.arange(1, 8, 2)])
    assert_close(rotate(x[..., interleaved_first], at, halves=True), rotate(x, at)[..., interleaved_first])


def test_rope_keeps_the_dtype_and_computes_in_float32():
    x = jax.random.normal(jax.random.key(3), (2, 5, 3, 8))
    low = rotate(x.astype(jnp.bfloat16), jnp.array(POSITIONS))
    assert low.dtype == jnp.bfloat16
    exact = rotate(x.astype(jnp.bfloat16).astype(jnp.float32), jnp.array(POSITIONS))
    # one rounding at the end; angles in bfloat16 would be off by whole radians
    np.testing.assert_array_equal(np.asarray(low), np.asarray(exact.astype(jnp.bfloat16)))


# Buckets of the T5 relative bias, T5's own sizes (32 buckets, distances up to 128), written down from the definition
# in Raffel et al. 2020 in whole numbers: the first half has a bucket a distance; then bucket h + k holds the distances
# d with h · (128/h)^(k/h) ≤ d < h · (128/h)^((k+1)/h), h being the number of exact ones, that is d^h ≥ h^h · (128/h)^k.
DECODER_FIRST_DISTANCE = {  # bucket: the first distance in it, h = 16
    0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7, 8: 8, 9: 9, 10: 10, 11: 11, 12: 12, 13: 13, 14: 14, 15: 15,
    16: 16, 17: 19, 18: 21, 19: 24, 20: 27, 21: 31, 22: 35, 23: 40, 24: 46, 25: 52, 26: 59, 27: 67, 28: 77, 29: 87,
    30: 99, 31: 113,
}  # fmt: skip
ENCODER_FIRST_DISTANCE = {  # h = 8, the same for both directions
    0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7, 8: 8, 9: 12, 10: 16, 11: 23, 12: 32, 13: 46, 14: 64, 15: 91,
}  # fmt: skip


def bucket_of(distance: int, first_distance: dict[int, int]) -> int:
    return max(bucket for bucket, first in first_distance.items() if first <= distance)


@pytest.mark.parametrize("jit", [False, True])
def test_t5_buckets_are_those_of_the_definition(jit):
    offsets = np.arange(-300, 301)

    def buckets(bidirectional):
        def function(offsets):
            return relative_bucket(offsets, bidirectional=bidirectional, num_buckets=32, max_distance=128)

        return np.asarray((jax.jit(function) if jit else function)(jnp.array(offsets)[None, None]))[0, 0]

    decoder = [bucket_of(max(-offset, 0), DECODER_FIRST_DISTANCE) for offset in offsets]
    encoder = [bucket_of(abs(offset), ENCODER_FIRST_DISTANCE) + 16 * (offset > 0) for offset in offsets]
    assert buckets(bidirectional=False).tolist() == decoder
    assert buckets(bidirectional=True).tolist() == encoder


@given(half=st.integers(2, 20), further=st.integers(1, 400), bidirectional=st.booleans())
@settings(max_examples=30)
def test_t5_buckets_of_any_size_are_those_of_the_definition(half, further, bidirectional):
    num_buckets, max_distance = 2 * half, half + further
    offsets = np.arange(-450, 451)
    actual = relative_bucket(
        jnp.array(offsets)[None, None], bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance
    )
    per_direction = half if bidirectional else num_buckets
    distance = np.abs(offsets) if bidirectional else np.maximum(-offsets, 0)
    exact = per_direction // 2
    ratio = np.log(np.maximum(distance, 1) / exact) / np.log(max_distance / exact)
    step = np.clip(ratio * (per_direction - exact), 0, per_direction - exact - 1)
    on_a_boundary = np.abs(step - np.round(step)) < 1e-9
    bucket = exact + np.where(on_a_boundary, np.round(step), np.floor(step)).astype(int)
    bucket = np.where(distance < exact, distance, bucket) + np.where(bidirectional & (offsets > 0), half, 0)
    assert np.asarray(actual)[0, 0].tolist() == bucket.tolist()


def test_a_distance_that_is_just_a_boundary_begins_its_bucket():
    # 20 = 8 · (125/8)^(3/9), a whole number, which a logarithm in float32 puts one bucket too low
    bucket = relative_bucket(jnp.array([[[-20, -19]]]), bidirectional=True, num_buckets=34, max_distance=125)
    assert bucket.tolist() == [[[11, 10]]]


def test_a_far_last_bucket_makes_no_large_table():
    def buckets(offsets):
        return relative_bucket(offsets, bidirectional=False, num_buckets=32, max_distance=16 * 10**4)

    constants = jax.make_jaxpr(buckets)(jnp.zeros((1, 2, 3), jnp.int32)).consts
    assert sum(np.size(constant) for constant in constants) <= 32
    # bucket 16 + k begins at 16 · 10^(k/4): every fourth start is a power of ten
    starts = np.array([16 * 10**power for power in range(4)])
    assert buckets(-jnp.array([[starts - 1, starts]])).tolist() == [[[15, 19, 23, 27], [16, 20, 24, 28]]]
    assert buckets(jnp.full((1, 1, 1), -(2**31 - 1), jnp.int32)).item() == 31


def test_alibi_slopes_are_those_of_the_paper():
    # Press et al. 2022, section 3: for 8 heads 1/2, 1/4 … 1/256; for 16 heads also the geometric means between them
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert_close(alibi_slopes(16), [2 ** (-i / 2) for i in range(1, 17)])
    assert alibi_slopes(1).tolist() == [2.0**-8]


def test_alibi_slopes_of_other_numbers_of_heads_are_filled_up_from_the_next_power():
    # the authors' rule for 12 heads: the 8 slopes of 8 heads, then the 1st, 3rd, 5th and 7th of 16 heads
    assert_close(alibi_slopes(12), [2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])
    assert_close(alibi_slopes(3), [2.0**-4, 2.0**-8, 2.0**-2])


@given(st.integers(1, 70))
@settings(max_examples=20)
def test_alibi_slopes_are_one_a_head_all_different(num_heads):
    slopes = np.asarray(alibi_slopes(num_heads))
    assert slopes.shape == (num_heads,)
    assert len(set(slopes.tolist())) == num_heads
    assert ((slopes > 0) & (slopes < 1)).all()


def test_alibi_bias_falls_with_the_distance_of_each_row():
    queries_at = np.array([[5], [0]])
    bias = np.asarray(alibi_bias(jnp.arange(4)[None, None] - jnp.array(queries_at)[..., None], 8))
    assert bias.shape == (2, 8, 1, 4)
    for row, head, key in np.ndindex(2, 8, 4):
        assert bias[row, head, 0, key] == -(2.0 ** -(head + 1)) * abs(key - queries_at[row, 0])
