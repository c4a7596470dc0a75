import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_config
from tolerances import assert_close

from tfm.decoding.beam import BeamSearch, beam_search

pytestmark = pytest.mark.usefixtures("compile_fast")

B, V, T, END, PAD = 3, 4, 3, 2, 0
LENGTH_PENALTIES = ("gnmt", "power")
STOPS = ("first-finished", "provably-best", "all-finished")
NUM_PREFIXES = sum(V**n for n in range(T + 1))


def random_table(seed, scale=2.0):
    """The logits of a random model: [B, prefixes, V], a prefix's number being that of `follow`."""
    return np.random.default_rng(seed).normal(0, scale, (B, NUM_PREFIXES, V)).astype(np.float32)


def follow(prefix, token):
    return prefix * V + token + 1


@functools.partial(jax.jit, static_argnames="max_tokens")
def search_table(search, table, limits, max_tokens=T):
    """Beam search in a table; the state is each hypothesis's prefix, so a wrong parent shows."""
    rows = jnp.repeat(jnp.arange(B), search.width)

    def step(tokens, prefixes):
        prefixes = follow(prefixes, tokens[:, 0])
        return table[rows, prefixes], prefixes

    return beam_search(
        search, table[:, 0], jnp.zeros(B * search.width, jnp.int32), step=step, reorder=lambda state, p: state[p],
        limits=limits, max_tokens=max_tokens, end_id=END, pad_id=PAD,
    )  # fmt: skip


def find(search, table, limits=(T,) * B):
    return jax.tree.map(np.asarray, search_table(search, jnp.array(table), jnp.array(limits)))


def log_softmax(logits):
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def penalty(search, length):
    return ((5 + length) / 6) ** search.alpha if search.length_penalty == "gnmt" else length**search.alpha


def hypotheses(search, table, limit):
    """Every complete hypothesis of one row: (score, tokens, log-probabilities of its tokens), best first."""
    found = []
    for length in range(1, limit + 1):
        for tokens in itertools.product(range(V), repeat=length):
            if END in tokens[:-1] or (tokens[-1] != END and length < limit):
                continue
            prefix, log_probs = 0, []
            for token in tokens:
                log_probs.append(log_softmax(table[prefix])[token])
                prefix = follow(prefix, token)
            found.append((sum(log_probs) / penalty(search, length), list(tokens), log_probs))
    return sorted(found, key=lambda found: -found[0])


def assert_consistent(best, search, table, limits):
    """Whatever was found is a hypothesis, with the numbers that belong to it, and they are in order."""
    for row, limit in enumerate(limits):
        scores = {
            tuple(tokens): (score, log_probs) for score, tokens, log_probs in hypotheses(search, table[row], limit)
        }
        seen = set()
        for i in range(best.scores.shape[1]):
            length = best.lengths[row, i]
            tokens = tuple(best.tokens[row, i, :length].tolist())
            if best.scores[row, i] == -np.inf:
                assert (length, best.finished[row, i], best.log_probs[row, i]) == (0, False, -np.inf)
                continue
            score, log_probs = scores[tokens]
            assert_close(best.scores[row, i], score)
            assert_close(best.log_probs[row, i], sum(log_probs))
            assert_close(best.token_log_probs[row, i, :length], log_probs)
            assert not best.token_log_probs[row, i, length:].any()
            assert (best.tokens[row, i, length:] == PAD).all()
            assert best.finished[row, i] == (tokens[-1] == END)
            seen.add(tokens)
        assert len(seen) == (best.scores[row] > -np.inf).sum()
        assert (best.scores[row, 1:] <= best.scores[row, :-1]).all()


wide = V**T  # nothing falls off the beam


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    alpha=st.sampled_from([0.0, 0.6, 1.0, 2.0]),
    length_penalty=st.sampled_from(LENGTH_PENALTIES),
    stop=st.sampled_from(["provably-best", "all-finished"]),
    limits=st.tuples(*[st.integers(1, T)] * B),
)
def test_a_beam_that_is_wide_enough_finds_what_exhaustive_search_finds(seed, alpha, length_penalty, stop, limits):
    search = BeamSearch(width=wide, num_best=5, alpha=alpha, length_penalty=length_penalty, stop=stop)
    table = random_table(seed)
    best = find(search, table, limits)
    assert_consistent(best, search, table, limits)
    for row, limit in enumerate(limits):
        expected = [score for score, _, _ in hypotheses(search, table[row], limit)][:5]
        found = best.scores[row][best.scores[row] > -np.inf]
        assert len(found) == len(expected)
        assert_close(found, expected)


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    width=st.sampled_from([1, 3]),
    length_penalty=st.sampled_from(LENGTH_PENALTIES),
    stop=st.sampled_from(STOPS),
    limits=st.tuples(*[st.integers(1, T)] * B),
)
@pytest.mark.slow
def test_whatever_is_found_has_the_score_that_it_says(seed, width, length_penalty, stop, limits):
    search = BeamSearch(width=width, num_best=width, alpha=0.7, length_penalty=length_penalty, stop=stop)
    assert_consistent(find(search, random_table(seed), limits), search, random_table(seed), limits)


def by_hand(search, table, limit):
    """Beam search of one row as one would write it first, with lists: the best complete hypotheses."""
    live, complete = [(0.0, [], 0)], []
    while live:
        followers = [
            (log_prob + log_softmax(table[prefix])[token], [*tokens, token], follow(prefix, token))
            for log_prob, tokens, prefix in live
            for token in range(V)
        ]
        followers = sorted(followers, key=lambda follower: -follower[0])[: 2 * search.width]
        live = []
        for rank, (log_prob, tokens, prefix) in enumerate(followers):
            if tokens[-1] == END or len(tokens) == limit:
                if rank < search.width:
                    complete.append((log_prob / penalty(search, len(tokens)), tokens))
            else:
                live.append((log_prob, tokens, prefix))
        live = live[: search.width]
        complete = sorted(complete, key=lambda found: -found[0])[: search.width]
        if search.stop == "first-finished" and complete:
            break
        if search.stop == "all-finished" and len(complete) == search.width:
            break
        if live and search.stop == "provably-best" and len(complete) >= search.num_best:
            bound = live[0][0] / penalty(search, limit)
            live = [] if complete[search.num_best - 1][0] >= bound else live
    return complete[: search.num_best]


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    widths=st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 2)]),
    alpha=st.sampled_from([0.0, 1.0]),
    length_penalty=st.sampled_from(LENGTH_PENALTIES),
    stop=st.sampled_from(STOPS),
    limits=st.tuples(*[st.integers(1, T)] * B),
)
@pytest.mark.slow
def test_every_rule_finds_what_the_search_with_lists_finds(seed, widths, alpha, length_penalty, stop, limits):
    search = BeamSearch(width=widths[0], num_best=widths[1], alpha=alpha, length_penalty=length_penalty, stop=stop)
    table = random_table(seed)
    best = find(search, table, limits)
    for row, limit in enumerate(limits):
        for i, (score, tokens) in enumerate(by_hand(search, table[row], limit)):
            assert_close(best.scores[row, i], score)
            assert best.tokens[row, i, : best.lengths[row, i]].tolist() == tokens


def groups_by_hand(search, table, limit):
    """Diverse beam search of one row with lists, as Vijayakumar et al. 2018 have it: all that the groups found."""
    width = search.width // search.groups
    live, complete = [[(0.0, [], 0)] for _ in range(search.groups)], [[] for _ in range(search.groups)]
    while any(live):
        chosen = []
        for group in range(search.groups):
            followers = [
                (log_prob + log_softmax(table[prefix])[token], [*tokens, token], follow(prefix, token))
                for log_prob, tokens, prefix in live[group]
                for token in range(V)
            ]
            order = sorted(followers, key=lambda f: -(f[0] - search.diversity * chosen.count(f[1][-1])))
            followers = order[: 2 * width]
            chosen += [tokens[-1] for _, tokens, _ in followers[:width]]
            going = []
            for rank, (log_prob, tokens, prefix) in enumerate(followers):
                if tokens[-1] == END or len(tokens) == limit:
                    if rank < width:
                        complete[group].append((log_prob / penalty(search, len(tokens)), tokens))
                else:
                    going.append((log_prob, tokens, prefix))
            live[group] = going[:width]
            complete[group] = sorted(complete[group], key=lambda found: -found[0])[:width]
            if len(complete[group]) == width and search.stop == "all-finished":
                live[group] = []
            if live[group] and search.stop == "provably-best" and len(complete[group]) == width:
                best = max(log_prob for log_prob, _, _ in live[group])
                if complete[group][-1][0] >= best / penalty(search, limit):
                    live[group] = []
    found = []
    for score, tokens in itertools.chain(*complete):
        if tokens not in [other for _, other in found]:
            found.append((score, tokens))
    return sorted(found, key=lambda found: -found[0])


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    widths=st.sampled_from([(2, 2), (4, 2), (3, 3), (6, 2)]),
    diversity=st.sampled_from([0.0, 0.5, 3.0, 1000.0]),
    stop=st.sampled_from(["provably-best", "all-finished"]),
    limits=st.tuples(*[st.integers(1, T)] * B),
)
@pytest.mark.slow
def test_groups_find_what_the_search_with_lists_finds(seed, widths, diversity, stop, limits):
    width, groups = widths
    search = BeamSearch(width=width, num_best=width, groups=groups, diversity=diversity, stop=stop, alpha=1.0)
    table = random_table(seed)
    best = find(search, table, limits)
    assert_consistent(best, search, table, limits)
    for row, limit in enumerate(limits):
        expected = groups_by_hand(search, table[row], limit)
        found = best.scores[row] > -np.inf
        assert found.sum() == len(expected)
        assert_close(best.scores[row][found], [score for score, _ in expected])


def test_without_diversity_all_groups_find_what_one_finds():
    table = random_table(3)
    grouped = find(BeamSearch(width=6, num_best=6, groups=3, diversity=0.0), table)
    alone = find(BeamSearch(width=2, num_best=2), table)
    np.testing.assert_array_equal(grouped.tokens[:, :2], alone.tokens)
    assert (grouped.scores[:, 2:] == -np.inf).all()
    strong = find(BeamSearch(width=3, num_best=3, groups=3, diversity=1000.0), table)
    assert all(len(set(row[:, 0].tolist())) == 3 for row in strong.tokens), "groups began alike"


@pytest.mark.parametrize("length_penalty", LENGTH_PENALTIES)
def test_provably_best_is_the_best_of_what_a_search_without_stopping_finds(length_penalty):
    """With the same beam; and the other rules do stop earlier, or they would be no rules."""
    earlier = 0
    for seed in range(30):
        search = BeamSearch(width=2, alpha=1.5, length_penalty=length_penalty)
        table = random_table(seed)
        proven = find(search, table).scores[:, 0]
        never = [by_hand(dataclasses.replace(search, stop="never"), table[row], T)[0][0] for row in range(B)]
        assert_close(proven, never)
        earlier += (find(dataclasses.replace(search, stop="first-finished"), table).scores[:, 0] < proven - 1e-4).sum()
    assert earlier > 5


def test_rows_do_not_matter_to_each_other():
    search = BeamSearch(width=2, num_best=2)
    table, order = random_table(1), [2, 0, 1]
    limits = np.array([3, 1, 2])
    together, moved = find(search, table, limits), find(search, table[order], limits[order])
    for one, other in zip(*map(jax.tree.leaves, (together, moved)), strict=True):
        np.testing.assert_array_equal(one[order], other)


def test_alpha_may_differ_by_row_and_a_row_may_want_nothing():
    alphas, limits = np.array([0.0, 1.0, 2.0], np.float32), (3, 3, 0)
    best = find(BeamSearch(width=3, num_best=3, alpha=jnp.array(alphas)), random_table(5), limits)
    for row in (0, 1):
        alone = find(BeamSearch(width=3, num_best=3, alpha=float(alphas[row])), random_table(5), limits)
        assert_close(best.scores[row], alone.scores[row])
    assert best.lengths[2].tolist() == [0, 0, 0]
    assert best.scores[2].tolist() == [0, -np.inf, -np.inf]
    assert not best.finished[2].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 0}, "expected a width from 1 to the vocabulary's 9, got 0"),
        ({"width": 10}, "expected a width from 1 to the vocabulary's 9, got 10"),
        ({"width": 2.5}, "expected a whole number as width, got 2.5"),
        ({"width": "x"}, "expected a whole number as width, got 'x'"),
        ({"groups": np.True_}, "expected a whole number of at least 1 as groups, got "),
        ({"groups": 3}, "expected groups that divide the width 4, got 3"),
        ({"groups": 0}, "expected a whole number of at least 1 as groups, got 0"),
        ({"groups": 2, "diversity": -1.0}, "expected diversity from 0 to 1000, got -1.0"),
        ({"coverage": 11.0}, "expected coverage from 0 to 10, got 11.0"),
        ({"coverage": float("nan")}, "expected coverage from 0 to 10, got nan"),
        ({"num_best": True}, "expected a whole number as num_best, got True"),
        ({"alpha": float("inf")}, "expected alpha from 0 to 10, got inf"),
        ({"alpha": float("nan")}, "expected alpha from 0 to 10, got nan"),
        ({"alpha": "x"}, "expected one number as alpha"),
        ({"width": 2, "num_best": 3}, "expected num_best from 1 to the width 2, got 3"),
        ({"num_best": 0}, "expected num_best from 1 to the width 4, got 0"),
        ({"stop": "soon"}, "expected a stop of first-finished, provably-best, all-finished, got 'soon'"),
        ({"length_penalty": "no"}, "expected a length_penalty of gnmt, power, got 'no'"),
        ({"alpha": -0.1}, "expected alpha from 0 to 10, got -0.1"),
        ({"alpha": np.ones(2, np.float32)}, r"expected one number as alpha or 3, .* got float32 of shape \(2,\)"),
    ],
)
def test_settings_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        BeamSearch(**changes).check(3, tiny_config(source_vocab_size=9, target_vocab_size=9))


def test_numpys_whole_numbers_are_those_of_python():
    search = BeamSearch(width=np.int64(4), num_best=np.uint8(2), groups=np.int32(2))
    search.check(3, tiny_config(source_vocab_size=9, target_vocab_size=9))
    assert search == BeamSearch(width=4, num_best=2, groups=2)
    assert {type(number) for number in (search.width, search.num_best, search.groups)} == {int}


@pytest.mark.parametrize(("alpha", "used"), [(np.nan, 0.0), (-1.0, 0.0), (1e9, 10.0)])
def test_an_alpha_that_is_only_known_on_the_device_is_cut_to_its_range(alpha, used):
    found, expected = (find(BeamSearch(width=3, num_best=3, alpha=a), random_table(5)) for a in (alpha, used))
    assert found.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_array_equal(found.scores, expected.scores)
