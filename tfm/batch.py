"""The training batch, and the only place where targets are shifted."""

import typing
from collections.abc import Sequence

import flax.struct
import numpy as np

from tfm.axes import Array, Float, Int
from tfm.config import ModelConfig


@typing.no_type_check  # a pytree is also built from shapes, specs and other non-arrays
@flax.struct.dataclass
class Batch:
    """Padded pairs, teacher-forced: the decoder reads `target_in` and must predict `target_out`."""

    source: Int[Array | np.ndarray, "B S"]
    """Source ids, padded on the right."""
    source_lengths: Int[Array | np.ndarray, "B"]
    """Real tokens of each source row."""
    target_in: Int[Array | np.ndarray, "B T"]
    """The start token, then the target: what the decoder reads."""
    target_out: Int[Array | np.ndarray, "B T"]
    """The target, then the end token: what it must say, one position earlier."""
    weights: Float[Array | np.ndarray, "B T"]
    """1 where `target_out` counts in the loss, 0 on padding."""


def make_batch(
    sources: Sequence[Sequence[int] | np.ndarray],
    targets: Sequence[Sequence[int] | np.ndarray],
    config: ModelConfig,
    *,
    shape: tuple[int, int] | None = None,
    rows: int | None = None,
) -> Batch:
    """Pads pairs of ids into one `Batch` of NumPy arrays.

    Args:
        sources: source ids of each pair, with whatever end token the source side wants.
        targets: target ids of each pair, without start and end tokens: both are added here.
        config: for the special ids.
        shape: the padded (S, T); T counts the start token. `None`: just as long as needed.
        rows: pads with empty rows of weight 0 up to this many. `None`: no padding rows.

    Returns:
        A `Batch` of int32 ids and float32 weights. Ids are not held against the vocabularies, nor lengths against what
        the model accepts.

    Example:
        >>> batch = make_batch([[7, 8, 2]], [[5, 6]], ModelConfig(), shape=(4, 4))
        >>> batch.source.tolist(), batch.source_lengths.tolist()
        ([[7, 8, 2, 0]], [3])
        >>> batch.target_in.tolist(), batch.target_out.tolist(), batch.weights.tolist()
        ([[1, 5, 6, 0]], [[5, 6, 2, 0]], [[1.0, 1.0, 1.0, 0.0]])

    Raises:
        ValueError: unequal numbers of sources and targets, a pair longer than `shape`, more pairs than `rows`.
    """
    if len(sources) != len(targets):
        raise ValueError(f"expected as many targets as sources, got {len(sources)} sources, {len(targets)} targets")
    longest = (max(map(len, sources), default=0), max(map(len, targets), default=0) + 1)
    source_length, target_length = longest if shape is None else shape
    if longest[0] > source_length or longest[1] > target_length:
        raise ValueError(f"pairs of up to {longest} (source, target + 1) tokens do not fit shape {shape}")
    num_rows = len(sources) if rows is None else rows
    if len(sources) > num_rows:
        raise ValueError(f"{len(sources)} pairs do not fit {num_rows} rows")
    labels = [np.array([*target, config.end_id], np.int32) for target in targets]
    return _filled(sources, labels, config, (source_length, target_length), num_rows)


def make_text_batch(
    blocks: Sequence[Sequence[int] | np.ndarray], config: ModelConfig, *, length: int, rows: int
) -> Batch:
    """Pads blocks of plain text into one `Batch` without sources, for a language model.

    Each token of a block is predicted from those before it in the block, and the first from the start token: as when
    the model continues a text, or scores one.

    Args:
        blocks: ids; an end token stands only where a text ends.
        config: for the special ids.
        length: T, which no block exceeds.
        rows: as many as blocks, or more: further rows are empty, of weight 0.

    Example:
        >>> batch = make_text_batch([[5, 6, 7], [8, 2]], ModelConfig(), length=3, rows=2)
        >>> batch.source.shape, batch.target_in.tolist(), batch.target_out.tolist()
        ((2, 0), [[1, 5, 6], [1, 8, 0]], [[5, 6, 7], [8, 2, 0]])
    """
    return _filled([[]] * len(blocks), blocks, config, (0, length), rows)


def _filled(
    sources: Sequence[Sequence[int] | np.ndarray],
    labels: Sequence[Sequence[int] | np.ndarray],
    config: ModelConfig,
    shape: tuple[int, int],
    num_rows: int,
) -> Batch:
    """Pads sources, and what is to be said about each, which is read one position later."""
    source_length, target_length = shape
    source = np.full((num_rows, source_length), config.pad_id, np.int32)
    source_lengths = np.zeros(num_rows, np.int32)
    target_in = np.full((num_rows, target_length), config.pad_id, np.int32)
    target_out = target_in.copy()
    weights = np.zeros((num_rows, target_length), np.float32)
    for row, (source_ids, label_ids) in enumerate(zip(sources, labels, strict=True)):
        length = len(label_ids)
        source[row, : len(source_ids)] = source_ids
        source_lengths[row] = len(source_ids)
        target_in[row, 0] = config.start_id
        target_in[row, 1:length] = label_ids[:-1]
        target_out[row, :length] = label_ids
        weights[row, :length] = 1
    return Batch(source, source_lengths, target_in, target_out, weights)
