"""What a text model is asked, of whatever type: numbers, seeds, texts and parts that are right, or are refused."""

import inspect
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from text_models import CONFIG, TOKENIZER, assert_equal, make_model, make_params, random_texts, shapes_of_batches

import tfm
from tfm.decoding.beam import BeamSearch
from tfm.decoding.sampling import Greedy, Sampling
from tfm.pipeline import TextModel
from tfm.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("compile_fast")


@pytest.fixture(scope="module")
def model() -> TextModel:
    return make_model()


@pytest.fixture
def shapes(monkeypatch):
    return shapes_of_batches(monkeypatch)


def test_a_text_that_is_too_long(model, shapes):
    texts = ["a", "b " * 70, "c", "d " * 90]
    with pytest.raises(ValueError, match=r"at most 70 tokens .*; text 1 has 71, text 3 has 91$"):
        model(texts)
    with pytest.raises(ValueError, match="and 2 more texts are too long"):
        model(["b " * 70] * 7)
    assert shapes == []


def test_a_text_that_is_not_unicode(model, shapes):
    with pytest.raises(ValueError, match="text 1 is not Unicode text"):
        model(["a", "\udce4"])
    assert shapes == []


def test_numpys_whole_numbers_are_whole_numbers(model):
    texts = random_texts(3, longest=15)
    asked = model.generate(texts, max_tokens=np.int64(70), sampler=Sampling(), seed=np.uint32(2**32 - 1))
    assert asked == model.generate(texts, max_tokens=70, sampler=Sampling(), seed=2**32 - 1)
    small = make_model(max_batch=np.int64(2), max_batch_tokens=np.int32(4096))
    assert small.warmup(batch_sizes=np.array([2]), source_lengths=[np.int64(3)]) == 1
    assert_equal(small.generate(texts, max_tokens=5), model.generate(texts, max_tokens=5))


@pytest.mark.parametrize("max_tokens", [0, -1, 151, True])
def test_a_limit_out_of_range(model, max_tokens):
    with pytest.raises(ValueError, match=r"expected max_tokens from 1 to 150 .*, got"):
        model("a", max_tokens=max_tokens)
    with pytest.raises(ValueError, match=r"expected max_tokens from 1 to 150 .*, got"):
        model.warmup(max_tokens=max_tokens)


@pytest.mark.parametrize("seed", [-1, 2**32, True])
def test_a_seed_out_of_range(model, seed):
    with pytest.raises(ValueError, match="as seed, got"):
        model("a", seed=seed)


def test_a_sampler_out_of_range(model):
    with pytest.raises(ValueError, match="expected top_p more than 0 and at most 1, got 0"):
        model("a", sampler=Sampling(top_p=0.0))
    with pytest.raises(ValueError, match="expected one number for all texts"):
        model("a", sampler=Sampling(temperature=jnp.ones(1)))


def test_one_text_where_several_are_expected(model):
    with pytest.raises(ValueError, match="put one into a list"):
        model.generate("abc", sampler=Greedy())


def test_what_a_model_is_called(model):
    assert repr(model) == "TextModel(encoder-decoder, 1+1 layers, D 16, float32)"
    alone = make_model(CONFIG.replace(architecture="decoder-only", encoder_layers=6))
    assert repr(alone) == "TextModel(decoder-only, 1 layers, D 16, float32)"


@pytest.mark.parametrize("option", ["max_batch", "max_batch_tokens"])
def test_a_batch_that_cannot_be(option):
    refuse = inspect.unwrap(TextModel.__init__)
    for number, words in (
        (0, f"{option} of at least 1, got 0"),
        (1.5, f"a whole number as {option}, got 1.5"),
        ("x", f"a whole number as {option}, got 'x'"),
        (None, f"a whole number as {option}, got None"),
        (True, f"a whole number as {option}, got True"),
        (math.nan, f"a whole number as {option}, got nan"),
    ):
        with pytest.raises(ValueError, match=f"expected {words}"):
            refuse(object.__new__(TextModel), CONFIG, make_params(), TOKENIZER, TOKENIZER, **{option: number})


def test_parts_that_do_not_belong_together():
    with pytest.raises(ValueError, match=r"unknown decoder\.layer_0"):
        TextModel(CONFIG.replace(architecture="decoder-only"), make_params(), TOKENIZER, TOKENIZER)
    other = Tokenizer.train(["a"], kind="char", vocab_size=260)
    with pytest.raises(ValueError, match="source tokenizer of at most 16 entries"):
        TextModel(CONFIG, make_params(), other, TOKENIZER)


@pytest.mark.parametrize("params", [None, 3, []])
def test_what_is_no_tree_of_parameters(model, params):
    with pytest.raises(
        ValueError, match=f"expected parameters as a tree of named arrays, got {re.escape(repr(params))}"
    ):
        inspect.unwrap(TextModel.replace_params)(model, params)


def test_a_seed_is_any_whole_number_or_one_for_each_text(model):
    hot = dict(sampler=Sampling(temperature=2.0), max_tokens=6)
    for seed in (np.array(7), jnp.int32(7), np.uint8(7)):
        assert model(["a b", "c"], seed=seed, **hot) == model(["a b", "c"], seed=7, **hot)
    each = model(["a b", "c", "a b"], seed=np.array([3, 4, 5]), **hot)
    assert each == model(["a b", "c", "a b"], seed=iter([3, 4, 5]), **hot)
    assert [each[2], each[0]] == model(["a b", "a b"], seed=[5, 3], **hot)
    refuse = inspect.unwrap(TextModel.generate_n_best)
    for seed, words in (
        ([1], "a seed for each of 2 texts, got 1"),
        ([1, -1], "as seed, got -1"),
        (b"ab", "got b'ab'"),
        (jax.random.key(0), "as seed, got Array"),
        (jax.random.split(jax.random.key(0)), "as seed, got"),
    ):
        with pytest.raises(ValueError, match=words):
            refuse(model, ["a b", "c"], seed=seed, **hot)


def test_a_warmup_may_have_rules_that_short_texts_have_no_room_for(model):
    rules = tfm.TextConstraints(min_tokens=5, max_ratio=3.0)
    assert model.warmup(batch_sizes=[1], source_lengths=[4], max_tokens=8, constraints=rules) > 0
    with pytest.raises(ValueError, match=r"expected room for 5 tokens \(min_tokens\) in row 0, got a limit of 3"):
        model.generate([""], max_tokens=8, constraints=rules)


def test_a_search_has_scores_of_its_own(model):
    for search in (BeamSearch(width=3, num_best=3, alpha=1.0), tfm.Samples(4)):
        found = model.generate_n_best(["a b c"], sampler=search, max_tokens=6)[0]
        ranks = [answer.search_score for answer in found]
        assert ranks == sorted(ranks, reverse=True)
        for answer in found if isinstance(search, BeamSearch) else ():
            assert answer.search_score == pytest.approx(answer.score / ((5 + len(answer.token_scores)) / 6), abs=1e-4)
    assert model.generate(["a b c"], max_tokens=6)[0].search_score is None


def test_a_search_is_no_sampler_of_the_functions_on_ids(model):
    for function in (tfm.generate, tfm.stream):
        with pytest.raises(ValueError, match=r"expected Greedy\(\) or Sampling\(…\) as sampler, got BeamSearch"):
            inspect.unwrap(function)(model.model, model.params, np.array([[4, 2]]), max_tokens=2, sampler=BeamSearch())


def test_a_kernel_that_cannot_read_the_cache_is_refused_when_the_model_is_made():
    with pytest.raises(ValueError, match="expected attention kernel 'auto' or 'plain' for a cache in int8, got 'xla'"):
        make_model(cache="int8", attention_kernel="xla")


def test_a_cache_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="expected a cache in 'float32', 'bfloat16' or 'int8', got 'int4'"):
        make_model(cache="int4")
