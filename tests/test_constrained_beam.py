"""Beam search under rules, against all that there is."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from constraint_statement import Row, contains, phrases_of, without
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_close

from tfm.decoding.beam import BeamSearch, beam_search
from tfm.decoding.constraints import LAST_RESORT, Constraints

pytestmark = pytest.mark.usefixtures("compile_fast")

SMALL_V, SMALL_T, SMALL_END, WIDE = 4, 4, 2, 4**4


@functools.partial(jax.jit, static_argnames="width")
def search_table(table, constraints, limits, width=WIDE):
    """Beam search in a table of logits, [B, prefixes, V], whose state is each hypothesis's prefix."""
    batch = table.shape[0]
    rows = jnp.repeat(jnp.arange(batch), width)

    def step(tokens, prefixes):
        prefixes = prefixes * SMALL_V + tokens[:, 0] + 1
        return table[rows, prefixes], prefixes

    rules = constraints.bind(
        prompt=jnp.ones((batch, 1), int), prompt_lengths=jnp.ones(batch, int), source_lengths=jnp.ones(batch, int),
        limits=limits, end_id=SMALL_END, width=width,
    )  # fmt: skip
    return beam_search(
        BeamSearch(width=width, num_best=min(width, 5), alpha=0.7, stop="provably-best"),
        table[:, 0], jnp.zeros(batch * width, jnp.int32), step=step, reorder=lambda state, p: state[p],
        constrain=rules, limits=limits, max_tokens=SMALL_T, end_id=SMALL_END, pad_id=0,
    )  # fmt: skip


def exhaustive(table, row):
    """Every output that the rules let come: (score, log P, tokens), best first."""
    found = []

    def grow(output, prefix, ranked, log_prob):
        if output and (output[-1] == SMALL_END or len(output) == row.limit):
            found.append((ranked / ((5 + len(output)) / 6) ** 0.7, log_prob, output))
            return
        logits = table[prefix].astype(np.float64)
        reweighted = row.reweighted(logits, output)
        log_z = np.log(np.exp(reweighted).sum()) + (0 if row.choices(output, SMALL_V) else LAST_RESORT)
        for token in row.allowed(output, SMALL_V):
            grow(
                [*output, token],
                prefix * SMALL_V + token + 1,
                ranked + reweighted[token] - log_z,
                log_prob + logits[token] - np.log(np.exp(logits).sum()),
            )

    grow([], 0, 0.0, 0.0)
    return sorted(found, key=lambda found: -found[0])


SMALL_TOKENS = [0, 1, 3]


@st.composite
def small_rules(draw):
    phrase = st.lists(st.sampled_from(SMALL_TOKENS), max_size=2).map(lambda tokens: tokens + [-1] * (2 - len(tokens)))
    required = np.array(draw(st.lists(phrase, min_size=6, max_size=6))).reshape(3, 2, 2)
    limits = draw(st.tuples(*[st.integers(1, SMALL_T)] * 3))
    for row, limit in enumerate(limits):  # no more than there is room for
        while (required[row] >= 0).sum() > limit - 1:
            required[row][tuple(np.argwhere(required[row] >= 0)[-1])] = -1
    return limits, Constraints(
        min_tokens=np.array(draw(st.lists(st.integers(0, 3), min_size=3, max_size=3))),
        repetition_penalty=np.array(draw(st.lists(st.sampled_from([1.0, 1.5]), min_size=3, max_size=3))),
        no_repeat_ngram=np.array(draw(st.lists(st.integers(0, 2), min_size=3, max_size=3))),
        banned_phrases=without(np.array(draw(st.lists(phrase, min_size=3, max_size=3))).reshape(3, 1, 2), required),
        required_phrases=required,
    )


def random_table(seed):
    prefixes = sum(SMALL_V**n for n in range(SMALL_T + 1))
    return np.random.default_rng(seed).normal(0, 2, (3, prefixes, SMALL_V)).astype(np.float32)


def small_rows(constraints, limits):
    for i, limit in enumerate(limits):
        numbers = {
            name: np.asarray(getattr(constraints, name))[i].item()
            for name in ("min_tokens", "repetition_penalty", "no_repeat_ngram")
            if getattr(constraints, name) is not None
        }
        phrases = {
            name: phrases_of(np.asarray(getattr(constraints, name))[i].tolist())
            for name in ("banned_phrases", "required_phrases")
            if getattr(constraints, name) is not None
        }
        yield Row(limit=limit, **numbers, **phrases, banned_tokens=(False,) * SMALL_V, end_id=SMALL_END)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), drawn=small_rules())
def test_a_beam_that_is_wide_enough_finds_what_exhaustive_search_finds(seed, drawn):
    limits, constraints = drawn
    table = random_table(seed)
    arrays = constraints.as_arrays(batch=3, vocab_size=SMALL_V, end_id=SMALL_END)
    best = jax.tree.map(np.asarray, search_table(table, arrays, np.array(limits)))
    for i, row in enumerate(small_rows(constraints, limits)):
        expected = exhaustive(table[i], row)[:5]
        there = best.scores[i] > -np.inf
        assert there.sum() == len(expected)
        assert_close(best.scores[i][there], [score for score, _, _ in expected])
        met = np.array([value > -LAST_RESORT / 2 for value, _, _ in expected])
        log_probs = np.array([log_prob for _, log_prob, _ in expected])
        assert_close(best.log_probs[i][there][met], log_probs[met])
        for j, (value, _, tokens) in enumerate(expected):
            if value > -LAST_RESORT / 2:  # float32 does not tell apart those behind
                assert best.tokens[i, j, : best.lengths[i, j]].tolist() == tokens


def test_a_narrow_beam_places_phrases_where_they_fit():
    """Better than forcing them at the end, and mostly as well as it can be done."""
    limits = (SMALL_T,) * 3
    required = np.array([[[1, 3]], [[3, 1]], [[0, -1]]])
    constraints = Constraints(required_phrases=required)
    arrays = constraints.as_arrays(batch=3, vocab_size=SMALL_V, end_id=SMALL_END)
    gaps: dict[int, list[float]] = {1: [], SMALL_V: []}
    for seed, width in itertools.product(range(20), gaps):
        table = random_table(seed)
        found = jax.tree.map(np.asarray, search_table(table, arrays, np.array(limits), width=width))
        for i, row in enumerate(small_rows(constraints, limits)):
            tokens = found.tokens[i, 0, : found.lengths[i, 0]].tolist()
            assert contains(tokens, row.required_phrases[0])
            gaps[width].append(exhaustive(table[i], row)[0][0] - found.scores[i, 0])
    assert min(map(min, gaps.values())) > -1e-4
    assert np.mean(gaps[SMALL_V]) < 0.5 * np.mean(gaps[1])
    assert np.mean(np.array(gaps[SMALL_V]) < 1e-4) > 0.5
