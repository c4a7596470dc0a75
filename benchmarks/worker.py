"""Long-lived worker processes that are asked in turn, so that two libraries are measured side by side and both warm.

Parent and worker speak JSON, one object a line: the worker first says that it is ready, then answers every request
with one reply, and ends when its standard input does. Standard library only: a peer's interpreter imports this too.
"""

import contextlib
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
SECONDS_TO_END = 20

Handlers = Mapping[str, Callable[..., dict[str, Any]]]
"""What a worker does for each request."""


class WorkerError(RuntimeError):
    """A worker ended before it answered."""


class Worker:
    """The parent's side of one worker process. As a context manager it ends the process when left."""

    def __init__(self, module: str, argument: Mapping[str, Any], *, python: str = sys.executable):
        """Starts `python -m module`, with the argument as JSON, and waits until it is ready."""
        self.name = module
        self._process = subprocess.Popen(
            [python, "-m", module, json.dumps(argument)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=worker_environment(),
        )
        try:
            self.ready = self._reply()
        except BaseException:
            self.close()
            raise

    def ask(self, request: str, **arguments: Any) -> dict[str, Any]:
        """Sends one request and waits for its reply. Raises `WorkerError` if the worker ends instead."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing reply says the same
            print(json.dumps({"request": request, **arguments}), file=self._process.stdin, flush=True)
        return self._reply()

    def close(self) -> None:
        """Ends the worker: first by closing its input, after a while by force."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            self._process.stdout.close()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"{self.name} ended with exit status {self._process.wait(SECONDS_TO_END)}; see above")
        return json.loads(line)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._process.kill()
        self.close()


def serve(
    start: Callable[[dict[str, Any]], tuple[dict[str, Any], Mapping[str, Callable[..., dict[str, Any]]]]],
) -> None:
    """The worker's side: everything from the command line's argument to the end of standard input.

    Args:
        start: from the parent's argument to what the worker says when it is ready, and the function for each request.
    """
    # replies have the pipe for themselves: whatever a library prints goes to standard error
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=replies, flush=True)

    ready, handlers = start(json.loads(sys.argv[1]))
    reply(ready)
    for line in sys.stdin:
        arguments = json.loads(line)
        reply(handlers[arguments.pop("request")](**arguments))


def available_cores() -> int:
    """Cores that this process may use: `taskset` and containers are respected."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def limit_threads(threads: int) -> None:
    """Keeps this process and all that it starts to so many cores: the first ones that it may use.

    Before a library makes its threads: XLA sizes its pool by the cores that a process may use (or by NPROC, where the
    system has no affinity), OpenMP and oneDNN by theirs.

    Raises:
        ValueError: fewer than one thread, or more than there are cores.
    """
    if not 1 <= threads <= available_cores():
        raise ValueError(f"expected threads from 1 to the {available_cores()} cores that may be used, got {threads}")
    if hasattr(os, "sched_setaffinity") and threads < available_cores():
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    for name in ("NPROC", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)


def worker_environment() -> dict[str, str]:
    """The environment of a worker: several share an accelerator, and compiling is measured, not looked up."""
    return {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_ENABLE_COMPILATION_CACHE": "false"}


def peak_memory_bytes() -> int:
    """The most memory that this process has held at once: VmHWM where Linux tells, else the resource usage."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def describe_machine(threads: int) -> dict[str, Any]:
    """What the figures were measured on, and how busy it was already."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "threads": threads,
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
    }


def print_records(threads: int, records: Iterable[Mapping[str, Any]]) -> int:
    """Prints what the machine is, then every record as it comes, as JSON lines; returns the exit status."""
    print(json.dumps({"record": "machine", **describe_machine(threads)}), flush=True)
    try:
        for record in records:
            print(json.dumps(record), flush=True)
    except WorkerError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def missing_modules(python: str, names: Sequence[str]) -> list[str]:
    """Which of the modules this interpreter does not have. Raises ValueError if it does not run at all."""
    look = "import importlib.util, sys; print(*[n for n in sys.argv[1:] if importlib.util.find_spec(n) is None])"
    try:
        found = subprocess.run([python, "-c", look, *names], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"expected a Python interpreter, got {python!r}: {error}") from error
    return found.stdout.split()
