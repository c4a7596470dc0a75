"""Lines to answers, and pairs to scores, while they come: what makes `tfm generate` and `tfm score` filters."""

import gzip
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tfm.answering import Answer
from tfm.decoding.constraints import NoRoomError
from tfm.decoding.requests import Decoding
from tfm.decoding.sampling import Sampler
from tfm.pairs import PairScore
from tfm.pipeline import TextModel
from tfm.text_constraints import TextConstraints
from train.reading import GZIP_MAGIC

LINES_AT_ONCE = 64

Group = tuple[int, Sequence[bytes | str]]
"""Lines, and the number of the first of them, from 1."""

Row = tuple[str, Sequence[str]]
"""A text, and the answers to it."""


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
    long_texts: Literal["error", "cut"] = "error",
) -> Iterator[list[tuple[str, list[Answer]]]]:
    """Answers group by group, in order, the best answer to a line first; none to a blank line.

    What comes before a line that cannot be answered is still answered.

    Args:
        model: answers.
        groups: of `group_lines`, or texts.
        name: of a line, before its number in an error: "standard input, line".
        max_tokens: see `TextModel.generate`.
        sampler: the same; a search among several gives its `num_best` answers.
        seed: the same; a line's random key follows from the seed and the line's number.
        constraints: the same, for every line.
        prefix: what each answer begins with.
        long_texts: see `TextModel.generate`.

    Raises:
        ValueError: a line that is not UTF-8, that has more tokens than the model accepts, or for which the model gives
            no finite probability to anything, by its number.
    """
    for first, lines in groups:
        texts, problem = _answerable(model, first, lines, long_texts)
        asked = [i for i, text in enumerate(texts) if text.strip()]

        def answer(asked: list[int], texts: list[str] = texts, first: int = first) -> list[list[Answer]]:
            return model.generate_n_best(
                [texts[i] for i in asked],
                max_tokens=max_tokens,
                sampler=sampler,
                seed=[_line_seed(seed, first + i) for i in asked],
                constraints=constraints,
                prefixes=[prefix] * len(asked) if prefix else None,
                long_texts=long_texts,
            )

        try:
            given = answer(asked)
        except NoRoomError as error:  # found before anything was answered
            texts, problem = texts[: asked[error.row]], f"{first + asked[error.row]}: {error.without_row}"
            asked = asked[: error.row]
            given = answer(asked)
        answers = dict(zip(asked, given, strict=True))
        if broken := [i for i, (best, *_) in answers.items() if not math.isfinite(best.score)]:
            texts, problem = texts[: broken[0]], f"{first + broken[0]}: the model's answer has no finite probability"
        yield [(text, answers.get(i, [])) for i, text in enumerate(texts)]
        if problem is not None:
            raise ValueError(f"{name} {problem}")


def stream_lines(
    model: TextModel,
    groups: Iterable[Group],
    *,
    name: str,
    sampler: Sampler,
    seed: int,
    prefix: str = "",
    long_texts: Literal["error", "cut"] = "error",
    **options: Any,
) -> Iterator[str]:
    """The answers of `answer_lines`, a line after the other, in pieces as they come; each ends with a line feed.

    Arguments and errors are those of `answer_lines`.
    """
    for first, lines in groups:
        texts, problem = _answerable(model, first, lines, long_texts)
        for number, text in enumerate(texts, first):
            shown = ""
            if text.strip():
                line_seed, prefixes = [_line_seed(seed, number)], [prefix] if prefix else None
                try:
                    states = model.stream(
                        [text], sampler=sampler, seed=line_seed, prefixes=prefixes, long_texts=long_texts, **options
                    )
                except NoRoomError as error:
                    raise ValueError(f"{name} {number}: {error.without_row}") from error
                for (answer,) in states:
                    if not math.isfinite(answer.score):
                        yield "\n" * bool(shown)
                        raise ValueError(f"{name} {number}: the model's answer has no finite probability")
                    whole = " ".join(answer.text.split("\n"))
                    yield whole.removeprefix(shown)
                    shown = whole
            yield "\n"
        if problem is not None:
            raise ValueError(f"{name} {problem}")


def _line_seed(seed: int, number: int) -> int:
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def text_rows(groups: Iterable[Group], *, name: str) -> Iterator[Sequence[Row]]:
    """The rows of lines that are texts, each to be scored as what follows nothing.

    Args:
        groups: of `group_lines`.
        name: of a line, before its number in an error.

    Raises:
        ValueError: a line that is not UTF-8, by its number, after the rows before it were given.
    """
    for first, lines in groups:
        rows: list[Row] = []
        for number, line in enumerate(lines, first):
            try:
                rows.append(("", [line if isinstance(line, str) else _decode(line, number)]))
            except UnicodeDecodeError as error:
                yield rows
                raise ValueError(f"{name} {number}: expected UTF-8, got other bytes ({error})") from error
        yield rows


def pair_rows(groups: Iterable[Group], *, name: str) -> Iterator[Sequence[Row]]:
    """The rows of lines `source<TAB>target[<TAB>further target]`; a blank line is a pair without text.

    Args:
        groups: of `group_lines`.
        name: of a line, before its number in an error.

    Raises:
        ValueError: a line that is not UTF-8 or has no tab, by its number, after the rows before it were given.
    """
    for first, lines in groups:
        rows: list[Row] = []
        problem = None
        for number, line in enumerate(lines, first):
            try:
                source, *targets = (line if isinstance(line, str) else _decode(line, number)).split("\t")
            except UnicodeDecodeError as error:
                problem = f"{number}: expected UTF-8, got other bytes ({error})"
                break
            if source.strip() and not targets:
                problem = f"{number}: expected source<TAB>target, got no tab in {source!r:.60}"
                break
            rows.append((source, targets or [""]))
        yield rows
        if problem is not None:
            raise ValueError(f"{name} {problem}")


def score_rows(
    model: TextModel, groups: Iterable[Sequence[Row]], *, name: str
) -> Iterator[list[tuple[str, str, PairScore]]]:
    """Scores every answer of every row, group by group, in order.

    What comes before a row that cannot be scored is still scored.

    Args:
        model: scores.
        groups: rows, as they come.
        name: of a row, before its number in an error.

    Raises:
        ValueError: a text or an answer that has more tokens than the model accepts, or whose probability is not finite,
            by the number of its row.
    """
    number = 0
    for rows in groups:
        pairs: list[tuple[int, str, str]] = []
        problem = None
        for source, targets in rows:
            number += 1
            problem = _too_long(model, source, targets)
            if problem is not None:
                break
            pairs += [(number, source, target) for target in targets]
        scores = model.score([source for _, source, _ in pairs], [target for _, _, target in pairs])
        scored = []
        for (row, source, target), one in zip(pairs, scores, strict=True):
            if not math.isfinite(one.score):
                number, problem = row, "the model gives no finite probability"
                break
            scored.append((source, target, one))
        yield scored
        if problem is not None:
            raise ValueError(f"{name} {number}: {problem}")


def _too_long(model: TextModel, source: str, targets: Sequence[str]) -> str | None:
    """What is wrong with the lengths of a row, if anything is."""
    if (length := model.text_length(source)) > model.max_text_length:
        return f"expected at most {model.max_text_length} tokens, the model's longest source, got {length}"
    most, continues = model.config.max_target_length, model.config.is_language_model
    for target in targets:
        length = (
            len(model.target_tokenizer.encode_lines(target))
            if continues
            else len(model.target_tokenizer.encode(target)) + 1
        )
        if length > most:
            return f"expected at most {most} tokens, the model's longest target, got {length}"
    return None


def _answerable(
    model: TextModel, first: int, lines: Sequence[bytes | str], long_texts: Literal["error", "cut"]
) -> tuple[list[str], str | None]:
    """The texts up to the first that cannot be answered, and what is wrong with that one, beginning with its number."""
    texts: list[str] = []
    most = model.max_text_length
    what = "text, start token included" if model.config.is_language_model else "source"
    for number, line in enumerate(lines, first):
        try:
            text = line if isinstance(line, str) else _decode(line, number)
        except UnicodeDecodeError as error:
            return texts, f"{number}: expected UTF-8, got other bytes ({error})"
        length = model.text_length(text)
        if length > most and long_texts == "error":
            return texts, f"{number}: expected at most {most} tokens, the model's longest {what}, got {length}"
        texts.append(text)
    return texts, None


def _decode(line: bytes, number: int) -> str:
    """A byte order mark may stand before the first line."""
    return line.removesuffix(b"\r").decode("utf-8-sig" if number == 1 else "utf-8")
