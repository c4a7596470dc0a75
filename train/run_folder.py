"""The folder of a run: what lies where, and that one process at a time works in it.

    config.json        the resolved `TrainConfig`; its presence makes the folder a run
    tokenizers/        source.json and target.json
    checkpoints/       one folder a checkpoint, named by its step
    best/, last/       model folders of `tfm.store`
    metrics.jsonl      the record, a row a line
    tensorboard/       the same for TensorBoard
    damaged/           checkpoints that could not be read, if there were any
    .saved             there have been checkpoints: without one, the run cannot just begin anew
    .lock              held while a process trains here

Tokenizers are written before `config.json` and both before the first step, so a run that has a config is complete.
"""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from tfm.tokenizer import Tokenizer
from train.config import TrainConfig, from_json, to_json

_LOCK = ".lock"
_UNFINISHED = {_LOCK, "tokenizers", "config.json.tmp"}
"""All that a process can leave behind that dies before the folder is a run."""


class RunFolder:
    """The paths of a run, and reading and writing of what is fixed when it begins."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.config_path = self.path / "config.json"
        self.checkpoints = self.path / "checkpoints"
        self.best = self.path / "best"
        self.last = self.path / "last"
        self._tokenizers = (self.path / "tokenizers" / "source.json", self.path / "tokenizers" / "target.json")

    def is_run(self) -> bool:
        """Whether there is a run to go on with; False where one can begin.

        Raises:
            ValueError: the path is taken by something else, which is left as it is.
        """
        if self.config_path.is_file():
            self.read_config()
            return True
        if self.path.is_symlink() and not self.path.exists():
            raise ValueError(f"expected a folder for the run, got {self.path}, a link that leads nowhere")
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"expected a folder for the run, got the file {self.path}")
        known = _UNFINISHED if (self.path / _LOCK).is_file() else ()
        foreign = sorted(path.name for path in self.path.glob("*") if path.name not in known)
        if foreign:
            raise ValueError(
                f"expected a run or an empty folder, got {self.path} with {', '.join(foreign[:5])} in it and without a "
                "config.json; give another folder"
            )
        return False

    def read_config(self) -> TrainConfig:
        """Raises ValueError where `config.json` is not that of a run."""
        try:
            return from_json(self.config_path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{self.config_path} does not describe a run: {error}") from error

    def read_tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        source, target = (Tokenizer.load(path) for path in self._tokenizers)
        return source, source if target == source else target

    def create(self, config: TrainConfig, source_tokenizer: Tokenizer, target_tokenizer: Tokenizer) -> None:
        """Makes the folder a run, in one move at the end."""
        for path, tokenizer in zip(self._tokenizers, (source_tokenizer, target_tokenizer), strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, tokenizer.to_json().encode())
        self.write_config(config)

    def write_config(self, config: TrainConfig) -> None:
        write_atomically(self.config_path, to_json(config).encode())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the run against other processes, until this one leaves the block or dies in whatever way.

        Raises:
            ValueError: another process holds it.
        """
        is_new = not self.path.exists()
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            with (self.path / _LOCK).open("a+") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    lock.seek(0)
                    holder = lock.read().strip() or "another process"
                    raise ValueError(
                        f"{holder} is training in {self.path}; wait for it, or give another folder"
                    ) from None
                if not self._is_the_lock(lock.fileno()):
                    continue
                lock.truncate(0)
                lock.write(f"process {os.getpid()} on {socket.gethostname()}")
                lock.flush()
                try:
                    yield
                finally:
                    if is_new and not self.config_path.exists():
                        self._remove_nothing()
                return

    def _is_the_lock(self, file: int) -> bool:
        """False where the process that held it has removed it meanwhile: others would lock another file."""
        try:
            return os.path.samestat(os.fstat(file), (self.path / _LOCK).stat())
        except FileNotFoundError:
            return False

    def _remove_nothing(self) -> None:
        """Takes away the folder that was made for a run which did not come to be; what else is in it stays."""
        with contextlib.suppress(OSError):
            for path in self._tokenizers:
                path.unlink(missing_ok=True)
            if (tokenizers := self._tokenizers[0].parent).is_dir():
                tokenizers.rmdir()
            (self.path / _LOCK).unlink()  # not before the others: beside it they are known as leftovers
            self.path.rmdir()


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file in one move: whoever reads it, and whenever this process dies, finds the old or the new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk names no file by itself
