"""Rules and prefixes in text: what is asked for is in the text that comes, or is refused before any work."""

import dataclasses
import inspect
import math

import numpy as np
import pytest
from compile_counter import count_compilations
from text_models import CONFIG, TOKENIZER, make_model, random_texts

from tfm.answering import Answer
from tfm.decoding.beam import BeamSearch
from tfm.decoding.sampling import Greedy, Sampling
from tfm.pipeline import TextModel
from tfm.text_constraints import TextConstraints, encode_constraints, known_ids
from tfm.tokenizer import Tokenizer

SAMPLERS = {"greedy": Greedy(), "sampling": Sampling(temperature=1.5), "beam": BeamSearch(width=3, num_best=2)}
TEXTS = random_texts(5, longest=12)


pytestmark = [pytest.mark.usefixtures("compile_fast"), pytest.mark.slow]


@pytest.fixture(scope="module")
def model() -> TextModel:
    return make_model()


def contains(answer: Answer, phrase: str) -> bool:
    """By ids: special tokens, which a random model makes, are not in the text."""
    ids = TOKENIZER.encode(phrase)
    return any(answer.tokens[i : i + len(ids)] == ids for i in range(len(answer.tokens)))


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder-only"])
def test_answers_follow_the_rules(architecture, sampler):
    model = make_model(CONFIG.replace(architecture=architecture))
    rules = TextConstraints(
        min_tokens=9, repetition_penalty=1.2, no_repeat_ngram=3, banned_phrases=["a b", "c", "d"],
        required_phrases=["e f g", "h"],
    )  # fmt: skip
    free = [answer.text for answer in model.generate(TEXTS, max_tokens=16, sampler=sampler)]
    found = model.generate_n_best(TEXTS, max_tokens=16, sampler=sampler, constraints=rules)
    assert not all("e f g" in text for text in free)  # so the rules had to do something
    for answer in (answer for answers in found for answer in answers):
        assert len(answer.tokens) >= 9
        assert contains(answer, "e f g")
        assert "e f g" in answer.text
        assert len(answer.text.split()) == len(answer.tokens)  # none of which is no text
        assert contains(answer, "h")
        assert not any(contains(answer, phrase) for phrase in ("a b", "c", "d"))
        triples = [tuple(answer.tokens[i : i + 3]) for i in range(len(answer.tokens) - 2)]
        assert len(set(triples)) == len(triples)
        assert math.isfinite(answer.score)


@pytest.mark.parametrize("sampler", [Greedy(), SAMPLERS["beam"]], ids=["greedy", "beam"])
@pytest.mark.slow
def test_each_text_may_have_its_own_rules_and_prefix(model, sampler):
    """And neither changes another's answer, nor where the text stands."""
    rules = [
        TextConstraints(required_phrases=["k l a"]), None, TextConstraints(banned_phrases=["a", "b c"], min_tokens=4),
        TextConstraints(max_ratio=1.0), TextConstraints(no_repeat_ngram=1),
    ]  # fmt: skip
    prefixes = ["", "a b c", "d", "e f", ""]
    together = model.generate(TEXTS, max_tokens=12, sampler=sampler, constraints=rules, prefixes=prefixes)
    assert contains(together[0], "k l a")
    assert not contains(together[2], "a")
    source_length = len(TEXTS[3].split()) + 1
    assert len(together[3].tokens) + together[3].finished <= source_length + 2  # and its prefix
    assert len(set(together[4].tokens)) == len(together[4].tokens)
    for i, answer in enumerate(together):
        assert answer.text.startswith(prefixes[i])
        (alone,) = model.generate(
            TEXTS[i : i + 1], max_tokens=12, sampler=sampler, constraints=rules[i], prefixes=prefixes[i : i + 1]
        )
        assert (answer.text, answer.tokens) == (alone.text, alone.tokens)
        assert answer.score == pytest.approx(alone.score, abs=1e-4)


def test_a_prefix_that_would_come_anyway_changes_nothing_else(model):
    free = model.generate(TEXTS, max_tokens=12)
    begun = [TOKENIZER.decode(answer.tokens[:3]) for answer in free]
    prefixed = model.generate(TEXTS, max_tokens=9, prefixes=begun)
    assert [answer.tokens for answer in prefixed] == [answer.tokens for answer in free]
    assert all(one.score >= other.score - 1e-4 for one, other in zip(prefixed, free, strict=True))
    assert model(TEXTS, max_tokens=9, prefixes=begun) == [answer.text for answer in free]
    assert model(TEXTS[0], max_tokens=9, prefixes=begun[:1]) == free[0].text
    unprefixed = model.generate(TEXTS, max_tokens=12, prefixes=[""] * len(TEXTS))
    assert [answer.tokens for answer in unprefixed] == [answer.tokens for answer in free]


def test_a_long_prefix_leaves_what_the_model_has_room_for(model):
    for length in (100, 149):
        prefix = " ".join(["a"] * length)
        (answer,) = model.generate(["b"], prefixes=[prefix])
        assert answer.text.startswith(prefix)
        assert length <= len(answer.tokens) <= 150
    with pytest.raises(ValueError, match=r"expected prefixes of at most 149 tokens .*, got 150 for text 1"):
        model.generate(["b", "c"], prefixes=["", " ".join(["a"] * 150)])


def test_other_phrases_and_numbers_compile_nothing(model):
    def rules(seed: int) -> TextConstraints:
        random = np.random.default_rng(seed)
        banned = [" ".join(random.choice(["a", "b", "c"], 2)) for _ in range(random.integers(3, 5))]
        required = [" ".join(random.choice(["e", "f", "g"], random.integers(3, 5))) for _ in range(2)]
        return TextConstraints(min_tokens=int(random.integers(1, 5)), banned_phrases=banned, required_phrases=required)

    assert model.warmup(batch_sizes=[4], source_lengths=[5], constraints=rules(0)) == 1
    with count_compilations() as compilations:
        for seed in range(5):
            model.generate(["a", "b", "c", "d"], constraints=rules(seed))
            model.generate(["a", "b", "c", "d"], constraints=[rules(seed), None, rules(seed + 9), None])
    assert compilations.count == 0, compilations.names


def test_a_phrase_is_found_at_the_beginning_and_within():
    """To byte-level BPE "dog" and " dog" are two pieces: both are banned, and the second is required."""
    bpe = Tokenizer.train(["the dog saw a dog, dog dog the the saw"] * 9, kind="bpe", vocab_size=300)
    config = CONFIG.replace(target_vocab_size=bpe.vocab_size)
    rules = TextConstraints(banned_phrases=["dog"], required_phrases=["the"])
    ids = encode_constraints(rules, 1, bpe, config)
    banned = [[i for i in row if i >= 0] for row in ids.banned_phrases[0].tolist()]
    assert [bpe.decode(row) for row in banned if row] == ["dog", " dog"]
    assert bpe.decode([i for i in ids.required_phrases[0, 0] if i >= 0]) == " the"
    # a character stays what it is, with or without a space before it
    char = Tokenizer.train(["the dog"], kind="char", vocab_size=270)
    ids = encode_constraints(rules, 1, char, config)
    assert ids.banned_phrases.shape == (1, 1, 4)
    assert char.decode([i for i in ids.required_phrases[0, 0] if i >= 0]) == "the"
    assert known_ids("prefix", ["the dog"], bpe) == [bpe.encode("the dog")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"constraints": TextConstraints(min_tokens=-1)}, "expected min_tokens a whole number from 0"),
        (
            {"constraints": TextConstraints(min_tokens=21)},
            r"expected room for 21 tokens \(min_tokens\) in row 0, .* 20",
        ),
        ({"constraints": TextConstraints(no_repeat_ngram=1.5)}, "expected no_repeat_ngram as a whole number"),
        (
            {"constraints": TextConstraints(repetition_penalty=None)},
            "expected one number as repetition_penalty, got None",
        ),
        ({"constraints": TextConstraints(repetition_penalty=10**400)}, "expected repetition_penalty from .* got .1000"),
        ({"constraints": TextConstraints(min_tokens=10**20)}, f"expected min_tokens as a whole .*got .*{10**20}"),
        ({"constraints": TextConstraints(min_tokens=2.5)}, r"expected min_tokens as a whole .*got .*2\.5"),
        ({"constraints": [TextConstraints(min_tokens="x"), None]}, "expected one number as min_tokens, got 'x'"),
        ({"constraints": [TextConstraints(min_tokens=True), None]}, "expected one number as min_tokens, got True"),
        ({"constraints": 3}, "expected several constraints, got 3"),
        ({"constraints": TextConstraints(min_ratio=[1.0])}, r"expected one number as min_ratio, got \[1.0\]"),
        ({"constraints": TextConstraints(banned_phrases="a b")}, "expected several phrases, got 'a b'"),
        ({"constraints": TextConstraints(banned_phrases=[""])}, "expected a phrase of at least one token, got ''"),
        ({"constraints": TextConstraints(required_phrases=["a x"])}, "expected a phrase that the tokenizer knows, got"),
        (
            {"constraints": [None, TextConstraints(required_phrases=["a", "b c d"], banned_phrases=["d e", "c d"])]},
            "expected required_phrases without banned ones, got 'b c d' with 'c d' in it",
        ),
        ({"constraints": TextConstraints(required_phrases=[3])}, "expected a str as phrase, got int"),
        (
            {"constraints": TextConstraints(required_phrases=["a " * 20])},
            "expected room for 21 required tokens and the",
        ),
        ({"constraints": [None]}, "expected constraints for all texts or for each of 2, got 1"),
        ({"prefixes": ["a"]}, "expected a prefix for each of 2 texts, got"),
        ({"prefixes": "ab"}, "expected several prefixes, got 'ab'; put one into a list"),
        ({"prefixes": 3}, "expected several prefixes, got 3"),
        ({"prefixes": ["a", "zebra"]}, "expected a prefix that the tokenizer knows, got 'zebra'"),
    ],
)
def test_what_cannot_be_is_refused(model, arguments, message):
    with count_compilations() as compilations, pytest.raises(ValueError, match=message):
        inspect.unwrap(TextModel.generate_n_best)(model, ["a", "b"], max_tokens=20, **arguments)
    assert "jit(generate_rows)" not in compilations.names


def test_prefixes_may_be_any_iterable(model):
    assert model(["a", "b"], max_tokens=4, prefixes=iter(["a", ""])) == model(
        ["a", "b"], max_tokens=4, prefixes=["a", ""]
    )


def test_rules_are_checked_without_texts(model):
    with pytest.raises(ValueError, match="expected a phrase of at least one token"):
        model.generate([], constraints=TextConstraints(banned_phrases=[""]))
    assert model.generate([], constraints=TextConstraints(banned_phrases=["a"])) == []
    assert dataclasses.asdict(TextConstraints())["min_tokens"] == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        TextConstraints().min_tokens = 3
