"""Checkpoints: exact, atomic, bounded; damage is found and named."""

import json
import os
import shutil
import threading
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train.checkpoint import Checkpoints, DamagedCheckpointError, Progress
from train.config import CheckpointConfig

OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-3, 0.0, 10), mask={"a.b": True, "c": False})
)


def make_state(seed: int = 0):
    """Everything that a training state may hold: nested parameters, optax's classes, both kinds of random keys."""
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {"a.b": jax.random.normal(keys[0], (5, 3)), "c": jax.random.normal(keys[1], ())}
    opt_state = OPTIMIZER.init(params)
    updates, opt_state = OPTIMIZER.update(jax.tree.map(jnp.ones_like, params), opt_state, params)
    return {
        "step": jnp.int32(7),
        "params": optax.apply_updates(params, updates),
        "half": jnp.array([1.0, jnp.inf, -0.0], jnp.bfloat16),
        "opt_state": opt_state,
        "dropout_key": jax.random.key(seed, impl="rbg"),
        "raw_key": jax.random.key_data(keys[2]),
    }


def zeros_like(state):
    return jax.tree.map(lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else 0 * leaf, state)


def assert_same(one, other) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert left.dtype == right.dtype
        if jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
            left, right = jax.random.key_data(left), jax.random.key_data(right)
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


def test_comes_back_bit_for_bit(tmp_path: Path):
    state = make_state()
    progress = Progress(
        best_metric=0.1 + 0.2, best_step=3, validations_since_best=2, seconds=1 / 3, window={"loss": 1e-300, "n": 3.0}
    )
    position = {"epoch": 3, "nested": {"next": [1, 2**60]}}
    with Checkpoints(tmp_path / "checkpoints", CheckpointConfig()) as checkpoints:
        assert checkpoints.restore_latest(state) is None
        checkpoints.save(7, state, position, progress)
    with Checkpoints(tmp_path / "checkpoints", CheckpointConfig()) as checkpoints:
        restored = checkpoints.restore_latest(zeros_like(make_state(seed=5)))
    assert restored is not None
    assert_same(restored.state, state)
    assert (restored.step, restored.data_position, restored.progress) == (7, position, progress)
    assert restored.jax_version == jax.__version__
    for leaf, like in zip(jax.tree.leaves(restored.state), jax.tree.leaves(state), strict=True):
        assert leaf.sharding == like.sharding


def test_shapes_alone_are_a_template(tmp_path: Path):
    state = {"weight": jnp.arange(6.0).reshape(2, 3)}
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(1, state, {}, Progress())
        restored = checkpoints.restore_latest(jax.eval_shape(lambda: state))
    assert restored is not None
    assert_same(restored.state, state)


def test_saves_what_was_given_though_it_is_donated_at_once(tmp_path: Path):
    advance = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    state = advance({str(index): jnp.zeros((256, 1024)) for index in range(16)})
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(1, state, {}, Progress())
        for _ in range(50):
            state = advance(state)
        restored = checkpoints.restore_latest(state)
    assert restored is not None
    assert {float(value) for leaf in restored.state.values() for value in (leaf.min(), leaf.max())} == {1.0}


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path):
    best = {1: None, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 4}
    with Checkpoints(tmp_path, CheckpointConfig(keep=2)) as checkpoints:
        for step, best_step in best.items():
            checkpoints.save(step, {"x": jnp.float32(step)}, {}, Progress(best_step=best_step))
        assert checkpoints.steps == (4, 6, 7)
    with Checkpoints(tmp_path, CheckpointConfig(keep=1)) as checkpoints:
        assert checkpoints.restore_latest({"x": jnp.float32(0)}).progress.best_step == 4
        checkpoints.save(8, {"x": jnp.float32(8)}, {}, Progress(best_step=4))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "8"]


def test_a_checkpoint_says_what_the_run_is_made_of(tmp_path: Path):
    made_of = {"config": '{"steps": 3}', "tokenizers": ["ä"]}
    with Checkpoints(tmp_path, CheckpointConfig(), run=made_of) as checkpoints:
        checkpoints.save(1, {"x": jnp.float32(1)}, {}, Progress())
    assert json.loads((tmp_path / "1" / "about" / "metadata").read_text())["run"] == made_of


def test_a_half_written_save_is_no_checkpoint(tmp_path: Path):
    state = make_state()
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(1, state, {}, Progress())
    half = tmp_path / "2.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "1", half)
    shutil.rmtree(half / "about")
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        assert checkpoints.steps == (1,)
        assert checkpoints.restore_latest(state).step == 1
        checkpoints.save(2, state, {}, Progress())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two") / "checkpoints"
    with Checkpoints(folder, CheckpointConfig()) as checkpoints:
        checkpoints.save(1, make_state(1), {"epoch": 1}, Progress())
        checkpoints.save(2, make_state(2), {"epoch": 2}, Progress())
    return folder


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_cut, _empty, _flip, Path.unlink])
def test_any_damaged_file_leads_to_the_checkpoint_before_it(
    tmp_path: Path, two_checkpoints: Path, damage, caplog: pytest.LogCaptureFixture
):
    files = [path.relative_to(two_checkpoints) for path in (two_checkpoints / "2").glob("*/**/*") if path.is_file()]
    assert len(files) > 5
    for number, file in enumerate([*files, Path("2/checksums.json")]):
        caplog.clear()
        folder = tmp_path / str(number) / "checkpoints"
        shutil.copytree(two_checkpoints, folder)
        damage(folder / file)
        with Checkpoints(folder, CheckpointConfig()) as checkpoints:
            restored = checkpoints.restore_latest(zeros_like(make_state()))
            assert restored is not None
            assert (restored.step, restored.data_position) == (1, {"epoch": 1}), file
            assert_same(restored.state, make_state(1))
            checkpoints.save(2, make_state(2), {}, Progress())  # the step is free again
        (message,) = (record.getMessage() for record in caplog.records if record.name == "train.checkpoint")
        assert str(folder / "2") in message
        assert "goes on from the checkpoint of step 1" in message
        (aside,) = (folder.parent / "damaged").iterdir()
        assert str(aside) in message
        assert (aside / "about").exists()  # nothing was deleted


def test_with_nothing_whole_left_it_says_what_to_do_and_moves_nothing(tmp_path: Path, two_checkpoints: Path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(two_checkpoints, folder)
    for step in (1, 2):
        _cut(folder / f"{step}/state/manifest.ocdbt")
    with (
        Checkpoints(folder, CheckpointConfig()) as checkpoints,
        pytest.raises(
            DamagedCheckpointError, match=r"none of the checkpoints \[1, 2\].*move it away.*manifest\.ocdbt has"
        ),
    ):
        checkpoints.restore_latest(make_state())
    assert sorted(path.name for path in tmp_path.rglob("*") if path.parent in (tmp_path, folder)) == [
        "1", "2", "checkpoints",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {**state, "extra": jnp.zeros(2)}, "extra is missing"),
        (lambda state: {key: value for key, value in state.items() if key != "step"}, "step is not expected"),
        (lambda state: {**state, "half": jnp.zeros(4, jnp.bfloat16)}, r"half is bfloat16\[3\], expected bfloat16\[4\]"),
        (lambda state: {**state, "half": jnp.zeros(3)}, r"half is bfloat16\[3\], expected float32\[3\]"),
    ],
)
def test_another_model_is_not_taken_for_damage(tmp_path: Path, two_checkpoints: Path, change, message: str):
    folder = tmp_path / "checkpoints"
    shutil.copytree(two_checkpoints, folder)
    with (
        Checkpoints(folder, CheckpointConfig()) as checkpoints,
        pytest.raises(ValueError, match=message) as raised,
    ):
        checkpoints.restore_latest(change(make_state()))
    assert not isinstance(raised.value, DamagedCheckpointError)
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]


def test_a_wait_has_a_limit_and_says_what_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    go_on = threading.Event()
    write = Checkpoints._write_checksums
    # Stands for a disk that does not answer: orbax's thread is held in the middle of a save.
    monkeypatch.setattr(Checkpoints, "_write_checksums", lambda self: go_on.wait(60) and write(self))
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), wait_limit_s=0.2)
    checkpoints.save(5, {"x": jnp.float32(1)}, {}, Progress())
    with pytest.raises(TimeoutError, match=r"checkpoint of step 5 is still being written to .* after 0\.2 s"):
        checkpoints.save(6, {"x": jnp.float32(1)}, {}, Progress())
    go_on.set()
    checkpoints.close()
    assert [path.name for path in tmp_path.iterdir()] == ["5"]


def test_a_failed_save_is_an_error_that_names_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full_disk(self):
        raise OSError(28, "No space left on device")

    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(4, {"x": jnp.float32(1)}, {}, Progress())
    monkeypatch.setattr(Checkpoints, "_write_checksums", full_disk)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(5, {"x": jnp.float32(1)}, {}, Progress())
    with pytest.raises(OSError, match=r"checkpoint of step 5 could not be written to .*No space left"):
        checkpoints.wait()
    checkpoints.close()
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        assert checkpoints.restore_latest({"x": jnp.float32(0)}).step == 4


def test_where_no_folder_can_be_made_the_error_comes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Before orbax is asked, whose threads would wait for the folder."""
    mkdir = Path.mkdir

    def refuse(path: Path, *arguments, **options) -> None:
        if path.parent == tmp_path / "checkpoints":
            raise PermissionError(13, "Permission denied", str(path))
        mkdir(path, *arguments, **options)

    with Checkpoints(tmp_path / "checkpoints", CheckpointConfig()) as checkpoints:
        checkpoints.save(4, {"x": jnp.float32(1)}, {}, Progress())
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "mkdir", refuse)
            patch.setattr(checkpoints._manager, "save", lambda *_, **__: pytest.fail("orbax was asked"))
            with pytest.raises(OSError, match=r"checkpoint of step 5 could not be written to .*: Permission denied"):
                checkpoints.save(5, {"x": jnp.float32(1)}, {}, Progress())
        checkpoints.save(5, {"x": jnp.float32(1)}, {}, Progress())
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["4", "5"]


def test_a_disk_without_room_is_found_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Orbax, out of room in the middle, prints a traceback for each array."""
    state = {"w": jnp.ones((4, 8)), "key": jax.random.key(0, impl="rbg")}
    needed = 4 * 8 * 4 + 16
    disk = types.SimpleNamespace(f_bavail=needed - 1, f_frsize=1, f_blocks=1_000_000)
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(4, state, {}, Progress())
        monkeypatch.setattr(os, "statvfs", lambda path: disk)
        with pytest.raises(OSError, match=rf"step 5 could not be .*expected {needed} free bytes .* got {needed - 1}"):
            checkpoints.save(5, state, {}, Progress())
        assert sorted(path.name for path in tmp_path.iterdir()) == ["4"]
        disk.f_bavail = needed
        checkpoints.save(5, state, {}, Progress())
        disk.f_bavail = disk.f_blocks = 0  # a file system that does not count
        checkpoints.save(6, state, {}, Progress())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "5", "6"]
