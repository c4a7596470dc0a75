"""Checkpoints of a run: everything that training needs to go on exactly where it was.

Orbax writes each one in the background into a folder with a temporary name and renames it when it is complete, so a
process that dies while saving leaves nothing that looks like a checkpoint. What a rename cannot protect from (a power
cut, a bad disk, a copy cut short) is found by checksums before anything is read.
"""

import contextlib
import dataclasses
import json
import logging
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from train.config import CheckpointConfig

_LOGGER = logging.getLogger(__name__)
_FORMAT_VERSION = 1
_WAS_SAVED = ".saved"
"""Lies beside the checkpoints once one is complete: who loses all of them must not lose what came of them, too."""
_DAMAGED = "damaged"
_CHECKSUMS = "checksums.json"
_PROBE = ".writable"
_POLL_S = 0.005
_READ_BYTES = 1 << 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """What the loop knows besides the training state. Saved as JSON, so floats come back exactly."""

    best_metric: float | None = None
    """The best value of the validation metric so far; `None` before the first validation."""
    best_step: int | None = None
    validations_since_best: int = 0
    """What patience is measured against."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    """Of the last validation."""
    seconds: float = 0.0
    """Time spent training, over all sessions that led here."""
    window: dict[str, float] = dataclasses.field(default_factory=dict)
    """Sums since the last logged row, so that a row that spans a restart is what it would have been."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """One checkpoint, read back."""

    step: int
    state: Any
    """A pytree like the template that was asked for."""
    data_position: dict[str, Any]
    progress: Progress
    jax_version: str
    """Of the process that saved it. Another version goes on, but not bit for bit."""


class DamagedCheckpointError(ValueError):
    """The files of a checkpoint are not what was written."""


class _LastAndBest:
    """Keeps the most recent checkpoints, and the best one besides."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self.best_step: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Orbax's `PreservationPolicy`; checkpoints come in the order of their steps."""
        del context
        first_kept = len(checkpoints) - self._keep
        return [index >= first_kept or info.step == self.best_step for index, info in enumerate(checkpoints)]


class Checkpoints:
    """The checkpoints below one folder. For one process at a time; leftovers of unfinished saves are removed.

    Args:
        folder: holds one folder a checkpoint, named by its step.
        config: how many are kept.
        run: JSON-able; what the run is made of, stored in every checkpoint, so that one that was copied away says it.
        wait_limit_s: no wait for a save in the background is longer than this.
        warn: is told of damage that was got round.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, Checkpoints(folder, CheckpointConfig(keep=2)) as checkpoints:
        ...     checkpoints.save(10, {"w": np.ones(3)}, {"epoch": 1}, Progress(best_step=10))
        ...     restored = checkpoints.restore_latest({"w": np.zeros(3)})
        ...     restored.step, restored.state["w"].tolist(), restored.data_position
        (10, [1.0, 1.0, 1.0], {'epoch': 1})
    """

    def __init__(
        self,
        folder: str | Path,
        config: CheckpointConfig,
        *,
        run: Mapping[str, Any] | None = None,
        wait_limit_s: float = 600.0,
        warn: Callable[[str], object] = _LOGGER.warning,
    ) -> None:
        self.folder = Path(folder).absolute()
        self._was_saved = self.folder.parent / _WAS_SAVED
        self._warn = warn
        self._run = dict(run or {})
        self._wait_limit_s = wait_limit_s
        self._saving: int | None = None
        self._preserved = _LastAndBest(config.keep)
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=self._preserved,
                cleanup_tmp_directories=True,
                async_options=ocp.options.AsyncOptions(
                    timeout_secs=max(1, int(wait_limit_s)), post_finalization_callback=self._write_checksums
                ),
            ),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def steps(self) -> tuple[int, ...]:
        """Of every finished checkpoint and of the one being written, in order."""
        return tuple(sorted(self._manager.all_steps()))

    def save(self, step: int, state: Any, data_position: dict[str, Any], progress: Progress) -> None:
        """Starts to save and returns when `state` may be changed or donated; the writing goes on in the background.

        Older checkpoints that are neither among the last ones nor the best are removed once this one is complete.

        Args:
            step: names the checkpoint; larger than any saved before.
            state: any pytree of arrays; typed random keys included.
            data_position: JSON-able position of the data iterator after the batches that made `state`.
            progress: of the loop. Its `best_step` is the checkpoint that is kept besides the last ones.

        Raises:
            TimeoutError: the save before this one has not ended within the limit.
            OSError: the save before this one failed, or there is no room for this one.
        """
        self.wait()
        self._check_writable(step, state)
        self._preserved.best_step = progress.best_step
        self._saving = step
        about = {
            "format_version": _FORMAT_VERSION,
            "jax_version": jax.__version__,
            "data_position": data_position,
            "progress": dataclasses.asdict(progress),
            "run": self._run,
        }
        self._manager.save(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardSave(_flatten(state)), about=ocp.args.JsonSave(about)),
            force=True,
        )

    def restore_latest(self, template: Any) -> Restored | None:
        """The newest checkpoint that can be read, or `None` where there is none.

        A checkpoint that cannot be read (a file is missing, cut short or garbled) is moved to the folder `damaged`
        beside the checkpoints, with a warning, and the one before it is taken: exact resume then repeats the steps in
        between. Nothing is deleted.

        Args:
            template: a pytree of arrays or of `jax.ShapeDtypeStruct`: structure, shapes, dtypes and shardings of the
                result.

        Raises:
            DamagedCheckpointError: there are checkpoints, and none can be read, or there have been and none is left.
                Nothing is moved then.
            ValueError: the checkpoint is whole but does not hold what `template` asks for.
        """
        self.wait()
        damaged: list[tuple[int, Exception]] = []
        for step in reversed(self.steps):
            try:
                restored = self._restore(step, template)
            except DamagedCheckpointError as error:
                damaged.append((step, error))
                continue
            for damaged_step, reason in damaged:
                self._set_aside(damaged_step, reason, instead=step)
            self._preserved.best_step = restored.progress.best_step
            return restored
        if damaged:
            raise DamagedCheckpointError(
                f"none of the checkpoints {[step for step, _ in reversed(damaged)]} in {self.folder} can be read. "
                f"Restore the folder from a copy, or move it away to start the run from its beginning. The newest: "
                f"{damaged[0][1]}"
            )
        if self._was_saved.exists():
            raise DamagedCheckpointError(
                f"no checkpoint is left in {self.folder}, where there have been some. Restore the folder from a copy, "
                "or move the run away to start it from its beginning"
            )
        return None

    def latest_progress(self) -> tuple[int, Progress] | None:
        """Step and progress of the newest checkpoint, read in no time; `None` where there is none or it is damaged."""
        self.wait()
        if not self.steps:
            return None
        try:
            with _damage_is_named(self.folder / str(self.steps[-1])):
                return self.steps[-1], Progress(**self._read_about(self.steps[-1])["progress"])
        except DamagedCheckpointError:
            return None

    def wait(self) -> None:
        """Waits until the save in the background, if any, is complete.

        Raises:
            TimeoutError: it takes longer than the limit; says what is waited for.
            OSError: it failed.
        """
        if self._saving is None:
            return
        step, deadline = self._saving, time.monotonic() + self._wait_limit_s
        while self._manager.is_saving_in_progress():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the checkpoint of step {step} is still being written to {self.folder} after "
                    f"{self._wait_limit_s:g} s: is the disk full, or a network file system away?"
                )
            time.sleep(_POLL_S)
        self._saving = None
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            problem = _first_line(error)
            raise OSError(f"the checkpoint of step {step} could not be written to {self.folder}: {problem}") from error
        self._was_saved.touch()

    def close(self) -> None:
        """Waits for the save in the background and ends orbax's threads."""
        self.wait()
        self._manager.close()

    def _check_writable(self, step: int, state: Any) -> None:
        """Finds beforehand what orbax's threads meet with thousands of lines, or wait for to the time limit."""
        problem = f"the checkpoint of step {step} could not be written to {self.folder}"
        probe = self.folder / _PROBE
        try:
            probe.mkdir(exist_ok=True)
            probe.rmdir()
            disk = os.statvfs(self.folder)
        except OSError as error:
            raise OSError(f"{problem}: {error.strerror}") from error
        needed, free = sum(leaf.nbytes for leaf in jax.tree.leaves(state)), disk.f_bavail * disk.f_frsize
        if disk.f_blocks and free < needed:  # some network file systems have no blocks, and no end
            raise OSError(f"{problem}: expected {needed:,} free bytes on its disk, got {free:,}")

    def _restore(self, step: int, template: Any) -> Restored:
        """Reads one checkpoint; `DamagedCheckpointError` where its files are at fault rather than the template."""
        folder = self.folder / str(step)
        wanted = {name: _abstract(leaf) for name, leaf in _flatten(template).items()}
        with _damage_is_named(folder):
            _check_checksums(folder)
            about = self._read_about(step)
            progress = Progress(**about["progress"])
            data_position, jax_version = about["data_position"], about["jax_version"]
            stored = ocp.StandardCheckpointHandler().metadata(folder / "state").tree
        _check_same(stored, wanted, folder)
        with _damage_is_named(folder):
            state = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted))).state
        return Restored(
            step=step,
            state=_unflatten(state, template),
            data_position=data_position,
            progress=progress,
            jax_version=jax_version,
        )

    def _read_about(self, step: int) -> dict[str, Any]:
        about = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore())).about
        if about["format_version"] != _FORMAT_VERSION:
            raise ValueError(f"expected format version {_FORMAT_VERSION}, got {about['format_version']!r}")
        return about

    def _write_checksums(self) -> None:
        """Called in orbax's thread when all arrays are written, before the folder gets its final name."""
        for folder in self.folder.glob(f"{self._saving}.*"):
            with (folder / _CHECKSUMS).open("w") as file:
                json.dump(_checksums(folder), file)
                file.flush()
                os.fsync(file.fileno())

    def _set_aside(self, step: int, reason: Exception, *, instead: int) -> None:
        """Moves a damaged checkpoint out of orbax's sight, so that its step can be saved again."""
        target = self.folder.parent / _DAMAGED / f"{step}-{time.strftime('%Y%m%d-%H%M%S')}"
        target.parent.mkdir(exist_ok=True)
        (self.folder / str(step)).rename(target)
        self._manager.reload()
        self._warn(f"{reason}. It was moved to {target}, and the run goes on from the checkpoint of step {instead}")


@contextlib.contextmanager
def _damage_is_named(folder: Path) -> Iterator[None]:
    """Turns what goes wrong while a checkpoint is read into `DamagedCheckpointError`, unless the cause is outside."""
    try:
        yield
    except (DamagedCheckpointError, PermissionError, MemoryError):
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {_first_line(error)}"
        raise DamagedCheckpointError(f"the checkpoint {folder} is damaged: {problem}") from error


def _first_line(error: Exception) -> str:
    """What an error says, without the specifications that tensorstore puts around it."""
    cause = re.search(r": ([^:\n]+) \[os_error_code", str(error))
    return cause[1] if cause else (str(error).splitlines() or [""])[0][:200]


def _checksums(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and CRC-32 of every file by its path. Files at the top are orbax's own, and still change."""
    sums = {}
    for path in sorted(path for path in folder.glob("*/**/*") if path.is_file()):
        checksum = 0
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                checksum = zlib.crc32(block, checksum)
        sums[path.relative_to(folder).as_posix()] = (path.stat().st_size, checksum)
    return sums


def _check_checksums(folder: Path) -> None:
    """Raises `DamagedCheckpointError`, naming the file that is not as it was written."""
    found = _checksums(folder)
    for name, (size, checksum) in json.loads((folder / _CHECKSUMS).read_text()).items():
        if name not in found:
            problem = "is missing"
        elif found[name][0] != size:
            problem = f"has {found[name][0]} bytes instead of {size}"
        elif found[name][1] != checksum:
            problem = "was changed"
        else:
            continue
        raise DamagedCheckpointError(f"the checkpoint {folder} is damaged: {name} {problem}")


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _flatten(tree: Any) -> dict[str, Any]:
    """Leaves by the path to them: what lies on disk does not depend on the classes that a pytree is built from."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    assert len(named) == len(leaves), "two leaves of a training state have the same path"
    return {
        name: jax.random.key_data(leaf) if isinstance(leaf, jax.Array) and _is_key(leaf) else leaf
        for name, leaf in named.items()
    }


def _unflatten(named: dict[str, Any], template: Any) -> Any:
    """The reverse of `_flatten`, by the paths and the kinds of random keys of `template`."""

    def leaf_at(path: Any, like: Any) -> Any:
        leaf = named[jax.tree_util.keystr(path, simple=True, separator=".")]
        return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(like)) if _is_key(like) else leaf

    return jax.tree_util.tree_map_with_path(leaf_at, template)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def _check_same(stored: dict[str, Any], wanted: dict[str, jax.ShapeDtypeStruct], folder: Path) -> None:
    """Raises ValueError, naming what a checkpoint lacks, has too much, or has in another shape."""
    problems = [f"{name} is missing" for name in sorted(wanted.keys() - stored.keys())]
    problems += [f"{name} is not expected" for name in sorted(stored.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & stored.keys()):
        here = (tuple(stored[name].shape), np.dtype(stored[name].dtype))
        there = (tuple(wanted[name].shape), np.dtype(wanted[name].dtype))
        if here != there:
            problems.append(f"{name} is {here[1]}{list(here[0])}, expected {there[1]}{list(there[0])}")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"the checkpoint {folder} does not fit this model: {'; '.join(problems[:5])}{more}")
