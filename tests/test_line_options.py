"""`tfm generate` with several answers to a line, streamed, or of texts that are too long."""

import json
import typing
import warnings

import pytest
from command_line import answers, errors

from tfm.decoding.beam import LengthPenalty, Stop
from tfm.decoding.mbr import Utility
from train import arguments
from train.cli import main

pytestmark = [pytest.mark.usefixtures("compile_fast"), pytest.mark.slow]


def test_the_words_for_settings_are_those_of_the_library():
    """Which the file of arguments repeats, to need no JAX."""
    for named, literal in (
        (arguments.UTILITIES, Utility), (arguments.LENGTH_PENALTIES, LengthPenalty), (arguments.STOPS, Stop),
    ):  # fmt: skip
        assert named == typing.get_args(literal)


def test_samples_are_as_many_lines_as_asked_for_and_mbr_chooses_among_them(trained, capsys):
    run, hot = trained / "run", ["--temperature", "3", "--seed", "2"]
    alone = answers(capsys, ["generate", run, "abc", "--samples", "6", *hot])
    drawn = answers(capsys, ["generate", run, "abc", "", "bad", "--samples", "6", "--n-best", "6", *hot])
    assert len(drawn) == 18
    assert len(set(drawn[:6])) > 1
    assert drawn[6:12] == [""] * 6
    assert alone == drawn[:1]
    lines = answers(capsys, ["generate", run, "abc", "bad", "--mbr", "chrf", "--samples", "6", "--json", *hot])
    chosen = [json.loads(line) for line in lines]
    assert chosen[0]["text"] in drawn[:6]
    assert 0 <= chosen[0]["utility"] <= 100
    assert chosen[0]["score"] == pytest.approx(sum(chosen[0]["token_scores"]), abs=1e-4)
    assert chosen[0]["search_score"] == chosen[0]["score"]
    assert chosen[0]["ending"] == ("end" if chosen[0]["finished"] else "limit")


def test_groups_of_beams_differ(trained, capsys):
    beams = ["generate", trained / "run", "abc", "--beams", "4", "--n-best", "4"]
    plain = answers(capsys, beams)
    grouped = answers(
        capsys, [*beams, "--groups", "4", "--diversity", "50", "--coverage", "0.1", "--stop", "all-finished"]
    )
    assert grouped != plain
    found = [line for line in grouped if line]
    assert len(set(found)) == len(found) > 1


def test_a_streamed_answer_is_the_answer(trained, capsys):
    run, texts = trained / "run", ["abc", "", "fedcba", "bad"]
    assert answers(capsys, ["generate", run, *texts, "--stream"]) == answers(capsys, ["generate", run, *texts])
    drawn = [*texts, "--temperature", "2", "--seed", "5"]
    assert answers(capsys, ["generate", run, *drawn, "--stream"]) == answers(capsys, ["generate", run, *drawn])
    assert main(["generate", str(run), "abc", "a" * 40, "--stream"]) == 2
    out, err = capsys.readouterr()
    assert (out.count("\n"), err[:57]) == (1, "tfm: error: argument 2: expected at most 16 tokens, the m")


def test_a_long_text_is_an_error_or_cut_with_a_warning(trained, capsys):
    run, long = str(trained / "run"), "abcdef" * 9
    assert main(["generate", run, long, "abc"]) == 2
    assert "argument 1: expected at most 16 tokens" in errors(capsys)
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # as in a process of its own
        assert main(["generate", run, "abc", long, "--cut"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == answers(capsys, ["generate", run, "abc", long[:15]])
    assert err.startswith(
        "tfm: warning: 1 of 2 texts cut to 16 tokens, the model's max_source_length; the longest had 55;"
    )
    assert err.endswith(f" the first is {long!r}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["generate", run, long * 2, "--cut"]) == 0
    assert capsys.readouterr().err.endswith(f" the first is {(long * 2)[:59] + '…'!r}\n")


@pytest.mark.parametrize("way", [[], ["--stream"]], ids=["whole", "stream"])
def test_a_line_without_room_is_named_after_those_before_it(trained, capsys, way):
    texts = ["abc", "", "fedcba", "a", "bad"]
    rules = ["--min-tokens", "3", "--max-ratio", "1", *way]
    assert main(["generate", str(trained / "run"), *texts, *rules]) == 2
    out, err = capsys.readouterr()
    assert err == "tfm: error: argument 4: expected room for 3 tokens (min_tokens), got a limit of 2\n"
    assert out.splitlines() == answers(capsys, ["generate", trained / "run", *texts[:3], *rules])
