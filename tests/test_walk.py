"""A newcomer can follow one token: few files, and few Python calls a layer (bench/walk.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.mark.parametrize(
    ("system", "memory", "files", "calls", "of"),
    [
        ("resident", "100%", 14, 9, ""),
        ("lru", "25%", 14, 80, "_of_two_loads"),
        ("expertly", "25%", 15, 90, "_of_two_loads"),
    ],
)
def test_one_step(monkeypatch: pytest.MonkeyPatch, system: str, memory: str, files: int, calls: int, of: str):
    monkeypatch.syspath_prepend(str(BENCH))  # it imports common.py
    from bench import walk

    before = sys.getprofile()
    row = walk.run(system, memory, 32, told=False)
    assert sys.getprofile() is before
    assert 0 < row[f"files{of}"] <= files
    assert 0 < row[f"calls{of}"] <= calls
