"""Drawings as text: an SVG element with a title that screen readers say, and axes with round numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

Format = Callable[[float], str]


def element(name: str, text: str = "", **attributes: object) -> str:
    """`<name a-b="..">text</name>`; `text` is markup, attributes are escaped; `a_b` is written a-b, `class_` class."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{given}>{text}</{name}>" if text else f"<{name}{given}/>"


def titled(markup: str, tooltip: str) -> str:
    """A group that says what it is when it is pointed at."""
    return element("g", element("title", escape(tooltip)) + markup)


def drawing(name: str, description: str, width: float, height: float, parts: Sequence[str], class_: str = "") -> str:
    """The whole SVG; as wide as its place, unless `class_` says otherwise."""
    head = element("title", escape(name)) + element("desc", escape(description))
    view = f"0 0 {_number(width)} {_number(height)}"
    return element("svg", head + "".join(parts), viewBox=view, role="img", class_=class_ or None, aria_label=name)


@dataclass(frozen=True, slots=True)
class Scale:
    """Numbers from `low` to `high` onto places from `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        """The place of a number."""
        width = (self.high - self.low) or 1.0
        return self.begin + (value - self.low) / width * (self.end - self.begin)


def round_ticks(high: float, num: int = 5, base: int = 1000) -> list[float]:
    """From 0 in steps of 1, 2 or 5 times a power of ten to what is not below `high`; about so many. With a base of 1024
    the steps are round in KiB, MiB and so on.
    """
    if not math.isfinite(high) or high <= 0:
        return [0.0, 1.0]
    rough = high / num
    unit = float(base) ** math.floor(math.log(rough, base))
    power = unit * 10.0 ** math.floor(math.log10(rough / unit))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    if step > 500 * unit:
        step = unit * base  # 1 MiB, not 1000 or 2000 KiB
    return [step * index for index in range(math.ceil(high / step - 1e-9) + 1)]


@dataclass(slots=True)
class Panel:
    """A plot's frame: axes with their names, a grid, and what is drawn in it."""

    name: str
    description: str
    x_label: str
    x: Scale
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[float]
    y_format: Format
    width: float = 360
    height: float = 232
    parts: list[str] = field(default_factory=list)
    y: Scale = field(init=False)

    LEFT, RIGHT, TOP, BOTTOM = 54, 10, 24, 38

    def __post_init__(self) -> None:
        self.y = Scale(self.y_ticks[0], self.y_ticks[-1], self.height - self.BOTTOM, self.TOP)

    def drawn(self) -> str:
        """All of it."""
        return drawing(self.name, self.description, self.width, self.height, [*self._frame(), *self.parts])

    def _frame(self) -> list[str]:
        left, right, bottom = self.LEFT, self.width - self.RIGHT, self.height - self.BOTTOM
        made = [element("text", escape(self.name), x=0, y=13, class_="name")]
        for value in self.y_ticks:
            y = self.y.at(value)
            made.append(element("line", x1=left, x2=right, y1=y, y2=y, class_="grid"))
            made.append(element("text", escape(self.y_format(value)), x=left - 6, y=y + 4, class_="tick end"))
        last = -math.inf
        for value, text in self.x_ticks:
            x = self.x.at(value)
            made.append(element("line", x1=x, x2=x, y1=bottom, y2=bottom + 4, class_="axis"))
            if x - last > 7 * len(text):  # else they would lie on each other
                made.append(element("text", escape(text), x=x, y=bottom + 16, class_="tick middle"))
                last = x
        made.append(element("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis"))
        middle = (left + right) / 2
        made.append(element("text", escape(self.x_label), x=middle, y=self.height - 5, class_="tick middle"))
        return made


def x_scale(low: float, high: float, width: float = 360) -> Scale:
    """Onto the width of a Panel."""
    return Scale(low, high, Panel.LEFT, width - Panel.RIGHT)


def path(points: Sequence[tuple[float, float]]) -> str:
    """Straight lines through places."""
    return "M" + "L".join(f"{_number(x)} {_number(y)}" for x, y in points)


def _number(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
