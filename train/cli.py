"""The command line: what was asked for, and how it ends.

This file reads arguments and turns mistakes into one line and an exit status; `train.commands` does the work. JAX is
imported after the arguments are understood, so that help and mistakes answer at once.

Exit status: 0 done · 2 a mistake of the caller's, named in one line on stderr · 130 stopped by Ctrl-C · 141 nobody
reads the output any more · 143 stopped by SIGTERM. With TFM_TRACEBACK=1 a mistake shows its traceback, too.
"""

import argparse
import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tfm.config import PRESETS, ModelConfig
from train import schema
from train.config import (
    FROM_TOKENIZERS,
    TrainConfig,
    from_json,
    from_tokenizers,
    load_recipe,
    recipe_names,
    with_preset,
)

_USAGE = """\
usage: tfm COMMAND …

  train      train a model from a recipe, or go on with a run
  evaluate   measure a trained model on held-out pairs
  generate   answer texts: arguments, a file, or standard input
  score      how likely given answers are: files of pairs, or standard input
  info       what a run or a model is: settings, parameters, cache, metrics so far
  init       write a commented recipe to start from

tfm COMMAND --help says what each takes. Results go to standard output, all else to standard error.
"""


_OF_TRAIN = ("run", "dry-run", "json", "no-compilation-cache", "help", "model.preset")
"""Options of `tfm train` that are no settings."""


class UsageError(ValueError):
    """Arguments that cannot be understood."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `tfm` with these arguments (`None`: the process's own) and returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Whoever started this may have closed them; what is written then goes nowhere, rather than into another file.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - for as long as the process lives
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()
        return status
    except SystemExit as exit:  # --help
        return exit.code if isinstance(exit.code, int) else 0
    except BrokenPipeError:
        # What is left in the buffer has no reader either; without this Python would complain while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("tfm: stopped", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        if os.environ.get("TFM_TRACEBACK"):
            raise
        print(f"tfm: error: {_one_line(error)}", file=sys.stderr)
        return 2


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _dispatch(arguments: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train, "evaluate": _evaluate, "generate": _generate, "score": _score, "info": _info, "init": _init,
    }  # fmt: skip
    match arguments:
        case []:
            print(_USAGE, end="", file=sys.stderr)
            return 2
        case ["-h" | "--help", *_]:
            print(_USAGE, end="")
            return 0
        case ["--version"]:
            import importlib.metadata

            print(f"tfm {importlib.metadata.version('tfm-jax')}")
            return 0
        case [command, *rest] if command in commands:
            return commands[command](rest)
    near = schema.nearest(arguments[0], commands)
    raise UsageError(f"no command {arguments[0]!r}; the nearest is {near!r} of {', '.join(commands)}")


class _Parser(argparse.ArgumentParser):
    """argparse whose mistakes are exceptions, and which names the nearest option for one that it does not have."""

    def __init__(self, command: str, **settings: Any) -> None:
        super().__init__(
            prog=f"tfm {command}", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings
        )
        if command != "init":
            self.add_argument("--no-compilation-cache", action="store_true", help="compile all anew, and keep nothing")

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def hyphenated(self, arguments: list[str]) -> list[str]:
        """With this parser's options as it has them: `--max_tokens` is `--max-tokens`, as settings are spelt."""
        known = {option.replace("_", "-") for action in self._actions for option in action.option_strings}

        def spelt(word: str) -> str:
            name, equals, value = word.partition("=")
            hyphenated = name.replace("_", "-")
            return hyphenated + equals + value if name.startswith("--") and hyphenated in known else word

        end = arguments.index("--") if "--" in arguments else len(arguments)
        return [spelt(word) for word in arguments[:end]] + arguments[end:]

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """What lies behind `--` is no option, whatever it begins with; in front of it options and words may mix."""
        end = arguments.index("--") if "--" in arguments else len(arguments)
        # argparse takes a second `--` away, too, where words and options mix: so it sees none
        plain = [_NO_OPTION + word for word in arguments[end + 1 :]]
        parsed, unknown = self.parse_known_intermixed_args(self.hyphenated(arguments[:end]) + plain)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            given = unknown[0].partition("=")[0]
            self.error(f"unknown option {given!r}; the nearest known one is {schema.nearest(given, options)!r}")
        return argparse.Namespace(**{name: _as_given(value) for name, value in vars(parsed).items()})


_NO_OPTION = "\0"
"""No argument of a process has this character."""


def _as_given(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_given(item) for item in value]
    return type(value)(str(value).removeprefix(_NO_OPTION)) if isinstance(value, str | Path) else value


# --- train


def _train(arguments: list[str]) -> int:
    parser = _Parser(
        "train",
        usage="tfm train RECIPE-OR-FILE [--run DIR] [--dry-run] [--json] [--section.key value …]\n"
        "       tfm train --run DIR    (goes on with the run that is there)",
        description="Trains a model, or goes on with a run that was stopped.\n\n"
        f"RECIPE-OR-FILE is one of {', '.join(recipe_names())}, or a TOML file as tfm init writes it.\n"
        "Every setting of it can be changed: --steps 500 --optimizer.learning_rate 3e-4 --model.preset small\n"
        "--model.gated --data.train train.en train.de; tfm train RECIPE-OR-FILE --help lists the settings.\n"
        f"Presets, the sizes of a model: {', '.join(PRESETS)}.",
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help="this, or with RECIPE-OR-FILE all of its settings")
    parser.add_argument("--run", type=Path, metavar="DIR", help="the run's folder (default: runs/NAME-OF-RECIPE)")
    parser.add_argument("--dry-run", action="store_true", help="read, tokenize, say shapes and memory; train nothing")
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    parsed, overrides = parser.parse_known_args(parser.hyphenated(arguments))
    recipe = overrides.pop(0) if overrides and not overrides[0].startswith("-") else None
    if parsed.help and recipe is None:
        parser.print_help()
        return 0
    saved = None if parsed.run is None else parsed.run / "config.json"
    if recipe is not None:
        config = load_recipe(recipe)
        run_dir = parsed.run or Path("runs") / Path(recipe).stem
    elif saved is not None and saved.is_file():
        config, run_dir = _read_run_config(saved), parsed.run
    elif parsed.run is not None:
        raise UsageError(f"no run in {parsed.run} to go on with: give a recipe, one of {', '.join(recipe_names())}")
    else:
        parser.error("expected a recipe or a TOML file, or --run DIR with a run in it")
    config = apply_overrides(config, overrides + ["--help"] * parsed.help, prog=f"tfm train {recipe or '--run DIR'}")
    _check_data_is_named(config, recipe or str(run_dir))

    commands = _commands(parsed)
    if parsed.dry_run:
        return commands.dry_run(config, as_json=parsed.json)
    return commands.train(config, run_dir, as_json=parsed.json)


def _read_run_config(path: Path) -> TrainConfig:
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check_data_is_named(config: TrainConfig, recipe: str) -> None:
    """Recipes have no path of their own: says what to give, before anything slow is imported."""
    if config.data.task == "files" and not config.data.train:
        fields = f"{config.data.source_field!r} and {config.data.target_field!r}"
        what, example = {
            "tsv": ("one file of source<TAB>target lines", "pairs.tsv"),
            "jsonl": (f"one JSONL file with the fields {fields}", "train.jsonl"),
        }.get(config.data.format, ("two files whose lines are pairs, or one TSV or JSONL file", "train.en train.de"))
        raise UsageError(f"{recipe} needs data: {what}, plain or .gz, as in: tfm train {recipe} --data.train {example}")


def apply_overrides(config: TrainConfig, overrides: Sequence[str], *, prog: str = "tfm train") -> TrainConfig:
    """`config` with settings changed as on the command line: `["--steps", "3", "--model.gated"]`.

    `--model.preset NAME` takes the sizes of a preset; other model settings given beside it win.

    Raises:
        ValueError: an unknown key, named with the nearest known one, or values that cannot be.
        SystemExit: for `--help`, after it was printed.
    """
    import tyro

    remaining, preset = _take_preset(overrides)
    types = schema.leaf_types(TrainConfig)
    negations = {_negated(key): key for key, annotation in types.items() if annotation is bool}
    for option in remaining:
        key = option.removeprefix("--").partition("=")[0].replace("-", "_")
        if option.startswith("--") and key not in ("help", *types, *negations):
            given, known = option.partition("=")[0], (*types, *negations, *_OF_TRAIN)
            raise UsageError(schema.unknown_key(given, [f"--{name}" for name in known]))
        if key in FROM_TOKENIZERS and option.startswith("--"):
            raise UsageError(from_tokenizers(key))
    if preset is not None:  # in front, because the last of repeated options wins
        sizes = schema.encode(config.model) | with_preset({"preset": preset})
        remaining = [*_as_options(config.model, sizes), *remaining]
    boxed = io.StringIO()
    try:
        with contextlib.redirect_stderr(boxed):
            return tyro.cli(
                TrainConfig, prog=prog, args=remaining, default=config, use_underscores=True, description=""
            )
    except SystemExit as exit:
        if exit.code in (0, None):
            raise
        raise UsageError(_unboxed(boxed.getvalue())) from None


def _take_preset(overrides: Sequence[str]) -> tuple[list[str], str | None]:
    """Takes `--model.preset NAME` out of the overrides: it stands for several settings and is none itself."""
    remaining, preset, words = [], None, iter(overrides)
    for word in words:
        option, equals, value = word.partition("=")
        if option == "--model.preset":
            preset = value if equals else next(words, "")
        else:
            remaining.append(word)
    return remaining, preset


def _as_options(model: ModelConfig, sizes: Mapping[str, Any]) -> list[str]:
    """What has to be said on the command line to turn `model` into one with these sizes."""
    words = []
    for name, value in schema.encode(model).items():
        if sizes[name] == value or f"model.{name}" in FROM_TOKENIZERS:
            continue
        if isinstance(sizes[name], bool):
            words.append("--" + (f"model.{name}" if sizes[name] else _negated(f"model.{name}")))
        else:
            words += [f"--model.{name}", str(sizes[name])]
    return words


def _negated(key: str) -> str:
    section, dot, leaf = key.rpartition(".")
    return f"{section}{dot}no_{leaf}"


def _unboxed(text: str) -> str:
    """The first paragraph of an error that tyro has drawn a box around."""
    lines = [line.strip("│╭╮╰╯ ") for line in text.splitlines()[1:]]
    paragraph = []
    for line in lines:
        if not line.strip("─"):
            break
        paragraph.append(line)
    # A section that refuses its values says all that tyro would say of it.
    message = re.sub(r"^Error parsing (?!--)\w+: ", "", " ".join(paragraph)) or " ".join(text.split())
    message = re.sub(r"invalid literal for int\(\) with base 10:", "expected a whole number, got", message)
    return re.sub(r"could not convert string to float:", "expected a number, got", message)


# --- the other commands


def _evaluate(arguments: list[str]) -> int:
    parser = _Parser("evaluate", description="Measures a trained model on pairs that it was not trained on.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder (its best model is taken) or a model's")
    parser.add_argument(
        "--split", nargs="+", default=["test"], metavar="SPLIT",
        help="test (the default) or validation, as the run has them, or files: two line-aligned ones, a TSV or a JSONL",
    )  # fmt: skip
    parser.add_argument(
        "--metrics", nargs="+", metavar="METRIC",
        help="of loss, exact-match, wer, ter, bleu, chrf, rouge1, rouge2, rougeL (default: the run's own metric)",
    )  # fmt: skip
    parser.add_argument("--max-tokens", type=int, metavar="N", help="limit of generated tokens (default: the run's)")
    _add_decoding(parser)
    parser.add_argument("--source-field", metavar="KEY", help="JSONL key of the source (default: the run's)")
    parser.add_argument("--target-field", metavar="KEY", help="JSONL key of the target (default: the run's)")
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    parsed = parser.parse(arguments)
    _check_beams(parser, parsed)
    return _commands(parsed).evaluate(parsed)


def _generate(arguments: list[str]) -> int:
    parser = _Parser(
        "generate",
        description="Answers texts, one line a line, in their order; an empty line gets an empty line.\n\n"
        "Without texts and --input, standard input is read, and answered while it comes. Without sampling options\n"
        "decoding is greedy: the likeliest token at each step. With --beams it is beam search.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder (its best model is taken) or a model's")
    parser.add_argument("texts", nargs="*", default=[], metavar="TEXT", help="what to answer")
    parser.add_argument("--input", type=Path, metavar="FILE", help="a text a line, UTF-8, plain or .gz")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="the most tokens of an answer")
    parser.add_argument("--temperature", type=float, metavar="X", help="sample: 1 as the model says, less is sharper")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest that together have P")
    parser.add_argument("--min-p", type=float, metavar="P", help="sample from tokens at least P times the likeliest")
    parser.add_argument("--seed", type=int, metavar="N", help="of sampling (default: 0)")
    _add_decoding(parser)
    parser.add_argument("--n-best", type=int, metavar="N", help="N lines a line: the N best of --beams, best first")
    _add_constraints(parser)
    parser.add_argument(
        "--alignments", action="store_true",
        help="a tab and SOURCE-TARGET pairs of words, counted from 0, that attention joins, behind each line",
    )  # fmt: skip
    _add_machine(parser)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--scores", action="store_true", help="a tab and the answer's log-probability behind each line")
    shown.add_argument("--table", action="store_true", help="text, answer and score as a table")
    shown.add_argument("--json", action="store_true", help="a JSON object a line")
    parsed = parser.parse(arguments)
    if parsed.texts and parsed.input:
        parser.error("expected texts or --input, not both")
    sampling = [parsed.temperature, parsed.top_k, parsed.top_p, parsed.min_p]
    if parsed.seed is not None and all(option is None for option in sampling):
        parser.error("--seed without --temperature, --top-k, --top-p or --min-p: nothing is drawn")
    if parsed.beams is not None and any(option is not None for option in sampling):
        parser.error("expected --beams or sampling options, not both")
    _check_beams(parser, parsed)
    if parsed.n_best is not None and parsed.beams is None:
        parser.error("--n-best without --beams: greedy decoding and sampling give one answer")
    if parsed.alignments and parsed.table:
        parser.error("expected --alignments or --table, not both")
    _check_machine(parser, parsed)
    return _commands(parsed).generate(parsed)


def _score(arguments: list[str]) -> int:
    parser = _Parser(
        "score",
        description="Says how likely given answers are, by the natural logarithm of the probability of each, end\n"
        "included, a line a pair, in order. Without --split, lines source<TAB>target are read from standard\n"
        "input, and scored while they come. Of a source with several answers, each is a pair.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder (its best model is taken) or a model's")
    parser.add_argument(
        "--split", nargs="+", metavar="SPLIT",
        help="files, two line-aligned ones, a TSV or a JSONL; or test or validation, as the run has them",
    )  # fmt: skip
    _add_weights(parser)
    parser.add_argument("--source-field", metavar="KEY", help="JSONL key of the source (default: the run's)")
    parser.add_argument("--target-field", metavar="KEY", help="JSONL key of the target (default: the run's)")
    _add_machine(parser)
    parser.add_argument("--json", action="store_true", help="a JSON object a line, with the score of each token")
    parsed = parser.parse(arguments)
    if parsed.split is None and (parsed.source_field is not None or parsed.target_field is not None):
        parser.error("--source-field and --target-field are for JSONL files: expected --split")
    _check_machine(parser, parsed)
    return _commands(parsed).score(parsed)


def _add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="D", help="cpu, gpu or tpu (default: the fastest that there is)")
    parser.add_argument("--batch-tokens", type=int, metavar="N", help="the most tokens of a batch, padding included")


def _check_machine(parser: _Parser, parsed: argparse.Namespace) -> None:
    if parsed.batch_tokens is not None and parsed.batch_tokens < 1:
        parser.error(f"expected --batch-tokens of at least 1, got {parsed.batch_tokens}")


def _add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights", choices=["float32", "bfloat16", "int8"],
        help="what the model's matrices are rounded to while it generates (default: as the run has it)",
    )  # fmt: skip


def _add_decoding(parser: argparse.ArgumentParser) -> None:
    _add_weights(parser)
    parser.add_argument(
        "--cache", choices=["float32", "bfloat16", "int8"],
        help="what keys and values are rounded to while it generates (default: they are not)",
    )  # fmt: skip
    parser.add_argument("--beams", type=int, metavar="W", help="beam search: follow the W likeliest hypotheses")
    parser.add_argument(
        "--alpha", type=float, metavar="A",
        help="of beam search: ranks by log P / ((5 + length) / 6)^A (default: 0.6)",
    )  # fmt: skip


def _add_constraints(parser: argparse.ArgumentParser) -> None:
    rules = parser.add_argument_group("what may and must come in an answer")
    rules.add_argument("--min-tokens", type=int, metavar="N", help="no end before N tokens")
    rules.add_argument(
        "--repetition-penalty", type=float, metavar="X",
        help="divides the positive logits of tokens that came already, and multiplies the negative ones (1: off)",
    )  # fmt: skip
    rules.add_argument("--no-repeat-ngram", type=int, metavar="N", help="no N tokens come twice (0: off)")
    rules.add_argument("--ban", nargs="+", action="extend", metavar="PHRASE", help="phrases that may not come")
    rules.add_argument("--require", nargs="+", action="extend", metavar="PHRASE", help="phrases that must come")
    rules.add_argument("--prefix", metavar="TEXT", help="what each answer begins with")


def _check_beams(parser: _Parser, parsed: argparse.Namespace) -> None:
    if parsed.alpha is not None and parsed.beams is None:
        parser.error("--alpha without --beams: only beam search ranks hypotheses")
    num_best = getattr(parsed, "n_best", None)
    if None not in (num_best, parsed.beams) and num_best > parsed.beams:
        parser.error(f"expected --n-best of at most --beams, {parsed.beams}, got {num_best}")


def _info(arguments: list[str]) -> int:
    parser = _Parser("info", description="Says what a run or a model is: settings, parameters, cache, metrics so far.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's or a model's folder")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="rows of the cache (default: 1)")
    parser.add_argument("--source-length", type=int, metavar="S", help="source tokens (default: the most it accepts)")
    parser.add_argument("--length", type=int, metavar="C", help="target tokens (default: the most it accepts)")
    parser.add_argument(
        "--cache", choices=["float32", "bfloat16", "int8"], help="what it lies in (default: as the model computes)"
    )
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parsed = parser.parse(arguments)
    return _commands(parsed).info(parsed)


def _commands(parsed: argparse.Namespace) -> Any:
    """`train.commands`, and with it JAX, which keeps what it compiles from here on."""
    from train import commands, compiled

    if not parsed.no_compilation_cache:
        compiled.keep_compiled()
    return commands


def _init(arguments: list[str]) -> int:
    parser = _Parser("init", description="Writes a recipe with every setting, its default and what it means.")
    parser.add_argument("file", nargs="?", default="recipe.toml", help="default: recipe.toml; -: standard output")
    parsed = parser.parse(arguments)

    from train.template import template

    if parsed.file == "-":
        print(template(), end="")
        return 0
    try:
        with Path(parsed.file).open("x", encoding="utf-8") as file:
            file.write(template())
    except FileExistsError:
        raise UsageError(f"{parsed.file} exists already and was left as it is; give another name") from None
    print(f"{parsed.file}: fill in data.train, then: tfm train {parsed.file}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
