"""The lab's systems where a user sees them."""

from __future__ import annotations

from pathlib import Path

from expertly.cli.main import main
from expertly_lab.baselines.systems import ORACLE
from tests.cli.asking import Captured, told
from tests.cli.test_run_once import words


def test_they_are_listed_with_their_parts(capsys: Captured) -> None:
    lines = told(capsys, "systems").splitlines()
    assert any(line.split()[0:1] == ["oracle"] and "perfect all" in " ".join(line.split()) for line in lines)
    assert f"oracle: {ORACLE.summary} [admission=best, ahead=staging]" in lines


def test_shares_that_are_not_equal_are_shown(model: Path, capsys: Captured):
    arguments = ("--memory", "50%", "--system", "lru:allocation=adapmoe", "--stats", "--max-new-tokens", "3")
    shown = "[experts kept by layer 3 3 3 | allocation adapmoe]"
    assert main(words(model, *arguments)) == 0
    assert shown in capsys.readouterr().err, "beside the answer"
