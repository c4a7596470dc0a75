import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_counter import count_compilations
from jax.extend.core import ClosedJaxpr, Jaxpr
from one_layer import CONFIGS, every_architecture
from tiny_models import V, random_ids, random_params, tiny_model
from tolerances import assert_close, assert_same_bits

from tfm.decoding import generate as generate_module
from tfm.decoding.arguments import Arguments
from tfm.decoding.beam import BeamSearch
from tfm.decoding.generate import generate, generate_n_best
from tfm.decoding.inference import decode_step, prefill
from tfm.decoding.sampling import Greedy
from tfm.decoding.score import score
from tfm.nn.cache import reorder, widen

B, S, P, W = 4, 5, 3, 3
SOURCE = random_ids(B, S, seed=1)
SOURCE_LENGTHS = np.array([5, 1, 3, 4], np.int32)
PROMPT_LENGTHS = np.array([1, 3, 2, 1], np.int32)
CAPACITY = 8


pytestmark = pytest.mark.usefixtures("compile_fast")


def run(config, *, source=SOURCE, source_lengths=SOURCE_LENGTHS, params=None, **arguments):
    arguments = {"max_tokens": CAPACITY, "capacity": CAPACITY, "search": BeamSearch(width=W, num_best=W), **arguments}
    params = random_params(config) if params is None else params
    best = generate_n_best(tiny_model(config), params, source, source_lengths=source_lengths, **arguments)
    return jax.tree.map(np.asarray, best)


@every_architecture
def test_a_beam_of_one_is_greedy(config):
    best = run(config, search=BeamSearch(width=1, alpha=0.0, stop="first-finished"))
    greedy = generate(
        tiny_model(config), random_params(config), SOURCE, source_lengths=SOURCE_LENGTHS, max_tokens=CAPACITY,
        capacity=CAPACITY,
    )  # fmt: skip
    assert_same_bits(best.tokens[:, 0], greedy.tokens)
    assert_same_bits(best.lengths[:, 0], greedy.lengths)
    assert_same_bits(best.finished[:, 0], greedy.finished)
    assert_close(best.log_probs[:, 0], greedy.scores, times=10)


@functools.cache
def full_forward(config):
    return jax.jit(tiny_model(config).apply)


@pytest.mark.parametrize("prompted", [False, True])
@every_architecture
def test_hypotheses_have_the_log_probabilities_of_one_forced_pass(config, prompted):
    """So every hypothesis has read its own past, whatever changed places on the way, and its own source."""
    prompt, lengths = np.full((B, 1), config.start_id), np.ones(B, np.int32)
    if prompted:
        prompt, lengths = random_ids(B, P, seed=3), PROMPT_LENGTHS
        prompt[:, 0] = config.start_id
    num_new = CAPACITY + 1 - prompt.shape[1]
    best = run(config, prompt=prompt, prompt_lengths=lengths, max_tokens=num_new)
    assert (best.scores > -np.inf).all()
    for i in range(W):
        target = np.zeros((B, CAPACITY + P), np.int32)
        for row in range(B):
            target[row, : lengths[row]] = prompt[row, : lengths[row]]
            target[row, lengths[row] : lengths[row] + num_new] = best.tokens[row, i]
        logits = full_forward(config)({"params": random_params(config)}, SOURCE, SOURCE_LENGTHS, target[:, :-1])
        log_probs = np.asarray(jax.nn.log_softmax(logits))
        for row in range(B):
            at = lengths[row] - 1 + np.arange(best.lengths[row, i])
            expected = log_probs[row, at, target[row, at + 1]]
            assert_close(best.token_log_probs[row, i, : len(at)], expected, times=4)
            assert_close(best.log_probs[row, i], expected.sum(), times=10)


@every_architecture
@pytest.mark.parametrize("cache", ["bfloat16", "int8"])
def test_hypotheses_from_a_cache_in_fewer_bits_have_about_the_scores_of_one_forced_pass(config, cache):
    model, params = tiny_model(config, cache=cache), random_params(config)
    best = generate_n_best(
        model, params, SOURCE, source_lengths=SOURCE_LENGTHS, max_tokens=CAPACITY, capacity=CAPACITY,
        search=BeamSearch(width=W, num_best=W),
    )  # fmt: skip
    for i in range(W):
        scored = score(
            model, params, SOURCE, best.tokens[:, i], source_lengths=SOURCE_LENGTHS, target_lengths=best.lengths[:, i]
        )
        # a log-probability is a difference of two logits that are near 3
        assert_close(best.token_log_probs[:, i], scored.token_log_probs, dtype=cache, times=3)


@every_architecture
def test_neighbours_padding_and_capacity_change_nothing(config):
    together = run(config)
    order = np.array([3, 1, 0, 2])
    same = [
        (run(config, source=SOURCE[order], source_lengths=SOURCE_LENGTHS[order]), order),
        (run(config, source=np.pad(SOURCE, ((0, 0), (0, 2))), capacity=12), np.arange(B)),
        (run(config, source=SOURCE[1:2], source_lengths=SOURCE_LENGTHS[1:2]), np.array([1])),
    ]
    for best, rows in same:
        assert best.tokens[..., :CAPACITY].tolist() == together.tokens[rows].tolist()
        assert best.lengths.tolist() == together.lengths[rows].tolist()
        assert best.finished.tolist() == together.finished[rows].tolist()
        assert_close(best.scores, together.scores[rows], times=10)


def shapes_in(jaxpr: Jaxpr):
    for equation in jaxpr.eqns:
        yield from (var.aval.shape for var in equation.outvars)
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                if isinstance(inner, Jaxpr | ClosedJaxpr):
                    yield from shapes_in(inner if isinstance(inner, Jaxpr) else inner.jaxpr)


def test_beams_read_one_copy_of_the_sources_keys_and_values():
    """No array of 37 source tokens and 6 features a head, in the whole program, is there once for each beam."""
    config = CONFIGS[0].replace(max_source_length=64, head_dim=6)
    source, lengths = np.ones((B, 37), np.int32), np.full(B, 37, np.int32)
    jaxpr = jax.make_jaxpr(
        functools.partial(generate_n_best, tiny_model(config), max_tokens=3, search=BeamSearch(width=W))
    )(random_params(config), source, source_lengths=lengths)
    sizes = {shape: np.prod(shape) for shape in shapes_in(jaxpr.jaxpr) if 37 in shape and 6 in shape}
    assert (B, config.kv_heads, 37, 6) in sizes
    assert max(sizes.values()) < B * W * config.kv_heads * 37 * 6


@every_architecture
def test_a_widened_cache_decodes_like_one_row_a_hypothesis(config):
    model, params = tiny_model(config), random_params(config)
    _, narrow = prefill(model, params, SOURCE, SOURCE_LENGTHS, capacity=CAPACITY)
    repeated = [np.repeat(x, W, axis=0) for x in (SOURCE, SOURCE_LENGTHS)]
    _, tiled = prefill(model, params, *repeated, capacity=CAPACITY)
    wide = widen(narrow, W)
    tokens, parents = random_ids(B * W, 4, seed=5), (np.arange(B)[:, None] * W + [[2, 0, 0]]).reshape(-1)
    for i in range(2):
        logits, wide = decode_step(model, params, tokens[:, 2 * i : 2 * i + 2], wide)
        expected, tiled = decode_step(model, params, tokens[:, 2 * i : 2 * i + 2], tiled)
        assert_close(logits, expected)
        wide, tiled = reorder(wide, jnp.array(parents)), jax.tree.map(lambda x: x[parents], tiled)


@every_architecture
def test_what_a_service_varies_compiles_nothing(config):
    run(config)
    changes = [
        {"search": BeamSearch(width=W, num_best=W, alpha=1)},
        {"search": BeamSearch(width=W, num_best=W, alpha=np.float64(0.3))},
        {"max_tokens": 2},
        {"max_tokens": np.array([0, 1, 2, 3])},
        {"source_lengths": None},
        {"source": SOURCE[::-1].astype(np.int64)},
        {"params": jax.tree.map(lambda leaf: np.asarray(leaf) * 2, random_params(config))},
    ]
    with count_compilations() as compilations:
        for change in changes:
            run(config, **change)
            assert compilations.count == 0, (change, compilations.names)


@every_architecture
def test_it_works_inside_a_callers_jit(config):
    @jax.jit
    def inside(params, source, lengths, max_tokens, alpha):
        search = BeamSearch(width=W, num_best=W, alpha=alpha)
        return generate_n_best(
            tiny_model(config), params, source, source_lengths=lengths, max_tokens=max_tokens, capacity=CAPACITY,
            search=search,
        )  # fmt: skip

    within = inside(random_params(config), SOURCE, SOURCE_LENGTHS, 5, 0.6)
    assert_same_bits(within.tokens, run(config, max_tokens=5).tokens)


def test_the_loop_holds_no_second_cache_beside_the_reordered_one(compile_fully):
    config = CONFIGS[0].replace(max_target_length=4096, head_dim=32)
    lengths, search = np.full(B, S, np.int32), BeamSearch(width=W).as_arrays()
    arguments = Arguments(SOURCE, lengths, np.ones((B, 1), np.int32), np.ones(B, np.int32), lengths, None)
    lowered = generate_module._search.lower(tiny_model(config), random_params(config), arguments, search, capacity=4096)
    cache = 2 * B * W * 4096 * config.kv_heads * 32 * 4
    assert cache / 2 < lowered.compile().memory_analysis().temp_size_in_bytes < 2.6 * cache


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=f"expected a width from 1 to the vocabulary's {V}, got {V + 1}"):
        run(CONFIGS[0], search=BeamSearch(width=V + 1))
    with pytest.raises(ValueError, match="expected num_best from 1 to the width 2, got 3"):
        run(CONFIGS[0], search=BeamSearch(width=2, num_best=3))
    with pytest.raises(ValueError, match=r"expected BeamSearch\(…\) or Samples\(…\) as search, got Greedy"):
        inspect.unwrap(generate_n_best)(
            tiny_model(CONFIGS[0]), random_params(CONFIGS[0]), SOURCE, max_tokens=1, search=Greedy()
        )
    with pytest.raises(ValueError, match=r"expected at most 8 new tokens \(the capacity 8, 1 of prompt"):
        run(CONFIGS[0], max_tokens=9)
