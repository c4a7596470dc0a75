"""Options of generation go together: every pair of their values is in some request, which gets what they promise."""

import functools
import inspect
import itertools
import math
import random

import jax
import pytest

from tfm.answering import Answer
from tfm.config import preset
from tfm.decoding.beam import BeamSearch
from tfm.decoding.mbr import MinimumBayesRisk
from tfm.decoding.sampling import Greedy, Samples, Sampling
from tfm.nn.models import build_model
from tfm.nn.params import init_params
from tfm.pipeline import TextModel
from tfm.text_constraints import TextConstraints
from tfm.tokenizer import Tokenizer

WORDS = [*"abcdefghijkl"]
TOKENIZER = Tokenizer.train([" ".join(WORDS)], kind="word", vocab_size=16)
TEXTS = ["a b c", "", "l k j i h g f e d c b a"]
LONG = "a " * 30

OPTIONS = {
    "architecture": ("encoder-decoder", "decoder-only"),
    "positions": ("sinusoidal", "learned", "rope", "t5-bias", "alibi"),
    "weights": ("float32", "bfloat16", "int8"),
    "cache": ("auto", "bfloat16", "int8"),
    "sampler": (
        Greedy(),
        Sampling(temperature=1.5, top_k=5),
        BeamSearch(width=3, num_best=2, length_penalty="power", stop="first-finished"),
        BeamSearch(width=4, num_best=3, groups=2, diversity=1.0, coverage=0.5),
        MinimumBayesRisk(num_samples=4, num_best=2),
    ),
    "constraints": (
        None,
        TextConstraints(min_tokens=3, max_ratio=4.0, repetition_penalty=1.3),
        TextConstraints(no_repeat_ngram=2, banned_phrases=["c"]),
        TextConstraints(required_phrases=["d e"]),
    ),
    "prefix": (None, "f g"),
    "max_tokens": (None, 5),
    "seed": (3, [5, 6, 7, 8]),
    "long_texts": ("error", "cut"),
    "way": ("whole", "stream"),
}
IMPOSSIBLE = {("sampler", number, "way", 1) for number in range(2, len(OPTIONS["sampler"]))}
"""Pairs that cannot go together, by the places of their values: a search cannot be streamed."""

Pair = tuple[str, int, str, int]


def pairs_of(request: dict[str, int]) -> set[Pair]:
    """The pairs of values in a request, which has the place of each option's value."""
    return {(one, request[one], other, request[other]) for one, other in itertools.combinations(OPTIONS, 2)}


EVERY_PAIR = {
    (one, i, other, j)
    for one, other in itertools.combinations(OPTIONS, 2)
    for i, j in itertools.product(range(len(OPTIONS[one])), range(len(OPTIONS[other])))
}


def covering_requests() -> list[dict[str, int]]:
    """Few requests that have every pair of values that can go together, each chosen to have most of what is left."""
    left, rng, requests = EVERY_PAIR - IMPOSSIBLE, random.Random(0), []
    while left:
        drawn = []
        for _ in range(300):
            one, i, other, j = rng.choice(sorted(left))
            request = {name: rng.randrange(len(values)) for name, values in OPTIONS.items()} | {one: i, other: j}
            if not pairs_of(request) & IMPOSSIBLE:
                drawn.append(request)
        requests.append(max(drawn, key=lambda request: len(pairs_of(request) & left)))
        left -= pairs_of(requests[-1])
    return requests


REQUESTS = covering_requests()


pytestmark = pytest.mark.usefixtures("compile_fast")


@functools.cache
def model_of(architecture: str, positions: str, weights: str, cache: str) -> TextModel:
    config = preset(
        "tiny", architecture=architecture, positions=positions, model_dim=16, feed_forward_dim=16, num_heads=2,
        encoder_layers=int(architecture == "encoder-decoder"), decoder_layers=1, shared_embeddings="none",
        source_vocab_size=TOKENIZER.vocab_size, target_vocab_size=TOKENIZER.vocab_size, max_source_length=16,
        max_target_length=24,
    )  # fmt: skip
    params = init_params(build_model(config, dtype="float32"), jax.random.key(1))
    params = jax.tree.map(lambda leaf: leaf * 2.5 if leaf.ndim == 2 else leaf, params)
    return TextModel(config, params, TOKENIZER, TOKENIZER, weights=weights, cache=cache)


def test_the_requests_have_every_pair():
    assert EVERY_PAIR - set().union(*map(pairs_of, REQUESTS)) == IMPOSSIBLE
    assert len(REQUESTS) < 40


@pytest.mark.slow
@pytest.mark.parametrize("places", REQUESTS, ids=range(len(REQUESTS)))
def test_a_request_gets_what_its_options_promise(places, recwarn):
    request_ = {name: OPTIONS[name][place] for name, place in places.items()}
    model = model_of(*(request_[name] for name in ("architecture", "positions", "weights", "cache")))
    cut = request_["long_texts"] == "cut"
    texts = [*TEXTS, LONG if cut else "b"]
    options = {name: request_[name] for name in ("sampler", "constraints", "max_tokens", "seed", "long_texts")}
    prefix = request_["prefix"]
    if prefix is not None:
        options["prefixes"] = [prefix] * len(texts)
    if request_["way"] == "stream":
        *_, last = model.stream(texts, **options)
        found = [[answer] for answer in last]
    else:
        found = model.generate_n_best(texts, **options)
    most = options["max_tokens"] or 24
    for text, answers in zip(texts, found, strict=True):
        assert 1 <= len(answers) <= {BeamSearch: 3, MinimumBayesRisk: 2}.get(type(options["sampler"]), 1)
        for answer in answers:
            assert_promised(answer, text, request_, most)
    assert any(str(w.message).startswith("1 of 4 texts cut to 16 tokens") for w in recwarn) == cut
    if prefix is None and (request_["weights"], request_["cache"]) == ("float32", "auto"):
        kept = [answers[0] for answers in found]
        scored = model.score([" ".join(text.split()[:15]) for text in texts], kept)
        assert [one.score for one in scored] == pytest.approx([a.score for a in kept], abs=1e-4 * (1 + most))


def assert_promised(answer: Answer, text: str, request_, most: int) -> None:
    words, rules = answer.text.split(), request_["constraints"] or TextConstraints()
    assert answer.score == pytest.approx(math.fsum(answer.token_scores), abs=1e-3)
    assert len(answer.token_scores) <= most
    assert answer.finished == (answer.ending != "limit")
    if request_["prefix"] is not None:
        assert words[:2] == ["f", "g"]
    new = words[2:] if request_["prefix"] else words
    if answer.ending == "stuck":
        return
    if answer.finished:
        assert len(answer.token_scores) > rules.min_tokens
        assert all(phrase in " ".join(new) for phrase in rules.required_phrases)
    assert len(answer.token_scores) <= max(rules.max_ratio * min(len(text.split()) + 1, 16), 0)
    assert not any(phrase in words for phrase in rules.banned_phrases)
    if rules.no_repeat_ngram:
        bigrams = list(itertools.pairwise(words))
        assert len(set(bigrams)) == len(bigrams)


@pytest.mark.parametrize("search", [*OPTIONS["sampler"][2:], Samples()], ids=lambda search: type(search).__name__)
def test_what_cannot_go_together_is_an_error_before_anything_is_compiled(search):
    model = model_of("encoder-decoder", "sinusoidal", "float32", "auto")
    with pytest.raises(ValueError, match=r"expected Greedy\(\) or Sampling\(…\) to stream"):
        inspect.unwrap(TextModel.stream)(model, ["a"], sampler=search)
