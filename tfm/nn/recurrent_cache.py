"""What a recurrent model remembers between decode steps: its carries, and what the encoder made of the source.

The size is the same however many tokens have come: the past of a hypothesis is in its carry. So hypotheses that change
their order take their carries with them and nothing else, [B·W, D] a layer, for all that a hypothesis has of its own is
its carry (and the attentional vector where that is fed back); the source is its row's, read by all W and never
repeated. A Transformer's cache is in `tfm.nn.cache`, as are the functions that serve both.
"""

import dataclasses
import typing
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from tfm.axes import Array, Float, Int
from tfm.config import ModelConfig
from tfm.nn.stored_vectors import CacheDtype, Int8Vectors, no_vectors, stored, vector_bytes

Carry = Any
"""Of one cell: h, [B, D]; of an LSTM (c, h)."""


@typing.no_type_check  # pytrees are also built from shapes, specs and other non-arrays
@flax.struct.dataclass
class Source:
    """What a recurrent decoder has of the source besides the carries that it starts from. None: it has no use for it.

    E is the width of the encoder's states: D, or 2 · D where the encoder reads in both directions.
    """

    states: Float[Array, "B S E"] | Int8Vectors | None
    """The encoder's last layer: what attention mixes, and with the dot product scores, too. Those of padding are junk
    that nobody attends to."""
    keys: Float[Array, "B S D"] | Int8Vectors | None
    """What the other scores meet the decoder's state with, projected once."""
    last: Float[Array, "B E"] | None
    """The encoder's last state, where every step reads it."""

    def stored(self, dtype: CacheDtype) -> "Source":
        """As a cache of that dtype holds it; the last state stays float32."""
        assert not isinstance(self.states, Int8Vectors)
        assert not isinstance(self.keys, Int8Vectors)
        states, keys = (None if x is None else stored(x, dtype) for x in (self.states, self.keys))
        return Source(states, keys, self.last)


@typing.no_type_check
@flax.struct.dataclass
class RecurrentCache:
    """All that decoding with a recurrent model remembers between steps; carries are float32 whatever the dtype."""

    carries: tuple[Carry, ...]
    """Of each decoder layer, h [B·W, D], and of an LSTM c before it."""
    attentional: Float[Array, "BW D"] | None
    """What attention made of the last step, where the next one reads it (input feeding)."""
    source: Source
    lengths: Int[Array, "B"]
    """Tokens read in each row, by every hypothesis of it."""
    source_lengths: Int[Array, "B"]
    """Real source tokens of each row."""
    hypotheses: int | None = flax.struct.field(pytree_node=False, default=None)
    """W of a widened cache; None: each row has one continuation."""

    @property
    def width(self) -> int:
        """W: hypotheses of each row."""
        return 1 if self.hypotheses is None else self.hypotheses

    @property
    def capacity(self) -> int:
        """The most tokens a row can hold: a carry has room for any number, so this is what a length can count to."""
        return int(jnp.iinfo(self.lengths.dtype).max)


def first_carries(config: ModelConfig, rows: int) -> tuple[Carry, ...]:
    """Zeros for every layer: what a decoder without a source starts from."""
    zeros = jnp.zeros((rows, config.model_dim), jnp.float32)
    return ((zeros, zeros) if config.cell == "lstm" else zeros,) * config.decoder_layers


def first_attentional(config: ModelConfig, rows: int) -> Float[Array, "BW D"] | None:
    """Zeros, where the first step is to read what no step has made yet."""
    return jnp.zeros((rows, config.model_dim), jnp.float32) if config.input_feeding else None


def state_dim(config: ModelConfig) -> int:
    """E: the width of the encoder's states."""
    return 2 * config.model_dim if config.bidirectional else config.model_dim


def empty(config: ModelConfig, *, batch: int, source_length: int, dtype: CacheDtype) -> RecurrentCache:
    """See `tfm.nn.cache.init_cache`."""
    width, context = state_dim(config), config.source_context
    states = no_vectors((batch, source_length, width), dtype) if config.attends_to_source else None
    has_keys = config.attends_to_source and context != "dot"
    source = Source(
        states=states,
        keys=no_vectors((batch, source_length, config.model_dim), dtype) if has_keys else None,
        last=jnp.zeros((batch, width), jnp.float32) if context == "fixed-each-step" else None,
    )
    zeros = jnp.zeros(batch, jnp.int32)
    return RecurrentCache(first_carries(config, batch), first_attentional(config, batch), source, zeros, zeros)


def count_bytes(config: ModelConfig, *, batch: int, source_length: int, beams: int, dtype: CacheDtype) -> int:
    """See `tfm.nn.cache.cache_bytes`: B·W · D · (L, twice in an LSTM; one more with input feeding) · 4, and the source.

    Of the source it is B·S vectors of E entries and, where attention has keys, of D; or, where every step reads the
    encoder's last state, B · E · 4. And 8 bytes a row for its lengths.
    """
    dim, width, context = config.model_dim, state_dim(config), config.source_context
    own = config.decoder_layers * (2 if config.cell == "lstm" else 1) + config.input_feeding
    total = batch * beams * own * dim * jnp.dtype("float32").itemsize
    if config.attends_to_source:
        keys = 0 if context == "dot" else vector_bytes(dim, dtype)
        total += batch * source_length * (vector_bytes(width, dtype) + keys)
    if context == "fixed-each-step":
        total += batch * width * jnp.dtype("float32").itemsize
    return total + 2 * batch * jnp.dtype(jnp.int32).itemsize


def widened(cache: RecurrentCache, width: int) -> RecurrentCache:
    """See `tfm.nn.cache.widen`."""
    carries, attentional = jax.tree.map(lambda x: jnp.repeat(x, width, axis=0), (cache.carries, cache.attentional))
    return dataclasses.replace(cache, carries=carries, attentional=attentional, hypotheses=width)


def reordered(cache: RecurrentCache, parents: Int[Array, "BW"]) -> RecurrentCache:
    """See `tfm.nn.cache.reorder`."""
    carries, attentional = jax.tree.map(lambda x: x[parents], (cache.carries, cache.attentional))
    return dataclasses.replace(cache, carries=carries, attentional=attentional)
