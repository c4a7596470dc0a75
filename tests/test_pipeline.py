"""Text in, text out: each answer is the model's own, whatever is asked beside it, and few shapes are compiled."""

import concurrent.futures
import functools
import inspect
import math
import random
import subprocess
import sys
from pathlib import Path

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_counter import count_compilations
from text_models import CONFIG, TOKENIZER, WORDS, assert_equal, make_model, make_params, random_texts, shapes_of_batches
from tolerances import TOLERANCES

import tfm
from tfm.answering import Answer
from tfm.decoding.beam import BeamSearch
from tfm.decoding.sampling import Greedy, Sampling
from tfm.pipeline import TextModel

pytestmark = pytest.mark.usefixtures("compile_fast")


@pytest.fixture(scope="module")
def model() -> TextModel:
    return make_model()


# The right answer


@functools.partial(jax.jit, static_argnums=0)
def whole_pass(model, params, *inputs):
    return model.apply({"params": params}, *inputs)


def without_cache(model: TextModel, text: str, max_tokens: int) -> Answer:
    """Greedy search by a whole forward pass a token, without a cache, without padding of the source."""
    source = jnp.array([[*TOKENIZER.encode(text), TOKENIZER.end_id]])
    target, score = np.zeros((1, max_tokens + 1), int), 0.0
    target[0, 0] = model.config.start_id
    forward = functools.partial(whole_pass, model.model, model.params, source, jnp.array([source.shape[1]]))
    for length in range(1, max_tokens + 1):
        log_probs = jax.nn.log_softmax(forward(target)[0, length - 1])
        token = int(log_probs.argmax())
        score += float(log_probs[token])
        if token == model.config.end_id:
            return Answer(TOKENIZER.decode(target[0, 1:length]), score, target[0, 1:length].tolist(), finished=True)
        target[0, length] = token
    return Answer(TOKENIZER.decode(target[0, 1:]), score, target[0, 1:].tolist(), finished=False)


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder-only"])
def test_answers_are_those_of_whole_forward_passes(architecture):
    model = make_model(CONFIG.replace(architecture=architecture))
    texts = ["", "a", *random_texts(4, longest=40)]
    answers = model.generate(texts, max_tokens=12)
    assert_equal(answers, [without_cache(model, text, 12) for text in texts])
    assert {answer.finished for answer in answers} == {True, False}  # both kinds were put to the test


def test_one_text_or_several(model):
    texts = ["a b", "", "c"]
    answers = model.generate(texts, max_tokens=5)
    assert model(texts, max_tokens=5) == [answer.text for answer in answers]
    assert model(iter(texts), max_tokens=5) == [answer.text for answer in answers]
    assert [model(text, max_tokens=5) for text in texts] == [answer.text for answer in answers]
    assert model([]) == []
    assert model.generate([]) == []


def test_a_limit_cuts_and_says_so(model):
    texts = random_texts(30, longest=15)
    long, short = model.generate(texts, max_tokens=20), model.generate(texts, max_tokens=3)
    assert any(answer.finished and len(answer.tokens) > 3 for answer in long)
    for one, other in zip(long, short, strict=True):
        assert other.tokens == one.tokens[:3]
        assert other.finished == (one.finished and len(one.tokens) < 3)
        assert len(one.tokens) + one.finished <= 20
        assert one.finished or len(one.tokens) == 20
        assert TOKENIZER.end_id not in one.tokens
        assert one.score < 0


TEXTS_BY_BUCKET = ["a", " ".join(["b"] * 20), " ".join(["c"] * 69)]


def test_the_default_limit_follows_from_the_padded_source():
    params = make_params()
    # the first feature becomes positive everywhere, and says nothing but that no end comes
    params["decoder"]["norm"]["bias"] = params["decoder"]["norm"]["bias"].at[0].set(10.0)
    against_end = jnp.zeros(TOKENIZER.vocab_size).at[TOKENIZER.end_id].set(-100.0)
    params["output"]["weight"] = params["output"]["weight"].at[:, 0].set(against_end)
    endless = make_model().replace_params(params)
    lengths = [len(answer.tokens) for answer in endless.generate(TEXTS_BY_BUCKET)]
    assert lengths == [2 * 16 + 32, 2 * 32 + 32, 150]  # 150: the model's own limit
    assert [len(answer.tokens) for answer in endless.generate(["a"], max_tokens=150)] == [150]


# Neighbours


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_neighbours_and_order_change_nothing(weights):
    model = make_model(weights=weights)
    texts = random_texts(40, longest=31)
    alone = [answer for text in texts for answer in model.generate([text], max_tokens=30)]
    assert len({answer.text for answer in alone}) > 20
    order = random.Random(1).sample(range(40), 40)
    together = model.generate([texts[i] for i in order], max_tokens=30)
    assert_equal(together, [alone[i] for i in order], weights)


@pytest.mark.slow
def test_a_drawn_answer_depends_on_its_seed_and_place_alone(model):
    texts = random_texts(40, longest=15, seed=3)
    sampler = Sampling(temperature=1.5, top_p=0.95)
    answers = model.generate(texts, max_tokens=15, sampler=sampler, seed=7)
    assert_equal(model.generate(texts, max_tokens=15, sampler=sampler, seed=7), answers)
    assert_equal(model.generate(texts[:9], max_tokens=15, sampler=sampler, seed=7), answers[:9])
    neighbours = [*random_texts(30, longest=31, seed=4), *texts[30:]]
    assert_equal(model.generate(neighbours, max_tokens=15, sampler=sampler, seed=7)[30:], answers[30:])
    others = model.generate(texts, max_tokens=15, sampler=sampler, seed=8)
    assert sum(one.tokens == other.tokens for one, other in zip(answers, others, strict=True)) < 10
    copies = model.generate([texts[0]] * 40, max_tokens=15, sampler=sampler, seed=7)
    assert len({answer.text for answer in copies}) > 20


def test_threads_get_their_own_answers():
    model = make_model(CONFIG.replace(norm_epsilon=2e-6))  # nothing is compiled for this model yet: threads meet there
    calls = [(random_texts(4, longest=15, seed=seed), seed) for seed in range(12)]

    def ask(call):
        texts, seed = call
        return model.generate(texts, max_tokens=10, sampler=Sampling(), seed=seed)

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = list(threads.map(ask, calls))
    for answers, call in zip(found, calls, strict=True):
        assert_equal(answers, ask(call))


@flax.struct.dataclass
class Without(Greedy):
    """A sampler of the caller's own."""

    banned: int = flax.struct.field(pytree_node=False, default=0)

    def pick(self, logits, keys):
        return super().pick(logits.at[:, self.banned].set(-jnp.inf), keys)


@flax.struct.dataclass
class SamplingWithout(Sampling):
    banned: int = flax.struct.field(pytree_node=False, default=0)

    def pick(self, logits, keys):
        return super().pick(logits.at[:, self.banned].set(-jnp.inf), keys)


@pytest.mark.parametrize("kind", [Without, SamplingWithout])
def test_a_sampler_may_be_derived_from_one_of_ours(model, kind):
    texts = random_texts(9, longest=15)
    assert any(answer.finished for answer in model.generate(texts, max_tokens=9))
    endless = model.generate(texts, max_tokens=9, sampler=kind(banned=TOKENIZER.end_id))
    assert not any(answer.finished for answer in endless)


# Shapes and compilations


@pytest.fixture
def shapes(monkeypatch):
    return shapes_of_batches(monkeypatch)


def test_shapes_are_buckets(model, shapes):
    model(["a"] * 5, max_tokens=1)
    model(["a b c"] * 3 + [" ".join(WORDS * 2)] * 2, max_tokens=1)
    model(" ".join(["a"] * 69))
    model("a", max_tokens=64)
    model("a", max_tokens=65)
    model("a", max_tokens=129)
    assert shapes == [
        (8, 16, 64), (2, 32, 96), (4, 16, 64), (1, 70, 150), (1, 16, 64), (1, 16, 128), (1, 16, 150),
    ]  # fmt: skip


def test_beams_count_as_tokens_of_a_batch(shapes):
    search = BeamSearch(width=4)
    make_model(max_batch_tokens=4 * 64 + 16)(["a"] * 3, max_tokens=1, sampler=search)
    assert shapes == [(1, 16, 64)] * 3


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder-only"])
@pytest.mark.slow
def test_the_best_hypotheses_of_a_text_are_those_that_it_has_alone(architecture):
    model = make_model(CONFIG.replace(architecture=architecture))
    texts = random_texts(9, longest=15)
    search = BeamSearch(width=3, num_best=3)
    together = model.generate_n_best(texts, max_tokens=8, sampler=search)
    alone = [answers for text in texts for answers in model.generate_n_best([text], max_tokens=8, sampler=search)]
    for found, expected in zip(together, alone, strict=True):
        assert_equal(found, expected)
        assert len(found) == 3
    assert_equal(model.generate(texts, max_tokens=8, sampler=search), [best for best, *_ in together])
    one = BeamSearch(width=1, alpha=0.0)
    assert_equal(model.generate(texts, max_tokens=8, sampler=one), model.generate(texts, max_tokens=8))
    assert [len(answers) for answers in model.generate_n_best(texts[:2], max_tokens=8, sampler=Greedy())] == [1, 1]


@pytest.mark.parametrize("sampler", [Greedy(), BeamSearch(width=2, num_best=2)], ids=["greedy", "beams"])
def test_a_model_that_is_no_model_any_more_has_an_answer_with_a_score_that_says_so(sampler):
    broken = make_model().replace_params(jax.tree.map(lambda leaf: leaf * jnp.nan, make_params()))
    answers = broken.generate_n_best(["a", "b a"], max_tokens=3, sampler=sampler)
    assert all(answers)
    assert not any(math.isfinite(best.score) for best, *_ in answers)
    assert [answer.text for answer in broken.generate(["a", "b a"], max_tokens=3, sampler=sampler)]


def test_batches_stay_within_their_limits(shapes):
    make_model(max_batch=4)(["a"] * 11, max_tokens=1)
    assert shapes == [(4, 16, 64), (4, 16, 64), (4, 16, 64)]
    shapes.clear()
    make_model(max_batch_tokens=400)(["a"] * 6 + ["b " * 69] * 2, max_tokens=1)
    assert shapes == [(1, 70, 150), (1, 70, 150), (4, 16, 64), (2, 16, 64)]


def test_after_a_warmup_nothing_is_compiled():
    config = CONFIG.replace(
        norm_epsilon=3e-6, max_source_length=30, max_target_length=100
    )  # one that no other test has
    model, others = make_model(config, max_batch=4), make_params(config, seed=2)
    texts = random_texts(30, longest=29)
    with count_compilations() as compilations:
        warm = model.warmup()
    assert compilations.count == warm == 3 * 2  # 1, 2 or 4 rows; (source, capacity) are (16, 64) or (30, 92)
    with count_compilations() as compilations:
        for count, limit in ((1, 1), (2, 60), (3, None), (11, 5), (30, 64)):
            model(texts[:count], max_tokens=limit)
        model.replace_params(others)(texts)
        TextModel(config, others, TOKENIZER, TOKENIZER, weights="float32", max_batch=4)(texts)
        assert model.warmup() == warm
    assert compilations.count == 0, compilations.names


@pytest.mark.slow
def test_a_samplers_numbers_a_seed_and_a_limit_compile_nothing():
    config = CONFIG.replace(norm_epsilon=4e-6, max_source_length=16, max_target_length=100)
    model = make_model(config, max_batch=2)
    texts = random_texts(7, longest=15)
    with count_compilations() as compilations:
        warm = model.warmup(sampler=Sampling(), max_tokens=100)
    assert compilations.count == warm == 2 * 2  # 1 or 2 rows; a capacity of 64 or 100
    samplers = [
        Sampling(),
        Sampling(temperature=1),
        Sampling(temperature=0.3, top_k=3),
        Sampling(0, 1, 1, 1),
        Sampling(top_p=np.float64(0.5)),
        Sampling(min_p=jnp.array(0.1)),
    ]
    with count_compilations() as compilations:
        for seed, sampler in enumerate(samplers):
            model(texts[: seed + 1], sampler=sampler, seed=seed, max_tokens=19 * seed + 1)
        model("a", sampler=Sampling(), seed=2**32 - 1)
    assert compilations.count == 0, compilations.names


def test_a_warmup_may_be_for_less(shapes, model):
    assert model.warmup(batch_sizes=[1, 7], source_lengths=[3, 9, 70]) == 4
    assert sorted(shapes) == [(1, 16, 64), (1, 70, 150), (8, 16, 64), (8, 70, 150)]
    shapes.clear()
    assert make_model(max_batch=4).warmup(batch_sizes=[9], source_lengths=[1]) == 2
    assert sorted(shapes) == [(1, 16, 64), (4, 16, 64)]
    with pytest.raises(ValueError, match=r"source lengths from 1 to 70, got \[71\]"):
        model.warmup(source_lengths=[71])
    with pytest.raises(ValueError, match=r"batch sizes of at least 1, got \[0\]"):
        model.warmup(batch_sizes=[0])
    refuse = inspect.unwrap(TextModel.warmup)
    for option, words in (
        ("batch_sizes", "batch sizes of at least 1"),
        ("source_lengths", "source lengths from 1 to 70"),
    ):
        for given, shown in ((3, "3"), (["x"], r"\['x'\]"), ([1.5], r"\[1.5\]"), ([True], r"\[True\]")):
            with pytest.raises(ValueError, match=f"expected {words}, got {shown}"):
                refuse(model, **{option: given})
    with pytest.raises(ValueError, match="expected several constraints, got 3"):
        refuse(model, constraints=3)


# Parts and folders


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8", "auto"])
def test_a_saved_model_answers_the_same(tmp_path, weights):
    model = make_model(weights=weights)
    model.save(tmp_path / "model")
    loaded = tfm.load(tmp_path / "model", weights=weights)
    texts = random_texts(9, longest=15)
    assert loaded.config == CONFIG
    assert loaded.generate(texts, max_tokens=10) == model.generate(texts, max_tokens=10)


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder-only"])
@pytest.mark.slow
def test_a_cache_in_fewer_bits_is_chosen_by_a_word(tmp_path, architecture):
    make_model(CONFIG.replace(architecture=architecture)).save(tmp_path / "model")
    texts = random_texts(9, longest=15)
    exact, rounded = (tfm.load(tmp_path / "model", weights="float32", cache=cache) for cache in ("float32", "int8"))
    assert (exact.model.cache_dtype, rounded.model.cache_dtype) == ("float32", "int8")
    rules = tfm.TextConstraints(no_repeat_ngram=2, banned_phrases=["c"])
    for arguments in ({}, {"sampler": BeamSearch(width=3)}, {"constraints": rules, "prefixes": ["d"] * 9}):
        answers = rounded.generate(texts, max_tokens=8, **arguments)
        assert all("c" not in answer.text for answer in answers if "constraints" in arguments)
        if "prefixes" in arguments:
            continue  # whose tokens `score` counts
        for answer, again in zip(answers, exact.score(texts, answers), strict=True):
            # an error of the logits in each of up to 8 tokens
            assert answer.score == pytest.approx(again.score, abs=8 * TOLERANCES["int8"])
    assert rounded.replace_params(make_params(rounded.config, seed=2)).model.cache_dtype == "int8"


def test_parameters_in_half_the_bytes_answer_too(tmp_path):
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), make_params())
    make_model().replace_params(half).save(tmp_path / "model")
    loaded = tfm.load(tmp_path / "model", weights="float32")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded.params)} == {"bfloat16"}
    answers = loaded.generate(random_texts(9, longest=15), max_tokens=10)
    assert all(math.isfinite(answer.score) and answer.score < 0 for answer in answers)


def test_replaced_parameters_answer_for_themselves_only(model):
    texts = random_texts(9, longest=15)
    before = model.generate(texts, max_tokens=10)
    other = model.replace_params(make_params(seed=1))
    assert_equal(other.generate(texts, max_tokens=10), make_model(seed=1).generate(texts, max_tokens=10))
    assert_equal(model.generate(texts, max_tokens=10), before)
    params = make_params()
    params["target_embedding"]["weight"] = params["target_embedding"]["weight"][:-1]
    with pytest.raises(ValueError, match=r"target_embedding\.weight: expected shape \(16, 16\), got \(15, 16\)"):
        model.replace_params(params)


WITHOUT_TRAINING = """
import importlib.abc, sys
import warnings; warnings.simplefilter("error")
BLOCKED = {"orbax", "grain", "tyro", "train", "optax", "tensorboardX", "sacrebleu", "rapidfuzz", "rouge_score"}

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} must not be imported")

sys.meta_path.insert(0, Block())
import tfm
model = tfm.load(sys.argv[1])
assert len(model.generate(["a b c"], max_tokens=3, sampler=tfm.Sampling())[0].tokens) <= 3
for name in tfm.__all__:
    getattr(tfm, name)
for texts in ([b"a"], ["a", 3]):
    try:
        model(texts)
    except ValueError as error:
        print(error)
warnings.simplefilter("always")
for ask in (model, model.generate, model.generate_n_best, model.stream):
    with warnings.catch_warnings(record=True) as caught:
        ask(["a " * 99], max_tokens=1, long_texts="cut")
    assert [warning.filename for warning in caught] == ["<string>"], "a warning names the caller's own line"
print(*sorted(BLOCKED & {name.partition(".")[0] for name in sys.modules}))
"""


@pytest.mark.slow
def test_needs_nothing_that_training_needs(tmp_path, model):
    model.save(tmp_path / "model")
    command = [sys.executable, "-c", WITHOUT_TRAINING, str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["expected a str as text 0, got bytes", "expected a str as text 1, got int", ""]


def test_a_part_without_jax_does_not_load_it():
    command = "import sys, tfm.config, tfm.tokenizer; print('jax' in sys.modules, tfm.ModelConfig.__name__)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "ModelConfig"]


def test_every_name_that_is_promised_is_there():
    assert sorted(tfm.__all__) == sorted(tfm._HOME_OF)
    for name in tfm.__all__:
        assert getattr(tfm, name).__module__ == tfm._HOME_OF[name] if name != "PRESETS" else tfm.PRESETS
    assert set(tfm.__all__) <= set(dir(tfm))
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        _ = tfm.laod
