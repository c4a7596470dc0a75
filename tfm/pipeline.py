"""Text to text: a model, its parameters and its tokenizers in one object.

    model = tfm.load("runs/g2p/best")
    model("transformer")                                  # one text in, one out
    model(["a", "b"], max_tokens=20)                      # many, in the order given
    model.generate(["a"], sampler=Sampling(), seed=1)     # with scores, ids and whether the model ended by itself

XLA compiles for shapes, so shapes are few. A source is padded to its bucket, a power of two from 16 up to the model's
limit; sources of one bucket are batched, and the batch padded with empty rows to a power of two. The cache has room for
2·S + 32 target tokens, S being the padded source, and only a larger `max_tokens` asks for more, in powers of two.
All else is traced: lengths, `max_tokens`, the sampler's numbers, the seed, the parameters.

An answer depends on its text, its limit and, where tokens are drawn, its own random key, and beyond rounding never on
the texts beside it: what a source is padded to follows from its own length alone. But products of another number of
rows are summed in another order: a score may differ by 1e-4 in float32 and by 3e-2 in bfloat16, and of two tokens that
are as near to each other, the other may come.
"""

import copy
import dataclasses
import functools
import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import SupportsIndex, overload

import jax
import numpy as np

from tfm.axes import Array, Int
from tfm.config import ModelConfig
from tfm.decoding.generate import Generation, generate
from tfm.decoding.sampling import Greedy, Sampler, Sampling
from tfm.nn.attention import Kernel
from tfm.nn.params import Params
from tfm.nn.transformer import Model, build_model
from tfm.store import check_params, check_tokenizers, load_model, save_model
from tfm.tokenizer import Tokenizer

_SHORTEST_SOURCE = 16
_MAX_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the model made of one text."""

    text: str
    score: float
    """Sum of the log-probabilities, natural, of all tokens generated, the end token included."""
    tokens: list[int]
    """The ids of `text`, without the end token."""
    finished: bool
    """True where the model ended by itself, False where the limit of tokens cut it off."""


@dataclasses.dataclass(frozen=True)
class _Shape:
    """What one compilation serves."""

    rows: int
    source_length: int
    capacity: int
    """Target tokens: those read, from the start token on, and those generated, to the last one, are as many."""


def load(
    folder: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    attention_kernel: Kernel = "auto",
    max_batch: int = 64,
    max_batch_tokens: int = 16_384,
) -> "TextModel":
    """Loads a model folder, as training and `save_model` write it, onto the default device.

    Args:
        folder: the model folder.
        dtype: see `TextModel`, as for the rest.
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
        dtype=dtype,
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
        dtype: str = "auto",
        attention_kernel: Kernel = "auto",
        max_batch: int = 64,
        max_batch_tokens: int = 16_384,
    ) -> None:
        """Joins the parts.

        Args:
            config: the model.
            params: its parameters; moved to the default device unless they lie on one.
            source_tokenizer: turns texts into source ids, to which its end token is added.
            target_tokenizer: turns generated ids into text.
            dtype: of the operands of large products: "float32", "bfloat16", or "auto" for the fastest here.
            attention_kernel: see `tfm.nn.attention`.
            max_batch: the most texts in one batch, rounded down to a power of two. More are cut into several batches.
            max_batch_tokens: the most tokens in one batch, padded source and cache capacity together, which bounds the
                memory that a batch takes; but one text always is a batch.

        Raises:
            ValueError: parameters or tokenizers do not belong to `config`.
        """
        for name, value in (("max_batch", max_batch), ("max_batch_tokens", max_batch_tokens)):
            if value < 1:
                raise ValueError(f"expected {name} of at least 1, got {value}")
        check_tokenizers(config, source_tokenizer, target_tokenizer)
        check_params(config, params)
        self.config = config
        self.params: Params = jax.device_put(params)
        self.source_tokenizer = source_tokenizer
        self.target_tokenizer = target_tokenizer
        self.model: Model = build_model(config, dtype=dtype, attention_kernel=attention_kernel)
        self._max_batch = max_batch
        self._max_batch_tokens = max_batch_tokens

    def __repr__(self) -> str:
        config = self.config
        encoder = f"{config.encoder_layers}+" if config.architecture == "encoder-decoder" else ""
        layers = f"{encoder}{config.decoder_layers} layers"
        return f"TextModel({config.architecture}, {layers}, D {config.model_dim}, {self.model.dtype})"

    @overload  # overlapping, because a str is an Iterable[str] too
    def __call__(  # type: ignore[overload-overlap]
        self, texts: str, *, max_tokens: SupportsIndex | None = ..., sampler: Sampler = ..., seed: SupportsIndex = ...
    ) -> str: ...

    @overload
    def __call__(
        self,
        texts: Iterable[str],
        *,
        max_tokens: SupportsIndex | None = ...,
        sampler: Sampler = ...,
        seed: SupportsIndex = ...,
    ) -> list[str]: ...

    def __call__(
        self,
        texts: str | Iterable[str],
        *,
        max_tokens: SupportsIndex | None = None,
        sampler: Sampler = Greedy(),  # noqa: B008 - frozen and without state
        seed: SupportsIndex = 0,
    ) -> str | list[str]:
        """The answer to one text, or the answers to several in the order given. Arguments are those of `generate`."""
        if isinstance(texts, str):
            return self.generate([texts], max_tokens=max_tokens, sampler=sampler, seed=seed)[0].text
        return [answer.text for answer in self.generate(texts, max_tokens=max_tokens, sampler=sampler, seed=seed)]

    def generate(
        self,
        texts: Iterable[str],
        *,
        max_tokens: SupportsIndex | None = None,
        sampler: Sampler = Greedy(),  # noqa: B008 - frozen and without state
        seed: SupportsIndex = 0,
    ) -> list[Answer]:
        """Answers every text.

        Args:
            texts: any number of texts. An empty text is a source of nothing but the end token.
            max_tokens: the most tokens of an answer, end token included. None: 2·S + 32, S being the padded source,
                or the model's limit where that is less.
            sampler: picks the tokens.
            seed: for a sampler that draws; each text's own random key comes from it and the text's place in `texts`.

        Returns:
            One answer a text, in order.

        Raises:
            ValueError: an argument is out of range, or a text is not a `str` or is longer than the model accepts; it
                says which, before any text is answered.
        """
        if isinstance(texts, str):
            raise ValueError(f"expected several texts, got one: {texts!r}; put it into a list")
        texts = list(texts)
        max_tokens = self._checked_max_tokens(max_tokens)
        sampler = _traceable(sampler)
        number = _whole_number(seed)
        if number is None or not 0 <= number <= _MAX_SEED:
            raise ValueError(f"expected a whole number from 0 to {_MAX_SEED} as seed, got {seed!r}")
        sources = self._encode(texts)
        answers: list[Answer | None] = [None] * len(texts)
        for indices, shape in self._batches([len(ids) for ids in sources], max_tokens):
            limit = shape.capacity if max_tokens is None else max_tokens
            generation = self._run(shape, [sources[i] for i in indices], indices, limit, sampler, number)
            for i, answer in zip(indices, self._answers(generation, len(indices)), strict=True):
                answers[i] = answer
        return [answer for answer in answers if answer is not None]

    def warmup(
        self,
        *,
        batch_sizes: Iterable[int] | None = None,
        source_lengths: Iterable[int] | None = None,
        max_tokens: SupportsIndex | None = None,
        sampler: Sampler = Greedy(),  # noqa: B008 - frozen and without state
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

        Returns:
            The number of shapes that are now compiled.

        Raises:
            ValueError: an argument is out of range.
        """
        config = self.config
        max_tokens = self._checked_max_tokens(max_tokens)
        sampler = _traceable(sampler)
        sizes = [*range(1, self._max_batch + 1)] if batch_sizes is None else list(batch_sizes)
        lengths = [*range(1, config.max_source_length + 1)] if source_lengths is None else list(source_lengths)
        if any(size < 1 for size in sizes):
            raise ValueError(f"expected batch sizes of at least 1, got {sizes}")
        if any(not 1 <= length <= config.max_source_length for length in lengths):
            raise ValueError(f"expected source lengths from 1 to {config.max_source_length}, got {lengths}")
        shapes = {
            _Shape(rows, length, capacity)
            for length in {_source_bucket(length, config) for length in lengths}
            for capacity in _capacities(length, max_tokens, config)
            for size in sizes
            for rows in map(_power_of_two, _cut(size, self._max_rows(length, capacity)))
        }
        for shape in sorted(shapes, key=dataclasses.astuple):
            jax.block_until_ready(self._run(shape, [], [], 0, sampler, 0))
        return len(shapes)

    def replace_params(self, params: Params) -> "TextModel":
        """The same model with other parameters of the same shapes; it shares all that is compiled.

        Raises:
            ValueError: the parameters do not belong to the config.
        """
        check_params(self.config, params)
        other = copy.copy(self)
        other.params = jax.device_put(params)
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
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise ValueError(f"expected a str as text {i}, got {type(text).__name__}")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"text {i} is not Unicode text: {error}") from error
        end = [self.source_tokenizer.end_id]
        sources = [ids + end for ids in self.source_tokenizer.encode_batch(list(texts))]
        most = self.config.max_source_length
        too_long = [f"text {i} has {len(ids)}" for i, ids in enumerate(sources) if len(ids) > most]
        if too_long:
            more = f", and {len(too_long) - 5} more texts are too long" if len(too_long) > 5 else ""
            raise ValueError(
                f"expected texts of at most {most} tokens (the model's max_source_length), end token included; "
                + ", ".join(too_long[:5])
                + more
            )
        return sources

    def _batches(self, lengths: Sequence[int], max_tokens: int | None) -> Iterator[tuple[list[int], _Shape]]:
        """Groups texts of one length bucket, the longest first, so that they also end at about the same time."""
        buckets: dict[int, list[int]] = {}
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            buckets.setdefault(_source_bucket(lengths[i], self.config), []).append(i)
        for source_length, members in buckets.items():
            capacity = _capacity(source_length, max_tokens, self.config)
            start = 0
            for size in _cut(len(members), self._max_rows(source_length, capacity)):
                yield members[start : start + size], _Shape(_power_of_two(size), source_length, capacity)
                start += size

    def _max_rows(self, source_length: int, capacity: int) -> int:
        within = min(self._max_batch, self._max_batch_tokens // (source_length + capacity))
        return 1 << (max(within, 1).bit_length() - 1)

    def _run(
        self, shape: _Shape, sources: list[list[int]], indices: list[int], limit: int, sampler: Sampler, seed: int
    ) -> Generation:
        """Runs one batch; rows beyond the sources hold one padding token and generate nothing."""
        padded = np.full((shape.rows, shape.source_length), self.config.pad_id, np.int32)
        lengths = np.ones(shape.rows, np.int32)
        limits, places = np.zeros_like(lengths), np.zeros_like(lengths)
        for row, ids in enumerate(sources):
            padded[row, : len(ids)] = ids
            lengths[row] = len(ids)
        limits[: len(sources)] = limit
        places[: len(sources)] = indices
        return _generate_rows(
            self.model, self.params, padded, lengths, limits, places, np.uint32(seed), sampler, capacity=shape.capacity
        )

    def _answers(self, generation: Generation, rows: int) -> list[Answer]:
        tokens, lengths, scores, finished = jax.device_get(
            (generation.tokens, generation.lengths, generation.scores, generation.finished)
        )
        ids = [tokens[row, : lengths[row] - finished[row]].tolist() for row in range(rows)]
        return [
            Answer(text, float(scores[row]), ids[row], bool(finished[row]))
            for row, text in enumerate(self.target_tokenizer.decode_batch(ids))
        ]


@functools.partial(jax.jit, static_argnames=("model", "capacity"))
def _generate_rows(
    model: Model,
    params: Params,
    source: Int[Array, "B S"],
    source_lengths: Int[Array, "B"],
    limits: Int[Array, "B"],
    places: Int[Array, "B"],
    seed: Array,
    sampler: Sampler,
    *,
    capacity: int,
) -> Generation:
    """`generate` with a key for each row; one function for all models, so that equal ones share what is compiled."""
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(seed, impl="threefry2x32"), places)
    return generate(
        model,
        params,
        source,
        source_lengths=source_lengths,
        max_tokens=limits,
        sampler=sampler,
        key=keys,
        capacity=capacity,
    )


def _traceable(sampler: Sampler) -> Sampler:
    """The checked sampler, each number as an array of one dtype: to jit, 1 and 1.0 are two kinds of argument."""
    if not isinstance(sampler, Greedy | Sampling):
        raise ValueError(f"expected a sampler, Greedy() or Sampling(…), got {sampler!r}")
    if not isinstance(sampler, Sampling):
        return sampler
    if any(np.ndim(getattr(sampler, field.name)) for field in dataclasses.fields(Sampling)):
        raise ValueError(f"expected one number for all texts in each field of the sampler, got {sampler!r}")
    return sampler.as_arrays(batch=1)


def _whole_number(value: object) -> int | None:
    """A whole number of any type, NumPy's too, but no bool; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _power_of_two(number: int) -> int:
    """The least power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def _cut(number: int, most: int) -> list[int]:
    """Sizes of the batches that so many texts are cut into."""
    full, rest = divmod(number, most)
    return [most] * full + [rest] * (rest > 0)


def _source_bucket(length: int, config: ModelConfig) -> int:
    """What a source of this length is padded to."""
    return min(max(_power_of_two(length), _SHORTEST_SOURCE), config.max_source_length)


def _capacity(source_length: int, max_tokens: int | None, config: ModelConfig) -> int:
    """Target tokens, start token included, that the cache has room for beside a source padded to `source_length`."""
    capacity = 2 * source_length + 32
    if max_tokens is not None and max_tokens > capacity:
        capacity = _power_of_two(max_tokens)
    return min(capacity, config.max_target_length)


def _capacities(source_length: int, max_tokens: int | None, config: ModelConfig) -> Iterator[int]:
    """Every capacity that requests of up to `max_tokens` have."""
    last, capacity = _capacity(source_length, max_tokens, config), _capacity(source_length, None, config)
    while capacity < last:
        yield capacity
        capacity = _capacity(source_length, capacity + 1, config)
    yield last
