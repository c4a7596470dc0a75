"""Scaled dot-product attention, by whichever kernel can serve, and the multi-head layer around it.

All kernels compute the same function, and one test holds them to that. `plain` is the definition: einsums that one
can read beside the paper, on every backend, with dropout. `xla` is `jax.nn.dot_product_attention`'s own composition.
`cudnn` is NVIDIA's fused kernel; it takes padding as lengths, since it refuses a mask that is broadcast.

Keys and values may lie in fewer bits than queries do: `tfm.nn.cache`. Only `plain` takes them in int8.
"""

import functools
import math
import re
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from tfm.axes import Array, Float, Int, KeyArray
from tfm.config import ModelConfig
from tfm.nn import layers
from tfm.nn.cache import Int8Vectors, KeysValues, placed
from tfm.nn.masks import Visible
from tfm.nn.plain_attention import attention_weights, plain_attention
from tfm.nn.positions import rotate
from tfm.sharding import Placement, constrain

Kernel = Literal["auto", "plain", "xla", "cudnn"]
KERNELS: tuple[Kernel, ...] = ("auto", "plain", "xla", "cudnn")


def dot_product_attention(
    query: Float[Array, "B Q N H"],
    keys_values: KeysValues,
    *,
    visible: Visible,
    bias: Float[Array, "*B N Q M"] | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: KeyArray | None = None,
    kernel: Kernel = "auto",
) -> Float[Array, "B Q N H"]:
    """softmax(Q Kᵀ · scale + bias) V (Vaswani et al. 2017, eq. 1), masked to what is visible.

    With fewer key/value heads than query heads, each is shared by a group of consecutive query heads (Ainslie et al.
    2023; Shazeer 2019 for a single one).

    Args:
        query: already rotated where positions are rotary.
        keys_values: [B, K, M, H] each, in any dtype of a cache.
        visible: which keys a query may see. A query that sees none gives zeros.
        bias: added to the scaled scores, with a leading axis of B or 1.
        scale: 1/sqrt(H) by default.
        dropout_rate: on the attention weights, where a `dropout_key` is passed.
        dropout_key: None turns dropout off.
        kernel: "auto" for the fastest that can serve.

    Raises:
        ValueError: the kernel asked for cannot serve these arguments here; the message says why.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    drops = dropout_key is not None and dropout_rate > 0
    check_kernel(kernel)
    problem = None
    if kernel in ("auto", "cudnn"):
        problem = _cudnn_problem(query, keys_values, visible, bias, drops)
    elif kernel == "xla":
        problem = _xla_problem(keys_values, drops)
    if problem and kernel != "auto":
        raise ValueError(f"attention kernel {kernel!r} cannot serve here: {problem}")

    if kernel == "plain" or (kernel == "auto" and problem):
        return plain_attention(query, keys_values, visible, bias, scale, dropout_rate, dropout_key if drops else None)
    if kernel == "xla":
        return _xla(query, keys_values, visible, bias, scale)
    return _cudnn(query, keys_values, visible, scale)


def check_kernel(kernel: str) -> None:
    """Raises ValueError for a name that no kernel has."""
    if kernel not in KERNELS:
        raise ValueError(f"expected an attention kernel of {', '.join(KERNELS)}, got {kernel!r}")


def _xla(query: Array, keys_values: KeysValues, visible: Visible, bias: Array | None, scale: float) -> Array:
    keys, values = _heads_last(query, keys_values)
    mask = visible.dense(query.shape[1], keys.shape[1])
    mixed = jax.nn.dot_product_attention(
        query,
        keys,
        values,
        bias=bias,
        mask=None if mask is None else mask[:, None],
        scale=scale,
        implementation="xla",
    )
    if mask is None:
        return mixed
    sees_any = mask.any(axis=-1)[..., None, None]  # JAX gives a query that sees nothing the mean of all values
    return jnp.where(sees_any, mixed, 0)


def _cudnn(query: Array, keys_values: KeysValues, visible: Visible, scale: float) -> Array:
    keys, values = _heads_last(query, keys_values)
    lengths = visible.key_lengths
    mixed = jax.nn.dot_product_attention(
        query,
        keys,
        values,
        scale=scale,
        is_causal=visible.causal,
        # every query is computed; only keys are cut
        query_seq_lengths=None if lengths is None else jnp.full_like(lengths, query.shape[1]),
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    if lengths is None:
        return mixed
    return jnp.where((lengths > 0)[:, None, None, None], mixed, 0)


def _heads_last(query: Array, keys_values: KeysValues) -> tuple[Array, Array]:
    """Keys and values as [B, M, K, H], which `jax.nn.dot_product_attention` takes."""
    assert not isinstance(keys_values.keys, Int8Vectors)
    assert not isinstance(keys_values.values, Int8Vectors)
    keys, values = (jnp.swapaxes(x, 1, 2).astype(query.dtype) for x in (keys_values.keys, keys_values.values))
    return keys, values


def _xla_problem(keys_values: KeysValues, drops: bool) -> str | None:
    """Why JAX's own composition cannot serve, or None."""
    if isinstance(keys_values.keys, Int8Vectors):
        return "it takes no keys and values in int8"
    return "it has no dropout on attention weights" if drops else None


def _cudnn_problem(
    query: Array, keys_values: KeysValues, visible: Visible, bias: Array | None, drops: bool
) -> str | None:
    """Why cuDNN cannot serve, or None."""
    num_queries, head_dim = query.shape[1], query.shape[-1]
    if jax.default_backend() != "gpu":
        return f"it needs an NVIDIA GPU, and the backend is {jax.default_backend()}"
    capability = _compute_capability()
    if not re.fullmatch(r"\d+\.\d+", capability) or float(capability) < 8:
        return f"it needs an NVIDIA GPU of compute capability 8.0 (Ampere) or newer, and this one's is {capability}"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 or float16, not {query.dtype}"
    if head_dim % 8 or head_dim > 128:
        return f"it needs a head dimension that is a multiple of 8 and at most 128, not {head_dim}"
    if isinstance(keys_values.keys, Int8Vectors):
        return "it takes no keys and values in int8"
    if visible.mask is not None:
        return "it takes padding as lengths, and no mask"
    if bias is not None:
        return "a bias would have to be written out for every row and head"
    if drops:
        return "it has no dropout on attention weights here"
    if visible.causal and (visible.query_positions is not None or num_queries != keys_values.length):
        return "its causal mask cannot stand in the middle of a cache"
    return None


def _compute_capability() -> str:
    """Of the default device, as "9.0"; on other makers' GPUs it is no number."""
    return str(getattr(jax.devices()[0], "compute_capability", "unknown"))


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2), for self- and cross-attention alike.

    Its halves are methods of their own, because they happen at different times: the keys and values of a source are
    projected once, those of a target once a token, and queries meet them at every step.
    """

    config: ModelConfig
    dtype: layers.Dtype = "float32"
    kernel: Kernel = "auto"
    placement: Placement | None = None

    def setup(self) -> None:
        config = self.config
        linear = functools.partial(layers.Linear, use_bias=config.use_bias, dtype=self.dtype)
        self.query = linear(config.num_heads * config.head_size)
        self.key = linear(config.kv_heads * config.head_size)
        self.value = linear(config.kv_heads * config.head_size)
        # in the place of these three, for self-attention, in parameters that `prepare_for_inference` made
        self.query_key_value = linear((config.num_heads + 2 * config.kv_heads) * config.head_size)
        self.output = linear(config.model_dim)

    def queries(
        self, x: Float[Array, "B Q D"], rotary_positions: Int[Array, "*B Q"] | None = None
    ) -> Float[Array, "B Q N H"]:
        """Projects what attends, a vector for each query.

        Args:
            x: one vector for each query.
            rotary_positions: where the queries stand, to rotate them; None: they are not rotated.

        Returns:
            In x's dtype, as all that is projected.
        """
        return self._as_queries(self.query(x), rotary_positions)

    def keys_values(
        self, memory: Float[Array, "B M D"], rotary_positions: Int[Array, "*B M"] | None = None
    ) -> KeysValues:
        """Projects what will be attended to: one vector for each position of the encoded source, or of the target.

        Returns:
            Keys and values, heads before positions.
        """
        return self._as_keys_values(self.key(memory), self.value(memory), rotary_positions)

    def queries_keys_values(
        self, x: Float[Array, "B Q D"], rotary_positions: Int[Array, "*B Q"] | None = None
    ) -> tuple[Float[Array, "B Q N H"], KeysValues]:
        """Both of the same vectors, for self-attention."""
        if not self.has_variable("params", "query_key_value"):
            return self.queries(x, rotary_positions), self.keys_values(x, rotary_positions)
        config = self.config
        ends = [config.num_heads * config.head_size, (config.num_heads + config.kv_heads) * config.head_size]
        query, key, value = jnp.split(self.query_key_value(x), ends, axis=-1)
        return self._as_queries(query, rotary_positions), self._as_keys_values(key, value, rotary_positions)

    def __call__(
        self,
        query: Float[Array, "B Q N H"],
        keys_values: KeysValues,
        *,
        visible: Visible,
        bias: Float[Array, "*B N Q M"] | None = None,
    ) -> Float[Array, "B Q D"]:
        """Lets every query look at the keys it may see, and mixes their values.

        Args:
            query: from `queries`.
            keys_values: from `keys_values`, or a cache of them.
            visible: which keys a query may see. One that sees none gets zeros, and so the output's bias.
            bias: added to the scaled scores, with a leading axis of B or 1.

        Returns:
            One vector for each query.

        Raises:
            ValueError: the attention kernel that was asked for cannot serve here; see `dot_product_attention`.
        """
        config = self.config
        drops = config.attention_dropout_rate > 0 and self.has_rng("dropout")
        mixed = dot_product_attention(
            query,
            keys_values,
            visible=visible,
            bias=bias,
            scale=self._scale,
            dropout_rate=config.attention_dropout_rate,
            dropout_key=self.make_rng("dropout") if drops else None,
            kernel=self.kernel,
        )
        mixed = constrain(self.placement, mixed, "batch", None, "heads", None)
        return self.output(mixed.reshape(*query.shape[:2], -1))

    def weights(
        self,
        query: Float[Array, "B Q N H"],
        keys_values: KeysValues,
        *,
        visible: Visible,
        bias: Float[Array, "*B N Q M"] | None = None,
    ) -> Float[Array, "B N Q M"]:
        """The weights by which a call with these arguments averages the values: before dropout, whatever the kernel.

        Returns:
            In float32. A query that sees no key has weights of zero.
        """
        return attention_weights(query, keys_values.keys, visible, bias, self._scale)

    @property
    def _scale(self) -> float:
        return 1 / math.sqrt(self.config.head_size) if self.config.scale_attention else 1.0

    def _as_queries(self, query: Array, rotary_positions: Array | None) -> Array:
        heads = constrain(self.placement, self._in_heads(query), "batch", None, "heads", None)
        return self._rotate(heads, rotary_positions)

    def _as_keys_values(self, key: Array, value: Array, rotary_positions: Array | None) -> KeysValues:
        keys, values = self._rotate(self._in_heads(key), rotary_positions), self._in_heads(value)
        return placed(KeysValues(jnp.swapaxes(keys, 1, 2), jnp.swapaxes(values, 1, 2)), self.placement)

    def _in_heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], -1, self.config.head_size)

    def _rotate(self, x: Array, positions: Array | None) -> Array:
        if positions is None:
            return x
        return rotate(x, positions, base=self.config.rope_base, halves=self.config.positions == "rope-halves")
