"""Parameters as data: made, counted, described."""

import functools
import math
import typing
from typing import Any, Literal

import flax.traverse_util
import jax
import jax.numpy as jnp

from tfm.axes import KeyArray
from tfm.config import ModelConfig
from tfm.nn.models import Model, build_model
from tfm.nn.param_axes import param_shardings
from tfm.nn.products import Int8Weight, lies_best_in_out, quantize
from tfm.sharding import Placement, constrain_tree

Params = dict[str, Any]

_TABLES = {"relative_bias", "position_embedding"}
"""What has a `weight` that nothing is multiplied by."""

Weights = Literal["float32", "bfloat16", "int8"]
"""What the matrices of products and embeddings lie in while a model generates."""


@functools.partial(jax.jit, static_argnames="model")
def init_params(model: Model, key: KeyArray) -> Params:
    """Fresh float32 parameters: a nested dictionary whose leaves are `weight`, `bias` and `scale` arrays.

    Weights of products are uniform (Glorot and Bengio 2010), embeddings normal with variance 1 / D; biases are 0 and
    scales 1. A recurrent cell's matrices are called `kernel`, lie [in, out] and are those of `flax.linen`: normal with
    variance 1 / in for what is read, orthogonal for the state.

    Args:
        model: from `tfm.nn.models.build_model`; its dtype and attention kernel do not matter.
        key: the same key gives the same parameters.
    """
    one_token, one_length = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
    source = one_token[:, : model.config.max_source_length]  # a language model takes none
    return model.init(key, source, one_length * source.shape[1], one_token)["params"]


def prepare_for_inference(params: Params, weights: Weights, placement: Placement | None = None) -> Params:
    """Parameters as decoding reads them, to be passed in place of the trained ones: each matrix cast once, not a step.

    The matrices of a self-attention that make queries, keys and values of the same vectors become one, below each
    other: of a few rows, one product of three times the size takes half to two thirds of the time of three on a CPU.

    "bfloat16" is what a model of that dtype rounds its matrices to at every step, and its embeddings too. With "int8"
    the rows of the matrices, and the vectors that they meet, are rounded to 8 bits (`tfm.nn.products.Int8Weight`), a
    quarter of the bytes. Biases, scales and tables of positions stay float32. In float32, matrices of products lie
    [in, out] where that is faster: see `tfm.nn.products.lies_best_in_out`. A recurrent cell's own matrices are
    rounded to bfloat16, too, but with "int8" stay float32.

    Args:
        params: as they were trained.
        weights: what matrices lie in.
        placement: how they lie on many devices. Where it cuts heads, queries', keys' and values' matrices stay apart:
            joined, a piece of their outputs would not be whole heads of each.

    Raises:
        ValueError: weights that there are not, parameters that have been prepared already, or that cannot be cut so.
    """
    if weights not in typing.get_args(Weights):
        raise ValueError(f"expected weights 'float32', 'bfloat16' or 'int8', got {weights!r}")
    names = {name for path in flax.traverse_util.flatten_dict(params) for name in path}
    if names & {"query_key_value", "weight_in_out"}:
        raise ValueError("expected parameters as they were trained, got some that were prepared already")
    if placement is not None:
        params = jax.device_put(params, param_shardings(placement, params))
    return _prepare(params, weights, weights == "float32" and lies_best_in_out(), placement)


@functools.partial(jax.jit, static_argnames=("weights", "in_out", "placement"))
def _prepare(params: Params, weights: Weights, in_out: bool, placement: Placement | None) -> Params:
    if placement is None or placement.pieces("heads") == placement.pieces("kv_heads") == 1:
        params = _with_joined_projections(params)

    def prepare(path: tuple[Any, ...], leaf: Any) -> Any:
        names = {key.key for key in path}
        if "kernel" in names and weights == "bfloat16":
            return leaf.astype(weights)
        if "weight" not in names or names & _TABLES:
            return leaf
        return Int8Weight(*quantize(leaf)) if weights == "int8" else leaf.astype(weights)

    params = typing.cast(Params, jax.tree_util.tree_map_with_path(prepare, params))
    only_looked_up = {"source_embedding"} | ({"target_embedding"} if "output" in params else set())
    if in_out:
        params = {name: part if name in only_looked_up else _in_out(part) for name, part in params.items()}
    return params if placement is None else constrain_tree(params, param_shardings(placement, params))


def _in_out(part: Params) -> Params:
    """The same, each matrix transposed, as `weight_in_out`."""
    turned = {}
    for name, value in part.items():
        if isinstance(value, dict):
            turned[name] = value if name in _TABLES else _in_out(value)
        else:
            turned["weight_in_out" if name == "weight" else name] = value.T if name == "weight" else value
    return turned


def _with_joined_projections(params: Params) -> Params:
    """The same, with `query_key_value` in each self-attention in place of the three: see `tfm.nn.attention`."""
    joined = {}
    for name, part in params.items():
        if name == "self_attention" and "query" in part:
            several = [part[projection] for projection in ("query", "key", "value")]
            together = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *several)
            joined[name] = {"query_key_value": together, "output": part["output"]}
        else:
            joined[name] = _with_joined_projections(part) if isinstance(part, dict) else part
    return joined


def param_shapes(config: ModelConfig) -> Params:
    """The parameters' shapes and dtypes, as `jax.ShapeDtypeStruct`, without making an array."""
    model = build_model(config, dtype="float32")
    return jax.eval_shape(functools.partial(init_params, model), jax.random.key(0))


def count_params(params: Params) -> int:
    """Entries in all arrays; a matrix shared between embeddings and output is one matrix."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def count_by_part(params: Params) -> dict[str, int]:
    """Entries of each top-level part: embeddings, encoder, decoder, output."""
    return {name: count_params(part) for name, part in params.items()}
