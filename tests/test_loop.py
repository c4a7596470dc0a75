"""The loop, in this process: how runs begin, go on, stop, and what they leave."""

import dataclasses
import io
import json
import math
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
import rich.console
from jax.experimental.compilation_cache import compilation_cache
from tiny_models import compiled_fast
from tiny_run import final_state, recorded_rows, tiny_config

import tfm
from tfm.nn.layers import compute_dtype
from train import loop
from train.checkpoint import Checkpoints
from train.config import TrainConfig
from train.loop import NonFiniteError, Outcome, train
from train.progress import Reporter
from train.run_folder import RunFolder
from train.signals import Signals


@pytest.fixture(scope="module", autouse=True)
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each call of `train` makes its functions anew; here the compiler's work is kept."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("cache")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    with compiled_fast():
        for change in (settings, before):
            for name, value in change.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()
            if change is settings:
                yield


class Listener(Reporter):
    """Remembers what it is told, and sends signals at chosen steps."""

    def __init__(self, signals: dict[int, signal.Signals] | None = None) -> None:
        self.shown = io.StringIO()
        self.steps: list[int] = []
        self._signals = signals or {}
        super().__init__(rich.console.Console(file=self.shown))

    def step(self, step: int, row) -> None:
        self.steps.append(step)
        super().step(step, row)
        if step in self._signals:
            signal.raise_signal(self._signals[step])

    @property
    def text(self) -> str:
        return self.shown.getvalue()


def run(
    config: TrainConfig, folder: Path, signals: dict[int, signal.Signals] | None = None
) -> tuple[Outcome, Listener]:
    listener = Listener(signals)
    return train(config, folder / "run", reporter=listener), listener


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome, str]:
    folder = tmp_path_factory.mktemp("finished")
    outcome, listener = run(tiny_config(folder), folder)
    return folder, outcome, listener.text


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder, with what changes when it is written."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_ino)
        for path in sorted(folder.rglob("*"))
        if path.name != ".lock"
    }


def assert_same_end(run_dir: Path, reference: Path) -> None:
    """The same state bit for bit, the same record but for times, the same models."""
    found, expected = final_state(run_dir), final_state(reference)
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].tobytes() == expected[name].tobytes(), name
    assert recorded_rows(run_dir) == recorded_rows(reference)
    for name in ("best", "last"):
        file = f"{name}/model.safetensors"
        assert (run_dir / file).read_bytes() == (reference / file).read_bytes()


def test_a_run_and_what_it_leaves(finished):
    folder, outcome, _ = finished
    run_dir = folder / "run"
    assert (outcome.reason, outcome.step, outcome.steps_made, outcome.exit_status) == ("steps", 30, 30, 0)
    assert outcome.compilations == 2
    assert sorted(path.name for path in run_dir.iterdir()) == [
        ".lock", ".saved", "best", "checkpoints", "config.json", "last", "metrics.jsonl", "tensorboard", "tokenizers",
    ]  # fmt: skip
    rows = recorded_rows(run_dir)
    assert [row["step"] for row in rows if row["split"] == "train"] == [5, 10, 15, 20, 25, 30]
    validations = [row for row in rows if row["split"] == "validation"]
    assert [row["step"] for row in validations] == [6, 12, 18, 24, 30]
    for row in rows:
        assert math.isfinite(row["loss"])
        assert row["perplexity"] == pytest.approx(math.exp(row["nll"] if row["split"] == "train" else row["loss"]))
    for row in validations:
        assert len(row["samples"]) == 2
        assert row["samples"][0].keys() == {"source", "hypothesis", "references"}
    assert rows[-2]["loss"] < rows[0]["loss"]
    assert {key: validations[-1][key] for key in outcome.metrics} == outcome.metrics
    assert outcome.best_metric == min(row["ter"] for row in validations)
    assert outcome.best_step == next(row["step"] for row in validations if row["ter"] == outcome.best_metric)
    # The last two, and the best one.
    kept = {int(path.name) for path in (run_dir / "checkpoints").iterdir()}
    assert kept == {28, 30, outcome.best_step}
    for name in ("best", "last"):
        model = tfm.load(run_dir / name)
        assert isinstance(model("abc", max_tokens=4), str)


def test_says_what_it_is_about_to_do_before_the_first_step(finished):
    _, _, text = finished
    before, first_row, after = text.partition("step 5/30")
    assert first_row
    for expected in ("108 pairs, all kept", "padding", "4 of 11 sources", "9,952 parameters", compute_dtype("auto")):
        assert expected in before
    assert re.findall(r"^compiling for batches of \d+ × \(\d+, \d+\): shape (\d) of 2$", text, re.M) == ["1", "2"]
    assert "compiled 2 times, for 2 shapes" in after
    assert "all steps are done; best ter" in after
    assert "reference:" in after


def test_a_run_whose_checkpoints_are_gone_is_not_begun_anew(finished, tmp_path: Path):
    folder, _, _ = finished
    shutil.copytree(folder / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = snapshot(tmp_path / "run")
    with pytest.raises(ValueError, match=r"no checkpoint is left in .*/run/checkpoints, where there have been some"):
        run(tiny_config(folder, steps=40), tmp_path)
    (tmp_path / "run" / "checkpoints").rmdir()  # an empty folder is all that was made
    assert snapshot(tmp_path / "run") == before


def test_a_resume_that_fails_leaves_the_config_as_it_was(finished, tmp_path: Path):
    folder, _, _ = finished
    shutil.copytree(folder / "run", tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    (tmp_path / "run" / "metrics.jsonl").mkdir()
    before = (tmp_path / "run" / "config.json").read_bytes()
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        run(tiny_config(folder, steps=40), tmp_path)
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def test_a_complete_run_is_left_alone(finished):
    folder, outcome, _ = finished
    before = snapshot(folder)
    again, listener = run(tiny_config(folder), folder)
    assert snapshot(folder) == before
    assert "is complete (all steps are done" in listener.text
    assert listener.steps == []
    assert (again.reason, again.step, again.steps_made) == ("steps", 30, 0)
    assert (again.metrics, again.best_metric, again.best_step) == (
        outcome.metrics, outcome.best_metric, outcome.best_step,
    )  # fmt: skip


@pytest.mark.slow
def test_more_steps_go_on_with_a_complete_run(finished, tmp_path: Path):
    folder, _, _ = finished
    shutil.copytree(folder / "run", tmp_path / "run")
    config = tiny_config(folder, steps=36, checkpoint={"every_steps": 5, "keep": 1}, log_every_steps=3)
    more, listener = run(config, tmp_path)
    assert (more.reason, more.step, more.steps_made) == ("steps", 36, 6)
    assert listener.steps == [31, 32, 33, 34, 35, 36]
    assert "at step 30 of 36" in listener.text
    assert [row["step"] for row in recorded_rows(tmp_path / "run")[-3:]] == [33, 36, 36]
    assert recorded_rows(tmp_path / "run")[:11] == recorded_rows(folder / "run")
    assert RunFolder(tmp_path / "run").read_config().steps == 36
    kept = {int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {36, more.best_step}


def test_changed_settings_are_named_and_nothing_is_touched(finished, tmp_path: Path):
    folder, _, _ = finished
    shutil.copytree(folder / "run", tmp_path / "run")
    before = snapshot(tmp_path)
    config = tiny_config(folder, optimizer={"learning_rate": 0.5}, seed=7, steps=99, model={"dropout_rate": 0.3})
    with pytest.raises(ValueError, match="begun with other settings") as raised:
        run(config, tmp_path)
    for expected in (
        "optimizer.learning_rate was 0.003, now 0.5", "seed was 0, now 7", "model.dropout_rate was 0.1, now 0.3"
    ):  # fmt: skip
        assert expected in str(raised.value)
    assert "steps was" not in str(raised.value)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", ["best", "last"])
def test_a_damaged_model_folder_is_named_before_the_first_step(finished, tmp_path: Path, name: str):
    shutil.copytree(finished[0], tmp_path / "copy")
    folder = tmp_path / "copy"
    (folder / "run" / name / "config.json").write_text("{}")
    before = snapshot(folder)
    with pytest.raises(ValueError, match=f"expected a model folder, .* at .*/{name}; not replacing"):
        run(tiny_config(finished[0], steps=33), folder)
    assert snapshot(folder) == before


def test_a_best_model_that_is_gone_is_said(finished, tmp_path: Path):
    shutil.copytree(finished[0], tmp_path / "copy")
    folder = tmp_path / "copy"
    shutil.rmtree(folder / "run" / "best")
    _, listener = run(tiny_config(finished[0], steps=31), folder)
    assert f"WARNING: {folder / 'run' / 'best'} is gone, the model of step {finished[1].best_step}" in listener.text


def test_changed_data_is_noticed(finished, tmp_path: Path):
    folder, _, _ = finished
    shutil.copytree(folder, tmp_path / "copy")
    config = tiny_config(folder, steps=40)
    words = folder / "words.tsv"
    original = words.read_text()
    try:
        words.write_text(original.replace("F", "E", 1))
        before = snapshot(tmp_path)
        with pytest.raises(ValueError, match="other training data"):
            run(config, tmp_path / "copy")
        assert snapshot(tmp_path) == before
    finally:
        words.write_text(original)


@pytest.mark.parametrize("content", ["thesis.doc", "config.json", "tokenizers/source.json"])
def test_a_folder_of_something_else_is_left_as_it_is(tmp_path: Path, content: str):
    file = tmp_path / "run" / content
    file.parent.mkdir(parents=True)
    file.write_text('{"format_version": 1, "model": {}}')
    before = snapshot(tmp_path / "run")
    with pytest.raises(ValueError, match=r"expected a run or an empty folder|does not describe a run"):
        run(tiny_config(tmp_path), tmp_path)
    assert snapshot(tmp_path / "run") == before
    assert not (tmp_path / "run" / ".lock").exists()


def test_a_run_that_another_process_holds(finished, tmp_path: Path):
    folder, _, _ = finished
    with (
        RunFolder(folder / "run").locked(),
        pytest.raises(ValueError, match=rf"process {os.getpid()} on .* is training in .*finished"),
    ):
        run(tiny_config(folder), folder)


def test_a_run_goes_on_from_another_working_directory(finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, _, _ = finished
    (tmp_path / "elsewhere").mkdir()
    config = tiny_config(folder, steps=2)
    relative = os.path.relpath(config.data.train[0], tmp_path)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, train=(relative,)))
    monkeypatch.chdir(tmp_path)
    assert train(config, "run", reporter=Reporter(rich.console.Console(file=io.StringIO()))).step == 2
    monkeypatch.chdir(tmp_path / "elsewhere")
    saved = RunFolder(tmp_path / "run").read_config()
    assert Path(saved.data.train[0]).is_absolute()
    more = dataclasses.replace(saved, steps=3)
    assert train(more, tmp_path / "run", reporter=Reporter(rich.console.Console(file=io.StringIO()))).step == 3


def test_data_that_cannot_be_read_leaves_no_folder(tmp_path: Path):
    config = tiny_config(tmp_path, data={"train": (str(tmp_path / "nowhere.tsv"),)})
    with pytest.raises(ValueError, match=r"nowhere\.tsv: expected a file that can be read"):
        run(config, tmp_path)
    assert not (tmp_path / "run").exists()


def test_a_start_that_died_before_it_was_a_run_is_begun_anew(tmp_path: Path):
    (tmp_path / "run" / "tokenizers").mkdir(parents=True)
    (tmp_path / "run" / "tokenizers" / "source.json").write_text("{}")
    (tmp_path / "run" / ".lock").write_text("process 1 on elsewhere")
    outcome, _ = run(tiny_config(tmp_path, steps=2), tmp_path)
    assert outcome.steps_made == 2


@pytest.mark.slow
def test_stopped_at_any_step_and_resumed_it_is_the_same_run(finished, tmp_path: Path):
    folder, outcome, _ = finished
    stops = {1: signal.SIGTERM, 4: signal.SIGINT, 6: signal.SIGTERM, 13: signal.SIGINT, 22: signal.SIGTERM}
    previous = 0
    for step, number in stops.items():
        handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
        stopped, listener = run(tiny_config(folder), tmp_path, {step: number})
        assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers
        assert stopped.exit_status == 128 + number
        assert stopped.reason == ("interrupted" if number == signal.SIGINT else "terminated")
        assert listener.steps == list(range(previous + 1, stopped.step + 1))
        assert step <= stopped.step <= step + loop._IN_FLIGHT
        assert (tmp_path / "run" / "checkpoints" / str(stopped.step)).is_dir()
        assert f"to go on: tfm train --run {tmp_path / 'run'}" in listener.text
        previous = stopped.step
    ended, listener = run(tiny_config(folder), tmp_path)
    assert listener.steps == list(range(previous + 1, 31))
    assert (ended.metrics, ended.best_metric, ended.best_step) == (
        outcome.metrics, outcome.best_metric, outcome.best_step,
    )  # fmt: skip
    assert_same_end(tmp_path / "run", folder / "run")


@pytest.mark.slow
def test_a_damaged_checkpoint_costs_steps_but_not_the_result(finished, tmp_path: Path):
    folder, _, _ = finished
    run(tiny_config(folder), tmp_path, {21: signal.SIGTERM})
    newest = max((tmp_path / "run" / "checkpoints").iterdir(), key=lambda path: int(path.name))
    os.truncate(newest / "state" / "manifest.ocdbt", 20)
    _, listener = run(tiny_config(folder), tmp_path)
    assert f"WARNING: the checkpoint {newest} is damaged" in listener.text
    assert listener.steps[0] == 21
    assert [path.name.partition("-")[0] for path in (tmp_path / "run" / "damaged").iterdir()] == [newest.name]
    assert_same_end(tmp_path / "run", folder / "run")


def test_another_jax_goes_on_and_says_what_that_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run(tiny_config(tmp_path), tmp_path, {1: signal.SIGTERM})
    restore = Checkpoints.restore_latest
    monkeypatch.setattr(
        Checkpoints, "restore_latest", lambda *given: dataclasses.replace(restore(*given), jax_version="0.9")
    )
    outcome, listener = run(tiny_config(tmp_path), tmp_path, {5: signal.SIGTERM})
    assert f"WARNING: the checkpoint is from jax 0.9, this is {jax.__version__}" in listener.text
    assert outcome.step >= 5


def test_stops_when_the_metric_gets_no_better(tmp_path: Path):
    config = tiny_config(
        tmp_path,
        validation={"every_steps": 2, "metric": "exact-match", "patience": 2},
        checkpoint={"every_steps": 100, "keep": 1},
    )
    outcome, listener = run(config, tmp_path)
    assert (outcome.reason, outcome.step, outcome.best_metric, outcome.best_step) == ("patience", 6, 0.0, 2)
    assert outcome.exit_status == 0
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"2", "6"}
    again, listener = run(config, tmp_path)
    assert (again.reason, again.step, again.steps_made) == ("patience", 6, 0)
    assert (
        "is complete (no better metric within validation.patience; best exact-match 0.0000 at step 2)" in listener.text
    )
    more, _ = run(dataclasses.replace(config, validation=dataclasses.replace(config.validation, patience=3)), tmp_path)
    assert (more.reason, more.step, more.steps_made) == ("patience", 8, 2)


@pytest.mark.slow
def test_bad_steps_in_a_row_end_the_run_with_the_last_good_checkpoint(tmp_path: Path):
    optimizer = {"learning_rate": 1e30, "warmup_steps": 0, "schedule": "constant"}
    config = tiny_config(
        tmp_path, optimizer=optimizer, max_bad_steps=3, checkpoint={"every_steps": 1, "keep": 9}, log_every_steps=1,
        validation={"every_steps": 0},
    )  # fmt: skip
    with pytest.raises(NonFiniteError, match=r"step 4: loss or gradient was not finite, 3 times in a row") as raised:
        run(config, tmp_path)
    assert "the last checkpoint is of step 1" in str(raised.value)
    rows = recorded_rows(tmp_path / "run")
    assert [(row["step"], row["skipped"], row["loss"] is None) for row in rows] == [
        (1, 0, False), (2, 1, True), (3, 1, True), (4, 1, True),
    ]  # fmt: skip
    # The checkpoints are from before the bad steps, though one was due at each of them.
    kept = final_state(tmp_path / "run")
    assert (kept["step"], kept["skipped_total"], kept["skipped_in_row"]) == (1, 0, 0)
    assert all(np.isfinite(leaf).all() for name, leaf in kept.items() if name.startswith("params."))
    with pytest.raises(NonFiniteError, match="step 4"):
        run(config, tmp_path)


def test_without_held_out_pairs_it_trains_all_the_same(tmp_path: Path):
    outcome, listener = run(tiny_config(tmp_path, data={"validation_share": 0.0}, steps=2), tmp_path)
    assert "no held-out pairs" in listener.text
    assert (outcome.metrics, outcome.best_step) == ({}, None)
    assert not (tmp_path / "run" / "best").exists()
    assert tfm.load(tmp_path / "run" / "last")("ab", max_tokens=2) is not None


def test_signals_act_at_once_where_nobody_looks_at_the_wish():
    with Signals() as signals:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(SystemExit) as raised:
            signal.raise_signal(signal.SIGTERM)
        assert raised.value.code == 143
        with signals.deferred():
            assert signals.reason is None
            signal.raise_signal(signal.SIGINT)
            assert signals.reason == "interrupted"
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL  # the second one ends the process
            signal.raise_signal(signal.SIGTERM)
            assert signals.reason == "interrupted"


def test_the_record_is_json(finished):
    folder, _, _ = finished
    for line in (folder / "run" / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert {"step", "split", "seconds", "loss", "perplexity"} <= row.keys()
        if row["split"] == "train":
            assert {"nll", "learning_rate", "grad_norm", "tokens_per_second", "padding_share", "skipped"} <= row.keys()
            assert 0 < row["padding_share"] < 1
            assert row["tokens_per_second"] > 0
