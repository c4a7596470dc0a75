"""Plain text for a language model: files read whole, a part held out, and all of it cut into blocks of tokens.

The tokens of all files are one sequence, in their order, with an end token behind each file. It is cut into blocks of
equally many tokens, of which only the last may be shorter; so an epoch has every token once. A block is read from the
start token on: its first token is predicted from nothing else, each other one from those before it in the block.
"""

import dataclasses
import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tfm.axes import Int
from tfm.batch import Batch, make_text_batch
from tfm.config import ModelConfig
from tfm.tokenizer import Tokenizer
from train.config import DataConfig
from train.reading import read_lines

_ENCODED_AT_ONCE = 1 << 16
"""Lines whose ids are Python objects at one time."""

Texts = tuple[str, ...]
"""The texts of a split, one for each file."""


def load_texts(config: DataConfig, split: str) -> Texts:
    """Reads the texts of a split, "train", "validation" or "test"; there are none where it has no files.

    Without validation files, the last `validation_share` of the characters of each training file is held out, from the
    next line on.

    Raises:
        ValueError: training text is wanted and no file is named, or `validation_share` leaves one side empty.
        DataError: see `read_text`.
    """
    shares = config.validation_share > 0 and not config.validation
    if split == "test" or (split == "validation" and not shares):
        return tuple(map(read_text, getattr(config, split)))
    if not config.train:
        raise ValueError("data.train names no file: give a file of plain text, plain or .gz, UTF-8")
    texts = tuple(map(read_text, config.train))
    if not shares:
        return texts
    parts = [_cut(text, 1 - config.validation_share) for text in texts]
    for path, (kept, held_out) in zip(config.train, parts, strict=True):
        if not kept or not held_out:
            raise ValueError(
                f"data.validation_share = {config.validation_share} holds out {len(held_out):,} of "
                f"{len(kept) + len(held_out):,} characters of {path}, in whole lines: give a validation file or "
                "another share"
            )
    return tuple(kept if split == "train" else held_out for kept, held_out in parts)


def read_text(path: str | Path) -> str:
    """A file as text, UTF-8, plain or gzipped, each line with a line feed behind it, whatever ends it in the file.

    Raises:
        DataError: it cannot be read, is empty, or is not UTF-8; the line is named.
    """
    return "".join(line + "\n" for line in read_lines(path))


def lines_of(text: str) -> Iterator[str]:
    """The lines of a text, each with its line feed."""
    return iter(io.StringIO(text, newline="\n"))


def _cut(text: str, share: float) -> tuple[str, str]:
    """The first `share` of a text's characters, up to the end of a line, and the rest."""
    at = text.find("\n", max(int(len(text) * share) - 1, 0)) + 1
    return text[:at], text[at:]


@dataclasses.dataclass(frozen=True)
class TextBlocks:
    """A sequence of tokens, cut into blocks; rows of a batch, as `train.data` makes them."""

    ids: Int[np.ndarray, "tokens"]
    """With an end token behind each text."""
    block_tokens: int
    """Of every block but the last, which has what is left."""
    text_bytes: int
    """Of the text in UTF-8: what bits per byte are counted by."""

    row_name = "blocks"

    def __len__(self) -> int:
        return -(-len(self.ids) // self.block_tokens)

    @property
    def source_lengths(self) -> Int[np.ndarray, "blocks"]:
        return np.zeros(len(self), np.int64)

    @property
    def target_lengths(self) -> Int[np.ndarray, "blocks"]:
        return np.minimum(self.block_tokens, len(self.ids) - np.arange(len(self)) * self.block_tokens)

    def batch(self, rows: Sequence[int], config: ModelConfig, *, shape: tuple[int, int], num_rows: int) -> Batch:
        size = self.block_tokens
        blocks = [self.ids[row * size : (row + 1) * size] for row in rows]
        return make_text_batch(blocks, config, length=shape[1], rows=num_rows)

    def arrays(self) -> tuple[np.ndarray, ...]:
        return (self.ids,)

    def __str__(self) -> str:
        return f"{len(self.ids):,} tokens of {self.text_bytes:,} bytes, in {len(self):,} blocks of {self.block_tokens}"


def encode_texts(texts: Texts, tokenizer: Tokenizer, block_tokens: int) -> TextBlocks:
    """Turns texts into ids, as `Tokenizer.encode_lines` does, on all cores. Raises ValueError where there are none."""
    pieces = []
    for text in texts:
        lines = lines_of(text)
        while some := list(itertools.islice(lines, _ENCODED_AT_ONCE)):
            pieces.append(np.array(list(itertools.chain.from_iterable(tokenizer.encode_batch(some))), np.int32))
        pieces.append(np.array([tokenizer.end_id], np.int32))
    ids = np.concatenate(pieces)
    if len(ids) == len(texts):
        raise ValueError("expected text with tokens in it, got none")
    return TextBlocks(ids, block_tokens, sum(len(text.encode()) for text in texts))


def prompts_with_continuations(blocks: TextBlocks, tokenizer: Tokenizer, count: int) -> list[tuple[str, str]]:
    """The text of the first half of so many blocks, spread evenly, and that of the second half.

    A half that is no prompt is left out: what a cut leaves of a character is read again as up to three tokens a byte,
    which can be more than a block has room for.
    """
    places = [place * len(blocks) // count for place in range(min(count, len(blocks)))] if count else []
    halves = []
    for place in places:
        ids = blocks.ids[place * blocks.block_tokens : (place + 1) * blocks.block_tokens]
        first, second = (tokenizer.decode(half) for half in np.array_split(ids, 2))
        if len(tokenizer.encode(first)) < blocks.block_tokens:  # a start token comes before it
            halves.append((first, second))
    return halves
