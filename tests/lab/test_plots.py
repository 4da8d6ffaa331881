"""What every picture has in common: systems are told apart, a page colours it, nothing in it is obeyed."""

from __future__ import annotations

from pathlib import Path

import pytest

from expertly.core.errors import ConfigError
from expertly.lab.compare.settings import USUAL_SYSTEMS
from expertly.lab.plots import COLOUR, NUM_COLOURS, THEME, Picture, check_plot, draw_shares, drawing, marks_of
from expertly.scheduler.presets import BOUNDS, runnable_systems
from tests.lab.compare.html import read


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
