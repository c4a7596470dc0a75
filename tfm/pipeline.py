"""Text to text: a model, its parameters and its tokenizers in one object.

    model = tfm.load("runs/g2p/best")
    model("transformer")                                  # one text in, one out
    model(["a", "b"], max_tokens=20)                      # many, in the order given
    model.generate(["a"], sampler=Sampling(), seed=1)     # with scores, ids and whether the model ended by itself
    model.generate_n_best(["a"], sampler=BeamSearch(width=8, num_best=5))
    model.generate(["a"], prefixes=["b"], constraints=TextConstraints(required_phrases=["c d"]))
    model.score(["a"], ["b"])                             # how likely given answers are
    model.align(["a"], ["b"])                             # which words of a text they look at

XLA compiles for shapes, so shapes are few: see `tfm.buckets`. All else is traced: lengths, `max_tokens`, the sampler's
numbers, the seed, the parameters.

An answer depends on its text, its limit and, where tokens are drawn, its own random key, and beyond rounding never on
the texts beside it: what a source is padded to follows from its own length alone. But products of another number of
rows are summed in another order: a score may differ by 1e-4 in float32 and by 3e-2 in bfloat16, and of two tokens that
are as near to each other, the other may come.
"""

import copy
import dataclasses
import operator
import os
import typing
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, SupportsIndex, overload

import jax
import numpy as np

from tfm.buckets import Buckets, Shape, power_of_two
from tfm.config import ModelConfig
from tfm.decoding.beam import BeamSearch
from tfm.decoding.constraints import Constraints
from tfm.decoding.requests import Decoding, Made, generate_rows, traceable, width_of
from tfm.decoding.sampling import Greedy
from tfm.nn.attention import Kernel
from tfm.nn.layers import compute_dtype
from tfm.nn.params import Params, Weights, prepare_for_inference
from tfm.nn.transformer import Model, build_model
from tfm.pairs import Alignment, PairScore, Side, align_pairs, check_lengths, check_texts, score_pairs
from tfm.store import check_params, check_tokenizers, load_model, save_model
from tfm.text_constraints import EachText, TextConstraints, encode_constraints, known_ids, rows_of
from tfm.tokenizer import Tokenizer

_MAX_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the model made of one text."""

    text: str
    score: float
    """Sum of the log-probabilities, natural, of all tokens generated, the end token included and a prefix not; the
    model's own, whatever constraints made of them."""
    tokens: list[int]
    """The ids of `text`, a prefix included, without the end token."""
    finished: bool
    """True where the model ended by itself, False where the limit of tokens cut it off."""


def load(
    folder: str | os.PathLike[str],
    *,
    weights: str = "auto",
    cache: str = "auto",
    attention_kernel: Kernel = "auto",
    max_batch: int = 64,
    max_batch_tokens: int = 16_384,
) -> "TextModel":
    """Loads a model folder, as training and `save_model` write it, onto the default device.

    Args:
        folder: the model folder.
        weights: see `TextModel`, as for the rest.
        cache: what keys and values lie in while answers are made.
        attention_kernel: see `tfm.nn.attention`.
        max_batch: the most texts in one batch.
        max_batch_tokens: the most tokens in one batch.

    Raises:
        ValueError: what is wrong with the folder.
    """
    stored = load_model(folder)
    return TextModel(
        stored.config,
        stored.params,
        stored.source_tokenizer,
        stored.target_tokenizer,
        weights=weights,
        cache=cache,
        attention_kernel=attention_kernel,
        max_batch=max_batch,
        max_batch_tokens=max_batch_tokens,
    )


class TextModel:
    """A model that takes and gives text. Nothing in it changes after it is made, so threads may share it."""

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        source_tokenizer: Tokenizer,
        target_tokenizer: Tokenizer,
        *,
        weights: str = "auto",
        cache: str = "auto",
        attention_kernel: Kernel = "auto",
        max_batch: int = 64,
        max_batch_tokens: int = 16_384,
    ) -> None:
        """Joins the parts.

        Args:
            config: the model.
            params: its parameters, float32; kept as they are, and copied to the default device in the form that
                `weights` says.
            source_tokenizer: turns texts into source ids, to which its end token is added.
            target_tokenizer: turns generated ids into text.
            weights: what matrices lie in on the device and are multiplied in: "float32", "bfloat16", "auto" for the
                faster of the two here, or "int8", with the vectors that they meet rounded to 8 bits as well.
            cache: what keys and values lie in while an answer is made: "float32", "bfloat16", "int8" with a scale for
                each vector, or "auto" for what they are computed in, so that nothing is rounded. Scores that
                `generate` gives are then of the rounded ones; `score` and `align` have no cache.
            attention_kernel: see `tfm.nn.attention`.
            max_batch: the most texts in one batch, rounded down to a power of two. More are cut into several batches.
            max_batch_tokens: the most tokens in one batch, padded source and cache capacity together, which bounds the
                memory that a batch takes; but one text always is a batch.

        Raises:
            ValueError: weights or a cache that there are not, or parameters or tokenizers that do not belong to
                `config`.
        """
        for name, value in (("max_batch", max_batch), ("max_batch_tokens", max_batch_tokens)):
            if value < 1:
                raise ValueError(f"expected {name} of at least 1, got {value}")
        if weights not in ("auto", *typing.get_args(Weights)):
            raise ValueError(f"expected weights 'auto', 'float32', 'bfloat16' or 'int8', got {weights!r}")
        check_tokenizers(config, source_tokenizer, target_tokenizer)
        check_params(config, params)
        self.config = config
        self.params = params
        """As they were trained."""
        self.source_tokenizer = source_tokenizer
        self.target_tokenizer = target_tokenizer
        self.weights: Weights = "int8" if weights == "int8" else compute_dtype(weights)
        dtype = "auto" if weights == "int8" else weights
        self.model: Model = build_model(config, dtype=dtype, attention_kernel=attention_kernel, cache_dtype=cache)
        self.prepared_params = prepare_for_inference(params, self.weights)
        """The same on the device, as `weights` says: what answers are made with."""
        self._buckets = Buckets(config, max_batch, max_batch_tokens)

    def __repr__(self) -> str:
        config = self.config
        encoder = f"{config.encoder_layers}+" if config.architecture == "encoder-decoder" else ""
        layers = f"{encoder}{config.decoder_layers} layers"
        return f"TextModel({config.architecture}, {layers}, D {config.model_dim}, {self.weights})"

    @overload  # overlapping, because a str is an Iterable[str] too
    def __call__(  # type: ignore[overload-overlap]
        self,
        texts: str,
        *,
        max_tokens: SupportsIndex | None = ...,
        sampler: Decoding = ...,
        seed: SupportsIndex = ...,
        constraints: EachText | None = ...,
        prefixes: Sequence[str] | None = ...,
    ) -> str: ...

    @overload
    def __call__(
        self,
        texts: Iterable[str],
        *,
        max_tokens: SupportsIndex | None = ...,
        sampler: Decoding = ...,
        seed: SupportsIndex = ...,
        constraints: EachText | None = ...,
        prefixes: Sequence[str] | None = ...,
    ) -> list[str]: ...

    def __call__(
        self,
        texts: str | Iterable[str],
        *,
        max_tokens: SupportsIndex | None = None,
        sampler: Decoding = Greedy(),  # noqa: B008 - frozen and without state
        seed: SupportsIndex = 0,
        constraints: EachText | None = None,
        prefixes: Sequence[str] | None = None,
    ) -> str | list[str]:
        """The answer to one text, or the answers to several in the order given. Arguments are those of `generate`."""
        several = [texts] if isinstance(texts, str) else texts
        answers = self.generate(
            several, max_tokens=max_tokens, sampler=sampler, seed=seed, constraints=constraints, prefixes=prefixes
        )
        return answers[0].text if isinstance(texts, str) else [answer.text for answer in answers]

    def generate(
        self,
        texts: Iterable[str],
        *,
        max_tokens: SupportsIndex | None = None,
        sampler: Decoding = Greedy(),  # noqa: B008 - frozen and without state
        seed: SupportsIndex = 0,
        constraints: EachText | None = None,
        prefixes: Sequence[str] | None = None,
    ) -> list[Answer]:
        """Answers every text.

        Args:
            texts: any number of texts. An empty text is a source of nothing but the end token.
            max_tokens: the most tokens of an answer, end token included. None: 2·S + 32, S being the padded source,
                or the model's limit where that is less.
            sampler: picks the tokens; or a beam search, of which the best hypothesis is taken.
            seed: for a sampler that draws; each text's own random key comes from it and the text's place in `texts`.
            constraints: what may and must come, for all texts or for each its own. What they change compiles nothing,
                but which kinds of rules there are, and how many phrases and how long, to the next power of two.
            prefixes: what each answer begins with, of which `max_tokens` counts nothing; "" for nothing. A prefix and
                what follows have at most the model's `max_target_length` tokens, padding of the prefix to a power of
                two counted.

        Returns:
            One answer a text, in order.

        Raises:
            ValueError: an argument is out of range, or a text is not a `str` or is longer than the model accepts, or
                more is required of an answer than it may have tokens; it says which, before any text is answered.
        """
        answers = self.generate_n_best(
            texts, max_tokens=max_tokens, sampler=sampler, seed=seed, constraints=constraints, prefixes=prefixes
        )
        return [best for best, *_ in answers]

    def generate_n_best(
        self,
        texts: Iterable[str],
        *,
        max_tokens: SupportsIndex | None = None,
        sampler: Decoding = BeamSearch(num_best=4),  # noqa: B008 - frozen and without state
        seed: SupportsIndex = 0,
        constraints: EachText | None = None,
        prefixes: Sequence[str] | None = None,
    ) -> list[list[Answer]]:
        """Answers every text several times.

        Arguments and errors are those of `generate`.

        Returns:
            A list for each text, in order, never empty: of a beam search its `num_best` hypotheses, the best first, or
            all that it found, if those are fewer; of a sampler one answer.
        """
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise ValueError(f"expected several texts, got {texts!r}; put one text into a list")
        texts = list(texts)
        max_tokens = self._checked_max_tokens(max_tokens)
        sampler = traceable(sampler, self.config.target_vocab_size)
        number = _whole_number(seed)
        if number is None or not 0 <= number <= _MAX_SEED:
            raise ValueError(f"expected a whole number from 0 to {_MAX_SEED} as seed, got {seed!r}")
        sources, prompts = self._encode(texts), self._prompts(prefixes, len(texts))
        rules = encode_constraints(constraints, len(texts), self.target_tokenizer, self.config)
        batches = list(self._batches(sources, prompts, max_tokens, width_of(sampler)))
        if rules is not None:
            limits = np.zeros(len(texts), np.int32)
            for batch in batches:
                limits[batch.indices] = batch.limit
            rules.check_room(limits, np.array([len(ids) for ids in sources], np.int32))
        answers: list[list[Answer]] = [[]] * len(texts)
        for batch in batches:
            begun = [prompts[i] for i in batch.indices]
            made = self._run(batch, [sources[i] for i in batch.indices], begun, sampler, number, rules)
            for i, found in zip(batch.indices, self._answers(made, begun), strict=True):
                answers[i] = found
        return answers

    def score(self, texts: Iterable[str], answers: Iterable[str | Answer]) -> list[PairScore]:
        """How likely each answer is, by one pass over it and not one a token.

        Args:
            texts: any number of texts.
            answers: one for each text: a string, which ends with the end token, or what `generate` gave, whose own ids
                are scored as they are, to about its own score; but here the tokens of a prefix count like others.

        Returns:
            One score a pair, in order.

        Raises:
            ValueError: a text or an answer is not a `str` or is longer than the model accepts, or they are not as many;
                it says which, before any pair is scored.
        """
        return score_pairs(self.model, self.prepared_params, self._buckets, *self._pairs(texts, answers))

    def align(
        self, texts: Iterable[str], answers: Iterable[str | Answer], *, layer: SupportsIndex | None = None
    ) -> list[Alignment]:
        """Which words of each text the model looked at while it predicted those of the answer.

        Args:
            texts: as for `score`.
            answers: as for `score`.
            layer: the decoder layer whose attention is taken, -1 for the last, -2 for the one before it, which aligns
                best in the literature; None for the mean of all. See `tfm.decoding.alignment.word_alignment`.

        Returns:
            One alignment a pair, in order.

        Raises:
            ValueError: as `score`, or no such layer.
        """
        tokenizers = (self.source_tokenizer, self.target_tokenizer)
        pairs = self._pairs(texts, answers)
        return align_pairs(self.model, self.prepared_params, self._buckets, *tokenizers, *pairs, layer)

    def _pairs(self, texts: Any, answers: Any) -> tuple[list[Side], list[Side]]:
        """Texts and answers as ids. Raises ValueError for what cannot be a pair."""
        for what, given in (("texts", texts), ("answers", answers)):
            if isinstance(given, str) or not isinstance(given, Iterable):
                raise ValueError(f"expected several {what}, got {given!r}; put one into a list")
        texts, answers = list(texts), list(answers)
        if len(texts) != len(answers):
            raise ValueError(f"expected an answer for each of {len(texts)} texts, got {len(answers)}")
        sources = [Side(text, ids) for text, ids in zip(texts, self._encode(texts), strict=True)]
        check_texts([answer.text if isinstance(answer, Answer) else answer for answer in answers], "answer")
        encoded = iter(self.target_tokenizer.encode_batch([answer for answer in answers if isinstance(answer, str)]))
        end, targets = [self.target_tokenizer.end_id], []
        for answer in answers:
            if isinstance(answer, Answer):
                was_ended = answer.finished or not answer.tokens  # a target has a token at least
                targets.append(Side(answer.text, answer.tokens + end * was_ended, is_generated=True))
            else:
                targets.append(Side(answer, next(encoded) + end))
        check_lengths([target.ids for target in targets], "answer", self.config.max_target_length, "max_target_length")
        return sources, targets

    def warmup(
        self,
        *,
        batch_sizes: Iterable[int] | None = None,
        source_lengths: Iterable[int] | None = None,
        max_tokens: SupportsIndex | None = None,
        sampler: Decoding = Greedy(),  # noqa: B008 - frozen and without state
        constraints: TextConstraints | None = None,
    ) -> int:
        """Compiles ahead, so that later requests within the arguments' bounds compile nothing.

        Each shape takes a compilation, of a second for a small model and many for a deep one, and there may be dozens:
        40, where source and target may have 1,024 tokens and a batch 64 texts. Name what will be asked to have fewer.

        Args:
            batch_sizes: how many texts of one source bucket a request will have; None: any number.
            source_lengths: lengths in tokens, end token included, of texts that will be asked; None: all that the model
                accepts.
            max_tokens: the most that a request will ask for; None: requests leave it to the default, or ask for less.
            sampler: of the kind that will be used; its numbers do not matter.
            constraints: with the kinds of rules that will be used, and as many and as long phrases. No prefixes.

        Returns:
            The number of shapes that are now compiled.

        Raises:
            ValueError: an argument is out of range.
        """
        config = self.config
        max_tokens = self._checked_max_tokens(max_tokens)
        sampler = traceable(sampler, self.config.target_vocab_size)
        sizes = [*range(1, self._buckets.max_batch + 1)] if batch_sizes is None else list(batch_sizes)
        lengths = [*range(1, config.max_source_length + 1)] if source_lengths is None else list(source_lengths)
        if any(size < 1 for size in sizes):
            raise ValueError(f"expected batch sizes of at least 1, got {sizes}")
        if any(not 1 <= length <= config.max_source_length for length in lengths):
            raise ValueError(f"expected source lengths from 1 to {config.max_source_length}, got {lengths}")
        rules = encode_constraints(constraints, 1, self.target_tokenizer, config)
        shapes = self._buckets.shapes(sizes, lengths, max_tokens, width_of(sampler))
        for shape in shapes:
            jax.block_until_ready(self._run(_Batch([], shape, 1, 0), [], [], sampler, 0, rules))
        return len(shapes)

    def replace_params(self, params: Params) -> "TextModel":
        """The same model with other parameters of the same shapes; it shares all that is compiled.

        Raises:
            ValueError: the parameters do not belong to the config.
        """
        check_params(self.config, params)
        other = copy.copy(self)
        other.params = params
        other.prepared_params = prepare_for_inference(params, self.weights)
        return other

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes a model folder that `load` reads: see `tfm.store.save_model`."""
        save_model(folder, self.config, self.params, self.source_tokenizer, self.target_tokenizer)

    def _checked_max_tokens(self, max_tokens: SupportsIndex | None) -> int | None:
        if max_tokens is None:
            return None
        number, most = _whole_number(max_tokens), self.config.max_target_length
        if number is None or not 1 <= number <= most:
            raise ValueError(
                f"expected max_tokens from 1 to {most} (the model's max_target_length), got {max_tokens!r}"
            )
        return number

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Source ids, end token included. Raises ValueError for the first text that cannot be one."""
        check_texts(texts, "text")
        end = [self.source_tokenizer.end_id]
        sources = [ids + end for ids in self.source_tokenizer.encode_batch(list(texts))]
        check_lengths(sources, "text", self.config.max_source_length, "max_source_length")
        return sources

    def _prompts(self, prefixes: Sequence[str] | None, count: int) -> list[list[int]]:
        """The decoder's first tokens for each text. Raises ValueError for the first prefix that cannot be one."""
        start = [self.config.start_id]
        if prefixes is None:
            return [start] * count
        if isinstance(prefixes, str) or len(prefixes) != count:
            raise ValueError(f"expected a prefix for each of {count} texts, got {prefixes!r}")
        prompts = [start + ids for ids in known_ids("prefix", list(prefixes), self.target_tokenizer)]
        most = self.config.max_target_length
        for i, ids in enumerate(prompts):
            if len(ids) > most:
                raise ValueError(
                    f"expected prefixes of at most {most - 1} tokens (the model's max_target_length {most}, "
                    f"a start token among them), got {len(ids) - 1} for text {i}"
                )
        return prompts

    def _batches(
        self, sources: list[list[int]], prompts: list[list[int]], max_tokens: int | None, width: int
    ) -> Iterable["_Batch"]:
        """Texts whose sources and prompts are padded alike, so that neither pads another's."""
        groups: dict[int, list[int]] = {}
        for i, ids in enumerate(prompts):
            groups.setdefault(min(power_of_two(len(ids)), self.config.max_target_length), []).append(i)
        for length, members in groups.items():
            lengths = [len(sources[i]) for i in members]
            for places, shape in self._buckets.batches(lengths, max_tokens, width, length):
                room = shape.capacity - length + 1
                limit = room if max_tokens is None else min(max_tokens, room)
                yield _Batch([members[place] for place in places], shape, length, limit)

    def _run(
        self,
        batch: "_Batch",
        sources: list[list[int]],
        prompts: list[list[int]],
        sampler: Decoding,
        seed: int,
        rules: Constraints | None,
    ) -> Made:
        """Runs one batch; rows beyond the sources hold one padding token and generate nothing."""
        rows = batch.shape.rows
        padded = np.full((rows, batch.shape.source_length), self.config.pad_id, np.int32)
        prompt = np.full((rows, batch.prompt_length), self.config.start_id, np.int32)
        lengths, prompt_lengths = np.ones(rows, np.int32), np.ones(rows, np.int32)
        limits, places = np.zeros_like(lengths), np.zeros_like(lengths)
        for row, (ids, begun) in enumerate(zip(sources, prompts, strict=True)):
            padded[row, : len(ids)] = ids
            prompt[row, : len(begun)] = begun
            lengths[row], prompt_lengths[row] = len(ids), len(begun)
        limits[: len(sources)] = batch.limit
        places[: len(sources)] = batch.indices
        return generate_rows(
            self.model,
            self.prepared_params,
            padded,
            lengths,
            prompt,
            prompt_lengths,
            limits,
            places,
            np.uint32(seed),
            sampler,
            None if rules is None else rows_of(rules, batch.indices, rows),
            capacity=batch.shape.capacity,
        )

    def _answers(self, made: Made, prompts: list[list[int]]) -> list[list[Answer]]:
        made = jax.device_get(made)
        answers: list[list[Answer]] = [[] for _ in prompts]
        for row, (found, prompt) in enumerate(zip(answers, prompts, strict=True)):
            there = np.flatnonzero(made.log_probs[row] != -np.inf)
            there = there if len(there) else np.zeros(1, int)  # nothing was found: an empty answer of score -inf
            lengths = made.lengths[row] - made.finished[row]
            ids = [prompt[1:] + made.tokens[row, i, : lengths[i]].tolist() for i in there]
            for i, tokens, text in zip(there, ids, self.target_tokenizer.decode_batch(ids), strict=True):
                found.append(Answer(text, float(made.log_probs[row, i]), tokens, bool(made.finished[row, i])))
        return answers


class _Batch(NamedTuple):
    """Texts that are answered at once."""

    indices: list[int]
    shape: Shape
    prompt_length: int
    limit: int
    """The most new tokens of each."""


def _whole_number(value: object) -> int | None:
    """A whole number of any type, NumPy's too, but no bool; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
