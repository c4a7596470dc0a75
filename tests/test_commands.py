"""What the commands do with a run, in this process and as processes of their own."""

import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from command_line import TFM, errors
from safetensors.numpy import load_file, save_file
from streams import Blocks

from tfm.nn.cache import cache_bytes
from tfm.pipeline import load
from train.cli import main
from train.config import from_dict
from train.streaming import LINES_AT_ONCE

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
    smaller = result(capsys, [*arguments, "--cache", "int8", "--json"])["cache"]
    assert smaller["bytes"] == cache_bytes(config.model, batch=3, source_length=7, capacity=5, dtype="int8")
    assert smaller["bytes"] < info["cache"]["bytes"]
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


def test_blank_lines_of_a_split_are_counted_and_not_measured(trained, tmp_path, capsys):
    rows = (trained / "test.tsv").read_text()
    (tmp_path / "test.tsv").write_text(f"\n{rows}abc\t\n   \tA B\nabc\t  \n{'a' * 30}\tA\n")
    clean = result(capsys, ["evaluate", trained / "run", "--json"])
    gappy = result(capsys, ["evaluate", trained / "run", "--split", tmp_path / "test.tsv", "--json"])
    assert (gappy["sources"], gappy["left_out"]) == (20, 4)
    assert gappy["metrics"] == clean["metrics"]
    (tmp_path / "test.tsv").write_text(" \tA\n")
    assert main(["evaluate", str(trained / "run"), "--split", str(tmp_path / "test.tsv")]) == 2
    assert "none of 1 sources can be answered" in errors(capsys)


def test_pairs_without_a_loss_are_reported(trained, tmp_path, capsys):
    (tmp_path / "test.tsv").write_text((trained / "test.tsv").read_text() + "abc\t" + "A " * 40 + "\n")
    split = ["evaluate", trained / "run", "--split", tmp_path / "test.tsv", "--metrics", "loss"]
    assert "pairs" not in result(capsys, [*split[:-1], "ter", "--json"])
    pairs = result(capsys, [*split, "--json"])["pairs"]
    assert pairs == {"empty": 0, "too_long_source": 0, "too_long_target": 1, "kept": 20}
    assert "1 with too long a target" in "\n".join(answers(capsys, split))


def test_the_loss_is_that_of_the_weights_that_answer(trained, capsys):
    command = ["evaluate", trained / "run", "--metrics", "loss", "--json", "--weights"]
    exact, again, rounded = (
        result(capsys, [*command, weights])["metrics"]["loss"] for weights in ("float32", "float32", "int8")
    )
    assert exact == again != rounded
    assert rounded == pytest.approx(exact, rel=0.05)


def test_what_lies_behind_two_dashes_is_text(trained, capsys):
    run = str(trained / "run")
    for arguments, texts in {
        (run, "--", "-dog", "--"): ["-dog", "--"],
        (run, "--", "--", "-x"): ["--", "-x"],
        (run, "--", "--"): ["--"],
        ("--max-tokens", "3", "--", run, "-dog"): ["-dog"],
        (run, "a", "--", "-a", "--", "-b"): ["a", "-a", "--", "-b"],
        (run, "a", "--max-tokens", "3", "b", "--"): ["a", "b"],
    }.items():
        lines = answers(capsys, ["generate", "--json", *arguments])
        assert [json.loads(line)["source"] for line in lines] == texts


def test_files_to_measure_on_need_not_be_of_the_runs_kind(trained, tmp_path, capsys):
    rows = [line.split("\t") for line in (trained / "test.tsv").read_text().splitlines()]
    (tmp_path / "a.src").write_text("".join(f"{source}\n" for source, _ in rows))
    (tmp_path / "a.ref").write_text("".join(f"{target}\n" for _, target in rows))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(dict(source=s, target=t)) + "\n" for s, t in rows))
    expected = result(capsys, ["evaluate", trained / "run", "--json"])["metrics"]
    for files in ([tmp_path / "a.src", tmp_path / "a.ref"], [tmp_path / "a.jsonl"]):
        measured = result(capsys, ["evaluate", trained / "run", "--split", *files, "--json"])
        assert measured["metrics"] == expected


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
    assert [entry["rank"] for entry in objects] == [1, 1, 1]
    table = "\n".join(answers(capsys, ["generate", run, "--table", "abc", "bad"]))
    assert all(word in table for word in ("abc", "bad", "score", plain[0].split()[0] if plain[0] else ""))


@pytest.mark.parametrize("search", [[], ["--beams", "3"]], ids=["greedy", "beams"])
def test_rules_hold_on_the_command_line(search, trained, capsys):
    rules = ["--ban", "A", "B C", "--require", "F E", "--ban", "D", "--prefix", "A B", "--max-tokens", "9"]
    numbers = ["--min-tokens", "4", "--no-repeat-ngram", "2", "--repetition-penalty", "1.2"]
    lines = answers(capsys, ["generate", trained / "run", "abc", "", "bad", *search, *rules, *numbers])
    assert lines[1] == ""
    for line in lines[::2]:
        assert line.startswith("A B ")
        assert "F E" in line
        assert len(line.split()) >= 2 + 4
        assert not any(phrase in line for phrase in ("B C", "D"))
        assert line.count("A") == 1
    pairs = [list(zip(line.split(), line.split()[1:], strict=False)) for line in lines]
    assert all(len(set(pair)) == len(pair) for pair in pairs)


def test_rules_that_cannot_be_are_one_line(trained, capsys):
    for rules, message in (
        (["--ban", ""], "expected a phrase of at least one token"),
        (["--require", "Z"], "expected a phrase that the tokenizer knows, got 'Z'"),
        (["--prefix", "Z"], "expected a prefix that the tokenizer knows, got 'Z'"),
        (["--min-tokens=-1"], "expected min_tokens a whole number"),
        (["--require", "A", "--ban", "A"], "without banned ones"),
    ):
        for texts in (["abc"], [" "]):
            assert main(["generate", str(trained / "run"), *texts, *rules]) == 2
            assert message in errors(capsys)


def test_beams_give_as_many_lines_a_line_as_are_asked_for(trained, capsys):
    run = trained / "run"
    search = [run, "--beams", "3", "--alpha", "0", "--scores", "abc", "", "bad"]
    lines = answers(capsys, ["generate", *search, "--n-best", "2"])
    assert len(lines) == 6
    assert lines[2:4] == ["", ""]
    assert answers(capsys, ["generate", *search]) == lines[::2]
    ranked = answers(capsys, ["generate", run, "--beams", "3", "--n_best=2", "--json", "abc", "--", "--n_best", "bad"])
    ranks = [(entry["source"], entry["rank"]) for entry in map(json.loads, ranked)]
    assert ranks == [(text, rank) for text in ("abc", "--n_best", "bad") for rank in (1, 2)]
    scores = [float(line.rpartition("\t")[2]) for line in lines if line]
    assert scores[0] >= scores[1]
    assert scores[2] >= scores[3]
    greedy = answers(capsys, ["generate", run, "--scores", "abc"])[0]
    assert scores[0] >= float(greedy.rpartition("\t")[2]) - 1e-3
    assert main(["generate", str(run), "abc", "--beams", "2", "--n-best", "3"]) == 2
    assert "expected --n-best of at most --beams, 2, got 3" in errors(capsys)
    beamed = result(capsys, ["evaluate", run, "--metrics", "ter", "--beams", "1", "--alpha", "0", "--json"])
    assert beamed["metrics"] == result(capsys, ["evaluate", run, "--metrics", "ter", "--json"])["metrics"]


def test_a_search_that_cannot_be_is_refused_whatever_there_is_to_answer(trained, capsys, monkeypatch):
    run = str(trained / "run")
    capsys.readouterr()
    for options, words in (
        (["--beams", "0"], "a width from 1 to"),
        (["--beams", "9999"], "a width from 1 to"),
        (["--beams", "2", "--alpha", "inf"], "alpha from 0 to 10"),
    ):
        for command in (["generate", run, *options, " "], ["evaluate", run, "--metrics", "loss", *options]):
            assert main(command) == 2
            assert words in errors(capsys)
    assert main(["evaluate", run, "--metrics", "loss", "--beams", "2"]) == 2
    assert "got only the loss" in errors(capsys)
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", run]) == 2
    assert "open standard input" in errors(capsys)


def test_a_model_without_finite_scores_is_named_and_not_answered_with_nothing(trained, tmp_path, capsys):
    shutil.copytree(trained / "run" / "best", tmp_path / "broken")
    file = tmp_path / "broken" / "model.safetensors"
    save_file({name: array * np.float32("nan") for name, array in load_file(file).items()}, file)
    for options in ([], ["--beams", "2", "--json"]):
        capsys.readouterr()
        assert main(["generate", str(tmp_path / "broken"), *options, "", "abc"]) == 2
        assert "argument 2: the model's answer has no finite probability" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["5", "null", "[" * 100_000])
def test_a_config_that_is_none_is_one_error(tmp_path, capsys, content):
    (tmp_path / "config.json").write_text(content)
    for command in (["train", "--run"], ["info"], ["generate"], ["evaluate"]):
        assert main([*command, str(tmp_path)]) == 2
        assert "config.json" in errors(capsys)


def test_info_passes_over_lines_of_the_record_that_are_none(trained, tmp_path, capsys):
    shutil.copytree(trained / "run", tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('5\n{"step": 3}\n{"split": "train"}\n{"st')
    found, expected = (result(capsys, ["info", folder, "--json"]) for folder in (tmp_path / "run", trained / "run"))
    assert found["metrics"] == expected["metrics"]


def test_closed_output_ends_without_a_traceback(trained):
    code = (
        f"import sys; sys.stdout = None; from train.cli import main; sys.exit(main(['info', {str(trained / 'run')!r}]))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""


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


# --- scores, alignments, devices


def given(monkeypatch, content):
    """Standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))


def test_pairs_are_scored_a_line_a_pair_whatever_they_come_from(trained, tmp_path, capsys, monkeypatch):
    run = trained / "run"
    rows = [line.split("\t") for line in (trained / "test.tsv").read_text().splitlines()]
    rows += [("", "A"), ("abc", ""), ("", ""), ("猫 😀", "猫"), *rows[:2]] * 12  # and more than a group
    (tmp_path / "a.src").write_text("".join(f"{source}\n" for source, _ in rows))
    (tmp_path / "a.ref").write_text("".join(f"{target}\n" for _, target in rows))
    (tmp_path / "a.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in rows))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(dict(source=s, target=t)) + "\n" for s, t in rows))
    expected = [one.score for one in load(run / "best").score(*zip(*rows, strict=True))]
    for split in (["a.src", "a.ref"], ["a.tsv"], ["a.jsonl"]):
        lines = answers(capsys, ["score", run, "--split", *(tmp_path / name for name in split)])
        assert [float(line) for line in lines] == pytest.approx(expected, abs=2e-4)
    given(monkeypatch, (tmp_path / "a.tsv").read_text())
    objects = [json.loads(line) for line in answers(capsys, ["score", run, "--json"])]
    assert [(entry["source"], entry["target"]) for entry in objects] == [tuple(row) for row in rows]
    for entry, score in zip(objects, expected, strict=True):
        assert entry["score"] == pytest.approx(score, abs=2e-4)
        assert sum(entry["token_scores"]) == pytest.approx(entry["score"], abs=1e-4)
        assert len(entry["token_scores"]) == len(entry["tokens"])
        assert entry["tokens"][-1] == "</s>"
    given(monkeypatch, "")
    assert answers(capsys, ["score", run]) == []


def test_scores_of_answers_are_those_that_they_came_with(trained, capsys, monkeypatch):
    objects = [json.loads(line) for line in answers(capsys, ["generate", trained / "run", "--json", "abc", "fade"])]
    ended = [entry for entry in objects if entry["finished"]]
    given(monkeypatch, "".join(f"{entry['source']}\t{entry['text']}\n" for entry in ended))
    scores = [float(line) for line in answers(capsys, ["score", trained / "run"])]
    assert scores == pytest.approx([entry["score"] for entry in ended], abs=2e-4)


def test_each_right_answer_is_scored_and_the_splits_of_a_run_too(trained, tmp_path, capsys, monkeypatch):
    run = trained / "run"
    given(monkeypatch, "abc\tC B A\tA\nbad\tD\r\n")
    several = answers(capsys, ["score", run])
    given(monkeypatch, "abc\tC B A\nabc\tA\nbad\tD\n")
    assert several == pytest.approx(answers(capsys, ["score", run]))
    assert len(several) == 3
    from_files = answers(capsys, ["score", run, "--split", trained / "test.tsv"])
    by_source = {json.loads(line)["source"]: json.loads(line)["score"]
                 for line in answers(capsys, ["score", run, "--split", "test", "--json"])}  # fmt: skip
    sources = [line.split("\t")[0] for line in (trained / "test.tsv").read_text().splitlines()]
    assert [float(line) for line in from_files] == pytest.approx([by_source[s] for s in sources], abs=2e-4)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (b"a" * 40 + b"\tA", ["line 3: ", "at most 16 tokens", "source", "got 41"]),
        (b"a\t" + b"A " * 20, ["line 3: ", "at most 16 tokens", "target", "got 21"]),
        (b"no tab", ["line 3: ", "expected source<TAB>target, got no tab in 'no tab'"]),
        (b"\xff\tA", ["line 3: ", "UTF-8"]),
    ],
)
def test_a_pair_that_cannot_be_scored_is_named_after_those_before_it(trained, capsys, monkeypatch, bad, words):
    run = str(trained / "run")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"abc\tA\nbad\tB\n" + bad + b"\nabc\tA\n")))
    capsys.readouterr()
    assert main(["score", run]) == 2
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    assert err.startswith("tfm: error: standard input, ")
    assert err.count("\n") == 1
    assert all(word in err for word in words), err


def test_what_cannot_be_scored_is_one_error(trained, tmp_path, capsys, monkeypatch):
    run, pairs = str(trained / "run"), tmp_path / "pairs.tsv"
    pairs.write_text("abc\tA\n" + "a" * 40 + "\tA\n")
    capsys.readouterr()
    assert main(["score", run, "--split", str(pairs)]) == 2
    assert f"{pairs}, line 2: expected at most 16 tokens" in capsys.readouterr().err
    assert main(["score", run, "--split", str(tmp_path / "none.tsv")]) == 2
    assert "none.tsv" in errors(capsys)
    monkeypatch.setattr(sys, "stdin", None)
    capsys.readouterr()
    assert main(["score", run]) == 2
    assert "open standard input" in errors(capsys)


def test_alignments_stand_behind_answers_and_in_json(trained, capsys):
    run, texts = trained / "run", ["abc", "", "ab cd", "bad"]
    plain = answers(capsys, ["generate", run, "--scores", *texts])
    lines = answers(capsys, ["generate", run, "--scores", "--alignments", *texts])
    assert [line.rpartition("\t")[0] for line in lines] == plain
    assert lines[1] == ""
    model = load(run / "best")
    made = model.generate([texts[0], *texts[2:]])
    expected = model.align([texts[0], *texts[2:]], made)
    assert [line.rpartition("\t")[2] for line in lines if line] == [found.pharaoh for found in expected]
    assert any(found.pairs for found in expected)
    objects = [json.loads(line) for line in answers(capsys, ["generate", run, "--json", "--alignments", *texts])]
    shown = [[tuple(pair) for pair in entry["alignment"]] for entry in objects]
    assert shown == [expected[0].pairs, [], *(found.pairs for found in expected[1:])]
    assert "alignment" not in json.loads(answers(capsys, ["generate", run, "--json", "abc"])[0])
    best = answers(capsys, ["generate", run, "--beams", "2", "--n-best", "2", "--alignments", *texts])
    assert len(best) == 8
    assert all(line == "" or re.fullmatch(r"[^\t]*\t(\d+-\d+( \d+-\d+)*)?", line) for line in best)


def test_the_size_of_batches_does_not_change_answers(trained, capsys):
    words = ["abc", "fade", "bad", "cab", "aa"]
    usual = answers(capsys, ["generate", trained / "run", *words])
    assert answers(capsys, ["generate", trained / "run", "--batch-tokens", "1", *words]) == usual


def test_a_device_that_is_not_there_is_named(trained, capsys):
    run = str(trained / "run")
    here = jax.default_backend()
    usual = answers(capsys, ["generate", run, "abc"])
    assert answers(capsys, ["generate", run, "--device", here, "abc"]) == usual
    capsys.readouterr()
    for command in (["generate", run, "abc"], ["score", run]):
        assert main([*command, "--device", "abacus"]) == 2
        assert "no device 'abacus' here" in errors(capsys)
    assert answers(capsys, ["generate", run, "abc"]) == usual


# --- as a process


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
        "import sys, train.commands\n"
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
