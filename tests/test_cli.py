"""The command line: what it understands, and how a mistake ends."""

import re
import subprocess
import sys
from typing import Literal, get_args, get_origin

import pytest
from command_line import TFM, errors

from tfm.config import preset
from train import schema
from train.cli import apply_overrides, main
from train.config import FROM_TOKENIZERS, TrainConfig, from_dict, load_recipe, to_dict
from train.template import template

# --- understanding


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ["'trian'", "'train'"]),
        (["train"], ["recipe"]),
        (["train", "translatoin"], ["'translatoin'", "'translation'"]),
        (["train", "nowhere/my.toml"], ["nowhere/my.toml"]),
        (["train", "translation"], ["tfm train translation --data.train train.en train.de"]),
        (["train", "summarization"], ["'document' and 'summary'", "--data.train train.jsonl"]),
        (["train", "g2p"], ["--data.train pairs.tsv"]),
        (["train", "--run", "nowhere"], ["no run in nowhere"]),
        (["train", "g2p", "--optimzer.beta1", "0.5"], ["--optimzer.beta1", "--optimizer.beta1"]),
        (["train", "g2p", "--learning-rate", "1"], ["--optimizer.learning_rate"]),
        (["train", "g2p-demo", "--steps", "many"], ["--steps", "many"]),
        (["train", "g2p-demo", "--steps"], ["--steps"]),
        (["train", "g2p-demo", "--steps", "10.5"], ["--steps", "expected a whole number, got '10.5'"]),
        (["train", "g2p-demo", "--optimizer.beta1", "x"], ["--optimizer.beta1", "expected a number, got 'x'"]),
        (["train", "g2p-demo", "--dryrun"], ["'--dryrun'", "'--dry-run'"]),
        (["train", "g2p-demo", "--steps", "3000000000"], ["steps must be less than 2^31", "3000000000"]),
        (["train", "g2p-demo", "--optimizer.name", "adam"], ["adam", "adamw"]),
        (["train", "g2p-demo", "--optimizer.beta1", "3"], ["optimizer.beta1", "less than 1", "3.0"]),
        (["train", "g2p-demo", "--steps", "7"], ["optimizer.warmup_steps", "steps (7)"]),
        (["train", "g2p-demo", "--data.train", "a.tsv"], ["data.train must be empty"]),
        (["train", "g2p-demo", "--model.preset", "smal"], ["model.preset", "small"]),
        (["train", "g2p-demo", "--model.end_id", "3"], ["model.end_id", "tokenizers"]),
        (["train", "g2p-demo", "more"], ["more"]),
        (["generate"], ["RUN", "tfm generate --help"]),
        (["generate", "run", "--tempratur", "3"], ["--tempratur", "--temperature"]),
        (["generate", "run", "--seed", "3"], ["--seed", "--temperature"]),
        (["generate", "run", "--beams", "3", "--top-k", "2"], ["--beams", "not both"]),
        (["generate", "run", "--n-best", "3"], ["--n-best", "--beams"]),
        (["generate", "run", "--alpha", "1"], ["--alpha", "--beams"]),
        (["generate", "run", "--beams", "2", "--n-best", "3"], ["--n-best from 1 to the 2 of --beams, got 3"]),
        (["generate", "run", "--mbr", "chrf", "--n-best", "33"], ["--n-best from 1 to the 32 of --mbr, got 33"]),
        (["generate", "run", "--samples", "0"], ["--samples of at least 1, got 0"]),
        (["generate", "run", "--samples", "2", "--beams", "2"], ["--beams or sampling options, not both"]),
        (["generate", "run", "--beams", "2", "--diversity", "1"], ["--diversity without --groups"]),
        (["generate", "run", "--coverage", "1"], ["--coverage without --beams"]),
        (["generate", "run", "--stream", "--beams", "2"], ["--stream or --beams, not both"]),
        (["generate", "run", "--stream", "--alignments"], ["--stream or --alignments, not both"]),
        (["generate", "run", "--layer", "-1"], ["--layer without --alignments"]),
        (["generate", "run", "--cut", "--alignments"], ["--alignments or --cut, not both"]),
        (["generate", "run", "--samples", "2", "--seed", "-1"], ["--seed from 0 to 4294967295, got -1"]),
        (["generate", "run", "--samples", "2", "--seed", str(2**32)], ["--seed from 0 to 4294967295, got"]),
        (["generate", "run", "--stream", "--json"], ["--json", "--stream"]),
        (["evaluate", "run", "--alpha", "1"], ["--alpha", "--beams"]),
        (["generate", "run", "text", "--input", "file"], ["not both"]),
        (["generate", "run", "--max-tokens", "x"], ["--max-tokens", "'x'"]),
        (["generate", "run", "--alignments", "--table"], ["--alignments", "not both"]),
        (["generate", "run", "--batch-tokens", "0"], ["--batch-tokens", "at least 1, got 0"]),
        (["score"], ["RUN"]),
        (["score", "run", "--batch-tokens", "-1"], ["--batch-tokens", "at least 1, got -1"]),
        (["score", "run", "--source-field", "x"], ["--source-field", "--split"]),
        (["evaluate"], ["RUN"]),
        (["info", "run", "--jsno"], ["--jsno", "--json"]),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_says_what_was_meant(arguments, words, capsys):
    assert main(arguments) == 2
    message = errors(capsys)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("command", ["info", "evaluate", "generate", "score"])
def test_a_folder_that_is_neither_run_nor_model_is_named(command, tmp_path, capsys):
    assert main([command, str(tmp_path / "nothing")]) == 2
    assert str(tmp_path / "nothing") in errors(capsys)


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--version"]] + [
    [command, "--help"] for command in ("train", "evaluate", "generate", "score", "info", "init")
])  # fmt: skip
def test_help_is_a_result(arguments, capsys):
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert "tfm" in out
    assert err == ""


def test_help_for_a_recipe_lists_its_settings(capsys):
    assert main(["train", "g2p-demo", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--optimizer.warmup_steps" in out
    assert "Batch sizes" not in out
    assert f"default: {load_recipe('g2p-demo').optimizer.warmup_steps})" in " ".join(out.split())


def test_no_arguments_show_the_usage_and_fail(capsys):
    assert main([]) == 2
    assert "usage: tfm COMMAND" in capsys.readouterr().err


def test_arguments_are_understood_without_jax():
    code = (
        "import sys; from train.cli import main\n"
        "main(['--help']); main(['train', '--help']); main(['train', 'g2p', '--help']); main(['train', 'g2p'])\n"
        "main(['generate', '--help']); main(['train', 'g2p-demo', '--stepz', '3']); main(['init', '-'])\n"
        "sys.exit([name for name in ('jax', 'flax', 'grain', 'orbax') if name in sys.modules] or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).returncode == 0


def words_for(annotation, value):
    """Another value that fits an annotation, and how it is written on the command line."""
    if get_origin(annotation) is Literal:
        other = get_args(annotation)[-1]
        return other, [other]
    if annotation == tuple[str, ...]:
        return ["one", "two"], ["one", "two"]
    if annotation in (int, int | None):
        other = 8 if value is None else value + 8
        return other, [str(other)]
    if annotation is float:
        return value + 0.125, [str(value + 0.125)]
    return f"{value}x", [f"{value}x"]


@pytest.mark.parametrize("key", [key for key in schema.leaf_types(TrainConfig) if key not in FROM_TOKENIZERS])
def test_every_setting_can_be_given_on_the_command_line(key):
    base = to_dict(TrainConfig())
    section = base
    *sections, leaf = key.split(".")
    for name in sections:
        section = section[name]
    annotation = schema.leaf_types(TrainConfig)[key]
    if annotation is bool:
        section[leaf] = not section[leaf]
        option = key if section[leaf] else ".".join([*sections, f"no_{leaf}"])
        arguments = [f"--{option}"]
    else:
        section[leaf], words = words_for(annotation, section[leaf])
        arguments = [f"--{key}", *words]
    try:
        expected = from_dict(base)
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            apply_overrides(TrainConfig(), arguments)
        return
    assert apply_overrides(TrainConfig(), arguments) == expected
    dashes = [argument.replace("_", "-") if argument.startswith("--") else argument for argument in arguments]
    assert apply_overrides(TrainConfig(), dashes) == expected


def test_a_preset_on_the_command_line_takes_its_sizes_and_gives_way_to_settings_beside_it():
    recipe = load_recipe("g2p-demo")
    config = apply_overrides(recipe, ["--model.num_heads", "2", "--model.preset", "small", "--steps=5000"])
    small = preset("small")
    assert (config.model.model_dim, config.model.encoder_layers) == (small.model_dim, small.encoder_layers)
    assert config.model.num_heads == 2
    assert config.model.max_source_length == recipe.model.max_source_length
    assert config.steps == 5000
    assert config.data == recipe.data


def test_a_preset_is_checked_together_with_the_settings_beside_it():
    """Alone it cannot be: it wants one vocabulary for both sides, which the recipe has not."""
    recipe = load_recipe("g2p-demo")
    with pytest.raises(ValueError, match=r"tokenizer.shared must be true"):
        apply_overrides(recipe, ["--model.preset", "vaswani-base"])
    config = apply_overrides(recipe, ["--model.preset", "vaswani-base", "--model.shared_embeddings", "none"])
    assert (config.model.model_dim, config.model.shared_embeddings) == (512, "none")
    shared = ["--tokenizer.shared", "--tokenizer.source_kind", "char", "--tokenizer.target_kind", "char"]
    config = apply_overrides(recipe, ["--model.preset", "vaswani-base", *shared])
    assert config.model.shared_embeddings == "all"


# --- init


def test_init_writes_a_recipe_of_all_defaults_with_their_documentation(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    assert main(["init", str(path)]) == 0
    assert load_recipe(path) == TrainConfig()
    text = path.read_text()
    for key in schema.leaf_types(TrainConfig):
        assert (f"\n{key.rpartition('.')[2]} =" in text.replace("# ", "")) or key in FROM_TOKENIZERS
    unwrapped = " ".join(text.replace("#", "").split())
    assert schema.field_docs(type(TrainConfig().data))["validation_share"] in unwrapped
    assert max(map(len, text.splitlines())) <= 120
    assert str(path) in capsys.readouterr().err


def test_init_never_overwrites(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text("precious")
    assert main(["init", str(path)]) == 2
    assert path.read_text() == "precious"
    assert "mine.toml exists" in errors(capsys)
    assert main(["init", ""]) == 2
    assert "got ''" in errors(capsys)
    assert main(["init", "-"]) == 0
    assert capsys.readouterr().out == template()


def test_init_leaves_no_half_recipe_on_a_full_disk(tmp_path):
    limited = (
        "import resource, signal, sys; from train.cli import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "sys.exit(main(['init', 'mine.toml']))"
    )
    done = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "tfm: error: mine.toml: File too large\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["init", "-"], ["generate", "--help"], ["--version"]])
def test_output_that_cannot_be_written_is_a_mistake(arguments):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run([*TFM, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "tfm: error: standard output: No space left on device\n")
