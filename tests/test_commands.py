"""What `tfm train`, `tfm evaluate` and `tfm info` do with a run."""

import json
import shutil

import pytest
from command_line import answers, errors, result

from tfm.nn.cache import cache_bytes
from train.cli import main
from train.config import from_dict

pytestmark = pytest.mark.usefixtures("compile_fast")


def test_training_again_says_that_the_run_is_complete(trained, capsys):
    outcome = result(capsys, ["train", trained / "small.toml", "--run", trained / "run", "--json"])
    assert (outcome["reason"], outcome["step"], outcome["steps_made"]) == ("steps", 20, 0)
    assert outcome["best_step"] in (10, 20)


@pytest.mark.slow
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
    assert main(["train", "--run", str(run), "--steps", "5"]) == 0  # it has made more
    assert "steps were" not in capsys.readouterr().err


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


def test_files_to_measure_on_need_not_be_of_the_runs_kind(trained, tmp_path, capsys):
    rows = [line.split("\t") for line in (trained / "test.tsv").read_text().splitlines()]
    (tmp_path / "a.src").write_text("".join(f"{source}\n" for source, _ in rows))
    (tmp_path / "a.ref").write_text("".join(f"{target}\n" for _, target in rows))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(dict(source=s, target=t)) + "\n" for s, t in rows))
    expected = result(capsys, ["evaluate", trained / "run", "--json"])["metrics"]
    for files in ([tmp_path / "a.src", tmp_path / "a.ref"], [tmp_path / "a.jsonl"]):
        measured = result(capsys, ["evaluate", trained / "run", "--split", *files, "--json"])
        assert measured["metrics"] == expected


@pytest.mark.parametrize("content", ["5", "null", "[" * 100_000])
def test_a_config_that_is_none_is_one_error(tmp_path, capsys, content):
    (tmp_path / "config.json").write_text(content)
    for command in (["train", "--run"], ["info"], ["generate"], ["evaluate"]):
        assert main([*command, str(tmp_path)]) == 2
        assert "config.json" in errors(capsys)


def test_info_passes_over_lines_of_the_record_that_are_none(trained, tmp_path, capsys):
    shutil.copytree(trained / "run", tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('5\n{"step": 3}\n{"split": "train"}\n{"step": 3, "split": ["x"]}\n')
        file.write("[" * 100_000 + '\n{"step": null, "split": "train"}\n{"step": 3, "split": "train", "loss": 1')
        file.write("0" * 400 + '}\n{"st')
    answers(capsys, ["info", tmp_path / "run"])
    found, expected = (result(capsys, ["info", folder, "--json"]) for folder in (tmp_path / "run", trained / "run"))
    assert found["metrics"] == expected["metrics"]


@pytest.mark.parametrize("content", [b'{"name": "mine"}', b'{"a', b"\xff", b"[]"])
def test_a_config_beside_a_model_that_is_no_runs_is_none_of_its_business(trained, tmp_path, capsys, content):
    shutil.copytree(trained / "run" / "best", tmp_path / "best")
    (tmp_path / "config.json").write_bytes(content)
    assert len(answers(capsys, ["generate", tmp_path / "best", "abc"])) == 1
    (tmp_path / "checkpoints").mkdir()
    assert main(["generate", str(tmp_path / "best"), "abc"]) == 2
    assert f"{tmp_path / 'config.json'} does not describe a run" in errors(capsys)
