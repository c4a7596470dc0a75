"""From texts to answers: requests are checked and turned into ids, cut into batches of few shapes, run, and read.

`tfm.pipeline.TextModel` is what a user calls.
"""

import dataclasses
import itertools
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np

from tfm.buckets import Buckets, Shape
from tfm.checks import several, whole_number
from tfm.config import ModelConfig
from tfm.decoding.beam import BeamSearch
from tfm.decoding.constraints import Constraints
from tfm.decoding.mbr import MinimumBayesRisk, rank_by_utility
from tfm.decoding.requests import Decoding, Made, generate_rows, stream_rows, traceable, width_of
from tfm.decoding.sampling import Greedy, Sampling
from tfm.nn.models import Model
from tfm.nn.params import Params
from tfm.pairs import check_lengths, check_texts
from tfm.text_constraints import encode_constraints, known_ids, rows_of
from tfm.tokenizer import Tokenizer

_MAX_SEED = 2**32 - 1

Ending = Literal["end", "limit", "stuck"]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the model made of one text."""

    text: str
    score: float
    """log P: the sum of the natural log-probabilities of all tokens generated, the end token included and a prefix not;
    the model's own, whatever constraints made of them."""
    tokens: list[int]
    """The ids of `text`, a prefix included, without the end token."""
    finished: bool
    """True where the end token came, also where constraints forced it (see `ending`); False where the limit of tokens
    cut the answer off."""
    token_scores: list[float] = dataclasses.field(default_factory=list)
    """The log-probabilities that `score` is the sum of: of each token after the prefix, the end token included."""
    search_score: float | None = None
    """What a search ranks answers by: of beam search log P / lp + β · cp, of samples `score`; None without a search."""
    ending: Ending = "end"
    """What ended it: the end token, the limit of tokens, or constraints that left no token to go on with, so that the
    end token came and some of them are not met. Of a partial answer, `limit` says that it goes on."""
    utility: float | None = None
    """The mean utility by which minimum Bayes risk chose it, in percent with chrF and BLEU; else None."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """Requests, checked, as ids."""

    sources: list[list[int]]
    """With the end token; empty in a language model."""
    prompts: list[list[int]]
    """The decoder's first tokens: the start token, in a language model the text, and a prefix."""
    asked_lengths: list[int]
    """How many of them are no part of the answer: all but the prefix."""
    seeds: np.ndarray
    places: np.ndarray
    """A text's random key comes from its seed and its place."""
    sampler: Decoding
    rules: Constraints | None
    batches: list["Batch"]


class Batch(NamedTuple):
    """Texts that are answered at once."""

    indices: list[int]
    shape: Shape
    limit: int
    """The most new tokens of each."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """A model with its tokenizers and the shapes that it is run in."""

    config: ModelConfig
    model: Model
    params: Params
    """As they are multiplied: see `tfm.nn.params.prepare_for_inference`."""
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    buckets: Buckets

    def ask(
        self,
        texts: Iterable[str],
        *,
        max_tokens: SupportsIndex | None,
        sampler: Decoding,
        seed: Any,
        constraints: Any,
        prefixes: Any,
        long_texts: Literal["error", "cut"],
    ) -> Asked:
        """Checks requests: see `TextModel.generate`."""
        texts = several("texts", texts)
        limit = self.checked_max_tokens(max_tokens)
        sampler = traceable(sampler, self.config)
        seeds, places = _seeds(seed, len(texts))
        sources, beginnings = self.inputs(texts, long_texts)
        prompts = self.prompts(beginnings, prefixes)
        rules = encode_constraints(constraints, len(texts), self.target_tokenizer, self.config)
        if self.config.is_language_model and isinstance(sampler, BeamSearch) and sampler.coverage is not None:
            raise ValueError("expected no coverage penalty for a language model: it has no source to be covered")
        batches = list(self._batches(sources, prompts, limit, width_of(sampler)))
        asked_lengths = list(map(len, beginnings))
        return Asked(sources, prompts, asked_lengths, seeds, places, sampler, rules, batches)

    def check_room(self, asked: Asked) -> None:
        """Raises NoRoomError, a ValueError, for the first text whose answer is to have more tokens than it may."""
        if asked.rules is not None:
            limits = np.zeros(len(asked.sources), np.int32)
            for batch in asked.batches:
                limits[batch.indices] = batch.limit
            asked.rules.check_room(limits, np.array([len(ids) for ids in asked.sources], np.int32))

    def checked_max_tokens(self, max_tokens: SupportsIndex | None) -> int | None:
        """A limit of tokens, if there is one. Raises ValueError for one that cannot be."""
        if max_tokens is None:
            return None
        number, most = whole_number(max_tokens), self.config.max_target_length
        if number is None or not 1 <= number <= most:
            raise ValueError(
                f"expected max_tokens from 1 to {most} (the model's max_target_length), got {max_tokens!r}"
            )
        return number

    @property
    def max_text_length(self) -> int:
        """The most tokens of a text: the longest source, or the longest target of a language model."""
        return self.config.max_target_length if self.config.is_language_model else self.config.max_source_length

    def text_length(self, text: str) -> int:
        """How many tokens a text has, the end token of a source, or the start token before a continued text, included.

        Raises ValueError for what the tokenizer has no ids for.
        """
        return len(self._text_ids([text])[0]) + 1

    def inputs(
        self, texts: Sequence[str], long_texts: Literal["error", "cut"] = "error"
    ) -> tuple[list[list[int]], list[list[int]]]:
        """What the model reads of each text: a source with its end token, and what stands before the answer.

        That is the start token, and in a language model, which has no source, the text.

        Raises:
            ValueError: for the first text that cannot be read.
        """
        check_texts(texts, "text")
        if long_texts not in ("error", "cut"):
            raise ValueError(f"expected long_texts 'error' or 'cut', got {long_texts!r}")
        continues, most = self.config.is_language_model, self.max_text_length
        limit = "max_target_length" if continues else "max_source_length"
        rows = self._text_ids(texts)
        long = [i for i, ids in enumerate(rows) if len(ids) >= most]
        if long_texts == "cut" and long:
            longest, first = max(len(rows[i]) for i in long) + 1, texts[long[0]]
            shown = first if len(first) <= 60 else f"{first[:59]}…"
            kept = max(most // 2, 1) if continues else most  # what is written needs room, too
            warnings.warn(
                f"{len(long)} of {len(texts)} texts cut to {kept} tokens, {'half ' * continues}the model's {limit}; "
                f"the longest had {longest}; the first is {shown!r}",
                stacklevel=_first_level_outside(),
            )
            for i in long:
                # an answer is to the beginning of a text, and a text is continued at its end
                rows[i] = rows[i][len(rows[i]) - kept + 1 :] if continues else rows[i][: most - 1]
        start, end = [self.config.start_id], [self.source_tokenizer.end_id]
        rows = [start + ids if continues else ids + end for ids in rows]
        check_lengths(rows, "text", most, limit, token="start" if continues else "end")
        return ([[]] * len(rows), rows) if continues else (rows, [start] * len(rows))

    def _text_ids(self, texts: Sequence[str]) -> list[list[int]]:
        if self.config.is_language_model:
            return [self.target_tokenizer.encode_lines(text) for text in texts]
        return self.source_tokenizer.encode_batch(list(texts))

    def prompts(self, beginnings: list[list[int]], prefixes: Any) -> list[list[int]]:
        """The decoder's first tokens for each text. Raises ValueError for the first prefix that cannot be one.

        Args:
            beginnings: see `inputs`.
            prefixes: what each answer begins with, if anything.
        """
        if prefixes is None:
            return beginnings
        given = several("prefixes", prefixes)
        if len(given) != len(beginnings):
            raise ValueError(f"expected a prefix for each of {len(beginnings)} texts, got {given!r}")
        encoded = known_ids("prefix", given, self.target_tokenizer)
        most = self.config.max_target_length
        for i, (begun, ids) in enumerate(zip(beginnings, encoded, strict=True)):
            if len(begun) + len(ids) > most:
                taken = "a start token" if len(begun) == 1 else f"a start token and {len(begun) - 1} of the text"
                raise ValueError(
                    f"expected prefixes of at most {most - len(begun)} tokens (the model's max_target_length {most}, "
                    f"{taken} among them), got {len(ids)} for text {i}"
                )
        return [begun + ids for begun, ids in zip(beginnings, encoded, strict=True)]

    def _batches(
        self, sources: list[list[int]], prompts: list[list[int]], max_tokens: int | None, width: int
    ) -> Iterator[Batch]:
        """Texts whose sources and prompts are padded alike, so that neither pads another's."""
        groups: dict[int, list[int]] = {}
        for i, ids in enumerate(prompts):
            groups.setdefault(self.buckets.prompt_length(len(ids)), []).append(i)
        for length, members in groups.items():
            lengths = [len(sources[i]) for i in members]
            for places, shape in self.buckets.batches(lengths, max_tokens, width, length):
                room = shape.capacity - length + 1
                limit = room if max_tokens is None else min(max_tokens, room)
                yield Batch([members[place] for place in places], shape, limit)

    def run(self, asked: Asked, batch: Batch) -> list[list[Answer]]:
        """Answers one batch: the answers to each of its texts, the best first."""
        made = generate_rows(*self._rows(asked, batch), capacity=batch.shape.capacity)
        is_search = not isinstance(asked.sampler, Greedy | Sampling)
        answers = self._read(made, asked, batch, is_search=is_search)
        if isinstance(asked.sampler, MinimumBayesRisk):
            return [_least_risk(asked.sampler, found) for found in answers]
        return answers

    def stream(self, asked: Asked) -> Iterator[list[Answer]]:
        """The answers to all texts after each token, batches side by side, until all have ended."""
        answers: list[Answer] = [Answer("", 0.0, [], finished=False, ending="limit")] * len(asked.sources)
        limits = [self._own_limits(asked, batch) for batch in asked.batches]
        streams = [stream_rows(*self._rows(asked, batch), capacity=batch.shape.capacity) for batch in asked.batches]
        for states in itertools.zip_longest(*streams):
            for batch, own_limits, made in zip(asked.batches, limits, states, strict=True):
                if made is None:  # all of its texts have their answers
                    continue
                found = self._read(made, asked, batch)
                for i, limit, (answer,) in zip(batch.indices, own_limits, found, strict=True):
                    if not answer.finished and len(answer.token_scores) < limit:
                        answer = _so_far(answer, answers[i].text)
                    answers[i] = answer
            yield list(answers)

    def _own_limits(self, asked: Asked, batch: Batch) -> list[int]:
        """The most new tokens of each text of a batch, as the rules cut them."""
        limits, indices = np.full(len(batch.indices), batch.limit, np.int32), batch.indices
        if asked.rules is None:
            return limits.tolist()
        lengths = np.array([len(asked.sources[i]) for i in indices], np.int32)
        rules = rows_of(asked.rules, indices, len(indices))
        return np.asarray(rules.cut(jnp.asarray(limits), jnp.asarray(lengths))).tolist()

    def warm(self, asked: Asked, shape: Shape) -> None:
        """Compiles for a shape, by running rows of nothing."""
        jax.block_until_ready(generate_rows(*self._rows(asked, Batch([], shape, 0)), capacity=shape.capacity))

    def _rows(self, asked: Asked, batch: Batch) -> tuple[Any, ...]:
        """What a batch is run with; rows beyond its texts hold one padding token and generate nothing.

        On many devices there are as many rows on each.
        """
        pieces = 1 if self.model.placement is None else self.model.placement.pieces("batch")
        rows, indices = -(-batch.shape.rows // pieces) * pieces, batch.indices
        padded = np.full((rows, batch.shape.source_length), self.config.pad_id, np.int32)
        prompt = np.full((rows, batch.shape.prompt_length), self.config.start_id, np.int32)
        nothing = min(batch.shape.source_length, 1)
        lengths, prompt_lengths = np.full(rows, nothing, np.int32), np.ones(rows, np.int32)
        for row, i in enumerate(indices):
            ids, begun = asked.sources[i], asked.prompts[i]
            padded[row, : len(ids)] = ids
            prompt[row, : len(begun)] = begun
            lengths[row], prompt_lengths[row] = len(ids), len(begun)
        limits, places, seeds = np.zeros(rows, np.int32), np.zeros(rows, np.int32), np.zeros(rows, np.uint32)
        limits[: len(indices)] = batch.limit
        places[: len(indices)] = asked.places[indices]
        seeds[: len(indices)] = asked.seeds[indices]
        rules = None if asked.rules is None else rows_of(asked.rules, indices, rows)
        sampler = asked.sampler
        if isinstance(sampler, MinimumBayesRisk):
            sampler = sampler.samples
        return (
            self.model, self.params, padded, lengths, prompt, prompt_lengths, limits, seeds, places, sampler, rules,
        )  # fmt: skip

    def _read(self, made: Made, asked: Asked, batch: Batch, *, is_search: bool = False) -> list[list[Answer]]:
        """The answers to each text of a batch."""
        made = jax.device_get(made)
        answers: list[list[Answer]] = [[] for _ in batch.indices]
        for row, (asked_at, found) in enumerate(zip(batch.indices, answers, strict=True)):
            prompt, asked_length = asked.prompts[asked_at], asked.asked_lengths[asked_at]
            begun, prefix = prompt[1:asked_length], prompt[asked_length:]
            there = np.flatnonzero(made.log_probs[row] != -np.inf)
            there = there if len(there) else np.zeros(1, int)  # nothing was found: an empty answer of score -inf
            lengths = made.lengths[row] - made.finished[row]
            ids = [prefix + made.tokens[row, i, : lengths[i]].tolist() for i in there]
            for i, tokens, text in zip(there, ids, self._texts_after(begun, ids), strict=True):
                finished = bool(made.finished[row, i])
                token_scores = made.token_log_probs[row, i, : made.lengths[row, i]].tolist()
                ending: Ending = "stuck" if made.unmet[row, i] else "end" if finished else "limit"
                score, rank = float(made.log_probs[row, i]), float(made.scores[row, i]) if is_search else None
                found.append(Answer(text, score, tokens, finished, token_scores, rank, ending))
        return answers

    def _texts_after(self, begun: list[int], rows: list[list[int]]) -> list[str]:
        """What each row adds to the text of the ids before it: some tokenizers make a space of what stands before."""
        before, *texts = self.target_tokenizer.decode_batch([begun, *(begun + ids for ids in rows)])
        return [text[len(before) :] for text in texts]


def _so_far(answer: Answer, before: str) -> Answer:
    """An answer that goes on: without a character of which bytes may be missing, and never less than it was before.

    Some tokenizers show several characters as broken while the last of them is.
    """
    text = answer.text.rstrip("\N{REPLACEMENT CHARACTER}")
    return dataclasses.replace(answer, text=text if text.startswith(before) else before)


def _least_risk(search: MinimumBayesRisk, samples: list[Answer]) -> list[Answer]:
    ranked = rank_by_utility([answer.text for answer in samples], search.utility)[: search.num_best]
    return [dataclasses.replace(samples[one.index], utility=one.expected_utility) for one in ranked]


def _seeds(seed: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Each text's seed and place: with one seed for all, the places tell them apart."""
    number = whole_number(seed)  # first: an array of no axes calls itself iterable
    if number is None and np.iterable(seed) and not isinstance(seed, str | bytes):
        given = list(seed)
        if len(given) != count:
            raise ValueError(f"expected a seed for each of {count} texts, got {len(given)}")
        numbers, places = [whole_number(one) for one in given], np.zeros(count, np.int32)
    else:
        given = [seed] * max(count, 1)
        numbers, places = [number] * len(given), np.arange(count, dtype=np.int32)
    for number, one in zip(numbers, given, strict=True):
        if number is None or not 0 <= number <= _MAX_SEED:
            raise ValueError(f"expected a whole number from 0 to {_MAX_SEED} as seed, got {one!r}")
    return np.array(numbers[:count], np.uint32), places


def _first_level_outside() -> int:
    """The `stacklevel` at which a warning of this package names its caller's line, however deep it arises."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "tfm":
        level, frame = level + 1, frame.f_back
    return level
