"""Lines to answers while they come: what makes `tfm generate` a filter."""

import gzip
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfm.pipeline import Answer, Decoding, TextModel
from tfm.text_constraints import TextConstraints
from train.reading import GZIP_MAGIC

LINES_AT_ONCE = 64

Group = tuple[int, Sequence[bytes | str]]
"""Lines, and the number of the first of them, from 1."""


def file_lines(path: Path) -> Iterator[Group]:
    """The lines of a file, plain or gzipped, in whole groups; see `group_lines`.

    Raises:
        ValueError: gzip data that is damaged or cut off.
    """
    with path.open("rb") as plain:
        zipped = path.suffix == ".gz" or plain.peek(2)[:2] == GZIP_MAGIC
        try:
            yield from group_lines(gzip.GzipFile(fileobj=plain) if zipped else plain, whole_groups=True)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: the gzip data cannot be read on: {error}") from error


def group_lines(stream: Any, *, whole_groups: bool) -> Iterator[Group]:
    r"""Groups the lines of a byte stream, at most `LINES_AT_ONCE`, each group as soon as the stream has given it.

    Lines end with \n or \r\n, and with nothing else.

    Args:
        stream: has `read1`.
        whole_groups: waits until a group is full or the stream ends.
    """
    number, rest = 1, b""
    lines: list[bytes] = []
    while block := stream.read1(1 << 16):
        *whole, rest = (rest + block).split(b"\n")
        lines += whole
        while len(lines) >= (LINES_AT_ONCE if whole_groups else 1):
            group, lines = lines[:LINES_AT_ONCE], lines[LINES_AT_ONCE:]
            yield number, group
            number += len(group)
    lines += [rest] if rest else []
    for start in range(0, len(lines), LINES_AT_ONCE):
        yield number + start, lines[start : start + LINES_AT_ONCE]


def answer_lines(
    model: TextModel,
    groups: Iterable[Group],
    *,
    name: str,
    max_tokens: int | None,
    sampler: Decoding,
    seed: int,
    constraints: TextConstraints | None = None,
    prefix: str = "",
) -> Iterator[list[tuple[str, list[Answer]]]]:
    """Answers group by group, in order, the best answer to a line first; none to a blank line.

    What comes before a line that cannot be answered is still answered.

    Args:
        model: answers.
        groups: of `group_lines`, or texts.
        name: of a line, before its number in an error: "standard input, line".
        max_tokens: see `TextModel.generate`.
        sampler: the same; a beam search gives its `num_best` answers.
        seed: the same; a line's key follows from the seed, its group's number and its place in the group.
        constraints: the same, for every line.
        prefix: what each answer begins with.

    Raises:
        ValueError: a line that is not UTF-8, that has more tokens than the model accepts, or for which the model gives
            no finite probability to anything, by its number.
    """
    for index, (first, lines) in enumerate(groups):
        group_seed = seed if index == 0 else int(np.random.SeedSequence([seed, index]).generate_state(1)[0])
        texts, problem = _answerable(model, first, lines)
        asked = [i for i, text in enumerate(texts) if text.strip()]
        given = model.generate_n_best(
            [texts[i] for i in asked],
            max_tokens=max_tokens,
            sampler=sampler,
            seed=group_seed,
            constraints=constraints,
            prefixes=[prefix] * len(asked) if prefix else None,
        )
        answers = dict(zip(asked, given, strict=True))
        if broken := [i for i, (best, *_) in answers.items() if not math.isfinite(best.score)]:
            texts, problem = texts[: broken[0]], f"{first + broken[0]}: the model's answer has no finite probability"
        yield [(text, answers.get(i, [])) for i, text in enumerate(texts)]
        if problem is not None:
            raise ValueError(f"{name} {problem}")


def _answerable(model: TextModel, first: int, lines: Sequence[bytes | str]) -> tuple[list[str], str | None]:
    """The texts up to the first that cannot be answered, and what is wrong with that one, beginning with its number."""
    texts: list[str] = []
    most = model.config.max_source_length
    for number, line in enumerate(lines, first):
        try:
            text = line if isinstance(line, str) else _decode(line, number)
        except UnicodeDecodeError as error:
            return texts, f"{number}: expected UTF-8, got other bytes ({error})"
        length = len(model.source_tokenizer.encode(text)) + 1
        if length > most:
            return texts, f"{number}: expected at most {most} tokens, the model's longest source, got {length}"
        texts.append(text)
    return texts, None


def _decode(line: bytes, number: int) -> str:
    """A byte order mark may stand before the first line."""
    return line.removesuffix(b"\r").decode("utf-8-sig" if number == 1 else "utf-8")
