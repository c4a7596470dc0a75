"""Parameters as data: made, counted, described."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from tfm.axes import KeyArray
from tfm.config import ModelConfig
from tfm.nn.transformer import Model, build_model

Params = dict[str, Any]


@functools.partial(jax.jit, static_argnames="model")
def init_params(model: Model, key: KeyArray) -> Params:
    """Fresh float32 parameters: a nested dictionary whose leaves are `weight`, `bias` and `scale` arrays.

    Weights of products are uniform (Glorot and Bengio 2010), embeddings normal with variance 1 / D; biases are 0 and
    scales 1.

    Args:
        model: from `tfm.nn.transformer.build_model`; its dtype and attention kernel do not matter.
        key: the same key gives the same parameters.
    """
    one_token, one_length = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
    return model.init(key, one_token, one_length, one_token)["params"]


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
