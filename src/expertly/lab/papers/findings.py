"""What an experiment is, what it finds (tables of numbers), and the rules by which a claim of a paper holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from expertly.core.units import format_nbytes, format_ratio, format_seconds, format_share
from expertly.lab.papers.measured import Estimate

if TYPE_CHECKING:
    from expertly.lab.papers.runs import Lab
    from expertly.policies.learned import LearnedState

HOLDS, FAILS, UNTOLD = "holds", "does not hold", "cannot be told"
"""Of a claim. The last: the 95 % interval of the difference, requests drawn anew, has equality in it, or there are too
few requests for one.
"""
TAKEN = ("system", "hardware", "memory")
"""Options by which an experiment is changed: systems beside the paper's, which no claim counts; one machine and one
budget instead of its own.
"""
NEGLIGIBLE = 0.01
"""Relative: a difference counts from there on."""

Cell = float | int | str | tuple[float, float, float] | None
"""Three numbers are a value and its interval."""


FORMATS: dict[str, Callable[[Any], str]] = {
    "": str,
    "share": format_share,
    **dict.fromkeys(("us", "ms", "s"), format_seconds),
    **dict.fromkeys(("MB", "GiB"), format_nbytes),
    "x": format_ratio,
    "bits": "{:.2f}".format,
    "points": lambda x: f"{100 * x:+.2f}",
    "number": "{:.3g}".format,
}
"""By unit: shares are of one and shown in percent, times are in seconds, sizes in bytes."""


def show(cell: Cell, unit: str = "") -> str:
    """One number as it is printed, its interval in brackets; a dash where there is none."""
    if isinstance(cell, Estimate):
        cell = _plain(cell)
    if isinstance(cell, tuple):
        value, *interval = (show(one, unit) for one in cell)
        name = value.lstrip("+-.0123456789")  # of the unit, said once
        return f"{value} [{', '.join(one.removesuffix(name) for one in interval)}]"
    return "-" if cell is None else cell if isinstance(cell, str) else FORMATS[unit](cell)


def _plain(cell: Any) -> Cell:
    """A cell without draws, and as JSON gives it back."""
    if isinstance(cell, Estimate) and cell.interval is not None:
        return float(cell), *cell.interval
    return tuple(cell) if isinstance(cell, list) else float(cell) if isinstance(cell, float) else cell


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
        plain = tuple(tuple(map(_plain, row)) for row in rows)
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
    paper: str = ""  # the size of the effect there, as printed
    size: str = ""  # of the effect here, where it decides: the least that holds, or the largest against it
    is_modelled: bool = False  # of predictions that were made up, right as often as another paper found


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

    paper: str  # its name
    figures: tuple[str, ...]  # "4", "table-3", "B.1"; the first names it
    title: str
    shows: str  # what the paper shows, with its numbers as printed
    run: Callable[[Lab], Finding]
    takes: tuple[str, ...] = ()  # of TAKEN: what it honours of what a user asks for instead of the paper's
    weights: tuple[type[LearnedState], ...] = ()  # of its own trained predictors, whose files --predictor gives
    needs: tuple[str, ...] = ()  # fields that the trace must really have; "prompts", "weights"
    most: int = 2  # traces that it runs on
    stand_in: str = ""  # made-up routing that it also runs on: `moepic.STAND_IN` or `recorded.SWITCH`
    is_timed: bool = False  # reads a real clock
    is_long: bool = False  # so long that it should not begin last

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


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper's experiments, in its order. `name` is what users call it."""

    name: str
    title: str
    experiments: list[Experiment] = field(default_factory=list)

    def experiment(self, *figures: str, **options: Any) -> Callable[[Callable[[Lab], Finding]], Experiment]:
        """Makes an Experiment of the function below it, whose docstring is the title and what the paper shows.
        `options`: of Experiment.
        """

        def make(run: Callable[[Lab], Finding]) -> Experiment:
            title, _, shows = (run.__doc__ or "").partition("\n")
            made = Experiment(self.name, figures, title, " ".join(shows.split()), run, **options)
            self.experiments.append(made)
            return made

        return make

    def called(self, name: str) -> Paper:
        """The same under another name."""
        return Paper(name, self.title, [replace(one, paper=name) for one in self.experiments])


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

    def claims(self) -> dict[str, list[tuple[Finding, Check]]]:
        """Each claim, with what was found of it on each trace."""
        claims: dict[str, list[tuple[Finding, Check]]] = {}
        for finding in self.findings:
            for check in finding.checks:
                claims.setdefault(check.claim, []).append((finding, check))
        return claims

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


@dataclass(frozen=True, slots=True)
class OfPair:
    """A reason that is of the two, by their names, that differ most of those that decide."""

    tell: Callable[[str, str], str]


Why = str | Callable[[], str] | OfPair
"""The reason where it does not hold; a function is asked only then."""
Values = Mapping[str, float]


class Told(NamedTuple):
    """One comparison of two numbers; None: it cannot be told."""

    names: tuple[str, str]
    holds: bool | None
    values: tuple[float, float]
    is_modelled: bool = False  # one of them, or both

    def size(self, unit: str) -> str:
        """Of the effect: how many times the second the first is; of shares, by how many points they differ, too."""
        one, other = self.values
        if not (isinstance(one, Estimate) or isinstance(other, Estimate)):
            return ""
        less, times = f"{' less '.join(self.names)}: ", show(one / other, "x") if float(other) > 0 else ""
        if unit == "share":
            return f"{less}{show(one - other, 'points')} points" + (times and f", {times}")
        return f"{' of '.join(self.names)}: {times}" if times else less + show(one - other, unit)

    def in_brackets(self, unit: str) -> str:
        size = self.size(unit)
        return size and f" ({size})"

    def distance(self, unit: str) -> float:
        """From equality: absolute of shares, else relative where it can be."""
        one, other = map(float, self.values)
        return abs(one - other) / (1 if unit == "share" or other <= 0 else other)


def decisive(told: Sequence[Told], unit: str) -> Told | None:
    """The comparison that decides a claim: the largest that does not hold, else the largest that cannot be told, else
    the least that holds.
    """
    for verdict in (False, None):
        if some := [one for one in told if one.holds is verdict]:
            return max(some, key=lambda one: one.distance(unit))
    return min(told, key=lambda one: one.distance(unit), default=None)


def compare(
    names: tuple[str, str], values: Values, *, lowest: bool, slack: float = 0.0, by: float = 0.0, strict: bool = False
) -> Told:
    """Whether the first is at most (at least) the second, but for `slack`, relative (negative: by so much and more),
    and `by`, absolute. Of what was measured the interval of the difference must be clear of that.
    """
    one, other = (values[name] for name in names)
    margin = (one - other if lowest else other - one) - slack * abs(other) + by
    holds: bool | None = margin < 0 if strict else margin <= 0
    if isinstance(margin, Estimate):
        interval = margin.interval
        if interval is None or (interval[0] <= 0 <= interval[1] and interval[0] < interval[1]):
            holds = None
    return Told(names, holds, (one, other))


def judged(claim: str, rule: str, measured: str, told: Sequence[Told], unit: str, why: Why, paper: str = "") -> Check:
    """Of several comparisons that must all hold: one that does not decides, then one that cannot be told. Sizes are
    given of those that decide; where all hold, of the nearest.
    """
    pairs = [one for one in told if one.holds is False] or [one for one in told if one.holds is None]
    verdict = HOLDS if not pairs else FAILS if pairs[0].holds is False else UNTOLD
    deciding = decisive(told, unit)
    if pairs and len(told) > 1:
        said = ", ".join(" and ".join(one.names) + one.in_brackets(unit) for one in pairs)
        measured += f"; {'against it' if verdict == FAILS else 'not told apart'}: {said}"
    elif deciding:
        measured += deciding.in_brackets(unit)
    size = deciding.size(unit) if deciding else ""
    return Check(claim, rule, measured, verdict, reason_of(why, pairs) if verdict == FAILS else "", paper, size)


def reason_of(why: Why, told: Sequence[Told] = ()) -> str:
    if isinstance(why, OfPair):
        return why.tell(*max(told, key=lambda one: abs(float(one.values[0]) - float(one.values[1]))).names)
    return why if isinstance(why, str) else why()


def best(
    claim: str,
    values: Values,
    name: str,
    why: Why,
    *,
    lowest: bool,
    unit: str = "number",
    slack: float = 0.0,
    paper: str = "",
) -> Check:
    """`name` has the lowest (highest) of `values`, or is within `slack` of it, relative; negative: by so much."""
    told = [compare((name, other), values, lowest=lowest, slack=slack) for other in values if other != name]
    rule = f"{name} is the {'lowest' if lowest else 'highest'}{_within(slack)}"
    return judged(claim, rule, listed(values, unit), told, unit, why, paper)


def ranked(
    claim: str,
    values: Values,
    why: Why,
    *,
    lowest: bool,
    unit: str = "number",
    slack: float = 0.0,
    strict: bool = False,
    paper: str = "",
) -> Check:
    """In the order of `values` each is at least as low (high) as the next (`strict`: lower), or within `slack` of it,
    relative.
    """
    told = [compare(pair, values, lowest=lowest, slack=slack, strict=strict) for pair in pairwise(values)]
    sign = ("<" if lowest else ">") + "=" * (not strict)
    rule = f"{f' {sign} '.join(values)}{_within(slack)}"
    return judged(claim, rule, listed(values, unit), told, unit, why, paper)


def monotonic(
    claim: str, points: Values, why: Why, *, rises: bool, unit: str = "number", slack: float = 0.0, paper: str = ""
) -> Check:
    """From point to point `points` rise (fall), or go back by at most `slack`, relative; and the last is above (below)
    the first.
    """
    told = [compare((b, a), points, lowest=not rises, slack=slack) for a, b in pairwise(points)]
    first, *_, last = points
    told.append(compare((last, first), points, lowest=not rises, strict=True))
    rule = f"{'rises' if rises else 'falls'} from point to point{_within(slack)}, and from first to last"
    return judged(claim, rule, listed(points, unit), told, unit, why, paper)


def above(
    claim: str,
    pair: Values,
    why: Why,
    *,
    unit: str = "number",
    by: float = 0.0,
    slack: float = 0.0,
    lowest: bool = False,
    paper: str = "",
) -> Check:
    """The first of two values is above (`lowest`: below) the second; by at least `by`, absolute (negative: may be so
    much away), and but for `slack`, relative, as in `compare`.
    """
    one, other = pair
    margin = f" by {show(by, unit)} or more" if by > 0 else f", or at most {show(-by, unit)} away" if by < 0 else ""
    rule = f"{one} {'below' if lowest else 'above'} {other}{margin}{_within(slack)}"
    told = compare((one, other), pair, lowest=lowest, by=by, slack=slack, strict=by == 0)
    return judged(claim, rule, listed(pair, unit), [told], unit, why, paper)


below = partial(above, lowest=True)
"""As `above`, the other way round."""


def same(claim: str, pair: Values, why: Why, *, margin: float, unit: str = "number", paper: str = "") -> Check:
    """Two values are within `margin` of each other, relative to the second: its whole interval is. A difference that
    could be that large cannot be told.
    """
    one, other = pair
    told = [compare((one, other), pair, lowest=lowest, slack=margin) for lowest in (True, False)]
    rule = f"{one} within {show(margin, 'share')} of {other}"
    decides = min(told, key=lambda one: 2 if one.holds else 1 if one.holds is None else 0)
    return judged(claim, rule, listed(pair, unit), [decides], unit, why, paper)


def between(claim: str, points: Values, why: Why, *, unit: str = "number") -> Check:
    """The lowest of `points` is strictly better than both ends."""
    first, *inner, last = points
    at = min(inner, key=lambda key: points[key])
    told = [compare((at, end), points, lowest=True, strict=True) for end in (first, last)]
    measured = f"the lowest between is at {at}; {listed(points, unit)}"
    return judged(claim, f"the lowest lies strictly between {first} and {last}", measured, told, unit, why)


def within(
    claim: str, name: str, value: float, low: float, high: float, why: Why, *, unit: str = "number", paper: str = ""
) -> Check:
    """`value` lies from `low` to `high`, with its whole interval."""
    values = {name: value, "the least": low, "the most": high}
    told = [
        compare((name, bound), values, lowest=lowest) for bound, lowest in (("the least", False), ("the most", True))
    ]
    wrong = [one for one in told if one.holds is not True]
    rule = f"{name} from {show(low, unit)} to {show(high, unit)}"
    check = judged(claim, rule, "", wrong, unit, why, paper)
    return replace(check, measured=f"{name} {show(value, unit)}", size=f"{name} {show(value, unit)}")


def everywhere(
    claim: str,
    cases: Mapping[str, bool | Told],
    rule: str,
    why: Why,
    *,
    unit: str = "number",
    mostly: bool = False,
    paper: str = "",
) -> Check:
    """A rule holds in every case (`mostly`: in more than half of them); those where it does not are named."""
    verdicts = {name: one.holds if isinstance(one, Told) else bool(one) for name, one in cases.items()}
    parts = {value: [name for name, holds in verdicts.items() if holds is value] for value in (True, False, None)}

    def named(names: list[str]) -> str:
        sizes = ((name, cases[name]) for name in names)
        return ", ".join(name + (one.in_brackets(unit) if isinstance(one, Told) else "") for name, one in sizes)

    measured = f"{len(parts[True])} of {len(cases)}"
    if any(isinstance(one, Told) for one in cases.values()):
        measured += f": {named(parts[True])}" if parts[True] else ""
    measured += f"; not: {named(parts[False])}" if parts[False] else ""
    measured += f"; cannot be told: {named(parts[None])}" if parts[None] else ""
    allowed = (len(cases) - 1) // 2 if mostly else 0
    is_wrong = len(parts[False]) > allowed
    verdict = FAILS if is_wrong else UNTOLD if len(parts[False]) + len(parts[None]) > allowed else HOLDS
    counted = {HOLDS: True, FAILS: False, UNTOLD: None}[verdict]
    told = {name: one for name, one in cases.items() if isinstance(one, Told) and one.holds is counted}
    deciding = decisive(list(told.values()), unit)
    size = next((f"{name}: {one.size(unit)}" for name, one in told.items() if one is deciding), "")
    is_modelled = any(isinstance(one, Told) and one.is_modelled for one in cases.values())
    why = reason_of(why) if is_wrong else ""
    return Check(claim, rule, measured, verdict, why, paper, size or measured, is_modelled)


def _within(slack: float) -> str:
    return "" if not slack else f", to {show(slack, 'share')}" if slack > 0 else f", by {show(-slack, 'share')} or more"


def listed(values: Values, unit: str) -> str:
    return ", ".join(f"{name} {show(value, unit)}" for name, value in values.items())
