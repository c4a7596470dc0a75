"""Recurrent encoder-decoders: what sequence transduction was before the Transformer, under the same interface.

One cell, Elman's, an LSTM's or a GRU's, reads a sequence token by token and has all that it knows of it in a state of
fixed size, its carry. An encoder reads the source; a decoder starts from its last states and predicts the target token
by token. How the decoder gets at the source besides is `ModelConfig.source_context`: not at all (Sutskever et al.
2014), through the encoder's last state at each step (Cho et al. 2014), or by attention (Bahdanau et al. 2014; Luong et
al. 2015), which is in `tfm.nn.source_attention`.

Training, prefill and decoding run the same `DecoderStep` in the same scan, over all tokens of the target, those of the
prompt, or the T of a decode step. A carry is only ever made of real tokens: padding neither enters nor leaves it.

Cells are those of `flax.linen`, whose matrices lie [in, out] and are called `kernel`.
"""

import dataclasses
import functools
import math
import typing

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from tfm.axes import Array, Float, Int
from tfm.checks import check_length
from tfm.config import LUONG, ModelConfig
from tfm.nn import layers
from tfm.nn.recurrent_cache import Carry, RecurrentCache, Source, first_attentional, first_carries
from tfm.nn.source_attention import SourceAttention
from tfm.nn.stored_vectors import CacheDtype
from tfm.sharding import Placement, constrain


def make_cell(config: ModelConfig, dtype: layers.Dtype, name: str | None = None) -> nn.RNNCellBase:
    """One recurrent cell of D units, to be named by the module that it is given to unless it has a name here.

    Its products are made in `dtype`; gates and what goes into the carry are float32, or states would be rounded at
    every step. In an Elman cell h_t = tanh(W_xh x_t + W_hh h_{t-1} + b_h). A GRU's reset gate multiplies W_hn h + b_hn,
    where that of Cho et al. 2014 multiplies h before the product.
    """
    common: dict[str, typing.Any] = dict(features=config.model_dim, activation_fn=_tanh, dtype=dtype, name=name)
    if name is None:
        common["parent"] = None
    if config.cell == "rnn":
        return nn.SimpleCell(**common)
    return {"lstm": nn.OptimizedLSTMCell, "gru": nn.GRUCell}[config.cell](gate_fn=_sigmoid, **common)


def _tanh(x: Array) -> Array:
    return jnp.tanh(x.astype(jnp.float32))


def _sigmoid(x: Array) -> Array:
    return jax.nn.sigmoid(x.astype(jnp.float32))


def hidden(carry: Carry) -> Array:
    """h of a carry: an LSTM's has its memory before it."""
    return carry[1] if isinstance(carry, tuple) else carry


class RecurrentEncoder(nn.Module):
    """Embedded source in, a state a token out, and the carries that the decoder's layers start from.

    Dropout falls on what goes from layer to layer, the embedding included, and never on what goes from token to token
    (Zaremba et al. 2014).

    Each decoder layer starts from the last carry of the encoder's layer of the same number. Where the encoder reads in
    both directions, from both last states beside each other, projected to D: h from tanh(W [h→; h←]), as the first
    state of Bahdanau et al. 2014 is made of h← alone, and an LSTM's memory from W' [c→; c←], without a tanh, since a
    memory has no bounds.
    """

    config: ModelConfig
    dtype: layers.Dtype = "float32"

    def setup(self) -> None:
        config, numbers = self.config, range(self.config.encoder_layers)
        self.dropout = layers.Dropout(config.dropout_rate)

        def read(name: str | None = None) -> nn.RNN:
            place: dict[str, typing.Any] = dict(parent=None) if name is None else dict(name=name)
            return nn.RNN(make_cell(config, self.dtype), return_carry=True, **place)

        def read_both_ways(name: str) -> nn.Bidirectional:
            return nn.Bidirectional(read(), read(), return_carry=True, name=name)

        self.layers = [(read_both_ways if config.bidirectional else read)(f"layer_{i}") for i in numbers]
        if not config.bidirectional:
            return
        linear = functools.partial(layers.Linear, config.model_dim, use_bias=False, dtype=self.dtype)
        self.start_hidden = [linear(name=f"start_hidden_{i}") for i in numbers]
        if config.cell == "lstm":
            self.start_memory = [linear(name=f"start_memory_{i}") for i in numbers]

    def __call__(
        self, embedded: Float[Array, "B S D"], lengths: Int[Array, "B"]
    ) -> tuple[Float[Array, "B S E"], Float[Array, "B E"], tuple[Carry, ...]]:
        """Returns each token's state in the last layer, the last of these, and the decoder's first carries.

        A row without tokens has a last state and carries of zeros; states of padding are junk.
        """
        nothing = first_carries(self.config, len(embedded))
        x, starts = embedded, []
        for i, layer in enumerate(self.layers):
            first = (nothing[i], nothing[i]) if self.config.bidirectional else nothing[i]
            carry, x = layer(self.dropout(x), initial_carry=first, seq_lengths=lengths)
            # of a row without tokens `nn.RNN` gives the carry after its padding
            carry = jax.tree.map(lambda each: jnp.where(lengths[:, None] > 0, each, 0), carry)
            if self.config.bidirectional:
                carry = jax.tree.map(lambda *both: jnp.concatenate(both, axis=-1), *carry)
            last = hidden(carry)
            starts.append(self._projected(carry, i) if self.config.bidirectional else carry)
        return x, last, tuple(starts)

    def _projected(self, carry: Carry, layer: int) -> Carry:
        h = jnp.tanh(self.start_hidden[layer](hidden(carry)))
        return (self.start_memory[layer](carry[0]), h) if self.config.cell == "lstm" else h


@typing.no_type_check  # a pytree is also built from shapes, specs and other non-arrays
@flax.struct.dataclass
class DecoderState:
    """What goes from one step of the decoder to the next."""

    carries: tuple[Carry, ...]
    """Of each layer, [B·W, D]."""
    attentional: Float[Array, "BW D"] | None
    """h̃ of the last step, where the next one reads it."""
    position: Int[Array, "B"]
    """Of the token that comes next."""


class DecoderStep(nn.Module):
    """One token of every hypothesis: what comes from the source joins its embedding, and the cells follow each other.

    Bahdanau et al. 2014 look at the source before the step, with the last layer's state, which does not know yet the
    token that the step reads, and the first cell reads what they find. Luong et al. 2015 look after it, with the state
    that the step came to, and what they predict from is the attentional vector h̃ = tanh(W_c [c; h]) (equation 5),
    which with input feeding the next step's first cell reads.
    """

    config: ModelConfig
    dtype: layers.Dtype = "float32"

    def setup(self) -> None:
        config = self.config
        self.dropout = layers.Dropout(config.dropout_rate)
        self.cells = [make_cell(config, self.dtype, f"layer_{i}") for i in range(config.decoder_layers)]
        if config.attends_to_source:
            self.attention = SourceAttention(config, self.dtype)
        if config.source_context in LUONG:
            self.combine = layers.Linear(config.model_dim, use_bias=False, dtype=self.dtype)

    def __call__(
        self,
        state: DecoderState,
        embedded: Float[Array, "BW D"],
        source: Source,
        source_lengths: Int[Array, "B"],
        lengths: Int[Array, "B"] | None,
    ) -> tuple[DecoderState, tuple[Float[Array, "BW D"], Float[Array, "BW S"] | None]]:
        """Returns the next state; the vector that the next token is predicted from, and the weights that it took.

        With `lengths`, W being 1, the state of a row that has so many tokens stays as it is.
        """
        config, rows, weights = self.config, len(source_lengths), None

        def look(h: Array) -> tuple[Array, Array]:
            query = h.reshape(rows, -1, h.shape[-1])
            found = self.attention(query, source, source_lengths, state.position)
            return typing.cast(tuple[Array, Array], jax.tree.map(lambda x: x.reshape(len(h), x.shape[-1]), found))

        read = [embedded]
        if config.source_context == "fixed-each-step":
            assert source.last is not None
            read.append(jnp.repeat(source.last, len(embedded) // rows, axis=0))
        elif config.source_context == "additive":
            context, weights = look(hidden(state.carries[-1]))
            read.append(context)
        if state.attentional is not None:
            read.append(state.attentional)
        x, carries = jnp.concatenate(read, axis=-1), []
        for i, cell in enumerate(self.cells):
            carry, x = cell(state.carries[i], x if i == 0 else self.dropout(x))
            carries.append(carry)
        if config.source_context in LUONG:
            context, weights = look(x)
            x = jnp.tanh(self.combine(jnp.concatenate([context, x], axis=-1)))
        new = DecoderState(tuple(carries), x if config.input_feeding else None, state.position + 1)
        if lengths is not None:
            goes_on = state.position < lengths
            new = jax.tree.map(lambda now, was: jnp.where(_as_column(goes_on, now), now, was), new, state)
        return new, (x, weights)


def _as_column(x: Array, like: Array) -> Array:
    return x.reshape(-1, *(1,) * (like.ndim - 1))


class RecurrentDecoder(nn.Module):
    """Embedded target in, one vector a token out: `DecoderStep` under `lax.scan`, compiled once for any length."""

    config: ModelConfig
    dtype: layers.Dtype = "float32"

    def setup(self) -> None:
        self.dropout = layers.Dropout(self.config.dropout_rate)
        self.step = DecoderStep(self.config, self.dtype)

    def keys(self, states: Float[Array, "B S E"]) -> Float[Array, "B S D"] | None:
        """What attention's scores have in common for all steps."""
        return self.step.attention.keys(states)

    def __call__(
        self,
        embedded: Float[Array, "BW T D"],
        state: DecoderState,
        source: Source,
        source_lengths: Int[Array, "B"],
        lengths: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "BW T D"], Float[Array, "BW T S"] | None, DecoderState]:
        """Returns what the next tokens are predicted from, the weights on the source, and the state after the tokens.

        With `lengths` it is the state after each row's own number of tokens, of which W is 1.
        """

        def run(step: DecoderStep, *given: typing.Any) -> typing.Any:
            return step(*given)

        scan = nn.scan(
            run,
            variable_broadcast="params",
            split_rngs={"params": False, "dropout": True},
            in_axes=(1, nn.broadcast, nn.broadcast, nn.broadcast),
            out_axes=1,
        )
        state, (x, weights) = scan(self.step, state, self.dropout(embedded), source, source_lengths, lengths)
        return self.dropout(x), weights, state


class OutputBias(nn.Module):
    """b_y, where the matrix before it is that of an embedding."""

    features: int

    @nn.compact
    def __call__(self, x: Float[Array, "B T V"]) -> Float[Array, "B T V"]:
        return x + self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)[None, None]


class Recurrent(nn.Module):
    """An encoder-decoder of recurrent cells, with or without attention: see `ModelConfig.source_context`."""

    config: ModelConfig
    dtype: layers.Dtype = "float32"
    cache_dtype: CacheDtype = "float32"
    placement: Placement | None = None

    def setup(self) -> None:
        config = self.config
        self.target_embedding = layers.Embedding(config.target_vocab_size, config.model_dim, self.dtype)
        if config.shared_embeddings != "all":
            self.source_embedding = layers.Embedding(config.source_vocab_size, config.model_dim, self.dtype)
        if config.shared_embeddings == "none":
            self.output = layers.Linear(config.target_vocab_size, dtype=self.dtype)
        else:
            self.output_bias = OutputBias(config.target_vocab_size)
        self.encoder = RecurrentEncoder(config, self.dtype)
        self.decoder = RecurrentDecoder(config, self.dtype)

    def embed(self, embedding: layers.Embedding, ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        embedded = constrain(self.placement, embedding(ids), "batch", None, None)
        return embedded * math.sqrt(self.config.model_dim) if self.config.scale_embeddings else embedded

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """The score of every vocabulary entry as the next token, o = W_hy h + b_y, in float32."""
        if self.config.scale_logits:
            x *= 1 / math.sqrt(self.config.model_dim)
        if self.config.shared_embeddings == "none":
            logits = self.output(x)
        else:
            logits = self.output_bias(self.target_embedding.logits(x))
        return constrain(self.placement, logits, "batch", None, None)

    def encode(self, source: Int[Array, "B S"], source_lengths: Int[Array, "B"]) -> tuple[Source, DecoderState]:
        """What the decoder will have of the source, and the state that it starts from."""
        config = self.config
        check_length("source", source.shape[1], config.max_source_length, least=1)
        shared = config.shared_embeddings == "all"
        embedding = self.target_embedding if shared else self.source_embedding
        states, last, carries = self.encoder(self.embed(embedding, source), source_lengths)
        attends = config.attends_to_source
        seen = Source(
            states=states if attends else None,
            keys=self.decoder.keys(states) if attends else None,
            last=last if config.source_context == "fixed-each-step" else None,
        )
        start = DecoderState(carries, first_attentional(config, len(source)), jnp.zeros_like(source_lengths))
        return seen, start

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
        check_length("target", target_in.shape[1], self.config.max_target_length)
        seen, start = self.encode(source, source_lengths)
        x, _, _ = self.decoder(self.embed(self.target_embedding, target_in), start, seen, source_lengths)
        return self.logits(x)

    def prefill(
        self,
        source: Int[Array, "B S"],
        source_lengths: Int[Array, "B"],
        prompt: Int[Array, "B T"],
        prompt_lengths: Int[Array, "B"],
        capacity: int,
    ) -> tuple[Float[Array, "B 1 V"], RecurrentCache]:
        """Encodes the source and runs each row's prompt to its last token.

        Returns:
            The logits after it, and a cache with the carries of that moment.
        """
        check_length("cache capacity", capacity, self.config.max_target_length)
        check_length("prompt", prompt.shape[1], capacity)
        seen, start = self.encode(source, source_lengths)
        embedded = self.embed(self.target_embedding, prompt)
        x, _, state = self.decoder(embedded, start, seen, source_lengths, prompt_lengths)
        last = jnp.take_along_axis(x, prompt_lengths[:, None, None] - 1, axis=1)
        cache = RecurrentCache(
            state.carries, state.attentional, seen.stored(self.cache_dtype), state.position, source_lengths
        )
        return self.logits(last), cache

    def decode_step(
        self, tokens: Int[Array, "BW T"], cache: RecurrentCache
    ) -> tuple[Float[Array, "BW T V"], RecurrentCache]:
        """Runs the next T tokens of every row.

        Returns:
            The logits after each of the tokens, and the cache with the tokens in its carries. The cache passed in is
            unchanged.
        """
        state = DecoderState(cache.carries, cache.attentional, cache.lengths)
        embedded = self.embed(self.target_embedding, tokens)
        x, _, state = self.decoder(embedded, state, cache.source, cache.source_lengths)
        new = dataclasses.replace(cache, carries=state.carries, attentional=state.attentional, lengths=state.position)
        return self.logits(x), new
