"""Which axes of arrays are cut over which axes of a mesh of devices: names and rules, without JAX.

An array's axes have logical names, such as `vocab`; a mesh's axes are `data`, `fsdp` and `tensor`. A rule says over
which mesh axes a logical axis is cut; what no rule cuts is whole on every device.
"""

import typing
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal

MeshAxis = Literal["data", "fsdp", "tensor"]
MESH_AXES: tuple[MeshAxis, ...] = typing.get_args(MeshAxis)

LogicalAxis = Literal["batch", "embed", "heads", "kv_heads", "hidden", "vocab"]
"""`batch`: rows. `embed`: the model dimension of parameters; that of activations is never cut. `heads`, `kv_heads`: of
queries, and of keys and values. `hidden`: the feed-forward layer's units. `vocab`: entries of a vocabulary."""
LOGICAL_AXES: tuple[LogicalAxis, ...] = typing.get_args(LogicalAxis)

Rules = Mapping[str, tuple[str, ...]]
"""From a `LogicalAxis` to the mesh axes that it is cut over, the first of them outermost; () for none."""

DEFAULT_RULES: Rules = MappingProxyType({
    "batch": ("data", "fsdp"),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "hidden": ("tensor",),
    "vocab": ("tensor",),
})  # fmt: skip
"""Data parallel over `data`; over `fsdp` too, with the parameters spread (Rajbhandari et al. 2020, ZeRO stage 3); and
over `tensor` each layer's heads, hidden units and vocabulary (Shoeybi et al. 2019)."""

_TOGETHER: tuple[tuple[LogicalAxis, LogicalAxis], ...] = (
    ("heads", "embed"), ("kv_heads", "embed"), ("hidden", "embed"), ("vocab", "embed"),
    ("batch", "heads"), ("batch", "kv_heads"), ("batch", "hidden"), ("batch", "vocab"),
)  # fmt: skip
"""Axes that one array has, of parameters and then of activations: no mesh axis can cut both."""


def rule_problem(rules: Rules) -> str | None:
    """What is wrong with changes to `DEFAULT_RULES`, or None."""
    for name, mesh_axes in rules.items():
        if name not in LOGICAL_AXES:
            return f"expected a rule for one of {', '.join(LOGICAL_AXES)}, got one for {name!r}"
        for mesh_axis in mesh_axes:
            if mesh_axis not in MESH_AXES:
                return f"expected {name} to be cut over some of {', '.join(MESH_AXES)}, got {mesh_axis!r}"
        if len(set(mesh_axes)) < len(mesh_axes):
            return f"expected {name} to be cut once over each mesh axis, got {'+'.join(mesh_axes)}"
    complete = {**DEFAULT_RULES, **rules}
    for one, other in _TOGETHER:
        for mesh_axis in complete[one]:
            if mesh_axis in complete[other]:
                return f"{one} and {other}, two axes of one array, cannot both be cut over {mesh_axis}"
    return None


def parse_rules(texts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Rules as a recipe writes them: AXIS=MESH_AXIS, or AXIS=MESH_AXIS+MESH_AXIS; AXIS= for an axis that stays whole.

    Example:
        >>> parse_rules(["batch=data+fsdp", "vocab="])
        {'batch': ('data', 'fsdp'), 'vocab': ()}

    Raises:
        ValueError: a text of another form, or two of one axis.
    """
    rules: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, mesh_axes = (part.strip() for part in text.partition("="))
        if not equals or name in rules:
            raise ValueError(f"expected rules such as 'embed=fsdp', 'batch=data+fsdp' or 'vocab=', got {text!r}")
        rules[name] = tuple(part.strip() for part in mesh_axes.split("+")) if mesh_axes else ()
    return rules
