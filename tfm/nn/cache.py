"""The key/value cache: an immutable pytree. `prefill` makes it; decode steps, `reorder`, `widen`, `grow` make another.

Keys and values lie [B, K, C, H], heads before positions: scores and weighted sums then read each head's block as it
lies, where [B, C, K, H] would be transposed, whole, at every step.

Of W hypotheses of a row, as beam search has them, all keys and values lie together, [B, K, C·W, H]: hypothesis w
writes position c into place c·W + w, once, and nothing moves when hypotheses change their order. Whose key a hypothesis
sees at a position is an index, `Cache.ancestors`, and a mask made of it: every hypothesis meets all keys of its row in
one product, and those that are not its own count nothing. That is W times the multiplications of attention, a small
part of a step, and not one copy, where reordering copies the whole cache at every step.

They lie in float32 or bfloat16, or in eight bits an entry with a float32 scale for each vector: each is rounded when it
is written, and then never again. Attention multiplies what lies there, and scales scores and weights instead of keys
and values, so that no cache in floats is made of it.

Every array of the self-attention, scales too, has its positions on axis 2, and zeros there are empty places.

A recurrent model has no keys and values of its target: its cache is in `tfm.nn.recurrent_cache`. `init_cache`,
`cache_bytes`, `widen`, `grow` and `reorder` serve both.
"""

import dataclasses
import typing

import flax.struct
import jax
import jax.numpy as jnp

from tfm.axes import Array, Float, Int
from tfm.config import ModelConfig
from tfm.nn import recurrent_cache
from tfm.nn.recurrent_cache import RecurrentCache
from tfm.nn.stored_vectors import CacheDtype, Int8Vectors, check_cache_dtype, no_vectors, stored, vector_bytes
from tfm.sharding import Placement, constrain


@typing.no_type_check  # pytrees are also built from shapes, specs and other non-arrays
@flax.struct.dataclass
class KeysValues:
    """The keys and values of one attention, rotated already where positions are rotary."""

    keys: Float[Array, "B K M H"] | Int8Vectors
    values: Float[Array, "B K M H"] | Int8Vectors

    @property
    def length(self) -> int:
        """M: how many keys there are."""
        return jax.tree.leaves(self.keys)[0].shape[2]

    def stored(self, dtype: CacheDtype) -> "KeysValues":
        """Floats, as a cache of that dtype holds them."""
        assert not isinstance(self.keys, Int8Vectors)
        assert not isinstance(self.values, Int8Vectors)
        return KeysValues(stored(self.keys, dtype), stored(self.values, dtype))


@typing.no_type_check
@flax.struct.dataclass
class LayerCache:
    """What one decoder layer remembers."""

    self_attention: KeysValues
    """Of the target so far, [B, K, C·W, H]: entries from a row's length on are junk that no query may see."""
    cross_attention: KeysValues | None
    """Of the encoded source, [B, K, S, H]: written by `prefill`, only read after. None in a decoder-only model."""


@typing.no_type_check
@flax.struct.dataclass
class Cache:
    """All that decoding with a Transformer remembers between steps."""

    layers: tuple[LayerCache, ...]
    lengths: Int[Array, "B"]
    """Tokens written in each row, by every hypothesis of it; the next one gets this position."""
    source_lengths: Int[Array, "B"]
    """Real source tokens of each row; all zero in a decoder-only model, whose source lies in the self-attention."""
    ancestors: Int[Array, "B W C"] | None = None
    """Whose key stands at each position of each hypothesis, from 0 to W - 1; from a row's length on, junk. None: each
    row has one continuation."""

    @property
    def width(self) -> int:
        """W: hypotheses of each row."""
        return 1 if self.ancestors is None else self.ancestors.shape[1]

    @property
    def capacity(self) -> int:
        """C: the most tokens a row can hold; in a decoder-only model its source is among them."""
        return self.layers[0].self_attention.length // self.width


AnyCache = Cache | RecurrentCache
"""What `prefill` makes and a decode step takes and gives."""


def init_keys_values(config: ModelConfig, *, batch: int, length: int, dtype: CacheDtype) -> KeysValues:
    shape = (batch, config.kv_heads, length, config.head_size)
    return KeysValues(no_vectors(shape, dtype), no_vectors(shape, dtype))


def init_cache(
    config: ModelConfig, *, batch: int, source_length: int, capacity: int, dtype: CacheDtype = "float32"
) -> AnyCache:
    """An empty cache for `capacity` target tokens a row, as `prefill` fills it.

    Args:
        config: the model.
        batch: rows.
        source_length: S, what sources are padded to.
        capacity: C. In a decoder-only model, whose source lies before its target, S + C positions are made. In a
            recurrent model nothing depends on it.
        dtype: of keys and values, as for `cache_bytes`.

    Returns:
        Zeros; all lengths are 0, those of the sources too, so a decode step sees no source.

    Raises:
        ValueError: a dtype that no cache has.
    """
    check_cache_dtype(dtype)
    if config.architecture == "recurrent":
        return recurrent_cache.empty(config, batch=batch, source_length=source_length, dtype=dtype)
    has_source = config.has_encoder
    length = capacity if has_source else source_length + capacity
    layers = tuple(
        LayerCache(
            init_keys_values(config, batch=batch, length=length, dtype=dtype),
            init_keys_values(config, batch=batch, length=source_length, dtype=dtype) if has_source else None,
        )
        for _ in range(config.decoder_layers)
    )
    return Cache(layers, jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32))


def cache_bytes(
    config: ModelConfig,
    *,
    batch: int,
    source_length: int,
    capacity: int,
    beams: int = 1,
    dtype: CacheDtype = "float32",
) -> int:
    """Bytes of a cache, said before anything is allocated: 2 · (B·W·C + B·S) · K · H · L · itemsize, and the integers.

    Integers are the lengths and, of more than one beam, `Cache.ancestors`. In int8, whose vectors have a float32 scale
    each, H + 4 bytes stand for H · itemsize.

    C is the capacity in target tokens, as for `prefill`. All W beams of a row share its source; in a decoder-only
    model each has its own, B·W·(C + S) positions. With K = N that is the textbook's
    2 · batch · length · heads · head size · layers · bytes. A recurrent model's bytes do not depend on C: see
    `tfm.nn.recurrent_cache.count_bytes`.

    Args:
        config: the model.
        batch: rows, beams not counted.
        source_length: S, what sources are padded to.
        capacity: C.
        beams: W.
        dtype: of keys and values, or of the encoder's states: the model's `cache_dtype`, which without another word is
            `tfm.nn.layers.stream_dtype` of the model's dtype, and on a CPU float32.

    Raises:
        ValueError: a dtype that no cache has.
    """
    check_cache_dtype(dtype)
    if config.architecture == "recurrent":
        return recurrent_cache.count_bytes(config, batch=batch, source_length=source_length, beams=beams, dtype=dtype)
    sources = batch if config.has_encoder else batch * beams
    positions = batch * beams * capacity + sources * source_length
    vectors = 2 * positions * config.kv_heads * config.decoder_layers
    length = capacity if config.has_encoder else capacity + source_length
    integers = 2 * batch + (batch * beams * length if beams > 1 else 0)
    return vectors * vector_bytes(config.head_size, dtype) + integers * jnp.dtype(jnp.int32).itemsize


def write(cache: KeysValues, new: KeysValues, starts: Int[Array, "B"]) -> KeysValues:
    """Writes T new positions, in floats, into each row, from that row's start on, and in the cache's own dtype.

    One `dynamic_update_slice` a row: in place where the old cache is donated or carried by a loop, and, unlike a
    scatter, local under sharding by rows. JAX clamps a slice that would not fit, which would overwrite older
    positions; the caller keeps starts + T within the capacity.

    Example:
        >>> old = KeysValues(jnp.zeros((2, 1, 3, 1)), jnp.zeros((2, 1, 3, 1)))
        >>> new = KeysValues(jnp.ones((2, 1, 1, 1)), jnp.ones((2, 1, 1, 1)))
        >>> write(old, new, jnp.array([0, 2])).keys[:, 0, :, 0].tolist()
        [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    """

    def write_row(row: Array, new_row: Array, start: Array) -> Array:
        zero = jnp.zeros_like(start)  # all indices must have one dtype, which that of a 0 is not in 64-bit mode
        return jax.lax.dynamic_update_slice(row, new_row, (zero, start, zero))

    dtype = "int8" if isinstance(cache.keys, Int8Vectors) else cache.keys.dtype.name
    return jax.tree.map(
        lambda old, added: jax.vmap(write_row)(old, added, starts), cache, new.stored(typing.cast(CacheDtype, dtype))
    )


def placed(keys_values: KeysValues, placement: Placement | None) -> KeysValues:
    """Cut by rows and by heads, where there is a placement: in the middle of a computation."""
    return jax.tree.map(lambda x: constrain(placement, x, "batch", "kv_heads", None, None), keys_values)


def widen(cache: AnyCache, width: int) -> AnyCache:
    """W equal hypotheses for each row, on one source, [B, K, S, H], which is not repeated.

    A recurrent model's carries are repeated. In a Transformer what has been written stays that of the first hypothesis,
    and all others see it as their ancestor's.

    Args:
        cache: with one continuation a row.
        width: W, at least 1.

    Raises:
        ValueError: no such width, or the cache was widened before.
    """
    if width < 1 or _is_widened(cache):
        was = f" and a cache of {cache.width} hypotheses a row" if _is_widened(cache) else ""
        raise ValueError(f"expected a width of at least 1 and a cache not widened yet, got {width}{was}")
    if isinstance(cache, RecurrentCache):
        return recurrent_cache.widened(cache, width)

    def spread(x: Array) -> Array:
        batch, heads, capacity, dim = x.shape
        places = jnp.pad(x[:, :, :, None], ((0, 0), (0, 0), (0, 0), (0, width - 1), (0, 0)))
        return places.reshape(batch, heads, capacity * width, dim)

    layers = tuple(
        LayerCache(jax.tree.map(spread, layer.self_attention), layer.cross_attention) for layer in cache.layers
    )
    ancestors = jnp.zeros((cache.lengths.shape[0], width, cache.capacity), jnp.int32)
    return Cache(layers, cache.lengths, cache.source_lengths, ancestors)


def _is_widened(cache: AnyCache) -> bool:
    return (cache.hypotheses if isinstance(cache, RecurrentCache) else cache.ancestors) is not None


def grow(cache: AnyCache, capacity: int) -> AnyCache:
    """The same with room for more tokens, free places behind those that there were: a copy, each time.

    A recurrent model's cache has room for any number, and stays as it is.

    Args:
        cache: as it is.
        capacity: C of the result, at least that of the cache.

    Raises:
        ValueError: a smaller capacity.
    """
    if isinstance(cache, RecurrentCache):
        return cache
    if capacity < cache.capacity:
        raise ValueError(f"expected a capacity of at least {cache.capacity}, which the cache has, got {capacity}")
    added = capacity - cache.capacity

    def lengthen(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, 0), (0, added * cache.width), (0, 0)))

    layers = tuple(
        LayerCache(jax.tree.map(lengthen, layer.self_attention), layer.cross_attention) for layer in cache.layers
    )
    ancestors = None if cache.ancestors is None else jnp.pad(cache.ancestors, ((0, 0), (0, 0), (0, added)))
    return Cache(layers, cache.lengths, cache.source_lengths, ancestors)


def reorder(cache: AnyCache, parents: Int[Array, "BW"]) -> AnyCache:
    """Hypothesis i of the result continues hypothesis parents[i]: only the index of ancestors changes, or the carries.

    Args:
        cache: from `widen`, or a decode step on one.
        parents: from 0 to B·W - 1, hypotheses lying row after row, and each within the W of its own row; neither is
            checked.

    Raises:
        ValueError: the cache was not widened.
    """
    if not _is_widened(cache):
        raise ValueError("expected a cache of several hypotheses a row, from widen(cache, width), got one without")
    if isinstance(cache, RecurrentCache):
        return recurrent_cache.reordered(cache, parents)
    assert cache.ancestors is not None
    within_row = parents.reshape(-1, cache.width) % cache.width
    ancestors = jnp.take_along_axis(cache.ancestors, within_row[..., None], axis=1)
    return dataclasses.replace(cache, ancestors=ancestors)


def own_from_now_on(cache: Cache) -> Int[Array, "B W C"]:
    """The ancestors, with each hypothesis its own from the row's length on: as they are when the next token is written.

    Example:
        >>> layer = LayerCache(KeysValues(*2 * [jnp.zeros((1, 1, 6, 1))]), None)
        >>> cache = Cache((layer,), jnp.array([1]), jnp.array([0]), jnp.array([[[0, 0, 0], [0, 0, 0]]]))
        >>> own_from_now_on(cache).tolist()
        [[[0, 0, 0], [0, 1, 1]]]
    """
    assert cache.ancestors is not None
    written = jnp.arange(cache.capacity)[None] < cache.lengths[:, None]
    return jnp.where(written[:, None], cache.ancestors, jnp.arange(cache.width, dtype=jnp.int32)[None, :, None])
