"""A newcomer can follow one token: few files, and few Python calls a layer (bench/walk.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.mark.parametrize(
    ("system", "memory", "files", "calls", "of"),
    [
        ("resident", "100%", 8, 9, "_of_each_layer"),
        ("lru", "25%", 12, 70, "_of_two_loads"),  # 56 and 60, and ten more where every load comes late
        ("expertly", "25%", 12, 72, "_of_two_loads"),
    ],
)
def test_one_step(monkeypatch: pytest.MonkeyPatch, system: str, memory: str, files: int, calls: int, of: str):
    monkeypatch.syspath_prepend(str(BENCH))  # it imports common.py
    from bench import walk

    before = sys.getprofile()
    row = walk.run(system, memory, 16, told=False)
    assert sys.getprofile() is before
    assert 0 < row[f"files{of}"] <= files
    assert 0 < row["calls" if of == "_of_each_layer" else f"calls{of}"] <= calls
