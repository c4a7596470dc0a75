"""Killed at any moment of a save, or read during one, a model folder holds a whole model."""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import safetensors.numpy
from stored_models import filled, save, saved_value

from tfm.store import load_model


class Killed(BaseException):
    """Stands for a kill: no `except Exception` clause runs on it."""


CALLS_THAT_CHANGE_THE_DISK = ["mkdir", "rename", "unlink", "rmdir", "write_text"]


@pytest.mark.parametrize("before", ["nothing", "model", "model and notes"])
def test_killed_before_any_change_to_the_disk_a_whole_model_is_there(tmp_path, monkeypatch, before):
    """Every moment of a save in turn, first one of a fresh start, then one that finds what a kill left behind."""
    countdown = -1

    def counted(original):
        def call(*args, **kwargs):
            nonlocal countdown
            if countdown == 0:
                raise Killed
            countdown -= 1
            return original(*args, **kwargs)

        return call

    for name in CALLS_THAT_CHANGE_THE_DISK:
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    monkeypatch.setattr("safetensors.numpy.save_file", counted(safetensors.numpy.save_file))
    monkeypatch.setattr("os.fsync", counted(os.fsync))

    kills, old, folder = 0, 0, tmp_path / "model"
    while True:
        countdown = -1
        if folder.exists() and before == "nothing":
            shutil.rmtree(folder)
        elif before != "nothing" and not folder.exists() and not (tmp_path / ".model.previous").exists():
            save(folder, filled(old))
        if before == "model and notes" and not list(tmp_path.rglob("notes.txt")):
            (folder / "notes.txt").write_text("mine")
        countdown = kills
        try:
            save(folder, filled(old + 1))
        except Killed:
            pass
        else:
            break
        countdown = -1
        if before == "nothing" and not folder.exists():
            with pytest.raises(ValueError, match="got nothing"):
                load_model(folder)
        else:
            found = saved_value(folder)
            assert found in (old, old + 1)
            old = found
        kills += 1
    countdown = -1
    assert kills > 10
    assert saved_value(folder) == old + 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    if before == "model and notes":
        assert (folder / "notes.txt").read_text() == "mine"


def test_what_a_kill_within_safetensors_leaves_is_cleared(tmp_path):
    """It writes to a temporary file beside its own, which a kill keeps it from renaming."""
    save(tmp_path / "model", filled(1))
    (tmp_path / ".model.incoming").mkdir()
    (tmp_path / ".model.incoming" / ".tmpAbC").write_bytes(b"half")
    save(tmp_path / "model", filled(2))
    assert saved_value(tmp_path / "model") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.fixture
def only_previous(tmp_path):
    """A kill between the two renames; and then somebody made the missing folder, empty."""
    save(tmp_path / "model", filled(1))
    (tmp_path / "model").rename(tmp_path / ".model.previous")
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def test_an_empty_folder_does_not_hide_the_only_whole_model(only_previous):
    assert saved_value(only_previous) == 1
    save(only_previous, filled(2))
    assert saved_value(only_previous) == 2
    assert [path.name for path in only_previous.parent.iterdir()] == ["model"]


def test_the_only_whole_model_outlives_a_save_that_fails(only_previous, monkeypatch):
    def full_disk(*args, **kwargs):
        raise safetensors.SafetensorError("No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save(only_previous, filled(2))
    assert saved_value(only_previous) == 1


def test_a_reader_during_saves_sees_whole_models_in_order(tmp_path):
    folder = tmp_path / "model"
    save(folder, filled(0))
    stop = threading.Event()

    def write():
        version = 0
        while not stop.is_set():
            version += 1
            save(folder, filled(version))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = [saved_value(folder) for _ in range(100)]
    finally:
        stop.set()
        writer.join()
    assert seen == sorted(seen)
    assert seen[-1] > seen[0]


WRITER = """
import sys
sys.path.insert(0, {tests!r})
import itertools, stored_models
for version in itertools.count(1):
    stored_models.save(stored_models.Path({folder!r}), stored_models.filled(version))
    print(version, flush=True)
"""


def test_killed_for_real_a_whole_model_is_there(tmp_path):
    folder = tmp_path / "model"
    moments = random.Random(5)
    for _ in range(3):
        script = WRITER.format(tests=str(Path(__file__).parent), folder=str(folder))
        writer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        written = int(writer.stdout.readline())
        time.sleep(moments.uniform(0, 0.1))
        writer.send_signal(signal.SIGKILL)
        written = max([written, *map(int, writer.communicate()[0].split())])
        assert saved_value(folder) in (written, written + 1)
    save(folder, filled(-1))
    assert saved_value(folder) == -1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
