"""The recipe to start from: every setting with its default and its documentation, made from the dataclasses."""

import dataclasses
import json
import textwrap
import typing
from collections.abc import Iterator
from typing import Any, Literal

from tfm.config import PRESETS
from train import schema
from train.config import FROM_TOKENIZERS, TrainConfig

_HEAD = """\
# A recipe: every setting, its default, and what it means. What has its default may be left out.
#
#     tfm train THIS-FILE --dry-run     # reads the data and says what would be trained
#     tfm train THIS-FILE
"""
_OF_PRESETS = frozenset(f"model.{name}" for sizes in PRESETS.values() for name in sizes)


def template() -> str:
    """The text of a TOML file that `train.config.load_recipe` reads as `TrainConfig()`."""
    lines = [_HEAD, *_settings(TrainConfig(), "")]
    for field in dataclasses.fields(TrainConfig):
        if dataclasses.is_dataclass(field.type):
            section = getattr(TrainConfig(), field.name)
            lines += ["", *_comment(_summary(type(section)), field.type), f"[{field.name}]"]
            if field.name == "model":
                names = ", ".join(PRESETS)
                what = f"The sizes of {names}. What is set beside it wins, so here what it may set stands in comments."
                lines += [*_comment(what, str), "# preset ="]
            lines += _settings(section, f"{field.name}.")
    return "\n".join(lines) + "\n"


def _settings(section: Any, prefix: str) -> Iterator[str]:
    docs = schema.field_docs(type(section))
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value) or prefix + field.name in FROM_TOKENIZERS:
            continue
        # TOML has no null: a size that follows from others is shown, not set.
        yield from _comment(docs[field.name].replace("`None`:", "left out:"), field.type)
        if value is None:
            yield f"# {field.name} ="
        else:
            yield f"{'# ' if prefix + field.name in _OF_PRESETS else ''}{field.name} = {_toml(value)}"


def _comment(text: str, annotation: Any) -> Iterator[str]:
    if typing.get_origin(annotation) is Literal:
        text = f"{text} One of {', '.join(typing.get_args(annotation))}.".strip()
    for line in textwrap.wrap(text, 116):
        yield f"# {line}"


def _summary(section: type) -> str:
    return (section.__doc__ or "").strip().partition("\n")[0]


def _toml(value: Any) -> str:
    """Texts, numbers, booleans and lists of texts are written in TOML as in JSON."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
