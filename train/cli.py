"""The command line: what was asked for, and how it ends.

This file finds the command and turns mistakes into one line and an exit status; `train.arguments` reads what the
command takes, `train.overrides` its settings, and `train.commands` and `train.line_commands` do the work. JAX is
imported after the arguments are understood, so that help and mistakes answer at once.

Exit status: 0 done · 2 a mistake of the caller's, named in one line on stderr · 130 stopped by Ctrl-C · 141 nobody
reads the output any more · 143 stopped by SIGTERM. With TFM_TRACEBACK=1 a mistake shows its traceback, too.
"""

import argparse
import contextlib
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from train import schema
from train.arguments import (
    UsageError,
    evaluate_arguments,
    generate_arguments,
    info_arguments,
    init_arguments,
    score_arguments,
    train_parser,
)
from train.config import TrainConfig, from_json, load_recipe, recipe_names
from train.overrides import apply_overrides

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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `tfm` with these arguments (`None`: the process's own) and returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Whoever started this may have closed them; what is written then goes nowhere, rather than into another file.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - for as long as the process lives
    try:
        with _named_output(), warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                status = _dispatch(arguments)
            except SystemExit as exit:  # --help
                status = exit.code if isinstance(exit.code, int) else 0
            sys.stdout.flush()
            return status
    except BrokenPipeError:
        return 141
    except KeyboardInterrupt:
        print("tfm: stopped", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        if os.environ.get("TFM_TRACEBACK"):
            raise
        print(f"tfm: error: {_one_line(error)}", file=sys.stderr)
        return 2


class _StandardOutput(io.FileIO):
    """Has the errors of writing name what cannot be written, as those of opening a file do."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, "standard output") from error


@contextlib.contextmanager
def _named_output() -> Iterator[None]:
    """Has all that is printed in the block go through `_StandardOutput`, where it goes to a file or a pipe."""
    plain = sys.stdout
    if type(plain) is not io.TextIOWrapper:  # somebody's own, such as a test's or a notebook's
        yield
        return
    plain.flush()
    raw = _StandardOutput(plain.fileno(), "wb", closefd=False)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(raw), plain.encoding, plain.errors, line_buffering=plain.line_buffering
    )
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        except OSError:
            # What is left in the buffer cannot be written now either; without this Python would complain of it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stdout = plain


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    print(f"tfm: warning: {message}", file=sys.stderr)


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


# --- the commands


def _train(arguments: list[str]) -> int:
    parser = train_parser()
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

    from train import commands

    _keep_compiled(parsed)
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
            "text": ("a file of plain text", "book.txt"),
            "jsonl": (f"one JSONL file with the fields {fields}", "train.jsonl"),
        }.get(config.data.format, ("two files whose lines are pairs, or one TSV or JSONL file", "train.en train.de"))
        raise UsageError(f"{recipe} needs data: {what}, plain or .gz, as in: tfm train {recipe} --data.train {example}")


def _evaluate(arguments: list[str]) -> int:
    parsed = evaluate_arguments(arguments)

    from train import commands

    _keep_compiled(parsed)
    return commands.evaluate(parsed)


def _generate(arguments: list[str]) -> int:
    parsed = generate_arguments(arguments)

    from train import line_commands

    _keep_compiled(parsed)
    return line_commands.generate(parsed)


def _score(arguments: list[str]) -> int:
    parsed = score_arguments(arguments)

    from train import line_commands

    _keep_compiled(parsed)
    return line_commands.score(parsed)


def _info(arguments: list[str]) -> int:
    parsed = info_arguments(arguments)

    from train import commands

    _keep_compiled(parsed)
    return commands.info(parsed)


def _init(arguments: list[str]) -> int:
    parsed = init_arguments(arguments)

    from train.template import template

    if parsed.file == "-":
        print(template(), end="")
        return 0
    if not parsed.file:
        raise UsageError("expected the name of a file to write, got ''")
    try:
        file = Path(parsed.file).open("x", encoding="utf-8")  # noqa: SIM115 - a file of another's must not be removed
    except FileExistsError:
        raise UsageError(f"{parsed.file} exists already and was left as it is; give another name") from None
    try:
        with file:
            file.write(template())
    except BaseException as error:
        Path(parsed.file).unlink()  # half a recipe would stand in the way of the next try
        if isinstance(error, OSError):  # a full disk names no file by itself
            raise OSError(error.errno, error.strerror, parsed.file) from error
        raise
    print(f"{parsed.file}: fill in data.train, then: tfm train {parsed.file}", file=sys.stderr)
    return 0


def _keep_compiled(parsed: argparse.Namespace) -> None:
    """Has JAX keep what it compiles from here on, unless that is not wanted."""
    from train import compiled

    if not parsed.no_compilation_cache:
        compiled.keep_compiled()


if __name__ == "__main__":
    sys.exit(main())
