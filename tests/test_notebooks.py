"""Each notebook runs from a clean kernel in its small settings, and its built form is what its script says."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
SCRIPTS = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
BUILT = sorted(FOLDER.glob("*.ipynb"))
MARKDOWN, CODE = "# %% [markdown]", "# %%"


def ids(paths: list[Path]) -> list[str]:
    return [path.stem for path in paths]


def cells_of_script(script: Path) -> list[tuple[str, str]]:
    """(kind, text) of each cell, read without jupytext."""
    _, *parts = re.split(r"^(# %%.*)\n", script.read_text(encoding="utf-8"), flags=re.MULTILINE)
    cells = []
    for head, body in zip(parts[::2], parts[1::2], strict=True):
        assert head in (MARKDOWN, CODE), head
        text = body.strip("\n")
        if head == MARKDOWN:
            text = "\n".join(re.sub("^# ?", "", line) for line in text.split("\n"))
        text = re.sub("^# %", "%", text, flags=re.MULTILINE)
        cells.append(("markdown" if head == MARKDOWN else "code", text))
    return cells


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all of them work, so that a model which one has trained serves the others."""
    return tmp_path_factory.mktemp("notebooks")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=ids(SCRIPTS))
def test_it_runs_from_a_clean_kernel_and_its_claims_hold(script, workshop):
    command = [sys.executable, str(FOLDER / "build.py"), script.stem, "--small", "--into", str(workshop)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {name: str(workshop / ".home") for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR")}
    compiled = {"JAX_COMPILATION_CACHE_DIR": str(workshop / ".xla")}  # they have programs in common
    environment = {**os.environ, "PYTHONPATH": path, **own, **compiled}
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert found.returncode == 0, found.stdout + found.stderr
    notebook = nbformat.read(workshop / f"{script.stem}.ipynb", as_version=4)
    assert any(cell.outputs for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.parametrize("script", SCRIPTS, ids=ids(SCRIPTS))
def test_every_claim_is_followed_by_a_cell_that_ends_in_an_assertion(script):
    cells = cells_of_script(script)
    claims = [place for place, (kind, text) in enumerate(cells) if kind == "markdown" and "**Claim.**" in text]
    assert len(claims) >= 5
    for place in claims:
        kind, text = cells[place + 1]
        assert kind == "code", cells[place][1]
        last = ast.parse(text).body[-1]
        while isinstance(last, ast.For):
            last = last.body[-1]
        assert isinstance(last, ast.Assert), f"after {cells[place][1]!r}: {ast.unparse(last)!r}"


@pytest.mark.parametrize("script", SCRIPTS, ids=ids(SCRIPTS))
def test_it_defines_no_model_and_shows_the_librarys_own_code(script):
    tree = ast.parse(script.read_text(encoding="utf-8"))
    assert not [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert "inspect.getsource" in script.read_text(encoding="utf-8")


def test_all_begin_with_the_same_cell_which_installs_where_tfm_is_not():
    first = {next(text for kind, text in cells_of_script(script) if kind == "code") for script in SCRIPTS}
    assert len(first) == 1
    (text,) = first
    installs = ast.parse(text).body[-1]
    assert isinstance(installs, ast.If)
    assert ast.unparse(installs.test) == "importlib.util.find_spec('tfm') is None"


@pytest.mark.parametrize("notebook", BUILT, ids=ids(BUILT))
def test_a_committed_notebook_is_in_step_with_its_script_and_was_run_without_an_error(notebook):
    read = nbformat.read(notebook, as_version=4)
    assert [(cell.cell_type, cell.source) for cell in read.cells] == cells_of_script(notebook.with_suffix(".py"))
    code = [cell for cell in read.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_there_are_scripts_and_none_of_the_built_has_lost_its_own():
    assert SCRIPTS
    assert set(ids(BUILT)) <= set(ids(SCRIPTS))
