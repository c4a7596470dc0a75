"""Runs in processes of their own that are killed, told to stop, and started again: the end is always the same."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_run import final_state, recorded_rows

pytestmark = pytest.mark.slow

KILLS = 20
PATTERNS = {
    "checkpoint-tmp": 60,  # inside a save by orbax; about 20 such events a save
    "checkpoints": 120,
    "incoming": 20,  # inside the writing of a model folder
    "previous": 12,  # inside its swap
    "metrics.jsonl": 2,
    "tensorboard": 3,
    "tokenizers": 6,
    "": 150,
    "step": 14,
}
"""Where a kill may come, and at the latest at which time there; see `tiny_run`."""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.Popen]:
    """Starts children that compile once, and all with the same number of threads."""
    program = Path(__file__).with_name("tiny_run.py")
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

    def start(folder: Path, *options: object) -> subprocess.Popen:
        of_orbax = "ignore:jax.sharding.SingleDeviceSharding is deprecated:DeprecationWarning"  # 0.12.8, jax 0.12.1
        strict = ["-W", "error", "-W", of_orbax]
        command = [sys.executable, *strict, str(program), str(folder), *map(str, options)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    return start


def end_of(process: subprocess.Popen, limit_s: float = 180) -> tuple[int, str]:
    """Exit status and all output."""
    output, _ = process.communicate(timeout=limit_s)
    return process.returncode, output


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, start) -> Path:
    """The uninterrupted run. A second one, stopped once, has the compiler see what a resumed process compiles."""
    folder = tmp_path_factory.mktemp("reference")
    assert end_of(start(folder))[0] == 0
    other = tmp_path_factory.mktemp("other")
    assert end_of(start(other, "--kill", "step", 15))[0] == -signal.SIGKILL
    assert end_of(start(other))[0] == 0
    assert_same_end(other / "run", folder / "run")
    return folder / "run"


def about(run_dir: Path) -> dict:
    """What the newest checkpoint holds besides arrays, without times."""
    newest = max((run_dir / "checkpoints").iterdir(), key=lambda path: int(path.name))
    about = json.loads((newest / "about" / "metadata").read_text())
    del about["progress"]["seconds"]
    del about["run"]["config"]  # it names the data, which lies elsewhere for each run
    return about


def assert_same_end(run_dir: Path, reference: Path) -> None:
    found, expected = final_state(run_dir), final_state(reference)
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].dtype == expected[name].dtype
        assert found[name].tobytes() == expected[name].tobytes(), name
    assert about(run_dir) == about(reference)  # position in the data, best metric and step, patience
    assert recorded_rows(run_dir) == recorded_rows(reference)
    for name in ("best", "last"):
        file = f"{name}/model.safetensors"
        assert (run_dir / file).read_bytes() == (reference / file).read_bytes()


def is_half_written(run_dir: Path) -> bool:
    return any(run_dir.glob("checkpoints/*tmp*")) or any(run_dir.glob(".*.incoming"))


def test_killed_anywhere_it_ends_the_same(tmp_path: Path, start, reference: Path):
    draw = random.Random(20)
    kills = inside_a_save = resumed = ended = 0
    while kills < KILLS:
        folder = tmp_path / str(ended)
        pattern = list(PATTERNS)[kills % len(PATTERNS)]
        status, output = end_of(start(folder, "--kill", pattern, draw.randint(1, PATTERNS[pattern])))
        resumed += "going on with" in output
        if status == 0:  # it was done before its time had come
            assert_same_end(folder / "run", reference)
            ended += 1
            continue
        assert status == -signal.SIGKILL, output
        kills += 1
        inside_a_save += is_half_written(folder / "run")
    folder = tmp_path / str(ended)
    status, output = end_of(start(folder))
    assert status == 0, output
    assert not is_half_written(folder / "run")
    assert_same_end(folder / "run", reference)
    # The test has seen what it is there for.
    assert inside_a_save >= 5
    assert resumed >= 5


def wait_for(condition: Callable[[], bool], process: subprocess.Popen, limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def has_rows(folder: Path) -> Callable[[], bool]:
    file = folder / "run" / "metrics.jsonl"
    return lambda: file.exists() and file.stat().st_size > 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_told_to_stop_it_saves_says_how_to_go_on_and_ends_the_same(
    tmp_path: Path, start, reference: Path, number: signal.Signals, status: int
):
    process = start(tmp_path)
    wait_for(has_rows(tmp_path), process)
    process.send_signal(number)
    found, output = end_of(process)
    assert found == status, output
    assert f"saved; to go on: tfm train --run {tmp_path / 'run'}" in output
    assert not is_half_written(tmp_path / "run")
    stopped = int(final_state(tmp_path / "run")["step"])
    assert 5 <= stopped < 30
    found, output = end_of(start(tmp_path))
    assert (found, f"at step {stopped} of 30" in output) == (0, True), output
    assert_same_end(tmp_path / "run", reference)


def test_a_second_interrupt_ends_the_process_at_once(tmp_path: Path, start, reference: Path):
    process = start(tmp_path, "--slow-validation")
    wait_for((tmp_path / "validating").exists, process)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    status, output = end_of(process, limit_s=30)  # of the minute that validation would take
    assert status == -signal.SIGINT, output  # 130 for a shell
    assert end_of(start(tmp_path))[0] == 0
    assert_same_end(tmp_path / "run", reference)


def test_two_processes_cannot_train_in_one_folder(tmp_path: Path, start, reference: Path):
    first = start(tmp_path, "--slow-validation")
    wait_for(has_rows(tmp_path), first)
    status, output = end_of(start(tmp_path))
    assert status == 1
    assert f"ValueError: process {first.pid} on" in output
    assert first.poll() is None
    first.kill()
    end_of(first)
    # The lock died with its process.
    assert end_of(start(tmp_path))[0] == 0
    assert_same_end(tmp_path / "run", reference)
