"""What a run shows and records: a progress bar or plain lines, `metrics.jsonl`, and TensorBoard.

`metrics.jsonl` is the record; TensorBoard is written from its rows. So both can be cut back to a checkpoint: when a
run is resumed, rows of later steps are dropped, for they will come again.
"""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rich.console
import rich.progress
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event

from train.run_folder import write_atomically

Row = Mapping[str, Any]
"""One line of `metrics.jsonl`: `step`, `split` ("train" or "validation"), `seconds` of training so far, and numbers by
name. What compiling, validating and saving took is not among the seconds. A validation row may have `samples`, each
with `source`, `hypothesis` and `references`."""

_SHOWN = {
    "loss": "loss {:.4f}",
    "perplexity": "perplexity {:.4g}",
    "bits_per_byte": "{:.3f} bits per byte",
    "learning_rate": "learning rate {:.2e}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "padding_share": "padding {:.1%}",
}
_SHOWN_IN_BAR = {"loss": "loss {:.3f}", "tokens_per_second": "{:,.0f} tokens/s", "padding_share": "padding {:.0%}"}
"""Fewer and shorter, so that step, bar and time left have room in 80 columns."""
_SAMPLE_WIDTH = 100
"""Characters of a sample's text that are shown."""
_NOT_METRICS = ("step", "split", "seconds", "samples")


class _Console(rich.console.Console):
    """A console whose reader may go away: training and its record go on without it."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Reporter:
    """Tells the user how a run goes, and keeps the record.

    Args:
        console: where to; a bar is drawn where it is a terminal, lines are printed elsewhere. `None`: standard error.
    """

    def __init__(self, console: rich.console.Console | None = None) -> None:
        self._console = _Console(stderr=True, emoji=False) if console is None else console
        self._bar: rich.progress.Progress | None = None
        self._metrics: Any = None
        self._board: EventsWriter | None = None
        self._board_origin = 0.0
        self._total_steps = 0
        self._first_row: tuple[int, float] | None = None

    def message(self, text: str) -> None:
        """Shows a line, as it is."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Shows a line that should not be missed."""
        self._console.print(f"WARNING: {text}", style="bold yellow", markup=False, highlight=False, soft_wrap=True)

    def start(self, run_dir: Path, *, step: int, total_steps: int) -> None:
        """Opens the records of a run that has made `step` steps, without any rows of later steps."""
        self._total_steps = total_steps
        rows = cut_back(run_dir / "metrics.jsonl", step)
        self._metrics = (run_dir / "metrics.jsonl").open("ab", buffering=0)
        seconds = max((row.get("seconds", 0.0) for row in rows), default=0.0)
        self._board_origin = time.time() - seconds
        for file in (run_dir / "tensorboard").glob("tfm.out.tfevents.*"):
            file.unlink()
        # The writer without a thread, because a thread that has died of a full disk would block the training for ever.
        (run_dir / "tensorboard").mkdir(exist_ok=True)
        self._board = EventsWriter(str(run_dir / "tensorboard" / "tfm"))
        for row in rows:
            self._write_board(row)
        if self._console.is_terminal:
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("{task.completed:,}/{task.total:,}"),
                rich.progress.BarColumn(bar_width=12),
                rich.progress.TextColumn("{task.fields[status]}", markup=False),
                rich.progress.TimeRemainingColumn(compact=True),
                console=self._console,
                speed_estimate_period=120.0,
            )
            self._bar.add_task("", total=total_steps, completed=step, status="")
            self._bar.start()
            self._console.show_cursor(True)  # or a process that is killed would leave the terminal without one

    def step(self, step: int, row: Row) -> None:
        """Moves the bar. `row` is what a row of this step would be; it is shown, not recorded."""
        if self._bar is not None:
            status = " · ".join(_formatted(row, _SHOWN_IN_BAR))
            self._bar.update(self._bar.task_ids[0], completed=step, status=status)

    def record(self, row: Row) -> None:
        """Appends a row to the record, and shows it."""
        assert self._metrics is not None, "start() comes first"
        clean = {key: _json_number(value) for key, value in row.items()}
        line = json.dumps(clean, ensure_ascii=False, allow_nan=False) + "\n"
        self._metrics.write(line.encode())  # unbuffered: what is recorded survives the process
        self._write_board(clean)
        for text in self._lines(row):
            self.message(text)

    def flush(self) -> None:
        """Returns when every recorded row is on the disk: a checkpoint must not be ahead of the record."""
        if self._metrics is not None:
            os.fsync(self._metrics.fileno())

    def close(self) -> None:
        """Ends bar and records. May be called twice."""
        if self._bar is not None:
            self._bar.stop()
        self._close_board()
        if self._metrics is not None:
            self._metrics.close()
        self._bar = self._metrics = None

    def _lines(self, row: Row) -> list[str]:
        place = f"step {row['step']:,}/{self._total_steps:,}"
        if row["split"] == "train":
            left = self._time_left(row["step"])
            return [] if self._bar is not None else [" · ".join([place, *_numbers(row), *left])]
        lines = [" · ".join([place, row["split"], *_numbers(row)])]
        for sample in row.get("samples", ()):
            lines.append(f"    {_short(sample['source'])} → {_short(sample['hypothesis'])}")
            lines.append(f"        reference: {' | '.join(map(_short, sample['references']))}")
        return lines

    def _time_left(self, step: int) -> list[str]:
        """From the pace since the first row of this process: before it, shapes were compiled."""
        if self._first_row is None:
            self._first_row = (step, time.monotonic())
        done, seconds = step - self._first_row[0], time.monotonic() - self._first_row[1]
        if not done or step >= self._total_steps:
            return []
        minutes, seconds = divmod(round((self._total_steps - step) * seconds / done), 60)
        return [f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d} left"]

    def _write_board(self, row: Row) -> None:
        if self._board is None:
            return
        shown = [
            summary.scalar(f"{row['split']}/{key}", float(value))  # NumPy has no place for great whole numbers
            for key, value in row.items()
            if key not in _NOT_METRICS and value is not None
        ]
        if row.get("samples"):
            shown.append(summary.text(f"{row['split']}/samples", _table(row["samples"])))
        try:
            for one in shown:
                when = self._board_origin + row.get("seconds", 0.0)
                self._board.write_event(Event(step=row["step"], wall_time=when, summary=one))
            self._board.flush()
        except OSError as error:
            self.warn(f"TensorBoard gets no more of this run ({error.strerror}); it will when the run is resumed")
            self._close_board()

    def _close_board(self) -> None:
        if self._board is not None:
            with contextlib.suppress(OSError):  # what is missing there is in metrics.jsonl
                self._board.close()
        self._board = None


def cut_back(path: Path, step: int) -> list[dict[str, Any]]:
    """Drops the rows of `metrics.jsonl` after `step`, and a half-written one, by replacing the file in one move.

    Lines that are no rows of a run stay where they are.

    Returns:
        the rows that are left, in order; none where there is no file.
    """
    if not path.exists():
        return []
    rows, kept = [], []
    lines = path.read_bytes().splitlines(keepends=True)
    for line in lines:
        row = whole_row(line)
        if row is not None and row["step"] <= step:
            rows.append(row)
        if line.endswith(b"\n") and (row is None or row["step"] <= step):
            kept.append(line)
    if len(kept) < len(lines):
        write_atomically(path, b"".join(kept))
    return rows


def whole_row(line: bytes) -> dict[str, Any] | None:
    """The row that a line of `metrics.jsonl` holds, or None: the line is being written, damaged, or a user's own."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if line.endswith(b"\n") and isinstance(row, dict) and _is_row(row) else None


def _is_row(row: dict[str, Any]) -> bool:
    """Whether all that reads rows can take this one, TensorBoard with its fixed widths included."""
    step, seconds = row.get("step"), row.get("seconds", 0.0)
    numbers = [value for key, value in row.items() if key not in _NOT_METRICS]
    samples = row.get("samples", [])
    return (
        isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**63
        and _is_text(row.get("split"))
        and _is_number(seconds)
        and all(map(_is_text, row))
        and all(value is None or _is_number(value) for value in numbers)
        and isinstance(samples, list) and all(map(_is_sample, samples))
    )  # fmt: skip


def _is_sample(sample: Any) -> bool:
    if not isinstance(sample, dict):
        return False
    references = sample.get("references")
    texts = [sample.get("source"), sample.get("hypothesis")]
    return isinstance(references, list) and all(map(_is_text, texts + references))


def _is_number(value: Any) -> bool:
    """JSON's whole numbers have no bound, and 1e999 is infinite."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and not abs(value) > sys.float_info.max


def _is_text(value: Any) -> bool:
    """Half of a surrogate pair, which JSON can spell, cannot be written."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _short(text: str) -> str:
    """A sample's text in a line of the console; the record has all of it."""
    return repr(text if len(text) <= _SAMPLE_WIDTH else text[: _SAMPLE_WIDTH - 1] + "…")


def _formatted(row: Row, forms: Mapping[str, str]) -> list[str]:
    return [form.format(row[key]) for key, form in forms.items() if row.get(key) is not None]


def _numbers(row: Row) -> list[str]:
    """The numbers of a row that are worth a place in a line, in words."""
    known = _formatted(row, _SHOWN)
    if row.get("skipped"):
        known.append(f"{row['skipped']} steps skipped")
    if row.get("split") != "validation":
        return known
    return known + [f"{key} {row[key]:.2f}" for key in row if key not in (*_SHOWN, *_NOT_METRICS)]


def _json_number(value: Any) -> Any:
    """JSON knows no infinity and no NaN: null stands for both."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _table(samples: Any) -> str:
    """Samples as a Markdown table, in code spans so that no character of theirs has a meaning."""
    rows = [
        (sample["source"], sample["hypothesis"], " / ".join(sample["references"])) for sample in samples
    ]  # fmt: skip
    cells = [" | ".join(f"`` {cell.replace('|', '¦')} ``" for cell in row) for row in rows]
    return "\n".join(["| source | hypothesis | references |", "|---|---|---|", *(f"| {row} |" for row in cells)])
