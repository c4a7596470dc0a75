"""What the loop measures itself with: sums between two rows of the record, time, and compilations."""

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from tfm.batch import Batch
from train.evaluate import perplexity
from train.step import StepMetrics


@dataclasses.dataclass(frozen=True)
class Made:
    """A step that was handed to the device."""

    step: int
    metrics: StepMetrics
    """Still on the device, perhaps not yet there."""
    positions: int
    """Source and target positions of its batch."""
    tokens: int
    """Those that are no padding."""


def count_positions(batch: Batch) -> tuple[int, int]:
    """All source and target positions of a batch on the host, and those that are no padding."""
    real = int(np.sum(batch.source_lengths)) + int(np.count_nonzero(batch.weights))
    return batch.source.size + batch.target_in.size, real


class Window:
    """Sums over the steps since the last recorded row, and the row that they make."""

    def __init__(self, sums: dict[str, float], *, begun: float = 0.0) -> None:
        self.sums = dict.fromkeys(("loss", "nll", "target_tokens", "positions", "tokens", "skipped"), 0.0) | sums
        self._begun = begun
        self._tokens_since = 0.0

    def add(self, metrics: StepMetrics, made: Made) -> None:
        tokens = float(metrics.target_tokens)
        self._tokens_since += tokens
        self.sums["positions"] += made.positions
        self.sums["tokens"] += made.tokens
        if metrics.finite:
            self.sums["target_tokens"] += tokens
            self.sums["loss"] += float(metrics.loss) * tokens
            self.sums["nll"] += float(metrics.nll) * tokens
        else:
            self.sums["skipped"] += 1

    def row(self, metrics: StepMetrics, step: int, seconds: float) -> dict[str, Any]:
        """`metrics` of the last step: what is not a mean over the window."""
        tokens = self.sums["target_tokens"]
        nll = self.sums["nll"] / tokens if tokens else math.nan
        return {
            "step": step,
            "split": "train",
            "loss": self.sums["loss"] / tokens if tokens else math.nan,
            "nll": nll,
            "perplexity": perplexity(nll),
            "learning_rate": float(metrics.learning_rate),
            "grad_norm": float(metrics.gradient_norm),
            "tokens_per_second": self._tokens_since / max(seconds - self._begun, 1e-9),
            "padding_share": 1 - self.sums["tokens"] / self.sums["positions"],
            "skipped": int(self.sums["skipped"]),
            "seconds": seconds,
        }


class Clock:
    """Seconds spent training: compiling, validating and saving are left out."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._before = seconds
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        return self._before + (0.0 if self._since is None else time.monotonic() - self._since)

    def go(self) -> None:
        self._since = time.monotonic()

    def leave_out(self, seconds: float) -> None:
        self._before -= seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._before, self._since = self.seconds, None
        yield
        self.go()


class Compilations:
    """Counts what the compiler does for the training step, by JAX's own events."""

    def __init__(self) -> None:
        self.count = 0
        self._counting: int | None = None

    def __enter__(self) -> None:
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def __exit__(self, *error: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **details: str | int) -> None:
        del duration_secs, details
        if event == "/jax/core/compile/backend_compile_duration" and self._counting == threading.get_ident():
            self.count += 1

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        self._counting = threading.get_ident()
        yield
        self._counting = None
