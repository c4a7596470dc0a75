"""The cache of compiled programs, in processes of its own: JAX decides once whether it has one."""

import os
import subprocess
from pathlib import Path

import pytest
from command_line import TFM
from tiny_models import random_params, tiny_config

from tfm.pipeline import TextModel
from tfm.tokenizer import Tokenizer
from train.compiled import cache_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled") / "model"
    tokenizer = Tokenizer.train(["a b c"], kind="word", vocab_size=11)
    size = tokenizer.vocab_size
    config = tiny_config(source_vocab_size=size, target_vocab_size=size, end_id=tokenizer.end_id)
    TextModel(config, random_params(config), tokenizer, tokenizer).save(folder)
    return folder


def generate(model: Path, home: Path, *options: str) -> str:
    environment = {**os.environ, "XDG_CACHE_HOME": str(home)}
    done = subprocess.run(
        [*TFM, "generate", str(model), "a b", *options], env=environment, check=True, capture_output=True, text=True
    )
    assert done.stderr == ""
    return done.stdout


def programs(home: Path) -> set[str]:
    return {path.name for path in (home / "tfm" / "xla").glob("*-cache")}


@pytest.mark.slow
def test_a_second_start_compiles_nothing_that_was_compiled_before(model, tmp_path):
    first = generate(model, tmp_path)
    kept = programs(tmp_path)
    assert kept
    assert generate(model, tmp_path) == first
    assert programs(tmp_path) == kept


@pytest.mark.slow
def test_it_can_be_left_off_and_need_not_be_possible(model, tmp_path):
    expected = generate(model, tmp_path, "--no-compilation-cache")
    assert not (tmp_path / "tfm").exists()
    (tmp_path / "file").write_text("")
    assert generate(model, tmp_path / "file") == expected


def test_it_lies_in_the_users_cache_directory(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/tfm/xla")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/home/me/.cache/tfm/xla")
