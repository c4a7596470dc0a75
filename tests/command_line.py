"""The command line under test: what it prints, and what a mistake looks like."""

import json
import sys

from train.cli import main

TFM = [sys.executable, "-m", "train.cli"]


def errors(capsys) -> str:
    """The one line that a mistake gets, and nothing on standard output."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tfm: error: ")
    assert err.count("\n") == 1
    return err


def result(capsys, arguments):
    """The JSON object that a command prints."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 0
    return json.loads(capsys.readouterr().out)


def answers(capsys, arguments, status=0):
    """The lines that a command prints."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == status
    return capsys.readouterr().out.split("\n")[:-1]
