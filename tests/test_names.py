"""Every global name that a function reads is there. Linters cannot say: to them, axis strings are undefined names."""

import builtins
import dis
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

PEERS = {"benchmarks.train_marian", "benchmarks.decode_marian"}
"""These import torch, which the tests' environment has not."""
ROOT = Path(__file__).parent.parent
ALL = (
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__").removeprefix("tests.")
    for package in ("tfm", "train", "benchmarks", "tests")
    for path in (ROOT / package).rglob("*.py")
    if path.name != "conftest.py"
)
MODULES = sorted(set(ALL) - PEERS)


def global_names(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from global_names(constant)


def undefined(source: str, namespace: dict[str, object]) -> set[str]:
    known = {*namespace, *vars(builtins), "__class__", "__module__", "__qualname__", "__annotations__"}
    code = compile(source, "module", "exec")
    functions = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {name for function in functions for name in global_names(function) if name not in known}


@pytest.mark.parametrize("module", MODULES)
def test_every_global_name_is_there(module):
    loaded = importlib.import_module(module)
    assert loaded.__file__ is not None
    assert not undefined(Path(loaded.__file__).read_text(encoding="utf-8"), vars(loaded))


def test_a_name_that_is_not_there_is_noticed():
    assert undefined("def f():\n    def g():\n        return nothing(1)\n    return g", {}) == {"nothing"}
