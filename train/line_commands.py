"""The commands that give a line for a line, once their arguments are understood: `tfm generate` and `tfm score`."""

import argparse
import dataclasses
import io
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import rich.box
import rich.console
import rich.table

from tfm.answering import Answer
from tfm.decoding.alignment import pharaoh
from tfm.decoding.mbr import MinimumBayesRisk
from tfm.decoding.requests import Decoding
from tfm.decoding.sampling import Greedy, Samples, Sampling
from tfm.pipeline import TextModel
from tfm.text_constraints import TextConstraints, known_ids
from train.command_inputs import SPLITS, beam_search, data_config, load_requested, read_pairs, read_texts
from train.plain_text import lines_of
from train.streaming import (
    LINES_AT_ONCE,
    Row,
    answer_lines,
    file_lines,
    group_lines,
    pair_rows,
    score_rows,
    stream_lines,
    text_rows,
)


def generate(arguments: argparse.Namespace) -> int:
    """Answers texts, a line for a line."""
    model, config = load_requested(arguments)
    num_best = 1 if arguments.n_best is None else arguments.n_best
    sampler = _decoding(arguments, model, num_best)
    if arguments.texts:
        name, groups = "argument", iter([(1, arguments.texts)])
    elif arguments.input is not None:
        name, groups = f"{arguments.input}, line", file_lines(arguments.input)
    else:
        if sys.stdin is None:
            raise ValueError("expected texts, --input or an open standard input")
        name, groups = "standard input, line", group_lines(sys.stdin.buffer, whole_groups=False)
    seed = arguments.seed or 0
    constraints = _constraints(arguments)
    prefix = arguments.prefix or ""
    known_ids("prefix", [prefix], model.target_tokenizer)  # says what is wrong also where no text will come
    model.generate([], sampler=sampler, constraints=constraints)
    if arguments.alignments:
        model.align([], [], layer=arguments.layer)
    asked: dict[str, Any] = dict(
        name=name, max_tokens=arguments.max_tokens, sampler=sampler, seed=seed, constraints=constraints, prefix=prefix,
        long_texts="cut" if arguments.cut else "error",
    )  # fmt: skip
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    if arguments.stream:
        for piece in stream_lines(model, groups, **asked):
            print(piece, end="", flush=True)
        return 0
    answers = answer_lines(model, groups, **asked)
    if arguments.table:
        headings = ("word", "pronunciation") if config and config.data.task == "cmudict" else ("text", "answer")
        _print_table([pair for group in answers for pair in group], headings)
        return 0
    for group in answers:
        links = _word_pairs(model, group, arguments.layer) if arguments.alignments else itertools.repeat(None)
        for text, found in group:
            padded = [*found, *[None] * (num_best - len(found))]
            for rank, answer in enumerate(padded, 1):
                pairs = next(links) if answer is not None else [] if arguments.alignments else None
                print(_line(text, rank, answer, pairs, scores=arguments.scores, as_json=arguments.json))
        sys.stdout.flush()
    return 0


def _decoding(arguments: argparse.Namespace, model: TextModel, num_best: int) -> Decoding:
    if arguments.beams is not None:
        return beam_search(arguments, model, num_best)
    options = {name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    options = {name: value for name, value in options.items() if value is not None}
    sampler = Sampling(**options)
    if arguments.mbr is not None:
        return MinimumBayesRisk(arguments.samples or 32, arguments.mbr, num_best, sampler)
    if arguments.samples is not None:
        return Samples(arguments.samples, sampler, num_best)
    return sampler if options else Greedy()


def _constraints(arguments: argparse.Namespace) -> TextConstraints | None:
    same = ("min_tokens", "min_ratio", "max_ratio", "repetition_penalty", "no_repeat_ngram")
    names = {**dict(zip(same, same, strict=True)), "ban": "banned_phrases", "require": "required_phrases"}
    given = {field: getattr(arguments, name) for name, field in names.items() if getattr(arguments, name) is not None}
    return TextConstraints(**given) if given else None


def _word_pairs(
    model: TextModel, group: Sequence[tuple[str, list[Answer]]], layer: int | None
) -> Iterator[list[tuple[int, int]]]:
    """Which words of its text each answer looked at, in order."""
    pairs = [(text, answer) for text, found in group for answer in found]
    aligned = model.align([text for text, _ in pairs], [answer for _, answer in pairs], layer=layer)
    return (alignment.pairs for alignment in aligned)


def _line(
    text: str,
    rank: int,
    answer: Answer | None,
    pairs: list[tuple[int, int]] | None,
    *,
    scores: bool,
    as_json: bool,
) -> str:
    if as_json:
        # without an answer: a blank line, or no such hypothesis
        nothing: dict[str, Any] = {
            "text": "",
            "score": None,
            "finished": not text.strip(),
            "ending": None,
            "token_scores": [],
        }
        shown = nothing if answer is None else dataclasses.asdict(answer)
        aligned: dict[str, Any] = {} if pairs is None else {"alignment": pairs}
        of_search = {} if answer is None else {"search_score": answer.search_score, "utility": answer.utility}
        aligned |= {name: value for name, value in of_search.items() if value is not None}
        shown = {key: shown[key] for key in ("text", "score", "finished", "ending", "token_scores")}
        return json.dumps({"source": text, "rank": rank, **shown, **aligned}, ensure_ascii=False)
    if answer is None:
        return ""
    columns = [" ".join(answer.text.split("\n"))]
    columns += [f"{answer.score:.4f}"] if scores else []
    columns += [] if pairs is None else [pharaoh(pairs)]
    return "\t".join(columns)


def _print_table(answers: Iterable[tuple[str, list[Answer]]], headings: tuple[str, str]) -> None:
    table = rich.table.Table(*headings, rich.table.Column("score", justify="right"), box=rich.box.SIMPLE)
    for text, found in answers:
        for shown in [(answer.text, f"{answer.score:.2f}") for answer in found] or [("", "")]:
            table.add_row(*map(rich.text.Text, (text, *shown)))
    _Console(emoji=False).print(table)


class _Console(rich.console.Console):
    """Ends as other output does when nobody reads it any more."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def score(arguments: argparse.Namespace) -> int:
    """Scores pairs, a line for each."""
    model, config = load_requested(arguments)
    rows: Iterable[Sequence[Row]]
    if arguments.split is None:
        if sys.stdin is None:
            raise ValueError("expected --split or an open standard input")
        name = "standard input, line"
        to_rows = text_rows if model.config.is_language_model else pair_rows
        rows = to_rows(group_lines(sys.stdin.buffer, whole_groups=False), name=name)
    elif model.config.is_language_model:
        name = f"{' and '.join(arguments.split)}, line"
        lines = (line.removesuffix("\n") for text in read_texts(arguments.split, config) for line in lines_of(text))
        rows = iter(lambda: [("", [line]) for line in itertools.islice(lines, LINES_AT_ONCE)], [])
    else:
        examples = read_pairs(arguments.split, data_config(arguments, config), is_run=config is not None)
        is_named = arguments.split in SPLITS
        name = f"{arguments.split[0]} data, row" if is_named else f"{' and '.join(arguments.split)}, line"
        whole = list(zip(examples.sources, examples.references, strict=True))
        rows = (whole[start : start + LINES_AT_ONCE] for start in range(0, len(whole), LINES_AT_ONCE))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    total, unknown, first = 0, 0, ""
    for group in score_rows(model, rows, name=name):
        for source, target, found in group:
            total += 1
            if model.target_tokenizer.unk_id in found.tokens:
                unknown, first = unknown + 1, first or target
            if arguments.json:
                shown = {"tokens": model.target_tokenizer.tokens(found.tokens), "token_scores": found.token_scores}
                print(json.dumps({"source": source, "target": target, "score": found.score, **shown}))
            else:
                print(f"{found.score:.4f}")
        sys.stdout.flush()
    if unknown:
        print(
            f"tfm: warning: {unknown:,} of {total:,} answers have words that are not in the model's vocabulary, each "
            f"scored as the unknown token; the first is {first!r:.80}",
            file=sys.stderr,
        )
    return 0
