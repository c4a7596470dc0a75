"""How good a model is on held-out pairs: its loss, and metrics on the text that it generates."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from tfm.batch import Batch
from tfm.decoding.requests import Decoding
from tfm.decoding.sampling import Greedy
from tfm.pipeline import TextModel
from tfm.text_metrics import score_texts
from train.loss import LossSums
from train.tasks import Examples


@dataclasses.dataclass(frozen=True)
class Sample:
    """A generated text beside what would have been right."""

    source: str
    hypothesis: str
    references: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What came out of `evaluate`."""

    metrics: dict[str, float]
    """By name, in the units of `tfm.text_metrics`."""
    samples: tuple[Sample, ...]
    hypotheses: tuple[str, ...]
    """One for each source, in order."""


def held_out_loss(
    eval_step: Callable[[Any, Batch], LossSums],
    params: Any,
    batches: Iterable[Batch],
    *,
    text_bytes: int | None = None,
) -> dict[str, float]:
    """`loss` (nats per target token, end tokens included, without smoothing) and `perplexity` over all batches.

    Sums are added in float64 and divided once, so how pairs were batched changes nothing but rounding. Of plain text,
    `bits_per_byte` besides: its whole loss in bits, end token included, over its bytes in UTF-8. That compares models
    of different tokenizers, whose tokens are not alike.

    Args:
        eval_step: of `train.step.make_eval_step`.
        params: the model's parameters.
        batches: of `train.data.eval_batches`.
        text_bytes: of the plain text that the batches are made of.

    Raises:
        ValueError: there is no target token in them.
    """
    # Fetched at the end: the device is not waited for between batches.
    sums: list[LossSums] = jax.device_get([eval_step(params, batch) for batch in batches])
    weight = sum(float(one.weight) for one in sums)
    if not weight:
        raise ValueError("expected held-out pairs, got none")
    nll = sum(float(one.nll_sum) for one in sums)
    measured = {"loss": nll / weight, "perplexity": perplexity(nll / weight)}
    return measured if text_bytes is None else measured | {"bits_per_byte": nll / math.log(2) / text_bytes}


def perplexity(nll: float) -> float:
    """exp(nll), infinite where a float cannot hold it."""
    return math.inf if nll > 700 else math.exp(nll)


def evaluate(
    model: TextModel,
    examples: Examples,
    metrics: Sequence[str],
    *,
    max_tokens: int,
    max_examples: int | None = None,
    samples: int = 0,
    sampler: Decoding = Greedy(),  # noqa: B008 - frozen and without state
) -> Evaluation:
    """Generates text for each source, and scores the texts against all its references.

    Args:
        model: generates.
        examples: one row a source; see `Examples.merged`.
        metrics: names that `tfm.text_metrics.score_texts` knows; for none, nothing but the samples is generated.
        max_tokens: limit of each text.
        max_examples: at most so many sources, spread evenly over `examples`. `None`: all.
        samples: so many of them are handed back beside their references, spread evenly again.
        sampler: how it is generated; greedily, if nothing else is said.

    Raises:
        ValueError: there are no examples.
    """
    if not len(examples):
        raise ValueError("expected held-out examples, got none")
    rows = _spread(len(examples), max_examples if metrics else samples)
    sources, references = [examples.sources[row] for row in rows], [examples.references[row] for row in rows]
    hypotheses = [answer.text for answer in model.generate(sources, max_tokens=max_tokens, sampler=sampler)]
    scores = score_texts(metrics, hypotheses, references) if metrics else {}
    shown = [Sample(sources[i], hypotheses[i], tuple(references[i])) for i in _spread(len(rows), samples)]
    return Evaluation(scores, tuple(shown), tuple(hypotheses))


def _spread(total: int, wanted: int | None) -> list[int]:
    """`wanted` of `total` row numbers, evenly spaced: files are often sorted, and their beginnings are all alike."""
    if wanted is None or wanted >= total:
        return list(range(total))
    return [index * total // wanted for index in range(wanted)]
