"""The report, its folder and its pictures hold what they are given, whatever that is, and say what is missing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from expertly.core.errors import ConfigError
from expertly.lab.compare.comparison import prepare, write_all
from expertly.lab.compare.report import page
from expertly.lab.compare.settings import USUAL_SYSTEMS, ComparisonSettings
from expertly.lab.plots import COLOUR, NUM_COLOURS, THEME, Picture, check_plot, draw_shares, drawing, marks_of
from expertly.scheduler.presets import BOUNDS, runnable_systems
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


@pytest.mark.parametrize("systems", [USUAL_SYSTEMS.split(","), runnable_systems()], ids=["usual", "all"])
def test_no_two_systems_look_the_same(systems: list[str]) -> None:
    """By colour and form, as points of a plot are drawn; bounds by how their lines are dashed."""
    marks = marks_of(systems, [name for name in BOUNDS if name not in systems])
    assert list(marks) == list(dict.fromkeys([*systems, *BOUNDS]))
    drawn = {(mark.colour, mark.point["marker"]) for mark in marks.values() if not mark.is_bound}
    assert len(drawn) == len(systems)
    dashes = {mark.line["linestyle"] for mark in marks.values() if mark.is_bound}
    assert len(dashes) == len(marks) - len(systems)


def test_each_usual_system_has_a_colour_of_its_own_in_light_and_dark() -> None:
    systems = USUAL_SYSTEMS.split(",")
    assert "expertly-ahead" in systems and len(systems) <= NUM_COLOURS
    colours = [THEME[f"s{number}"] for number in range(len(systems))]
    assert len({light for light, _ in colours}) == len({dark for _, dark in colours}) == len(systems)
    assert len(set(COLOUR.values())) == len(COLOUR), "a page finds each by its light value"


def test_a_drawing_is_coloured_by_its_page_and_says_what_it_shows() -> None:
    with drawing():
        picture = Picture(100, 50)
        axes = picture.axes(10, 10, 10, 10)
        mark = marks_of(["<lru> $x$"], [])["<lru> $x$"]
        draw_shares(axes, [1.0, 2.0, 2.0, 5.0], mark, **picture.tip("<lru> & $x$: 5 s"))
        axes.set_title("<lru> $x$")
        svg = picture.svg('a "name"', "and what it shows")
    found = read(svg)
    assert found.tooltips == ['a "name"', "<lru> & $x$: 5 s"] and "<lru> $x$" in found.text
    assert "var(--s0)" in svg and "var(--ink)" in svg and not any(light in svg for light in COLOUR.values())
    assert "http" not in svg and "url(" not in svg, "a page that holds it asks for nothing"


@pytest.mark.parametrize(
    ("name", "problem"), [("x.gif", "must end in .png, .svg, .pdf"), ("nosuch/x.png", "is not a folder")]
)
def test_what_cannot_be_written_is_refused_before_any_work(tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_plot(tmp_path / name)
