"""The tasks of `benchmarks.lineage`: two that are made by a rule, and the CMU Pronouncing Dictionary."""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

from train.tasks import Examples, load_task

SYMBOLS = "abcdefghij"
SHORTEST, LONGEST = 5, 60


@dataclasses.dataclass(frozen=True)
class Task:
    """Pairs of texts whose tokens stand between spaces, letters of words too: one vocabulary serves both sides."""

    max_tokens: int
    """Of a source and of a target, end token included."""
    groups: tuple[tuple[int, int], ...]
    """Ranges of source lengths, both ends included, that errors are counted in."""


TASKS = {
    "reversal": Task(64, ((5, 15), (16, 25), (26, 39), (40, 60))),
    "sorting": Task(64, ((5, 15), (16, 25), (26, 39), (40, 60))),
    "cmudict": Task(40, ((1, 5), (6, 8), (9, 11), (12, 39))),
}


def source_length(source: str) -> int:
    """In symbols, or letters."""
    return len(source.split())


def write_pairs(task: str, folder: Path, *, train_pairs: int, test_pairs: int, longest: int = LONGEST) -> None:
    """Makes train.tsv and test.tsv in the folder, unless they are there; they are the same each time.

    Strings are drawn from all strings of lengths 5 to `longest`, each length as often as any other, so no two of
    moderate length are the same; test strings have up to 60 symbols always.
    """
    if (folder / "test.tsv").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    if task == "cmudict":
        splits = load_task("cmudict")
        train, test = (
            [(" ".join(word), phones) for word, phones in examples.pairs()]
            for examples in (splits.train, _some(splits.test, test_pairs))
        )
    else:
        draw = random.Random(f"{task} of up to {longest}")
        train = [_RULES[task](draw, draw.randint(SHORTEST, longest)) for _ in range(train_pairs)]
        test = [_RULES[task](draw, SHORTEST + i % (LONGEST - SHORTEST + 1)) for i in range(test_pairs)]
    for name, pairs in (("train", train), ("test", test)):
        unfinished = folder / f"{name}.part"
        unfinished.write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
        unfinished.rename(folder / f"{name}.tsv")


def _some(examples: Examples, number: int) -> Examples:
    """So many rows, drawn once and for all, or all where there are fewer."""
    rows = random.Random(0).sample(range(len(examples)), min(number, len(examples)))
    return Examples([examples.sources[row] for row in rows], [examples.references[row] for row in rows])


def _reversal(draw: random.Random, length: int) -> tuple[str, str]:
    symbols = draw.choices(SYMBOLS, k=length)
    return " ".join(symbols), " ".join(reversed(symbols))


def _sorting(draw: random.Random, length: int) -> tuple[str, str]:
    digits = draw.choices("0123456789", k=length)
    return " ".join(digits), " ".join(sorted(digits))


_RULES: dict[str, Callable[[random.Random, int], tuple[str, str]]] = {"reversal": _reversal, "sorting": _sorting}
