"""Settings on the command line: `--section.key value`, over those of a recipe or a run."""

import contextlib
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfm.config import ModelConfig
from train import schema
from train.arguments import OPTIONS_OF_TRAIN, UsageError
from train.config import FROM_TOKENIZERS, TrainConfig, from_tokenizers, with_preset


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
            given, known = option.partition("=")[0], (*types, *negations, *OPTIONS_OF_TRAIN)
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
