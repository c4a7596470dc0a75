"""Where arrays lie on many devices: a mesh, and the rules by which arrays are cut over it.

Nothing is sent by hand. Parameters, batches and caches are placed by these shardings, a few activations in the models
are constrained to theirs, and XLA's partitioner (GSPMD, Xu et al. 2021) makes one program for all devices of it.
"""

import dataclasses
import math
import typing
from collections.abc import Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from tfm.axes import Array
from tfm.axis_rules import DEFAULT_RULES, LOGICAL_AXES, MESH_AXES, LogicalAxis, Rules, rule_problem

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh with axes `data`, `fsdp` and `tensor`, and what is cut over them: from `make_placement`.

    Frozen and hashable: a model holds it as it holds its config, and is compiled once for each.
    """

    mesh: Mesh | AbstractMesh
    rules: tuple[tuple[LogicalAxis, tuple[str, ...]], ...]
    """One for each logical axis."""

    def mesh_axes(self, name: LogicalAxis | None) -> tuple[str, ...]:
        """The mesh axes that a logical axis is cut over, without those of a single device; () for None."""
        if name is None:
            return ()
        return tuple(axis for axis in dict(self.rules)[name] if self.mesh.shape[axis] > 1)

    def pieces(self, name: LogicalAxis | None) -> int:
        """How many pieces a logical axis is cut into."""
        return math.prod(self.mesh.shape[axis] for axis in self.mesh_axes(name))

    def sharding(self, array: str, shape: Sequence[int], names: Sequence[LogicalAxis | None]) -> NamedSharding:
        """How an array lies.

        Args:
            array: its name, for the error.
            shape: its shape.
            names: of each axis; None for one that stays whole.

        Raises:
            ValueError: an axis does not divide into its pieces, or two are cut over one mesh axis.
        """
        assert len(shape) == len(names), f"{array}: {names} for shape {shape}"
        for axis, (size, name) in enumerate(zip(shape, names, strict=True)):
            if size % self.pieces(name):
                assert name is not None
                raise ValueError(
                    f"{array}: axis {axis} ({name}) of shape {tuple(shape)} is cut over {self._described(name)}, and "
                    f"{self.pieces(name)} does not divide {size}; the rule '{name}=' leaves it whole"
                )
        used = [axis for name in names for axis in self.mesh_axes(name)]
        if twice := {axis for axis in used if used.count(axis) > 1}:
            raise ValueError(
                f"{array}: two axes of {tuple(names)}, of shape {tuple(shape)}, are cut over {', '.join(sorted(twice))}"
            )
        return self._named(names)

    @property
    def whole(self) -> NamedSharding:
        """A copy on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def rows(self) -> NamedSharding:
        """Cut along the first axis, that of the batch."""
        return self._named(("batch",))

    def _named(self, names: Sequence[LogicalAxis | None]) -> NamedSharding:
        cuts = [self.mesh_axes(name) for name in names]
        while cuts and not cuts[-1]:  # one spelling for one sharding: jit compares what it was compiled for
            cuts.pop()
        return NamedSharding(
            self.mesh, PartitionSpec(*((cut if len(cut) > 1 else cut[0]) if cut else None for cut in cuts))
        )

    def _described(self, name: LogicalAxis) -> str:
        return " × ".join(f"{axis} ({self.mesh.shape[axis]})" for axis in self.mesh_axes(name))


def constrain(placement: Placement | None, x: Array, *names: LogicalAxis | None) -> Array:
    """x, as it is to lie in the middle of a computation; without a placement x itself.

    An axis that does not divide into its pieces stays whole: a batch of one row, or the heads that a rule leaves out.
    Parameters, of which no copy may come about unseen, go by `Placement.sharding` instead.
    """
    if placement is None:
        return x
    fits = [name if size % placement.pieces(name) == 0 else None for size, name in zip(x.shape, names, strict=True)]
    return jax.lax.with_sharding_constraint(x, placement._named(fits))


def make_placement(
    *,
    data: int = 0,
    fsdp: int = 1,
    tensor: int = 1,
    rules: Rules = DEFAULT_RULES,
    devices: Sequence[jax.Device] | None = None,
) -> Placement:
    """A mesh of devices, and what is cut over it.

    Args:
        data: copies of the model, each of which takes its part of the rows; 0 for all devices that are left.
        fsdp: takes a part of the rows as well, and of the parameters and the optimizer's state, which come together
            where they are multiplied.
        tensor: pieces of each layer: heads, hidden units, vocabulary.
        rules: changes to `tfm.axis_rules.DEFAULT_RULES`.
        devices: None: all that JAX has.

    Raises:
        ValueError: sizes whose product is not the number of devices, or rules that cannot be.
    """
    devices = jax.devices() if devices is None else list(devices)
    if data < 0 or fsdp < 1 or tensor < 1:
        raise ValueError(f"expected mesh sizes of at least 1, or data = 0, got {data} × {fsdp} × {tensor}")
    sizes = (data or max(len(devices) // (fsdp * tensor), 1), fsdp, tensor)
    if math.prod(sizes) != len(devices):
        asked = f"data = {data}, fsdp = {fsdp}, tensor = {tensor}"
        needed = f"a multiple of {fsdp * tensor}" if data == 0 else f"{math.prod(sizes)}"
        raise ValueError(f"a mesh of {asked} needs {needed} devices, and there are {len(devices)}")
    if problem := rule_problem(rules):
        raise ValueError(problem)
    complete = {**DEFAULT_RULES, **rules}
    mesh = Mesh(
        np.asarray(mesh_utils.create_device_mesh(sizes, devices)), MESH_AXES, axis_types=(AxisType.Auto,) * len(sizes)
    )
    return Placement(mesh, tuple((name, tuple(complete[name])) for name in LOGICAL_AXES))


def constrain_tree(tree: Tree, shardings: typing.Any) -> Tree:
    """Every array of a pytree as `shardings` says, inside jit; None: as it is."""
    return tree if shardings is None else jax.lax.with_sharding_constraint(tree, shardings)
