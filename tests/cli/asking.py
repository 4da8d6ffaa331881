"""What a command that is typed prints."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from expertly.cli.main import main

Captured = pytest.CaptureFixture[str]


def answer(capsys: Captured, *words: object, code: int = 0) -> dict[str, Any]:
    """With --json: one object in one line."""
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == code
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    result: dict[str, Any] = json.loads(out)
    return result


def told(capsys: Captured, *words: object) -> str:
    """What people read on stdout."""
    capsys.readouterr()
    assert main([*map(str, words)]) == 0
    return capsys.readouterr().out


def refusal(capsys: Captured, *words: object) -> str:
    """The one line on stderr, and nothing else."""
    capsys.readouterr()
    assert main([*map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("expertly: error: ") and err.count("\n") == 1, err
    return err.removeprefix("expertly: error: ").rstrip()


def assert_refused(capsys: Captured, words: str, said: str, folder: Path, **places: Path) -> None:
    """The command ends with exit code 2, an error that has `said` in it, and no file in `folder`, which is the current
    one. There, PIPE is one that nobody writes to; other `places` stand for paths.
    """
    os.mkfifo(folder / "PIPE")
    typed = [str(places.get(word, word)) for word in shlex.split(words)]
    assert main(typed) == 2
    out, err = capsys.readouterr()
    *messages, error = err.splitlines()
    assert out == "" and said in error.removeprefix("expertly: error: ") != error, err
    assert all(line.startswith("expertly: ") for line in messages)
    assert not [path for path in folder.rglob("*") if path.is_file() and path.name != "command.txt"]
