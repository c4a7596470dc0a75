"""The folder of a run: when it is one, and who holds it."""

import contextlib
import fcntl
import multiprocessing
import os
from pathlib import Path

import pytest

from tfm.tokenizer import Tokenizer
from train.config import TrainConfig
from train.run_folder import RunFolder, write_atomically


def tokenizers() -> tuple[Tokenizer, Tokenizer]:
    return (
        Tokenizer.train(["abc", "día 漢字"], kind="char", vocab_size=300),
        Tokenizer.train(["A B C"], kind="word", vocab_size=300),
    )


def test_is_a_run_from_its_config_on_and_reads_back_what_it_was_made_with(tmp_path: Path):
    folder = RunFolder(tmp_path / "deep" / "run")
    assert not folder.is_run()
    assert not folder.path.exists()
    with folder.locked():
        assert not folder.is_run()
        source, target = tokenizers()
        folder.create(TrainConfig(seed=5), source, target)
        assert folder.is_run()
    assert folder.is_run()
    assert folder.read_config() == TrainConfig(seed=5)
    assert folder.read_tokenizers() == (source, target)
    folder.write_config(TrainConfig(seed=5, steps=77))
    assert folder.read_config().steps == 77
    assert sorted(path.name for path in folder.path.rglob("*.json")) == ["config.json", "source.json", "target.json"]


def test_a_shared_tokenizer_comes_back_as_one(tmp_path: Path):
    folder = RunFolder(tmp_path)
    source, _ = tokenizers()
    folder.create(TrainConfig(), source, source)
    read = folder.read_tokenizers()
    assert read[0] is read[1]
    assert read[0] == source


def test_a_file_is_no_folder(tmp_path: Path):
    (tmp_path / "run").write_text("x")
    with pytest.raises(ValueError, match="expected a folder for the run, got the file"):
        RunFolder(tmp_path / "run").is_run()


def test_what_a_start_leaves_behind_is_no_obstacle_but_a_users_files_are(tmp_path: Path):
    folder = RunFolder(tmp_path)
    with folder.locked():
        (tmp_path / "tokenizers").mkdir()
        (tmp_path / "config.json.tmp").write_text('{"half')
        assert not folder.is_run()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"got .* with notes\.txt in it"):
        folder.is_run()


@pytest.mark.parametrize("others", [[], ["notes.txt"]], ids=["nothing", "a user's file"])
def test_what_was_made_for_a_run_that_did_not_come_to_be_is_taken_away(tmp_path: Path, others: list[str]):
    folder = RunFolder(tmp_path / "new")
    with contextlib.suppress(KeyError), folder.locked():
        for name in others:
            (folder.path / name).write_text("mine")
        raise KeyError("the data cannot be read")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["new"] * bool(others) + others
    with folder.locked():
        folder.create(TrainConfig(), *tokenizers())
    assert (folder.path / ".lock").is_file()


def test_a_run_that_the_disk_has_no_room_for_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, fsync, left = RunFolder(tmp_path / "new"), os.fsync, [2]

    def full_disk(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full_disk)
    for room in range(3):  # for no tokenizer, for one, for both
        left[0] = room
        with pytest.raises(OSError, match=r"No space left on device: '.*new/"), folder.locked():
            folder.create(TrainConfig(), *tokenizers())
        assert list(tmp_path.iterdir()) == []


def test_a_link_that_leads_nowhere_is_no_folder(tmp_path: Path):
    (tmp_path / "run").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"expected a folder for the run, got .*run, a link that leads nowhere"):
        RunFolder(tmp_path / "run").is_run()


def test_a_lock_that_was_taken_away_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Who opens the file just before its holder removes it must not hold another file than the next one."""
    flock, removed = fcntl.flock, []

    def removing_first(file, how):
        if not removed:
            removed.append((tmp_path / ".lock").unlink())
        return flock(file, how)

    monkeypatch.setattr(fcntl, "flock", removing_first)
    with RunFolder(tmp_path).locked():
        assert f"process {os.getpid()}" in (tmp_path / ".lock").read_text()


def _hold(path: Path, held, let_go) -> None:
    with RunFolder(path).locked():
        held.set()
        let_go.wait(60)


def test_a_lock_lasts_as_long_as_its_holder(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    held, let_go = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, held, let_go))
    holder.start()
    assert held.wait(60)
    with pytest.raises(ValueError, match=f"process {holder.pid} on .* is training in"), RunFolder(tmp_path).locked():
        pass
    holder.kill()
    holder.join()
    for _ in range(2):
        with RunFolder(tmp_path).locked():
            assert f"process {os.getpid()} on" in (tmp_path / ".lock").read_text()


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "file"
    write_atomically(file, b"old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match="No space left"):
            write_atomically(file, b"new and longer")
    assert file.read_bytes() == b"old"
    write_atomically(file, b"new")
    assert file.read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
