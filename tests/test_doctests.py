"""Runs the examples in docstrings. Found in the source text: a decorated function hides them from `doctest`."""

import ast
import doctest
import importlib
import pathlib

import pytest

import tfm
import train

MODULES = sorted(
    ".".join(path.relative_to(root.parent).with_suffix("").parts)
    for root in (pathlib.Path(package.__path__[0]) for package in (tfm, train))
    for path in root.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


def examples(module_name: str) -> list[doctest.DocTest]:
    """One test for each docstring that has examples."""
    module = importlib.import_module(module_name)
    assert module.__file__ is not None
    tree = ast.parse(pathlib.Path(module.__file__).read_text(encoding="utf-8"))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (docstring := ast.get_docstring(node)):
            name = f"{module_name}.{getattr(node, 'name', '')}"
            line = getattr(node, "lineno", 0)
            found.append(doctest.DocTestParser().get_doctest(docstring, vars(module), name, module.__file__, line))
    return [test for test in found if test.examples]


@pytest.mark.parametrize("module_name", MODULES)
def test_examples_in_docstrings_give_what_they_say(module_name):
    tests = examples(module_name)
    assert tests
    for test in tests:
        result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
        assert result.failed == 0, f"{test.name}: see the output above"


def test_the_masks_packing_and_cache_writes_have_examples():
    assert {"tfm.nn.masks", "tfm.nn.cache", "tfm.batch", "tfm.nn.transformer"} <= set(MODULES)
