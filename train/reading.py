"""Files to pairs of text, or to lines, with errors that name the file, the line and what is wrong.

A file is UTF-8, with or without a byte order mark, plain or gzipped (known by its first bytes, or by `.gz`). Lines end
with LF or CRLF; a file without any LF is split at CR. Nothing else ends a line: U+2028, U+0085, a form feed and a CR
within a line are part of the text, for a reader that splits at them pulls line-aligned corpora apart.
"""

import contextlib
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from train.config import Format
from train.tasks import Examples

GZIP_MAGIC = b"\x1f\x8b"
_UNDECODED = re.compile("[\udc80-\udcff]")  # what `surrogateescape` makes of a byte that is not UTF-8
_SURROGATE = re.compile("[\ud800-\udfff]")

_PLAIN_TEXT = "; plain text is for data.format = 'text', as in the recipe language-model"

_Row = tuple[str, list[str]]


class DataError(ValueError):
    """A file that cannot be read as text, or as pairs of text."""

    def __init__(self, path: str | Path, problem: str, line: int | None = None) -> None:
        super().__init__(f"{path}: {problem}" if line is None else f"{path}, line {line}: {problem}")


def read_examples(
    paths: Sequence[str | Path],
    format: Format = "auto",
    source_field: str = "source",
    target_field: str = "target",
) -> Examples:
    r"""Reads pairs of text, one row a line, in the order of the file.

    Text is taken as it stands, surrounding blanks included. A blank line, an empty source and an empty target are rows
    like others: they are counted when they are encoded (`train.data.encode_examples`). Empty answers beside others are
    no answers.

    Args:
        paths: two files for line-aligned text (source, target), else one.
        format: `lines`; `tsv` with `source<TAB>target[<TAB>further right answers]` and no quoting; `jsonl` with one
            object a line; `auto` goes by the number of paths, then by the ending (.jsonl and .json, else TSV).
        source_field: key of the source text in JSONL.
        target_field: key of the target in JSONL: a string, or a list of strings that are all right.

    Raises:
        DataError: a file cannot be read, is empty, is not UTF-8 or not whole, files have different numbers of lines,
            or a line does not hold what the format wants.
        ValueError: the number of paths does not fit the format.
    """
    if format == "auto":
        is_jsonl = len(paths) == 1 and str(paths[0]).removesuffix(".gz").endswith((".jsonl", ".json"))
        format = "lines" if len(paths) == 2 else "jsonl" if is_jsonl else "tsv"
    wanted = 2 if format == "lines" else 1
    if len(paths) != wanted:
        names = "two line-aligned files (source, target)" if wanted == 2 else f"one file for format {format!r}"
        raise ValueError(f"expected {names}, got {len(paths)}: {', '.join(map(str, paths))}")
    if format == "lines":
        rows = _read_aligned(*paths)
    elif format == "tsv":
        rows = _read_tsv(paths[0])
    else:
        rows = _read_jsonl(paths[0], source_field, target_field)
    sources, references = [], []
    for source, targets in rows:
        sources.append(source)
        references.append([target for target in targets if target] or [""])
    return Examples(sources, references)


def _read_aligned(source_path: str | Path, target_path: str | Path) -> Iterator[_Row]:
    source_lines, target_lines = 0, 0
    for source, target in itertools.zip_longest(read_lines(source_path), read_lines(target_path)):
        source_lines += source is not None
        target_lines += target is not None
        if source_lines == target_lines:
            yield source, [target]
    if source_lines != target_lines:
        problem = (
            f"expected as many lines as in {target_path}, which has {target_lines}, got {source_lines}; the first line "
            f"without a partner is {min(source_lines, target_lines) + 1}"
        )
        raise DataError(source_path, problem)


def _read_tsv(path: str | Path) -> Iterator[_Row]:
    for number, line in enumerate(read_lines(path), 1):
        source, *targets = line.split("\t")
        if line.strip() and not targets:
            raise DataError(path, f"expected source<TAB>target, got no tab in {_shortened(line)}{_PLAIN_TEXT}", number)
        yield source, targets


def _read_jsonl(path: str | Path, source_field: str, target_field: str) -> Iterator[_Row]:
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            yield "", [""]
            continue
        try:
            record = json.loads(line, object_pairs_hook=_once_each)
        except json.JSONDecodeError as error:
            raise DataError(path, f"not JSON: {error.msg} at column {error.colno}", number) from None
        except (ValueError, RecursionError) as error:  # endless digits, endless nesting, a key twice
            raise DataError(path, f"not JSON that can be read: {error}", number) from None
        if not isinstance(record, dict):
            raise DataError(path, f"expected a JSON object, got {_shortened(line)}", number)
        for field in (source_field, target_field):
            if field not in record:
                got = ", ".join(map(repr, record)) or "no field"
                raise DataError(path, f"expected the field {field!r}, got {got}", number)
        source, target = record[source_field], record[target_field]
        if not isinstance(source, str):
            raise DataError(path, f"expected a string in {source_field!r}, got {_json(source)}", number)
        targets = target if isinstance(target, list) else [target]
        if not all(isinstance(answer, str) for answer in targets):
            got = _json(target)
            raise DataError(path, f"expected a string or a list of strings in {target_field!r}, got {got}", number)
        if any(_SURROGATE.search(text) for text in (source, *targets)):
            raise DataError(path, "expected Unicode text, got half of a surrogate pair (\\ud800 to \\udfff)", number)
        yield source, targets


def read_lines(path: str | Path) -> Iterator[str]:
    """The lines of a file, without their ends. Raises DataError, after the last good line."""
    number = 0
    if not str(path):  # which would be the working directory
        raise DataError("''", "expected the name of a file, got an empty one")
    try:
        with contextlib.closing(_raw_lines(path)) as lines:
            for number, line in enumerate(lines, 1):
                # Decoding never fails; what did not decode is found here, where the line's number is known.
                if not line.isascii() and (bad := _UNDECODED.search(line)):
                    byte = ord(bad.group()) - 0xDC00
                    problem = f"not UTF-8: byte 0x{byte:02x} after {bad.start()} characters"
                    raise DataError(path, problem, number)
                yield line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(path, f"the gzip data cannot be read on after line {number}: {error}") from None
    except OSError as error:
        raise DataError(path, f"expected a file that can be read, got: {error.strerror}") from None
    if number == 0:
        raise DataError(path, "expected text, got an empty file")


def _raw_lines(path: str | Path) -> Generator[str, None, None]:
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(Path(path).open("rb"))
        zipped = str(path).endswith(".gz") or file.peek(2)[:2] == GZIP_MAGIC
        binary = stack.enter_context(gzip.GzipFile(fileobj=file)) if zipped else file
        text = io.TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline="\n")
        stack.enter_context(text)
        ends_with_lf = False
        for line in text:
            if line.endswith("\n"):
                ends_with_lf = True
                yield line.removesuffix("\n").removesuffix("\r")
            elif ends_with_lf:
                yield line
            else:  # the whole file
                yield from line.removesuffix("\r").split("\r")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of two values for one key, nobody knows which is meant."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise ValueError(f"expected each key once in an object, got {_shortened(twice)} twice")
    return found


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _json(value: Any) -> str:
    return _shortened(json.dumps(value, ensure_ascii=False))
