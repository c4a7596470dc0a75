"""`tfm generate` and `tfm score`: a line for a line, whatever they come from."""

import io
import json
import re
import shutil
import sys

import jax
import numpy as np
import pytest
from command_line import answers, errors, result
from safetensors.numpy import load_file, save_file
from streams import Blocks

from tfm.pipeline import load
from train.cli import main
from train.streaming import LINES_AT_ONCE

# --- generate


pytestmark = [pytest.mark.usefixtures("compile_fast"), pytest.mark.slow]


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


def test_limits_of_generation_are_checked(trained, capsys):
    assert main(["generate", str(trained / "run"), "abc", "--max-tokens", "99"]) == 2
    assert "max_tokens" in errors(capsys)
    assert main(["generate", str(trained / "run"), "abc", "--top-p", "1.5"]) == 2
    assert "top_p" in errors(capsys)
    assert answers(capsys, ["generate", trained / "run", "abcdef", "--max-tokens", "1"])[0].count(" ") == 0


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
        (["--require", "A", "--ban", "A"], "without banned ones, got 'A' with 'A' in it"),
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
    assert "expected --n-best from 1 to the 2 of --beams, got 3" in errors(capsys)
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


@pytest.mark.parametrize(("bad", "words"), [(b"a" * 40, "at most 16 tokens"), (b"\xff\xfe", "UTF-8")])
def test_a_line_that_cannot_be_answered_is_named_after_those_before_it(trained, capsys, tmp_path, bad, words):
    (tmp_path / "words.txt").write_bytes(b"abc\r\n\nbad\n" + bad + b"\nabc\n")
    capsys.readouterr()
    assert main(["generate", str(trained / "run"), "--input", str(tmp_path / "words.txt")]) == 2
    out, err = capsys.readouterr()
    assert out.split("\n")[:-1] == answers(capsys, ["generate", trained / "run", "abc", "", "bad"])
    assert "words.txt, line 4: " in err
    assert words in err


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
    of_layer = answers(capsys, ["generate", run, "--alignments", "--layer", "-1", *texts])
    expected = model.align([texts[0], *texts[2:]], made, layer=-1)
    assert [line.rpartition("\t")[2] for line in of_layer if line] == [found.pharaoh for found in expected]
    assert main(["generate", str(run), "--alignments", "--layer", "1", *texts]) == 2
    assert "expected a layer from -1 to 0, or None for all, got 1" in errors(capsys)
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


# --- score


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


def test_answers_of_unknown_words_are_scored_with_one_warning(trained, capsys, monkeypatch):
    def asked(text):
        given(monkeypatch, text)
        capsys.readouterr()
        assert main(["score", str(trained / "run")]) == 0
        return capsys.readouterr()

    known = "abc\tA B C\n"
    assert asked(known).err == ""
    out, err = asked(known + "abc\tA nowhere C\nabc\tnot here\n")
    assert len(out.splitlines()) == 3
    assert err.count("\n") == 1
    assert err.startswith("tfm: warning: 2 of 3 answers")
    assert "'A nowhere C'" in err


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
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"abc\tA\n  \n" + bad + b"\nabc\tA\n")))
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
