import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_counter import count_compilations
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tfm.decoding.sampling import Greedy, Sampling

V = 11
LOGITS = np.array([2.0, -1.0, 0.5, 3.0, 0.0, 1.5, -3.0, 2.5, 1.0, -0.5, 2.25], np.float32)
DRAWS = 20_000
FALSE_ALARM = 1e-6
"""The chance that a right sampler fails one of the chi-square tests for a random seed; the seeds are fixed."""

pick = jax.jit(lambda sampler, logits, keys: sampler.pick(logits, keys))


def keys(count, seed=0):
    return jax.random.split(jax.random.key(seed), count)


def in_numpy(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution that the papers describe, one cut after the other, by sorting whole lists."""
    scaled = np.asarray(logits, np.float64) / temperature
    probability = np.exp(scaled - scaled.max())
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    if top_k:
        order = order[:top_k]
    total, nucleus = probability[order].sum(), []
    for token in order:
        if sum(probability[nucleus]) / total >= top_p:
            break
        nucleus.append(token)
    kept = [token for token in nucleus if probability[token] >= min_p * probability[nucleus].max()]
    result = np.zeros(len(scaled))
    result[kept] = probability[kept] / probability[kept].sum()
    return result


def p_value(drawn, expected):
    """Of the chi-square test; tokens too rare for it, less than 5 expected, are counted as one."""
    observed, expected = np.bincount(drawn, minlength=V), len(drawn) * expected
    rare = expected < 5
    observed, expected = (np.append(x[~rare], x[rare].sum()) for x in (observed, expected))
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1] * observed[:-1].sum() / expected[:-1].sum()
    return stats.chisquare(observed, expected).pvalue


@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 4},
        {"top_k": 50},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 2.0, "top_k": 6},
        {"temperature": 0.7, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 4.0, "top_k": 7, "top_p": 0.6},
    ],
    ids=str,
)
def test_frequencies_are_those_of_the_distribution(numbers):
    expected = in_numpy(LOGITS, **numbers)
    drawn = np.asarray(pick(Sampling(**numbers), jnp.broadcast_to(LOGITS, (DRAWS, V)), keys(DRAWS)))
    assert not set(drawn) - set(np.flatnonzero(expected))
    assert p_value(drawn, expected) > FALSE_ALARM


def test_the_test_of_frequencies_notices_a_small_bias():
    """The control: a temperature of 0.95 is not taken for 1."""
    drawn = np.asarray(pick(Sampling(temperature=0.95), jnp.broadcast_to(LOGITS, (DRAWS, V)), keys(DRAWS)))
    assert p_value(drawn, in_numpy(LOGITS)) < FALSE_ALARM


@given(
    logits=st.lists(st.integers(-8, 8), min_size=V, max_size=V),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 5.0]),
    top_k=st.integers(0, V + 2),
    top_p=st.sampled_from([0.01, 0.3, 0.77, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.4, 1.0]),
    seed=st.integers(0, 100),
)
def test_what_comes_is_among_what_may_come(logits, temperature, top_k, top_p, min_p, seed):
    logits = np.array(logits, np.float32) + np.arange(V, dtype=np.float32) / 64  # no ties
    sampler = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    drawn = np.asarray(pick(sampler, jnp.broadcast_to(logits, (32, V)), keys(32, seed)))
    # float32 sums may lie on the other side of a threshold
    slack = dict(top_p=min(top_p + 1e-5, 1.0), min_p=min_p * (1 - 1e-5))
    possible = in_numpy(logits, temperature=temperature, top_k=top_k, **slack) > 0
    assert possible[drawn].all()


@pytest.mark.parametrize(
    "sampler",
    [
        Greedy(),
        Sampling(temperature=0.0),
        Sampling(temperature=0.0, top_k=5, top_p=0.5, min_p=0.5),
        Sampling(temperature=1e-30),
        Sampling(top_k=1, temperature=100.0),
        Sampling(top_p=1e-9, temperature=100.0),
        Sampling(min_p=1.0, temperature=100.0),
    ],
    ids=str,
)
def test_the_extremes_are_greedy(sampler):
    logits = np.random.default_rng(0).standard_normal((200, V)).astype(np.float32)
    assert pick(sampler, jnp.array(logits), keys(200)).tolist() == logits.argmax(axis=-1).tolist()
    # however far apart the logits lie
    assert pick(sampler, jnp.array(1e30 * logits), keys(200)).tolist() == logits.argmax(axis=-1).tolist()


@pytest.mark.parametrize("sampler", [Greedy(), Sampling(temperature=0.0), Sampling(top_k=1), Sampling(top_p=1e-9)])
def test_of_equals_the_lowest_id_comes(sampler):
    logits = jnp.zeros((20, V)).at[:, jnp.array([4, 7])].set(1.0)
    assert pick(sampler, logits, keys(20)).tolist() == [4] * 20


def test_min_p_of_1_keeps_all_equals():
    drawn = pick(Sampling(min_p=1.0), jnp.zeros((200, V)).at[:, jnp.array([4, 7])].set(1.0), keys(200))
    assert set(drawn.tolist()) == {4, 7}


@pytest.mark.parametrize("temperature", [1e300, 10**20, 10**400])
def test_a_huge_temperature_is_a_number_like_others(temperature):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler = Sampling(temperature=temperature).as_arrays(1)
    assert sampler.temperature == np.float32(1e20 if temperature == 10**20 else np.inf)


def test_infinite_temperature_is_an_even_draw():
    drawn = np.asarray(pick(Sampling(temperature=1e30), jnp.broadcast_to(LOGITS, (DRAWS, V)), keys(DRAWS)))
    assert p_value(drawn, np.full(V, 1 / V)) > FALSE_ALARM


def test_what_is_ruled_out_never_comes():
    logits = jnp.broadcast_to(LOGITS, (DRAWS, V)).at[:, 3].set(-jnp.inf)
    for sampler in (Sampling(temperature=5.0), Sampling(top_k=V), Sampling(top_p=0.999), Greedy()):
        assert 3 not in pick(sampler, logits, keys(DRAWS)).tolist()


def test_a_nucleus_of_nearly_everything_keeps_the_tail():
    """A running sum of 50,000 small numbers in float32 must not reach its bound too early or too late."""
    vocabulary = 50_000
    drawn = np.asarray(pick(Sampling(top_p=1.0, top_k=vocabulary), jnp.zeros((64, vocabulary)), keys(64)))
    assert (drawn >= vocabulary // 2).sum() > 8  # 32 expected, sigma 4
    drawn = np.asarray(pick(Sampling(top_p=0.5), jnp.zeros((64, vocabulary)), keys(64)))
    assert (drawn < vocabulary // 2 + 500).all()
    assert (drawn > vocabulary // 4).any()


def test_each_row_has_its_own_numbers():
    numbers = dict(
        temperature=np.array([0.0, 0.5, 3.0, 1.0], np.float32),
        top_k=np.array([0, 3, 0, 2]),
        top_p=np.array([1.0, 1.0, 0.5, 0.9], np.float32),
        min_p=np.array([0.0, 0.1, 0.0, 0.0], np.float32),
    )
    rows = 4000
    repeated = Sampling(**{name: jnp.repeat(jnp.array(value), rows) for name, value in numbers.items()})
    drawn = np.asarray(pick(repeated, jnp.broadcast_to(LOGITS, (4 * rows, V)), keys(4 * rows))).reshape(4, rows)
    assert (drawn[0] == LOGITS.argmax()).all()
    for row in range(1, 4):
        expected = in_numpy(LOGITS, **{name: value[row] for name, value in numbers.items()})
        assert not set(drawn[row]) - set(np.flatnonzero(expected))
        assert p_value(drawn[row], expected) > FALSE_ALARM


def test_a_row_draws_by_its_own_key_whatever_its_neighbours():
    logits = jax.random.normal(jax.random.key(1), (6, V))
    row_keys = keys(6)
    for sampler in (Sampling(), Sampling(top_k=5), Sampling(top_p=0.8), Sampling(min_p=0.1)):
        together = pick(sampler, logits, row_keys).tolist()
        assert [pick(sampler, logits[i : i + 1], row_keys[i : i + 1])[0] for i in range(6)] == together
        order = np.array([3, 1, 5, 0, 2, 4])
        assert pick(sampler, logits[order], row_keys[order]).tolist() == [together[i] for i in order]


def test_all_numbers_are_traced():
    logits = jnp.broadcast_to(LOGITS, (5, V))
    pick(Sampling().as_arrays(5), logits, keys(5))
    five = keys(5, seed=1)
    with count_compilations() as compilations:
        for numbers in ({"temperature": 0}, {"temperature": 1}, {"top_k": 3, "top_p": 0.5}, {"top_p": 1, "min_p": 1}):
            pick(Sampling(**numbers).as_arrays(5), logits, five)
    assert compilations.count == 0, compilations.names


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"temperature": -0.1}, "expected temperature at least 0, got -0.1"),
        ({"temperature": float("nan")}, "expected temperature at least 0, got nan"),
        ({"temperature": "x"}, "expected temperature at least 0, got 'x'"),
        ({"temperature": None}, "expected temperature at least 0, got None"),
        ({"temperature": True}, "expected temperature at least 0, got True"),
        ({"min_p": [[0.1], [0.1, 0.2]]}, r"expected min_p from 0 to 1, got \[\[0.1\], \[0.1, 0.2\]\]"),
        ({"top_k": -1}, r"expected top_k a whole number from 0 to 2\*\*31 - 1, got -1"),
        ({"top_k": 2.5}, r"expected top_k a whole number from 0 to 2\*\*31 - 1, got 2.5"),
        ({"top_k": 2**40}, r"expected top_k a whole number from 0 to 2\*\*31 - 1, got 1099511627776"),
        ({"top_k": 2**70}, "expected top_k a whole number"),
        ({"top_k": np.array([2.0, 1.0])}, "expected top_k a whole number"),
        ({"top_p": 0.0}, "expected top_p more than 0 and at most 1, got 0.0"),
        ({"top_p": 1.5}, "expected top_p more than 0 and at most 1, got 1.5"),
        ({"min_p": -0.5}, "expected min_p from 0 to 1, got -0.5"),
        ({"min_p": 1.5}, "expected min_p from 0 to 1, got 1.5"),
        ({"top_p": np.array([0.5, 0.0])}, "expected top_p more than 0"),
        ({"top_k": np.array([1, 2, 3])}, r"expected one top_k or 2, one a row, got an array of shape \(3,\)"),
        ({"temperature": np.ones((2, 1))}, r"expected one temperature or 2, one a row, got an array of shape \(2, 1\)"),
    ],
)
def test_numbers_out_of_range_are_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**numbers).as_arrays(2)


def test_a_sampler_is_frozen():
    with pytest.raises(AttributeError):
        Sampling().temperature = 0.5
