"""From text to batches: splits, tokenizers, ids, and an endless stream of batches whose position can be saved.

grain does the reading ahead and keeps the position. What it does not have is batches by a budget of tokens with random
access: its batching takes a fixed number of rows, and its bucketing works on streams, whose position in a shuffled
epoch cannot be saved in a few bytes. That part is written here: which pairs form batch i follows from the seed and i.
"""

import dataclasses
import hashlib
import itertools
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import grain
import numpy as np

from tfm.axes import Int
from tfm.batch import Batch, make_batch
from tfm.config import ModelConfig
from tfm.tokenizer import Tokenizer
from train.config import BatchConfig, DataConfig, TokenizerConfig
from train.reading import read_examples
from train.shapes import BatchShape, assign_shapes, check_budget, choose_shapes, size_batches
from train.tasks import Examples, Splits, held_out_by_hash, load_task

_ENCODED_AT_ONCE = 1 << 16
"""Pairs whose ids are Python objects at one time."""


def load_splits(config: DataConfig, names: Collection[str] = ("train", "validation", "test")) -> Splits:
    """Reads the data of a run.

    Validation and test rows of TSV and JSONL are merged by source, so that any listed answer is right. Line-aligned
    files stay line by line, as corpus scores of translations are defined.

    Args:
        config: which files, or which task.
        names: the splits that are wanted; files that only others need are not opened.

    Returns:
        The splits; one that has no files, or is not wanted, is empty.

    Raises:
        ValueError: training data is wanted and none is named, or `validation_share` leaves one side empty.
        DataError: see `read_examples`.
    """
    if config.task != "files":
        return load_task(config.task)
    empty = Examples([], [])

    def read(paths: Sequence[str | Path]) -> Examples:
        return read_examples(paths, config.format, config.source_field, config.target_field) if paths else empty

    def to_evaluate(paths: Sequence[str | Path], examples: Examples) -> Examples:
        return examples if len(paths) == 2 else examples.merged()

    shared = config.validation_share > 0 and not config.validation
    if not config.train and ("train" in names or ("validation" in names and shared)):
        raise ValueError(
            "data.train names no file: give two line-aligned files (source, target), or one TSV file "
            "(source<TAB>target), or one JSONL file (with data.source_field and data.target_field); plain or .gz, UTF-8"
        )
    shared &= "validation" in names or "train" in names
    train = read(config.train) if "train" in names or shared else empty
    validation = to_evaluate(config.validation, read(config.validation)) if "validation" in names else empty
    if shared and len(train):
        held_out = held_out_by_hash(train.sources, config.validation_share, "validation")
        if held_out.all() or not held_out.any():
            raise ValueError(
                f"data.validation_share = {config.validation_share} holds out {held_out.sum()} of {len(train)} rows, "
                f"chosen by source; give validation files or another share"
            )
        validation, train = to_evaluate(config.train, train.where(held_out)), train.where(~held_out)
    test = to_evaluate(config.test, read(config.test)) if "test" in names else empty
    return Splits(train, validation, test)


def build_tokenizers(config: TokenizerConfig, examples: Examples) -> tuple[Tokenizer, Tokenizer]:
    """Loads the tokenizers of source and target, or trains them on `examples`; the same object twice when shared."""
    targets = itertools.chain.from_iterable(examples.references)
    if config.shared:
        shared = build_shared_tokenizer(config, itertools.chain(examples.sources, targets))
        return shared, shared
    return (
        _tokenizer("the source", config.source_file, examples.sources, config.source_kind, config.source_vocab_size),
        _tokenizer("the target", config.target_file, targets, config.target_kind, config.target_vocab_size),
    )


def build_shared_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """Loads the one tokenizer of both sides, or trains it on `texts`."""
    return _tokenizer("both sides", config.source_file, texts, config.source_kind, config.source_vocab_size)


def _tokenizer(side: str, file: str, texts: Iterable[str], kind: str, vocab_size: int) -> Tokenizer:
    if file:
        return Tokenizer.load(file)
    try:
        return Tokenizer.train(texts, kind=kind, vocab_size=vocab_size)
    except ValueError as error:
        raise ValueError(f"the tokenizer of {side}: {error}") from error


@runtime_checkable
class Rows(Protocol):
    """What batches are made of: `EncodedExamples`, or `train.plain_text.TextBlocks`."""

    @property
    def row_name(self) -> str:
        """What rows are called, in the plural."""

    @property
    def text_bytes(self) -> int | None:
        """Of a plain text; None of anything else."""

    @property
    def source_lengths(self) -> Int[np.ndarray, "rows"]:
        """Positions that the source of each row takes."""

    @property
    def target_lengths(self) -> Int[np.ndarray, "rows"]:
        """Positions that the target of each row takes."""

    def __len__(self) -> int: ...

    def batch(self, rows: Sequence[int], config: ModelConfig, *, shape: tuple[int, int], num_rows: int) -> Batch:
        """Some of the rows, padded to (S, T), and with empty ones to `num_rows`."""

    def arrays(self) -> tuple[np.ndarray, ...]:
        """All that the rows are made of."""


@dataclasses.dataclass(frozen=True)
class EncodedExamples:
    """Pairs of ids in flat arrays: pair i is `source_ids[source_offsets[i]:source_offsets[i + 1]]`, targets alike."""

    source_ids: Int[np.ndarray, "source_tokens"]
    """With the end token of each source."""
    source_offsets: Int[np.ndarray, "offsets"]
    target_ids: Int[np.ndarray, "target_tokens"]
    """Without start and end tokens: `tfm.batch.make_batch` adds them."""
    target_offsets: Int[np.ndarray, "offsets"]

    row_name = "pairs"
    text_bytes = None

    def __len__(self) -> int:
        return len(self.source_offsets) - 1

    @property
    def source_lengths(self) -> Int[np.ndarray, "pairs"]:
        """Tokens of each source, end token included."""
        return np.diff(self.source_offsets)

    @property
    def target_lengths(self) -> Int[np.ndarray, "pairs"]:
        """Positions that each target takes in a batch: its tokens and one more, for the start or the end token."""
        return np.diff(self.target_offsets) + 1

    def source(self, pair: int) -> Int[np.ndarray, "tokens"]:
        return self.source_ids[self.source_offsets[pair] : self.source_offsets[pair + 1]]

    def target(self, pair: int) -> Int[np.ndarray, "tokens"]:
        return self.target_ids[self.target_offsets[pair] : self.target_offsets[pair + 1]]

    def batch(self, rows: Sequence[int], config: ModelConfig, *, shape: tuple[int, int], num_rows: int) -> Batch:
        sources, targets = [self.source(pair) for pair in rows], [self.target(pair) for pair in rows]
        return make_batch(sources, targets, config, shape=shape, rows=num_rows)

    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.source_ids, self.source_offsets, self.target_ids, self.target_offsets


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthReport:
    """What became of the pairs; each is counted once, under the first line that fits it."""

    empty: int
    """Left out: source or target is empty, or has blanks only, or no tokens."""
    too_long_source: int
    too_long_target: int
    kept: int

    @property
    def total(self) -> int:
        return self.kept + self.empty + self.too_long_source + self.too_long_target

    def __str__(self) -> str:
        if self.kept == self.total:
            return f"{self.total:,} pairs, all kept"
        return (
            f"{self.total:,} pairs, {self.kept:,} kept; left out: {self.empty:,} empty, {self.too_long_source:,} with "
            f"too long a source, {self.too_long_target:,} with too long a target"
        )


def answerable(examples: Examples, source_tokenizer: Tokenizer, max_source_tokens: int) -> Examples:
    """The rows that text can be generated for and measured: neither source nor all answers blank, nor too long.

    Blank answers beside others are dropped.
    """
    lengths = [len(ids) for ids in source_tokenizer.encode_batch(examples.sources)]
    sources, references = [], []
    for source, answers, length in zip(examples.sources, examples.references, lengths, strict=True):
        answers = [answer for answer in answers if answer.strip()]
        if source.strip() and answers and 0 < length < max_source_tokens:  # the end token comes besides
            sources.append(source)
            references.append(answers)
    return Examples(sources, references)


def encode_examples(
    examples: Examples,
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    max_source_tokens: int,
    max_target_tokens: int,
) -> tuple[EncodedExamples, LengthReport]:
    """Turns every pair into ids, on all cores, and leaves out what is empty or too long.

    Args:
        examples: a row with several answers becomes as many pairs.
        source_tokenizer: its end token is added to each source.
        target_tokenizer: nothing is added to the target here.
        max_source_tokens: the longest source that is kept, end token included.
        max_target_tokens: the longest target that is kept, end token included.
    """
    pairs = examples.pairs()
    counts = dict(kept=0, empty=0, too_long_source=0, too_long_target=0)
    pieces = []
    for start in range(0, len(pairs), _ENCODED_AT_ONCE):
        sources, targets = map(list, zip(*pairs[start : start + _ENCODED_AT_ONCE], strict=True))
        source_ids, source_lengths = _flat(source_tokenizer.encode_batch(sources), [source_tokenizer.end_id])
        target_ids, target_lengths = _flat(target_tokenizer.encode_batch(targets), [])
        blank = [not source.strip() or not target.strip() for source, target in zip(sources, targets, strict=True)]
        empty = np.array(blank) | (source_lengths < 2) | (target_lengths < 1)
        long_source = ~empty & (source_lengths > max_source_tokens)
        long_target = ~empty & ~long_source & (target_lengths + 1 > max_target_tokens)
        kept = ~(empty | long_source | long_target)
        for name, mask in zip(counts, (kept, empty, long_source, long_target), strict=True):
            counts[name] += int(mask.sum())
        source_ids, target_ids = (
            source_ids[np.repeat(kept, source_lengths)],
            target_ids[np.repeat(kept, target_lengths)],
        )
        pieces.append((source_ids, source_lengths[kept], target_ids, target_lengths[kept]))
    source_ids, source_lengths, target_ids, target_lengths = (
        np.concatenate([np.zeros(0, np.int32), *(piece[part] for piece in pieces)]) for part in range(4)
    )
    offsets = [
        np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]) for lengths in (source_lengths, target_lengths)
    ]
    return EncodedExamples(source_ids, offsets[0], target_ids, offsets[1]), LengthReport(**counts)


def _flat(rows: list[list[int]], end: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """All ids in one array, `end` after each row, and the rows' lengths with it."""
    lengths = np.fromiter((len(row) + len(end) for row in rows), np.int32, len(rows))
    ids = itertools.chain.from_iterable(itertools.chain(row, end) for row in rows)
    return np.fromiter(ids, np.int32, int(lengths.sum())), lengths


class _Grouping:
    """Which pairs share a batch: pairs of one shape, in a given order, cut into as many rows as the budget holds."""

    def __init__(self, encoded: Rows, model_config: ModelConfig, batch_config: BatchConfig) -> None:
        self.encoded = encoded
        self.model_config = model_config
        sources, targets = encoded.source_lengths, encoded.target_lengths
        longest = (model_config.max_source_length, model_config.max_target_length)
        if sources.max(initial=0) > longest[0] or targets.max(initial=0) > longest[1]:
            raise ValueError(
                f"expected sources and targets within the model's max_source_length and max_target_length, {longest}, "
                f"got up to {(int(sources.max()), int(targets.max()))} tokens: raise those or lower "
                f"data.max_source_tokens and data.max_target_tokens"
            )
        shapes: tuple[tuple[int, int], ...] = ()
        if len(encoded):
            chosen = choose_shapes(sources, targets, max_shapes=batch_config.max_shapes)
            shapes = tuple((min(source, longest[0]), min(target, longest[1])) for source, target in chosen)
        self._assigned = assign_shapes(sources, targets, shapes)
        pairs = np.bincount(self._assigned, minlength=len(shapes))
        tokens = np.bincount(self._assigned, sources + targets, minlength=len(shapes))
        check_budget(shapes, batch_config)
        self.shapes: tuple[BatchShape, ...] = tuple(
            size_batches(shape, int(pairs[i]), int(tokens[i]), batch_config) for i, shape in enumerate(shapes)
        )
        self._first_pair = np.concatenate([[0], np.cumsum(pairs)])
        self._first_batch = np.cumsum([0, *(shape.batches for shape in self.shapes)])

    def __len__(self) -> int:
        return int(self._first_batch[-1])

    def sort(self, order: Int[np.ndarray, "pairs"]) -> Int[np.ndarray, "pairs"]:
        """Brings the pairs of each shape together, in `order` within it."""
        return order[np.argsort(self._assigned[order], kind="stable")]

    def batch(self, number: int, sorted_pairs: Int[np.ndarray, "pairs"]) -> Batch:
        """One batch of an epoch, counted shape by shape."""
        index = int(np.searchsorted(self._first_batch, number, side="right")) - 1
        shape = self.shapes[index]
        start = self._first_pair[index] + (number - self._first_batch[index]) * shape.rows
        pairs = sorted_pairs[start : min(start + shape.rows, self._first_pair[index + 1])].tolist()
        return self.encoded.batch(pairs, self.model_config, shape=(shape.source, shape.target), num_rows=shape.rows)


class EvalBatches:
    """Every pair once, in order within each shape. Batches are made anew each time they are gone through."""

    def __init__(self, grouping: _Grouping) -> None:
        self.shapes = grouping.shapes
        self.text_bytes = grouping.encoded.text_bytes
        self._grouping = grouping

    def __len__(self) -> int:
        return len(self._grouping)

    def __iter__(self) -> Iterator[Batch]:
        sorted_pairs = self._grouping.sort(np.arange(len(self._grouping.encoded)))
        return (self._grouping.batch(number, sorted_pairs) for number in range(len(self)))


class TrainBatches:
    """The batches of a run, without end: batch i is a pure function of the data, the configs, the seed and i.

    An epoch has `batches_per_epoch` batches and every pair once: pairs are shuffled, those of each shape cut into
    batches, and the batches shuffled. Order depends on the seed and the epoch, not on machine or NumPy version.
    """

    def __init__(self, grouping: _Grouping, seed: int) -> None:
        if not grouping.shapes:
            raise ValueError("expected pairs to train on, got none")
        self.shapes = grouping.shapes
        """The cheapest first."""
        self.batches_per_epoch = len(grouping)
        positions = sum(shape.rows * shape.batches * (shape.source + shape.target) for shape in self.shapes)
        encoded = grouping.encoded
        self.padding_share = 1 - float(encoded.source_lengths.sum() + encoded.target_lengths.sum()) / positions
        """Of all source and target positions of an epoch; empty rows are padding."""
        self._grouping = grouping
        self._seed = seed
        self._plans: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Epochs follow each other for as long as anyone asks."""
        return sys.maxsize

    def __getitem__(self, index: int) -> Batch:
        epoch, place = divmod(index, self.batches_per_epoch)
        sorted_pairs, batch_order = self._plan(epoch)
        return self._grouping.batch(int(batch_order[place]), sorted_pairs)

    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The pairs of an epoch sorted by shape, and the order of its batches; kept while threads may need it."""
        with self._lock:
            if epoch not in self._plans:
                if len(self._plans) >= 2:
                    del self._plans[max(self._plans, key=lambda known: abs(known - epoch))]
                # Sorting raw bits: unlike `Generator.permutation`, they are the same in every NumPy version.
                entropy = np.random.SeedSequence(self._seed % 2**64, spawn_key=(epoch,))
                bits = np.random.PCG64(entropy)
                order = np.argsort(bits.random_raw(len(self._grouping.encoded)), kind="stable")
                batch_order = np.argsort(bits.random_raw(self.batches_per_epoch), kind="stable")
                self._plans[epoch] = self._grouping.sort(order), batch_order
            return self._plans[epoch]

    def iterator(self, *, threads: int = 1, ahead: int = 16) -> "TrainIterator":
        """Starts at batch 0; see `TrainIterator.set_state`.

        Args:
            threads: that make batches while the caller computes. One is enough: the work holds Python's lock.
            ahead: batches that lie ready at most.
        """
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)
        batches: Any = grain.MapDataset.source(self).to_iter_dataset(options)
        return TrainIterator(iter(batches), self._fingerprint())

    def _fingerprint(self) -> str:
        """Of everything that decides which batch comes when."""
        digest = hashlib.blake2b(digest_size=16)
        for array in self._grouping.encoded.arrays():
            digest.update(array.data)
        digest.update(repr((self.shapes, self._seed)).encode())
        return digest.hexdigest()

    def describe(self) -> list[str]:
        """A table of the shapes, to print line by line."""
        cells: list[tuple[str, ...]] = [
            ("source", "target", "rows", self._grouping.encoded.row_name, "batches", "padding")
        ]
        for shape in self.shapes:
            counts = (shape.source, shape.target, shape.rows, shape.pairs, shape.batches)
            cells.append((*(f"{count:,}" for count in counts), f"{shape.padding_share:.1%}"))
        pairs = len(self._grouping.encoded)
        cells.append(("", "", "", f"{pairs:,}", f"{self.batches_per_epoch:,}", f"{self.padding_share:.1%}"))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]


class TrainIterator:
    """Training batches in order, made ahead by threads; the position is that of the next batch to be returned."""

    def __init__(self, batches: Any, fingerprint: str) -> None:
        self._batches = batches
        self._fingerprint = fingerprint

    def __iter__(self) -> "TrainIterator":
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        """The position, to be saved as JSON."""
        return {**self._batches.get_state(), "data": self._fingerprint}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a saved position. Raises ValueError where the data or what decides its order has changed."""
        if state.get("data") != self._fingerprint:
            raise ValueError(
                "the saved position belongs to other training data: files, tokenizers, lengths, batch settings or seed "
                "have changed since"
            )
        self._batches.set_state({"next_index": state["next_index"]})

    def close(self) -> None:
        """Stops the threads."""
        self._batches.close()


def train_batches(encoded: Rows, model_config: ModelConfig, batch_config: BatchConfig, *, seed: int) -> TrainBatches:
    """Plans the training batches.

    Args:
        encoded: the pairs, or the blocks of a text.
        model_config: for the special ids and the longest source and target.
        batch_config: the budget; see `BatchConfig`.
        seed: of the order.

    Raises:
        ValueError: there are no pairs, the model does not take the longest of them, or the budget holds less than one
            row of them for each accumulation step.
    """
    return TrainBatches(_Grouping(encoded, model_config, batch_config), seed)


def eval_batches(encoded: Rows, model_config: ModelConfig, batch_config: BatchConfig) -> EvalBatches:
    """Batches of every pair, unshuffled, within the budget and in shapes chosen as for training; see `train_batches`.

    No pairs make no batches. One pair always is a batch, even if it is longer than the budget.
    """
    longest = max(encoded.source_lengths.max(initial=1), encoded.target_lengths.max(initial=1))
    budget = max(batch_config.tokens, int(longest) + 7)  # shapes are rounded up to multiples of 8
    alone = dataclasses.replace(batch_config, tokens=budget, accumulation_steps=1)
    return EvalBatches(_Grouping(encoded, model_config, alone))
