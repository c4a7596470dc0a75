import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tolerances import assert_close, assert_same_bits

from tfm.nn import products
from tfm.nn.products import InOutWeight, Int8Weight, lies_best_in_out, project, quantize

X = jax.random.normal(jax.random.key(0), (2, 5, 16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("out", [4, 40], ids=["narrowing", "widening"])
@pytest.mark.parametrize("lead", [(), (3,), (2, 5)])
def test_project_multiplies_by_the_transposed_weight_and_so_do_its_gradients(dtype, out, lead):
    x = jax.random.normal(jax.random.key(1), (*lead, 16))
    weight = jax.random.normal(jax.random.key(2), (out, 16)) / 4
    downstream = jax.random.normal(jax.random.key(3), (*lead, out)) / math.sqrt(out)
    y, gradients = jax.value_and_grad(lambda *args: (downstream * project(*args, dtype)).sum(), (0, 1))(x, weight)
    assert_close(project(x, weight, dtype), np.asarray(x) @ np.asarray(weight).T, dtype=dtype)
    rows, downstream_rows = np.asarray(x).reshape(-1, 16), np.asarray(downstream).reshape(-1, out)
    assert_close(gradients[0], np.asarray(downstream) @ np.asarray(weight), dtype=dtype)
    assert_close(gradients[1], downstream_rows.T @ rows, dtype=dtype)
    assert np.isfinite(y)


def test_a_matrix_that_lies_in_out_multiplies_and_is_looked_up_like_one_that_lies_out_in():
    weight = jax.random.normal(jax.random.key(2), (7, 16))
    turned = InOutWeight(weight.T)
    assert_close(project(X, turned, "float32"), project(X, weight, "float32"))
    for ids in (jnp.array(3), jnp.array([6, 0]), jnp.array([[1, 2], [3, 3]])):
        assert_same_bits(turned.rows(ids), weight[ids])


@pytest.mark.parametrize(("vendor", "expected"), [("AuthenticAMD", True), ("GenuineIntel", False)])
def test_how_matrices_lie_depends_on_the_processor(vendor, expected, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(products, "_CPU_INFO", tmp_path / "cpuinfo")
    assert lies_best_in_out.__wrapped__() == expected
    monkeypatch.setattr(products, "_CPU_INFO", tmp_path / "nothing")
    assert not lies_best_in_out.__wrapped__()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_have_the_dtypes_of_what_they_are_of_and_results_are_float32(dtype, x_dtype):
    x, weight = X.astype(x_dtype), jnp.ones((3, 16))
    assert project(x, weight, dtype).dtype == jnp.float32
    x_gradient, weight_gradient = jax.grad(lambda *args: project(*args, dtype).sum(), (0, 1))(x, weight)
    assert x_gradient.dtype == x_dtype
    assert weight_gradient.dtype == jnp.float32


def test_low_precision_products_accumulate_in_float32():
    """In bfloat16 a sum of 4,096 ones stops at 256, where adding 1 is rounded away."""
    ones, weight = jnp.ones((1, 4096)), jnp.ones((1, 4096))
    assert project(ones, weight, "bfloat16")[0, 0] == 4096
    # and the weight's gradient, a sum over rows
    many = jnp.ones((4096, 1))
    gradient = jax.grad(lambda w: project(many, w, "bfloat16").sum())(jnp.ones((1, 1)))
    assert gradient[0, 0] == 4096


def test_low_precision_really_is_low():
    """So that a tolerance for bfloat16 is not met by computing in float32."""
    x = jnp.full((1, 1), 1 + 2**-10)
    assert project(x, jnp.ones((1, 1)), "bfloat16")[0, 0] == 1
    assert project(x, jnp.ones((1, 1)), "float32")[0, 0] == 1 + 2**-10


# Int8


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40))
def test_a_rounded_vector_is_within_half_a_scale_of_what_it_was(entries):
    x = np.array([entries], np.float32)
    values, scales = quantize(jnp.asarray(x))
    assert values.dtype == jnp.int8
    assert scales.shape == (1,)
    assert np.abs(values).max() == (127 if scales[0] > 0 else 0)
    back = np.asarray(values, np.float64) * np.asarray(scales, np.float64)
    # of numbers that are all next to nothing, the scale is less than float32 has
    assert np.abs(back - x).max() <= 0.5001 * scales[0] + 2.0**-118


def test_whole_numbers_are_multiplied_exactly():
    """Where the largest of each vector is 127 nothing is rounded: what is left is the product itself."""
    random = np.random.default_rng(0)
    x, weight = random.integers(-126, 127, (3, 9, 64)), random.integers(-126, 127, (5, 64))
    x[..., 3], weight[..., 7] = 127, -127
    int8 = Int8Weight(*quantize(jnp.asarray(weight, jnp.float32)))
    y = project(jnp.asarray(x, jnp.float32), int8, "float32")
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(y, x @ weight.T)


def test_int8_is_as_near_as_eight_bits_are():
    x, weight = jax.random.normal(jax.random.key(1), (50, 512)), jax.random.normal(jax.random.key(2), (40, 512))
    exact, rounded = x @ weight.T, project(x, Int8Weight(*quantize(weight)), "float32")
    # each factor is off by a uniform error of up to half a scale, max / 127, max being about 3: 2 · 3 / 127 / sqrt(12)
    error = float(jnp.std(rounded - exact) / jnp.std(exact))
    assert 0.005 < error < 0.015


def test_a_matrix_of_zeros_and_a_vector_of_zeros_give_zeros():
    zeros = Int8Weight(*quantize(jnp.zeros((3, 16))))
    assert not project(X, zeros, "float32").any()
    assert not project(jnp.zeros((2, 16)), Int8Weight(*quantize(jnp.ones((3, 16)))), "float32").any()


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
def test_a_few_rows_are_multiplied_as_among_many(weights):
    """Fewer than eight are filled up where that is faster: nothing of it shows."""
    x, weight = jax.random.normal(jax.random.key(1), (16, 32)), jax.random.normal(jax.random.key(2), (40, 32))
    kept, dtype = (Int8Weight(*quantize(weight)), "float32") if weights == "int8" else (weight, weights)
    whole = project(x, kept, dtype)
    for rows in (1, 3, 7, 8, 9):
        few = project(x[:rows], kept, dtype)
        assert few.shape == (rows, 40)
        assert_close(few, whole[:rows])


def test_rows_are_those_of_the_matrix():
    weight = jax.random.normal(jax.random.key(2), (11, 32))
    int8 = Int8Weight(*quantize(weight))
    ids = jnp.array([[0, 10, 3], [3, 3, 1]])
    assert int8.rows(ids).shape == (2, 3, 32)
    assert_same_bits(int8.rows(ids), int8.rows(jnp.arange(11))[ids])
    assert float(jnp.abs(int8.rows(ids) - weight[ids]).max()) <= 0.51 * float(int8.scales.max())
