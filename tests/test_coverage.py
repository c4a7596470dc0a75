"""The coverage penalty: what beam search adds to a score is what the attention of a forced pass says."""

import jax
import numpy as np
import pytest
from recurrent_kinds import RECURRENT_ONE, one_then_slow
from tiny_models import random_ids, random_params, tiny_config, tiny_model
from tolerances import assert_close

from tfm.decoding.alignment import attention_weights
from tfm.decoding.beam import BeamSearch
from tfm.decoding.coverage import LEAST
from tfm.decoding.generate import generate_n_best

B, S, P, W = 4, 5, 3, 3
SOURCE = random_ids(B, S, seed=1)
SOURCE_LENGTHS = np.array([5, 1, 3, 4], np.int32)
CONFIGS = [
    tiny_config(positions="t5-bias", num_kv_heads=2, shared_embeddings="none"),
    tiny_config(positions="rope", architecture="decoder-only", shared_embeddings="none"),
]
every_architecture = pytest.mark.parametrize(
    "config", [*one_then_slow(CONFIGS), RECURRENT_ONE], ids=lambda config: config.architecture
)


pytestmark = [pytest.mark.usefixtures("compile_fast"), pytest.mark.slow]


def run(config, search, max_tokens=3, **arguments):
    made = generate_n_best(
        tiny_model(config), random_params(config), SOURCE, source_lengths=SOURCE_LENGTHS, search=search,
        max_tokens=max_tokens, capacity=8, **arguments,
    )  # fmt: skip
    return jax.tree.map(np.asarray, made)


@pytest.mark.parametrize("groups", [1, 3])
@every_architecture
def test_scores_are_those_of_the_formula(config, groups):
    beta = np.array([0.2, 1.0, 0.0, 3.0], np.float32)
    search = BeamSearch(width=W, num_best=W, alpha=0.7, coverage=beta, groups=groups, diversity=2.0)
    best = run(config, search)
    seen = 0.0
    for i in range(W):
        there = best.scores[:, i] > -np.inf
        lengths = np.maximum(best.lengths[:, i], 1)
        weights = attention_weights(
            tiny_model(config), random_params(config), SOURCE, best.tokens[:, i], source_lengths=SOURCE_LENGTHS,
            target_lengths=lengths,
        ).cross_attention  # fmt: skip
        covered = np.asarray(weights).mean(axis=(0, 2)).sum(axis=1)
        logs = np.maximum(np.log(np.minimum(covered, 1), where=covered > 0, out=np.full_like(covered, -np.inf)), LEAST)
        cp = np.where(np.arange(S) < SOURCE_LENGTHS[:, None], logs, 0).sum(axis=1)
        expected = best.log_probs[:, i] / ((5 + lengths) / 6) ** 0.7 + beta * cp
        assert_close(best.scores[there, i], expected[there], times=10)
        seen += np.abs(cp[there]).sum()
    assert seen > 1, "everything was covered: this test tests nothing"
    assert (best.scores[:, 1:] <= best.scores[:, :-1]).all()


@every_architecture
def test_a_weight_of_zero_is_no_penalty(config):
    with_zero, without = (run(config, BeamSearch(width=W, num_best=W, coverage=beta)) for beta in (0.0, None))
    np.testing.assert_array_equal(with_zero.tokens, without.tokens)
    assert_close(with_zero.scores, without.scores)


@every_architecture
def test_a_prompts_last_token_looks_for_the_first_new_one(config):
    """So what follows a prompt is covered by what it looked at, and not by what the prompt did."""
    prompt = random_ids(B, P, seed=3)
    prompt[:, 0] = config.start_id
    lengths = np.array([1, 3, 2, 3], np.int32)
    search = BeamSearch(width=1, alpha=0.0, coverage=1.0)
    best = run(config, search, max_tokens=2, prompt=prompt, prompt_lengths=lengths)
    for row in range(B):
        forced = np.concatenate([prompt[row, 1 : lengths[row]], best.tokens[row, 0, : best.lengths[row, 0]]])
        weights = attention_weights(
            tiny_model(config), random_params(config), SOURCE[row : row + 1, : SOURCE_LENGTHS[row]], forced[None]
        ).cross_attention
        covered = np.asarray(weights).mean(axis=(0, 2))[0, lengths[row] - 1 :].sum(axis=0)
        cp = np.maximum(np.log(np.minimum(covered, 1)), LEAST).sum()
        assert_close(best.scores[row, 0], best.log_probs[row, 0] + cp, times=10)
