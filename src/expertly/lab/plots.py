"""One style for all pictures, drawn by matplotlib: files (--plot), and SVG in a page, whose style sheet colours it for
light and dark screens.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from expertly.core.errors import ConfigError
from expertly.core.files import replacing

FORMATS = (".png", ".svg", ".pdf")

THEME = {
    "paper": ("#ffffff", "#14171a"),
    "ink": ("#1a1d21", "#e6e9ec"),
    "soft": ("#5a626c", "#a2abb5"),
    "rule": ("#d5dae0", "#343a41"),
    "s0": ("#0072b2", "#4fb0e8"),
    "s1": ("#d55e00", "#f08a3c"),
    "s2": ("#009e73", "#35c79c"),
    "s3": ("#b0548c", "#e39ac5"),
    "s4": ("#8a6d00", "#dcc04e"),
    "s5": ("#3aa0d8", "#9bd3f5"),
    "s6": ("#7a5fb5", "#b7a3e6"),
    "b0": ("#7d8590", "#9aa4af"),
    "b1": ("#30363d", "#f0f3f6"),
    "b2": ("#57606a", "#c3cad2"),
    "b3": ("#9aa4af", "#6e7781"),
    "dense": ("#9aa7b4", "#5a6673"),
    "wait": ("#f6d5c6", "#5b3626"),
}
"""Colours by name, for a light and a dark page. s0 to s6 are for systems and can be told apart by the colour-blind
(after Okabe and Ito), b0 to b3 for bounds. A page has each as the CSS variable --NAME.
"""

COLOUR = {name: light for name, (light, _) in THEME.items()}

NUM_COLOURS = 7

_STYLE: Any = {
    "font.size": 11,
    "font.family": "sans-serif",
    "text.color": COLOUR["ink"],
    "text.parse_math": False,  # names of models and systems are text
    "axes.edgecolor": COLOUR["soft"],
    "axes.labelcolor": COLOUR["soft"],
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": COLOUR["soft"],
    "ytick.color": COLOUR["soft"],
    "grid.color": COLOUR["rule"],
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "lines.scale_dashes": False,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "expertly",  # the same picture is the same text
}
_POINTS_AN_INCH = 72  # sizes are in points, which are an SVG's own unit
_NOT_NEEDED = re.compile(
    r'<metadata>.*?</metadata>|<style.*?</style>|<clipPath.*?</clipPath>| clip-path="[^"]*"| font-family:[^";]*;?'
    r"|<defs>\s*</defs>|<!--.*?-->",
    re.DOTALL,
)


def check_plot(path: Path | None = None) -> None:
    """Raises ConfigError, before any work, where `path` cannot be written."""
    if path is not None and path.suffix.lower() not in FORMATS:
        raise ConfigError(f"plot={str(path)!r}: must end in {', '.join(FORMATS)}")
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"plot={str(path)!r}: {str(path.absolute().parent)!r} is not a folder")
    import matplotlib  # noqa: F401 - which may be missing


@contextmanager
def drawing() -> Iterator[None]:
    """Draw in our style within this block; matplotlib's global settings are restored afterwards."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


@dataclass(frozen=True, slots=True)
class Mark:
    """How a system or a bound looks in every plot: its colour and marker; bounds are dashed."""

    name: str
    number: int
    is_bound: bool

    @property
    def colour(self) -> str:
        return COLOUR[f"b{self.number % 4}" if self.is_bound else f"s{self.number % NUM_COLOURS}"]

    @property
    def line(self) -> dict[str, Any]:
        dashes = ((7, 3), (2, 3), (9, 3, 2, 3), (4, 4))
        style = (0, dashes[self.number % 4]) if self.is_bound else "-"
        return {"color": self.colour, "linestyle": style, "zorder": 2 if self.is_bound else 3}

    @property
    def point(self) -> dict[str, Any]:
        """Of Axes.plot. A colour that comes again has another form."""
        forms = "osD^vPX"
        form = "." if self.is_bound else forms[(self.number + self.number // NUM_COLOURS) % len(forms)]
        return {"color": self.colour, "marker": form, "markersize": 6, "linestyle": "none", "zorder": 4}


def marks_of(systems: Sequence[str], bounds: Sequence[str]) -> dict[str, Mark]:
    marks = [Mark(name, number, False) for number, name in enumerate(systems)]
    marks += [Mark(name, number, True) for number, name in enumerate(bounds)]
    return {mark.name: mark for mark in marks}


@dataclass(slots=True)
class Picture:
    """A figure of so many points. `tips`: what is said where one points at a part of it, in a page."""

    width: float
    height: float
    figure: Any = field(init=False)
    tips: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        from matplotlib.figure import Figure

        self.figure = Figure(figsize=(self.width / _POINTS_AN_INCH, self.height / _POINTS_AN_INCH), dpi=_POINTS_AN_INCH)

    def axes(self, left: float, right: float, top: float, bottom: float) -> Any:
        """A frame with so many points around it."""
        width, height = self.width - left - right, self.height - top - bottom
        return self.figure.add_axes((left / self.width, bottom / self.height, width / self.width, height / self.height))

    def tip(self, text: str) -> dict[str, Any]:
        """Arguments that give what is drawn a tooltip: `axes.plot(..., **picture.tip("a value"))`."""
        self.tips.append(text)
        return {"gid": f"tip-{len(self.tips) - 1}"}

    def svg(self, name: str = "", description: str = "", class_: str = "") -> str:
        """An element for a page, as wide as its place, without references to other files. Without a name it is
        decoration.
        """
        made = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        self.figure.savefig(made, format="svg", transparent=True, metadata=nothing)
        body = made.getvalue()
        body = _NOT_NEEDED.sub("", body[body.index(">", body.index("<svg")) + 1 :])
        for key, light in COLOUR.items():
            body = body.replace(f": {light}", f": var(--{key})")
        body = re.sub(r' id="(?!m[0-9a-f]{10}"|tip-)[^"]*"', "", body)  # several drawings are in one page
        tips = [f"<g><title>{escape(tip)}</title>" for tip in self.tips]
        body = re.sub(r'<g id="tip-(\d+)">', lambda found: tips[int(found[1])], body)
        body = re.sub(r"\s*\n\s*", " ", body)
        size = f'viewBox="0 0 {self.width:g} {self.height:g}"' + (f' class="{class_}"' if class_ else "")
        if not name:
            return f'<svg {size} aria-hidden="true">{body}'
        head = f"<title>{escape(name)}</title><desc>{escape(description)}</desc>"
        return f'<svg {size} role="img" aria-label="{escape(name)}">{head}{body}'


def save(figure: Any, path: Path) -> None:
    """Save in the format of the name's suffix. Raises ConfigError where it cannot be written."""
    try:
        with drawing(), replacing(path) as file:
            figure.savefig(file, dpi=150, format=path.suffix.removeprefix(".") or None)
    except OSError as error:
        raise ConfigError(f"plot={str(path)!r}: cannot be written ({error.strerror or error})") from None


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches that arranges its axes itself, without a window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def draw_shares(axes: Any, rising: Sequence[float], mark: Mark, **more: Any) -> None:
    """A line of the share of values that are at most x: 0 at the least, 1 at the largest."""
    shares = [index / len(rising) for index in range(len(rising) + 1)]
    axes.step([rising[0], *rising], shares, where="post", **mark.line, **more)


def round_ticks(high: float, num: int = 5, base: int = 1000) -> list[float]:
    """About so many ticks from 0, in steps of 1, 2 or 5 times a power of ten, up to `high` or more. With base 1024 the
    steps are round in KiB, MiB and so on.
    """
    if not math.isfinite(high) or high <= 0:
        return [0.0, 1.0]
    from matplotlib.ticker import MaxNLocator

    unit = float(base) ** math.floor(math.log(high, base))
    return [unit * float(tick) for tick in MaxNLocator(num, steps=[1, 2, 5, 10]).tick_values(0, high / unit)]


def memory_places(memories: Sequence[str], otherwise: Mapping[str, float] | None = None) -> dict[str, float]:
    """Where budgets lie on an axis: at their sizes where all are given the same way, else at `otherwise`, or evenly."""
    for unit in ("%", "/layer"):
        if all(memory.strip().endswith(unit) for memory in memories):
            return {memory: float(memory.strip().removesuffix(unit)) for memory in memories}
    known = otherwise or {}
    return {memory: known.get(memory, float(index)) for index, memory in enumerate(memories)}


def set_ticks(axes: Any, x: Mapping[float, str], y: Sequence[float], write: Callable[[float], str]) -> None:
    """Set the ticks: those of x that do not overlap, and those of y with grid lines."""
    width = axes.get_window_extent().width
    low, high = axes.get_xlim()
    labels, last = [], -math.inf
    for value, text in sorted(x.items()):
        place = (value - low) / (high - low) * width
        labels.append(text if place - last > 7 * len(text) else "")
        last = place if labels[-1] else last
    axes.set_xticks(sorted(x), labels)
    axes.set_yticks(y, [write(value) for value in y])
    axes.set_ylim(y[0], y[-1])
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
