"""The few shapes that requests are run in: XLA compiles for shapes, so they must not be as many as requests.

A source is padded to its bucket, a power of two from 16 up to the model's limit; sources of one bucket are batched, and
the batch padded with empty rows to a power of two. The cache has room for 2·S + 32 target tokens, S being the padded
source, and only a larger `max_tokens` asks for more, in powers of two. What the decoder reads first, a prefix or the
text that a language model is to continue, is padded to a power of two, too, or to an eighth of the longest target where
that is less. A language model has no source, and the padded text takes its place in the rules above.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from tfm.config import ModelConfig

_SHORTEST_SOURCE = 16


@dataclasses.dataclass(frozen=True, order=True)
class Shape:
    """What one compilation serves."""

    rows: int
    source_length: int
    capacity: int
    """Target tokens: those read, from the start token on, and those generated, to the last one, are as many."""
    prompt_length: int = 1
    """What the decoder's first tokens are padded to, the start token among them."""


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The shapes for one model.

    Args:
        config: its longest source and target limit them.
        max_batch: the most rows of a batch, rounded down to a power of two.
        max_batch_tokens: the most source and target tokens of a batch, padding and all hypotheses of a row counted; but
            one row always is a batch.
    """

    config: ModelConfig
    max_batch: int
    max_batch_tokens: int

    def batches(
        self, lengths: Sequence[int], max_tokens: int | None, width: int, prompt_length: int = 1
    ) -> Iterator[tuple[list[int], Shape]]:
        """Groups sources of one bucket, the longest first, so that they also end at about the same time.

        Args:
            lengths: of the sources in tokens, end token included.
            max_tokens: the most new tokens; None: as many as a bucket has room for.
            width: hypotheses that are followed at once for each source.
            prompt_length: what the decoder's first tokens are padded to; see `prompt_length`.

        Returns:
            The indices of each batch's sources, and its shape.
        """
        buckets: dict[int, list[int]] = {}
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            buckets.setdefault(self._source_length(lengths[i]), []).append(i)
        for source_length, members in buckets.items():
            room = self._room(source_length, prompt_length, max_tokens)
            capacity = min(room + prompt_length - 1, self.config.max_target_length)
            start = 0
            for size in _cut(len(members), self._most_rows(source_length, capacity, width)):
                yield members[start : start + size], Shape(power_of_two(size), source_length, capacity, prompt_length)
                start += size

    def pairs(self, lengths: Sequence[tuple[int, int]]) -> Iterator[tuple[list[int], Shape]]:
        """Groups pairs of a source and a given target, each padded to a bucket of its own, the longest first.

        Args:
            lengths: of the sources and their targets in tokens, end tokens included.

        Returns:
            The indices of each batch's pairs, and its shape, whose capacity is what targets are padded to.
        """
        padded: dict[tuple[int, int], list[int]] = {}
        for i in sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True):
            source_length, target_length = lengths[i]
            target_length = min(max(power_of_two(target_length), _SHORTEST_SOURCE), self.config.max_target_length)
            padded.setdefault((self._source_length(source_length), target_length), []).append(i)
        for (source_length, target_length), members in padded.items():
            start = 0
            for size in _cut(len(members), self._most_rows(source_length, target_length, 1)):
                yield members[start : start + size], Shape(power_of_two(size), source_length, target_length)
                start += size

    def shapes(self, sizes: Iterable[int], lengths: Iterable[int], max_tokens: int | None, width: int) -> list[Shape]:
        """Every shape of requests for so many texts of one bucket, so long, with `max_tokens` or fewer.

        The lengths are those of sources or, in a language model, of the texts that it continues, start token included.
        """
        sizes = list(sizes)
        if self.config.is_language_model:
            padded = {(0, self.prompt_length(length)) for length in lengths}
        else:
            padded = {(self._source_length(length), 1) for length in lengths}
        shapes = {
            Shape(power_of_two(rows), source_length, capacity, prompt_length)
            for source_length, prompt_length in padded
            for capacity in self._capacities(source_length, prompt_length, max_tokens)
            for size in sizes
            for rows in _cut(size, self._most_rows(source_length, capacity, width))
        }
        return sorted(shapes)

    def prompt_length(self, length: int) -> int:
        """What the decoder's first tokens are padded to, the start token among them."""
        most = self.config.max_target_length
        eighth = max(most // 8, 1)
        return min(power_of_two(length), -(-length // eighth) * eighth, most)

    def _source_length(self, length: int) -> int:
        """What a source of this length is padded to."""
        return min(max(power_of_two(length), _SHORTEST_SOURCE), self.config.max_source_length)

    def _room(self, source_length: int, prompt_length: int, max_tokens: int | None) -> int:
        """New tokens that the cache has room for beside a text padded to such a length."""
        text_length = max(prompt_length, _SHORTEST_SOURCE) if self.config.is_language_model else source_length
        room = 2 * text_length + 32
        if max_tokens is not None and max_tokens > room:
            room = power_of_two(max_tokens)
        return min(room, self.config.max_target_length)

    def _capacities(self, source_length: int, prompt_length: int, max_tokens: int | None) -> Iterator[int]:
        """Every capacity that requests of up to `max_tokens` have."""
        last, room = (self._room(source_length, prompt_length, tokens) for tokens in (max_tokens, None))
        rooms = {last}
        while room < last:
            rooms.add(room)
            room = self._room(source_length, prompt_length, room + 1)
        yield from sorted({min(room + prompt_length - 1, self.config.max_target_length) for room in rooms})

    def _most_rows(self, source_length: int, capacity: int, width: int) -> int:
        within = min(self.max_batch, self.max_batch_tokens // (source_length + width * capacity))
        return 1 << (max(within, 1).bit_length() - 1)


def power_of_two(number: int) -> int:
    """The least power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def _cut(number: int, most: int) -> list[int]:
    """Sizes of the batches that so many sources are cut into."""
    full, rest = divmod(number, most)
    return [most] * full + [rest] * (rest > 0)
