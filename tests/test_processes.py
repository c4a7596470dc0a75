"""The commands as processes of their own: pipes, readers that go away, signals, what is imported."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from command_line import TFM, result

pytestmark = pytest.mark.slow


def test_a_process_says_which_devices_there_are(trained):
    ask = [*TFM, "generate", str(trained / "run"), "--device", "abacus", "abc"]
    done = subprocess.run(ask, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "tfm: error: no device 'abacus' here; JAX has cpu\n"


def test_standard_input_is_answered_while_it_is_open(trained):
    with subprocess.Popen(
        [*TFM, "generate", str(trained / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        given = []
        for line in ("abc", "", "fed"):
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            given.append(process.stdout.readline())
        process.stdin.close()
        assert process.stdout.read() == ""
    assert process.returncode == 0
    assert given[1] == "\n"
    assert all(line.endswith("\n") for line in given)


def test_a_reader_that_goes_away_ends_it_quietly(trained):
    with subprocess.Popen(
        [*TFM, "generate", str(trained / "run")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write("abc\n")
        process.stdin.flush()
        process.stdout.readline()
        process.stdout.close()
        process.stdin.write("abc\n" * 10)
        process.stdin.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.parametrize("options", [[], ["--stream"], ["--table"], ["--json", "--n-best", "60", "--samples", "60"]])
def test_answers_that_cannot_be_written_are_a_mistake(trained, options):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        ask = [*TFM, "generate", str(trained / "run"), "abc", *options]
        done = subprocess.run(ask, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "tfm: error: standard output: No space left on device\n")


def test_closed_output_ends_without_a_traceback(trained):
    code = (
        f"import sys; sys.stdout = None; from train.cli import main; sys.exit(main(['info', {str(trained / 'run')!r}]))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""


@pytest.mark.slow
def test_a_log_that_nobody_reads_any_more_does_not_end_the_training(trained, tmp_path):
    run = tmp_path / "run"
    with subprocess.Popen(
        [*TFM, "train", str(trained / "small.toml"), "--run", str(run), "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        process.stderr.readline()
        process.stderr.close()
        outcome = json.loads(process.stdout.read())
    assert (process.returncode, outcome["reason"], outcome["step"]) == (0, "steps", 20)


def test_neither_torch_nor_tensorflow_is_imported():
    code = (
        "import sys, train.commands, train.line_commands\n"
        "found = [name for name in ('torch', 'tensorflow') if name in sys.modules]\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_says_how_to_go_on_and_going_on_works(trained, tmp_path, capsys, number, status):
    run = tmp_path / "a run"
    endless = ["--steps", "99999", "--validation.every_steps", "0", "--validation.metric", "loss"]
    with subprocess.Popen(
        [*TFM, "train", str(trained / "small.toml"), "--run", str(run), *endless], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step "):
                break
        time.sleep(0.2)
        process.send_signal(number)
        err = process.stderr.read()
    assert process.returncode == status
    assert f"tfm train --run '{run}'" in err
    assert "Traceback" not in err
    steps = max(int(folder.name) for folder in (run / "checkpoints").iterdir())
    outcome = result(capsys, ["train", "--run", run, "--steps", steps + 3, "--json"])
    assert (outcome["step"], outcome["steps_made"]) == (steps + 3, 3)
