"""What is streamed comes to what is generated, never changes what was handed out, and is text at every moment."""

import inspect
import itertools

import jax
import numpy as np
import pytest
from compile_counter import count_compilations
from one_layer import CONFIGS, every_architecture
from tiny_models import random_ids, random_params, tiny_model
from tolerances import assert_same_bits, assert_same_but_for_rounding

from tfm.answering import Answer, _so_far
from tfm.config import preset
from tfm.decoding.beam import BeamSearch
from tfm.decoding.constraints import Constraints
from tfm.decoding.generate import generate
from tfm.decoding.mbr import MinimumBayesRisk
from tfm.decoding.sampling import Greedy, Samples, Sampling
from tfm.decoding.stream import stream
from tfm.nn.models import build_model
from tfm.nn.params import init_params
from tfm.pipeline import TextModel
from tfm.text_constraints import TextConstraints
from tfm.tokenizer import Tokenizer

B, S = 4, 5
SOURCE = random_ids(B, S, seed=1)
SOURCE_LENGTHS = np.array([5, 1, 3, 4], np.int32)


pytestmark = pytest.mark.usefixtures("compile_fast")


@pytest.mark.parametrize("sampler", [Greedy(), Sampling(temperature=0.9)], ids=["greedy", "sampling"])
@every_architecture
def test_states_lead_token_by_token_to_what_is_generated(config, sampler):
    model, params = tiny_model(config), random_params(config)
    arguments = dict(
        source_lengths=SOURCE_LENGTHS, max_tokens=[9, 0, 4, 12], sampler=sampler, key=jax.random.key(3), capacity=16,
        constraints=Constraints(no_repeat_ngram=3),
    )  # fmt: skip
    made = generate(model, params, SOURCE, **arguments)
    states = list(stream(model, params, SOURCE, **arguments))  # all are kept: none may be overwritten later
    assert len(states) == max(int(made.lengths.max()), 1)
    assert_same_but_for_rounding(states[-1], made, times=10)  # sums of up to 12 terms
    for number, state in enumerate(states, 1):
        assert state.lengths.tolist() == np.minimum(made.lengths, number).tolist()
        for row, length in enumerate(state.lengths):
            assert_same_bits(state.tokens[row, :length], made.tokens[row, :length])
            assert (state.tokens[row, length:] == config.pad_id).all()
            assert bool(state.finished[row]) == (bool(made.finished[row]) and length == made.lengths[row])


def test_a_second_stream_compiles_nothing():
    model, params = tiny_model(CONFIGS[0]), random_params(CONFIGS[0])
    arguments = dict(source_lengths=SOURCE_LENGTHS, capacity=16)
    list(stream(model, params, SOURCE, max_tokens=9, sampler=Sampling(), key=jax.random.key(0), **arguments))
    with count_compilations() as compilations:
        sampler = Sampling(temperature=0.5, top_k=3)
        list(
            stream(model, params, SOURCE, max_tokens=[1, 5, 7, 3], sampler=sampler, key=jax.random.key(9), **arguments)
        )
    assert compilations.count == 0, compilations.names


def test_mistakes_are_found_before_the_first_state():
    model, params = tiny_model(CONFIGS[0]), random_params(CONFIGS[0])
    with pytest.raises(ValueError, match="expected a key for a sampler that draws"):
        stream(model, params, SOURCE, max_tokens=3, sampler=Sampling())
    with pytest.raises(ValueError, match="expected at most 16 new tokens"):
        stream(model, params, SOURCE, max_tokens=17, capacity=16)


# Texts

WORLD = ["naïve café — 你好，世界 👩‍👩‍👧‍👦 🇩🇪", "über straße", "  two  spaces ", "ab ba", "日本語 and عربى"]


def text_model(kind: str, architecture: str = "encoder-decoder", **options) -> TextModel:
    tokenizer = Tokenizer.train(WORLD, kind=kind, vocab_size=300)
    config = preset(
        "tiny", architecture=architecture, model_dim=16, feed_forward_dim=16, num_heads=2, decoder_layers=1,
        source_vocab_size=tokenizer.vocab_size, target_vocab_size=tokenizer.vocab_size, shared_embeddings="none",
        max_source_length=70, max_target_length=40, encoder_layers=int(architecture == "encoder-decoder"),
    )  # fmt: skip
    params = init_params(build_model(config, dtype="float32"), jax.random.key(1))
    params = jax.tree.map(lambda leaf: leaf * 2.5 if leaf.ndim == 2 else leaf, params)
    return TextModel(config, params, tokenizer, tokenizer, weights="float32", **options)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "word"])
@pytest.mark.slow
def test_partial_texts_only_grow_and_have_no_half_characters(kind):
    model = text_model(kind)
    texts = ["", *WORLD[2:]] if kind == "bpe" else WORLD[3:]
    sampler = Sampling(temperature=2.0)
    states = list(model.stream(texts, max_tokens=30, sampler=sampler, seed=4))
    whole = model.generate(texts, max_tokens=30, sampler=sampler, seed=4)
    assert [answer.text for answer in states[-1]] == [answer.text for answer in whole]
    assert [answer.tokens for answer in states[-1]] == [answer.tokens for answer in whole]
    assert [answer.ending for answer in states[-1]] == [answer.ending for answer in whole]
    for before, after in itertools.pairwise(states):
        for earlier, later in zip(before, after, strict=True):
            assert later.text.startswith(earlier.text)
            assert later.tokens[: len(earlier.tokens)] == earlier.tokens
    for state in states:
        for answer, last in zip(state, whole, strict=True):
            is_last = len(answer.token_scores) == len(last.token_scores)
            assert is_last or not answer.text.endswith("\N{REPLACEMENT CHARACTER}")


def test_a_character_waits_for_its_bytes():
    """An emoji is several tokens of a byte-level tokenizer that has not seen it: they show at once."""
    model = text_model("bpe", "decoder-only")
    emoji = "😀"
    assert len(model.target_tokenizer.encode(emoji)) > 2
    constraints = TextConstraints(required_phrases=[emoji])
    states = [answer for (answer,) in model.stream(["ab"], constraints=constraints, max_tokens=8)]
    assert emoji in states[-1].text
    half = [
        answer
        for answer in states
        if model.target_tokenizer.decode(answer.tokens).endswith("\N{REPLACEMENT CHARACTER}")
    ]
    assert half, "no state ends within a character: this test tests nothing"
    assert not any(answer.text.endswith("\N{REPLACEMENT CHARACTER}") for answer in half if not answer.finished)


@pytest.mark.slow
def test_what_a_limit_cuts_off_is_cut_off_as_in_generate():
    """Half a character that stays one is shown in the end, whichever limit cut it."""
    model, texts, broken = text_model("bpe"), ["ab ba ab", "日本語 and عربى"], 0
    limits = [{"max_tokens": n} for n in range(1, 7)]
    limits += [{"constraints": TextConstraints(max_ratio=ratio)} for ratio in (0.2, 0.3, 0.5, 0.7, 1.0)]
    for limit in limits:
        for sampler in (Greedy(), Sampling(temperature=3.0)):
            *_, last = model.stream(texts, sampler=sampler, **limit)
            whole = model.generate(texts, sampler=sampler, **limit)
            assert [(a.text, a.tokens, a.ending) for a in last] == [(a.text, a.tokens, a.ending) for a in whole]
            broken += sum(a.text.endswith("\N{REPLACEMENT CHARACTER}") for a in whole if "constraints" in limit)
    assert broken, "no limit fell within a character: this test tests nothing"


def test_a_text_never_shrinks_while_it_is_written():
    """Though a tokenizer may show a whole run of characters as broken while the last of them is."""
    shown = [_so_far(Answer(text, 0.0, [], False), before).text for text, before in
             [("a\ufffd", "a"), ("\ufffd\ufffd", "€"), ("€€", "€"), ("", "€")]]  # fmt: skip
    assert shown == ["a", "€", "€€", "€"]


def test_a_search_cannot_be_streamed():
    model = text_model("char")
    for search in (BeamSearch(), Samples(), MinimumBayesRisk()):
        with pytest.raises(ValueError, match=r"expected Greedy\(\) or Sampling\(…\) to stream"):
            inspect.unwrap(TextModel.stream)(model, ["ab"], sampler=search)
    with pytest.raises(ValueError, match="expected several texts"):
        inspect.unwrap(TextModel.stream)(model, "ab")
    assert list(model.stream([])) == []
