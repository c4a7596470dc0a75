"""The logical axes of every parameter, by its path: how parameters are cut over devices.

Queries, keys and values, and what makes hidden units, are cut by their outputs; what reads heads or hidden units, by
its inputs: so a layer's products need one sum over devices each, at its end (Shoeybi et al. 2019). Embeddings and
the output projection are cut by vocabulary entries. Norms and what is added to the residual stream stay whole.

The parameters of recurrent models stay whole: a step of a cell needs all of the state before it, so pieces would be
gathered at every token. Such models are trained on many devices by rows alone.
"""

import re
from typing import Any

import jax
from jax.sharding import NamedSharding

from tfm.axis_rules import LogicalAxis
from tfm.config import ModelConfig
from tfm.sharding import Placement

Axes = tuple[LogicalAxis | None, ...]

_TABLE: tuple[tuple[str, Axes], ...] = (
    (r"(source_embedding|target_embedding|output)/weight", ("vocab", "embed")),
    (r".*position_embedding/weight", (None, "embed")),
    (r".*relative_bias/weight", (None, "heads")),
    (r".*_attention/query/weight", ("heads", "embed")),
    (r".*_attention/query/bias", ("heads",)),
    (r".*_attention/(key|value)/weight", ("kv_heads", "embed")),
    (r".*_attention/(key|value)/bias", ("kv_heads",)),
    # made for inference only where heads are not cut
    (r".*_attention/query_key_value/weight", (None, "embed")),
    (r".*_attention/query_key_value/bias", (None,)),
    (r".*_attention/output/weight", ("embed", "heads")),
    (r".*_attention/output/bias", (None,)),
    (r".*feed_forward/(up|gate)/weight", ("hidden", "embed")),
    (r".*feed_forward/(up|gate)/bias", ("hidden",)),
    (r".*feed_forward/down/weight", ("embed", "hidden")),
    (r".*feed_forward/down/bias", (None,)),
    (r".*norm/(scale|bias)", (None,)),
)


def param_axes(params: Any) -> Any:
    """The logical axes of each leaf, in a pytree of the same structure; also of parameters prepared for inference.

    Raises:
        ValueError: a parameter that no model of this package has.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    paths = [_names(path) for path, _ in leaves]
    if any("kernel" in names for names in paths):  # only a recurrent cell has matrices of this name
        axes: list[Axes] = [(None,) * leaf.ndim for _, leaf in leaves]
    else:
        axes = [_axes(names) for names in paths]
    return jax.tree_util.tree_unflatten(structure, axes)


def param_shardings(placement: Placement, params: Any) -> Any:
    """How each parameter lies, in a pytree of the same structure.

    Args:
        placement: the mesh and its rules.
        params: arrays, or anything with their shapes.

    Raises:
        ValueError: a parameter that cannot be cut so; it says which, its axis and the sizes.
    """

    def lies(path: tuple[Any, ...], leaf: Any, names: Axes) -> NamedSharding:
        return placement.sharding("/".join(_names(path)), leaf.shape, names)

    return jax.tree_util.tree_map_with_path(lies, params, param_axes(params))


def check_heads(placement: Placement, config: ModelConfig) -> None:
    """Raises ValueError where a head would be cut in two, which the widths of matrices do not show."""
    if config.architecture == "recurrent":
        return
    axes: tuple[tuple[str, int, LogicalAxis], ...] = (
        ("num_heads", config.num_heads, "heads"), ("num_kv_heads", config.kv_heads, "kv_heads"),
    )  # fmt: skip
    for name, number, axis in axes:
        placement.sharding(name, (number,), (axis,))


def _names(path: tuple[Any, ...]) -> list[str]:
    return [str(getattr(key, "key", getattr(key, "name", key))) for key in path]


def _axes(names: list[str]) -> Axes:
    path = "/".join(names)
    quantized = re.fullmatch(r"(.*/weight)/(values|scales)", path)
    plain = quantized[1] if quantized else path.replace("weight_in_out", "weight")
    for pattern, axes in _TABLE:
        if re.fullmatch(pattern, plain):
            if quantized and quantized[2] == "scales":  # one for each output
                return axes[:1]
            return axes if plain == path or quantized else axes[::-1]
    raise ValueError(f"expected a parameter of a model of this package, got {path!r}")
