"""Recurrent models against their equations; what holds for all models is tested with theirs, too."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mixtures import name_of
from recurrent_kinds import ADDITIVE, EVERY, FED, FIXED, ONE_LAYER, recurrent_config
from tiny_models import V, random_ids, random_params, tiny_config, tiny_model
from tolerances import assert_close, assert_same_bits

from tfm.batch import make_batch
from tfm.config import PRESETS, preset
from tfm.decoding.alignment import attention_weights
from tfm.decoding.beam import BeamSearch
from tfm.decoding.generate import generate, generate_n_best
from tfm.decoding.inference import decode_step, prefill
from tfm.nn import layers
from tfm.nn.cache import cache_bytes, grow, init_cache, reorder, widen
from tfm.nn.params import count_params, init_params, param_shapes, prepare_for_inference
from train.config import LossConfig
from train.loss import batch_loss

pytestmark = pytest.mark.usefixtures("compile_fast")

B, S, T, D = 3, 5, 7, 16
SOURCE, TARGET = random_ids(B, S, seed=1), random_ids(B, T, seed=2)
SOURCE_LENGTHS = np.array([5, 1, 3], np.int32)
every_kind = pytest.mark.parametrize("config", EVERY, ids=name_of)


def logits_of(config, params=None, *, source=SOURCE, lengths=SOURCE_LENGTHS, target=TARGET):
    params = random_params(config) if params is None else params
    return np.asarray(forward(config)({"params": params}, source, lengths, target))


@functools.cache
def forward(config):
    return jax.jit(tiny_model(config).apply)


# The papers' formulas


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def dense(params, x):
    return x @ params["kernel"] + params.get("bias", 0.0)


def linear(params, x):
    return params["weight"] @ x


class InNumpy:
    """The papers' equations, one token of one row after another in float64, from the same parameters."""

    def __init__(self, config, params):
        self.config = config
        self.params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
        self.step_params = self.params["decoder"]["step"]

    def next(self, params, carry, x):
        """One step of a cell: the new carry, whose last part is h."""
        if self.config.cell == "rnn":
            return (np.tanh(dense(params["i"], x) + dense(params["h"], carry[0])),)
        if self.config.cell == "gru":
            (h,) = carry
            reset = sigmoid(dense(params["ir"], x) + dense(params["hr"], h))
            update = sigmoid(dense(params["iz"], x) + dense(params["hz"], h))
            new = np.tanh(dense(params["in"], x) + reset * dense(params["hn"], h))
            return ((1 - update) * new + update * h,)
        memory, h = carry
        gates = {gate: dense(params[f"i{gate}"], x) + dense(params[f"h{gate}"], h) for gate in "ifgo"}
        memory = sigmoid(gates["f"]) * memory + sigmoid(gates["i"]) * np.tanh(gates["g"])
        return memory, sigmoid(gates["o"]) * np.tanh(memory)

    def read(self, params, sequence):
        """All states, and the last carry."""
        carry, states = (np.zeros(D),) * (2 if self.config.cell == "lstm" else 1), []
        for x in sequence:
            carry = self.next(params["cell"], carry, x)
            states.append(carry[-1])
        return states, carry

    def encode(self, sequence):
        """The last layer's states, the last one, and the first carries of the decoder."""
        params, starts = self.params["encoder"], []
        for i in range(self.config.encoder_layers):
            layer = params[f"layer_{i}"]
            if not self.config.bidirectional:
                sequence, carry = self.read(layer, sequence)
                starts.append(carry)
                last = carry[-1]
                continue
            forward, forward_carry = self.read(layer["forward_rnn"], sequence)
            backward, backward_carry = self.read(layer["backward_rnn"], sequence[::-1])
            sequence = [np.concatenate(both) for both in zip(forward, backward[::-1], strict=True)]
            *memory, last = (np.concatenate(both) for both in zip(forward_carry, backward_carry, strict=True))
            start = [linear(params[f"start_memory_{i}"], both) for both in memory]
            starts.append((*start, np.tanh(linear(params[f"start_hidden_{i}"], last))))
        return sequence, last, starts

    def look(self, h, states, t):
        """The context of Bahdanau et al. 2014 or Luong et al. 2015."""
        params, context = self.step_params.get("attention", {}), self.config.source_context
        scores = []
        for state in states:
            if context == "dot":
                scores.append(h @ state)
            elif context == "general":
                scores.append(h @ linear(params["key"], state))
            else:
                hidden = np.tanh(linear(params["query"], h) + linear(params["key"], state))
                scores.append(linear(params["energy"], hidden)[0])
        at, nearness, window = np.arange(len(states)), 1.0, self.config.attention_window
        seen = np.ones(len(states), bool)
        if self.config.local_attention == "monotonic":
            seen = abs(at - min(t, len(states) - 1)) <= window
        if self.config.local_attention == "predictive":
            hidden = np.tanh(linear(params["middle_hidden"], h))
            middle = len(states) * sigmoid(linear(params["middle"], hidden)[0])
            seen, nearness = abs(at - middle) <= window, np.exp(-((at - middle) ** 2) / (2 * (window / 2) ** 2))
        weights = np.where(seen, np.exp(scores), 0)
        return weights / weights.sum() * nearness @ np.array(states)

    def logits(self, source, target):
        config, params, step = self.config, self.params, self.step_params
        tables = [params[name]["weight"] if name in params else None for name in ("source_embedding", "output")]
        target_table = params["target_embedding"]["weight"]
        source_table = target_table if tables[0] is None else tables[0]
        states, last, carries = self.encode(list(source_table[source] * math.sqrt(D)))
        is_luong, attentional, found = config.source_context in ("dot", "general", "concat"), np.zeros(D), []
        for t, token in enumerate(target):
            x = [target_table[token] * math.sqrt(D)]
            if config.source_context == "fixed-each-step":
                x.append(last)
            if config.source_context == "additive":
                x.append(self.look(carries[-1][-1], states, t))
            if config.input_feeding:
                x.append(attentional)
            x = np.concatenate(x)
            for i in range(config.decoder_layers):
                carries[i] = self.next(step[f"layer_{i}"], carries[i], x)
                x = carries[i][-1]
            if is_luong:
                x = attentional = np.tanh(linear(step["combine"], np.concatenate([self.look(x, states, t), x])))
            out = params["output"] if tables[1] is not None else {"weight": target_table, **params["output_bias"]}
            found.append(linear(out, x) + out["bias"])
        return np.array(found)


@every_kind
def test_the_model_is_the_papers(config):
    reference = InNumpy(config, random_params(config))
    actual = logits_of(config)
    assert actual.dtype == np.float32
    for row in range(B):
        assert_close(actual[row], reference.logits(SOURCE[row, : SOURCE_LENGTHS[row]], TARGET[row]), times=10)


@every_kind
def test_parameters_are_as_many_as_the_equations_have(config):
    reads = {
        "fixed-each-step": D * (1 + config.bidirectional),
        "additive": D * (1 + config.bidirectional),
    }.get(config.source_context, D * config.input_feeding)
    gates, biases = {"rnn": (1, 1), "lstm": (4, 4), "gru": (3, 4)}[config.cell]
    width = D * (1 + config.bidirectional)

    def cell(read):
        return gates * (read * D + D * D) + biases * D

    directions = 1 + config.bidirectional
    encoder = directions * (cell(D) + (config.encoder_layers - 1) * cell(width))
    if config.bidirectional:
        encoder += config.encoder_layers * (2 if config.cell == "lstm" else 1) * width * D
    decoder = cell(D + reads) + (config.decoder_layers - 1) * cell(D)
    if config.source_context in ("dot", "general", "concat"):
        decoder += (width + D) * D
    decoder += {"dot": 0, "general": width * D}.get(config.source_context, width * D + D * D + D) * (
        config.source_context not in ("fixed", "fixed-each-step")
    )
    decoder += (D * D + D) * (config.local_attention == "predictive")
    tables = {"none": 3, "target-output": 2, "all": 1}[config.shared_embeddings] * V * D + V
    assert count_params(param_shapes(config)) == encoder + decoder + tables


@pytest.mark.parametrize("name", [name for name in PRESETS if preset(name).architecture == "recurrent"])
def test_every_preset_is_a_model(name):
    parts = param_shapes(preset(name))
    assert {"encoder", "decoder", "source_embedding", "target_embedding", "output"} == set(parts)


# Who sees whom


def influence(config):
    """How the gradient of each target position's logits falls on each token: [T, S + T]."""
    model, params = tiny_model(config), random_params(config)
    tables = {name: params[name] for name in ("source_embedding", "target_embedding")}
    source, target = jnp.arange(S)[None], jnp.arange(4)[None]  # every token has a row of the table of its own
    mix = np.random.default_rng(0).standard_normal(V)

    def outputs(tables):
        return model.apply({"params": {**params, **tables}}, source, jnp.array([3]), target)[0] @ mix

    gradients = jax.jit(jax.jacrev(outputs))(tables)
    strength = {name: np.abs(gradients[name]["weight"]).max(axis=-1) for name in tables}
    return np.concatenate([strength["source_embedding"][:, :S], strength["target_embedding"][:, :4]], axis=1)


@every_kind
def test_no_gradient_from_the_future_nor_from_padding(config):
    strength = influence(config.replace(shared_embeddings="none"))
    for at in range(4):
        assert (strength[at, :3] > 1e-5).all()
        assert not strength[at, 3:S].any()
        assert (strength[at, S : S + at + 1] > 1e-5).all()
        assert not strength[at, S + at + 1 :].any()


@every_kind
def test_padding_reaches_no_carry(config):
    """Of the source or of the prompt: what lies there changes not one bit, however much of it there is."""
    model, params, lengths = tiny_model(config), random_params(config), np.array([1, 6, 3], np.int32)
    _, cache = prefill(model, params, SOURCE, SOURCE_LENGTHS, TARGET, lengths, capacity=8)
    junk = [
        np.where(np.arange(x.shape[1]) < real[:, None], x, random_ids(*x.shape, seed=9))
        for x, real in ((SOURCE, SOURCE_LENGTHS), (TARGET, lengths))
    ]
    _, other = prefill(model, params, junk[0], SOURCE_LENGTHS, junk[1], lengths, capacity=8)
    jax.tree.map(assert_same_bits, other.carries, cache.carries)
    _, alone = prefill(model, params, SOURCE[2:, :3], None, TARGET[2:, :3], None, capacity=8)
    for one, several in zip(*map(jax.tree.leaves, (alone.carries, cache.carries)), strict=True):
        assert_close(one[0], several[2])


def test_local_attention_sees_its_window_and_nothing_else():
    monotonic = EVERY[-1].replace(attention_window=1)
    found = attention_weights(
        tiny_model(monotonic), random_params(monotonic), SOURCE, TARGET, source_lengths=SOURCE_LENGTHS
    ).cross_attention[0, :, 0]
    for row, length in enumerate(SOURCE_LENGTHS):
        for t in range(T):
            near = [s for s in range(length) if abs(s - min(t, length - 1)) <= 1]
            assert np.flatnonzero(found[row, t]).tolist() == near
    assert_close(found.sum(axis=-1), np.ones((B, T)))
    predicted = attention_weights(
        tiny_model(FED), random_params(FED), SOURCE, TARGET, source_lengths=SOURCE_LENGTHS
    ).cross_attention[0, :, 0]
    assert (predicted.sum(axis=-1) < 1).all()
    assert (predicted.sum(axis=-1) > 0).all()


# Dropout


def test_dropout_falls_between_layers_and_never_between_tokens(monkeypatch):
    """On both embeddings, on what goes from layer to layer, token by token, and on the output; anew at each token."""
    shapes = set()

    def noise(x, rate, key):
        shapes.add(x.shape)
        return jax.random.normal(key, x.shape) if x.shape == (B, D) else x

    monkeypatch.setattr(layers, "dropout", noise)
    config = FIXED.replace(dropout_rate=0.25)
    params = jax.tree.map(lambda leaf: leaf, random_params(config))
    # so the second layer knows of nothing but what it reads
    params["decoder"]["step"]["layer_1"]["h"] = {"kernel": jnp.zeros((D, D))}
    inputs = [jnp.array(x) for x in (SOURCE, SOURCE_LENGTHS, np.zeros((B, T), np.int32))]
    model = tiny_model(config)
    run = jax.jit(lambda key: model.apply({"params": params}, *inputs, rngs={"dropout": key}))
    logits = np.asarray(run(jax.random.key(0)))
    assert shapes == {(B, S, D), (B, D), (B, T, D)}
    for t in range(1, T):
        assert np.abs(logits[:, t] - logits[:, :t].swapaxes(0, 1)).max(axis=-1).min() > 1e-2
    shapes.clear()
    jax.jit(lambda: model.apply({"params": params}, *inputs))()
    assert not shapes


def test_dropout_is_on_exactly_when_keys_are_passed():
    off = ONE_LAYER.replace(dropout_rate=0.0)
    config, params = off.replace(dropout_rate=0.3), random_params(off)
    inputs = [jnp.array(x) for x in (SOURCE, SOURCE_LENGTHS, TARGET)]
    run = jax.jit(lambda key: tiny_model(config).apply({"params": params}, *inputs, rngs={"dropout": key}))
    one, same, other = (np.asarray(run(jax.random.key(seed, impl="rbg"))) for seed in (0, 0, 1))
    plain = logits_of(off)
    assert_same_bits(logits_of(config, params), plain)
    assert_same_bits(one, same)
    assert np.abs(one - plain).max() > 1e-2
    assert np.abs(one - other).max() > 1e-2


# The cache


@every_kind
def test_the_cache_has_one_size_whatever_the_length(config):
    sizes = dict(batch=B, source_length=S)
    for dtype in ("float32", "bfloat16", "int8"):
        cache = init_cache(config, **sizes, capacity=4, dtype=dtype)
        total = cache_bytes(config, **sizes, capacity=4, dtype=dtype)
        assert total == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
        assert total == cache_bytes(config, **sizes, capacity=10**9, dtype=dtype)
    _, filled = prefill(tiny_model(config), random_params(config), SOURCE, SOURCE_LENGTHS, capacity=4)
    empty = init_cache(config, **sizes, capacity=4)
    assert jax.tree.structure(filled) == jax.tree.structure(empty)
    assert [x.shape for x in jax.tree.leaves(filled)] == [x.shape for x in jax.tree.leaves(empty)]
    assert grow(filled, 1000) is filled
    wide = widen(filled, 3)
    said = cache_bytes(config, **sizes, capacity=4, beams=3)
    assert said == sum(leaf.nbytes for leaf in jax.tree.leaves(wide))


@pytest.mark.parametrize("config", [FIXED, FED], ids=name_of)
def test_hypotheses_take_their_carries_along_and_share_their_source(config):
    model, params = tiny_model(config), random_params(config)
    _, narrow = prefill(model, params, SOURCE, SOURCE_LENGTHS, capacity=4)
    with pytest.raises(ValueError, match=r"from widen\(cache, width\), got one without"):
        reorder(narrow, jnp.arange(B))
    wide = widen(narrow, 2)
    with pytest.raises(ValueError, match="got 2 and a cache of 2 hypotheses a row"):
        widen(wide, 2)
    _, wide = decode_step(model, params, random_ids(2 * B, 1, seed=3), wide)
    parents = np.array([1, 0, 2, 2, 5, 4])
    moved = reorder(wide, jnp.array(parents))
    own = [(cache.carries, cache.attentional) for cache in (wide, moved)]
    for was, now in zip(*map(jax.tree.leaves, own), strict=True):
        assert_same_bits(now, np.asarray(was)[parents])
    jax.tree.map(assert_same_bits, moved.source, wide.source)
    assert [x.shape for x in jax.tree.leaves(moved.source)] == [x.shape for x in jax.tree.leaves(narrow.source)]
    assert moved.width == 2


@pytest.mark.parametrize("config", [ADDITIVE, FED], ids=name_of)
def test_what_is_projected_once_is_not_projected_again(config):
    model, params = tiny_model(config), random_params(config)
    _, cache = prefill(model, params, SOURCE, SOURCE_LENGTHS, capacity=4)
    without = jax.tree.map(lambda x: x, params)
    without["encoder"] = jax.tree.map(lambda x: x * jnp.nan, params["encoder"])
    attention = without["decoder"]["step"]["attention"]
    attention["key"] = jax.tree.map(lambda x: x * jnp.nan, attention["key"])
    tokens = TARGET[:, :1]
    assert_same_bits(decode_step(model, without, tokens, cache)[0], decode_step(model, params, tokens, cache)[0])


# Prepared parameters


def test_prepared_parameters_answer_like_those_they_were_made_of():
    config = recurrent_config("lstm", "general", layers=1, shared_embeddings="none")
    params, inputs = random_params(config), (SOURCE, SOURCE_LENGTHS, TARGET)
    expected = logits_of(config)
    for weights in ("float32", "bfloat16", "int8"):
        prepared = prepare_for_inference(params, weights)
        model = tiny_model(config, "bfloat16" if weights == "bfloat16" else "float32")
        logits = jax.jit(model.apply)({"params": prepared}, *inputs)
        if weights == "float32":
            assert_close(logits, expected)
        else:
            assert 0 < np.std(logits - expected) < 0.1 * np.std(expected)
        if weights == "bfloat16":  # what the model rounds to at every step
            assert_close(logits, jax.jit(model.apply)({"params": params}, *inputs))
        kernel = prepared["decoder"]["step"]["layer_0"]["ii"]["kernel"]
        assert kernel.dtype == ("bfloat16" if weights == "bfloat16" else "float32")


# Training


def test_the_program_is_the_same_for_any_length():
    """Steps are iterations of one loop, not copies of its body."""

    def equations(length):
        target = np.zeros((B, length), np.int32)
        model = tiny_model(FED)
        jaxpr = jax.make_jaxpr(model.apply)({"params": random_params(FED)}, SOURCE, SOURCE_LENGTHS, target)
        return str(jaxpr).count("\n")

    assert equations(4) == equations(30)


def reversal(number, seed):
    """Strings of symbols 3 … 10 of 2 to 6, and the same reversed."""
    draw = np.random.default_rng(seed)
    strings = [draw.integers(3, V, draw.integers(2, 7)).tolist() for _ in range(number)]
    return strings, [string[::-1] for string in strings]


def test_reversal_is_learned():
    config = ONE_LAYER.replace(model_dim=32, dropout_rate=0.0)
    model, optimizer = tiny_model(config), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        def loss(params):
            sums = batch_loss(model, params, batch, LossConfig(label_smoothing=0.0), None)
            return sums.loss_sum / sums.weight

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    params = init_params(model, jax.random.key(0))
    state = optimizer.init(params)
    for seed in range(1, 201):
        batch = make_batch(*reversal(64, seed), config, shape=(8, 8), rows=64)
        params, state, _ = step(params, state, batch)
    sources, targets = reversal(64, 0)
    batch = make_batch(sources, targets, config, shape=(8, 8), rows=64)
    made = generate(model, params, batch.source, source_lengths=batch.source_lengths, max_tokens=8)
    right = [
        row[:length].tolist() == [*target, config.end_id]
        for row, length, target in zip(np.asarray(made.tokens), np.asarray(made.lengths), targets, strict=True)
    ]
    assert np.mean(right) >= 0.9


# Errors


def test_what_needs_attention_says_so_of_a_model_without():
    inputs = (tiny_model(FIXED), random_params(FIXED), SOURCE)
    with pytest.raises(ValueError, match=r"expected a model with attention, .* source_context 'fixed'"):
        attention_weights(*inputs, TARGET)
    with pytest.raises(ValueError, match=r"expected no coverage, .* \(source_context 'fixed'\), got 0.2"):
        generate_n_best(*inputs, max_tokens=3, search=BeamSearch(width=2, coverage=0.2))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(encoder_layers=1, decoder_layers=2), ["encoder_layers and decoder_layers", "equal", "1 and 2"]),
        (dict(source_context="dot", bidirectional=True), ["'dot'", "bidirectional", "'general'"]),
        (dict(source_context="additive", local_attention="monotonic"), ["local_attention", "'additive'", "concat"]),
        (dict(source_context="fixed", input_feeding=True), ["input_feeding", "'fixed'"]),
        (dict(attention_window=0), ["attention_window must be at least 1, not 0"]),
        (dict(dropout_rate=1.0), ["dropout_rate"]),
    ],
)
def test_a_model_that_cannot_be_is_refused(changes, words):
    settings = dict(architecture="recurrent", encoder_layers=2, decoder_layers=2) | changes
    with pytest.raises(ValueError, match="model config") as error:
        tiny_config(**settings)
    assert all(word in str(error.value) for word in words)


def test_what_only_a_transformer_has_may_be_anything():
    assert tiny_config(architecture="recurrent", model_dim=7, encoder_layers=1, decoder_layers=1).model_dim == 7


@every_kind
def test_more_tokens_than_the_model_accepts_are_refused(config):
    with pytest.raises(ValueError, match="expected a source of at most 16 tokens, got 17"):
        logits_of(config, source=random_ids(B, 17))
    with pytest.raises(ValueError, match="expected a target of at most 32 tokens, got 33"):
        logits_of(config, target=random_ids(B, 33))
