"""The record of a run, and what is shown of it."""

import errno
import io
import json
import math
import struct
import sys
from pathlib import Path

import pytest
import rich.console
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2

from train.progress import Reporter, cut_back, whole_row


def train_row(step: int, **numbers):
    return {"step": step, "split": "train", "loss": 1.0 + step, "seconds": step / 2, **numbers}


def validation_row(step: int):
    sample = {"source": "[bold]|x", "hypothesis": "ö `a` </b>", "references": ["a", "b"]}
    return {"step": step, "split": "validation", "wer": 12.5, "samples": [sample], "seconds": step / 2}


def rows_in(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def events_in(run_dir: Path) -> list[tuple[int, str, float | None]]:
    """(step, tag, value) of every TensorBoard event: records of length, its checksum, the event, its checksum."""
    events = []
    for file in (run_dir / "tensorboard").iterdir():
        content = file.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = event_pb2.Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            for value in event.summary.value:
                events.append((event.step, value.tag, value.simple_value if "simple_value" in str(value) else None))
    return sorted(events, key=lambda event: event[:2])


def text_reporter(**console) -> tuple[Reporter, io.StringIO]:
    shown = io.StringIO()
    return Reporter(rich.console.Console(file=shown, **{"width": 120, **console})), shown


def make_record(run_dir: Path, rows: list[dict], *, step: int = 0) -> None:
    reporter, _ = text_reporter()
    reporter.start(run_dir, step=step, total_steps=100)
    for row in rows:
        reporter.record(row)
    reporter.flush()
    reporter.close()
    reporter.close()


def test_rows_are_json_with_null_for_what_json_cannot_say(tmp_path: Path):
    make_record(tmp_path, [train_row(1, grad_norm=math.nan, perplexity=math.inf), validation_row(1)])
    assert rows_in(tmp_path) == [train_row(1, grad_norm=None, perplexity=None), validation_row(1)]


def test_a_row_is_in_the_file_when_record_returns(tmp_path: Path):
    reporter, _ = text_reporter()
    reporter.start(tmp_path, step=0, total_steps=9)
    reporter.record(train_row(1))
    assert rows_in(tmp_path) == [train_row(1)]
    reporter.close()


@pytest.mark.parametrize("torn", [b"", b'{"step": 30, "spl', b"\x00\x00\x00", b'{"step": 1}', b"7"])
def test_a_resumed_record_has_the_rows_up_to_its_step_and_no_torn_one(tmp_path: Path, torn: bytes):
    rows = [train_row(10), train_row(20), validation_row(20), train_row(30), validation_row(40)]
    make_record(tmp_path, rows)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    untouched = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:3]

    make_record(tmp_path, [train_row(30, again=1.0)], step=20)
    assert rows_in(tmp_path) == [*rows[:3], train_row(30, again=1.0)]
    assert (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:3] == untouched
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "tensorboard"]


NO_ROWS = [
    b"mine", b"[1]", b'{"a": 1}', b'{"step": 3}', b"\xff", b"[" * 100_000,
    b'{"step": 3, "split": ["x"]}', b'{"step": 3, "split": "\\ud800"}', b'{"step": null, "split": "train"}',
    b'{"step": "3", "split": "train"}', b'{"step": true, "split": "train"}', b'{"step": 3.0, "split": "train"}',
    b'{"step": -99999999999999999999999, "split": "train"}', b'{"step": 9223372036854775808, "split": "train"}',
    b'{"step": 3, "split": "train", "loss": 1' + b"0" * 400 + b"}", b'{"step": 3, "split": "train", "loss": "abc"}',
    b'{"step": 3, "split": "train", "loss": 1e999}', b'{"step": 3, "split": "train", "loss": true}',
    b'{"step": 3, "split": "train", "\\ud800": 1}',
    b'{"step": 3, "split": "train", "seconds": null}', b'{"step": 3, "split": "train", "seconds": "x"}',
    b'{"step": 3, "split": "validation", "samples": [1]}', b'{"step": 3, "split": "validation", "samples": 5}',
    b'{"step": 3, "split": "validation", "samples": [{"source": "a", "hypothesis": "b", "references": [1]}]}',
]  # fmt: skip


def test_lines_that_are_no_rows_are_none():
    assert [line for line in NO_ROWS if whole_row(line + b"\n") is not None] == []
    rows = [train_row(3, loss=None), train_row(3, loss=10**300), train_row(3, loss=math.nan), validation_row(2**63 - 1)]
    assert [row for row in rows if whole_row(json.dumps(row).encode() + b"\n") is None] == []


def test_the_largest_numbers_fit_tensorboard(tmp_path: Path):
    rows = [train_row(3, loss=10**300), train_row(2**63 - 1, loss=math.nan, seconds=sys.float_info.max)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_record(tmp_path, [], step=2**63 - 1)
    assert [step for step, *_ in events_in(tmp_path)] == [3, 2**63 - 1]


def test_lines_that_are_no_rows_stay_where_they_are(tmp_path: Path):
    make_record(tmp_path, [train_row(10)])
    foreign = b"".join(line + b"\n" for line in NO_ROWS)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(foreign)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    make_record(tmp_path, [train_row(20)], step=10)
    after = (tmp_path / "metrics.jsonl").read_bytes()
    assert after.startswith(before)
    assert json.loads(after[len(before) :]) == train_row(20)
    assert cut_back(tmp_path / "metrics.jsonl", 10) == [train_row(10)]
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_cutting_back_what_needs_no_cut_leaves_the_file_alone(tmp_path: Path):
    make_record(tmp_path, [train_row(10)])
    before = (tmp_path / "metrics.jsonl").stat()
    assert cut_back(tmp_path / "metrics.jsonl", 10) == [train_row(10)]
    assert (tmp_path / "metrics.jsonl").stat().st_ino == before.st_ino
    assert cut_back(tmp_path / "absent.jsonl", 10) == []


def test_tensorboard_says_what_the_record_says_also_after_a_restart(tmp_path: Path):
    make_record(tmp_path, [train_row(10), validation_row(20), train_row(30)])
    (tmp_path / "tensorboard" / "notes.txt").write_text("a user's file")
    make_record(tmp_path, [train_row(30, skipped=2)], step=20)
    assert (tmp_path / "tensorboard" / "notes.txt").read_text() == "a user's file"
    (tmp_path / "tensorboard" / "notes.txt").unlink()
    assert events_in(tmp_path) == [
        (10, "train/loss", 11.0),
        (20, "validation/samples/text_summary", None),
        (20, "validation/wer", 12.5),
        (30, "train/loss", 31.0),
        (30, "train/skipped", 2.0),
    ]


def test_a_disk_that_is_full_for_a_while_costs_tensorboard_and_nothing_else(tmp_path: Path, monkeypatch):
    reporter, shown = text_reporter()
    reporter.start(tmp_path, step=0, total_steps=100)

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(EventsWriter, "write_event", fail)
    rows = [train_row(step, extra=1.0) for step in range(1, 30)]
    for row in rows:
        reporter.record(row)
    reporter.close()
    assert rows_in(tmp_path) == rows
    assert shown.getvalue().count("TensorBoard gets no more of this run (No space left on device)") == 1


def test_text_is_shown_as_it_is(tmp_path: Path, capsys):
    reporter = Reporter()
    reporter.message("10:a: [b] :dog:")
    assert capsys.readouterr().err == "10:a: [b] :dog:\n"


def test_lines_where_there_is_no_terminal(tmp_path: Path):
    reporter, shown = text_reporter()
    reporter.message("shapes [B, T]  [red]")
    reporter.start(tmp_path, step=0, total_steps=1000)
    for step in (1, 2, 3):
        reporter.step(step, train_row(step))
    reporter.record(train_row(3, tokens_per_second=12345.6, padding_share=0.125, skipped=2))
    reporter.record(validation_row(4))
    reporter.warn("[odd]")
    reporter.close()
    assert shown.getvalue().splitlines() == [
        "shapes [B, T]  [red]",
        "step 3/1,000 · loss 4.0000 · 12,346 tokens/s · padding 12.5% · 2 steps skipped",
        "step 4/1,000 · validation · wer 12.50",
        "    '[bold]|x' → 'ö `a` </b>'",
        "        reference: 'a' | 'b'",
        "WARNING: [odd]",
    ]


def test_long_samples_are_shown_shortened_and_recorded_whole(tmp_path: Path):
    reporter, shown = text_reporter()
    reporter.start(tmp_path, step=0, total_steps=10)
    sample = {"source": "a" * 100, "hypothesis": "b" * 101, "references": ["c" * 1000, "d"]}
    reporter.record(validation_row(4) | {"samples": [sample]})
    reporter.close()
    _, answer, reference = shown.getvalue().splitlines()
    assert answer == f"    '{'a' * 100}' → '{'b' * 99}…'"
    assert reference == f"        reference: '{'c' * 99}…' | 'd'"
    assert rows_in(tmp_path)[0]["samples"] == [sample]


def test_a_bar_on_a_terminal_that_leaves_the_cursor_alone(tmp_path: Path):
    reporter, shown = text_reporter(force_terminal=True, width=80)
    reporter.start(tmp_path, step=5, total_steps=100_000)
    hide, show = "\x1b[?25l", "\x1b[?25h"
    # A process that is killed from now on leaves a terminal with a cursor.
    assert shown.getvalue().rfind(show) > shown.getvalue().rfind(hide)
    numbers = {"perplexity": 7.5, "learning_rate": 1e-3, "tokens_per_second": 123456.7, "padding_share": 0.123}
    reporter.step(12_345, train_row(12_345, **numbers) | {"loss": 7.0})
    reporter.record(train_row(6))
    reporter.message("a message above the bar")
    reporter.close()
    text = shown.getvalue()
    assert "12,345/100,000" in text
    assert "loss 7.000 · 123,457 tokens/s · padding 12%" in text  # all of it, in 80 columns
    assert "a message above the bar" in text
    assert "step 6/100,000 · loss" not in text  # the bar says it already
