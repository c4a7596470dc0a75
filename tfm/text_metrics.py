"""How good texts are, by the measures of the field. No JAX.

Each output is held against one or more right answers, whose number may differ from row to row.

    =========== ====================================================================================== =================
    metric      what is counted, in percent                                                            library
    =========== ====================================================================================== =================
    exact-match outputs that equal one of their references, character by character
    wer         outputs whose tokens differ from every reference's: the word error rate of
                pronunciations and transliterations
    ter         token error rate: edits (insert, delete, replace) to the nearest reference, over its   rapidfuzz
                tokens, both summed over the rows. Of phones: the phoneme error rate. Above 100 where
                outputs are long
    bleu        corpus BLEU (Papineni et al. 2002), cased, tokenised as mteval-13a                     sacrebleu
    chrf        corpus chrF2 (Popović 2015): characters, no words                                      sacrebleu
    rouge1      F1 of words, of pairs of words, and of the longest common subsequence (Lin 2004), of   rouge-score
    rouge2      the best reference, averaged over the rows; no stemming
    rougeL
    =========== ====================================================================================== =================

Tokens of `wer` and `ter` stand between white space.

BLEU and chrF are also measured of single texts, against each other: see `pairwise_scores`.

ROUGE's words are lower-cased runs of letters, digits and combining marks, and single characters in scripts that are
written without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese). On ASCII these are rouge-score's own words; of
other text rouge-score by itself drops every character.
"""

import difflib
import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
from jaxtyping import Float, Int  # tfm.axes, which hands them on, loads JAX
from rapidfuzz.distance import Levenshtein
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.metrics.helpers import extract_all_char_ngrams, extract_word_ngrams

HIGHER_IS_BETTER: dict[str, bool] = {
    "loss": False,
    "exact-match": True,
    "wer": False,
    "ter": False,
    "bleu": True,
    "chrf": True,
    "rouge1": True,
    "rouge2": True,
    "rougeL": True,
}
"""Every metric by name. All but the loss are of texts."""

_OF_TEXTS = tuple(name for name in HIGHER_IS_BETTER if name != "loss")


def score_texts(
    metric_names: Sequence[str], hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Scores texts against their references.

    Args:
        metric_names: of the table above.
        hypotheses: the outputs; empty ones count as wrong.
        references: of each output, at least one right answer.

    Returns:
        Percent by metric, in the order of `metric_names`.

    Example:
        >>> score_texts(["wer", "ter"], ["K AE T", "D AA G"], [["K AE T"], ["D AO G", "D AO G Z"]])
        {'wer': 50.0, 'ter': 16.666666666666668}

    Raises:
        ValueError: an unknown metric; no outputs; not as many lists of references as outputs, or an empty list.
    """
    for name in metric_names:
        _check_name(name)
    if len(hypotheses) != len(references):
        raise ValueError(f"expected references for each of {len(hypotheses)} texts, got {len(references)}")
    if not hypotheses:
        raise ValueError("expected texts to score, got none")
    for row, answers in enumerate(references):
        if isinstance(answers, str) or not answers:
            raise ValueError(f"row {row}: expected a list of at least one reference, got {answers!r:.80}")
    scores = {}
    rouge = _rouge([name for name in metric_names if name.startswith("rouge")], hypotheses, references)
    for name in metric_names:
        if name == "exact-match":
            pairs = zip(hypotheses, references, strict=True)
            scores[name] = _percent(sum(text in answers for text, answers in pairs), len(hypotheses))
        elif name == "wer":
            distances = _edits(hypotheses, references)
            scores[name] = _percent(sum(distance > 0 for distance, _ in distances), len(hypotheses))
        elif name == "ter":
            distances = _edits(hypotheses, references)
            scores[name] = _percent(sum(distance for distance, _ in distances), sum(length for _, length in distances))
        elif name in ("bleu", "chrf"):
            scores[name] = min(_SACREBLEU[name]().corpus_score(hypotheses, _streams(references)).score, 100.0)
        else:
            scores[name] = rouge[name]
    return scores


def pairwise_scores(metric_name: str, texts: Sequence[str]) -> Float[np.ndarray, "R R"]:
    """How near texts are to each other: the score of every one as output, with every one as its single reference.

    The numbers are those of sacrebleu's `sentence_chrf` and `sentence_bleu` with their default settings, so chrF2 and
    BLEU with exponential smoothing (Chen & Cherry 2014, method 3) of the orders that the output has. They come in about
    a tenth of the time, because n-grams are taken out of each text once and compared once for both directions.

    Args:
        metric_name: "bleu" or "chrf". BLEU's words are mteval-13a's, which finds hardly any in scripts written without
            spaces.
        texts: any; an empty one scores 0 in every pair, that with itself included.

    Returns:
        Percent: row i is of text i as the output, column j of text j as the reference. Neither metric is symmetric.

    Example:
        >>> pairwise_scores("chrf", ["abc", "abd", "abcabc"]).round(1).tolist()
        [[100.0, 38.9, 43.7], [38.9, 100.0, 19.9], [75.7, 31.4, 100.0]]

    Raises:
        ValueError: another metric.
    """
    if metric_name not in _SENTENCE_SCORES:
        raise ValueError(f"expected a metric of single texts ({', '.join(_SENTENCE_SCORES)}), got {metric_name!r}")
    if not texts:
        return np.zeros((0, 0))
    return np.minimum(_SENTENCE_SCORES[metric_name](texts), 100.0)  # BLEU of equal texts is rounded up


def signature(metric_name: str, references: Sequence[Sequence[str]] | None = None) -> str:
    """What to print beside a score so that others can compute the same; empty where the table above says it all.

    Args:
        metric_name: of the table above, or "loss".
        references: those that were scored against, so that their number is named.

    Example:
        >>> signature("bleu", [["a", "b"], ["c", "d"]])[:33]
        'BLEU|nrefs:2|case:mixed|eff:no|to'

    Raises:
        ValueError: an unknown metric.
    """
    if metric_name in ("bleu", "chrf"):
        metric = _SACREBLEU[metric_name]()
        counts = {len(answers) for answers in references or ()}
        metric.num_refs = counts.pop() if len(counts) == 1 else -1  # sacrebleu's word for: it varies
        described = metric.get_signature()
        if not references:
            described.update("nrefs", None)
        return f"{'BLEU' if metric_name == 'bleu' else 'chrF2'}|{described.format()}"
    if metric_name.startswith("rouge") and metric_name in _OF_TEXTS:
        return f"{metric_name}|stem:no|tok:unicode-words|refs:best|rouge-score:{version('rouge-score')}"
    if metric_name != "loss":
        _check_name(metric_name)
    return ""


_SACREBLEU: dict[str, Any] = {"bleu": BLEU, "chrf": CHRF}


def _sentence_chrf(texts: Sequence[str]) -> Float[np.ndarray, "R R"]:
    """The F score, with recall twice as important, of precision and recall averaged over the orders both texts have."""
    precision, recall, orders = np.zeros((3, len(texts), len(texts)))
    of_each_text = [extract_all_char_ngrams(text, CHRF.CHAR_ORDER) for text in texts]
    for ngrams in zip(*of_each_text, strict=True):  # of one order
        shared = _shared(ngrams)
        count = shared.diagonal()
        precision += shared / np.maximum(count[:, None], 1)
        recall += shared / np.maximum(count[None, :], 1)
        orders += (count[:, None] > 0) & (count[None, :] > 0)
    precision /= np.maximum(orders, 1)
    recall /= np.maximum(orders, 1)
    factor = CHRF.BETA**2
    whole = factor * precision + recall
    return 100 * ((1 + factor) * precision * recall / np.where(whole > 0, whole, 1))


def _sentence_bleu(texts: Sequence[str]) -> Float[np.ndarray, "R R"]:
    metric = BLEU(effective_order=True)
    words = [metric.tokenizer(text.rstrip()).split() for text in texts]
    orders = range(1, metric.max_ngram_order + 1)
    by_order = [_shared([extract_word_ngrams(of_text, n) for of_text in words]) for n in orders]
    shared = np.stack(by_order, axis=-1).tolist()
    scores = np.zeros((len(texts), len(texts)))
    for i, j in np.ndindex(scores.shape):
        scores[i, j] = metric.compute_bleu(
            shared[i][j],
            shared[i][i],
            sys_len=shared[i][i][0],  # as many as single words
            ref_len=shared[j][j][0],
            smooth_method=metric.smooth_method,
            effective_order=True,
        ).score
    return scores


_SENTENCE_SCORES = {"bleu": _sentence_bleu, "chrf": _sentence_chrf}


def _shared(ngrams: Sequence[Counter[Any]]) -> Int[np.ndarray, "R R"]:
    """How many n-grams two texts have in common, each as often as both have it; in the diagonal all of a text's."""
    numbers: dict[tuple[Hashable, int], int] = {}  # of the first, second, ... time that an n-gram comes
    sets = [
        {numbers.setdefault((ngram, time), len(numbers)) for ngram, count in of_text.items() for time in range(count)}
        for of_text in ngrams
    ]
    shared = np.zeros((len(sets), len(sets)), np.int64)
    for i, of_text in enumerate(sets):
        for j in range(i + 1):
            shared[i, j] = shared[j, i] = len(of_text & sets[j])
    return shared


def _check_name(name: str) -> None:
    if name == "loss":
        raise ValueError(f"expected a metric of texts ({', '.join(_OF_TEXTS)}), got 'loss'")
    if name not in _OF_TEXTS:
        near = difflib.get_close_matches(name, _OF_TEXTS, n=1, cutoff=0.0)[0]
        raise ValueError(f"no metric {name!r}; the nearest is {near!r} of {', '.join(_OF_TEXTS)}")


def _percent(part: float | int, whole: int) -> float:
    """Of nothing, each edit counts as one whole: references can be empty."""
    return 100.0 * part / max(whole, 1)


def _edits(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> list[tuple[int, int]]:
    """Of each row, the edits to the nearest reference and its length; of equally near ones the longest."""
    rows = []
    for text, answers in zip(hypotheses, references, strict=True):
        tokens = text.split()
        nearest = [(Levenshtein.distance(tokens, answer), -len(answer)) for answer in map(str.split, answers)]
        distance, negative_length = min(nearest)
        rows.append((distance, -negative_length))
    return rows


def _streams(references: Sequence[Sequence[str]]) -> list[list[str | None]]:
    """References as sacrebleu takes them: the first of every row, the second of every row, ...; None where none is."""
    most = max(map(len, references))
    return [[answers[i] if i < len(answers) else None for answers in references] for i in range(most)]


def _rouge(
    metric_names: Sequence[str], hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    if not metric_names:
        return {}
    from rouge_score.rouge_scorer import RougeScorer  # takes a second: it imports NLTK and SciPy, and uses neither here

    scorer = RougeScorer(metric_names, use_stemmer=False, tokenizer=_Words())
    rows = [scorer.score_multi(answers, text) for text, answers in zip(hypotheses, references, strict=True)]
    return {name: _percent(sum(row[name].fmeasure for row in rows), len(rows)) for name in metric_names}


# Thai, Lao, Burmese, Khmer, kana, Han.
_UNSPACED = re.compile(
    "([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003ffff])"
)


class _Words:
    """The tokenizer that is handed to rouge-score."""

    def tokenize(self, text: str) -> list[str]:
        text = "".join(c if c.isalnum() or unicodedata.category(c)[0] == "M" else " " for c in text.lower())
        return _UNSPACED.sub(r" \1 ", text).split()
