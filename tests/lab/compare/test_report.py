"""The report holds what it is given, whatever that is, and says what is missing."""

from __future__ import annotations

import re
from typing import Any

from expertly.lab.compare.report import page
from expertly.lab.compare.settings import ComparisonSettings
from tests.lab.compare.html import read

HOSTILE = "<script>alert(1)</script>&{{ 7 * 7 }}"


def results(**given: Any) -> dict[str, Any]:
    """Of a comparison that ended before anything was measured."""
    return {
        "command": f"expertly lab compare '{HOSTILE}'",
        "created": "2026-11-22T00:00:00+00:00",
        "is_interrupted": True,
        "problem": None,
        "versions": {"expertly": "0.1.0"},
        "machine": {"cpu": HOSTILE, "num_cpus": 2, "load_average": [1.0, 1.0, 1.0]},
        "settings": ComparisonSettings(("lru", "lfu"), ("25%", "50%")).as_dict(),
        "source": {"kind": "model", "name": HOSTILE},
        "hardware_from": "",
        "headline": [],
        "rows": [],
        "failures": [],
        "notes": [HOSTILE],
        "engine": None,
        "timelines": [],
        **given,
    }


def row(memory: str, system: str, tpot_s: float) -> dict[str, Any]:
    figures = dict.fromkeys(("ttft_s", "hit_rate", "stall_s", "bytes_loaded", "coverage", "accuracy", "timeliness"))
    engine = figures | {"tpot_s": {"median": tpot_s, "q1": tpot_s / 2, "q3": tpot_s}, "latencies_s": [0.5, 1.0]}
    about = {"memory": memory, "memory_bytes": 1 << 20, "system": system, "segments": 4, "is_bound": False}
    return about | {"has_failed": system == "lfu", "engine": engine, "simulated": None}


def test_what_was_given_is_text_and_not_obeyed() -> None:
    found = read(page(results(problem=HOSTILE)))
    assert "script" not in found.names
    assert found.text.count(HOSTILE) == 7, "title, head, problem, machine, model, note, command"
    assert f"ended early: {HOSTILE}" in found.text
    assert found.tables == [] and "Results" not in found.headings


def test_without_a_simulation_tables_and_plots_are_of_the_engine() -> None:
    rows = [row(memory, system, 0.02) for memory in ("25%", "50%") for system in ("lru", "lfu")]
    made = page(results(rows=rows, headline=["With 25%: lru. Best possible: less."]))
    found = read(made)
    assert found.tables[0][0][1:] == ["engine, measured"]
    assert [line[0] for line in found.tables[0][2:]] == ["lru (P = 4)", "lfu (P = 4), failed"]
    assert found.tables[0][2][1] == "20.0 ms 10.0 to 20.0 ms"
    assert "lru, 25%: 20.0 ms (quartiles 10.0 to 20.0 ms)" in found.tooltips
    assert "lfu, 50%: half within 500 ms, all within 1.00 s" in found.tooltips
    assert "One token in time" not in found.headings and "Loading ahead" not in found.headings
    assert "<strong>With 25%: lru</strong>. Best possible: less." in made
    assert len(re.findall("<figure>", made)) == 3, "TPOT, and latencies of two budgets"
