"""The report, its folder and its pictures hold what they are given, whatever that is, and say what is missing."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from expertly.core.errors import ConfigError
from expertly.scheduler.systems import runnable_systems
from expertly_lab.baselines.systems import BOUNDS
from expertly_lab.compare.comparison import USUAL_SYSTEMS, ComparisonSettings, prepare, write_all
from expertly_lab.compare.report import page
from expertly_lab.plots import SYSTEMS, data_address, draw_panels, marks_of
from lab.tests.compare.html import read

HOSTILE = "<script>alert(1)</script>&{{ 7 * 7 }}"


def results(**values: Any) -> dict[str, Any]:
    """Of a comparison that ended before anything was measured."""
    return {
        "command": f"expertly lab compare '{HOSTILE}'",
        "created": "2026-11-22T00:00:00+00:00",
        "is_interrupted": True,
        "problem": None,
        "versions": {"expertly": "0.1.0"},
        "machine": {"cpu": HOSTILE, "num_cpus": 2, "load_average": [1.0, 1.0, 1.0]},
        "settings": asdict(ComparisonSettings(("lru", "lfu"), ("25%", "50%"))),
        "source": {"name": HOSTILE},
        "hardware_from": "",
        "headline": [],
        "rows": [],
        "failures": [],
        "notes": [HOSTILE],
        "engine": [],
        **values,
    }


def row(memory: str, system: str, tpot_s: float) -> dict[str, Any]:
    figures = dict.fromkeys(("ttft_s", "hit_rate", "bytes_loaded"))
    engine = figures | {"tpot_s": tpot_s, "time_to_base": {"median": 1.5, "low": 1.0, "high": 2.0}}
    about = {"memory": memory, "memory_bytes": 1 << 20, "system": system, "segments": 4, "is_bound": False}
    return about | {"has_failed": system == "lfu", "engine": engine, "simulated": None}


def test_what_was_given_is_text_and_not_obeyed() -> None:
    result = read(page(results(problem=HOSTILE)))
    assert "script" not in result.names
    assert result.text.count(HOSTILE) == 7, "title, head, problem, machine, model, note, command"
    assert f"ended early: {HOSTILE}" in result.text
    assert result.tables == [] and "Results" not in result.headings


def test_without_a_simulation_tables_and_plots_are_of_the_engine() -> None:
    rows = [row(memory, system, 0.02) for memory in ("25%", "50%") for system in ("lru", "lfu")]
    made = page(results(rows=rows, headline=["With 25%: lru. Best possible: less."]))
    result = read(made)
    assert result.tables[0][0][1:] == ["engine, measured"]
    assert [line[0] for line in result.tables[0][2:]] == ["lru (P = 4)", "lfu (P = 4), failed"]
    assert result.tables[0][2][1:3] == ["20.0 ms", "1.50x 1.00 to 2.00x"]
    assert "Loading ahead" not in result.headings
    assert "<strong>With 25%: lru</strong>. Best possible: less." in made
    assert result.pictures == ["TPOT, time a token (ms): engine, measured"]


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
    assert [each.name for each in out.iterdir()] == ["command.txt"]


def test_anything_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(ConfigError, match="not empty, and no earlier comparison"):
            prepare(tmp_path, "mine", force)
    with pytest.raises(ConfigError, match="not a folder"):
        prepare(tmp_path / "notes.txt", "mine", True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("systems", [USUAL_SYSTEMS.split(","), runnable_systems()], ids=["usual", "all"])
def test_no_two_systems_look_the_same(systems: list[str]) -> None:
    """By colour and form, as points of a plot are drawn; bounds by how their lines are dashed."""
    marks = marks_of(systems, [name for name in BOUNDS if name not in systems])
    assert list(marks) == list(dict.fromkeys([*systems, *BOUNDS]))
    drawn = {(marks[name]["color"], marks[name]["marker"]) for name in systems}
    assert len(drawn) == len(systems)
    dashes = {style["linestyle"] for name, style in marks.items() if name not in systems}
    assert len(dashes) == len(marks) - len(systems)


def test_each_usual_system_has_a_colour_of_its_own() -> None:
    assert len(set(SYSTEMS)) == len(SYSTEMS) >= len(USUAL_SYSTEMS.split(","))


def test_a_picture_is_in_the_page_and_takes_names_as_text() -> None:
    name = "<lru> $x$"
    figure = draw_panels({name: {name: {"10%": 1.0, "25%": 2.0}}}, marks_of([name], []))
    kind, _, text = data_address(figure).partition(";base64,")
    assert kind == "data:image/svg+xml" and "&lt;lru&gt; $x$" in base64.b64decode(text).decode()
