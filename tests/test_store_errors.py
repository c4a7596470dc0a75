"""What is wrong with a model folder is said, and nothing is written of what does not belong in one."""

import errno
import json
import pathlib
import random

import numpy as np
import pytest
import safetensors.numpy
from stored_models import CONFIG, FILES, TOKENIZER, make_params, save

from tfm.store import check_params, load_model, save_model
from tfm.tokenizer import Tokenizer


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


def test_parameters_that_may_not_be_read(folder, monkeypatch):
    """safetensors itself would say that there is no such file."""
    opened = pathlib.Path.open

    def refuse(path, *arguments, **options):
        if path.name == "model.safetensors":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(pathlib.Path, "open", refuse)
    with pytest.raises(ValueError, match=r"expected a model folder that can be read, .*denied: .*model\.safetensors"):
        load_model(folder)


def test_a_folder_without_a_name():
    for use in (load_model, lambda folder: save(folder, make_params())):
        with pytest.raises(ValueError, match="expected a model folder with a name of its own, got /"):
            use("/")


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
