"""What a model makes of given answers: their probability, and the alignment of their words, in batches of few shapes.

Here texts are ids already but for the checks on their way in; `tfm.pipeline.TextModel` is what a user calls.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import SupportsIndex

import jax
import numpy as np

from tfm.axes import Array, Float, Int
from tfm.buckets import Buckets
from tfm.decoding import alignment
from tfm.decoding.score import score
from tfm.nn.models import Model
from tfm.nn.params import Params
from tfm.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class PairScore:
    """How likely a model finds one answer."""

    score: float
    """Log-probability, natural, of the whole answer: the sum of `token_scores`."""
    token_scores: list[float]
    """Log-probability of each token, given the text and the tokens before it."""
    tokens: list[int]
    """The ids that were scored, the end token included."""


@dataclasses.dataclass(frozen=True, eq=False)
class Alignment:
    """What a model looked at in a text while it predicted an answer."""

    source_tokens: list[str]
    """To be shown: the pieces of the text, the end token included."""
    target_tokens: list[str]
    """The same of the answer."""
    source_words: list[str]
    """What stands between white space in the text."""
    target_words: list[str]
    """The same of the answer."""
    weights: Float[np.ndarray, "T S"]
    """From each target token to the source tokens, averaged over heads, and over layers unless one was chosen."""
    pairs: list[tuple[int, int]]
    """(source word, target word), counted from 0; see `tfm.decoding.alignment.word_alignment`."""

    @property
    def pharaoh(self) -> str:
        """The pairs as "0-0 2-1"."""
        return alignment.pharaoh(self.pairs)


@dataclasses.dataclass(frozen=True)
class Side:
    """One text of a pair."""

    text: str
    ids: list[int]
    """With the end token, unless it is an answer that was cut off before, or a language model's text."""
    begun: int = 0
    """How many of the ids come before what is asked about: in a language model the text that an answer continues."""
    is_generated: bool = False
    """True where the ids are a model's, which need not be those that the text is encoded to."""

    def words(self, tokenizer: Tokenizer) -> list[int | None]:
        """The word of each id, None for the end token."""
        words = tokenizer.words_of(self.ids) if self.is_generated else tokenizer.words(self.text)
        return words + [None for _ in self.ids[len(words) :]]


def check_texts(texts: Sequence[object], what: str) -> None:
    """Raises ValueError for the first that is no text; `what` names it, before its number."""
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"expected a str as {what} {i}, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{what} {i} is not Unicode text: {error}") from error


def check_lengths(rows: Sequence[list[int]], what: str, most: int, limit: str, token: str = "end") -> None:
    """Raises ValueError for ids that are too many, `token` token included; `limit` is what the model calls the most."""
    too_long = [f"{what} {i} has {len(ids)}" for i, ids in enumerate(rows) if len(ids) > most]
    if too_long:
        more = f", and {len(too_long) - 5} more {what}s are too long" if len(too_long) > 5 else ""
        raise ValueError(
            f"expected {what}s of at most {most} tokens (the model's {limit}), {token} token included; "
            + ", ".join(too_long[:5])
            + more
        )


def score_pairs(
    model: Model, params: Params, buckets: Buckets, sources: Sequence[Side], targets: Sequence[Side]
) -> list[PairScore]:
    """Scores targets, in order."""
    scores: list[PairScore | None] = [None] * len(sources)
    for indices, inputs in _batches(model, buckets, sources, targets):
        found = jax.device_get(score(model, params, **inputs))
        for row, i in enumerate(indices):
            begun, ids = targets[i].begun, targets[i].ids
            token_scores = found.token_log_probs[row, begun : len(ids)]
            scores[i] = PairScore(float(token_scores.sum()), token_scores.tolist(), ids[begun:])
    return [one for one in scores if one is not None]


def align_pairs(
    model: Model,
    params: Params,
    buckets: Buckets,
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    sources: Sequence[Side],
    targets: Sequence[Side],
    layer: SupportsIndex | None,
) -> list[Alignment]:
    """Aligns targets, which have a token at least; in order.

    Raises:
        ValueError: a layer that there is not, or a model without attention.
    """
    alignment.check_layer(layer, alignment.num_attentions(model.config))
    aligned: list[Alignment | None] = [None] * len(sources)
    for indices, inputs in _batches(model, buckets, sources, targets):
        found = jax.device_get(_cross_attention(model, params, **inputs))
        for row, i in enumerate(indices):
            source, target = sources[i], targets[i]
            words = source.words(source_tokenizer), target.words(target_tokenizer)
            weights = found[:, row, None, : len(target.ids), : len(source.ids)]
            aligned[i] = Alignment(
                source_tokenizer.tokens(source.ids),
                target_tokenizer.tokens(target.ids),
                source.text.split(),
                target.text.split(),
                alignment.averaged(weights, layer),
                alignment.word_alignment(weights, *words, layer=layer),
            )
    return [one for one in aligned if one is not None]


@functools.partial(jax.jit, static_argnames="model")
def _cross_attention(
    model: Model,
    params: Params,
    source: Int[Array, "B S"],
    target: Int[Array, "B T"],
    source_lengths: Int[Array, "B"],
    target_lengths: Int[Array, "B"],
) -> Float[Array, "L B T S"]:
    """Averaged over heads, on the device: the other weights are not made, and little has to leave it."""
    lengths = dict(source_lengths=source_lengths, target_lengths=target_lengths)
    weights = alignment.attention_weights(model, params, source, target, **lengths)
    return weights.cross_attention.mean(axis=2)


def _batches(
    model: Model, buckets: Buckets, sources: Sequence[Side], targets: Sequence[Side]
) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
    """The indices of each batch's pairs, and the batch; rows beyond the pairs hold one padding token on each side.

    So does a side without tokens, but that the sources of a language model have no place for any.
    """
    lengths = [(len(source.ids), len(target.ids)) for source, target in zip(sources, targets, strict=True)]
    for indices, shape in buckets.pairs(lengths):
        inputs: dict[str, np.ndarray] = {}
        for name, width, sides in (("source", shape.source_length, sources), ("target", shape.capacity, targets)):
            padded = np.full((shape.rows, width), model.config.pad_id, np.int32)
            row_lengths = np.full(shape.rows, min(width, 1), np.int32)
            for row, i in enumerate(indices):
                padded[row, : len(sides[i].ids)] = sides[i].ids
                row_lengths[row] = max(len(sides[i].ids), min(width, 1))
            inputs |= {name: padded, f"{name}_lengths": row_lengths}
        yield indices, inputs
