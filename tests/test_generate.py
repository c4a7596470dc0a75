import functools
import math
import subprocess
import sys

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_counter import count_compilations
from jax.experimental import io_callback
from ragged_requests import (
    CAPACITY,
    CONFIGS,
    MOST,
    PROMPT_LENGTHS,
    SOURCE,
    SOURCE_LENGTHS,
    B,
    P,
    S,
    every_architecture,
    prompt_of,
    run,
    seeded_params,
)
from scipy import stats
from tiny_models import V, random_ids, random_params, tiny_model
from tolerances import assert_close, assert_same_bits, assert_same_but_for_rounding

from tfm.decoding import arguments as arguments_module
from tfm.decoding import generate as generate_module
from tfm.decoding.arguments import Arguments
from tfm.decoding.generate import generate
from tfm.decoding.sampling import Greedy, Sampling
from tfm.nn.cache import cache_bytes

pytestmark = pytest.mark.usefixtures("compile_fast")


@functools.cache
def full_forward(config, length):
    return jax.jit(tiny_model(config).apply)


def by_hand(config, pick, *, prompt=None, prompt_lengths=None, limits=None):
    """The loop that one would write first: the whole forward pass for each token, row after row."""
    prompt = np.full((B, 1), config.start_id) if prompt is None else prompt
    prompt_lengths = np.ones(B, np.int32) if prompt_lengths is None else prompt_lengths
    num_new = CAPACITY + 1 - prompt.shape[1]
    limits = np.full(B, num_new) if limits is None else limits
    target = np.zeros((B, CAPACITY + 1), np.int32)
    target[:, : prompt.shape[1]] = prompt
    tokens, scores = [[] for _ in range(B)], np.zeros(B)
    for step in range(num_new):
        target_in = target[:, :CAPACITY]
        logits = full_forward(config, CAPACITY)({"params": seeded_params(config)}, SOURCE, SOURCE_LENGTHS, target_in)
        for row in range(B):
            if len(tokens[row]) == limits[row] or tokens[row][-1:] == [config.end_id]:
                continue
            at = prompt_lengths[row] + step
            next_logits = np.asarray(logits)[row, at - 1].astype(np.float64)
            token = pick(row, step, next_logits)
            tokens[row].append(token)
            scores[row] += next_logits[token] - np.log(np.exp(next_logits).sum())
            target[row, at] = token
    return tokens, scores


def greedy(row, step, logits):
    return int(logits.argmax())


def assert_is(generation, tokens, scores, config):
    for row, expected in enumerate(tokens):
        length = generation.lengths[row]
        assert generation.tokens[row, :length].tolist() == expected
        assert (generation.tokens[row, length:] == config.pad_id).all()
        assert generation.finished[row] == (expected[-1:] == [config.end_id])
    assert_close(generation.scores, scores, times=10)  # a sum of up to 16


# What comes out


@every_architecture
def test_greedy_is_the_argmax_of_the_full_forward(config):
    generation = run(config)
    assert generation.tokens.shape == (B, MOST)
    assert {x.dtype for x in (generation.tokens, generation.lengths)} == {np.dtype(np.int32)}
    tokens, scores = by_hand(config, greedy)
    assert_is(generation, tokens, scores, config)


@every_architecture
def test_prompts_of_different_lengths_are_continued(config):
    prompt, limits = prompt_of(config), np.array([14, 14, 5, 13, 0, 1])
    generation = run(config, prompt=prompt, prompt_lengths=PROMPT_LENGTHS, max_tokens=limits)
    assert generation.tokens.shape == (B, CAPACITY + 1 - P)
    # by hand, the junk behind a short prompt is overwritten by what is generated
    tokens, scores = by_hand(config, greedy, prompt=prompt, prompt_lengths=PROMPT_LENGTHS, limits=limits)
    assert_is(generation, tokens, scores, config)
    # and what lies behind a prompt is not read
    junk = np.where(np.arange(P) < PROMPT_LENGTHS[:, None], prompt, random_ids(B, P, seed=11))
    again = run(config, prompt=junk, prompt_lengths=PROMPT_LENGTHS, max_tokens=limits)
    assert_same_bits(again.tokens, generation.tokens)


@every_architecture
def test_each_row_has_its_own_limit(config):
    free = run(config)
    limits = np.array([0, 1, 2, 3, MOST, 0], np.int32)
    limited = run(config, max_tokens=limits)
    assert limited.lengths.tolist() == np.minimum(free.lengths, limits).tolist()
    for row in range(B):
        length = limited.lengths[row]
        assert limited.tokens[row, :length].tolist() == free.tokens[row, :length].tolist()
        assert (limited.tokens[row, length:] == config.pad_id).all()
    assert limited.finished.tolist() == (free.finished & (free.lengths <= limits)).tolist()
    assert limited.scores[[0, 5]].tolist() == [0, 0]


@every_architecture
def test_padding_may_be_the_end_token_itself(config):
    """As in vocabularies without a padding token: what is padded has not ended."""
    params, limits = seeded_params(config), np.array([0, 1, 2, 3, MOST, 0], np.int32)
    limited = run(config.replace(pad_id=config.end_id), params, max_tokens=limits)
    other = run(config, params, max_tokens=limits)
    assert limited.finished.tolist() == other.finished.tolist()
    assert limited.lengths.tolist() == other.lengths.tolist()
    assert not limited.finished[[0, 5]].any()


@every_architecture
def test_scores_are_the_models_own_whatever_the_sampler(config):
    """Sampled at another temperature and cut; scored as the full forward scores what came."""
    generation = run(config, sampler=Sampling(temperature=2.0, top_k=8), key=jax.random.key(0))
    tokens, scores = by_hand(config, lambda row, step, logits: int(generation.tokens[row, step]))
    assert_is(generation, tokens, scores, config)


def shaped_params(config, end_logit):
    """All tokens are equally likely after anything, but for the end token."""
    params = dict(random_params(config))
    params["decoder"] = {**params["decoder"], "norm": {"scale": jnp.zeros(16), "bias": jnp.ones(16) / 16}}
    params["output"] = {"weight": jnp.zeros((V, 16)).at[config.end_id].set(end_logit)}
    return params


@every_architecture
def test_an_end_at_the_first_step_is_one_token(config):
    generation = run(config, shaped_params(config, 50.0))
    assert generation.tokens[:, 0].tolist() == [config.end_id] * B
    assert (generation.tokens[:, 1:] == config.pad_id).all()
    assert generation.lengths.tolist() == [1] * B
    assert generation.finished.all()
    assert_close(generation.scores, np.zeros(B))
    nothing = run(config, shaped_params(config, 50.0), max_tokens=np.array([0, 1] * 3))
    assert nothing.lengths.tolist() == [0, 1] * 3
    assert nothing.finished.tolist() == [False, True] * 3


@every_architecture
def test_draws_of_rows_and_steps_are_independent(config):
    """An even model over the ten tokens that do not end: frequencies by chi-square, and neighbours in time and in rows
    agree one time in ten, 5 sigma; a right loop fails once in 300,000 seeds, and the seed is fixed.
    """  # fmt: skip
    tokens = run(
        config, shaped_params(config, -100.0), source=random_ids(64, S), source_lengths=None, sampler=Sampling(),
        key=jax.random.key(5),
    ).tokens  # fmt: skip
    counts = np.delete(np.bincount(tokens.ravel(), minlength=V), config.end_id)
    assert stats.chisquare(counts).pvalue > 1e-6
    for one, other in ((tokens[:, 1:], tokens[:, :-1]), (tokens[1:], tokens[:-1])):
        sigma = math.sqrt(0.1 * 0.9 / one.size)
        assert abs((one == other).mean() - 0.1) < 5 * sigma


# Stopping

counted_picks = []


@flax.struct.dataclass
class CountingGreedy(Greedy):
    """Greedy, noting each call as it runs."""

    def pick(self, logits, keys):
        def note(logits):
            counted_picks.append(1)
            return logits

        # a debugging callback, whose result nobody waits for, has been lost on a busy machine
        return super().pick(io_callback(note, logits, logits), keys)


@every_architecture
def test_the_loop_runs_until_all_rows_have_ended_and_no_longer(config):
    limits = np.array([2, MOST, 1, 4, 0, 3], np.int32)
    for max_tokens, seen in ((limits, None), (np.minimum(limits, 4), None), (0, 1), (1, 1)):
        counted_picks.clear()
        generation = run(config, max_tokens=max_tokens, sampler=CountingGreedy())
        assert len(counted_picks) == (max(generation.lengths) if seen is None else seen)
        reference = run(config, max_tokens=max_tokens)
        assert_same_but_for_rounding(generation, reference, times=10)  # sums of up to 16 terms


# Neighbours, padding, capacity, keys


@pytest.mark.parametrize("sampler", [Greedy(), Sampling(temperature=0.8, top_k=7, top_p=0.95)], ids=["greedy", "draws"])
@every_architecture
def test_neighbours_padding_and_capacity_change_nothing(config, sampler):
    keys = jax.random.split(jax.random.key(3), B)
    together = run(config, sampler=sampler, key=keys)
    order = np.array([4, 2, 0, 5, 1, 3])
    moved = run(config, source=SOURCE[order], source_lengths=SOURCE_LENGTHS[order], sampler=sampler, key=keys[order])
    junk = np.where(np.arange(S) < SOURCE_LENGTHS[:, None], SOURCE, random_ids(B, S, seed=7))
    same = [
        (moved, order),
        (run(config, source=junk, sampler=sampler, key=keys), np.arange(B)),
        (run(config, source=np.pad(SOURCE, ((0, 0), (0, 2))), capacity=24, sampler=sampler, key=keys), np.arange(B)),
    ]
    for row in (0, 1):
        alone = dict(source=SOURCE[row : row + 1], source_lengths=SOURCE_LENGTHS[row : row + 1])
        same.append((run(config, **alone, sampler=sampler, key=keys[row : row + 1]), np.array([row])))
    for generation, rows in same:
        assert generation.tokens[:, :MOST].tolist() == together.tokens[rows].tolist()
        assert generation.lengths.tolist() == together.lengths[rows].tolist()
        assert generation.finished.tolist() == together.finished[rows].tolist()
        assert_close(generation.scores, together.scores[rows], times=10)


@every_architecture
def test_one_key_gives_each_row_its_own_by_its_index(config):
    one = run(config, sampler=Sampling(), key=jax.random.key(3))
    folded = jnp.stack([jax.random.fold_in(jax.random.key(3), row) for row in range(B)])
    assert_same_bits(run(config, sampler=Sampling(), key=folded).tokens, one.tokens)
    # equal rows with one key do not draw alike; the same call draws the same, another key something else
    equal = np.repeat(SOURCE[:1], B, axis=0)
    drawn = run(config, source=equal, source_lengths=None, sampler=Sampling(temperature=3.0), key=jax.random.key(3))
    assert len({tuple(row) for row in drawn.tokens.tolist()}) > 1
    assert_same_bits(run(config, sampler=Sampling(), key=jax.random.key(3)).tokens, one.tokens)
    assert (run(config, sampler=Sampling(), key=jax.random.key(4)).tokens != one.tokens).any()


@pytest.mark.parametrize(
    "sampler", [Sampling(temperature=0), Sampling(top_k=1), Sampling(top_p=1e-6), Sampling(min_p=1.0)], ids=str
)
def test_extreme_samplers_are_greedy(sampler):
    config = CONFIGS[0]
    greedy = run(config)
    sampled = run(config, sampler=sampler, key=jax.random.key(0))
    assert_same_but_for_rounding(sampled, greedy, times=10)  # sums of up to 16 terms


def test_bfloat16_generates_what_it_scores():
    config = CONFIGS[0]
    model = tiny_model(config, "bfloat16")
    generation = generate(model, seeded_params(config), SOURCE, source_lengths=SOURCE_LENGTHS, max_tokens=MOST)
    target = np.concatenate([np.full((B, 1), config.start_id), generation.tokens], axis=1)[:, :MOST]
    logits = jax.jit(model.apply)({"params": seeded_params(config)}, SOURCE, SOURCE_LENGTHS, target)
    log_probs = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), np.asarray(generation.tokens)[..., None], -1)
    real = np.arange(MOST) < np.asarray(generation.lengths)[:, None]
    # each of up to 16 terms may be off by the tolerance of a logit
    assert_close(generation.scores, (log_probs[..., 0] * real).sum(axis=-1), dtype="bfloat16", times=4)


# Compilation and capacity


@every_architecture
def test_what_a_service_varies_compiles_nothing(config):
    params = seeded_params(config)
    prompt, keys = prompt_of(config)[:, :1], jax.random.split(jax.random.key(9), B)
    run(config, sampler=Sampling(temperature=0.5), key=jax.random.key(0))
    run(config, sampler=Sampling(temperature=0.5), key=keys, max_tokens=np.full(B, 3))
    changes = [
        {"sampler": Sampling(temperature=1)},
        {"sampler": Sampling(temperature=np.float32(0.7), top_k=3, top_p=1, min_p=0)},
        {"sampler": Sampling(top_p=0.3, min_p=0.2, top_k=np.int64(2))},
        {"key": jax.random.key(77)},
        {"key": keys},
        {"max_tokens": 1},
        {"max_tokens": np.array(7)},
        {"max_tokens": np.array([0, 1, 2, 3, 4, 5])},
        {"source_lengths": None},
        {"source_lengths": SOURCE_LENGTHS[::-1].copy()},
        {"source": SOURCE[::-1].astype(np.int64)},
        {"prompt": prompt},
        {"prompt": prompt, "prompt_lengths": np.ones(B, np.int32)},
        {"params": jax.tree.map(lambda leaf: np.asarray(leaf) * 2, params)},
    ]
    keyed = {"sampler": Sampling(temperature=0.5), "key": jax.random.key(0)}
    with count_compilations() as compilations:
        for change in changes:
            run(config, **{**keyed, **change})
            assert compilations.count == 0, (change, compilations.names)


def test_max_tokens_within_a_bucket_compile_nothing():
    config = CONFIGS[0]
    run(config, capacity=None, max_tokens=3)
    with count_compilations() as compilations:
        for max_tokens in (0, 1, 8, 16):
            assert run(config, capacity=None, max_tokens=max_tokens).tokens.shape == (B, 16)
    assert compilations.count == 0, compilations.names


def test_capacity_grows_in_powers_of_two_up_to_what_the_model_accepts():
    capacity = functools.partial(arguments_module._capacity, capacity=None)
    assert [capacity(n, 1, 100) for n in (0, 16, 17, 32, 33, 64, 65, 100)] == [16, 16, 32, 32, 64, 64, 100, 100]
    assert capacity(np.array([3, 40]), 1, 100) == 64
    assert [capacity(n, 14, 100) for n in (3, 4)] == [16, 32]
    assert [capacity(n, 9, 10) for n in (0, 2)] == [10, 10]


@every_architecture
def test_it_works_inside_a_callers_jit(config):
    outside = run(config, max_tokens=5)

    @jax.jit
    def inside(params, source, lengths, max_tokens, temperature, key):
        sampler = Sampling(temperature=temperature)
        return generate(
            tiny_model(config), params, source, source_lengths=lengths, max_tokens=max_tokens, capacity=CAPACITY,
            sampler=sampler, key=key,
        )  # fmt: skip

    call = functools.partial(inside, seeded_params(config), SOURCE, SOURCE_LENGTHS)
    within = call(5, 0.0, jax.random.key(0))
    for name in ("tokens", "lengths", "finished"):
        assert_same_bits(getattr(within, name), getattr(outside, name))
    assert_close(within.scores, outside.scores)
    sampled = run(config, max_tokens=5, sampler=Sampling(temperature=0.7), key=jax.random.key(1))
    with count_compilations() as compilations:
        assert_same_bits(call(5, 0.7, jax.random.key(1)).tokens, sampled.tokens)
        # a limit that only the device knows is cut to the capacity
        assert np.max(np.asarray(call(1000, 0.7, jax.random.key(1)).lengths)) <= MOST
    assert compilations.count == 0, compilations.names


@every_architecture
def test_the_loop_holds_one_cache(config, compile_fully):
    """Each step writes into the cache that the loop carries; a copy would double the memory and cost its bandwidth."""
    config = config.replace(max_target_length=4096, head_dim=32)  # or scores and biases would weigh as much
    lengths, keys = np.full(B, S, np.int32), jax.random.split(jax.random.key(0), B)
    arguments = Arguments(SOURCE, lengths, np.ones((B, 1), np.int32), np.ones(B, np.int32), lengths, None)
    inputs = (tiny_model(config), random_params(config), arguments, Greedy(), keys)
    lowered = generate_module._generate.lower(*inputs, capacity=4096)
    cache = cache_bytes(config, batch=B, source_length=S, capacity=4096)
    assert cache / 2 < lowered.compile().memory_analysis().temp_size_in_bytes < 1.5 * cache


def test_no_global_setting_is_changed():
    """By importing and using the library; in a process of its own, because tests do change some."""
    program = """if True:
        import jax
        before = dict(jax.config.values)
        from tfm.config import ModelConfig
        from tfm.decoding.generate import generate
        from tfm.nn.params import param_shapes
        from tfm.nn.models import build_model
        config = ModelConfig(model_dim=8, num_heads=2, encoder_layers=1, decoder_layers=1)
        run = lambda params: generate(build_model(config), params, jax.numpy.ones((1, 1), int), max_tokens=1)
        jax.eval_shape(run, param_shapes(config))
        assert dict(jax.config.values) == before
    """
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
