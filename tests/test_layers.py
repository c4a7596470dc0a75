import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close, assert_same_bits

from tfm.config import ModelConfig
from tfm.nn import layers
from tfm.nn.layers import (
    ACTIVATIONS,
    Dropout,
    Embedding,
    FeedForward,
    Linear,
    Norm,
    compute_dtype,
    dropout,
    normalize,
)

CONFIG = ModelConfig(model_dim=16, feed_forward_dim=24, num_heads=2)
X = jax.random.normal(jax.random.key(0), (2, 5, 16))


def numpy_of(variables):
    return jax.tree.map(np.asarray, variables["params"])


def apply(layer, params, x):
    return layer.apply({"params": jax.tree.map(jnp.asarray, params)}, x)


def test_compute_dtype_resolves_auto_and_refuses_others():
    assert compute_dtype("float32") == "float32"
    assert compute_dtype("bfloat16") == "bfloat16"
    assert compute_dtype("auto") in ("float32", "bfloat16")
    with pytest.raises(ValueError, match="'float16'"):
        compute_dtype("float16")


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16])
def test_linear_lies_out_in_and_keeps_the_dtype_that_flows(use_bias, x_dtype):
    linear = Linear(3, use_bias=use_bias)
    variables = linear.init(jax.random.key(0), X)
    params = numpy_of(variables)
    assert params["weight"].shape == (3, 16)
    assert set(params) == ({"weight", "bias"} if use_bias else {"weight"})
    assert all(leaf.dtype == np.float32 for leaf in params.values())
    if use_bias:
        params["bias"] = np.array([1.0, -2.0, 3.0], np.float32)
    x = X.astype(x_dtype)
    y = apply(linear, params, x)
    assert y.dtype == x_dtype
    expected = np.asarray(x, np.float32) @ params["weight"].T + params.get("bias", 0)
    assert_close(y, expected, dtype=x.dtype.name)


def test_linear_starts_as_glorot_and_bengio_say():
    weight = Linear(300, use_bias=False).init(jax.random.key(0), jnp.zeros((1, 500)))["params"]["weight"]
    limit = math.sqrt(6 / (300 + 500))
    assert np.abs(weight).max() <= limit
    # 150,000 uniform draws: the standard deviation of their mean square is 0.9/sqrt(n) = 0.23 % of it; 5 of them
    assert np.square(weight).mean() == pytest.approx(limit**2 / 3, rel=0.012)


# Norms


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms_are_the_papers_formulas(kind, use_bias):
    norm = Norm(CONFIG.replace(norm=kind, use_bias=use_bias, norm_epsilon=1e-3))
    params = numpy_of(norm.init(jax.random.key(0), X))
    assert set(params) == ({"scale", "bias"} if kind == "layernorm" and use_bias else {"scale"})
    params = {name: np.linspace(0.5, 2, 16, dtype=np.float32) for name in params}
    x = np.asarray(X, np.float64) * 3 + 1
    centred = x - x.mean(axis=-1, keepdims=True) if kind == "layernorm" else x
    variance = (centred**2).mean(axis=-1, keepdims=True)
    expected = params["scale"] * centred / np.sqrt(variance + 1e-3) + params.get("bias", 0)
    assert_close(apply(norm, params, jnp.array(x, jnp.float32)), expected)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms_take_their_statistics_in_float32(kind):
    norm = Norm(CONFIG.replace(norm=kind))
    low = (100 + X).astype(jnp.bfloat16)  # the squares have no room in bfloat16's 8 bits
    variables = norm.init(jax.random.key(0), low)
    y = norm.apply(variables, low)
    assert y.dtype == jnp.bfloat16
    assert_close(y, norm.apply(variables, low.astype(jnp.float32)), dtype="bfloat16", times=0.3)  # one rounding


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_a_vector_of_zeros_has_a_norm_and_a_gradient(kind):
    norm = Norm(CONFIG.replace(norm=kind))
    zeros = jnp.zeros((1, 1, 16))
    variables = norm.init(jax.random.key(0), zeros)
    assert not norm.apply(variables, zeros).any()
    assert np.isfinite(jax.grad(lambda x: norm.apply(variables, x).sum())(zeros)).all()


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lead", [(), (3,), (2, 5), (0, 5)])
def test_the_gradients_of_normalize_are_those_of_its_formula(lead, dtype, center):
    def formula(x, scale):
        x = x.astype(jnp.float32)
        if center:
            x -= x.mean(axis=-1, keepdims=True)
        scale = scale.reshape((1,) * (x.ndim - 1) + (16,))
        return scale * x / jnp.sqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-3)

    def gradients(function):
        return jax.grad(lambda *args: (downstream * function(*args)).sum(), (0, 1))(x, scale)

    x = (1 + 2 * jax.random.normal(jax.random.key(1), (*lead, 16))).astype(dtype)
    scale = jax.random.uniform(jax.random.key(2), (16,), minval=0.5, maxval=2.0)
    downstream = jax.random.normal(jax.random.key(3), (*lead, 16))
    by_x, by_scale = gradients(lambda x, scale: normalize(x, scale, center, 1e-3))
    assert (by_x.dtype, by_scale.dtype) == (dtype, jnp.float32)
    expected_by_x, expected_by_scale = gradients(formula)
    assert_close(by_x, expected_by_x, dtype=dtype, times=0.3 if dtype == "bfloat16" else 1)  # one rounding, at the end
    assert_close(by_scale, expected_by_scale, times=3)  # a sum over the rows


# Feed-forward and embeddings


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_of_relu_is_0_up_to_0_and_1_from_there(dtype):
    x = jnp.array([-1.0, 0.0, 2.0], dtype)
    y, pull = jax.vjp(ACTIVATIONS["relu"], x)
    (gradient,) = pull(jnp.ones_like(y))
    assert y.dtype == gradient.dtype == dtype
    assert (y.tolist(), gradient.tolist()) == ([0, 0, 2], [0, 0, 1])


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))  # Hendrycks and Gimpel 2016


NUMPY_ACTIVATIONS = {"relu": lambda x: np.maximum(x, 0), "gelu": gelu, "silu": lambda x: x / (1 + np.exp(-x))}


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", NUMPY_ACTIVATIONS)
def test_feed_forward_is_the_papers_formula(activation, gated, use_bias):
    layer = FeedForward(CONFIG.replace(activation=activation, gated=gated, use_bias=use_bias))
    shapes = jax.eval_shape(layer.init, jax.random.key(0), X)["params"]
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: random.standard_normal(leaf.shape).astype(np.float32) / 4, shapes)

    def linear(name, x):
        return x @ params[name]["weight"].T.astype(np.float64) + params[name].get("bias", 0)

    x = np.asarray(X, np.float64)
    hidden = NUMPY_ACTIVATIONS[activation](linear("gate" if gated else "up", x))
    if gated:
        hidden = hidden * linear("up", x)
    assert_close(apply(layer, params, X), linear("down", hidden))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_embedding_is_a_table_of_rows_and_scores_are_products_with_them(dtype):
    embedding = Embedding(11, 16, dtype)
    ids = jnp.array([[3, 0, 10], [3, 3, 1]])
    variables = embedding.init(jax.random.key(0), ids)
    table = numpy_of(variables)["weight"]
    assert table.shape == (11, 16)
    assert_same_bits(embedding.apply(variables, ids), table[np.asarray(ids)])
    logits = embedding.apply(variables, X, method="logits")
    assert logits.dtype == jnp.float32
    assert_close(logits, np.asarray(X) @ table.T, dtype=dtype)


def test_embeddings_start_with_the_variance_that_scaling_and_sharing_want():
    table = Embedding(2000, 64).init(jax.random.key(0), jnp.zeros((1,), jnp.int32))["params"]["weight"]
    # 128,000 normal draws: the standard deviation of their variance is sqrt(2 / n) = 0.4 %; 5 of them
    assert np.square(table).mean() * 64 == pytest.approx(1, rel=0.02)


def test_the_stream_between_layers_has_the_compute_dtype_on_accelerators(monkeypatch):
    assert layers.stream_dtype("bfloat16") == "float32"  # on this CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert layers.stream_dtype("bfloat16") == "bfloat16"
    assert layers.stream_dtype("float32") == "float32"
    assert compute_dtype("auto") == "bfloat16"


# Dropout

KEY_KINDS = ["threefry2x32", "rbg"]


def test_dropout_is_on_exactly_when_a_key_is_passed():
    layer = Dropout(0.5)
    assert_same_bits(layer.apply({}, X), X)
    assert_same_bits(Dropout(0.0).apply({}, X, rngs={"dropout": jax.random.key(0)}), X)
    dropped = layer.apply({}, X, rngs={"dropout": jax.random.key(0)})
    assert (np.asarray(dropped) == 0).any()


@pytest.mark.parametrize("kind", KEY_KINDS)
def test_the_same_key_drops_the_same_and_another_key_other_entries(kind):
    keys = [jax.random.key(seed, impl=kind) for seed in (0, 0, 1)]
    same, again, other = (np.asarray(dropout(X, 0.5, key)) for key in keys)
    assert_same_bits(same, again)
    assert ((same == 0) != (other == 0)).any()


@pytest.mark.parametrize("kind", KEY_KINDS)
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_meets_its_rate_and_keeps_the_expectation(kind, rate):
    """Over 301 x 1,001 entries (an odd number). A right dropout fails one bound in 1.7 million keys (5 sigma)."""
    ones = jnp.ones((301, 1001))
    dropped = np.asarray(dropout(ones, rate, jax.random.key(7, impl=kind)), np.float64)
    kept = dropped != 0
    sigma = math.sqrt(rate * (1 - rate) / dropped.size)
    assert abs((1 - kept.mean()) - rate) < 5 * sigma
    assert abs(dropped.mean() - 1) < 5 * sigma / (1 - rate)
    # every kept entry is scaled alike, by 1 / (1 - rate) up to the 1 / 65,536 that the rate is met to
    assert len(np.unique(dropped[kept])) == 1
    assert dropped.max() == pytest.approx(1 / (1 - rate), rel=1e-5 / (1 - rate))


@pytest.mark.parametrize("kind", KEY_KINDS)
def test_entries_are_dropped_independently_of_their_neighbours(kind):
    """Two halves of one random word, rows and columns: the counts of equal fates are binomial, 5 sigma."""
    kept = np.asarray(dropout(jnp.ones((512, 512)), 0.5, jax.random.key(3, impl=kind))) != 0
    for one, other in ((kept[:, 0::2], kept[:, 1::2]), (kept[0::2], kept[1::2])):
        equal = (one == other).mean()
        assert abs(equal - 0.5) < 5 * 0.5 / math.sqrt(one.size)


def test_a_rate_next_to_1_drops_nearly_all_and_stays_finite():
    dropped = np.asarray(dropout(jnp.ones((1000,)), 1 - 2**-24, jax.random.key(0)))
    assert np.isfinite(dropped).all()
    assert (dropped == 0).mean() > 0.9


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dropout_keeps_the_dtype_and_its_gradient_is_its_mask(dtype):
    x = X.astype(dtype)
    dropped, pull = jax.vjp(lambda x: dropout(x, 0.25, jax.random.key(0)), x)
    assert dropped.dtype == dtype
    (gradient,) = pull(jnp.ones_like(dropped))
    kept = np.asarray(dropped) != 0
    assert_close(gradient, np.where(kept, 4 / 3, 0), dtype=x.dtype.name)
