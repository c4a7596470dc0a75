"""One layer of the encoder and one of the decoder: sublayers, each within a residual connection."""

from collections.abc import Callable

import flax.linen as nn

from tfm.axes import Array, Float, Int
from tfm.config import ModelConfig
from tfm.nn import cache as caches
from tfm.nn import layers
from tfm.nn.attention import Attention, Kernel
from tfm.nn.cache import KeysValues
from tfm.nn.masks import Visible
from tfm.sharding import Placement, constrain


class Block(nn.Module):
    """What encoder and decoder layers share: the residual connection around a sublayer, with its norm and dropout."""

    config: ModelConfig
    dtype: layers.Dtype = "float32"
    kernel: Kernel = "auto"
    placement: Placement | None = None

    def residual(self, x: Array, norm: layers.Norm, sublayer: Callable[[Array], Array]) -> Array:
        """Post-norm: LayerNorm(x + Sublayer(x)), as in the paper. Pre-norm: x + Sublayer(LayerNorm(x))."""
        if self.config.norm_position == "post":
            return self._cut(norm(x + self.dropout(self._cut(sublayer(x)))))
        return self._cut(x + self.dropout(self._cut(sublayer(norm(x)))))

    def _cut(self, x: Array) -> Array:
        """By rows: each device of a row has the whole of its residual stream."""
        return constrain(self.placement, x, "batch", None, None)

    def setup(self) -> None:
        self.dropout = layers.Dropout(self.config.dropout_rate)
        self.self_attention = Attention(self.config, self.dtype, self.kernel, self.placement)
        self.self_attention_norm = layers.Norm(self.config)
        self.feed_forward = layers.FeedForward(self.config, self.dtype, self.placement)
        self.feed_forward_norm = layers.Norm(self.config)


class EncoderLayer(Block):
    """Self-attention over the whole source, then feed-forward."""

    def __call__(
        self,
        x: Float[Array, "B S D"],
        *,
        visible: Visible,
        rotary_positions: Int[Array, "*B S"] | None,
        bias: Float[Array, "*B N S S"] | None,
    ) -> Float[Array, "B S D"]:
        def attend(x: Array) -> Array:
            query, keys_values = self.self_attention.queries_keys_values(x, rotary_positions)
            return self.self_attention(query, keys_values, visible=visible, bias=bias)

        x = self.residual(x, self.self_attention_norm, attend)
        return self.residual(x, self.feed_forward_norm, self.feed_forward)


class DecoderLayer(Block):
    """Causal self-attention, cross-attention to the source where there is one, then feed-forward."""

    has_source: bool = True

    def setup(self) -> None:
        super().setup()
        if self.has_source:
            self.cross_attention = Attention(self.config, self.dtype, self.kernel, self.placement)
            self.cross_attention_norm = layers.Norm(self.config)

    def cross_keys_values(self, encoded: Float[Array, "B S D"]) -> KeysValues:
        """The source's keys and values for this layer; projected once, whatever the number of steps or beams."""
        return self.cross_attention.keys_values(encoded)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        visible: Visible,
        rotary_positions: Int[Array, "*B T"] | None,
        bias: Float[Array, "*B N T M"] | None,
        source: KeysValues | None,
        source_visible: Visible,
        past: KeysValues | None = None,
        first_free: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B T D"], KeysValues]:
        """Returns the new x, and the self-attention's keys and values: of x alone, or of the past with x added."""
        seen: KeysValues | None = None

        def attend_self(x: Array) -> Array:
            nonlocal seen
            query, seen = self.self_attention.queries_keys_values(x, rotary_positions)
            if past is not None:
                assert first_free is not None
                seen = caches.placed(caches.write(past, seen, first_free), self.placement)
            return self.self_attention(query, seen, visible=visible, bias=bias)

        x = self.residual(x, self.self_attention_norm, attend_self)
        if source is not None:

            def attend_source(x: Array) -> Array:
                return self.cross_attention(self.cross_attention.queries(x), source, visible=source_visible)

            x = self.residual(x, self.cross_attention_norm, attend_source)
        x = self.residual(x, self.feed_forward_norm, self.feed_forward)
        assert seen is not None
        return x, seen
