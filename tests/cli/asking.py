"""What a command that is typed prints."""

from __future__ import annotations

import json
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
    found: dict[str, Any] = json.loads(out)
    return found


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
