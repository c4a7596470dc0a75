"""Which devices JAX computes on."""

import jax

from tfm.axis_rules import parse_rules
from tfm.sharding import Placement, make_placement
from train.config import MeshConfig

_ALIASES = {"cuda": "gpu", "rocm": "gpu"}


def use_device(platform: str) -> None:
    """Makes JAX compute on devices of this platform, and start no other; for the life of the process.

    Args:
        platform: as JAX names them: cpu, gpu (or cuda, rocm), tpu.

    Raises:
        ValueError: there is none here, or JAX has begun to compute on another.
    """
    before = jax.config.values["jax_platforms"]
    jax.config.update("jax_platforms", platform)
    try:
        found = jax.default_backend()
    except Exception as error:  # RuntimeError, and AssertionError where CUDA is installed and has no GPU
        jax.config.update("jax_platforms", before)
        raise ValueError(f"no device {platform!r} here; JAX has {_present()}") from error
    if found != _ALIASES.get(platform, platform):  # another one was there before
        jax.config.update("jax_platforms", before)
        raise ValueError(f"no device {platform!r} here: JAX computes on {found} in this process already")


def placement_of(config: MeshConfig) -> Placement | None:
    """The mesh of all devices that a run asks for; None where there is one.

    Raises:
        ValueError: the product of its sizes is not the number of devices.
    """
    try:
        placement = make_placement(
            data=config.data, fsdp=config.fsdp, tensor=config.tensor, rules=parse_rules(config.rules)
        )
    except ValueError as error:
        raise ValueError(f"mesh: {error}") from error
    return None if placement.mesh.size == 1 else placement


def _present() -> str:
    return ", ".join(sorted({device.platform for device in jax.devices()}))
