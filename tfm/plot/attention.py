"""Attention maps: rows are the tokens that looked, columns those that were looked at."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, SupportsIndex, get_args

import jax
import numpy as np

from tfm.answering import Answer
from tfm.axes import Array, Float
from tfm.buckets import power_of_two
from tfm.checks import whole_number
from tfm.decoding.alignment import attention_weights, check_layer
from tfm.pipeline import TextModel
from tfm.plot.figures import Axes, Figure, as_label, figure_and_axes

Part = Literal["cross", "self", "encoder"]
"""The decoder's attention to the source, the decoder's to its own input, or the encoder's."""

_INCHES_A_TOKEN = 0.3
_MOST_INCHES = 30


@dataclasses.dataclass(frozen=True, eq=False)
class TokenAttention:
    """The weights of all heads for one pair of texts, and the tokens along their axes."""

    weights: Float[np.ndarray, "L N T M"]
    """Rows look at columns; each row sums to 1 over what it could see."""
    rows: list[str]
    """The tokens that look. In the decoder, row t is of the step that predicted token t."""
    columns: list[str]
    """The tokens that are looked at. In the decoder's self-attention the first is the start token."""

    def chosen(self, layer: SupportsIndex | None, head: SupportsIndex | None) -> tuple[Float[np.ndarray, "T M"], str]:
        """The weights of one head of one layer, or the mean over all of them, and what to call that.

        Raises:
            ValueError: no such layer or head.
        """
        num_layers, num_heads = self.weights.shape[:2]
        check_layer(layer, num_layers)
        number = None if head is None else whole_number(head)
        if head is not None and (number is None or not -num_heads <= number < num_heads):
            raise ValueError(f"expected a head from {-num_heads} to {num_heads - 1}, or None for all, got {head!r}")
        chosen, names = self.weights, []
        for axis, what, index in ((0, "layer", layer), (1, "head", number)):
            count = self.weights.shape[axis]
            place = None if index is None else int(index) % count
            names.append(f"mean of {count} {what}s" if place is None else f"{what} {place}")
            places = np.arange(count) if place is None else np.array([place])
            chosen = chosen.take(places, axis=axis).mean(axis=axis, keepdims=True)
        return chosen[0, 0], ", ".join(names)


def token_attention(
    model: TextModel, text: str, answer: str | Answer | None = None, *, of: str = "cross"
) -> TokenAttention:
    """What every head looked at while an answer was predicted, in one teacher-forced pass.

    Args:
        model: any that answers texts.
        text: the source.
        answer: a text, or what `generate` gave, whose own ids are taken; None: the model's greedy answer.
        of: "cross", "self" or "encoder": see `Part`.

    Raises:
        ValueError: there is no such attention in the model, or text or answer cannot be.
    """
    if of not in get_args(Part):
        raise ValueError(f"expected of to be one of {', '.join(get_args(Part))}, got {of!r}")
    if model.config.is_language_model:
        raise ValueError("expected a model that answers texts, got a language model, which continues them")
    (given,) = model.generate([text]) if answer is None else [answer]
    (scored,) = model.score([text], [given])  # says what is wrong with either
    source_tokenizer, target_tokenizer = model.source_tokenizer, model.target_tokenizer
    source, target = [*source_tokenizer.encode(text), source_tokenizer.end_id], scored.tokens
    weights = attention_weights(
        model.model,
        model.prepared_params,
        _padded(source, model.config.max_source_length, model.config.pad_id),
        _padded(target, model.config.max_target_length, model.config.pad_id),
        source_lengths=[len(source)],
        target_lengths=[len(target)],
    )
    by_part: dict[str, Array | None] = dict(
        zip(get_args(Part), (weights.cross_attention, weights.self_attention, weights.encoder), strict=True)
    )
    found = by_part[of]
    if found is None:
        there = ", ".join(part for part, one in by_part.items() if one is not None)
        raise ValueError(f"expected an attention that the model has ({there}), got {of!r}")
    source_tokens, target_tokens = source_tokenizer.tokens(source), target_tokenizer.tokens(target)
    decoder_input = target_tokenizer.tokens([model.config.start_id, *target[:-1]])
    rows = source_tokens if of == "encoder" else target_tokens
    columns = decoder_input if of == "self" else source_tokens
    return TokenAttention(np.asarray(jax.device_get(found))[:, 0, :, : len(rows), : len(columns)], rows, columns)


def attention_map(
    model: TextModel,
    text: str,
    answer: str | Answer | None = None,
    *,
    of: str = "cross",
    layer: SupportsIndex | None = -1,
    head: SupportsIndex | None = None,
    ax: Axes | None = None,
) -> Figure:
    """One picture of what an answer's tokens looked at.

    Args:
        model: any that answers texts.
        text: the source.
        answer: as in `token_attention`.
        of: "cross", "self" or "encoder": see `Part`.
        layer: -1 for the last; None for the mean of all.
        head: counted from 0; None for the mean of all.
        ax: where to draw; None: on a new figure.

    Raises:
        ValueError: as `token_attention`, or no such layer or head.
    """
    looked = token_attention(model, text, answer, of=of)
    weights, title = looked.chosen(layer, head)
    return heat_map(weights, looked.rows, looked.columns, title=title, ax=ax)


def attention_grid(model: TextModel, text: str, answer: str | Answer | None = None, *, of: str = "cross") -> Figure:
    """All heads at once: a row of maps for each layer, from the first to the last, a column for each head.

    Arguments and errors are those of `token_attention`.
    """
    looked = token_attention(model, text, answer, of=of)
    num_layers, num_heads, num_rows, num_columns = looked.weights.shape
    width, height = _inches(num_columns, 0.6), _inches(num_rows, 0.8)
    figure = Figure(figsize=(min(width * num_heads, 40), min(height * num_layers, 40)), layout="constrained")
    grid = figure.subplots(num_layers, num_heads, squeeze=False)
    for layer in range(num_layers):
        for head in range(num_heads):
            weights, title = looked.chosen(layer, head)
            heat_map(weights, looked.rows, looked.columns, title=title, ax=grid[layer, head])
    return figure


def heat_map(
    weights: Float[Array | np.ndarray, "T M"],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str = "",
    ax: Axes | None = None,
) -> Figure:
    """Weights from 0 (white) to 1 (black), with a label for each row and column.

    Raises:
        ValueError: not as many labels as rows and columns.
    """
    shape = np.shape(weights)
    if shape != (len(rows), len(columns)):
        raise ValueError(f"expected weights of {len(rows)} rows and {len(columns)} columns, as labels, got {shape}")
    figure, ax = figure_and_axes(ax, _inches(len(columns), 1.2), _inches(len(rows), 1.0))
    ax.imshow(np.asarray(weights), cmap="Greys", vmin=0, vmax=1, aspect="auto")
    # a $ in a token is a dollar, no formula; a space is to be seen
    labels = [[as_label(token).replace(" ", "␣") for token in tokens] for tokens in (rows, columns)]
    ax.set_yticks(range(len(rows)), labels[0])
    ax.set_xticks(range(len(columns)), labels[1], rotation=90 if max(map(len, columns)) > 4 else 0)
    ax.xaxis.tick_top()
    if title:
        ax.set_title(title, fontsize="medium")
    return figure


def _inches(tokens: int, beside: float) -> float:
    return min(max(_INCHES_A_TOKEN * tokens, 1.0) + beside, _MOST_INCHES)


def _padded(ids: list[int], most: int, pad_id: int) -> np.ndarray:
    """One row, as long as the next power of two, so that few lengths are compiled."""
    padded = np.full((1, max(min(power_of_two(len(ids)), most), len(ids))), pad_id, np.int32)
    padded[0, : len(ids)] = ids
    return padded
