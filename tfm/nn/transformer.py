"""The Transformer: encoder, decoder, and the two models made of them. The file to read beside the paper.

Its layers are in `tfm.nn.blocks`. Training, prefill and decode run the same ones. A decoder layer always gives back its
self-attention's keys and values: training drops them, `prefill` keeps them as the cache, and a decode step hands the
cache in and gets it back with its own tokens added. So what is learned and what is decoded cannot drift apart.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from tfm.axes import Array, Float, Int
from tfm.checks import check_length
from tfm.config import ModelConfig
from tfm.nn import cache as caches
from tfm.nn import layers, positions
from tfm.nn.attention import Kernel
from tfm.nn.blocks import DecoderLayer, EncoderLayer
from tfm.nn.cache import Cache, CacheDtype, KeysValues, LayerCache
from tfm.nn.masks import Visible, ancestor_mask
from tfm.sharding import Placement, constrain


class Stack(nn.Module):
    """What encoder and decoder share: positions on the way in, the last norm on the way out."""

    config: ModelConfig
    dtype: layers.Dtype = "float32"
    kernel: Kernel = "auto"
    placement: Placement | None = None

    def setup_shared(self, *, max_length: int) -> None:
        config = self.config
        self.dropout = layers.Dropout(config.dropout_rate)
        if config.positions == "learned":
            self.position_embedding = layers.Embedding(max_length, config.model_dim, self.dtype)
        if config.positions == "t5-bias":
            self.relative_bias = layers.Embedding(config.relative_buckets, config.num_heads)
        if config.norm_position == "pre":
            self.norm = layers.Norm(config)

    def add_positions(self, embedded: Float[Array, "B T D"], at: Int[Array, "*B T"]) -> Float[Array, "B T D"]:
        """The embeddings with absolute positions, if the model has such, after dropout."""
        config = self.config
        if config.positions in ("sinusoidal", "sinusoidal-halves"):
            halves = config.positions == "sinusoidal-halves"
            embedded += positions.sinusoidal(at, config.model_dim, halves=halves).astype(embedded.dtype)
        elif config.positions == "learned":
            embedded += self.position_embedding(at)
        return self.dropout(embedded)

    def rotary(self, at: Int[Array, "*B T"]) -> Int[Array, "*B T"] | None:
        """The positions to rotate queries and keys by, or None where the model does not rotate."""
        return at if self.config.positions in ("rope", "rope-halves") else None

    def bias(
        self, queries_at: Int[Array, "*B Q"], num_keys: int, *, bidirectional: bool
    ) -> Float[Array, "*B N Q M"] | None:
        """The bias on attention scores of a query at each position against keys 0 … num_keys-1, or None."""
        config = self.config
        if config.positions not in ("t5-bias", "alibi"):
            return None
        offsets = jnp.arange(num_keys)[None, None] - queries_at[..., None]
        if config.positions == "alibi":
            return positions.alibi_bias(offsets, config.num_heads)
        bucket = positions.relative_bucket(
            offsets,
            bidirectional=bidirectional,
            num_buckets=config.relative_buckets,
            max_distance=config.relative_max_distance,
        )
        return jnp.moveaxis(self.relative_bias(bucket).astype(jnp.float32), -1, -3)

    def finish(self, x: Array) -> Array:
        """Pre-norm leaves the residual stream unnormalised; this is the norm it ends with."""
        return self.norm(x) if self.config.norm_position == "pre" else x


class Encoder(Stack):
    """Embedded source in, one vector a token out."""

    def setup(self) -> None:
        self.setup_shared(max_length=self.config.max_source_length)
        self.layers = [
            EncoderLayer(self.config, self.dtype, self.kernel, self.placement, name=f"layer_{i}")
            for i in range(self.config.encoder_layers)
        ]

    def __call__(self, embedded: Float[Array, "B S D"], lengths: Int[Array, "B"]) -> Float[Array, "B S D"]:
        source_length = embedded.shape[1]
        at = jnp.arange(source_length)[None]
        bias = self.bias(at, source_length, bidirectional=True)
        x = self.add_positions(embedded, at)
        for layer in self.layers:
            x = layer(x, visible=Visible(key_lengths=lengths), rotary_positions=self.rotary(at), bias=bias)
        return self.finish(x)


class Decoder(Stack):
    """Embedded target in, one vector a token out, each computed from tokens up to its own."""

    max_length: int = 1024
    has_source: bool = True

    def setup(self) -> None:
        self.setup_shared(max_length=self.max_length)
        self.layers = [
            DecoderLayer(
                self.config, self.dtype, self.kernel, self.placement, has_source=self.has_source, name=f"layer_{i}"
            )
            for i in range(self.config.decoder_layers)
        ]

    def cross_keys_values(self, encoded: Float[Array, "B S D"]) -> tuple[KeysValues | None, ...]:
        """Every layer's keys and values of the source."""
        return tuple(layer.cross_keys_values(encoded) for layer in self.layers)

    def __call__(
        self,
        embedded: Float[Array, "BW T D"],
        sources: tuple[KeysValues | None, ...],
        source_lengths: Int[Array, "B"] | None,
        past: Cache | None = None,
    ) -> tuple[Float[Array, "BW T D"], tuple[KeysValues, ...]]:
        """Runs T tokens, which follow the `past` where there is one.

        W hypotheses of a row run as one row of T·W tokens, W at each position, of which each sees its own ancestors:
        so they share the source, and whatever they have in common.

        Returns:
            The tokens' vectors, and every layer's self-attention keys and values: of these tokens, or of the past with
            these tokens written behind.
        """
        num_tokens, width = embedded.shape[1], 1 if past is None else past.width
        at = jnp.arange(num_tokens)[None]
        num_keys, visible = num_tokens, Visible(causal=True)
        if past is not None:
            at = past.lengths[:, None] + at
            num_keys = past.capacity
            if past.ancestors is not None:
                visible = Visible(mask=ancestor_mask(caches.own_from_now_on(past), at))
            elif num_tokens == 1:  # one query sees a prefix of the cache: said by lengths, a fused kernel can serve
                visible = Visible(key_lengths=past.lengths + 1)
            else:
                visible = Visible(causal=True, query_positions=at)
        at = jnp.repeat(at, width, axis=1)
        bias = self.bias(at, num_keys, bidirectional=False)
        if bias is not None:
            bias = jnp.repeat(bias, width, axis=-1)
        x = self.add_positions(beside_each_other(embedded, width), at)
        seen = []
        for i, layer in enumerate(self.layers):
            x, layer_seen = layer(
                x,
                visible=visible,
                rotary_positions=self.rotary(at),
                bias=bias,
                source=sources[i],
                source_visible=Visible(key_lengths=source_lengths),
                past=None if past is None else past.layers[i].self_attention,
                first_free=None if past is None else past.lengths * width,
            )
            seen.append(layer_seen)
        return below_each_other(self.finish(x), width), tuple(seen)


class Transformer(nn.Module):
    """What both models share: target embedding, the output projection, and the decode step."""

    config: ModelConfig
    dtype: layers.Dtype = "float32"
    kernel: Kernel = "auto"
    cache_dtype: CacheDtype = "float32"
    placement: Placement | None = None

    def setup_shared(self, *, max_length: int, has_source: bool) -> None:
        config = self.config
        self.target_embedding = layers.Embedding(config.target_vocab_size, config.model_dim, self.dtype)
        if config.shared_embeddings == "none":
            self.output = layers.Linear(config.target_vocab_size, use_bias=False, dtype=self.dtype)
        self.decoder = Decoder(
            config, self.dtype, self.kernel, self.placement, max_length=max_length, has_source=has_source
        )

    def embed(self, embedding: layers.Embedding, ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        embedded = constrain(self.placement, embedding(ids), "batch", None, None)
        return embedded * math.sqrt(self.config.model_dim) if self.config.scale_embeddings else embedded

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """The score of every vocabulary entry as the next token, in float32."""
        if self.config.scale_logits:
            x *= 1 / math.sqrt(self.config.model_dim)
        if self.config.shared_embeddings == "none":
            logits = self.output(x.astype(jnp.float32))  # a Linear returns the dtype it is given
        else:
            logits = self.target_embedding.logits(x)
        return constrain(self.placement, logits, "batch", None, "vocab")

    def decode_step(self, tokens: Int[Array, "B T"], cache: Cache) -> tuple[Float[Array, "B T V"], Cache]:
        """Runs the next T tokens of every row against the cache.

        Returns:
            The logits after each of the tokens, and the cache with the tokens in it. The cache passed in is unchanged.
        """
        sources = tuple(layer.cross_attention for layer in cache.layers)
        x, seen = self.decoder(self.embed(self.target_embedding, tokens), sources, cache.source_lengths, past=cache)
        new_layers = tuple(
            LayerCache(self_attention=kept, cross_attention=layer.cross_attention)
            for layer, kept in zip(cache.layers, seen, strict=True)
        )
        ancestors = None if cache.ancestors is None else caches.own_from_now_on(cache)
        return self.logits(x), Cache(new_layers, cache.lengths + tokens.shape[1], cache.source_lengths, ancestors)

    def start_cache(
        self,
        prompt_seen: tuple[KeysValues, ...],
        sources: tuple[KeysValues | None, ...],
        lengths: Int[Array, "B"],
        source_lengths: Int[Array, "B"],
        capacity: int,
    ) -> Cache:
        """The prompt's keys and values at the front of an empty cache, all of them rounded to the cache's dtype."""

        def lengthen(x: Array) -> Array:
            return jnp.pad(x, ((0, 0), (0, 0), (0, capacity - x.shape[2]), (0, 0)))

        layer_caches = tuple(
            LayerCache(
                self_attention=caches.placed(jax.tree.map(lengthen, seen.stored(self.cache_dtype)), self.placement),
                cross_attention=None
                if source is None
                else caches.placed(source.stored(self.cache_dtype), self.placement),
            )
            for seen, source in zip(prompt_seen, sources, strict=True)
        )
        return Cache(layer_caches, lengths, source_lengths)


class EncoderDecoder(Transformer):
    """The Transformer of Vaswani et al. 2017, figure 1."""

    def setup(self) -> None:
        config = self.config
        self.setup_shared(max_length=config.max_target_length, has_source=True)
        if config.shared_embeddings != "all":
            self.source_embedding = layers.Embedding(config.source_vocab_size, config.model_dim, self.dtype)
        self.encoder = Encoder(config, self.dtype, self.kernel, self.placement)

    def encode(self, source: Int[Array, "B S"], source_lengths: Int[Array, "B"]) -> Float[Array, "B S D"]:
        """One vector for each source token; those of padding are junk that nobody attends to."""
        check_length("source", source.shape[1], self.config.max_source_length, least=1)
        shared = self.config.shared_embeddings == "all"
        embedding = self.target_embedding if shared else self.source_embedding
        return self.encoder(self.embed(embedding, source), source_lengths)

    def decode(
        self, encoded: Float[Array, "B S D"], source_lengths: Int[Array, "B"], target_in: Int[Array, "B T"]
    ) -> Float[Array, "B T V"]:
        """The logits after every token of `target_in`, teacher-forced."""
        check_length("target", target_in.shape[1], self.config.max_target_length)
        sources = self.decoder.cross_keys_values(encoded)
        x, _ = self.decoder(self.embed(self.target_embedding, target_in), sources, source_lengths)
        return self.logits(x)

    def __call__(
        self, source: Int[Array, "B S"], source_lengths: Int[Array, "B"], target_in: Int[Array, "B T"]
    ) -> Float[Array, "B T V"]:
        """The logits after every token of `target_in`, teacher-forced, in float32.

        Args:
            source: ids, padded on the right.
            source_lengths: real tokens of each source; a row of 0 sees no source.
            target_in: the start token, then the target; padding on the right changes nothing before it.

        Raises:
            ValueError: source or target is longer than the model accepts, or the source has no tokens, padding counted.
        """
        return self.decode(self.encode(source, source_lengths), source_lengths, target_in)

    def prefill(
        self,
        source: Int[Array, "B S"],
        source_lengths: Int[Array, "B"],
        prompt: Int[Array, "B T"],
        prompt_lengths: Int[Array, "B"],
        capacity: int,
    ) -> tuple[Float[Array, "B 1 V"], Cache]:
        """Encodes the source, projects its keys and values for every layer, and runs the prompt in one pass.

        Returns:
            The logits after each row's last prompt token, and a cache that can hold `capacity` target tokens.
        """
        check_length("cache capacity", capacity, self.config.max_target_length)
        check_length("prompt", prompt.shape[1], capacity)
        sources = self.decoder.cross_keys_values(self.encode(source, source_lengths))
        x, seen = self.decoder(self.embed(self.target_embedding, prompt), sources, source_lengths)
        last = jnp.take_along_axis(x, prompt_lengths[:, None, None] - 1, axis=1)
        return self.logits(last), self.start_cache(seen, sources, prompt_lengths, source_lengths, capacity)


class DecoderOnly(Transformer):
    """A decoder alone: each row's source and target are one sequence, without a gap between them.

    A language model on plain text is the same with S = 0.
    """

    def setup(self) -> None:
        self.setup_shared(max_length=self._max_length, has_source=False)

    @property
    def _max_length(self) -> int:
        return self.config.max_source_length + self.config.max_target_length

    def __call__(
        self, source: Int[Array, "B S"], source_lengths: Int[Array, "B"], target_in: Int[Array, "B T"]
    ) -> Float[Array, "B T V"]:
        """The logits after every token of `target_in`, each seeing its row's source and the target so far."""
        check_length("source", source.shape[1], self.config.max_source_length)
        check_length("target", target_in.shape[1], self.config.max_target_length)
        x, _ = self._run(join(source, source_lengths, target_in))
        if source.shape[1]:
            at_target = source_lengths[:, None] + jnp.arange(target_in.shape[1])[None]
            x = jnp.take_along_axis(x, at_target[..., None], axis=1)
        return self.logits(x)

    def prefill(
        self,
        source: Int[Array, "B S"],
        source_lengths: Int[Array, "B"],
        prompt: Int[Array, "B T"],
        prompt_lengths: Int[Array, "B"],
        capacity: int,
    ) -> tuple[Float[Array, "B 1 V"], Cache]:
        """Runs source and prompt in one pass. The cache holds the source and `capacity` target tokens."""
        check_length("source", source.shape[1], self.config.max_source_length)
        check_length("cache capacity", capacity, self.config.max_target_length)
        check_length("prompt", prompt.shape[1], capacity)
        x, seen = self._run(join(source, source_lengths, prompt))
        lengths = source_lengths + prompt_lengths
        last = jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)
        no_sources = (None,) * self.config.decoder_layers
        cache = self.start_cache(seen, no_sources, lengths, jnp.zeros_like(lengths), source.shape[1] + capacity)
        return self.logits(last), cache

    def _run(self, tokens: Int[Array, "B T"]) -> tuple[Array, tuple[KeysValues, ...]]:
        no_sources = (None,) * self.config.decoder_layers
        return self.decoder(self.embed(self.target_embedding, tokens), no_sources, None)


def beside_each_other(x: Float[Array, "BW T D"], width: int) -> Float[Array, "B TW D"]:
    """The W hypotheses of each row in one row: token t of hypothesis w comes to place t·W + w."""
    return x.reshape(-1, width, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape[0] // width, -1, x.shape[-1])


def below_each_other(x: Float[Array, "B TW D"], width: int) -> Float[Array, "BW T D"]:
    """The inverse of `beside_each_other`."""
    return x.reshape(x.shape[0], -1, width, x.shape[-1]).swapaxes(1, 2).reshape(x.shape[0] * width, -1, x.shape[-1])


def join(source: Int[Array, "B S"], source_lengths: Int[Array, "B"], target: Int[Array, "B T"]) -> Int[Array, "B S+T"]:
    """Each row's real source tokens, then its target, then whatever: padding moves from the middle to the end.

    Example:
        >>> join(jnp.array([[7, 8], [9, 0]]), jnp.array([2, 1]), jnp.array([[1, 5], [1, 6]])).tolist()
        [[7, 8, 1, 5], [9, 1, 6, 6]]
    """
    if source.shape[1] == 0:
        return target
    at = jnp.arange(source.shape[1] + target.shape[1])[None]
    in_target = jnp.clip(at - source_lengths[:, None], 0, target.shape[1] - 1)
    in_source = jnp.broadcast_to(jnp.minimum(at, source.shape[1] - 1), in_target.shape)
    is_source = at < source_lengths[:, None]
    return jnp.where(
        is_source, jnp.take_along_axis(source, in_source, axis=1), jnp.take_along_axis(target, in_target, axis=1)
    )
