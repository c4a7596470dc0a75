"""Text to text: a model, its parameters and its tokenizers in one object.

    model = tfm.load("runs/g2p/best")
    model("transformer")                                  # one text in, one out
    model(["a", "b"], max_tokens=20)                      # many, in the order given
    model.generate(["a"], sampler=Sampling(), seed=1)     # with scores, ids and whether the model ended by itself
    model.generate_n_best(["a"], sampler=BeamSearch(width=8, num_best=5))
    model.generate(["a"], sampler=MinimumBayesRisk(num_samples=32, utility="chrf"))
    for (answer,) in model.stream(["a"]): ...             # while it is written
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
import math
import os
import typing
from collections.abc import Iterable, Iterator
from typing import Any, Literal, SupportsIndex, TypedDict, Unpack, overload

import numpy as np

from tfm.answering import Answer, Engine
from tfm.buckets import Buckets
from tfm.checks import checked_whole_number, several, whole_number
from tfm.config import ModelConfig
from tfm.decoding.beam import BeamSearch
from tfm.decoding.mbr import MinimumBayesRisk
from tfm.decoding.requests import Decoding, width_of
from tfm.decoding.sampling import Greedy, Sampler, Samples
from tfm.nn.attention import Kernel
from tfm.nn.layers import compute_dtype
from tfm.nn.models import Model, build_model
from tfm.nn.params import Params, Weights, prepare_for_inference
from tfm.pairs import Alignment, PairScore, Side, align_pairs, check_lengths, check_texts, score_pairs
from tfm.sharding import Placement
from tfm.store import check_params, check_tokenizers, load_model, save_model
from tfm.text_constraints import EachText, TextConstraints
from tfm.tokenizer import Tokenizer


class Options(TypedDict, total=False):
    """What may be said about how texts are answered: see `TextModel.generate`."""

    max_tokens: SupportsIndex | None
    sampler: Decoding
    seed: SupportsIndex | Iterable[SupportsIndex]
    constraints: EachText | None
    prefixes: Iterable[str] | None
    long_texts: Literal["error", "cut"]


def load(
    folder: str | os.PathLike[str],
    *,
    weights: str = "auto",
    cache: str = "auto",
    attention_kernel: Kernel = "auto",
    max_batch: SupportsIndex = 64,
    max_batch_tokens: SupportsIndex = 16_384,
    placement: Placement | None = None,
) -> "TextModel":
    """Loads a model folder, as training and `save_model` write it, onto the default device or those of a placement.

    Args:
        folder: the model folder.
        weights: see `TextModel`, as for the rest.
        cache: what keys and values lie in while answers are made.
        attention_kernel: see `tfm.nn.attention`.
        max_batch: the most texts in one batch.
        max_batch_tokens: the most tokens in one batch.
        placement: from `tfm.make_placement`: how the model lies on many devices.

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
        placement=placement,
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
        max_batch: SupportsIndex = 64,
        max_batch_tokens: SupportsIndex = 16_384,
        placement: Placement | None = None,
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
            placement: how parameters, batches and caches lie on many devices; None: on the default device.

        Raises:
            ValueError: weights or a cache that there are not, parameters or tokenizers that do not belong to `config`,
                or parameters that cannot be cut as the placement says.
        """
        max_batch = _at_least_one("max_batch", max_batch)
        max_batch_tokens = _at_least_one("max_batch_tokens", max_batch_tokens)
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
        self.model: Model = build_model(
            config, dtype=dtype, attention_kernel=attention_kernel, cache_dtype=cache, placement=placement
        )
        self.prepared_params = prepare_for_inference(params, self.weights, placement)
        """The same on the device, as `weights` says: what answers are made with."""
        self._engine = Engine(
            config,
            self.model,
            self.prepared_params,
            source_tokenizer,
            target_tokenizer,
            Buckets(config, max_batch, max_batch_tokens),
        )

    def __repr__(self) -> str:
        config = self.config
        encoder = f"{config.encoder_layers}+" if config.has_encoder else ""
        layers = f"{encoder}{config.decoder_layers} layers"
        return f"TextModel({config.architecture}, {layers}, D {config.model_dim}, {self.weights})"

    @overload  # overlapping, because a str is an Iterable[str] too
    def __call__(self, texts: str, **options: Unpack[Options]) -> str: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, texts: Iterable[str], **options: Unpack[Options]) -> list[str]: ...

    def __call__(self, texts: str | Iterable[str], **options: Unpack[Options]) -> str | list[str]:
        """The answer to one text, or the answers to several in the order given. Options are those of `generate`."""
        if isinstance(texts, str):
            return self.generate([texts], **options)[0].text
        return [answer.text for answer in self.generate(texts, **options)]

    def generate(
        self,
        texts: Iterable[str],
        *,
        max_tokens: SupportsIndex | None = None,
        sampler: Decoding = Greedy(),  # noqa: B008 - frozen and without state
        seed: SupportsIndex | Iterable[SupportsIndex] = 0,
        constraints: EachText | None = None,
        prefixes: Iterable[str] | None = None,
        long_texts: Literal["error", "cut"] = "error",
    ) -> list[Answer]:
        """Answers every text; a language model continues it, and the answer is what follows.

        Args:
            texts: any number of texts. An empty text is a source of nothing but the end token.
            max_tokens: the most tokens of an answer, end token included, at least 1. None: 2·S + 32, S being the padded
                text, or the model's limit where that is less. A language model's text, padded to a power of two or to
                an eighth of `max_target_length`, and what follows have at most `max_target_length` tokens.
            sampler: picks the tokens; or a search among several answers, of which the best is taken.
            seed: for what is drawn, from 0 to 2**32 - 1. One for all: each text's own random key comes from it and the
                text's place in `texts`. Or one for each: then its key comes from that alone, whatever is beside it.
            constraints: what may and must come, for all texts or for each its own. What they change compiles nothing,
                but which kinds of rules there are, and how many phrases and how long, to the next power of two.
            prefixes: what each answer begins with, of which `max_tokens` counts nothing; "" for nothing. A prefix and
                what follows have at most the model's `max_target_length` tokens, padding of the prefix to a power of
                two, or to an eighth of them, counted.
            long_texts: a text of more tokens than the model accepts is an error, or is cut to its first ones, with a
                warning; to its last ones, half of what the model accepts, where it is to be continued.

        Returns:
            One answer a text, in order.

        Raises:
            ValueError: an argument is out of range, or a text is not a `str` or is longer than the model accepts, or
                more is required of an answer than it may have tokens; it says which, before any text is answered.
        """
        answers = self.generate_n_best(
            texts,
            max_tokens=max_tokens,
            sampler=sampler,
            seed=seed,
            constraints=constraints,
            prefixes=prefixes,
            long_texts=long_texts,
        )
        return [best for best, *_ in answers]

    def generate_n_best(
        self,
        texts: Iterable[str],
        *,
        max_tokens: SupportsIndex | None = None,
        sampler: Decoding = BeamSearch(num_best=4),  # noqa: B008 - frozen and without state
        seed: SupportsIndex | Iterable[SupportsIndex] = 0,
        constraints: EachText | None = None,
        prefixes: Iterable[str] | None = None,
        long_texts: Literal["error", "cut"] = "error",
    ) -> list[list[Answer]]:
        """Answers every text several times.

        Arguments and errors are those of `generate`.

        Returns:
            A list for each text, in order, never empty: of a beam search or of samples their `num_best`, the best
            first, or all that were found, if those are fewer; of a sampler one answer.
        """
        asked = self._engine.ask(
            texts,
            max_tokens=max_tokens,
            sampler=sampler,
            seed=seed,
            constraints=constraints,
            prefixes=prefixes,
            long_texts=long_texts,
        )
        self._engine.check_room(asked)
        answers: list[list[Answer]] = [[]] * len(asked.sources)
        for batch in asked.batches:
            for i, found in zip(batch.indices, self._engine.run(asked, batch), strict=True):
                answers[i] = found
        return answers

    def stream(
        self,
        texts: Iterable[str],
        *,
        max_tokens: SupportsIndex | None = None,
        sampler: Sampler = Greedy(),  # noqa: B008 - frozen and without state
        seed: SupportsIndex | Iterable[SupportsIndex] = 0,
        constraints: EachText | None = None,
        prefixes: Iterable[str] | None = None,
        long_texts: Literal["error", "cut"] = "error",
    ) -> Iterator[list[Answer]]:
        """Answers every text, and shows the answers while they are written.

            for (answer,) in model.stream(["a text"]):
                print(answer.text)

        Arguments and errors are those of `generate`, but that there is no search among several answers: its best may
        change with every token.

        Returns:
            An iterator of the answers to all texts as they are after the first, the second, … token of each. The last
            are those of `generate`. A text never has half a character while it goes on: one whose bytes have not all
            come waits, and only a limit can cut it. All texts are worked on side by side, and all their caches lie in
            memory at once: for many texts `generate` is the better way.
        """
        if isinstance(sampler, BeamSearch | Samples | MinimumBayesRisk):
            raise ValueError(f"expected Greedy() or Sampling(…) to stream, which is one answer a text, got {sampler!r}")
        asked = self._engine.ask(
            texts,
            max_tokens=max_tokens,
            sampler=sampler,
            seed=seed,
            constraints=constraints,
            prefixes=prefixes,
            long_texts=long_texts,
        )
        self._engine.check_room(asked)
        return self._engine.stream(asked)

    def score(self, texts: Iterable[str], answers: Iterable[str | Answer]) -> list[PairScore]:
        """How likely each answer is, by one pass over it and not one a token.

        Args:
            texts: any number of texts.
            answers: one for each text: a string, which ends with the end token, or what `generate` gave, whose own ids
                are scored as they are, to about its own score; but here the tokens of a prefix count like others. A
                language model is asked how likely they are as continuations, which need not end: a string has no end
                token, and after the empty text it is scored from its first token on.

        Returns:
            One score a pair, in order.

        Raises:
            ValueError: a text or an answer is not a `str` or is longer than the model accepts, or they are not as many;
                it says which, before any pair is scored.
        """
        return score_pairs(self.model, self.prepared_params, self._engine.buckets, *self._pairs(texts, answers))

    @property
    def max_text_length(self) -> int:
        """The most tokens of a text, by `text_length`."""
        return self._engine.max_text_length

    def text_length(self, text: str) -> int:
        """How many tokens a text has, with the one that ends a source, or starts what a language model is to continue.

        Raises:
            ValueError: the tokenizer has no ids for it.
        """
        return self._engine.text_length(text)

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
            ValueError: as `score`, or no such layer, or the model has no attention.
        """
        if self.config.is_language_model:
            raise ValueError("expected a model of sources and targets to align, got a language model")
        tokenizers = (self.source_tokenizer, self.target_tokenizer)
        pairs = self._pairs(texts, answers)
        return align_pairs(self.model, self.prepared_params, self._engine.buckets, *tokenizers, *pairs, layer)

    def _pairs(self, texts: Any, answers: Any) -> tuple[list[Side], list[Side]]:
        """Texts and answers as ids. Raises ValueError for what cannot be a pair."""
        texts, answers, continues = several("texts", texts), several("answers", answers), self.config.is_language_model
        if len(texts) != len(answers):
            raise ValueError(f"expected an answer for each of {len(texts)} texts, got {len(answers)}")
        source_ids, beginnings = self._engine.inputs(texts)
        sources = [Side(text, ids) for text, ids in zip(texts, source_ids, strict=True)]
        check_texts([answer.text if isinstance(answer, Answer) else answer for answer in answers], "answer")
        given = [answer for answer in answers if isinstance(answer, str)]
        encode = self.target_tokenizer.encode_lines
        encoded = iter(map(encode, given) if continues else self.target_tokenizer.encode_batch(given))
        end, targets = [self.target_tokenizer.end_id], []
        for i, (answer, (_, *text)) in enumerate(zip(answers, beginnings, strict=True)):
            if isinstance(answer, Answer):
                _check_ids(answer, i, self.config.target_vocab_size)
                was_ended = answer.finished or not (answer.tokens or continues)  # a target has a token at least
                ids = answer.tokens + end * was_ended
            else:
                ids = next(encoded) + end * (not continues)  # a continuation may go on
            shown = answer.text if isinstance(answer, Answer) else answer
            targets.append(Side(shown, text + ids, begun=len(text), is_generated=isinstance(answer, Answer)))
        check_lengths([target.ids for target in targets], "answer", self.config.max_target_length, "max_target_length")
        return sources, targets

    def warmup(
        self,
        *,
        batch_sizes: Iterable[SupportsIndex] | None = None,
        source_lengths: Iterable[SupportsIndex] | None = None,
        max_tokens: SupportsIndex | None = None,
        sampler: Decoding = Greedy(),  # noqa: B008 - frozen and without state
        constraints: TextConstraints | None = None,
    ) -> int:
        """Compiles ahead, so that later requests within the arguments' bounds compile nothing.

        Each shape takes a compilation, of a second for a small model and many for a deep one, and there may be dozens:
        40, where source and target may have 1,024 tokens and a batch 64 texts. Name what will be asked to have fewer.

        Args:
            batch_sizes: how many texts of one source bucket a request will have; None: any number.
            source_lengths: lengths in tokens, end token (of a language model: start token) included, of texts that will
                be asked; None: all that the model accepts.
            max_tokens: the most that a request will ask for; None: requests leave it to the default, or ask for less.
            sampler: of the kind that will be used; its numbers do not matter.
            constraints: with the kinds of rules that will be used, and as many and as long phrases. No prefixes, and
                not what `stream`, `score` and `align` run: the first of them compiles that.

        Returns:
            The number of shapes that are now compiled.

        Raises:
            ValueError: an argument is out of range.
        """
        buckets = self._engine.buckets
        longest = self._engine.max_text_length
        batch_sizes = range(1, buckets.max_batch + 1) if batch_sizes is None else batch_sizes
        source_lengths = range(1, longest + 1) if source_lengths is None else source_lengths
        sizes = _whole_numbers("batch sizes of at least 1", batch_sizes)
        lengths = _whole_numbers(f"source lengths from 1 to {longest}", source_lengths, longest)
        asked = self._engine.ask(
            [""], max_tokens=max_tokens, sampler=sampler, seed=0, constraints=constraints, prefixes=None,
            long_texts="error",
        )  # fmt: skip
        shapes = buckets.shapes(sizes, lengths, self._engine.checked_max_tokens(max_tokens), width_of(sampler))
        for shape in shapes:
            self._engine.warm(asked, shape)
        return len(shapes)

    def replace_params(self, params: Params) -> "TextModel":
        """The same model with other parameters of the same shapes; it shares all that is compiled.

        Raises:
            ValueError: the parameters do not belong to the config.
        """
        check_params(self.config, params)
        other = copy.copy(self)
        other.params = params
        other.prepared_params = prepare_for_inference(params, self.weights, self.model.placement)
        other._engine = dataclasses.replace(self._engine, params=other.prepared_params)
        return other

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes a model folder that `load` reads: see `tfm.store.save_model`."""
        save_model(folder, self.config, self.params, self.source_tokenizer, self.target_tokenizer)


def _at_least_one(what: str, given: object) -> int:
    """Raises ValueError for what is no whole number of at least 1."""
    number = checked_whole_number(what, given)
    if number < 1:
        raise ValueError(f"expected {what} of at least 1, got {number}")
    return number


def _whole_numbers(what: str, given: Any, most: int | float = math.inf) -> list[int]:
    """Raises ValueError unless whole numbers from 1 to `most` came; `what` says which are expected."""
    listed = list(given) if np.iterable(given) else [None]
    numbers = [number for one in listed if (number := whole_number(one)) is not None and 1 <= number <= most]
    if len(numbers) < len(listed):
        raise ValueError(f"expected {what}, got {listed if np.iterable(given) else given!r}")
    return numbers


def _check_ids(answer: Answer, i: int, vocab_size: int) -> None:
    """Raises ValueError for an answer with a token that the model does not have."""
    for token in answer.tokens:
        number = whole_number(token)
        if number is None or not 0 <= number < vocab_size:
            raise ValueError(f"expected ids from 0 to {vocab_size - 1} in answer {i}, got {token!r}")
