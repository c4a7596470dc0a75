"""Measures of texts: values worked out by hand, and what holds whatever the texts."""

import doctest
import subprocess
import sys
import typing

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import sacrebleu
from rouge_score.tokenize import tokenize as rouge_tokenize

import tfm.text_metrics
from tfm.text_metrics import HIGHER_IS_BETTER, pairwise_scores, score_texts, signature
from train.config import Metric

METRICS = [name for name in HIGHER_IS_BETTER if name != "loss"]

words = st.sampled_from(["the", "cat", "sat", "on", "a", "mat", "猫", "è", "."])
texts = st.lists(words, max_size=8).map(" ".join)
long_texts = st.lists(words, min_size=4, max_size=8).map(" ".join)
corpora = st.lists(st.tuples(texts, st.lists(texts, min_size=1, max_size=3)), min_size=1, max_size=5)


def score(metric: str, hypotheses: list[str], references: list[list[str]]) -> float:
    return score_texts([metric], hypotheses, references)[metric]


def test_error_rates_by_hand() -> None:
    hypotheses = ["K AE T", "D AA G", "B ER D Z", ""]
    references = [["K AA T", "K AE T"], ["D AO G"], ["B ER D"], ["F IH SH"]]
    # Tokens: right; 1 of 3 replaced; 1 too many for 3; 3 of 3 missing.
    assert score("wer", hypotheses, references) == pytest.approx(75)
    assert score("ter", hypotheses, references) == pytest.approx(100 * (0 + 1 + 1 + 3) / (3 + 3 + 3 + 3))
    assert score("exact-match", hypotheses, references) == pytest.approx(25)


def test_the_nearest_reference_counts_with_its_own_length() -> None:
    # One edit from "a b c d" (4 tokens), two from "a b" (2): 1 / 4. The rate to the other, 2 / 2, plays no part.
    assert score("ter", ["a b c e"], [["a b", "a b c d"]]) == pytest.approx(25)
    # Equally near, one edit each: the longer one, 1 / 3, in any order.
    assert score("ter", ["a b"], [["a", "a b c"]]) == score("ter", ["a b"], [["a b c", "a"]]) == pytest.approx(100 / 3)
    # Insertions alone can pass 100.
    assert score("ter", ["a b c"], [["d"]]) == pytest.approx(300)


def test_edits_are_of_tokens_and_moves_are_two() -> None:
    assert score("ter", ["AA B"], [["A AB"]]) == pytest.approx(100), "no part of a token is right"
    assert score("ter", ["b a"], [["a b"]]) == pytest.approx(100)
    assert score("ter", ["a  b\tc \n"], [["a b c"]]) == 0
    assert score("wer", ["a  b\tc \n"], [["a b c"]]) == 0
    assert score("exact-match", ["a  b\tc \n"], [["a b c"]]) == 0, "character by character"


def test_bleu_by_hand() -> None:
    hypothesis_, reference = "the cat sat on the mat today", "the cat sat on the red mat"
    # Of the hypothesis's 7 words, 6 pairs, 5 triples and 4 quadruples the reference has 6, 4, 3 and 2; lengths agree.
    expected = 100 * (6 / 7 * 4 / 6 * 3 / 5 * 2 / 4) ** (1 / 4)
    assert score("bleu", [hypothesis_], [[reference]]) == pytest.approx(expected)
    # Four words of the reference's seven: all n-grams right, brevity penalty exp(1 - 7 / 4).
    assert score("bleu", ["the cat sat on"], [[reference]]) == pytest.approx(100 * 2.718281828459045 ** (1 - 7 / 4))
    # The corpus's n-grams are added before dividing: both rows together have 11, 9, 7, 5 with 10, 7, 5, 3 right.
    both = score("bleu", [hypothesis_, "the cat sat on"], [[reference], ["the cat sat on"]])
    assert both == pytest.approx(100 * (10 / 11 * 7 / 9 * 5 / 7 * 3 / 5) ** (1 / 4))


def test_chrf_by_hand() -> None:
    # Of 3 characters 2 agree, of 2 pairs 1, of 1 triple 0; there are no longer ones. Precision and recall are the same.
    assert score("chrf", ["abc"], [["abd"]]) == pytest.approx(100 * (2 / 3 + 1 / 2 + 0) / 3)


def test_rouge_by_hand() -> None:
    # Words: all 3 right, of 4. Pairs: both right, of 3. Longest common subsequence: 3 words. F1 = 2PR / (P + R).
    got = score_texts(["rouge1", "rouge2", "rougeL"], ["The cat sat!"], [["the cat sat down"]])
    assert got == pytest.approx({"rouge1": 100 * 6 / 7, "rouge2": 100 * 4 / 5, "rougeL": 100 * 6 / 7})
    # "cat the sat": the same words, one of the pairs ("cat the", "the sat") in none, a subsequence of 2 in 3.
    got = score_texts(["rouge1", "rouge2", "rougeL"], ["cat the sat"], [["the cat sat"]])
    assert got == pytest.approx({"rouge1": 100, "rouge2": 0, "rougeL": 100 * 2 / 3})
    # Mean over rows, of the best reference each.
    assert score("rouge1", ["a", "b"], [["c", "a"], ["b b b"]]) == pytest.approx(100 * (1 + 1 / 2) / 2)
    assert score("rouge1", ["running"], [["run"]]) == 0, "no stemming"


def test_rouge_reads_every_script() -> None:
    assert score("rouge1", ["Кошка сидит"], [["кошка спит"]]) == pytest.approx(50)
    assert score("rouge1", ["हिन्दी भाषा"], [["हिन्दी"]]) == pytest.approx(100 * 2 / 3), "vowel signs do not part words"
    assert score("rouge1", ["我爱猫。"], [["我爱狗。"]]) == pytest.approx(100 * 2 / 3), "characters are words"
    assert score("rougeL", ["ねこがすき"], [["いぬがすき"]]) == pytest.approx(60)
    assert score("rouge1", ["café"], [["caf"]]) == 0


@hypothesis.given(text=st.text(st.characters(max_codepoint=127)))
def test_rouge_reads_ascii_as_rouge_score_does(text: str) -> None:
    assert tfm.text_metrics._Words().tokenize(text) == rouge_tokenize(text, None)


@hypothesis.given(rows=st.lists(long_texts, min_size=1, max_size=4), wrong=texts)
def test_a_right_output_is_perfect_whatever_else_is_right(rows: list[str], wrong: str) -> None:
    references = [[wrong, row] if i % 2 else [row] for i, row in enumerate(rows)]
    got = score_texts(METRICS, rows, references)
    has_word = all(tfm.text_metrics._Words().tokenize(row) for row in rows)
    for name, value in got.items():
        if name.startswith("rouge") and (not has_word or name == "rouge2"):
            continue  # a text of no words, or of one, has no n-grams to agree
        # BLEU's length penalty may rest on the other reference where that is as near; equal lengths are the nearest.
        assert value == pytest.approx(100 if HIGHER_IS_BETTER[name] else 0), name


@hypothesis.given(corpus=corpora)
def test_every_score_is_a_percentage(corpus: list[tuple[str, list[str]]]) -> None:
    """Empty texts, empty references and differing numbers of references included."""
    got = score_texts(METRICS, [text for text, _ in corpus], [answers for _, answers in corpus])
    assert list(got) == METRICS
    for name, value in got.items():
        assert 0 <= value <= 100 or (name == "ter" and value > 100), name
    assert got["wer"] <= 100 - got["exact-match"] + 1e-9
    assert (got["wer"] == 0) == (got["ter"] == 0)


@hypothesis.given(corpus=corpora, data=st.data())
def test_order_does_not_matter(corpus: list[tuple[str, list[str]]], data: st.DataObject) -> None:
    """Neither of rows nor of references; only sacrebleu's chrF takes the first of equally good references."""
    rows = data.draw(st.permutations(corpus))
    shuffled = [(text, data.draw(st.permutations(answers))) for text, answers in rows]

    def scores(rows: list[tuple[str, list[str]]], names: list[str]) -> dict[str, float]:
        return score_texts(names, [text for text, _ in rows], [answers for _, answers in rows])

    assert scores(corpus, METRICS) == pytest.approx(scores(rows, METRICS))
    names = [name for name in METRICS if name != "chrf"]
    assert scores(corpus, names) == pytest.approx(scores(shuffled, names))


@hypothesis.given(corpus=corpora, more=texts, row=st.integers(0, 4))
def test_another_right_answer_never_hurts(corpus: list[tuple[str, list[str]]], more: str, row: int) -> None:
    """Of corpus sums, BLEU, chrF and `ter` are left out: another reference changes what they divide by as well."""
    row %= len(corpus)
    hypotheses, references = [text for text, _ in corpus], [answers for _, answers in corpus]
    wider = [[*answers, more] if i == row else answers for i, answers in enumerate(references)]
    names = ["exact-match", "wer", "rouge1", "rouge2", "rougeL"]
    before, after = score_texts(names, hypotheses, references), score_texts(names, hypotheses, wider)
    for name in names:
        gain = after[name] - before[name] if HIGHER_IS_BETTER[name] else before[name] - after[name]
        assert gain >= -1e-9, name


@hypothesis.given(corpus=st.lists(st.tuples(texts, st.lists(texts, min_size=2, max_size=2)), min_size=1, max_size=5))
def test_sacrebleu_sees_the_same_references(corpus: list[tuple[str, list[str]]]) -> None:
    hypotheses, references = [text for text, _ in corpus], [answers for _, answers in corpus]
    streams = [[answers[i] for answers in references] for i in range(2)]
    got = score_texts(["bleu", "chrf"], hypotheses, references)
    assert got["bleu"] == pytest.approx(sacrebleu.corpus_bleu(hypotheses, streams).score)
    assert got["chrf"] == pytest.approx(sacrebleu.corpus_chrf(hypotheses, streams).score)


def test_an_absent_reference_is_not_an_empty_one() -> None:
    hypotheses = ["the cat sat on the mat", "a b c d"]
    ragged = score_texts(METRICS, hypotheses, [["the cat sat on the mat", "x"], ["a b c"]])
    repeated = score_texts(METRICS, hypotheses, [["the cat sat on the mat", "x"], ["a b c", "a b c"]])
    assert ragged == pytest.approx(repeated)


@pytest.mark.parametrize(
    ("hypothesis_", "reference", "expected"), [("", "", 0), ("a b", "", 200), ("", "a b", 100), ("  ", "\n", 0)]
)
def test_empty_texts(hypothesis_: str, reference: str, expected: float) -> None:
    got = score_texts(METRICS, [hypothesis_], [[reference]])
    assert got["ter"] == pytest.approx(expected)
    assert got["wer"] == (100 if expected else 0)


@hypothesis.given(few=st.lists(st.one_of(texts, st.text()), max_size=4), long=long_texts)
@hypothesis.example(
    few=["", " ", "a", "a a a a a", "<skipped>", "&amp;", "1,000-\n2", "a-\n", "猫在垫子上。", "👩‍👩‍👧 🐈"], long=""
)
def test_pairs_have_sacrebleus_sentence_scores(few: list[str], long: str) -> None:
    few = [*few, long * 20]
    for name, sentence_score in (("chrf", sacrebleu.sentence_chrf), ("bleu", sacrebleu.sentence_bleu)):
        expected = [[sentence_score(text, [reference]).score for reference in few] for text in few]
        got = pairwise_scores(name, few)
        assert got == pytest.approx(np.array(expected), rel=1e-12), name
        assert got.max() <= 100


def test_pairs_of_no_texts_and_of_other_metrics() -> None:
    assert pairwise_scores("bleu", []).shape == pairwise_scores("chrf", []).shape == (0, 0)
    with pytest.raises(ValueError, match=r"expected a metric of single texts \(bleu, chrf\), got 'ter'"):
        pairwise_scores("ter", ["a"])


def test_every_metric_of_a_config_is_known() -> None:
    assert set(typing.get_args(Metric)) == set(HIGHER_IS_BETTER)


def test_signatures() -> None:
    assert signature("bleu", [["a"], ["b"]]) == f"BLEU|nrefs:1|{signature('bleu').removeprefix('BLEU|')}"
    assert "nrefs:var" in signature("chrf", [["a"], ["b", "c"]])
    for part in ("tok:13a", "case:mixed", "smooth:exp", f"version:{sacrebleu.__version__}"):
        assert part in signature("bleu").split("|")
    assert signature("chrf").startswith("chrF2|")
    assert "stem:no" in signature("rougeL")
    assert signature("wer") == signature("loss") == ""
    with pytest.raises(ValueError, match="no metric 'blue'; the nearest is 'bleu'"):
        signature("blue")


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="no metric 'rougel'; the nearest is 'rougeL'"):
        score_texts(["rougel"], ["a"], [["a"]])
    with pytest.raises(ValueError, match=r"metric of texts \(exact-match, .*got 'loss'"):
        score_texts(["loss"], ["a"], [["a"]])
    with pytest.raises(ValueError, match="references for each of 2 texts, got 1"):
        score_texts(["wer"], ["a", "b"], [["a"]])
    with pytest.raises(ValueError, match="expected texts to score, got none"):
        score_texts(["wer"], [], [])
    with pytest.raises(ValueError, match=r"row 1: expected a list of at least one reference, got \[\]"):
        score_texts(["wer"], ["a", "b"], [["a"], []])
    with pytest.raises(ValueError, match="row 0: expected a list of at least one reference, got 'abc'"):
        score_texts(["wer"], ["abc"], ["abc"])


def test_what_is_slow_to_import_is_not_imported_before_it_is_used() -> None:
    code = "import sys, tfm.text_metrics; assert not {'jax', 'nltk', 'scipy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_docstrings() -> None:
    assert doctest.testmod(tfm.text_metrics).failed == 0
