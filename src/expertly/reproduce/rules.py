"""The rules by which a direction holds or does not: each makes a Check of numbers, and says which numbers decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

from expertly.reproduce.finding import Check, show

Why = str | Callable[[], str]
"""The reason where it does not hold; a function is asked only then."""

Values = Mapping[str, float]


def best(
    claim: str, values: Values, name: str, *, lowest: bool, unit: str = "number", slack: float = 0.0, why: Why = ""
) -> Check:
    """`name` has the lowest (highest) of `values`, or is within `slack` of it, relative."""
    sign = 1 if lowest else -1
    own, others = values[name], {key: value for key, value in values.items() if key != name}
    holds = all(sign * own <= sign * value + slack * abs(value) for value in others.values())
    what = f"{name} is the {'lowest' if lowest else 'highest'}{_within(slack)}"
    return _check(claim, what, _listed(values, unit), holds, why)


def ranked(
    claim: str, values: Values, *, lowest: bool, unit: str = "number", slack: float = 0.0, why: Why = ""
) -> Check:
    """In the order of `values` each is at least as low (high) as the next, or within `slack` of it, relative."""
    sign = 1 if lowest else -1
    wrong = [(a, b) for a, b in pairwise(values) if sign * values[a] > sign * values[b] + slack * abs(values[b])]
    order = (" <= " if lowest else " >= ").join(values)
    return _check(claim, f"{order}{_within(slack)}", _listed(values, unit) + _pairs(wrong), not wrong, why)


def monotonic(
    claim: str, points: Values, *, rises: bool, unit: str = "number", slack: float = 0.0, why: Why = ""
) -> Check:
    """From point to point `points` rise (fall), or go back by at most `slack`, relative; and the last is above (below)
    the first.
    """
    sign = 1 if rises else -1
    steps = list(pairwise(points))
    wrong = [(a, b) for a, b in steps if sign * points[b] < sign * points[a] - slack * abs(points[a])]
    first, *_, last = points.values()
    holds = not wrong and sign * last > sign * first
    what = f"{'rises' if rises else 'falls'} from point to point{_within(slack)}, and from first to last"
    return _check(claim, what, _listed(points, unit) + _pairs(wrong), holds, why)


def compared(
    claim: str,
    one: tuple[str, float],
    other: tuple[str, float],
    *,
    above: bool,
    unit: str = "number",
    by: float = 0.0,
    why: Why = "",
) -> Check:
    """`one` is above (below) `other`; by at least `by`, absolute (negative: may be so much on the wrong side)."""
    gap = (one[1] - other[1]) * (1 if above else -1)
    margin = f" by {show(by, unit)} or more" if by > 0 else f", or at most {show(-by, unit)} away" if by < 0 else ""
    what = f"{one[0]} {'above' if above else 'below'} {other[0]}{margin}"
    holds = gap > by if by == 0 else gap >= by
    return _check(claim, what, _listed(dict([one, other]), unit), holds, why)


def between(claim: str, points: Values, *, lowest: bool, unit: str = "number", why: Why = "") -> Check:
    """The lowest (highest) of `points` is strictly better than both ends."""
    sign = 1 if lowest else -1
    inner = list(points)[1:-1]
    at = min(inner, key=lambda key: sign * points[key])
    first, last = next(iter(points)), list(points)[-1]
    holds = sign * points[at] < min(sign * points[first], sign * points[last])
    kind = "lowest" if lowest else "highest"
    measured = f"the {kind} between is at {at}; {_listed(points, unit)}"
    return _check(claim, f"the {kind} lies strictly between {first} and {last}", measured, holds, why)


def near_best(
    claim: str, points: Values, at: str, *, lowest: bool, unit: str = "number", slack: float, why: Why = ""
) -> Check:
    """The value at `at` is within `slack` of the lowest (highest) of all, relative."""
    sign = 1 if lowest else -1
    top = min(points, key=lambda key: sign * points[key])
    holds = sign * points[at] <= sign * points[top] + slack * abs(points[top])
    what = f"at {at} within {show(slack, 'share')} of the {'lowest' if lowest else 'highest'}"
    return _check(claim, what, f"the {'lowest' if lowest else 'highest'} at {top}; {_listed(points, unit)}", holds, why)


def within(
    claim: str, name: str, value: float, low: float, high: float, *, unit: str = "number", why: Why = ""
) -> Check:
    """`value` lies from `low` to `high`."""
    what = f"{name} from {show(low, unit)} to {show(high, unit)}"
    return _check(claim, what, f"{name} {show(value, unit)}", low <= value <= high, why)


def everywhere(claim: str, cases: Mapping[str, bool], rule: str, why: Why = "") -> Check:
    """A rule holds in every case; those where it does not are named."""
    wrong = [name for name, holds in cases.items() if not holds]
    measured = f"{len(cases) - len(wrong)} of {len(cases)}" + (f"; not: {', '.join(wrong)}" if wrong else "")
    return _check(claim, rule, measured, not wrong, why)


def _check(claim: str, rule: str, measured: str, holds: bool, why: Why) -> Check:
    reason = "" if holds else why if isinstance(why, str) else why()
    return Check(claim, rule, measured, bool(holds), reason)


def _within(slack: float) -> str:
    return f", to {show(slack, 'share')}" if slack else ""


def _listed(values: Values, unit: str) -> str:
    return ", ".join(f"{name} {show(value, unit)}" for name, value in values.items())


def _pairs(wrong: list[tuple[str, str]]) -> str:
    return "; against it: " + ", ".join(f"{a} and {b}" for a, b in wrong) if wrong else ""
