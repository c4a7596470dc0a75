import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close, assert_same_bits

from tfm.config import ModelConfig
from tfm.nn import attention
from tfm.nn.attention import Attention, dot_product_attention
from tfm.nn.cache import Int8Vectors, KeysValues
from tfm.nn.masks import Visible
from tfm.nn.plain_attention import attention_weights

B, Q, M, N, H = 3, 4, 6, 4, 8
ON_GPU = jax.default_backend() == "gpu"
KERNELS = ["auto", "plain", "xla", pytest.param("cudnn", marks=pytest.mark.skipif(not ON_GPU, reason="needs a GPU"))]
ALL = Visible()


def arrays(kv_heads=N, *, queries=Q, keys=M, dtype=jnp.float32, seed=0):
    """A query and keys with values, of standard normal entries."""
    random = np.random.default_rng(seed)
    query = jnp.array(random.standard_normal((B, queries, N, H)), dtype)
    keys, values = (jnp.array(random.standard_normal((B, kv_heads, keys, H)), dtype) for _ in range(2))
    return query, KeysValues(keys, values)


def in_numpy(query, keys_values, may_see, bias=None, scale=None):
    """One query of one head of one row at a time, in float64."""
    query, keys, values = (np.asarray(x, np.float64) for x in (query, keys_values.keys, keys_values.values))
    group = query.shape[2] // keys.shape[1]
    mixed = np.zeros(query.shape)
    for row, q, head in np.ndindex(query.shape[:3]):
        seen = [key for key in range(keys.shape[2]) if may_see(row, q, key)]
        if not seen:
            continue
        scores = keys[row, head // group, seen] @ query[row, q, head] * (scale or 1 / math.sqrt(query.shape[-1]))
        if bias is not None:
            scores = scores + np.broadcast_to(bias, (query.shape[0], *bias.shape[1:]))[row, head, q, seen]
        weights = np.exp(scores - scores.max())
        mixed[row, q, head] = weights / weights.sum() @ values[row, head // group, seen]
    return mixed


LENGTHS = np.array([6, 1, 4], np.int32)
AT = np.array([[2, 3, 4, 5], [0, 1, 2, 3], [1, 1, 0, 5]], np.int32)
BIAS = np.random.default_rng(9).standard_normal((B, N, Q, M)).astype(np.float32)
CASES = {
    "all": (lambda: Visible(), None, lambda row, q, key: True),
    "lengths": (lambda: Visible(key_lengths=jnp.array(LENGTHS)), None, lambda row, q, key: key < LENGTHS[row]),
    "causal": (lambda: Visible(causal=True), None, lambda row, q, key: key <= q),
    "causal-lengths": (
        lambda: Visible(causal=True, key_lengths=jnp.array(LENGTHS)),
        None,
        lambda row, q, key: key <= q and key < LENGTHS[row],
    ),
    "positions": (
        lambda: Visible(causal=True, query_positions=jnp.array(AT)),
        None,
        lambda row, q, key: key <= AT[row, q],
    ),
    "positions-lengths-bias": (
        lambda: Visible(causal=True, query_positions=jnp.array(AT), key_lengths=jnp.array(LENGTHS)),
        BIAS,
        lambda row, q, key: key <= AT[row, q] and key < LENGTHS[row],
    ),
    "bias": (lambda: Visible(), BIAS, lambda row, q, key: True),
    "one-bias-for-all-rows": (lambda: Visible(causal=True), BIAS[:1], lambda row, q, key: key <= q),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("kv_heads", "dtype"), [(N, "float32"), (2, "float32"), (1, "float32"), (2, "bfloat16")])
def test_every_kernel_is_the_papers_formula(kernel, case, kv_heads, dtype):
    make_visible, bias, may_see = CASES[case]
    query, keys_values = arrays(kv_heads, dtype=dtype)
    if kernel == "cudnn" and (dtype == "float32" or bias is not None or "positions" in case or "causal" in case):
        pytest.skip("cuDNN refuses it, as tested below")
    mixed = dot_product_attention(
        query, keys_values, visible=make_visible(), bias=None if bias is None else jnp.array(bias), kernel=kernel
    )
    assert mixed.dtype == query.dtype
    assert_close(mixed, in_numpy(query, keys_values, may_see, bias), dtype=dtype)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["all-real", "lengths"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_as_many_queries_as_keys_may_be_causal_in_every_kernel(kernel, lengths):
    dtype = "bfloat16" if ON_GPU else "float32"
    query, keys_values = arrays(2, queries=M, dtype=dtype)
    visible = Visible(causal=True, key_lengths=None if lengths is None else jnp.array(lengths))
    mixed = dot_product_attention(query, keys_values, visible=visible, kernel=kernel)
    expected = in_numpy(query, keys_values, lambda row, q, key: key <= q and (lengths is None or key < lengths[row]))
    assert_close(mixed, expected, dtype=dtype)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_scale_is_what_the_caller_says(kernel):
    query, keys_values = arrays(dtype="bfloat16" if ON_GPU else "float32")
    mixed = dot_product_attention(query, keys_values, visible=ALL, scale=1.0, kernel=kernel)
    assert_close(
        mixed, in_numpy(query, keys_values, lambda *_: True, scale=1.0), dtype="bfloat16" if ON_GPU else "float32"
    )


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_query_that_sees_nothing_gives_zeros_and_gradients_stay_finite(kernel, with_bias):
    if kernel == "cudnn" and with_bias:
        pytest.skip("cuDNN refuses a bias")
    query, keys_values = arrays(2, dtype="bfloat16" if ON_GPU else "float32")
    visible = Visible(key_lengths=jnp.array([0, 3, 0]))
    bias = jnp.array(BIAS) if with_bias else None

    def loss(query, keys_values):
        mixed = dot_product_attention(query, keys_values, visible=visible, bias=bias, kernel=kernel)
        return (mixed**2).sum(), mixed

    gradients, mixed = jax.grad(loss, argnums=(0, 1), has_aux=True)(query, keys_values)
    assert not mixed[jnp.array([0, 2])].any()
    assert mixed[1].all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    for leaf in jax.tree.leaves(gradients):
        assert not leaf[jnp.array([0, 2])].any()
    assert not gradients[1].keys[1, :, 3:].any()


@pytest.mark.parametrize("kernel", ["plain", "xla"])
def test_one_query_that_sees_nothing_among_others(kernel):
    query, keys_values = arrays()
    at = jnp.array([[-1, 0, 1, 2]] * B)
    mixed = dot_product_attention(query, keys_values, visible=Visible(causal=True, query_positions=at), kernel=kernel)
    assert not mixed[:, 0].any()
    assert mixed[:, 1:].all()


@pytest.mark.parametrize("case", CASES)
def test_kernels_agree_on_the_gradients_too(case):
    make_visible, bias, _ = CASES[case]
    query, keys_values = arrays(2)
    bias = jnp.zeros((1, N, Q, M)) if bias is None else jnp.array(bias)
    downstream = jax.random.normal(jax.random.key(0), query.shape)

    def gradients(kernel):
        def loss(query, keys_values, bias):
            mixed = dot_product_attention(query, keys_values, visible=make_visible(), bias=bias, kernel=kernel)
            return (downstream * mixed).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(query, keys_values, bias)

    for one, other in zip(*map(jax.tree.leaves, (gradients("plain"), gradients("xla"))), strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("kernel", ["plain", "xla"])
def test_what_a_query_may_not_see_has_no_part_in_anything(kernel):
    query, keys_values = arrays()
    visible = Visible(causal=True, key_lengths=jnp.array(LENGTHS))
    junk = KeysValues(*(x.at[1, :, 1:].set(1e4).at[:, :, 4:].set(-1e4) for x in (keys_values.keys, keys_values.values)))
    assert_same_bits(
        dot_product_attention(query, junk, visible=visible, kernel=kernel),
        dot_product_attention(query, keys_values, visible=visible, kernel=kernel),
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_scores_far_apart_neither_overflow_nor_vanish(kernel):
    query, keys_values = arrays(dtype="bfloat16" if ON_GPU else "float32")
    mixed = dot_product_attention(1000 * query, keys_values, visible=ALL, scale=1.0, kernel=kernel)
    assert np.isfinite(np.asarray(mixed, np.float32)).all()
    scores = jnp.einsum("BQNH,BNMH->BNQM", query, keys_values.keys)
    likeliest = jnp.take_along_axis(keys_values.values, scores.argmax(axis=-1)[..., None], axis=2)
    assert_close(mixed, jnp.swapaxes(likeliest, 1, 2), times=10)  # all weight is on one key


def test_low_precision_still_takes_the_softmax_in_float32():
    query, keys_values = arrays(dtype="bfloat16")
    weights = attention_weights(query, keys_values.keys, ALL, None, 1 / math.sqrt(H))
    assert weights.dtype == jnp.float32
    assert_close(weights.sum(axis=-1), np.ones((B, N, Q)))


# Which kernel serves


@pytest.mark.skipif(ON_GPU, reason="there is a GPU")
@pytest.mark.skipif(ON_GPU, reason="a CPU in a process that has a GPU, played on a CPU")
def test_plain_runs_on_a_cpu_that_is_not_the_default(monkeypatch):
    """What a CPU cannot multiply depends on where the product runs, whatever JAX takes first."""
    query, keys_values = arrays(dtype=jnp.bfloat16)
    exact = in_numpy(query, keys_values, lambda row, q, key: True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def mixed(query, keys_values):
        return dot_product_attention(query, keys_values, visible=ALL, kernel="plain")

    assert_close(jax.jit(mixed)(query, keys_values), exact, dtype="bfloat16")
    gradients = jax.jit(jax.grad(lambda *args: mixed(*args).sum(), (0, 1)))(query, keys_values)
    assert all(leaf.dtype == jnp.bfloat16 and np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


# Keys and values in fewer bits


def floats_of(stored):
    if isinstance(stored, Int8Vectors):
        return stored.values.astype(jnp.float32) * stored.scales
    return stored.astype(jnp.float32)


@pytest.mark.parametrize("stored_as", ["bfloat16", "int8"])
@pytest.mark.parametrize(("kv_heads", "queries"), [(4, 1), (4, 4), (2, 1), (1, 4), (1, 5), (2, 20)])
def test_stored_keys_and_values_are_worth_their_floats(stored_as, kv_heads, queries):
    """For few queries and for many, whatever they are multiplied by."""
    query, floats = arrays(kv_heads, queries=queries)
    stored = floats.stored(stored_as)
    worth = KeysValues(floats_of(stored.keys), floats_of(stored.values))
    visible, bias = Visible(key_lengths=jnp.array([6, 0, 4])), jnp.array(np.resize(BIAS, (B, N, queries, M)))
    for kernel in ("plain", "auto"):
        mixed = jax.jit(lambda *given, kernel=kernel: dot_product_attention(*given, visible=visible, kernel=kernel))
        assert_close(mixed(query, stored), mixed(query, worth))
    weights = jax.jit(lambda keys: attention_weights(query, keys, visible, bias, 0.3))
    assert_close(weights(stored.keys), weights(worth.keys))


@pytest.mark.parametrize("stored_as", ["float32", "bfloat16", "int8"])
def test_queries_in_bfloat16_meet_stored_keys_too(stored_as):
    query, floats = arrays(2)
    mixed = dot_product_attention(query.astype(jnp.bfloat16), floats.stored(stored_as), visible=ALL)
    assert mixed.dtype == jnp.bfloat16
    assert_close(mixed, in_numpy(query, floats, CASES["all"][2]), dtype="bfloat16")


def test_xla_serves_a_cache_in_bfloat16_and_refuses_int8():
    query, floats = arrays()
    stored = floats.stored("bfloat16")
    plain, xla = (dot_product_attention(query, stored, visible=ALL, kernel=kernel) for kernel in ("plain", "xla"))
    assert_close(xla, plain)
    with pytest.raises(ValueError, match="'xla' cannot serve here: it takes no keys and values in int8"):
        dot_product_attention(query, floats.stored("int8"), visible=ALL, kernel="xla")


def test_cudnn_refuses_int8_and_auto_does_not_take_it(monkeypatch):
    pretend_gpu(monkeypatch, "9.0")
    query, floats = arrays(dtype="bfloat16")
    stored = floats.stored("int8")
    with pytest.raises(ValueError, match="'cudnn' cannot serve here: it takes no keys and values in int8"):
        dot_product_attention(query, stored, visible=ALL, kernel="cudnn")
    monkeypatch.setattr(attention, "_cudnn", lambda *_: pytest.fail("auto chose cuDNN"))
    assert jax.eval_shape(lambda: dot_product_attention(query, stored, visible=ALL)).shape == query.shape


def test_cudnn_without_a_gpu_is_refused_and_the_error_says_why():
    query, keys_values = arrays(dtype="bfloat16")
    with pytest.raises(ValueError, match="'cudnn' cannot serve here: it needs an NVIDIA GPU, and the backend is cpu"):
        dot_product_attention(query, keys_values, visible=ALL, kernel="cudnn")


def pretend_gpu(monkeypatch, capability):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(attention, "_compute_capability", lambda: capability)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"capability": "7.5"}, "8.0 .* is 7.5"),
        ({"capability": "gfx90a"}, "8.0 .* is gfx90a"),
        ({"dtype": "float32"}, "not float32"),
        ({"width": 12}, "not 12"),
        ({"width": 136}, "not 136"),
        ({"bias": jnp.array(BIAS)}, "bias"),
        ({"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, "dropout"),
        ({"visible": Visible(causal=True)}, "middle of a cache"),
        ({"visible": Visible(causal=True, query_positions=jnp.array(AT))}, "middle of a cache"),
    ],
    ids=["turing", "amd", "float32", "narrow", "wide", "bias", "dropout", "fewer-queries-than-keys", "positions"],
)
def test_cudnn_says_what_it_cannot_do(monkeypatch, changes, why):
    """The refusal comes before the kernel, so it needs no GPU; and auto then does not take it."""
    arguments = {"visible": ALL, **changes}
    pretend_gpu(monkeypatch, arguments.pop("capability", "9.0"))
    query, keys_values = arrays(dtype=arguments.pop("dtype", "bfloat16"))
    if width := arguments.pop("width", None):
        query, keys_values = jax.tree.map(lambda x: jnp.ones((*x.shape[:-1], width), x.dtype), (query, keys_values))
    with pytest.raises(ValueError, match="'cudnn' cannot serve here: .*" + why):
        dot_product_attention(query, keys_values, kernel="cudnn", **arguments)
    monkeypatch.setattr(attention, "_cudnn", lambda *_: pytest.fail("auto chose cuDNN"))
    result = jax.eval_shape(lambda: dot_product_attention(query, keys_values, kernel="auto", **arguments))
    assert result.shape == query.shape


def test_auto_takes_cudnn_where_it_can_serve(monkeypatch):
    pretend_gpu(monkeypatch, "8.0")
    monkeypatch.setattr(attention, "_cudnn", lambda query, *_: query + 1)
    query, keys_values = arrays(dtype="bfloat16")
    for visible in (ALL, Visible(key_lengths=jnp.array(LENGTHS))):
        assert_same_bits(dot_product_attention(query, keys_values, visible=visible, kernel="auto"), query + 1)


def test_an_unknown_kernel_is_refused():
    query, keys_values = arrays()
    with pytest.raises(ValueError, match="expected an attention kernel of auto, plain, xla, cudnn, got 'flash'"):
        inspect.unwrap(dot_product_attention)(query, keys_values, visible=ALL, kernel="flash")


def test_xla_refuses_dropout():
    query, keys_values = arrays()
    with pytest.raises(ValueError, match="'xla' cannot serve here: it has no dropout"):
        dot_product_attention(
            query, keys_values, visible=ALL, kernel="xla", dropout_rate=0.1, dropout_key=jax.random.key(0)
        )
    # a rate without a key, or a key without a rate, is no dropout
    for arguments in ({"dropout_rate": 0.1}, {"dropout_key": jax.random.key(0)}):
        dot_product_attention(query, keys_values, visible=ALL, kernel="xla", **arguments)


# Dropout on the weights


@pytest.mark.parametrize("kernel", ["auto", "plain"])
def test_dropout_keeps_the_expectation_and_acts_on_weights(kernel):
    """Mean of 2,000 keys; each entry lies within 5 sigma of a sum of independent Bernoulli weights (288 entries: a
    right kernel fails once in 6,000 seeds, and the seeds are fixed).
    """
    rate, draws = 0.3, 2000
    query, keys_values = arrays()
    identity = KeysValues(keys_values.keys, jnp.broadcast_to(jnp.eye(M, H), (B, N, M, H)))  # shows the weights

    def mix(key):
        return dot_product_attention(
            query, identity, visible=Visible(causal=True), dropout_rate=rate, dropout_key=key, kernel=kernel
        )

    samples = np.asarray(jax.jit(jax.vmap(mix))(jax.random.split(jax.random.key(0), draws)))[..., :M]
    weights = np.asarray(attention_weights(query, keys_values.keys, Visible(causal=True), None, 1 / math.sqrt(H)))
    weights = np.swapaxes(weights, 1, 2)
    sigma = weights * math.sqrt(rate / (1 - rate) / draws)
    assert (np.abs(samples.mean(axis=0) - weights) <= 5 * sigma + 1e-6).all()
    dropped = samples[:, weights > 0] == 0
    assert abs(dropped.mean() - rate) < 5 * math.sqrt(rate * (1 - rate) / dropped.size)
    assert_close(samples[:, weights > 0].max(axis=0), weights[weights > 0] / (1 - rate), times=10)


def test_without_a_key_nothing_is_dropped():
    query, keys_values = arrays()
    assert_same_bits(
        dot_product_attention(query, keys_values, visible=ALL, dropout_rate=0.9),
        dot_product_attention(query, keys_values, visible=ALL),
    )


# The multi-head layer

LAYER_CONFIG = ModelConfig(model_dim=12, num_heads=4, num_kv_heads=2, head_dim=6)


@pytest.mark.parametrize("kernel", ["plain", "xla"])
@pytest.mark.parametrize("scale_attention", [True, False])
@pytest.mark.parametrize("positions", ["none", "rope"])
def test_multi_head_attention_is_the_papers_formula(kernel, scale_attention, positions):
    """Projections, heads, groups and the output projection in NumPy; rotations as complex numbers."""
    config = LAYER_CONFIG.replace(scale_attention=scale_attention, positions=positions)
    layer = Attention(config, kernel=kernel)
    random = np.random.default_rng(0)
    x, memory = (random.standard_normal((B, length, 12)) for length in (Q, M))
    shapes = jax.eval_shape(
        lambda x, memory: layer.init(jax.random.key(0), x, memory, method=run), *map(jnp.array, (x, memory))
    )
    params = jax.tree.map(lambda leaf: random.standard_normal(leaf.shape) / 3, shapes["params"])
    rotary = positions == "rope"

    def rotate(heads, at):
        if not rotary:
            return heads
        pairs = heads[..., 0::2] + 1j * heads[..., 1::2]
        turned = pairs * np.exp(1j * at[:, None, None] * 10_000.0 ** (-2 * np.arange(3) / 6))
        return np.stack([turned.real, turned.imag], axis=-1).reshape(heads.shape)

    def project(name, x):
        return x @ params[name]["weight"].T + params[name]["bias"]

    query = rotate(project("query", x).reshape(B, Q, 4, 6), np.arange(Q) + 1)
    keys = rotate(project("key", memory).reshape(B, M, 2, 6), np.arange(M))
    values = project("value", memory).reshape(B, M, 2, 6)
    keys_values = KeysValues(keys.swapaxes(1, 2), values.swapaxes(1, 2))
    scale = None if scale_attention else 1.0
    mixed = in_numpy(query, keys_values, lambda row, q, key: key < LENGTHS[row], scale=scale)
    expected = project("output", mixed.reshape(B, Q, 24))

    as_arrays = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), ({"params": params}, x, memory))
    assert_close(layer.apply(*as_arrays, method=run), expected)


def run(layer, x, memory):
    rotary = layer.config.positions == "rope"
    keys_values = layer.keys_values(memory, jnp.arange(M)[None] if rotary else None)
    queries = layer.queries(x, jnp.arange(Q)[None] + 1 if rotary else None)
    return layer(queries, keys_values, visible=Visible(key_lengths=jnp.array(LENGTHS)))
