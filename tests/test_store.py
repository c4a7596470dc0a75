"""A model folder comes back as it was saved, is replaced whole or not at all, and says what is wrong with it."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from tfm.config import ModelConfig, preset
from tfm.nn.params import init_params
from tfm.nn.transformer import build_model
from tfm.store import check_params, load_model, save_model
from tfm.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train(["a b c d e f g h"], kind="word", vocab_size=16)
CONFIG = preset(
    "tiny",
    model_dim=8,
    feed_forward_dim=8,
    num_heads=2,
    encoder_layers=1,
    decoder_layers=1,
    source_vocab_size=TOKENIZER.vocab_size,
    target_vocab_size=TOKENIZER.vocab_size,
)
FILES = ["config.json", "model.safetensors", "source_tokenizer.json", "target_tokenizer.json"]


def make_params(config: ModelConfig = CONFIG, seed: int = 0) -> dict:
    return init_params(build_model(config, dtype="float32"), jax.random.key(seed))


def filled(value: float) -> dict:
    """Parameters that tell which save they are from, in every entry."""
    return jax.tree.map(lambda leaf: np.full(leaf.shape, value, np.float32), make_params())


def save(folder: Path, params: dict) -> None:
    save_model(folder, CONFIG, params, TOKENIZER, TOKENIZER)


def saved_value(folder: Path) -> float:
    """The one value that all parameters of the stored model have."""
    values = {float(entry) for leaf in jax.tree.leaves(load_model(folder).params) for entry in np.unique(leaf)}
    assert len(values) == 1, f"parameters of several saves: {values}"
    return values.pop()


def assert_same(a: dict, b: dict) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder-only"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_comes_back_bit_for_bit(tmp_path, architecture, dtype):
    config = CONFIG.replace(architecture=architecture, shared_embeddings="none", positions="t5-bias", gated=True)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), make_params(config))
    other = Tokenizer.train(["x y z"], kind="word", vocab_size=7)
    save_model(tmp_path / "runs" / "model", config, params, TOKENIZER, other)
    stored = load_model(tmp_path / "runs" / "model")
    assert stored.config == config
    assert_same(stored.params, params)
    assert (stored.source_tokenizer, stored.target_tokenizer) == (TOKENIZER, other)
    assert sorted(path.name for path in (tmp_path / "runs" / "model").iterdir()) == FILES
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["model"]


def test_dtypes_may_be_mixed(tmp_path):
    params = make_params()
    params["target_embedding"] = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params["target_embedding"])
    save(tmp_path / "model", params)
    assert_same(load_model(tmp_path / "model").params, params)


def test_names_are_paths_and_the_config_is_versioned(tmp_path):
    save(tmp_path / "model", make_params())
    arrays = safetensors.numpy.load_file(tmp_path / "model" / "model.safetensors")
    assert "decoder.layer_0.self_attention.query.weight" in arrays
    head = json.loads((tmp_path / "model" / "config.json").read_text())
    assert head["format_version"] == 1
    assert head["model"] == CONFIG.to_dict()
    assert isinstance(head["library_version"], str)


def test_an_array_in_another_memory_order_is_saved_right(tmp_path):
    params = jax.tree.map(lambda leaf: np.asfortranarray(leaf), make_params())
    save(tmp_path / "model", params)
    assert_same(load_model(tmp_path / "model").params, make_params())


def test_a_symlink_stays_one(tmp_path):
    save(tmp_path / "model", filled(1))
    (tmp_path / "latest").symlink_to("model")
    save(tmp_path / "latest", filled(2))
    assert (tmp_path / "latest").is_symlink()
    assert saved_value(tmp_path / "model") == saved_value(tmp_path / "latest") == 2


# What must not be lost


@pytest.mark.parametrize("content", ["notes.txt", "config.json"])
def test_refuses_a_folder_that_is_no_model(tmp_path, content):
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / content).write_text('{"model_type": "t5", "model": 1}')
    with pytest.raises(ValueError, match="not replacing what is there"):
        save(folder, make_params())
    assert [path.name for path in folder.iterdir()] == [content]
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]


def test_refuses_a_file(tmp_path):
    (tmp_path / "model").write_text("mine")
    with pytest.raises(ValueError, match="not replacing what is there"):
        save(tmp_path / "model", make_params())
    assert (tmp_path / "model").read_text() == "mine"


def test_takes_an_empty_folder(tmp_path):
    save(tmp_path, filled(1))
    assert saved_value(tmp_path) == 1


def test_a_users_files_stay_in_a_replaced_model(tmp_path):
    folder = tmp_path / "model"
    save(folder, filled(1))
    (folder / "README.md").write_text("my notes")
    (folder / "figures").mkdir()
    (folder / "figures" / "loss.svg").write_text("<svg/>")
    save(folder, filled(2))
    assert saved_value(folder) == 2
    assert (folder / "README.md").read_text() == "my notes"
    assert (folder / "figures" / "loss.svg").read_text() == "<svg/>"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_save_that_fails_leaves_the_old_model_and_nothing_else(tmp_path, monkeypatch):
    save(tmp_path / "model", filled(1))

    def full_disk(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / "model", filled(2))
    assert saved_value(tmp_path / "model") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_all_files_have_the_mode_that_the_umask_gives(tmp_path):
    before = os.umask(0o027)
    try:
        save(tmp_path / "model", make_params())
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()} == dict.fromkeys(
        FILES, 0o640
    )


# Kills, and readers


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
import itertools, test_store
for version in itertools.count(1):
    test_store.save(test_store.Path({folder!r}), test_store.filled(version))
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


# What is wrong is said


@pytest.fixture
def folder(tmp_path):
    save(tmp_path / "model", make_params())
    return tmp_path / "model"


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_arrays(folder, change):
    path = folder / "model.safetensors"
    arrays = safetensors.numpy.load_file(path)
    change(arrays)
    safetensors.numpy.save_file(arrays, path)


def test_no_folder(tmp_path):
    with pytest.raises(ValueError, match=r"expected a model folder at .*, got nothing"):
        load_model(tmp_path / "model")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="got a file"):
        load_model(tmp_path / "file")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(folder, name):
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"has no {name}"):
        load_model(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["empty", "cut", "noise", "deep"])
def test_a_damaged_file(folder, name, damage):
    content = (folder / name).read_bytes()
    noise = bytes(random.Random(3).randrange(256) for _ in range(200))
    damaged = {"empty": b"", "cut": content[: len(content) // 2], "noise": noise, "deep": b"[" * 100_000}[damage]
    (folder / name).write_bytes(damaged)
    with pytest.raises(ValueError, match=name):
        load_model(folder)


@pytest.mark.parametrize("reader", ["pathlib.Path.read_bytes", "pathlib.Path.iterdir", "safetensors.numpy.load_file"])
def test_what_may_not_be_read(folder, reader, monkeypatch):
    def refused(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    (folder.parent / ".model.previous").mkdir()
    monkeypatch.setattr(reader, refused)
    with pytest.raises(ValueError, match=r"expected a model folder that can be read, got .*denied: .*model"):
        load_model(folder)


def test_a_newer_format(folder):
    edit_config(folder, format_version=2, library_version="7.0", invented_later=1)
    with pytest.raises(ValueError, match=r"format_version 2, written by tfm 7\.0; .* reads format_version 1 to 1"):
        load_model(folder)


@pytest.mark.parametrize("version", [0, -1, "1", None, True, 1.0])
def test_no_format_that_ever_was(folder, version):
    edit_config(folder, format_version=version)
    with pytest.raises(ValueError, match="format_version"):
        load_model(folder)


def test_a_config_of_another_kind(folder):
    edit_config(folder, model=[1])
    with pytest.raises(ValueError, match="under the key 'model'"):
        load_model(folder)
    edit_config(folder, model={**CONFIG.to_dict(), "num_head": 3})
    with pytest.raises(ValueError, match=r"config\.json: .*unknown key 'num_head'; .* 'num_heads'"):
        load_model(folder)


def test_missing_and_unknown_parameters(folder):
    def rename(arrays):
        arrays["encoder.layer_0.feed_forward.down.weigth"] = arrays.pop("encoder.layer_0.feed_forward.down.weight")

    edit_arrays(folder, rename)
    message = (
        r"missing encoder\.layer_0\.feed_forward\.down\.weight; unknown encoder\.layer_0\.feed_forward\.down\.weigth"
    )
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_a_long_list_of_names_is_cut(folder):
    edit_config(folder, model={**CONFIG.to_dict(), "decoder_layers": 30})
    with pytest.raises(ValueError, match=r"and \d+ more") as caught:
        load_model(folder)
    assert len(str(caught.value)) < 1000


def test_a_shape_that_is_not_the_configs(folder):
    edit_config(folder, model={**CONFIG.to_dict(), "feed_forward_dim": 12})
    message = r"decoder\.layer_0\.feed_forward\.down\.weight: expected shape \(8, 12\), got \(8, 8\)"
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_a_dtype_that_is_not_kept(folder):
    def halve(arrays):
        arrays["target_embedding.weight"] = arrays["target_embedding.weight"].astype(np.float16)

    edit_arrays(folder, halve)
    with pytest.raises(ValueError, match=r"float32 or bfloat16, got target_embedding\.weight is float16"):
        load_model(folder)


@pytest.mark.parametrize("change", [lambda arrays: arrays.update({"a": np.ones(1, np.float32)}), lambda arrays: None])
def test_names_that_exclude_each_other(folder, change):
    def clash(arrays):
        change(arrays)
        arrays["a.b"] = arrays["decoder"] = np.ones(1, np.float32)

    edit_arrays(folder, clash)
    with pytest.raises(ValueError, match="exclude each other"):
        load_model(folder)


def test_a_name_of_very_many_parts(folder):
    edit_arrays(folder, lambda arrays: arrays.update({".".join("a" * 10_000): np.zeros(1, np.float32)}))
    with pytest.raises(ValueError, match="model: maximum recursion depth"):
        load_model(folder)


def test_tokenizers_that_do_not_belong(tmp_path):
    big = Tokenizer.train(["a b c d e f g h i j k l m n o p"], kind="word", vocab_size=40)
    for side, tokenizers in (("source", (big, TOKENIZER)), ("target", (TOKENIZER, big))):
        with pytest.raises(ValueError, match=f"{side} tokenizer of at most {TOKENIZER.vocab_size} entries.*got 20"):
            save_model(tmp_path / "model", CONFIG, make_params(), *tokenizers)
    config = CONFIG.replace(end_id=3)
    with pytest.raises(ValueError, match="end_id 3, got 2"):
        save_model(tmp_path / "model", config, make_params(), TOKENIZER, TOKENIZER)
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_of_parameters_that_do_not_belong(tmp_path):
    params = make_params()
    del params["encoder"]
    with pytest.raises(ValueError, match=r"missing encoder\.layer_0"):
        save(tmp_path / "model", params)
    assert not list(tmp_path.iterdir())
    check_params(CONFIG, make_params())
