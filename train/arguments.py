"""What each command takes: its options, what they mean, and which of them do not go together.

Nothing here imports JAX, so that help and mistakes answer at once.
"""

import argparse
from pathlib import Path
from typing import Any, NoReturn

from tfm.config import PRESETS
from train import schema
from train.config import recipe_names

# As tfm.decoding has them, which would import JAX; a test holds them to it.
CACHE_DTYPES = ("float32", "bfloat16", "int8")
UTILITIES = ("chrf", "bleu")
LENGTH_PENALTIES = ("gnmt", "power")
STOPS = ("first-finished", "provably-best", "all-finished")


class UsageError(ValueError):
    """Arguments that cannot be understood."""


class Parser(argparse.ArgumentParser):
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


# --- the commands


def train_parser() -> Parser:
    parser = Parser(
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
    return parser


OPTIONS_OF_TRAIN = ("run", "dry-run", "json", "no-compilation-cache", "help", "model.preset")
"""Options of `tfm train` that are no settings."""


def evaluate_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("evaluate", description="Measures a trained model on pairs that it was not trained on.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder (its best model is taken) or a model's")
    parser.add_argument(
        "--split", nargs="+", default=["test"], metavar="SPLIT",
        help="test (the default) or validation, as the run has them, or files: two line-aligned ones, a TSV, a JSONL, "
        "or plain text for a language model",
    )  # fmt: skip
    parser.add_argument(
        "--metrics", nargs="+", metavar="METRIC",
        help="of loss, exact-match, wer, ter, bleu, chrf, rouge1, rouge2, rougeL (default: loss and the run's own)",
    )  # fmt: skip
    parser.add_argument("--max-tokens", type=int, metavar="N", help="limit of generated tokens (default: the run's)")
    _add_decoding(parser)
    parser.add_argument("--source-field", metavar="KEY", help="JSONL key of the source (default: the run's)")
    parser.add_argument("--target-field", metavar="KEY", help="JSONL key of the target (default: the run's)")
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    parsed = parser.parse(arguments)
    _check_beams(parser, parsed)
    return parsed


def generate_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        "generate",
        description="Answers texts, one line a line, in their order; an empty line gets an empty line.\n"
        "A language model continues them, and its answer is what follows.\n\n"
        "Without texts and --input, standard input is read, and answered while it comes. Without sampling options\n"
        "decoding is greedy: the likeliest token at each step. With --beams it is beam search, with --samples the\n"
        "likeliest of several random answers, with --mbr the one that is nearest to all of them.",
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
    parser.add_argument("--samples", type=int, metavar="N", help="draw N answers to each text (with --mbr: 32)")
    parser.add_argument(
        "--mbr", choices=UTILITIES,
        help="minimum Bayes risk: the sample with the highest mean chrF or BLEU against all of them",
    )  # fmt: skip
    _add_decoding(parser)
    parser.add_argument(
        "--n-best", type=int, metavar="N",
        help="N lines a line: the N best of --beams, --samples or --mbr, best first; blank ones where fewer are found",
    )  # fmt: skip
    _add_constraints(parser)
    parser.add_argument(
        "--alignments", action="store_true",
        help="a tab and SOURCE-TARGET pairs of words, counted from 0, that attention joins, behind each line",
    )  # fmt: skip
    parser.add_argument(
        "--layer", type=int, metavar="N",
        help="with --alignments: the decoder layer whose attention it is, -1 for the last (default: the mean of all)",
    )  # fmt: skip
    parser.add_argument("--cut", action="store_true", help="cut texts that are too long, with a warning")
    _add_machine(parser)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--scores", action="store_true", help="a tab and the answer's log-probability behind each line")
    shown.add_argument("--table", action="store_true", help="text, answer and score as a table")
    shown.add_argument("--json", action="store_true", help="a JSON object a line")
    shown.add_argument("--stream", action="store_true", help="write each answer while it is made, a text at a time")
    parsed = parser.parse(arguments)
    if parsed.texts and parsed.input:
        parser.error("expected texts or --input, not both")
    _check_drawing(parser, parsed)
    _check_beams(parser, parsed)
    if parsed.layer is not None and not parsed.alignments:
        parser.error("expected --layer with --alignments, got --layer without --alignments")
    if parsed.alignments and parsed.table:
        parser.error("expected --alignments or --table, not both")
    if parsed.alignments and parsed.cut:
        parser.error("expected --alignments or --cut, not both: what is cut off has no alignment")
    if parsed.stream:
        for option in ("beams", "samples", "mbr", "n_best", "alignments"):
            if getattr(parsed, option):
                parser.error(f"expected --stream or --{option.replace('_', '-')}, not both")
    _check_machine(parser, parsed)
    return parsed


def score_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        "score",
        description="Says how likely given answers are, by the natural logarithm of the probability of each, end\n"
        "included, a line a pair, in order. Without --split, lines source<TAB>target are read from standard\n"
        "input, and scored while they come. Of a source with several answers, each is a pair.\n"
        "For a language model each line is a text, which is scored from its first token on, without an end.",
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
    return parsed


def info_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("info", description="Says what a run or a model is: settings, parameters, cache, metrics so far.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's or a model's folder")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="rows of the cache (default: 1)")
    parser.add_argument("--source-length", type=int, metavar="S", help="source tokens (default: the most it accepts)")
    parser.add_argument("--length", type=int, metavar="C", help="target tokens (default: the most it accepts)")
    parser.add_argument("--cache", choices=CACHE_DTYPES, help="what it lies in (default: as the model computes)")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    return parser.parse(arguments)


def init_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("init", description="Writes a recipe with every setting, its default and what it means.")
    parser.add_argument("file", nargs="?", default="recipe.toml", help="default: recipe.toml; -: standard output")
    return parser.parse(arguments)


# --- what several of them take


def _add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="D", help="cpu, gpu or tpu (default: the fastest that there is)")
    parser.add_argument("--batch-tokens", type=int, metavar="N", help="the most tokens of a batch, padding included")


def _check_machine(parser: Parser, parsed: argparse.Namespace) -> None:
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
        "--cache", choices=CACHE_DTYPES,
        help="what keys and values are rounded to while it generates (default: they are not)",
    )  # fmt: skip
    beams = parser.add_argument_group("beam search")
    beams.add_argument("--beams", type=int, metavar="W", help="follow the W likeliest hypotheses")
    beams.add_argument("--alpha", type=float, metavar="A", help="ranks by log P / ((5 + length) / 6)^A (default: 0.6)")
    beams.add_argument(
        "--length-penalty", choices=LENGTH_PENALTIES,
        help="gnmt, as above (the default), or power: log P / length^A",
    )  # fmt: skip
    beams.add_argument("--stop", choices=STOPS, help="when a search ends (default: provably-best)")
    beams.add_argument("--coverage", type=float, metavar="B", help="penalty for words of the text not looked at")
    beams.add_argument("--groups", type=int, metavar="G", help="diverse beam search: G groups that avoid each other")
    beams.add_argument("--diversity", type=float, metavar="D", help="how much the groups do (default: 0.5)")


def _add_constraints(parser: argparse.ArgumentParser) -> None:
    rules = parser.add_argument_group("what may and must come in an answer")
    rules.add_argument("--min-tokens", type=int, metavar="N", help="no end before N tokens")
    rules.add_argument("--min-ratio", type=float, metavar="X", help="no end before X times the text's tokens")
    rules.add_argument("--max-ratio", type=float, metavar="X", help="at most X times the text's tokens")
    rules.add_argument(
        "--repetition-penalty", type=float, metavar="X",
        help="divides the positive logits of tokens that came already, and multiplies the negative ones (1: off)",
    )  # fmt: skip
    rules.add_argument("--no-repeat-ngram", type=int, metavar="N", help="no N tokens come twice (0: off)")
    rules.add_argument("--ban", nargs="+", action="extend", metavar="PHRASE", help="phrases that may not come")
    rules.add_argument(
        "--require", nargs="+", action="extend", metavar="PHRASE",
        help="phrases that must come; without --beams at the last moment before --max-tokens, so give it too",
    )  # fmt: skip
    rules.add_argument("--prefix", metavar="TEXT", help="what each answer begins with")


def _check_drawing(parser: Parser, parsed: argparse.Namespace) -> None:
    """What may not stand beside what draws, and what needs it."""
    drawing = ("temperature", "top_k", "top_p", "min_p", "samples", "mbr")
    draws = any(getattr(parsed, option) is not None for option in drawing)
    if parsed.seed is not None and not draws:
        parser.error("--seed without --temperature, --top-k, --top-p, --min-p, --samples or --mbr: nothing is drawn")
    if parsed.seed is not None and not 0 <= parsed.seed < 2**32:
        parser.error(f"expected --seed from 0 to {2**32 - 1}, got {parsed.seed}")
    if parsed.beams is not None and draws:
        parser.error("expected --beams or sampling options, not both")
    if parsed.samples is not None and parsed.samples < 1:
        parser.error(f"expected --samples of at least 1, got {parsed.samples}")
    if parsed.n_best is not None:
        several = {"--beams": parsed.beams, "--samples": parsed.samples, "--mbr": parsed.mbr and (parsed.samples or 32)}
        among = next(((name, number) for name, number in several.items() if number), None)
        if among is None:
            parser.error("--n-best without --beams, --samples or --mbr: there is one answer")
        if not 1 <= parsed.n_best <= among[1]:
            parser.error(f"expected --n-best from 1 to the {among[1]} of {among[0]}, got {parsed.n_best}")


def _check_beams(parser: Parser, parsed: argparse.Namespace) -> None:
    for option in ("alpha", "length_penalty", "stop", "coverage", "groups", "diversity"):
        if getattr(parsed, option) is not None and parsed.beams is None:
            parser.error(f"--{option.replace('_', '-')} without --beams: it is of beam search")
    if parsed.diversity is not None and parsed.groups is None:
        parser.error("--diversity without --groups: there is one group")
