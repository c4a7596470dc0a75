"""Attention weights are those of the forward pass itself; words and their pairs follow from them."""

import functools
import inspect

import flax.linen as nn
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mixtures import each_positions, name_of
from recurrent_kinds import RECURRENT_ONE, one_then_slow
from tiny_models import V, random_ids, random_params, tiny_config, tiny_model
from tolerances import assert_close

from tfm.answering import Answer
from tfm.buckets import Buckets
from tfm.decoding.alignment import attention_weights, averaged, pharaoh, word_alignment
from tfm.decoding.inference import teacher_forced
from tfm.decoding.score import score
from tfm.nn.attention import Attention
from tfm.pipeline import TextModel
from tfm.tokenizer import Tokenizer

B, S, T = 3, 5, 4
SOURCE, TARGET = random_ids(B, S, seed=1), random_ids(B, T, seed=2)
SOURCE_LENGTHS, TARGET_LENGTHS = np.array([5, 1, 3]), np.array([4, 2, 1])
CONFIGS = [
    tiny_config(positions="t5-bias", num_kv_heads=2),
    tiny_config(positions="rope", num_kv_heads=2, norm_position="post", architecture="decoder-only"),
]
every_architecture = pytest.mark.parametrize(
    "config", [*one_then_slow(CONFIGS), RECURRENT_ONE], ids=lambda config: config.architecture
)


pytestmark = pytest.mark.usefixtures("compile_fast")


def weights(config, source=SOURCE, target=TARGET, source_lengths=SOURCE_LENGTHS, target_lengths=TARGET_LENGTHS, **how):
    lengths = dict(source_lengths=source_lengths, target_lengths=target_lengths)
    found = attention_weights(tiny_model(config, **how), random_params(config), source, target, **lengths)
    return jax.tree.map(np.asarray, found)


# --- the weights


def attentions_of_a_pass(config, source, source_lengths, target):
    """By path: the values that each attention of a forward pass mixed, [B N M H], and what it gave, [B Q D]."""
    model = tiny_model(config, kernel="xla")

    @jax.jit
    def watched(params, source, source_lengths, target):
        found = {}

        def watch(call, args, kwargs, context):
            output = call(*args, **kwargs)
            if isinstance(context.module, Attention) and context.method_name == "__call__":
                found[context.module.path] = args[1].values, output
            return output

        with nn.intercept_methods(watch):
            model.apply({"params": params}, source, source_lengths, teacher_forced(model, target))
        return found

    found = jax.tree.map(np.asarray, watched(random_params(config), source, source_lengths, target))
    group = config.num_heads // config.kv_heads
    return {path: (np.repeat(values, group, axis=1), output) for path, (values, output) in found.items()}


def output_of(config, path, weights_BNQM, values_BNMH):
    """Of an attention, from its weights."""
    params = random_params(config)
    for name in path:
        params = params[name]
    mixed = np.einsum("BNQM,BNMH->BQNH", weights_BNQM, values_BNMH)
    mixed = mixed.reshape(*mixed.shape[:2], -1) @ np.asarray(params["output"]["weight"]).T
    return mixed + np.asarray(params["output"].get("bias", 0.0))


@pytest.mark.parametrize("config", each_positions(), ids=name_of)
def test_weights_and_values_make_what_each_attention_gives(config):
    lengths = np.array([5, 0, 3], np.int32)
    found = weights(config, source_lengths=lengths)
    passed = attentions_of_a_pass(config, SOURCE, lengths, TARGET)
    if config.architecture == "encoder-decoder":
        pairs = [
            (("encoder", f"layer_{i}", "self_attention"), found.encoder[i], lengths)
            for i in range(config.encoder_layers)
        ]
        for i in range(config.decoder_layers):
            pairs.append((("decoder", f"layer_{i}", "self_attention"), found.self_attention[i], TARGET_LENGTHS))
            pairs.append((("decoder", f"layer_{i}", "cross_attention"), found.cross_attention[i], TARGET_LENGTHS))
        assert len(pairs) == len(passed)
        for path, weights_BNQM, real in pairs:
            values, output = passed[path]
            remade = output_of(config, path, weights_BNQM, values)
            for row in range(B):
                assert_close(remade[row, : real[row]], output[row, : real[row]], times=4)
        return
    assert found.encoder is None
    for i in range(config.decoder_layers):
        path = ("decoder", f"layer_{i}", "self_attention")
        values, output = passed[path]
        for row, (source_length, target_length) in enumerate(zip(lengths, TARGET_LENGTHS, strict=True)):
            of_source = values[row : row + 1, :, :source_length]
            of_target = values[row : row + 1, :, source_length : source_length + T]
            looked = np.concatenate(
                [found.cross_attention[i, row, ..., :source_length], found.self_attention[i, row]], axis=-1
            )
            remade = output_of(config, path, looked[None], np.concatenate([of_source, of_target], axis=2))[0]
            given = output[row, source_length : source_length + target_length]
            assert_close(remade[:target_length], given, times=4)


@every_architecture
def test_rows_sum_to_one_and_padding_has_nothing(config):
    found = weights(config)
    real = np.arange(T)[None] < TARGET_LENGTHS[:, None]
    of_cross = found.cross_attention.sum(-1)
    ones = np.broadcast_to(real[None, :, None], of_cross.shape)
    assert not found.cross_attention[:, 1, ..., 1:].any()
    assert all(array.dtype == np.float32 for array in jax.tree.leaves(found))
    if config.architecture == "recurrent":
        assert_close(of_cross, ones)
        assert found.self_attention is found.encoder is None
        return
    of_self = found.self_attention.sum(-1)
    if config.architecture == "decoder-only":
        assert_close(of_self + of_cross, ones)
    else:
        assert_close(of_self, ones)
        assert_close(of_cross, ones)
        real_source = np.arange(S)[None] < SOURCE_LENGTHS[:, None]
        assert_close(found.encoder.sum(-1), np.broadcast_to(real_source[None, :, None], found.encoder.shape[:-1]))
        assert not found.encoder[:, 1, :, :, 1:].any()
    assert not np.triu(found.self_attention, 1).any()


@every_architecture
def test_what_has_no_weight_changes_nothing(config):
    found = weights(config)
    junk_source = np.where(np.arange(S) < SOURCE_LENGTHS[:, None], SOURCE, random_ids(B, S, seed=5))
    junk_target = np.where(np.arange(T) < TARGET_LENGTHS[:, None], TARGET, random_ids(B, T, seed=6))
    assert (junk_source != SOURCE).any()
    assert (junk_target != TARGET).any()
    other = weights(config, junk_source, np.pad(junk_target, ((0, 0), (0, 2))))
    assert_close(other.cross_attention[..., :T, :], found.cross_attention)
    if config.architecture != "recurrent":
        assert_close(other.self_attention[..., :T, :T], found.self_attention)
    alone = weights(config, SOURCE[2:, :3], TARGET[2:, :1], None, None)
    assert_close(alone.cross_attention[:, 0, :, 0], found.cross_attention[:, 2, :, 0, :3])
    changed = SOURCE.copy()
    changed[0, 2] = (changed[0, 2] + 1) % V
    assert np.abs(weights(config, changed).cross_attention - found.cross_attention)[:, 0].max() > 1e-3


@every_architecture
def test_a_row_knows_no_token_from_its_own_on(config):
    found = weights(config, target_lengths=None)
    for t in range(T):
        other = weights(config, target=np.where(np.arange(T) < t, TARGET, (TARGET + 1) % V), target_lengths=None)
        if config.architecture != "recurrent":
            assert_close(other.self_attention[..., : t + 1, :], found.self_attention[..., : t + 1, :])
        assert_close(other.cross_attention[..., : t + 1, :], found.cross_attention[..., : t + 1, :])
        # additive attention looks before the step that reads token t, and so sees it one row later
        first = t + 1 + (config.architecture == "recurrent")
        assert first >= T or np.abs(other.cross_attention - found.cross_attention)[..., first:, :].max() > 1e-3


@pytest.mark.parametrize("kernel", ["auto", "xla", "cudnn"])
def test_the_kernel_does_not_matter(kernel):
    assert_close(weights(CONFIGS[0], kernel=kernel).cross_attention, weights(CONFIGS[0]).cross_attention)


def test_weights_are_float32_in_a_model_of_bfloat16():
    found, exact = weights(CONFIGS[0], dtype="bfloat16"), weights(CONFIGS[0])
    assert found.cross_attention.dtype == np.float32
    assert_close(found.cross_attention.sum(-1), exact.cross_attention.sum(-1))
    assert_close(found.cross_attention, exact.cross_attention, dtype="bfloat16", times=4)  # the last of four layers


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"expected target lengths from 1 to 4, got 0 to 4"):
        weights(CONFIGS[0], target_lengths=np.array([4, 0, 1]))
    with pytest.raises(ValueError, match=f"expected target ids from 0 to {V - 1}, got {V}"):
        weights(CONFIGS[0], target=np.full((B, T), V))
    with pytest.raises(ValueError, match="expected a target of at most 32 tokens, got 33"):
        weights(CONFIGS[0], target=random_ids(B, 33), target_lengths=None)


# --- words


def looks(*rows):
    return np.array(rows, np.float32)[None, None]


def test_a_words_weight_is_the_sum_over_its_source_tokens_and_the_mean_over_its_target_tokens():
    look = looks([0.4, 0.3, 0.3], [0.9, 0.05, 0.05], [0.1, 0.3, 0.2])
    assert word_alignment(look, [0, 1, 1], [0, 1, 2]) == [(0, 1), (1, 0), (1, 2)]  # 0.3 + 0.3 are more than 0.4
    assert word_alignment(look, [0, 1, 1], [0, 0, 1]) == [(0, 0), (1, 1)]  # and 0.4 + 0.9 more than 0.6 + 0.1
    assert word_alignment(look, [0, None, 1], [None, None, 0]) == [(1, 0)]
    assert word_alignment(looks([0.1, 0.9], [0.0, 1.0]), [0, None], [0, 1]) == [(0, 0)]  # the second saw no word
    assert word_alignment(look, [None] * 3, [0, 1, 2]) == []
    assert word_alignment(look, [0, 1, 2], [None] * 3) == []


def test_layers_are_chosen_and_heads_averaged():
    random = np.random.default_rng(0).random((3, 2, 4, 5)).astype(np.float32)
    assert_close(averaged(random), random.mean((0, 1)))
    assert_close(averaged(random, -2), random[1].mean(0))
    assert_close(averaged(random, 2), random[2].mean(0))
    for layer in (3, -4, 1.0, "last"):
        with pytest.raises(ValueError, match=r"expected a layer from -3 to 2, or None for all, got"):
            inspect.unwrap(averaged)(random, layer)
    with pytest.raises(ValueError, match="expected a word or None for each of 5 source tokens, got 4"):
        word_alignment(random, [0, 1, 2, 3], [0, 1, 2, 3])


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99))))
def test_pharaoh_format_can_be_read_back(pairs):
    assert [tuple(map(int, pair.split("-"))) for pair in pharaoh(pairs).split()] == pairs


# --- texts


CORPUS = ["the quick brown fox", "我 爱 你", "猫 and 一只 dog", "👩‍👩‍👧 ok 😀", "ein Haus"] * 3
BPE = Tokenizer.train(CORPUS, kind="bpe", vocab_size=300)
CHAR = Tokenizer.train(CORPUS, kind="char", vocab_size=290)
TEXTS = ["the quick fox", "", "我 爱 你 猫", "👩‍👩‍👧 ok 😀", "  ", "ein", "the brown dog " * 3]
ANSWERS = ["我 爱", "fox", "the  quick 😀", "", "\t", "Haus 猫 ok ok", "a b c d e f g"]


@functools.cache
def text_model(architecture="encoder-decoder", max_batch=64):
    config = tiny_config(
        architecture=architecture,
        encoder_layers=2 if architecture == "recurrent" else 1,
        source_vocab_size=BPE.vocab_size if architecture == "decoder-only" else CHAR.vocab_size,
        target_vocab_size=BPE.vocab_size,
        max_source_length=60,
        max_target_length=30,
    )
    source = BPE if architecture == "decoder-only" else CHAR
    return TextModel(config, random_params(config), source, BPE, weights="float32", max_batch=max_batch)


def padded(source, target):
    """One shape for all."""
    rows = dict(source=[source + [0] * (60 - len(source))], target=[target + [0] * (30 - len(target))])
    return dict(**rows, source_lengths=[len(source)], target_lengths=[len(target)])


architectures = pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder-only", "recurrent"])


@architectures
def test_texts_are_aligned_as_their_ids_are_and_in_order(architecture):
    model = text_model(architecture)
    aligned = model.align(TEXTS, ANSWERS, layer=-1)
    for text, answer, found in zip(TEXTS, ANSWERS, aligned, strict=True):
        source, target = ([*t.encode(x), t.end_id] for t, x in ((model.source_tokenizer, text), (BPE, answer)))
        exact = attention_weights(model.model, model.params, **padded(source, target)).cross_attention
        exact = np.asarray(exact)[:, 0, :, : len(target), : len(source)]
        assert_close(found.weights, averaged(exact, -1), times=4)
        assert found.weights.shape == (len(found.target_tokens), len(found.source_tokens))
        assert found.source_tokens == model.source_tokenizer.tokens(source)
        assert found.target_tokens == BPE.tokens(target)
        assert (found.source_words, found.target_words) == (text.split(), answer.split())
        words = [*model.source_tokenizer.words(text), None], [*BPE.words(answer), None]
        assert found.pairs == word_alignment(exact, *words, layer=-1)
        assert found.pharaoh == pharaoh(found.pairs)
        if text.split():
            assert sorted(target for _, target in found.pairs) == list(range(len(answer.split())))
        else:
            assert found.pairs == []
        assert all(source < len(text.split()) for source, _ in found.pairs)
    assert any(source != 0 for found in aligned for source, _ in found.pairs)
    assert model.align([], []) == []


@architectures
def test_what_was_generated_is_scored_and_aligned_by_its_own_ids(architecture):
    model = text_model(architecture)
    answers = model.generate(TEXTS, max_tokens=8)
    assert {answer.finished for answer in answers} >= {False}
    scores = model.score(TEXTS, answers)
    assert [one.score for one in scores] == pytest.approx([answer.score for answer in answers], abs=1e-4)
    for answer, one, aligned in zip(answers, scores, model.align(TEXTS, answers), strict=True):
        assert one.tokens == answer.tokens + [BPE.end_id] * answer.finished
        assert len(one.tokens) == len(one.token_scores) == len(aligned.target_tokens)
        assert all(target < len(answer.text.split()) for _, target in aligned.pairs)


@architectures
def test_scores_are_in_order_and_do_not_depend_on_the_batch(architecture):
    model = text_model(architecture)
    scores = model.score(TEXTS, ANSWERS)
    for i, one in enumerate(scores):
        assert one.tokens == [*BPE.encode(ANSWERS[i]), BPE.end_id]
        assert one.score == pytest.approx(sum(one.token_scores), abs=1e-4)
        source = [*model.source_tokenizer.encode(TEXTS[i]), BPE.end_id]
        exact = score(model.model, model.params, **padded(source, one.tokens))
        assert one.score == pytest.approx(float(exact.log_probs[0]), abs=1e-4)
    assert len({round(one.score, 3) for one in scores}) == len(scores)
    one_by_one = text_model(architecture, max_batch=1).score(iter(TEXTS), iter(ANSWERS))
    assert [one.score for one in one_by_one] == pytest.approx([one.score for one in scores], abs=1e-4)


def answer_of(token: object) -> Answer:
    """One of this token alone, whatever it is."""
    answer = Answer("b", 0.0, [], finished=True)
    answer.tokens.append(token)
    return answer


def test_pairs_that_cannot_be_are_refused_before_any_is_run(monkeypatch):
    model = text_model()
    monkeypatch.setattr("tfm.pairs.score", None)
    monkeypatch.setattr("tfm.pairs._cross_attention", None)
    for ask in (inspect.unwrap(TextModel.score), inspect.unwrap(TextModel.align)):
        for texts, answers, message in (
            ("ab", ["a"], "expected several texts, got 'ab'"),
            (["ab"], "a", "expected several answers, got 'a'"),
            (["a", "b"], ["a"], "expected an answer for each of 2 texts, got 1"),
            (["a", "b"], ["a", None], "expected a str as answer 1, got NoneType"),
            (["a", "b"], ["a", "\ud800"], "answer 1 is not Unicode text"),
            (["a"], ["我" * 40], r"expected answers of at most 30 tokens \(the model's max_target_length\), end token"),
            (["a"], [answer_of(BPE.vocab_size)], f"expected ids from 0 to {BPE.vocab_size - 1} in answer 0, got"),
            (["a"], [answer_of("x")], f"expected ids from 0 to {BPE.vocab_size - 1} in answer 0, got 'x'"),
            (["a" * 60], ["a"], r"expected texts of at most 60 tokens .* text 0 has 61"),
        ):
            with pytest.raises(ValueError, match=message):
                ask(model, texts, answers)
    with pytest.raises(ValueError, match="expected a layer from -2 to 1, or None for all, got 2"):
        model.align(["a"], ["b"], layer=2)


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), max_size=40), st.integers(1, 500))
def test_batches_of_pairs_hold_each_pair_once_within_the_budget(lengths, max_batch_tokens):
    buckets = Buckets(text_model().config, max_batch=8, max_batch_tokens=max_batch_tokens)
    batches = list(buckets.pairs(lengths))
    assert sorted(i for indices, _ in batches for i in indices) == list(range(len(lengths)))
    for indices, shape in batches:
        assert 1 <= len(indices) <= shape.rows <= 8
        assert shape.rows == 1 or shape.rows * (shape.source_length + shape.capacity) <= max_batch_tokens
        assert all(lengths[i][0] <= shape.source_length <= 60 for i in indices)
        assert all(lengths[i][1] <= shape.capacity <= 30 for i in indices)
