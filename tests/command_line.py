"""The command line under test, and what a mistake looks like."""

import sys

TFM = [sys.executable, "-m", "train.cli"]


def errors(capsys) -> str:
    """The one line that a mistake gets, and nothing on standard output."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tfm: error: ")
    assert err.count("\n") == 1
    return err
