"""The command line: what it understands, how it ends, and that its commands do what they say."""

import io
import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfm.config import preset
from tfm.nn.cache import cache_bytes
from train import schema
from train.cli import apply_overrides, main
from train.config import FROM_TOKENIZERS, TrainConfig, from_dict, load_recipe, to_dict
from train.streaming import LINES_AT_ONCE, group_lines
from train.template import template

TFM = [sys.executable, "-m", "train.cli"]


def errors(capsys) -> str:
    """The one line that a mistake gets, and nothing on standard output."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tfm: error: ")
    assert err.count("\n") == 1
    return err


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
        (["generate", "run", "text", "--input", "file"], ["not both"]),
        (["generate", "run", "--max-tokens", "x"], ["--max-tokens", "'x'"]),
        (["evaluate"], ["RUN"]),
        (["info", "run", "--jsno"], ["--jsno", "--json"]),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_says_what_was_meant(arguments, words, capsys):
    assert main(arguments) == 2
    message = errors(capsys)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("command", ["info", "evaluate", "generate"])
def test_a_folder_that_is_neither_run_nor_model_is_named(command, tmp_path, capsys):
    assert main([command, str(tmp_path / "nothing")]) == 2
    assert str(tmp_path / "nothing") in errors(capsys)


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--version"]] + [
    [command, "--help"] for command in ("train", "evaluate", "generate", "info", "init")
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
    assert main(["init", "-"]) == 0
    assert capsys.readouterr().out == template()


# --- lines


class Blocks(io.BytesIO):
    """Gives its bytes in blocks of given sizes, as a pipe does."""

    def __init__(self, content, sizes):
        super().__init__(content)
        self.sizes = iter(sizes)

    def read1(self, size=-1):
        return super().read1(next(self.sizes, size))


@given(
    st.lists(st.binary(max_size=4).map(lambda line: line.replace(b"\n", b"")), max_size=3 * LINES_AT_ONCE),
    st.lists(st.integers(1, 40), max_size=30),
    st.booleans(),
    st.booleans(),
)
def test_lines_come_whole_in_order_and_numbered_however_the_bytes_arrive(lines, sizes, whole_groups, newline_at_end):
    content = b"\n".join(lines) + b"\n" * (newline_at_end and bool(lines))
    expected = content.split(b"\n")
    expected = expected[:-1] if expected[-1] == b"" else expected
    groups = list(group_lines(Blocks(content, sizes), whole_groups=whole_groups))
    assert [line for _, group in groups for line in group] == expected
    assert [first for first, _ in groups] == [1 + sum(len(g) for _, g in groups[:i]) for i in range(len(groups))]
    assert all(len(group) <= LINES_AT_ONCE for _, group in groups)
    if whole_groups:
        assert all(len(group) == LINES_AT_ONCE for _, group in groups[:-1])


def test_a_line_is_given_before_the_stream_goes_on():
    given = []

    class Waiting:
        def read1(self, size):
            given.append(len(seen))
            return [b"one\ntw", b"o\n", b""][len(given) - 1]

    seen: list = []
    for _, group in group_lines(Waiting(), whole_groups=False):
        seen += group
    assert seen == [b"one", b"two"]
    assert given == [0, 1, 2]


# --- with a run


def make_files(folder: Path) -> None:
    draw = random.Random(0)
    words = sorted({"".join(draw.choices("abcdef", k=draw.randint(2, 7))) for _ in range(150)})
    lines = [f"{word}\t{' '.join(reversed(word.upper()))}\n" for word in words]
    (folder / "train.tsv").write_text("".join(lines[:-20]))
    (folder / "test.tsv").write_text("".join(lines[-20:]))


SMALL = """
steps = 20
log_every_steps = 5
data = { train = ["TRAIN"], test = ["TEST"], validation_share = 0.1, max_source_tokens = 10, max_target_tokens = 10 }
tokenizer = { source_kind = "char", target_kind = "word" }
batch = { tokens = 256, max_shapes = 1 }
optimizer = { learning_rate = 0.003, schedule = "cosine", warmup_steps = 5 }
validation = { every_steps = 10, metric = "ter", max_examples = 8 }
checkpoint = { every_steps = 10 }

[model]
model_dim = 16
feed_forward_dim = 32
num_heads = 2
encoder_layers = 1
decoder_layers = 1
max_source_length = 16
max_target_length = 16
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with test.tsv, small.toml and the finished run `run`."""
    folder = tmp_path_factory.mktemp("cli")
    make_files(folder)
    recipe = SMALL.replace("TRAIN", str(folder / "train.tsv")).replace("TEST", str(folder / "test.tsv"))
    (folder / "small.toml").write_text(recipe)
    assert main(["train", str(folder / "small.toml"), "--run", str(folder / "run")]) == 0
    return folder


def result(capsys, arguments):
    """The JSON object that a command prints."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 0
    return json.loads(capsys.readouterr().out)


def answers(capsys, arguments, status=0):
    """The lines that a command prints."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == status
    return capsys.readouterr().out.split("\n")[:-1]


def test_training_again_says_that_the_run_is_complete(trained, capsys):
    outcome = result(capsys, ["train", trained / "small.toml", "--run", trained / "run", "--json"])
    assert (outcome["reason"], outcome["step"], outcome["steps_made"]) == ("steps", 20, 0)
    assert outcome["best_step"] in (10, 20)


def test_a_run_goes_on_from_its_folder_alone_and_says_what_more_steps_mean_for_the_schedule(trained, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", str(trained / "small.toml"), "--run", str(run), "--steps", "6"]) == 0
    capsys.readouterr()
    assert main(["train", "--run", str(run), "--steps", "8", "--json"]) == 0
    out, err = capsys.readouterr()
    outcome = json.loads(out)
    assert (outcome["step"], outcome["steps_made"]) == (8, 2)
    assert "steps were 6 and are now 8" in err
    assert "cosine" in err


def test_a_changed_setting_is_refused_by_name(trained, capsys):
    arguments = ["train", trained / "small.toml", "--run", trained / "run", "--optimizer.learning_rate", "1"]
    assert main([str(argument) for argument in arguments]) == 2
    assert "optimizer.learning_rate was 0.003, now 1.0" in errors(capsys)


def test_a_dry_run_says_what_would_be_trained_and_writes_nothing(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = result(capsys, ["train", trained / "small.toml", "--dry-run", "--json"])
    info = result(capsys, ["info", trained / "run", "--json"])
    assert plan["parameters"] == info["parameters"]["total"] == sum(plan["parameters_by_part"].values())
    assert plan["bytes"]["parameters"] == 4 * plan["parameters"]
    assert plan["bytes"]["optimizer"] >= 8 * plan["parameters"]
    assert plan["bytes"]["step"] > 0
    assert len(plan["shapes"]) == 1
    assert all(shape["rows"] * max(shape["source"], shape["target"]) <= 256 for shape in plan["shapes"])
    assert sum(shape["batches"] for shape in plan["shapes"]) == plan["batches_per_epoch"]
    lines = answers(capsys, ["train", trained / "small.toml", "--dry-run", "--run", tmp_path / "run"])
    assert f"{plan['parameters']:,} parameters" in "\n".join(lines)
    assert list(tmp_path.iterdir()) == []


def test_info_says_what_a_run_is(trained, capsys):
    arguments = ["info", trained / "run", "--batch", 3, "--source-length", 7, "--length", 5]
    info = result(capsys, [*arguments, "--json"])
    config = from_dict(info["config"])
    dtype = info["cache"]["dtype"]
    assert info["cache"]["bytes"] == cache_bytes(config.model, batch=3, source_length=7, capacity=5, dtype=dtype)
    assert info["metrics"]["train"]["step"] == 20
    assert "ter" in info["metrics"]["validation"]
    text = "\n".join(answers(capsys, arguments))
    for words in (
        "learning_rate=0.003",
        f"{info['parameters']['total']:,} parameters",
        "batch 3",
        "validation at step",
    ):
        assert words in text
    model = result(capsys, ["info", trained / "run" / "best", "--json"])
    assert model["parameters"] == info["parameters"]
    assert main(["info", str(trained / "run"), "--batch", "0"]) == 2


def test_evaluation_measures_the_split_that_is_asked_for(trained, capsys):
    run = trained / "run"
    test = result(capsys, ["evaluate", run, "--json"])
    assert test["sources"] == 20
    assert test["metrics"].keys() == {"loss", "perplexity", "ter"}
    assert test["model"] == str(run / "best")
    files = result(capsys, ["evaluate", run / "best", "--split", trained / "test.tsv", "--metrics", "ter", "--json"])
    assert files["metrics"] == {"ter": test["metrics"]["ter"]}
    validation = result(capsys, ["evaluate", run, "--split", "validation", "--metrics", "chrf", "--json"])
    assert validation["sources"] < 20
    assert "chrF" in validation["signatures"]["chrf"]
    lines = answers(capsys, ["evaluate", run, "--metrics", "ter", "wer"])
    assert [line.split()[0] for line in lines[1:]] == ["ter", "wer"]


def test_evaluation_says_what_it_lacks(trained, tmp_path, capsys):
    run = trained / "run"
    assert main(["evaluate", str(run), "--metrics", "blue"]) == 2
    assert "'blue'; the nearest is 'bleu'" in errors(capsys)
    assert main(["evaluate", str(run), "--split", str(tmp_path / "none.tsv")]) == 2
    assert "none.tsv" in errors(capsys)


def test_answers_come_a_line_for_a_line_in_order(trained, capsys, tmp_path):
    run = trained / "run"
    words = ["abc", "fedcba", "", "aa", "  ", "cafe", "bad"] * 15
    (tmp_path / "words.txt").write_text("\n".join(words) + "\n")
    from_file = answers(capsys, ["generate", run, "--input", tmp_path / "words.txt"])
    assert len(from_file) == len(words)
    alone = {word: answers(capsys, ["generate", run, word])[0] for word in set(words)}
    assert from_file == [alone[word] for word in words]
    assert alone[""] == alone["  "] == ""
    assert answers(capsys, ["generate", run, *words[:7]]) == from_file[:7]


def test_scores_json_and_table_show_the_same_answers(trained, capsys):
    run = trained / "run"
    plain = answers(capsys, ["generate", run, "abc", "", "bad"])
    scored = answers(capsys, ["generate", run, "--scores", "abc", "", "bad"])
    assert [line.partition("\t")[0] for line in scored] == plain
    assert float(scored[0].split("\t")[1]) < 0
    objects = [json.loads(line) for line in answers(capsys, ["generate", run, "abc", "--json", "", "bad"])]
    assert [entry["text"] for entry in objects] == plain
    assert [entry["source"] for entry in objects] == ["abc", "", "bad"]
    assert f"{objects[0]['score']:.4f}" == scored[0].split("\t")[1]
    table = "\n".join(answers(capsys, ["generate", run, "--table", "abc", "bad"]))
    assert all(word in table for word in ("abc", "bad", "score", plain[0].split()[0] if plain[0] else ""))


def test_sampling_follows_the_seed_and_not_the_way_in(trained, capsys, tmp_path, monkeypatch):
    run = trained / "run"
    words = ["abcdef"] * (LINES_AT_ONCE + 10)
    (tmp_path / "words.txt").write_text("\n".join(words))
    drawn = ["generate", run, "--temperature", "5", "--input", tmp_path / "words.txt"]
    first = answers(capsys, [*drawn, "--seed", "1"])
    assert first == answers(capsys, [*drawn, "--seed", "1"])
    assert first != answers(capsys, [*drawn, "--seed", "2"])
    assert first[:10] != first[LINES_AT_ONCE:]  # the second group draws its own
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Blocks("\n".join(words).encode(), [10, 1, 100])))
    assert answers(capsys, [*drawn[:4], "--seed", "1"]) == first


@pytest.mark.parametrize(("bad", "words"), [(b"a" * 40, "at most 16 tokens"), (b"\xff\xfe", "UTF-8")])
def test_a_line_that_cannot_be_answered_is_named_after_those_before_it(trained, capsys, tmp_path, bad, words):
    (tmp_path / "words.txt").write_bytes(b"abc\r\n\nbad\n" + bad + b"\nabc\n")
    capsys.readouterr()
    assert main(["generate", str(trained / "run"), "--input", str(tmp_path / "words.txt")]) == 2
    out, err = capsys.readouterr()
    assert out.split("\n")[:-1] == answers(capsys, ["generate", trained / "run", "abc", "", "bad"])
    assert "words.txt, line 4: " in err
    assert words in err


def test_limits_of_generation_are_checked(trained, capsys):
    assert main(["generate", str(trained / "run"), "abc", "--max-tokens", "99"]) == 2
    assert "max_tokens" in errors(capsys)
    assert main(["generate", str(trained / "run"), "abc", "--top-p", "1.5"]) == 2
    assert "top_p" in errors(capsys)
    assert answers(capsys, ["generate", trained / "run", "abcdef", "--max-tokens", "1"])[0].count(" ") == 0


# --- as a process


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
