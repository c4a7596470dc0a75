"""How a cache grows with the length: what it takes, beside the formula that says so beforehand."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tfm.checks import checked_whole_number, several
from tfm.config import ModelConfig
from tfm.decoding.inference import prefill
from tfm.nn.cache import CacheDtype, cache_bytes
from tfm.nn.models import build_model
from tfm.nn.params import param_shapes
from tfm.plot.figures import Axes, Figure, as_legend, figure_and_axes


def measured_cache_bytes(
    config: ModelConfig, *, batch: int, source_length: int, capacity: int, dtype: CacheDtype = "float32"
) -> int:
    """Bytes of all arrays of the cache that a prefill makes, without making it.

    Raises:
        ValueError: the model does not accept such lengths, or there is no such dtype.
    """
    model = build_model(config, cache_dtype=dtype)
    if checked_whole_number("a batch", batch) < 1:
        raise ValueError(f"expected a batch of at least 1, got {batch}")

    def make(params: dict, source: jax.Array, lengths: jax.Array) -> object:
        return prefill(model, params, source, lengths, capacity=capacity)[1]

    source = jax.ShapeDtypeStruct((batch, source_length), jnp.int32)
    lengths = jax.ShapeDtypeStruct((batch,), jnp.int32)
    cache = jax.eval_shape(make, param_shapes(config), source, lengths)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def cache_growth(
    configs: ModelConfig | Mapping[str, ModelConfig],
    lengths: Sequence[int],
    *,
    batch: int = 1,
    source_length: int = 64,
    dtype: CacheDtype = "float32",
    ax: Axes | None = None,
) -> Figure:
    """Bytes of a cache by its capacity in target tokens: dots are what its arrays take, the line is `cache_bytes`.

    Args:
        configs: a model, or several by the names to show.
        lengths: capacities, each at least 1.
        batch: rows.
        source_length: S, what sources are padded to.
        dtype: of keys and values.
        ax: where to draw; None: on a new figure.

    Raises:
        ValueError: as `measured_cache_bytes`; no lengths or one below 1, or no model.
    """
    named = dict(configs) if isinstance(configs, Mapping) else {"": configs}
    capacities = sorted(checked_whole_number("a length", length) for length in several("lengths", lengths))
    if not named or not capacities:
        raise ValueError(f"expected at least one model and one length, got {len(named)} and {len(capacities)}")
    if wrong := next((config for config in named.values() if not isinstance(config, ModelConfig)), None):
        raise ValueError(f"expected a ModelConfig, as `config` of a model is, got a {type(wrong).__name__}")
    if capacities[0] < 1:
        raise ValueError(f"expected lengths of at least 1, got {capacities[0]}")
    curves = {}
    for name, config in named.items():
        size: dict[str, Any] = dict(batch=batch, source_length=source_length, dtype=dtype)
        measured = [measured_cache_bytes(config, capacity=capacity, **size) for capacity in capacities]
        formula = [cache_bytes(config, capacity=capacity, **size) for capacity in capacities]
        curves[name] = (measured, formula)
    figure, ax = figure_and_axes(ax, 6.0, 4.0)
    for number, (name, (measured, formula)) in enumerate(curves.items()):
        prefix, color = as_legend(f"{name}: ") if name else "", f"C{number % 10}"
        ax.plot(capacities, np.array(formula) / 2**20, "-", color=color, label=f"{prefix}formula")
        ax.plot(capacities, np.array(measured) / 2**20, "o", color=color, label=f"{prefix}arrays of the cache")
    ax.set_xlabel("capacity in target tokens")
    ax.set_ylabel("MiB")
    ax.set_ylim(bottom=0)
    ax.legend()
    return figure
