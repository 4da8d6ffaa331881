"""What a comparison's folder may hold before, and holds after."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expertly.core.errors import ConfigError
from expertly.core.files import finite
from expertly.lab.compare.comparison import prepare, write_all


def test_an_earlier_comparison_is_replaced_when_that_is_said(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    for _ in range(2):  # one that never got anywhere is no loss
        prepare(out, "expertly lab compare")
    write_all(out, {"command": "expertly lab compare", "rate": float("nan")}, "<p>")
    (out / "trace").mkdir()
    (out / "trace" / "manifest.json").write_text("{}")
    assert json.loads((out / "results.json").read_text()) == {"command": "expertly lab compare", "rate": None}
    with pytest.raises(ConfigError, match="holds an earlier comparison; --force replaces it"):
        prepare(out, "again")
    prepare(out, "again", force=True)
    assert [one.name for one in out.iterdir()] == ["command.txt"]


def test_anything_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(ConfigError, match="not empty, and no earlier comparison"):
            prepare(tmp_path, "mine", force)
    with pytest.raises(ConfigError, match="not a folder"):
        prepare(tmp_path / "notes.txt", "mine", True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_what_json_cannot_say_is_null() -> None:
    assert finite({"a": [1, float("inf")], "b": ("x", None)}) == {"a": [1, None], "b": ["x", None]}
