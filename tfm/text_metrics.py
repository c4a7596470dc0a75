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

ROUGE's words are lower-cased runs of letters, digits and combining marks, and single characters in scripts that are
written without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese). On ASCII these are rouge-score's own words; of
other text rouge-score by itself drops every character.
"""

import difflib
import re
import unicodedata
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from rapidfuzz.distance import Levenshtein
from sacrebleu.metrics import BLEU, CHRF

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
