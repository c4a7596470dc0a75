"""Attention as it is defined: products of queries and keys, a softmax, a weighted sum of values.

On every backend, for keys and values in any dtype, with dropout. How the products are asked for on a CPU is measured.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from tfm.axes import Array, Float, KeyArray
from tfm.nn import layers
from tfm.nn.cache import Int8Vectors, KeysValues
from tfm.nn.masks import Visible

_MOST_QUERIES = 16
"""Of one head, up to which XLA's CPU backend is faster at multiplying and adding up as it reads than at a product."""
_FEWEST_QUERIES = 2 if jax.__version_info__ < (0, 12) else 1
"""For a single one, the XLA of jax 0.10 writes all products out before it adds them, 50 times as slowly as for two."""


def plain_attention(
    query: Float[Array, "B Q N H"],
    keys_values: KeysValues,
    visible: Visible,
    bias: Float[Array, "*B N Q M"] | None,
    scale: float,
    dropout_rate: float,
    dropout_key: KeyArray | None,
) -> Float[Array, "B Q N H"]:
    """softmax(Q Kᵀ · scale + bias) V, as `tfm.nn.attention.dot_product_attention` says; without a key no dropout."""
    weights = attention_weights(query, keys_values.keys, visible, bias, scale)
    if dropout_key is not None:
        weights = layers.dropout(weights, dropout_rate, dropout_key)
    batch, num_heads, num_queries, num_keys = weights.shape
    kv_heads = jax.tree.leaves(keys_values.values)[0].shape[1]
    weights_BKGQM = weights.reshape(batch, kv_heads, num_heads // kv_heads, num_queries, num_keys)
    mixed_BQKGH = _mixed(weights_BKGQM, keys_values.values, query.dtype.name)
    return mixed_BQKGH.reshape(query.shape).astype(query.dtype)


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
