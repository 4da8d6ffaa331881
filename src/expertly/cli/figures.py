"""Plots: matplotlib is optional, imported when asked for, and draws into files only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from expertly.core.errors import ConfigError

FORMATS = (".png", ".svg", ".pdf")


def check_figure(path: Path) -> None:
    """Raises ConfigError before any work is done for a plot that could not be written."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"plot={str(path)!r}: must end in {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"plot={str(path)!r}: {str(path.absolute().parent)!r} is not a folder")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError("plot: matplotlib is not installed in this Python; `pip install 'expertly[plot]'`") from None


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure of so many inches. It has no window and touches no global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"plot={str(path)!r}: cannot be written ({error.strerror or error})") from None
