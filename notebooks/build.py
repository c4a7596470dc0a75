"""Runs notebooks from a clean kernel each, and writes them with their outputs.

    python notebooks/build.py                                    all, into this folder: what `make notebooks` does
    python notebooks/build.py 06_kv_cache --small --into DIR     one, with the settings of continuous integration

The percent script NN_name.py is the source of NN_name.ipynb. A kernel works in the folder that it writes to, so the
models that notebooks train, in `runs/` there, are shared between them.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import jupytext
import nbclient
import nbformat

HERE = Path(__file__).parent


def scripts() -> list[Path]:
    """The sources, in the order of their numbers."""
    return sorted(HERE.glob("[0-9][0-9]_*.py"))


def read(script: Path) -> nbformat.NotebookNode:
    """The notebook that a script is the source of, without outputs; numbered cells keep their ids."""
    notebook = jupytext.read(script)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    return nbformat.from_dict(notebook)


def run(script: Path, into: Path, *, small: bool) -> Path:
    """Writes the notebook after every cell, so that one which failed shows where.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised something.
    """
    notebook, path = read(script), into / f"{script.stem}.ipynb"
    client = nbclient.NotebookClient(notebook, timeout=1800, record_timing=False, coalesce_streams=True)
    environment = {**os.environ, "TFM_NOTEBOOK": "small" if small else "full", "PYTHONUNBUFFERED": "1"}
    try:
        client.execute(cwd=str(into), env=environment)
    finally:
        notebook.metadata.pop("language_info", None)  # the interpreter's patch version is no part of the notebook
        nbformat.write(notebook, path)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs notebooks and writes them with their outputs.")
    parser.add_argument("names", nargs="*", help="as 06_kv_cache; default: all")
    parser.add_argument("--small", action="store_true", help="settings that take seconds")
    parser.add_argument("--into", type=Path, default=HERE, help="default: beside the scripts")
    options = parser.parse_args()
    known = {script.stem: script for script in scripts()}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"expected names of {', '.join(known)}, got {', '.join(unknown)}")
    for name in options.names or known:
        begun = time.monotonic()
        run(known[name], options.into.absolute(), small=options.small)
        print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
