"""Minimum Bayes risk: of sampled texts, the one that is nearest to all of them. On strings alone.

The likeliest text of a model that spreads its belief over many is often a poor one: short, empty, or unlike everything
else that the model finds likely (Eikema & Aziz 2020). So texts are drawn from the model, and the choice is that with
the highest expected utility, the lowest expected loss of Kumar & Byrne 2004, under the distribution of the samples:

    choice = argmax_h  1/R · Σ_r u(h, y_r),    h among y_1, ..., y_R

The sum runs over all samples, so each is also a pseudo-reference for itself, as in both papers: Kumar & Byrne sum over
the whole list that they choose from, Eikema & Aziz estimate the expectation under the model by the mean over its
samples, and to leave some out would be to estimate it under another distribution for each hypothesis. A text that is
drawn three times has three votes, its own among them. Where u(h, h) is the same for all, as 100 is for chrF and BLEU,
leaving out the one comparison of each sample with itself would take the same from all and change no rank; only texts
without any word, whose u(h, h) is 0, would gain by it.
"""

import dataclasses
import math
import typing
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from tfm.axes import Float
from tfm.checks import checked_whole_number, keep_whole_numbers
from tfm.decoding.sampling import Samples, Sampling, check_num_samples

Utility = Literal["chrf", "bleu"]
"""chrF2 (Popović 2015) or smoothed BLEU of single texts, in percent: see `tfm.text_metrics.pairwise_scores`."""

UtilityFunction = Callable[[str, str], float]
"""(hypothesis, pseudo-reference) to how good the hypothesis is if that is right; higher is better."""


@typing.no_type_check  # its values are checked by `check`, with errors that say more
@dataclasses.dataclass(frozen=True)
class MinimumBayesRisk:
    """Draws texts, and answers with those of the highest expected utility."""

    num_samples: int = 32
    """R: texts drawn for each source, at most 4,096. Every two of them are compared."""
    utility: Utility | UtilityFunction = "chrf"
    """What is expected: a metric by name, or any function of a hypothesis and a pseudo-reference."""
    num_best: int = 1
    """Texts that are returned, at most `num_samples`; fewer where fewer of the samples differ."""
    sampler: Sampling = Sampling()  # noqa: RUF009 - frozen and without state
    """How they are drawn: at the model's own probabilities, or others where it says so."""

    def __post_init__(self) -> None:
        keep_whole_numbers(self, "num_samples", "num_best")

    def check(self) -> None:
        """Raises ValueError for a setting out of its range."""
        check_num_samples(self.num_samples)
        checked_whole_number("num_best", self.num_best)
        if not 1 <= self.num_best <= self.num_samples:
            raise ValueError(f"expected num_best from 1 to num_samples, {self.num_samples}, got {self.num_best}")
        if not isinstance(self.sampler, Sampling):
            raise ValueError(f"expected Sampling(…) as sampler, got {self.sampler!r}")
        _check_utility(self.utility)

    @property
    def samples(self) -> Samples:
        """What has to be drawn."""
        return Samples(self.num_samples, self.sampler)


@dataclasses.dataclass(frozen=True)
class Ranked:
    """One of the texts that were drawn."""

    index: int
    """Where it first stands among the samples."""
    expected_utility: float
    """Its mean utility against all samples; in percent with chrF and BLEU."""


def expected_utilities(texts: Sequence[str], utility: Utility | UtilityFunction) -> Float[np.ndarray, "R"]:
    """The mean utility of each sample against all samples, itself included.

    Equal texts are compared once and counted as often as they come. Of R texts that all differ, R² pairs are compared;
    a function is called once for each ordered pair of different texts, and for each text with itself. The sum
    is exact, so that the mean is the same, to the last bit, in whatever order the texts come.

    Args:
        texts: the samples, as often as they were drawn.
        utility: a metric by name, or a function of hypothesis and pseudo-reference, in this order.

    Returns:
        In the order of `texts`; the same for equal ones.

    Example:
        >>> expected_utilities(["a b", "a c", "a b"], lambda hypothesis, reference: hypothesis == reference).round(2)
        array([0.67, 0.33, 0.67])

    Raises:
        ValueError: no texts, an unknown utility, or a function that gave something else than a finite number.
    """
    means = _means(texts, utility)
    return np.array([means[text] for text in texts])


def rank_by_utility(texts: Sequence[str], utility: Utility | UtilityFunction) -> list[Ranked]:
    """The different texts among samples, the highest expected utility first.

    Args:
        texts: the samples, as often as they were drawn.
        utility: as in `expected_utilities`.

    Returns:
        Each text once; of equally good ones, the one that was drawn first comes first.

    Example:
        >>> drawn = ["no", "the cat sat", "no", "the cat sits", "a cat sat"]
        >>> [drawn[ranked.index] for ranked in rank_by_utility(drawn, "chrf")]
        ['the cat sat', 'no', 'the cat sits', 'a cat sat']

    Raises:
        ValueError: as `expected_utilities`.
    """
    means = _means(texts, utility)
    ranked = [Ranked(texts.index(text), mean) for text, mean in means.items()]
    return sorted(ranked, key=lambda one: -one.expected_utility)


def _means(texts: Sequence[str], utility: Utility | UtilityFunction) -> dict[str, float]:
    """The expected utility of each different text, in the order in which they first come."""
    if isinstance(texts, str) or not len(texts):
        raise ValueError(f"expected a list of at least one text, got {texts!r:.80}")
    _check_utility(utility)
    counts = Counter(texts)
    table = _table(list(counts), utility)
    return {
        text: math.fsum(value * count for value, count in zip(row, counts.values(), strict=True)) / len(texts)
        for text, row in zip(counts, table.tolist(), strict=True)
    }


def _table(texts: Sequence[str], utility: Utility | UtilityFunction) -> Float[np.ndarray, "R R"]:
    """The utility of each text (row) if each (column) is right."""
    if isinstance(utility, str):
        from tfm.text_metrics import pairwise_scores  # with libraries that nothing else of generation needs

        return pairwise_scores(utility, texts)
    table = np.zeros((len(texts), len(texts)))
    for i, hypothesis in enumerate(texts):
        for j, reference in enumerate(texts):
            value = utility(hypothesis, reference)
            try:
                table[i, j] = value
            except (TypeError, ValueError):
                table[i, j] = math.nan
            if not math.isfinite(table[i, j]):
                pair = f"{hypothesis!r:.80} against {reference!r:.80}"
                raise ValueError(f"expected a finite number as the utility of {pair}, got {value!r}")
    return table


def _check_utility(utility: object) -> None:
    names = typing.get_args(Utility)
    if not callable(utility) and not (isinstance(utility, str) and utility in names):
        raise ValueError(f"expected a utility of {', '.join(names)}, or a function, got {utility!r}")
