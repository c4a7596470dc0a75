"""Frozen dataclasses as nested tables: read with errors that name the key, written, compared, documented.

Knows nothing of training; `train.config` describes a run with it. A leaf is named by its dotted key
(`optimizer.learning_rate`), the same in a TOML file, on the command line and in an error.
"""

import ast
import dataclasses
import difflib
import inspect
import itertools
import math
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal, TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """A description of a run that cannot be; `problems` are all that is wrong with it, one clause each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


class Section:
    """Base of a frozen dataclass that is checked when it is made; errors put `prefix` before its fields' names."""

    _prefix: ClassVar[str]

    def __init_subclass__(cls, prefix: str) -> None:
        cls._prefix = prefix

    def __post_init__(self) -> None:
        """Raises ConfigError, naming everything that cannot be."""
        # The rules compute with the values, so types come first.
        if problems := list(type_problems(self)) or list(self.problems()):
            raise ConfigError(self._prefix + problem for problem in problems)

    def problems(self) -> Iterator[str]:
        """What is wrong, one clause each, beginning with the field's name; the values have the right types."""
        yield from ()


def at_least(section: Section, least: int, *names: str) -> Iterator[str]:
    for name in names:
        if not getattr(section, name) >= least:
            yield f"{name} must be at least {least}, got {getattr(section, name)}"


def more_than(section: Section, bound: int, *names: str) -> Iterator[str]:
    for name in names:
        if not getattr(section, name) > bound:
            yield f"{name} must be more than {bound}, got {getattr(section, name)}"


def within(section: Section, least: int, bound: int, *names: str) -> Iterator[str]:
    for name in names:
        if not least <= getattr(section, name) < bound:
            yield f"{name} must be at least {least} and less than {bound}, got {getattr(section, name)}"


def decode(cls: type[T], values: Mapping[str, Any]) -> T:
    """Builds the dataclass `cls` from nested tables, as TOML and JSON have them; absent fields have their defaults.

    Raises:
        ConfigError: for keys that `cls` does not have (each with the nearest one that it has), values of a wrong type
            and whatever the dataclasses themselves refuse, all at once.
    """
    problems: list[str] = []
    result = _decode(cls, values, "", tuple(leaf_types(cls)), problems)
    if problems:
        raise ConfigError(problems)
    return result


def _decode(cls: Any, values: Mapping[str, Any], prefix: str, known: tuple[str, ...], problems: list[str]) -> Any:
    fields = {field.name: field.type for field in dataclasses.fields(cls)}
    arguments: dict[str, Any] = {}
    before = len(problems)
    for key, value in values.items():
        name = prefix + key
        if key not in fields:
            problems.append(unknown_key(name, _sections(known) if isinstance(value, Mapping) else known))
        elif dataclasses.is_dataclass(annotation := fields[key]):
            if isinstance(value, Mapping):
                arguments[key] = _decode(annotation, value, f"{name}.", known, problems)
            else:
                problems.append(f"{name}: expected a table of settings, got {value!r}")
        elif problem := type_problem(annotation, normal := _normal(annotation, value)):
            problems.append(f"{name}: {problem}")
        else:
            arguments[key] = normal
    if len(problems) > before:
        return None
    try:
        return cls(**arguments)
    except ConfigError as error:
        problems += error.problems
    except ValueError as error:
        problems.append(str(error))
    return None


def encode(config: Any) -> dict[str, Any]:
    """The reverse of `decode`, in what JSON has: tuples become lists."""
    return {
        field.name: encode(value) if dataclasses.is_dataclass(value) else list(value) if type(value) is tuple else value
        for field in dataclasses.fields(config)
        for value in [getattr(config, field.name)]
    }


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every leaf's value under its dotted key."""
    leaves: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = prefix + field.name
        leaves |= flatten(value, f"{name}.") if dataclasses.is_dataclass(value) else {name: value}
    return leaves


def leaf_types(cls: Any, prefix: str = "") -> dict[str, Any]:
    """Every leaf's annotation under its dotted key."""
    leaves: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        name = prefix + field.name
        leaves |= leaf_types(field.type, f"{name}.") if dataclasses.is_dataclass(field.type) else {name: field.type}
    return leaves


def field_docs(cls: type) -> dict[str, str]:
    """What each field of `cls` means: the text that stands below it in the source, empty where none does."""
    body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]).body
    docs = {field.name: "" for field in dataclasses.fields(cls)}
    for statement, following in itertools.pairwise(body):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
    return docs


def nearest(key: str, known: Iterable[str]) -> str:
    """The most similar of `known`; the part after the last dot counts as much as the whole."""

    def similarity(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, key, candidate).ratio()
        return whole + difflib.SequenceMatcher(None, _leaf(key), _leaf(candidate)).ratio()

    return max(known, key=similarity)


def unknown_key(key: str, known: Iterable[str]) -> str:
    return f"unknown key {key!r}; the nearest known one is {nearest(key, known)!r}"


def type_problem(annotation: Any, value: Any) -> str | None:
    """What is wrong with `value` where `annotation` stands ("expected …, got …"), or None."""
    if _fits(annotation, value):
        return None
    hint = f"; write [{value!r}]" if annotation == tuple[str, ...] and isinstance(value, str) else ""
    return f"expected {_type_words(annotation)}, got {value!r}{hint}"


def type_problems(config: Any) -> Iterator[str]:
    """The type problems of a dataclass's own fields."""
    for field in dataclasses.fields(config):
        if problem := type_problem(field.type, getattr(config, field.name)):
            yield f"{field.name}: {problem}"


def _fits(annotation: Any, value: Any) -> bool:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is types.UnionType:
        return any(_fits(argument, value) for argument in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(arguments[0], item) for item in value)
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation)


def _type_words(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(arguments)
    if origin is types.UnionType:
        return " or ".join(_type_words(argument) for argument in arguments)
    if origin is tuple:
        return "a list of texts"
    words = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text"}
    return words.get(annotation, "none" if annotation is types.NoneType else getattr(annotation, "__name__", "?"))


def _normal(annotation: Any, value: Any) -> Any:
    """`value` in the form that its field has: TOML and JSON write an array for a tuple, and perhaps 1 for 1.0."""
    if annotation is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:  # a whole number of hundreds of digits
            return math.inf
    return tuple(value) if typing.get_origin(annotation) is tuple and isinstance(value, list) else value


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


def _sections(known: tuple[str, ...]) -> list[str]:
    return sorted({key.rpartition(".")[0] for key in known if "." in key})
