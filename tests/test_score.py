import inspect

import jax
import numpy as np
import pytest
from recurrent_kinds import RECURRENT_ONE, one_then_slow
from tiny_models import V, random_ids, random_params, tiny_config, tiny_model
from tolerances import assert_close

from tfm.batch import make_batch
from tfm.decoding.beam import BeamSearch
from tfm.decoding.generate import generate, generate_n_best
from tfm.decoding.score import score
from train.config import LossConfig
from train.loss import batch_loss

B, S, T = 3, 5, 4
SOURCE, TARGET = random_ids(B, S, seed=1), random_ids(B, T, seed=2)
SOURCE_LENGTHS, TARGET_LENGTHS = np.array([5, 1, 3]), np.array([4, 2, 1])
CONFIGS = [
    tiny_config(positions="learned", decoder_layers=1),
    tiny_config(positions="rope", architecture="decoder-only", decoder_layers=1),
]
every_architecture = pytest.mark.parametrize(
    "config", [*one_then_slow(CONFIGS), RECURRENT_ONE], ids=lambda config: config.architecture
)


pytestmark = pytest.mark.usefixtures("compile_fast")


def run(config, source=SOURCE, target=TARGET, source_lengths=SOURCE_LENGTHS, target_lengths=TARGET_LENGTHS):
    lengths = dict(source_lengths=source_lengths, target_lengths=target_lengths)
    return jax.tree.map(np.asarray, score(tiny_model(config), random_params(config), source, target, **lengths))


@every_architecture
def test_probabilities_of_all_targets_of_a_length_sum_to_one(config):
    pairs = np.array([[first, second] for first in range(V) for second in range(V)])
    sources = np.repeat(SOURCE[:1], len(pairs), axis=0)
    scores = run(config, sources, pairs, None, None)
    assert_close(np.exp(scores.log_probs).sum(), 1.0)
    assert_close(np.exp(scores.token_log_probs[::V, 0]).sum(), 1.0)
    assert_close(scores.log_probs, scores.token_log_probs.sum(axis=1))


@every_architecture
def test_scores_are_the_losses_of_training(config):
    config = config.replace(dropout_rate=0.0)
    ended = [[*row[:length], config.end_id] for row, length in zip(TARGET.tolist(), TARGET_LENGTHS, strict=True)]
    sources = [row[:length] for row, length in zip(SOURCE.tolist(), SOURCE_LENGTHS, strict=True)]
    batch = make_batch(sources, [ids[:-1] for ids in ended], config)
    model, params = tiny_model(config), random_params(config)
    sums = batch_loss(model, params, batch, LossConfig(label_smoothing=0.0), None)
    padded = np.array([ids + [0] * (T + 1 - len(ids)) for ids in ended])
    scores = score(model, params, SOURCE, padded, source_lengths=SOURCE_LENGTHS, target_lengths=TARGET_LENGTHS + 1)
    assert_close(-scores.log_probs.sum(), sums.nll_sum, times=4)


@every_architecture
def test_what_is_generated_has_the_score_that_it_came_with(config):
    model, params, inputs = tiny_model(config), random_params(config), dict(source_lengths=SOURCE_LENGTHS)
    greedy = generate(model, params, SOURCE, max_tokens=6, **inputs)
    again = run(config, target=greedy.tokens[:, :6], target_lengths=greedy.lengths)
    assert_close(again.log_probs, greedy.scores, times=10)
    best = generate_n_best(model, params, SOURCE, max_tokens=6, search=BeamSearch(width=2, num_best=2), **inputs)
    for i in range(2):
        again = run(config, target=best.tokens[:, i, :6], target_lengths=best.lengths[:, i])
        assert_close(again.log_probs, best.log_probs[:, i], times=10)
        assert_close(again.token_log_probs, best.token_log_probs[:, i, :6], times=4)


@every_architecture
def test_padding_and_neighbours_do_not_matter(config):
    together = run(config)
    junk = np.where(np.arange(T) < TARGET_LENGTHS[:, None], TARGET, random_ids(B, T, seed=5))
    assert_close(run(config, target=np.pad(junk, ((0, 0), (0, 3)))).log_probs, together.log_probs)
    alone = run(config, SOURCE[1:2, :1], TARGET[1:2, :2], None, None)
    assert_close(alone.log_probs, together.log_probs[1:2])
    assert not together.token_log_probs[1, 2:].any()


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"expected target lengths from 1 to 4, got 0 to 4"):
        run(CONFIGS[0], target_lengths=np.array([4, 0, 1]))
    with pytest.raises(ValueError, match=f"expected target ids from 0 to {V - 1}, got {V}"):
        run(CONFIGS[0], target=np.full((B, T), V))
    with pytest.raises(ValueError, match="expected a target for each of 3 sources, got 2"):
        inspect.unwrap(score)(tiny_model(CONFIGS[0]), random_params(CONFIGS[0]), SOURCE, TARGET[:2])
    with pytest.raises(ValueError, match="expected a target of at most 32 tokens, got 33"):
        run(CONFIGS[0], target=random_ids(B, 33), target_lengths=None)
