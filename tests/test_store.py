"""A model folder comes back as it was saved, and nothing that was there before is lost."""

import errno
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from stored_models import CONFIG, FILES, TOKENIZER, filled, make_params, save, saved_value

from tfm.store import load_model, save_model
from tfm.tokenizer import Tokenizer


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
