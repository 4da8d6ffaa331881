"""One style for all pictures, drawn by matplotlib into files or into a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from expertly.core.errors import ConfigError
from expertly.core.files import replacing

FORMATS = (".png", ".svg", ".pdf")

SYSTEMS = ("#0072b2", "#d55e00", "#009e73", "#b0548c", "#8a6d00", "#3aa0d8", "#7a5fb5")
"""Colours of systems, which can be told apart by the colour-blind (after Okabe and Ito)."""

BOUNDS = ("#7d8590", "#30363d", "#57606a", "#9aa3ab")

INK, SOFT, RULE = "#1a1d21", "#5a626c", "#d5dae0"

_STYLE: Any = {
    "font.size": 11,
    "text.color": INK,
    "text.parse_math": False,  # names of models and systems are text
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "grid.color": RULE,
    "lines.linewidth": 1.8,
    "lines.scale_dashes": False,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "expertly",  # the same picture is the same text
}


def check_plot(path: Path) -> None:
    """Raises ConfigError, before any work, where `path` cannot be written."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"plot={str(path)!r}: must end in {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"plot={str(path)!r}: {str(path.absolute().parent)!r} is not a folder")


@contextmanager
def drawing() -> Iterator[None]:
    """Draw in our style within this block; matplotlib's global settings are restored afterwards."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def save(figure: Any, path: Path) -> None:
    """Save in the format of the name's suffix. Raises ConfigError where it cannot be written."""
    try:
        with drawing(), replacing(path) as file:
            figure.savefig(file, dpi=150, format=path.suffix.removeprefix(".") or None)
    except OSError as error:
        raise ConfigError(f"plot={str(path)!r}: cannot be written ({error.strerror or error})") from None


def data_address(figure: Any) -> str:
    """The figure as the address of an image in a page, which holds it."""
    made = io.BytesIO()
    with drawing():
        figure.savefig(made, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(made.getvalue()).decode()}"


Marks = Mapping[str, dict[str, Any]]
"""The style of each system's or bound's line, the same in every plot."""


def marks_of(systems: Sequence[str], bounds: Sequence[str]) -> Marks:
    """A colour and a marker for each; a colour that comes again has another marker. Bounds are dashed."""
    marks: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(systems):
        marker = "osD^vPX"[(number + number // len(SYSTEMS)) % 7]
        marks[name] = {"color": SYSTEMS[number % len(SYSTEMS)], "marker": marker, "markersize": 5, "zorder": 3}
    for number, name in enumerate(bounds):
        dashes = ((7, 3), (2, 3), (9, 3, 2, 3), (4, 4))[number % 4]
        marks[name] = {"color": BOUNDS[number % 4], "linestyle": (0, dashes), "marker": ".", "zorder": 2}
    return marks


Lines = Mapping[str, Mapping[str, float]]
"""A figure by system and budget."""


def draw_panels(panels: Mapping[str, Lines], marks: Marks, title: str = "") -> Any:
    """A figure with a panel for each title: a line for each system, over the budgets. One legend is below."""
    from matplotlib.figure import Figure

    width = min(4, max(1, len(panels)))
    height = -(-max(1, len(panels)) // width)
    with drawing():
        figure: Any = Figure(figsize=(max(7.0, 5.0 * width), 4.0 * height + 0.8), layout="constrained")
        grid = figure.subplots(height, width, squeeze=False).flat
        for axes, (name, lines) in zip(grid, panels.items(), strict=False):
            places = _places(list(dict.fromkeys(memory for line in lines.values() for memory in line)))
            for system, line in lines.items():
                points = [(places[memory], value) for memory, value in line.items()]
                axes.plot(*zip(*points, strict=True), label=system, **marks[system])
            axes.set_xticks(list(places.values()), list(places))
            axes.set(title=name, xlabel="memory for experts")
            axes.set_ylim(bottom=0)
            axes.margins(y=0.08)
            axes.grid()
        for axes in figure.axes[len(panels) :]:
            axes.set_visible(False)
        handles: dict[str, Any] = {}
        for axes in figure.axes:
            drawn, labels = axes.get_legend_handles_labels()
            handles |= dict(zip(labels, drawn, strict=True))
        if handles:
            columns = min(6, len(handles), max(1, 65 * width // max(map(len, handles))))
            place = {"loc": "outside lower center", "ncols": columns, "handlelength": 3.5}
            figure.legend(handles.values(), handles.keys(), **place)
        if title:
            figure.suptitle(title)
    return figure


def _places(memories: Sequence[str]) -> dict[str, float]:
    """Where budgets lie on an axis: at their sizes where all are given the same way, else evenly."""
    for unit in ("%", "/layer"):
        if all(memory.strip().endswith(unit) for memory in memories):
            return {memory: float(memory.strip().removesuffix(unit)) for memory in memories}
    return {memory: float(index) for index, memory in enumerate(memories)}
