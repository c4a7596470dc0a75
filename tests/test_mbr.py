"""Minimum Bayes risk: against plain sums over sacrebleu's scores, and what holds whatever is drawn."""

import inspect
import itertools
import math
import typing
from collections import Counter

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import sacrebleu

import tfm.decoding.mbr
from tfm.decoding.mbr import MinimumBayesRisk, Ranked, Utility, expected_utilities, rank_by_utility

SENTENCE_SCORES = {
    "chrf": lambda hypothesis_, reference: sacrebleu.sentence_chrf(hypothesis_, [reference]).score,
    "bleu": lambda hypothesis_, reference: sacrebleu.sentence_bleu(hypothesis_, [reference]).score,
}
UTILITIES = typing.get_args(Utility)

words = st.sampled_from(["the", "cat", "sat", "on", "a", "mat", "猫坐在垫子上", "猫", "è", ".", "👩‍👩‍👧", "🐈"])
texts = st.one_of(st.lists(words, max_size=6).map(" ".join), st.text(max_size=8))
# Of few different texts, so that they come again.
samples = st.lists(texts, min_size=1, max_size=4).flatmap(lambda few: st.lists(st.sampled_from(few), min_size=1))
utilities = st.sampled_from(UTILITIES)


def overlap(hypothesis_: str, reference: str) -> float:
    """No metric, but not symmetric either: the part of the hypothesis's words that the reference has."""
    found = hypothesis_.split()
    return sum(word in reference.split() for word in found) / max(len(found), 1)


def by_brute_force(drawn: list[str], utility) -> list[float]:
    return [sum(utility(hypothesis_, reference) for reference in drawn) / len(drawn) for hypothesis_ in drawn]


def test_every_name_of_a_utility_is_tested() -> None:
    assert set(UTILITIES) == set(SENTENCE_SCORES)


@hypothesis.given(drawn=samples, utility=utilities)
def test_utilities_are_the_mean_of_sacrebleus_scores(drawn: list[str], utility: str) -> None:
    expected = by_brute_force(drawn, SENTENCE_SCORES[utility])
    assert expected_utilities(drawn, utility) == pytest.approx(expected, rel=1e-12)


@hypothesis.given(drawn=samples)
def test_a_function_is_asked_once_for_each_ordered_pair(drawn: list[str]) -> None:
    asked = []

    def utility(hypothesis_: str, reference: str) -> float:
        asked.append((hypothesis_, reference))
        return overlap(hypothesis_, reference)

    assert expected_utilities(drawn, utility) == pytest.approx(by_brute_force(drawn, overlap), rel=1e-12)
    assert sorted(asked) == sorted((a, b) for a in set(drawn) for b in set(drawn))


def test_the_hypothesis_comes_first() -> None:
    # Of "a" every word is in "a b", of "a b" half are in "a".
    assert expected_utilities(["a", "a b"], overlap).tolist() == [1.0, 0.75]


@hypothesis.given(drawn=samples, utility=utilities, data=st.data())
def test_order_changes_nothing_but_the_order(drawn: list[str], utility: str, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(drawn))))
    shuffled = [drawn[i] for i in order]
    before, after = expected_utilities(drawn, utility), expected_utilities(shuffled, utility)
    assert np.array_equal(before[order], after), "to the last bit"
    ranked = {drawn[one.index]: one.expected_utility for one in rank_by_utility(drawn, utility)}
    assert ranked == {shuffled[one.index]: one.expected_utility for one in rank_by_utility(shuffled, utility)}


def test_order_changes_nothing_of_numbers_that_cancel() -> None:
    worth = {"a": 1e60, "b": 1e30, "c": 1.0, "d": -1e60, "e": -1e30}
    for drawn in itertools.permutations(worth):
        assert expected_utilities(drawn, lambda _, reference: worth[reference]).tolist() == [1 / 5] * 5


@hypothesis.given(drawn=samples, utility=utilities)
def test_the_ranking_has_each_text_once_best_first(drawn: list[str], utility: str) -> None:
    ranked, means = rank_by_utility(drawn, utility), expected_utilities(drawn, utility)
    assert Counter(drawn[one.index] for one in ranked) == Counter(set(drawn))
    for one in ranked:
        assert one.index == drawn.index(drawn[one.index]), "the first of equal ones"
        assert one.expected_utility == means[one.index]
    keys = [(-one.expected_utility, one.index) for one in ranked]
    assert keys == sorted(keys), "ties in the order that they were drawn in"


@hypothesis.given(drawn=samples, utility=utilities, times=st.integers(2, 5))
def test_only_how_often_counts(drawn: list[str], utility: str, times: int) -> None:
    assert expected_utilities(drawn * times, utility)[: len(drawn)] == pytest.approx(expected_utilities(drawn, utility))


@hypothesis.given(drawn=st.lists(texts.filter(str.split), min_size=2, max_size=8), utility=utilities)
def test_without_comparing_samples_with_themselves_the_ranks_are_the_same(drawn: list[str], utility: str) -> None:
    """As the module says, of texts that are worth 100 if they are right."""
    score = SENTENCE_SCORES[utility]
    hypothesis.assume(all(math.isclose(score(text, text), 100) for text in drawn))
    others = [
        sum(score(text, other) for j, other in enumerate(drawn) if j != i) / (len(drawn) - 1)
        for i, text in enumerate(drawn)
    ]
    means = expected_utilities(drawn, utility)
    for i in range(len(drawn)):
        for j in range(len(drawn)):
            if others[i] > others[j] + 1e-9:
                assert means[i] > means[j]


@pytest.mark.parametrize("utility", UTILITIES)
@pytest.mark.parametrize("text", ["the cat", "a", "猫坐在垫子上。", "👩‍👩‍👧🐈", "the cat sat on the mat. " * 500])
@pytest.mark.parametrize("count", [1, 32])
def test_one_text_however_often_is_certain(text: str, count: int, utility: Utility) -> None:
    assert expected_utilities([text] * count, utility).tolist() == [100.0] * count
    assert rank_by_utility([text] * count, utility) == [Ranked(0, 100.0)]


@pytest.mark.parametrize("utility", UTILITIES)
def test_the_empty_text_is_worth_nothing(utility: Utility) -> None:
    assert expected_utilities([""], utility).tolist() == [0]
    # The likeliest by far, and the last to be chosen.
    drawn = ["", "", "", "the cat sat", "the cat sits"]
    assert [drawn[one.index] for one in rank_by_utility(drawn, utility)][-1] == ""
    assert rank_by_utility(["", " ", "\n"], utility) == [Ranked(0, 0.0), Ranked(1, 0.0), Ranked(2, 0.0)]


def test_the_choice_can_be_neither_the_most_frequent_nor_the_first() -> None:
    """Three ways of saying one thing outweigh another that was drawn most often."""
    drawn = ["no idea", "the cat sat on the mat", "no idea", "a cat sat on the mat", "the cat sat on a mat"]
    for utility in UTILITIES:
        assert drawn[rank_by_utility(drawn, utility)[0].index] == "the cat sat on the mat", utility
    # If only what is right to the letter counts, it is the most frequent again.
    assert rank_by_utility(drawn, lambda text, right: float(text == right))[0] == Ranked(0, 2 / 5)


def test_a_mean_by_hand() -> None:
    # chrF of "abc" and "abd": 2 of 3 characters, 1 of 2 pairs, 0 of 1 triple, (2/3 + 1/2 + 0) / 3 = 7/18.
    got = expected_utilities(["abc", "abd", "abc", "xyz"], "chrf")
    near = 100 * 7 / 18
    assert got == pytest.approx([(200 + near) / 4, (100 + 2 * near) / 4, (200 + near) / 4, 25])


def test_equally_good_texts_stay_in_the_order_in_which_they_came() -> None:
    assert [one.index for one in rank_by_utility(["b", "a", "c", "a", "b", "c"], "chrf")] == [0, 1, 2]
    assert [one.index for one in rank_by_utility(["c d e f g", "a", "b h"], "bleu")] == [0, 1, 2]


@pytest.mark.parametrize("utility", UTILITIES)
def test_very_long_texts(utility: Utility) -> None:
    generator = np.random.default_rng(0)
    drawn = [" ".join(map(str, generator.integers(0, 50, 3000))) for _ in range(3)]
    assert expected_utilities(drawn, utility) == pytest.approx(by_brute_force(drawn, SENTENCE_SCORES[utility]))


def test_settings_are_checked() -> None:
    for fine in (MinimumBayesRisk(), MinimumBayesRisk(1), MinimumBayesRisk(4, "bleu", 4), MinimumBayesRisk(2, overlap)):
        fine.check()
    assert MinimumBayesRisk() == MinimumBayesRisk(num_samples=32, utility="chrf", num_best=1)
    assert len({MinimumBayesRisk(), MinimumBayesRisk(32), MinimumBayesRisk(np.int64(32))}) == 1, "it can be a key"
    for settings, message in (
        ({"num_samples": 0}, "expected a whole number from 1 to 4096 as num_samples, got 0"),
        ({"num_samples": 2.0}, "expected a whole number from 1 to 4096 as num_samples, got 2.0"),
        ({"num_samples": True}, "expected a whole number from 1 to 4096 as num_samples, got True"),
        ({"num_samples": 10**12}, "expected a whole number from 1 to 4096 as num_samples, got 1000000000000"),
        ({"num_best": 0}, "expected num_best from 1 to num_samples, 32, got 0"),
        ({"num_samples": 4, "num_best": 5}, "expected num_best from 1 to num_samples, 4, got 5"),
        ({"num_best": None}, "expected a whole number as num_best, got None"),
        ({"utility": "blue"}, "expected a utility of chrf, bleu, or a function, got 'blue'"),
        ({"utility": ["chrf"]}, r"expected a utility of chrf, bleu, or a function, got \['chrf'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            MinimumBayesRisk(**settings).check()


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (expected_utilities, rank_by_utility):
        with pytest.raises(ValueError, match=r"expected a list of at least one text, got \[\]"):
            function([], "chrf")
        with pytest.raises(ValueError, match="expected a list of at least one text, got 'abc'"):
            function("abc", "chrf")
        for value in (math.nan, math.inf, None):
            with pytest.raises(ValueError, match=f"a finite number as the utility of 'a' against 'a', got {value}"):
                function(["a", "b"], lambda text, right, value=value: value)
    # The tests' check of types would come before.
    monkeypatch.setattr(tfm.decoding.mbr, "_means", inspect.unwrap(tfm.decoding.mbr._means))
    for function in (expected_utilities, rank_by_utility):
        with pytest.raises(ValueError, match="expected a utility of chrf, bleu, or a function, got 'ter'"):
            inspect.unwrap(function)(["a"], "ter")
