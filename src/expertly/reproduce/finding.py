"""What an experiment found on one trace: tables of numbers, and checks of the paper's directions against them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Cell = float | int | str | None


@dataclass(frozen=True, slots=True)
class FindingTable:
    """Numbers as they were measured. `units` says of each column how it is shown: see UNITS."""

    title: str
    headers: tuple[str, ...]
    units: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @classmethod
    def of(cls, title: str, columns: Mapping[str, str], rows: Sequence[Sequence[Cell]]) -> FindingTable:
        """`columns`: the unit of each header."""
        return cls(title, tuple(columns), tuple(columns.values()), tuple(tuple(row) for row in rows))

    def shown(self) -> list[list[str]]:
        """The rows as text."""
        return [[show(cell, unit) for cell, unit in zip(row, self.units, strict=True)] for row in self.rows]


UNITS = ("", "share", "ms", "s", "us", "GiB", "MB", "x", "bits", "points", "number")
"""`share`: of one, shown in percent; `ms`, `us`: seconds, shown so; `GiB`, `MB`: bytes, shown so."""


def show(cell: Cell, unit: str = "") -> str:
    """One number as it is printed; a dash where there is none."""
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    formats = {
        "share": lambda x: f"{100 * x:.1f} %",
        "ms": lambda x: f"{1e3 * x:.2f} ms" if x < 0.1 else f"{1e3 * x:.0f} ms",
        "us": lambda x: f"{1e6 * x:.1f} us",
        "s": lambda x: f"{x:.2f} s",
        "GiB": lambda x: f"{x / (1 << 30):.2f} GiB",
        "MB": lambda x: f"{x / 1e6:.1f} MB",
        "x": lambda x: f"{x:.2f}x",
        "bits": lambda x: f"{x:.2f}",
        "points": lambda x: f"{100 * x:+.2f}",
        "number": lambda x: f"{x:.3g}",
    }
    return formats[unit](cell) if unit in formats else f"{cell}"


@dataclass(frozen=True, slots=True)
class Check:
    """One direction of the paper: whether it holds here, by which rule, on which numbers. Made by `rules` alone."""

    claim: str
    rule: str
    measured: str
    holds: bool
    why: str = ""  # where it does not hold


@dataclass(frozen=True, slots=True)
class Finding:
    """Of one experiment on one trace."""

    trace: str
    setting: str  # machine, sizes, memory, tokens
    tables: tuple[FindingTable, ...]
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()
    measured_on: str | None = None  # a machine whose clock was read; None: a virtual clock, or no times

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_dict(cls, given: Mapping[str, Any]) -> Finding:
        """What `as_dict` gave. Raises KeyError or TypeError where it did not."""
        tables = tuple(
            FindingTable.of(one["title"], dict(zip(one["headers"], one["units"], strict=True)), one["rows"])
            for one in given["tables"]
        )
        checks = tuple(Check(**one) for one in given["checks"])
        about = (given["trace"], given["setting"])
        return cls(*about, tables, checks, tuple(given["notes"]), given["measured_on"])


@dataclass(frozen=True, slots=True)
class Result:
    """Of one experiment: its findings, and why there is none on other traces."""

    name: str
    findings: tuple[Finding, ...]
    left_out: tuple[str, ...]
    seconds: float

    @property
    def num_checks(self) -> int:
        return sum(len(finding.checks) for finding in self.findings)

    @property
    def num_held(self) -> int:
        return sum(check.holds for finding in self.findings for check in finding.checks)

    @property
    def verdict(self) -> str:
        """`holds`, `in part (3 of 5)`, `does not hold`, or `not run`."""
        if not self.num_checks:
            return "not run" if not self.findings else "no direction"
        if self.num_held == self.num_checks:
            return "holds"
        return f"in part ({self.num_held} of {self.num_checks})" if self.num_held else "does not hold"

    def as_dict(self) -> dict[str, Any]:
        findings = [finding.as_dict() for finding in self.findings]
        about = {"name": self.name, "verdict": self.verdict, "checks": self.num_checks, "held": self.num_held}
        return about | {"findings": findings, "left_out": list(self.left_out), "seconds": self.seconds}

    @classmethod
    def of_dict(cls, given: Mapping[str, Any]) -> Result:
        """What `as_dict` gave. Raises KeyError or TypeError where it did not."""
        findings = tuple(map(Finding.of_dict, given["findings"]))
        return cls(given["name"], findings, tuple(given["left_out"]), float(given["seconds"]))
