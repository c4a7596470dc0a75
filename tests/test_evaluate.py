"""Losses and metrics on held-out pairs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.answering import Answer
from tfm.batch import make_batch
from tfm.config import ModelConfig
from tfm.decoding.sampling import Greedy
from tfm.nn.models import build_model
from tfm.nn.params import init_params
from tfm.pipeline import TextModel
from train.evaluate import Sample, evaluate, held_out_loss, perplexity
from train.step import make_eval_step
from train.tasks import Examples

CONFIG = ModelConfig(
    source_vocab_size=12, target_vocab_size=11, model_dim=8, feed_forward_dim=16, num_heads=2, encoder_layers=1,
    decoder_layers=1, dropout_rate=0.5,
)  # fmt: skip
SOURCES = [[3, 4, 2], [5, 2], [6, 7, 8, 9, 2], [2], [10, 11, 2]]
TARGETS = [[3, 4], [5], [6, 7, 8, 9, 10], [3], [4, 4, 4]]


pytestmark = pytest.mark.usefixtures("compile_fast")


@pytest.fixture(scope="module")
def model():
    return build_model(CONFIG, dtype="float32")


def test_the_loss_is_the_mean_over_all_tokens_however_they_are_batched(model):
    params = init_params(model, jax.random.key(0))
    forward, eval_step = jax.jit(model.apply), make_eval_step(model)
    expected, tokens = 0.0, 0
    for source, target in zip(SOURCES, TARGETS, strict=True):
        batch = jax.tree.map(jnp.asarray, make_batch([source], [target], CONFIG))
        logits = forward({"params": params}, batch.source, batch.source_lengths, batch.target_in)
        log_probs = np.asarray(jax.nn.log_softmax(logits[0]), np.float64)
        expected -= log_probs[np.arange(len(target) + 1), batch.target_out[0]].sum()
        tokens += len(target) + 1
    expected /= tokens
    for cuts in ([5], [1, 5], [1, 2, 3, 4, 5]):
        batches, start = [], 0
        for end in cuts:
            batches.append(make_batch(SOURCES[start:end], TARGETS[start:end], CONFIG, rows=5, shape=(6, 8)))
            start = end
        result = held_out_loss(eval_step, params, batches)
        assert result["loss"] == pytest.approx(expected, rel=1e-6)  # float32 sums
        assert result["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    assert eval_step._cache_size() == 1


def test_no_pairs_have_no_loss(model):
    empty = make_batch([], [], CONFIG, rows=2, shape=(2, 2))
    params = init_params(model, jax.random.key(0))
    for batches in ([], [empty]):
        with pytest.raises(ValueError, match="expected held-out pairs, got none"):
            held_out_loss(make_eval_step(model), params, batches)


def test_perplexity_of_a_hopeless_model_is_infinite():
    assert perplexity(1e5) == math.inf
    assert perplexity(0.0) == 1.0
    assert math.isnan(perplexity(math.nan))


class Scripted(TextModel):
    """Answers by a function, and remembers what it was asked."""

    def __init__(self, answer):
        self.answer = answer
        self.asked: list[str] = []
        self.limits: list[int] = []

    def generate(self, texts, *, max_tokens, sampler):
        assert sampler == Greedy()
        self.asked += texts
        self.limits.append(max_tokens)
        return [Answer(text=self.answer(text), score=0.0, tokens=[], finished=True) for text in texts]


EXAMPLES = Examples([str(number) for number in range(10)], [[f"{number}!", f"{number}?"] for number in range(10)])


def test_any_reference_is_right():
    model = Scripted(lambda text: text + ("!" if int(text) < 4 else "?" if int(text) < 7 else "x"))
    evaluation = evaluate(model, EXAMPLES, ["exact-match", "wer"], max_tokens=7)
    assert evaluation.metrics == pytest.approx({"exact-match": 70.0, "wer": 30.0})
    assert evaluation.hypotheses == tuple(f"{number}{'!!!!???xxx'[number]}" for number in range(10))
    assert evaluation.samples == ()
    assert model.limits == [7]


def test_a_part_is_spread_evenly():
    model = Scripted(lambda text: text + "!")
    evaluation = evaluate(model, EXAMPLES, ["exact-match"], max_tokens=7, max_examples=5, samples=2)
    assert model.asked == ["0", "2", "4", "6", "8"]
    assert evaluation.samples == (Sample("0", "0!", ("0!", "0?")), Sample("4", "4!", ("4!", "4?")))


def test_without_a_metric_only_the_samples_are_generated():
    model = Scripted(lambda text: text)
    evaluation = evaluate(model, EXAMPLES, [], max_tokens=7, max_examples=1000, samples=3)
    assert model.asked == ["0", "3", "6"]
    assert evaluation.metrics == {}
    assert [sample.source for sample in evaluation.samples] == ["0", "3", "6"]


def test_no_examples_are_an_error():
    with pytest.raises(ValueError, match="expected held-out examples, got none"):
        evaluate(Scripted(str), Examples([], []), ["wer"], max_tokens=7)
