"""What XLA has compiled is kept between processes, so that a command's second start answers at once."""

import os
from pathlib import Path

import jax

_MOST_BYTES = 2 << 30


def cache_folder() -> Path:
    """`tfm/xla` in the user's cache directory, which XDG_CACHE_HOME names."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "tfm" / "xla"


def keep_compiled() -> None:
    """Has JAX keep what it compiles in the user's cache directory, unless it has a cache already or there is no place.

    The least recently used goes where it would be more than 2 GiB.
    """
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # a home that cannot be written, or none: every start compiles
        return
    if not os.access(folder, os.W_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", _MOST_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
