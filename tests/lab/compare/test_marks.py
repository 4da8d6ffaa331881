"""Systems are told apart in every plot."""

from __future__ import annotations

import re

import pytest

from expertly.lab.compare.marks import NUM_COLOURS, legend, marks_of
from expertly.lab.compare.settings import BOUNDS, default_systems
from expertly.lab.compare.style import STYLE
from expertly.scheduler.presets import runnable_systems


@pytest.mark.parametrize("systems", [default_systems().split(","), runnable_systems()], ids=["usual", "all"])
def test_no_two_systems_look_the_same(systems: list[str]) -> None:
    """By colour and form, as points of a plot are drawn; bounds by how their lines are dashed."""
    marks = marks_of(systems)
    assert list(marks) == list(dict.fromkeys([*systems, *BOUNDS]))
    drawn = [mark.dot(0, 0) for mark in marks.values() if not mark.is_bound]
    assert len(set(drawn)) == len(systems)
    dashes = [mark.dash for mark in marks.values() if mark.is_bound]
    assert len(set(dashes)) == len(dashes) == len(marks) - len(systems)
    assert all(f" {name}</li>" in legend(list(marks.values())) for name in marks)


def test_each_usual_system_has_a_colour_of_its_own_in_light_and_dark() -> None:
    systems = default_systems().split(",")
    assert "expertly-ahead" in systems and len(systems) <= NUM_COLOURS
    assert len({mark.style for mark in marks_of(systems).values() if not mark.is_bound}) == len(systems)
    for theme in STYLE.split("@media (prefers-color-scheme: dark)"):
        colours = [re.findall(rf"--s{number}: (#[0-9a-f]+)", theme) for number in range(len(systems))]
        assert all(colours) and len({found[0] for found in colours}) == len(systems)
