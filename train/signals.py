"""SIGTERM and Ctrl-C as a wish that a loop grants when it is ready."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Literal

StopReason = Literal["interrupted", "terminated"]
"""By Ctrl-C (SIGINT), by SIGTERM."""


class Signals:
    """Handles both signals inside of a `with` block, and puts the handlers back that were there before.

    Inside of `deferred()` a signal only sets `reason`; outside it acts at once, as KeyboardInterrupt or SystemExit.
    Away from the main thread, where Python allows no handlers, nothing is changed.
    """

    def __init__(self) -> None:
        self.reason: StopReason | None = None
        self._deferring = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if not self._deferring:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        self.reason = self.reason or ("interrupted" if number == signal.SIGINT else "terminated")
        if number == signal.SIGINT:
            # The next one is the system's to handle: Python would not get to it in the middle of a long computation.
            signal.signal(number, signal.SIG_DFL)
