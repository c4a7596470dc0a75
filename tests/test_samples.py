"""Several samples of a row: independent draws from the model's distribution, the likeliest first."""

import collections
import inspect

import jax
import numpy as np
import pytest
from compile_counter import count_compilations
from one_layer import CONFIGS, every_architecture
from scipy import stats
from tiny_models import random_ids, random_params, tiny_model
from tolerances import assert_close, assert_same_bits

from tfm.decoding.arguments import checked_arguments
from tfm.decoding.generate import _sample, generate_n_best
from tfm.decoding.inference import prefill
from tfm.decoding.sampling import Greedy, Samples, Sampling
from tfm.decoding.score import score

B, S, R = 3, 5, 6
SOURCE = random_ids(B, S, seed=1)
SOURCE_LENGTHS = np.array([5, 1, 3], np.int32)


pytestmark = pytest.mark.usefixtures("compile_fast")


def run(config, search, *, source=SOURCE, source_lengths=SOURCE_LENGTHS, key=None, **arguments):
    key = jax.random.key(7) if key is None else key
    arguments = {"max_tokens": 8, "capacity": 8, **arguments}
    made = generate_n_best(
        tiny_model(config), random_params(config), source, source_lengths=source_lengths, search=search, key=key,
        **arguments,
    )  # fmt: skip
    return jax.tree.map(np.asarray, made)


@every_architecture
def test_samples_have_their_own_scores_and_are_in_order(config):
    made = run(config, Samples(R, Sampling(temperature=1.5)))
    assert made.tokens.shape[:2] == (B, R)
    assert (made.scores[:, :-1] >= made.scores[:, 1:]).all()
    assert_same_bits(made.scores, made.log_probs)
    assert len({tuple(row) for row in made.tokens[0].tolist()}) > 1, "all samples are equal"
    for i in range(R):
        scores = score(
            tiny_model(config), random_params(config), SOURCE, made.tokens[:, i], source_lengths=SOURCE_LENGTHS,
            target_lengths=made.lengths[:, i],
        )  # fmt: skip
        assert_close(made.token_log_probs[:, i], scores.token_log_probs, times=10)
        assert_close(made.log_probs[:, i], scores.log_probs, times=10)


@every_architecture
def test_a_rows_samples_follow_from_its_own_key(config):
    keys = jax.random.split(jax.random.key(2, impl="threefry2x32"), B)
    together = run(config, Samples(R), key=keys)
    order = np.array([2, 0, 1])
    moved = run(config, Samples(R), key=keys[order], source=SOURCE[order], source_lengths=SOURCE_LENGTHS[order])
    assert_same_bits(moved.tokens, together.tokens[order])
    fewer = run(config, Samples(R, num_best=2), key=keys)
    assert_same_bits(fewer.tokens, together.tokens[:, :2])


@every_architecture
def test_many_samples_are_drawn_in_rounds_and_are_the_same(config):
    """67 in two rounds, of which the second has one too many; each is the draw of its place."""
    key = jax.random.key(3)
    many = run(config, Samples(67), key=key)
    assert many.tokens.shape[1] == 67
    assert (many.scores[:, :-1] >= many.scores[:, 1:]).all()
    few = run(config, Samples(5), key=key)
    for row in range(B):
        ends = zip(many.tokens[row].tolist(), many.lengths[row], strict=True)
        among = {tuple(tokens[:length]): many.scores[row, i] for i, (tokens, length) in enumerate(ends)}
        for tokens, length, log_prob in zip(few.tokens[row].tolist(), few.lengths[row], few.scores[row], strict=True):
            assert_close(among[tuple(tokens[:length])], log_prob, times=10)


def test_the_memory_of_many_samples_does_not_grow_with_their_square():
    def temporary_bytes(number):
        sizes = dict(number=number, num_best=number, capacity=8)
        batch = np.full(1, 8, np.int32)
        model, params = tiny_model(CONFIGS[0]), random_params(CONFIGS[0])
        arguments, _ = checked_arguments(
            model, SOURCE[:1], SOURCE_LENGTHS[:1], None, None, batch, None, 8
        )  # fmt: skip
        keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), 1)
        lowered = _sample.lower(model, params, arguments, Sampling().as_arrays(1), keys, **sizes)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(1024) < 8 * temporary_bytes(128)


def test_samples_come_as_often_as_they_are_likely():
    """A chi-square test of the first token among 2,000 draws; a right program fails one seed in a million."""
    config = CONFIGS[0]
    made = run(config, Samples(2000), source=SOURCE[:1], source_lengths=SOURCE_LENGTHS[:1], max_tokens=1, capacity=1)
    counts = collections.Counter(made.tokens[0, :, 0].tolist())
    logits, _ = prefill(tiny_model(config), random_params(config), SOURCE[:1], SOURCE_LENGTHS[:1], capacity=1)
    likely = np.asarray(jax.nn.softmax(logits[0, 0]), np.float64)  # sums must agree to 1e-8
    often = likely * 2000 >= 5
    observed = np.array([counts[token] for token in range(len(likely))])
    observed, expected = ([*x[often], x[~often].sum()] for x in (observed, likely * 2000))
    assert stats.chisquare(observed, np.array(expected) / sum(expected) * sum(observed)).pvalue > 1e-6


@every_architecture
def test_what_varies_compiles_nothing(config):
    run(config, Samples(R))
    with count_compilations() as compilations:
        run(
            config,
            Samples(np.int64(R), Sampling(temperature=0.5, top_p=0.8)),
            max_tokens=[1, 2, 3],
            key=jax.random.key(8),
        )
    assert compilations.count == 0, compilations.names


@pytest.mark.parametrize(
    ("search", "message"),
    [
        (Samples(0), "expected a whole number from 1 to 4096 as num_samples, got 0"),
        (Samples(True), "expected a whole number from 1 to 4096 as num_samples, got True"),
        (Samples(4097), "expected a whole number from 1 to 4096 as num_samples, got 4097"),
        (Samples(10**20), f"expected a whole number from 1 to 4096 as num_samples, got {10**20}"),
        (Samples(2, num_best=1.0), "expected num_best from 1 to the 2 samples, got 1.0"),
        (Samples(2, num_best=3), "expected num_best from 1 to the 2 samples, got 3"),
        (Samples(2, Sampling(top_p=0.0)), "expected top_p more than 0"),
        (Samples(2, Greedy()), r"expected Sampling\(…\) as sampler of samples, got Greedy"),
    ],
)
def test_what_cannot_be_is_refused(search, message):
    refuse = inspect.unwrap(generate_n_best)
    with pytest.raises(ValueError, match=message):
        refuse(
            tiny_model(CONFIGS[0]), random_params(CONFIGS[0]), SOURCE, max_tokens=1, search=search,
            key=jax.random.key(0),
        )  # fmt: skip


def test_samples_need_a_key():
    with pytest.raises(ValueError, match="expected a key for a sampler that draws"):
        generate_n_best(tiny_model(CONFIGS[0]), random_params(CONFIGS[0]), SOURCE, max_tokens=1, search=Samples())
