"""Counts compilations from JAX's own events, so that a test can say that something compiles nothing."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax.monitoring

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass
class Compilations:
    """Fills up while the `with` block of `count_compilations` runs."""

    names: list[str] = dataclasses.field(default_factory=list)
    """Of what was compiled, such as `jit(train_step)`, in order."""

    @property
    def count(self) -> int:
        return len(self.names)


_open: list[Compilations] = []


def _listen(event: str, duration: float, **details: object) -> None:
    if event == COMPILE_EVENT:
        for compilations in _open:
            compilations.names.append(str(details.get("fun_name", "?")))


jax.monitoring.register_event_duration_secs_listener(_listen)


@contextlib.contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Counts what XLA compiles inside the block, in all threads of this process.

    Example:
        with count_compilations() as compilations:
            step(state, batch)
        assert compilations.count == 0, compilations.names
    """
    compilations = Compilations()
    _open.append(compilations)
    try:
        yield compilations
    finally:
        _open.remove(compilations)
