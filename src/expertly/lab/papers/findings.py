"""What an experiment is, what it finds (tables of numbers), and the rules by which a claim of a paper holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from expertly.lab.papers.runs import Lab

HOLDS, FAILS, UNTOLD = "holds", "does not hold", "cannot be told"
"""Of a claim. The last: the 95 % interval of the difference, requests drawn anew, has equality in it."""
LEAST_REQUESTS = 5
"""Of fewer no interval is made, and the numbers as they are decide."""
DRAWS = 1000

Cell = float | int | str | None
Floats = npt.NDArray[np.float64]


class MeanOfRequests(float):
    """A mean, with the sum and the count of each request that it is of."""

    sums: Floats
    counts: Floats

    @classmethod
    def of(cls, value: float, sums: Floats, counts: Floats) -> MeanOfRequests:
        made = cls(value)
        made.sums, made.counts = sums, counts
        return made


FORMATS: dict[str, Callable[[Any], str]] = {
    "": str,
    "share": lambda x: f"{100 * x:.1f} %",
    "ms": lambda x: f"{1e3 * x:.2f} ms" if abs(x) < 0.1 else f"{1e3 * x:.0f} ms",
    "us": lambda x: f"{1e6 * x:.1f} us",
    "s": lambda x: f"{x:.2f} s",
    "GiB": lambda x: f"{x / (1 << 30):.2f} GiB",
    "MB": lambda x: f"{x / 1e6:.1f} MB",
    "x": lambda x: f"{x:.2f}x",
    "bits": lambda x: f"{x:.2f}",
    "points": lambda x: f"{100 * x:+.2f}",
    "number": lambda x: f"{x:.3g}",
}
"""By unit: shares are of one and shown in percent, times are in seconds, sizes in bytes."""


def show(cell: Cell, unit: str = "") -> str:
    """One number as it is printed; a dash where there is none."""
    return "-" if cell is None else cell if isinstance(cell, str) else FORMATS[unit](cell)


@dataclass(frozen=True, slots=True)
class FindingTable:
    """Numbers as they were measured. `units`: of each column, one of FORMATS."""

    title: str
    headers: tuple[str, ...]
    units: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @classmethod
    def of(cls, title: str, columns: Mapping[str, str], rows: Sequence[Sequence[Cell]]) -> FindingTable:
        """`columns`: the unit of each header."""
        plain = tuple(tuple(float(cell) if isinstance(cell, float) else cell for cell in row) for row in rows)
        return cls(title, tuple(columns), tuple(columns.values()), plain)

    def shown(self) -> list[list[str]]:
        """The rows as text."""
        return [[show(cell, unit) for cell, unit in zip(row, self.units, strict=True)] for row in self.rows]


@dataclass(frozen=True, slots=True)
class Check:
    """One claim of the paper: whether it holds here, by which rule, on which numbers."""

    claim: str
    rule: str
    measured: str
    verdict: str  # HOLDS, FAILS or UNTOLD
    why: str = ""  # where it does not hold


@dataclass(frozen=True, slots=True)
class Finding:
    """Of one experiment on one trace."""

    trace: str
    setting: str  # machine, sizes, memory, tokens, requests, seed
    tables: tuple[FindingTable, ...]
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()
    measured_on: str | None = None  # a machine whose clock was read; None: a virtual clock, or no times


@dataclass(frozen=True, slots=True)
class Experiment:
    """One figure or table of a paper, or a group of them that shares its runs."""

    paper: str  # of `runner.PAPERS`
    figures: tuple[str, ...]  # "4", "table-3", "B.1"; the first names it
    title: str
    shows: str  # what the paper shows, with its numbers as printed
    run: Callable[[Lab], Finding]
    needs: tuple[str, ...] = ()  # fields that the trace must really have; "prompts", "weights"
    most: int = 2  # traces that it runs on
    stand_in: bool = False  # also runs on routing made up for the paper's model
    is_timed: bool = False  # reads a real clock

    @property
    def name(self) -> str:
        return f"{self.paper}:{self.figures[0]}"

    @property
    def where(self) -> str:
        """The figures, as the paper calls them; the first and its parts, or its whole, count once."""
        first, *others = self.figures
        own = [first, *(one for one in others if not (one.startswith(first) or first.startswith(one)))]
        numbers = [one for one in own if one[0].isdigit() and "." not in one]
        label = f"figure{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}" if numbers else ""
        named = [one.replace("table-", "table ") for one in own if one.startswith("table-")]
        named += [f"section {one}" for one in own if "." in one]
        return ", ".join(filter(None, [label, *named])) or "not in the paper"


def experiment(
    name: str, *, also: tuple[str, ...] = (), **options: Any
) -> Callable[[Callable[[Lab], Finding]], Experiment]:
    """Makes an Experiment of the function below it, whose docstring is the title and what the paper shows. `name`:
    paper and figure, "fmoe:4"; `also`: further figures; `options`: of Experiment.
    """
    paper, _, figure = name.partition(":")

    def make(run: Callable[[Lab], Finding]) -> Experiment:
        title, _, shows = (run.__doc__ or "").partition("\n")
        return Experiment(paper, (figure, *also), title, " ".join(shows.split()), run, **options)

    return make


@dataclass(frozen=True, slots=True)
class Result:
    """Of one experiment: its findings, and why there is none on other traces."""

    name: str
    findings: tuple[Finding, ...]
    left_out: tuple[str, ...]
    seconds: float

    def count(self, verdict: str | None = None) -> int:
        """Claims with that verdict; all of them without."""
        every = [check.verdict for finding in self.findings for check in finding.checks]
        return len(every) if verdict is None else every.count(verdict)

    @property
    def verdict(self) -> str:
        """`holds`, `in part (3 of 5; 1 cannot be told)`, `does not hold`, `cannot be told` or `not run`."""
        num, held, untold = self.count(), self.count(HOLDS), self.count(UNTOLD)
        if not num:
            return "not run"
        if held in (0, num):
            return HOLDS if held else FAILS if self.count(FAILS) else UNTOLD
        return f"in part ({held} of {num}" + (f"; {untold} cannot be told)" if untold else ")")

    def as_dict(self) -> dict[str, Any]:
        about = {"name": self.name, "verdict": self.verdict, "checks": self.count(), "held": self.count(HOLDS)}
        findings = [asdict(finding) for finding in self.findings]
        return about | {"findings": findings, "left_out": list(self.left_out), "seconds": self.seconds}

    @classmethod
    def of_dict(cls, given: Mapping[str, Any]) -> Result:
        """What `as_dict` gave. Raises KeyError or TypeError where it did not."""
        findings = []
        for one in given["findings"]:
            tables = tuple(
                FindingTable.of(table["title"], dict(zip(table["headers"], table["units"], strict=True)), table["rows"])
                for table in one["tables"]
            )
            checks = tuple(Check(**check) for check in one["checks"])
            findings.append(Finding(**{**one, "tables": tables, "checks": checks, "notes": tuple(one["notes"])}))
        return cls(given["name"], tuple(findings), tuple(given["left_out"]), float(given["seconds"]))


# -- the rules ---------------------------------------------------------------------------------------------------

Why = str | Callable[[], str]
"""The reason where it does not hold; a function is asked only then."""
Values = Mapping[str, float]


class Told(NamedTuple):
    """One comparison of two numbers; None: it cannot be told."""

    names: tuple[str, str]
    holds: bool | None
    interval: tuple[float, float] | None  # of the first less the second, 95 %


def compare(
    names: tuple[str, str], values: Values, *, lowest: bool, slack: float = 0.0, by: float = 0.0, strict: bool = False
) -> Told:
    """Whether the first is at most (at least) the second, but for `slack`, relative, and `by`, absolute."""
    one, other = (values[name] for name in names)
    sign = 1 if lowest else -1
    margin = sign * (one - other) - slack * abs(other) + by
    holds = bool(margin < 0 if strict else margin <= 0)
    if not (isinstance(one, MeanOfRequests) and isinstance(other, MeanOfRequests)):
        return Told(names, holds, None)
    num = len(one.counts)
    if num != len(other.counts) or num < LEAST_REQUESTS:
        return Told(names, holds, None)
    weights = np.random.default_rng(0).multinomial(num, np.full(num, 1 / num), DRAWS).astype(np.float64)
    weights = weights[(weights @ one.counts > 0) & (weights @ other.counts > 0)]
    first, second = ((weights @ mean.sums) / (weights @ mean.counts) for mean in (one, other))
    least, most = np.percentile(sign * (first - second) - slack * np.abs(second) + by, (2.5, 97.5))
    low, high = np.percentile(first - second, (2.5, 97.5))
    return Told(names, None if least <= 0 <= most and least < most else holds, (float(low), float(high)))


def judged(claim: str, rule: str, measured: str, told: Sequence[Told], unit: str, why: Why) -> Check:
    """Of several comparisons that must all hold: one that does not decides, then one that cannot be told."""
    pairs = [one for one in told if one.holds is False] or [one for one in told if one.holds is None]
    verdict = HOLDS if not pairs else FAILS if pairs[0].holds is False else UNTOLD
    said = ", ".join(" and ".join(one.names) + _interval(one, unit) for one in pairs)
    if pairs and len(told) > 1:
        measured += f"; {'against it' if verdict == FAILS else 'not told apart'}: {said}"
    elif len(told) == 1:
        measured += _interval(told[0], unit)
    return Check(claim, rule, measured, verdict, _reason(why) if verdict == FAILS else "")


def _reason(why: Why) -> str:
    return why if isinstance(why, str) else why()


def _interval(one: Told, unit: str) -> str:
    if one.interval is None:
        return ""
    low, high = one.interval
    return f" (difference {show(low, unit)} to {show(high, unit)})"


def best(
    claim: str, values: Values, name: str, why: Why, *, lowest: bool, unit: str = "number", slack: float = 0.0
) -> Check:
    """`name` has the lowest (highest) of `values`, or is within `slack` of it, relative."""
    told = [compare((name, other), values, lowest=lowest, slack=slack) for other in values if other != name]
    rule = f"{name} is the {'lowest' if lowest else 'highest'}{_within(slack)}"
    return judged(claim, rule, listed(values, unit), told, unit, why)


def ranked(claim: str, values: Values, why: Why, *, lowest: bool, unit: str = "number", slack: float = 0.0) -> Check:
    """In the order of `values` each is at least as low (high) as the next, or within `slack` of it, relative."""
    told = [compare(pair, values, lowest=lowest, slack=slack) for pair in pairwise(values)]
    rule = f"{(' <= ' if lowest else ' >= ').join(values)}{_within(slack)}"
    return judged(claim, rule, listed(values, unit), told, unit, why)


def monotonic(claim: str, points: Values, why: Why, *, rises: bool, unit: str = "number", slack: float = 0.0) -> Check:
    """From point to point `points` rise (fall), or go back by at most `slack`, relative; and the last is above (below)
    the first.
    """
    told = [compare((b, a), points, lowest=not rises, slack=slack) for a, b in pairwise(points)]
    first, *_, last = points
    told.append(compare((last, first), points, lowest=not rises, strict=True))
    rule = f"{'rises' if rises else 'falls'} from point to point{_within(slack)}, and from first to last"
    return judged(claim, rule, listed(points, unit), told, unit, why)


def above(claim: str, pair: Values, why: Why, *, unit: str = "number", by: float = 0.0) -> Check:
    """The first of two values is above the second; by at least `by`, absolute (negative: may be so much below)."""
    return _compared(claim, pair, why, False, unit, by)


def below(claim: str, pair: Values, why: Why, *, unit: str = "number", by: float = 0.0) -> Check:
    """As `above`, the other way round."""
    return _compared(claim, pair, why, True, unit, by)


def _compared(claim: str, pair: Values, why: Why, lowest: bool, unit: str, by: float) -> Check:
    one, other = pair
    margin = f" by {show(by, unit)} or more" if by > 0 else f", or at most {show(-by, unit)} away" if by < 0 else ""
    rule = f"{one} {'below' if lowest else 'above'} {other}{margin}"
    told = compare((one, other), pair, lowest=lowest, by=by, strict=by == 0)
    return judged(claim, rule, listed(pair, unit), [told], unit, why)


def between(claim: str, points: Values, why: Why, *, unit: str = "number") -> Check:
    """The lowest of `points` is strictly better than both ends."""
    first, *inner, last = points
    at = min(inner, key=lambda key: points[key])
    told = [compare((at, end), points, lowest=True, strict=True) for end in (first, last)]
    measured = f"the lowest between is at {at}; {listed(points, unit)}"
    return judged(claim, f"the lowest lies strictly between {first} and {last}", measured, told, unit, why)


def within(claim: str, name: str, value: float, low: float, high: float, why: Why, *, unit: str = "number") -> Check:
    """`value` lies from `low` to `high`."""
    rule = f"{name} from {show(low, unit)} to {show(high, unit)}"
    told = [Told((name, "the bounds"), bool(low <= value <= high), None)]
    return judged(claim, rule, f"{name} {show(value, unit)}", told, unit, why)


def everywhere(claim: str, cases: Mapping[str, bool | Told], rule: str, why: Why) -> Check:
    """A rule holds in every case; those where it does not are named."""
    verdicts = {name: one.holds if isinstance(one, Told) else bool(one) for name, one in cases.items()}
    wrong = [name for name, holds in verdicts.items() if holds is False]
    untold = [name for name, holds in verdicts.items() if holds is None]
    measured = f"{len(cases) - len(wrong) - len(untold)} of {len(cases)}"
    measured += f"; not: {', '.join(wrong)}" if wrong else ""
    measured += f"; cannot be told: {', '.join(untold)}" if untold else ""
    verdict = FAILS if wrong else UNTOLD if untold else HOLDS
    return Check(claim, rule, measured, verdict, _reason(why) if wrong else "")


def _within(slack: float) -> str:
    return f", to {show(slack, 'share')}" if slack else ""


def listed(values: Values, unit: str) -> str:
    return ", ".join(f"{name} {show(value, unit)}" for name, value in values.items())
