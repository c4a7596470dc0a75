"""Scaled dot-product attention, by whichever kernel can serve, and the multi-head layer around it.

All kernels compute the same function, and one test holds them to that. `plain` is the definition: einsums that one
can read beside the paper, on every backend, with dropout. `xla` is `jax.nn.dot_product_attention`'s own composition.
`cudnn` is NVIDIA's fused kernel; it takes padding as lengths, since it refuses a mask that is broadcast.

Keys and values may lie in fewer bits than queries do: `tfm.nn.cache`. Only `plain` takes them in int8.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from tfm.axes import Array, Float, Int, KeyArray
from tfm.config import ModelConfig
from tfm.nn import layers
from tfm.nn.cache import Int8Vectors, KeysValues
from tfm.nn.masks import Visible
from tfm.nn.positions import rotate

Kernel = Literal["auto", "plain", "xla", "cudnn"]
KERNELS: tuple[Kernel, ...] = ("auto", "plain", "xla", "cudnn")

_MOST_QUERIES = 16
"""Of one head, up to which XLA's CPU backend is faster at multiplying and adding up as it reads than at a product."""
_FEWEST_QUERIES = 2 if jax.__version_info__ < (0, 12) else 1
"""For a single one, the XLA of jax 0.10 writes all products out before it adds them, 50 times as slowly as for two."""


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
        return _plain(query, keys_values, visible, bias, scale, dropout_rate, dropout_key if drops else None)
    if kernel == "xla":
        return _xla(query, keys_values, visible, bias, scale)
    return _cudnn(query, keys_values, visible, scale)


def check_kernel(kernel: str) -> None:
    """Raises ValueError for a name that no kernel has."""
    if kernel not in KERNELS:
        raise ValueError(f"expected an attention kernel of {', '.join(KERNELS)}, got {kernel!r}")


def attention_weights(
    query: Float[Array, "B Q N H"],
    keys: Float[Array, "B K M H"] | Int8Vectors,
    visible: Visible,
    bias: Float[Array, "*B N Q M"] | None,
    scale: float,
) -> Float[Array, "B N Q M"]:
    """The softmax, in float32. A query that sees no key has weights of zero."""
    batch, num_queries, num_heads, head_dim = query.shape
    kv_heads, num_keys = jax.tree.leaves(keys)[0].shape[1:3]
    query_BQKGH = query.reshape(batch, num_queries, kv_heads, num_heads // kv_heads, head_dim)
    scores_BKGQM = _scores(query_BQKGH * scale, keys)
    scores = scores_BKGQM.reshape(batch, num_heads, num_queries, num_keys)
    if bias is not None:
        scores += bias
    mask = visible.dense(num_queries, num_keys)
    if mask is None:
        return jax.nn.softmax(scores, axis=-1)
    scores = jnp.where(mask[:, None], scores, -jnp.inf)
    # a row of -inf alone would give NaN: its maximum is taken as 0, its sum as 1
    highest = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    exponentials = jnp.exp(scores - jnp.where(jnp.isneginf(highest), 0, highest))
    total = exponentials.sum(axis=-1, keepdims=True)
    return exponentials / jnp.where(total == 0, 1, total)


def _plain(
    query: Array,
    keys_values: KeysValues,
    visible: Visible,
    bias: Array | None,
    scale: float,
    dropout_rate: float,
    dropout_key: KeyArray | None,
) -> Array:
    weights = attention_weights(query, keys_values.keys, visible, bias, scale)
    if dropout_key is not None:
        weights = layers.dropout(weights, dropout_rate, dropout_key)
    batch, num_heads, num_queries, num_keys = weights.shape
    kv_heads = jax.tree.leaves(keys_values.values)[0].shape[1]
    weights_BKGQM = weights.reshape(batch, kv_heads, num_heads // kv_heads, num_queries, num_keys)
    mixed_BQKGH = _mixed(weights_BKGQM, keys_values.values, query.dtype.name)
    return mixed_BQKGH.reshape(query.shape).astype(query.dtype)


def _scores(query_BQKGH: Array, keys: Array | Int8Vectors) -> Array:
    """Each query times each key, [B, K, G, Q, M], in float32."""
    if isinstance(keys, Int8Vectors):
        return _scores(query_BQKGH, keys.values) * _of_each_key(keys.scales)
    if keys.dtype == query_BQKGH.dtype:
        return _product_of_queries(query_BQKGH, keys)
    operands = _where_it_is_used(query_BQKGH, keys)
    few = query_BQKGH.shape[1] * query_BQKGH.shape[3] <= _MOST_QUERIES
    on_cpu = _scores_in_one_pass if few else _product_of_queries
    return jax.lax.platform_dependent(*operands, cpu=on_cpu, default=_product_of_queries)


def _mixed(weights_BKGQM: Array, values: Array | Int8Vectors, dtype: str) -> Array:
    """The sum of the values times their weights, [B, Q, K, G, H], in float32; `dtype` is that of the queries."""
    if isinstance(values, Int8Vectors):
        return _mixed(weights_BKGQM * _of_each_key(values.scales), values.values, dtype)
    in_float32 = functools.partial(_weighted_sum, dtype="float32")
    if values.dtype == dtype == "float32":
        return in_float32(weights_BKGQM, values)
    operands: tuple[Array, Array] = (weights_BKGQM, values)
    on_cpu: Callable[[Array, Array], Array] = in_float32
    if values.dtype != dtype:
        operands = _where_it_is_used(*operands)
        few = weights_BKGQM.shape[2] * weights_BKGQM.shape[3] <= _MOST_QUERIES
        on_cpu = _weighted_sum_in_one_pass if few else in_float32
    # XLA's CPU backend cannot run this product from bfloat16 into float32
    return jax.lax.platform_dependent(*operands, cpu=on_cpu, default=functools.partial(_weighted_sum, dtype=dtype))


def _product_of_queries(query_BQKGH: Array, keys: Array) -> Array:
    """With the keys in the queries' dtype, accumulated and returned in float32."""
    return jnp.einsum(
        "BQKGH,BKMH->BKGQM", query_BQKGH, keys.astype(query_BQKGH.dtype), preferred_element_type=jnp.float32
    )


def _weighted_sum(weights_BKGQM: Array, values: Array, dtype: str) -> Array:
    """With the operands in `dtype`, accumulated and returned in float32.

    One product for each head, turned round after it: XLA's CPU backend takes 5 to 10 times as long for several queries
    where the product itself is asked for in the final order.
    """
    batch, kv_heads, group, queries, num_keys = weights_BKGQM.shape
    weights_BKRM = weights_BKGQM.reshape(batch, kv_heads, group * queries, num_keys).astype(dtype)
    mixed_BKRH = jnp.einsum("BKRM,BKMH->BKRH", weights_BKRM, values.astype(dtype), preferred_element_type=jnp.float32)
    return _queries_first(mixed_BKRH, group, queries)


def _scores_in_one_pass(query_BQKGH: Array, keys: Array) -> Array:
    """The product of queries without the product: XLA's CPU backend would first write all keys out in float32."""
    batch, queries, kv_heads, group, _ = query_BQKGH.shape
    query_BKRH = query_BQKGH.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * queries, -1)
    query_BKRH = _enough_rows(query_BKRH).astype(jnp.float32)
    scores_BKRM = (query_BKRH[:, :, :, None] * keys[:, :, None].astype(jnp.float32)).sum(axis=-1)
    return scores_BKRM[:, :, : group * queries].reshape(batch, kv_heads, group, queries, -1)


def _weighted_sum_in_one_pass(weights_BKGQM: Array, values: Array) -> Array:
    """The weighted sum, likewise."""
    batch, kv_heads, group, queries, _ = weights_BKGQM.shape
    weights_BKRM = _enough_rows(weights_BKGQM.reshape(batch, kv_heads, group * queries, -1))
    mixed_BKRH = (weights_BKRM[..., None] * values[:, :, None].astype(jnp.float32)).sum(axis=-2)
    return _queries_first(mixed_BKRH[:, :, : group * queries], group, queries)


def _queries_first(mixed_BKRH: Array, group: int, queries: int) -> Array:
    """Rows as the heads of a group and their queries, [B, Q, K, G, H]."""
    batch, kv_heads, _, head_dim = mixed_BKRH.shape
    return mixed_BKRH.reshape(batch, kv_heads, group, queries, head_dim).transpose(0, 3, 1, 2, 4)


def _enough_rows(x_BKRM: Array) -> Array:
    """The same rows, a single one twice where that is needed."""
    return jnp.repeat(x_BKRM, _FEWEST_QUERIES, axis=2) if x_BKRM.shape[2] < _FEWEST_QUERIES else x_BKRM


def _of_each_key(scales_BKM1: Array) -> Array:
    """As factors of scores or weights, [B, K, 1, 1, M]."""
    return scales_BKM1[:, :, None, None, :, 0]


def _where_it_is_used(x: Array, stored: Array) -> tuple[Array, Array]:
    """Both, so that nothing is made of the second before there is the first.

    XLA would cast the source's keys and values to float32 once, before the loop of decode steps, and read that copy.
    """
    x, stored = jax.lax.optimization_barrier((x, stored))
    return x, stored


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
        return self._rotate(self._in_heads(query), rotary_positions)

    def _as_keys_values(self, key: Array, value: Array, rotary_positions: Array | None) -> KeysValues:
        keys, values = self._rotate(self._in_heads(key), rotary_positions), self._in_heads(value)
        return KeysValues(jnp.swapaxes(keys, 1, 2), jnp.swapaxes(values, 1, 2))

    def _in_heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], -1, self.config.head_size)

    def _rotate(self, x: Array, positions: Array | None) -> Array:
        if positions is None:
            return x
        return rotate(x, positions, base=self.config.rope_base, halves=self.config.positions == "rope-halves")
