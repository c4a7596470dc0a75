import functools
import inspect
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import V, random_ids, random_params, tiny_config, tiny_model
from tolerances import assert_close, assert_same_bits

from tfm.config import Positions
from tfm.nn import layers
from tfm.nn.logprob import smoothed_cross_entropy
from tfm.nn.models import build_model
from tfm.nn.params import param_shapes
from tfm.nn.transformer import DecoderOnly, EncoderDecoder, join

pytestmark = pytest.mark.usefixtures("compile_fast")

B, S, T = 3, 5, 4
SOURCE, TARGET = random_ids(B, S, seed=1), random_ids(B, T, seed=2)
SOURCE_LENGTHS = np.array([5, 2, 3], np.int32)
ARCHITECTURES = ["encoder-decoder", "decoder-only"]


@functools.cache
def forward(config, dtype="float32", kernel="plain"):
    return jax.jit(tiny_model(config, dtype, kernel).apply)


def logits_of(config, params=None, *, source=SOURCE, lengths=SOURCE_LENGTHS, target=TARGET, kernel="plain"):
    params = random_params(config) if params is None else params
    return np.asarray(forward(config, kernel=kernel)({"params": params}, source, lengths, target))


# The papers' formulas


class InNumpy:
    """Vaswani et al. 2017, figure 1, one row at a time in float64, from the same parameters and with ReLU.

    And with the other papers' positions; of T5's buckets only those of a single distance are known here.
    """

    def __init__(self, config, params):
        self.config, self.params = config, jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def linear(self, params, x):
        return x @ params["weight"].T + params["bias"]

    def norm(self, params, x):
        variance = x.var(axis=-1, keepdims=True)
        return params["scale"] * (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(variance + 1e-6) + params["bias"]

    def absolute(self, params, length):
        dim, kind = self.config.model_dim, self.config.positions
        if kind == "learned":
            return params["position_embedding"]["weight"][:length]
        angle = np.arange(length)[:, None] / 10_000 ** (np.arange(0, dim, 2) / dim)
        if kind == "sinusoidal-halves":
            return np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
        if kind == "sinusoidal":
            return np.stack([np.sin(angle), np.cos(angle)], axis=2).reshape(length, dim)
        return 0

    def rotated(self, x):
        size, kind = self.config.head_size, self.config.positions
        if not kind.startswith("rope"):
            return x
        real, imaginary = (x[..., 0::2], x[..., 1::2]) if kind == "rope" else np.split(x, 2, axis=-1)
        angle = np.arange(len(x))[:, None, None] / 10_000 ** (np.arange(0, size, 2) / size)
        turned = (real + 1j * imaginary) * np.exp(1j * angle)
        if kind == "rope":
            return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def bias(self, params, length, bidirectional):
        offset = np.arange(length) - np.arange(length)[:, None]
        if self.config.positions == "alibi":
            return -np.array([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])[:, None, None] * abs(offset)
        if self.config.positions == "t5-bias":
            half = self.config.relative_buckets // 2
            bucket = abs(offset) + half * (offset > 0) if bidirectional else np.maximum(-offset, 0)
            assert (abs(offset) < (half // 2 if bidirectional else half)).all()
            return np.moveaxis(params["relative_bias"]["weight"][bucket], -1, 0)
        return 0

    def attention(self, params, x, memory, causal=False, bias=None):
        heads, size = self.config.num_heads, self.config.head_size
        query, key, value = (
            self.linear(params[name], of).reshape(-1, heads, size)
            for name, of in (("query", x), ("key", memory), ("value", memory))
        )
        if bias is not None:  # self-attention
            query, key = self.rotated(query), self.rotated(key)
        scores = np.einsum("qnh,mnh->nqm", query, key) / math.sqrt(size) + (0 if bias is None else bias)
        if causal:
            scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return self.linear(params["output"], np.einsum("nqm,mnh->qnh", weights, value).reshape(len(x), -1))

    def feed_forward(self, params, x):
        return self.linear(params["down"], np.maximum(self.linear(params["up"], x), 0))

    def residual(self, params, x, sublayer):
        if self.config.norm_position == "post":
            return self.norm(params, x + sublayer(x))
        return x + sublayer(self.norm(params, x))

    def stack(self, params, ids, table, source=None):
        x = table[ids] * math.sqrt(self.config.model_dim) + self.absolute(params, len(ids))
        causal = source is not None
        bias = self.bias(params, len(ids), bidirectional=not causal)
        for name in sorted(name for name in params if name.startswith("layer_")):
            layer = params[name]
            attend = functools.partial(self.attention, layer["self_attention"], causal=causal, bias=bias)
            x = self.residual(layer["self_attention_norm"], x, lambda x, attend=attend: attend(x, x))
            if source is not None:
                attend = functools.partial(self.attention, layer["cross_attention"], memory=source)
                x = self.residual(layer["cross_attention_norm"], x, attend)
            feed_forward = functools.partial(self.feed_forward, layer["feed_forward"])
            x = self.residual(layer["feed_forward_norm"], x, feed_forward)
        return self.norm(params["norm"], x) if self.config.norm_position == "pre" else x

    def logits(self, source, target):
        table = self.params["target_embedding"]["weight"]
        encoded = self.stack(self.params["encoder"], source, table)
        return self.stack(self.params["decoder"], target, table, encoded) @ table.T


@pytest.mark.parametrize(
    ("norm_position", "positions"),
    [("post", "sinusoidal"), *(("pre", positions) for positions in typing.get_args(Positions))],
)
def test_the_model_is_the_papers(norm_position, positions):
    config = tiny_config(
        norm_position=norm_position, positions=positions, shared_embeddings="all", encoder_layers=2,
        relative_buckets=32, relative_max_distance=128,
    )  # fmt: skip
    reference = InNumpy(config, random_params(config))
    target = random_ids(B, 12, seed=5)  # further than the encoder's single distances reach
    actual = logits_of(config, target=target)
    assert actual.dtype == np.float32
    for row in range(B):
        assert_close(actual[row], reference.logits(SOURCE[row, : SOURCE_LENGTHS[row]], target[row]), times=10)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("positions", ["rope", "t5-bias"])
def test_kernels_give_the_same_model(architecture, positions):
    config = tiny_config(architecture=architecture, positions=positions, num_kv_heads=2)
    assert_close(logits_of(config, kernel="xla"), logits_of(config, kernel="plain"))


def test_a_decoder_only_model_reads_source_and_target_as_one_sequence():
    config = tiny_config(architecture="decoder-only", positions="learned")
    together = logits_of(config)
    for row, length in enumerate(SOURCE_LENGTHS):
        sequence = np.concatenate([SOURCE[row, :length], TARGET[row]])[None]
        alone = logits_of(config, source=sequence[:, :1], lengths=np.array([1]), target=sequence[:, 1:])
        assert_close(alone[0, length - 1 :], together[row])


# Embeddings


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("shared", ["target-output", "all"])
def test_a_shared_matrix_is_several_equal_ones(architecture, shared):
    config = tiny_config(architecture=architecture, shared_embeddings=shared)
    params = random_params(config)
    apart = {**params, "output": {"weight": params["target_embedding"]["weight"]}}
    if architecture == "encoder-decoder" and shared == "all":
        assert "source_embedding" not in params
        apart["source_embedding"] = params["target_embedding"]
    assert "output" not in params
    assert_close(logits_of(config.replace(shared_embeddings="none"), apart), logits_of(config))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("shared", ["none", "target-output"])
def test_scaling_the_logits_divides_them(architecture, shared):
    config = tiny_config(architecture=architecture, shared_embeddings=shared)
    assert_close(logits_of(config.replace(scale_logits=True)), logits_of(config) / math.sqrt(16))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scaling_the_embeddings_multiplies_them(architecture):
    config = tiny_config(architecture=architecture, shared_embeddings="none", scale_embeddings=True)
    params = dict(random_params(config))
    scaled = logits_of(config, params)
    for name in {"source_embedding", "target_embedding"} & set(params):
        params[name] = {"weight": params[name]["weight"] * math.sqrt(16)}
    assert_close(logits_of(config.replace(scale_embeddings=False), params), scaled)


def test_own_logits_are_not_rounded_to_the_stream(monkeypatch):
    """On an accelerator bfloat16 flows between layers; the scores of the vocabulary must still be float32."""
    monkeypatch.setattr(layers, "stream_dtype", lambda dtype: dtype)
    for shared in ("none", "target-output"):
        config = tiny_config(shared_embeddings=shared, norm_epsilon=4e-6)
        logits = forward(config, "bfloat16")({"params": random_params(config)}, SOURCE, SOURCE_LENGTHS, TARGET)
        assert logits.dtype == jnp.float32
        assert (np.asarray(logits) != np.asarray(logits.astype(jnp.bfloat16), np.float32)).any()


# Who sees whom


def influence(config, part="logits"):
    """How the gradient of each target position's logits (or source position's vector) falls on each token: [T, S + T].

    Every token of the sequence has an id of its own, so that its row of the embedding table speaks for its position.
    """
    model, params = tiny_model(config), random_params(config)
    source, target = jnp.arange(S)[None], jnp.arange(S, S + T)[None]
    lengths = jnp.array([3])
    weights = np.random.default_rng(0).standard_normal(V if part == "logits" else 16)  # any mix of the outputs

    def outputs(tables):
        with_tables = {"params": {**params, **tables}}
        if part == "logits":
            result = model.apply(with_tables, source, lengths, target)
        else:
            result = model.apply(with_tables, source, lengths, method="encode")
        return result[0] @ weights

    names = {"source_embedding", "target_embedding"} & set(params)
    gradients = jax.jit(jax.jacrev(outputs))({name: params[name] for name in names})
    strength = {name: np.abs(gradients[name]["weight"]).max(axis=-1) for name in names}
    source_table = strength.get("source_embedding", strength["target_embedding"])
    return np.concatenate([source_table[:, :S], strength["target_embedding"][:, S : S + T]], axis=1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("positions", ["sinusoidal", "rope", "t5-bias", "alibi"])
def test_no_gradient_from_the_future_nor_from_padding(architecture, positions):
    config = tiny_config(architecture=architecture, positions=positions, shared_embeddings="none")
    strength = influence(config)
    for at in range(T):
        real_source, padding = strength[at, :3], strength[at, 3:S]
        past, future = strength[at, S : S + at + 1], strength[at, S + at + 1 :]
        assert (real_source > 1e-4).all()
        assert (past > 1e-4).all()
        assert not padding.any()
        assert not future.any()


@pytest.mark.parametrize("positions", ["sinusoidal", "rope", "t5-bias", "alibi"])
def test_an_encoder_sees_both_sides_but_no_padding(positions):
    strength = influence(tiny_config(positions=positions, shared_embeddings="none"), "encoded")
    for at in range(3):
        assert (strength[at, :3] > 1e-4).all()
        assert not strength[at, 3:].any()


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rope", "t5-bias", "alibi", "none"])
def test_an_encoder_knows_the_order_exactly_if_it_has_positions(positions):
    config = tiny_config(positions=positions, decoder_layers=1)
    lengths = np.full(B, S, np.int32)
    reversed_ = logits_of(config, source=SOURCE[:, ::-1], lengths=lengths)
    forward = logits_of(config, lengths=lengths)
    if positions == "none":
        assert_close(reversed_, forward, times=10)
    elif positions == "alibi":  # reversing keeps all distances
        assert_close(reversed_, forward, times=10)
        swapped = logits_of(config, source=SOURCE[:, [1, 0, 2, 3, 4]], lengths=lengths)
        assert np.abs(swapped - forward).max() > 1e-2
    else:
        assert np.abs(reversed_ - forward).max() > 1e-2


@pytest.mark.parametrize(("architecture", "norm"), [("encoder-decoder", "layernorm"), ("decoder-only", "rmsnorm")])
def test_an_empty_row_has_finite_logits_and_gradients(architecture, norm):
    """As the last batch of an epoch has them: no source, no target, no weight."""
    config = tiny_config(architecture=architecture, norm=norm, attention_dropout_rate=0.2, decoder_layers=1)
    model, params = tiny_model(config), random_params(config)
    weights = np.array([[1.0], [1.0], [0.0]], np.float32)

    def loss(params, rngs):
        lengths = jnp.array([5, 2, 0])
        logits = model.apply({"params": params}, jnp.array(SOURCE), lengths, jnp.array(TARGET), rngs=rngs)
        return (weights * smoothed_cross_entropy(logits, jnp.array(TARGET))).sum(), logits

    for rngs in ({}, {"dropout": jax.random.key(0)}):
        gradients, logits = jax.jit(jax.grad(loss, has_aux=True))(params, rngs)
        assert np.isfinite(logits).all()
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


# Dropout


@pytest.mark.parametrize(
    ("rate", "kind"),
    [
        ("dropout_rate", "threefry2x32"),
        ("attention_dropout_rate", "rbg"),
        ("feed_forward_dropout_rate", "rbg"),
    ],
)
def test_each_dropout_is_on_exactly_when_keys_are_passed(rate, kind):
    none = {"dropout_rate": 0.0, "attention_dropout_rate": 0.0, "feed_forward_dropout_rate": 0.0}
    off = tiny_config(**none, decoder_layers=1)
    config = off.replace(**{rate: 0.3})
    model, params = tiny_model(config), random_params(off)

    inputs = [jnp.array(x) for x in (SOURCE, SOURCE_LENGTHS, TARGET)]
    run = jax.jit(lambda key: model.apply({"params": params}, *inputs, rngs={"dropout": key}))

    one, same, other = (np.asarray(run(jax.random.key(seed, impl=kind))) for seed in (0, 0, 1))
    plain = logits_of(off)
    assert_same_bits(logits_of(config), plain)
    assert_same_bits(one, same)
    assert np.abs(one - plain).max() > 1e-2
    assert np.abs(one - other).max() > 1e-2


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_place_drops_by_its_own_key(architecture, monkeypatch):
    """After the embeddings, each sublayer, each attention's weights and each hidden layer; no two alike."""
    keys = []

    def note(x, rate, key):
        jax.debug.callback(lambda data: keys.append((rate, data.tobytes())), jax.random.key_data(key))
        return x

    monkeypatch.setattr(layers, "dropout", note)
    config = tiny_config(
        architecture=architecture, dropout_rate=0.1, attention_dropout_rate=0.2, feed_forward_dropout_rate=0.3
    )
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), param_shapes(config))
    model = build_model(config, dtype="float32")
    inputs = [jnp.array(x) for x in (SOURCE, SOURCE_LENGTHS, TARGET)]
    jax.jit(lambda key: model.apply({"params": params}, *inputs, rngs={"dropout": key}))(jax.random.key(0))
    jax.effects_barrier()
    stacks = [(1, 1, 2), (2, 2, 3)] if architecture == "encoder-decoder" else [(2, 1, 2)]
    rates = [rate for rate, _ in keys]
    assert rates.count(0.1) == sum(1 + num_layers * sublayers for num_layers, _, sublayers in stacks)
    assert rates.count(0.2) == sum(num_layers * attentions for num_layers, attentions, _ in stacks)
    assert rates.count(0.3) == sum(num_layers for num_layers, _, _ in stacks)
    assert len(set(keys)) == len(keys)


def test_a_sublayers_dropout_falls_on_its_output(monkeypatch):
    """Where it drops everything, only the last norm's bias is left of a pre-norm decoder, whatever the sublayers do."""
    monkeypatch.setattr(layers, "dropout", lambda x, rate, key: jnp.zeros_like(x))
    config = tiny_config(dropout_rate=0.5)
    params = random_params(config)
    inputs = [jnp.array(x) for x in (SOURCE, SOURCE_LENGTHS, TARGET)]
    run = jax.jit(lambda key: tiny_model(config).apply({"params": params}, *inputs, rngs={"dropout": key}))
    logits = run(jax.random.key(0))
    left = params["decoder"]["norm"]["bias"] @ params["target_embedding"]["weight"].T
    assert_close(logits, jnp.broadcast_to(left, logits.shape))


# Joining source and target


@pytest.mark.parametrize(("source_length", "target_length"), [(5, 3), (1, 1), (2, 6)])
@given(data=st.data())
def test_join_leaves_no_gap(data, source_length, target_length):
    rows = 3  # of few shapes, because each compiles
    lengths = data.draw(st.lists(st.integers(0, source_length), min_size=rows, max_size=rows))
    source = 100 + np.arange(rows * source_length).reshape(rows, source_length)
    target = 200 + np.arange(rows * target_length).reshape(rows, target_length)
    joined = np.asarray(join(jnp.array(source), jnp.array(lengths), jnp.array(target)))
    assert joined.shape == (rows, source_length + target_length)
    for row, length in enumerate(lengths):
        expected = [*source[row, :length], *target[row]]
        assert joined[row, : len(expected)].tolist() == expected


# Building and refusing


def test_build_model_picks_by_architecture():
    assert isinstance(build_model(tiny_config()), EncoderDecoder)
    assert isinstance(build_model(tiny_config(architecture="decoder-only")), DecoderOnly)
    assert build_model(tiny_config(), dtype="bfloat16").dtype == "bfloat16"
    assert build_model(tiny_config(), dtype="auto").dtype in ("float32", "bfloat16")


def test_build_model_refuses_what_there_is_not():
    build = inspect.unwrap(build_model)
    with pytest.raises(ValueError, match="expected dtype 'auto', 'float32' or 'bfloat16', got 'int8'"):
        build(tiny_config(), dtype="int8")
    with pytest.raises(ValueError, match="expected an attention kernel of auto, plain, xla, cudnn, got 'flash'"):
        build(tiny_config(), attention_kernel="flash")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_a_model_with_a_kernel_that_cannot_serve_says_why():
    with pytest.raises(ValueError, match="'cudnn' cannot serve here: it needs an NVIDIA GPU"):
        logits_of(tiny_config(), kernel="cudnn")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_more_tokens_than_the_model_has_positions_for_are_refused(architecture):
    config = tiny_config(architecture=architecture)
    with pytest.raises(ValueError, match="expected a source of at most 16 tokens, got 17"):
        logits_of(config, source=random_ids(B, 17))
    with pytest.raises(ValueError, match="expected a target of at most 32 tokens, got 33"):
        logits_of(config, target=random_ids(B, 33))
