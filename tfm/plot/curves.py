"""Learning curves, from the record that a run keeps: `metrics.jsonl`, a row a line."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from tfm.plot.figures import Axes, Figure, as_legend, figure_and_axes

Folder = str | os.PathLike[str]
XAxis = Literal["step", "seconds"]

_STYLES: dict[str, dict[str, Any]] = {
    "train": dict(linestyle="-", linewidth=1),
    "validation": dict(linestyle="--", marker="o", markersize=4),
}


def read_metrics(run: Folder) -> list[dict[str, Any]]:
    """The rows of a run's record, in their order; a number that was not finite is NaN.

    A last line that is not whole, of a run that is going on, is left out.

    Raises:
        ValueError: the folder has no record, or a line of it is no row.
    """
    path = Path(run) / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"expected the folder of a run, with a metrics.jsonl in it, got {os.fspath(run)!r}")
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):  # a text's has more ends
        if not line.endswith(b"\n"):
            break
        shown = repr(line[:60].decode(errors="replace"))
        try:
            row = json.loads(line.decode())
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: expected JSON, got {shown}") from error
        if not isinstance(row, dict) or not {"step", "split"} <= row.keys():
            raise ValueError(f"{path}, line {number}: expected a row with step and split, got {shown}")
        rows.append({name: math.nan if value is None else value for name, value in row.items()})
    return rows


def learning_curves(
    runs: Folder | Sequence[Folder] | Mapping[str, Folder],
    *,
    metric: str = "perplexity",
    x: str = "step",
    ax: Axes | None = None,
) -> Figure:
    """A metric over the steps, or the seconds of training, of one run or of several, which have a colour each.

    Args:
        runs: a run's folder, several, or several by the names to show.
        metric: any that is recorded: "perplexity" is the same for training and validation, whereas a training step's
            "loss" is smoothed. Of the splits, "train" (a line) and "validation" (dashed, with dots), those are drawn
            that have it.
        x: what goes to the right: "step" or "seconds".
        ax: where to draw; None: on a new figure.

    Raises:
        ValueError: as `read_metrics`; no run, or a run without that metric.
    """
    if x not in get_args(XAxis):
        raise ValueError(f"expected x to be one of {', '.join(get_args(XAxis))}, got {x!r}")
    records = {name: read_metrics(run) for name, run in _named(runs).items()}
    if not records:
        raise ValueError("expected at least one run, got none")
    for name, rows in records.items():
        drawn = [row for row in rows if row["split"] in _STYLES and x in row]
        known = {key for row in drawn for key, value in row.items() if isinstance(value, int | float)}
        if metric not in known - {"step", "seconds"}:
            recorded = ", ".join(sorted(known - {"step", "seconds"})) or "nothing yet"
            raise ValueError(f"expected a metric that run {name} has recorded ({recorded}), got {metric!r}")
    figure, ax = figure_and_axes(ax, 6.0, 4.0)
    for number, (name, rows) in enumerate(records.items()):
        for split, style in _STYLES.items():
            points = [(row[x], row[metric]) for row in rows if row["split"] == split and metric in row and x in row]
            if points:
                label = split if len(records) == 1 else as_legend(f"{name}, {split}")
                ax.plot(*zip(*points, strict=True), label=label, color=f"C{number % 10}", **style)
    ax.set_xlabel("step" if x == "step" else "seconds of training")
    ax.set_ylabel(metric)
    ax.legend()
    return figure


def _named(runs: Folder | Sequence[Folder] | Mapping[str, Folder]) -> dict[str, Folder]:
    if isinstance(runs, Mapping):
        return dict(runs)
    several = [runs] if isinstance(runs, str | os.PathLike) else list(runs)
    names = [Path(run).name for run in several]
    if len(set(names)) < len(names):
        names = [os.fspath(run) for run in several]
    return dict(zip(names, several, strict=True))
