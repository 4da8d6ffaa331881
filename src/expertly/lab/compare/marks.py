"""How systems look in every plot: a colour (Okabe and Ito's, told apart by the colour-blind), a mark, bounds dashed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from expertly.lab.compare.settings import BOUNDS
from expertly.lab.compare.svg import element

NUM_COLOURS = 7
"""Those that the page's style has as --s0 and so on, in light and in dark."""

_DASHES = ("7 3", "2 3", "9 3 2 3", "4 4")
_SHAPES = ("circle", "square", "triangle", "diamond", "ring", "flat", "tall")
_CORNERS: dict[str, list[tuple[float, float]]] = {
    "square": [(-1, -1), (1, -1), (1, 1), (-1, 1)],
    "triangle": [(0, -1.2), (1.2, 1), (-1.2, 1)],
    "diamond": [(0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)],
    "flat": [(-1.2, -0.5), (1.2, -0.5), (1.2, 0.5), (-1.2, 0.5)],
    "tall": [(-0.5, -1.3), (0.5, -1.3), (0.5, 1.3), (-0.5, 1.3)],
}


@dataclass(frozen=True, slots=True)
class Mark:
    """Of one system."""

    name: str
    number: int
    is_bound: bool

    @property
    def style(self) -> str:
        """CSS that sets --c, by which lines and marks are coloured."""
        return f"--c:var(--b{self.number})" if self.is_bound else f"--c:var(--s{self.number % NUM_COLOURS})"

    @property
    def dash(self) -> str | None:
        return _DASHES[self.number % len(_DASHES)] if self.is_bound else None

    def line(self, path: str) -> str:
        return element("path", d=path, class_="line", style=self.style, stroke_dasharray=self.dash)

    def dot(self, x: float, y: float) -> str:
        """The mark alone."""
        if self.is_bound:
            return element("circle", cx=x, cy=y, r=2, class_="dot", style=self.style)
        round_of_colours = self.number // NUM_COLOURS  # the same colour comes again with another form
        shape, size = _SHAPES[(self.number + round_of_colours) % len(_SHAPES)], 4.0
        if shape in ("circle", "ring"):
            return element("circle", cx=x, cy=y, r=size, class_="hole" if shape == "ring" else "dot", style=self.style)
        points = " ".join(f"{x + size * dx:.1f},{y + size * dy:.1f}" for dx, dy in _CORNERS[shape])
        return element("polygon", points=points, class_="dot", style=self.style)


def marks_of(systems: Sequence[str]) -> dict[str, Mark]:
    """Of systems and bounds, by name."""
    bounds = [name for name in BOUNDS if name not in systems]
    marks = [Mark(name, number, False) for number, name in enumerate(systems)]
    marks += [Mark(name, number, True) for number, name in enumerate(bounds)]
    return {mark.name: mark for mark in marks}


def legend(marks: Sequence[Mark]) -> str:
    """Names beside their lines."""
    items = []
    for mark in marks:
        sample = mark.line("M1 7L31 7") + mark.dot(16, 7)
        sample = element("svg", sample, viewBox="0 0 32 14", width=32, height=14, aria_hidden="true")
        items.append(element("li", sample + " " + escape(mark.name)))
    return element("ul", "".join(items), class_="legend")
