"""What was measured, request by request, and the rules by which a paper's claim holds: by intervals, and by size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise, product
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from scipy import stats

from expertly.core.units import format_nbytes, format_ratio, format_seconds, format_share

Floats = npt.NDArray[np.float64]
Interval = tuple[float, float]

HOLDS, IN_PART, OPPOSITE, UNTOLD = "holds", "in part", "opposite", "cannot be told"
"""Of a claim. The last: a 95 % interval has equality in it, or there are too few requests for one."""
LEAST_REQUESTS = 5
"""Of fewer no interval is made."""
DRAWS = 1000

FORMATS = {
    "share": format_share,
    "s": format_seconds,
    "bytes": format_nbytes,
    "x": format_ratio,
    "bits": "{:.2f}".format,
    "number": "{:.3g}".format,
}
"""By unit: shares are of one and printed in percent."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A quantity of each cell of an experiment's table."""

    name: str
    unit: str  # of FORMATS
    lower_is_better: bool = True


TPOT = Metric("TPOT", "s")
TTFT = Metric("TTFT", "s")
HITS = Metric("hit rate", "share", lower_is_better=False)
WAITING = Metric("waiting, of decode", "share")
LOADED = Metric("loaded a token", "bytes")
RIGHT = Metric("right, of predicted", "share", lower_is_better=False)
LATENCY = Metric("latency", "s")


def less(times: float) -> float:
    """The share of the time that is saved by what is so many times as fast."""
    return 1 - 1 / times


@dataclass(frozen=True)
class Sample:
    """A quantity as requests gave it: the sum of each over how much it counts; or a percentile of their means."""

    sums: Floats  # [requests]
    counts: Floats  # [requests]
    percent: int | None = None

    @classmethod
    def of(cls, values: Sequence[float] | Floats, percent: int | None = None) -> Sample:
        """One value a request."""
        return cls(np.asarray(values, np.float64), np.ones(len(values)), percent)

    @cached_property
    def value(self) -> float:
        return float(_statistic(self.percent, self.sums, self.counts))

    @cached_property
    def interval(self) -> Interval | None:
        """95 %, requests drawn anew; None of too few requests."""
        return _interval(partial(_statistic, self.percent), self.sums, self.counts)


def _statistic(percent: int | None, sums: Floats, counts: Floats, axis: int = -1) -> Any:
    if percent is None:
        return sums.sum(axis=axis) / counts.sum(axis=axis)
    return np.percentile(sums / counts, percent, axis=axis, method="inverted_cdf")


def _interval(statistic: Any, *arrays: Floats) -> Interval | None:
    """Of paired arrays [requests]; draws in which nothing counts tell nothing."""
    if len(arrays[0]) < LEAST_REQUESTS:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        draws = stats.bootstrap(
            arrays, statistic, paired=True, vectorized=True, n_resamples=DRAWS, method="percentile", random_state=0
        ).bootstrap_distribution
    known = draws[np.isfinite(draws)]
    if len(known) < DRAWS / 2:
        return None
    low, high = np.percentile(known, (2.5, 97.5))
    return float(low), float(high)


@dataclass(frozen=True)
class Cell:
    """What one system gave at one point of a sweep. `is_modelled`: its predictions were made up, right as often as
    ProMoE (section 4) found skip prediction to be.
    """

    samples: Mapping[str, Sample]  # by the metric's name
    facts: Mapping[str, Any] = field(default_factory=dict)
    is_modelled: bool = False


Cells = Mapping[tuple[str, str], Cell]
"""By point of the sweep ("" where there is none) and system."""


@dataclass(frozen=True, slots=True)
class Effect:
    """How much better the first of two cells is, relative: a time or size less by that share, a rate more."""

    label: str
    value: float
    interval: Interval | None
    paper: float | None = None  # the same there, as printed
    is_modelled: bool = False

    @property
    def verdict(self) -> str:
        if self.interval is None or self.interval[0] <= 0 <= self.interval[1]:
            return UNTOLD
        return HOLDS if self.value > 0 else OPPOSITE

    @property
    def share(self) -> float:
        """Of the paper's effect; infinite where the paper prints none."""
        return self.value / self.paper if self.paper else float("inf")

    def __str__(self) -> str:
        bounds = "" if self.interval is None else " [{:+.0f},{:+.0f}]".format(*(100 * x for x in self.interval))
        return f"{self.label}: {self.value:+.0%}{bounds}"


def effect(
    label: str, cells: tuple[Cell, Cell], metric: Metric, paper: float | None = None, *, is_less: bool | None = None
) -> Effect | None:
    """Of the first cell against the second, drawn together; None where either lacks the metric. `is_less`: the claim is
    that the first is lower; None: that it is better.
    """
    first, second = (cell.samples.get(metric.name) for cell in cells)
    if first is None or second is None:
        return None
    sign = 1 if (metric.lower_is_better if is_less is None else is_less) else -1

    def relative(a: Floats, b: Floats, c: Floats, d: Floats, axis: int = -1) -> Any:
        ratio = _statistic(first.percent, a, b, axis) / _statistic(second.percent, c, d, axis)
        return sign * (1 - ratio)

    arrays = (first.sums, first.counts, second.sums, second.counts)
    is_paired = len(first.sums) == len(second.sums)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(relative(*arrays))
    interval = _interval(relative, *arrays) if is_paired else None
    return Effect(label, value, interval, paper, any(cell.is_modelled for cell in cells))


@dataclass(frozen=True, slots=True)
class Verdict:
    """On one claim and one trace."""

    kind: str  # HOLDS, IN_PART, OPPOSITE or UNTOLD
    words: str  # the kind, and how large the effect is of the paper's
    effects: tuple[Effect, ...]

    @property
    def deciding(self) -> Effect:
        """The strongest against it, else the least that is for it."""
        against = [effect for effect in self.effects if effect.verdict == OPPOSITE]
        undecided = [effect for effect in self.effects if effect.verdict == UNTOLD]
        return min(against or undecided or self.effects, key=lambda effect: (effect.share, effect.value))


SIZES = {0.8: "", 0.6: "two thirds of", 0.42: "half of", 0.29: "a third of", 0.22: "a quarter of", 0.15: "a fifth of"}


def in_words(share: float) -> str:
    """How large an effect is of the paper's; "" where about as large, or where the paper prints none."""
    if share == float("inf"):
        return ""
    if share > 1.5:
        return f", {share:.1f} times the paper's effect"
    name = next((name for least, name in SIZES.items() if share >= least), None)
    if name is None:
        name = "a tenth of" if share >= 0.075 else "less than a tenth of"
    return name and f", {name} the paper's effect"


def verdict_of(effects: Sequence[Effect]) -> Verdict:
    """All of them must be there: one that is opposite decides, then one that cannot be told."""
    kinds = [effect.verdict for effect in effects]
    num_held = kinds.count(HOLDS)
    if num_held == len(kinds):
        kind, words = HOLDS, HOLDS + in_words(min(effect.share for effect in effects))
    elif OPPOSITE not in kinds:
        kind = words = UNTOLD
    elif num_held:
        kind, words = IN_PART, f"in part ({num_held} of {len(kinds)})"
    else:
        kind = words = OPPOSITE
    if any(effect.is_modelled for effect in effects):
        words += " (modelled)"
    return Verdict(kind, words, tuple(effects))


class Claim(Protocol):
    """What a paper says of an experiment's cells."""

    @property
    def text(self) -> str: ...

    @property
    def metric(self) -> Metric: ...

    def effects(self, cells: Cells) -> list[Effect]:
        """One for each comparison that must hold; none where the trace cannot tell (no prompts, no such system)."""


def _points(cells: Cells) -> list[str]:
    return list(dict.fromkeys(point for point, _ in cells))


@dataclass(frozen=True)
class Better:
    """`system` is better than each rival at each point (`at`: of these). `paper`: by how much, of rivals where it
    prints that; `than`: the rivals, all others by default.
    """

    text: str
    metric: Metric
    system: str
    paper: Mapping[str, float] = field(default_factory=dict)
    than: Sequence[str] | None = None
    at: Sequence[str] | None = None

    def effects(self, cells: Cells) -> list[Effect]:
        systems = list(dict.fromkeys(system for _, system in cells if system != self.system))
        rivals = [rival for rival in systems if self.than is None or rival in self.than]
        effects = []
        for point, rival in product(_points(cells), rivals):
            if (self.at is not None and point not in self.at) or not {(point, self.system), (point, rival)} <= {*cells}:
                continue
            label = f"{rival}, {point}" if point else rival
            pair = cells[point, self.system], cells[point, rival]
            effects.append(effect(label, pair, self.metric, self.paper.get(rival)))
        return [made for made in effects if made is not None]


@dataclass(frozen=True)
class Order:
    """From the best to the worst of these systems, at each point (`at`: of these)."""

    text: str
    metric: Metric
    systems: Sequence[str]
    at: Sequence[str] | None = None

    def effects(self, cells: Cells) -> list[Effect]:
        return [
            made
            for better, worse in pairwise(self.systems)
            for made in Better(self.text, self.metric, better, {}, (worse,), self.at).effects(cells)
        ]


@dataclass(frozen=True)
class Trend:
    """Of `system` the metric rises (falls) over the points of the sweep: from the first to the last, and never clearly
    goes back. `paper`: from first to last, relative.
    """

    text: str
    metric: Metric
    system: str
    rises: bool
    paper: float | None = None

    def effects(self, cells: Cells) -> list[Effect]:
        points = [point for point in _points(cells) if (point, self.system) in cells]
        steps = [(points[0], points[-1]), *pairwise(points)] if len(points) > 1 else []
        effects = []
        for number, (before, after) in enumerate(steps):
            pair = cells[after, self.system], cells[before, self.system]
            made = effect(
                f"{before} to {after}", pair, self.metric, None if number else self.paper, is_less=not self.rises
            )
            if made is not None and (not number or (len(steps) > 2 and made.verdict == OPPOSITE)):
                effects.append(made)
        return effects


@dataclass(frozen=True)
class Lowest:
    """Of `system` the metric is lowest strictly between the ends of the sweep."""

    text: str
    metric: Metric
    system: str

    def effects(self, cells: Cells) -> list[Effect]:
        cell_at = {point: cell for (point, system), cell in cells.items() if system == self.system}
        inner = [point for point in list(cell_at)[1:-1] if self.metric.name in cell_at[point].samples]
        if not inner:
            return []
        least = min(inner, key=lambda point: cell_at[point].samples[self.metric.name].value)
        first, *_, last = cell_at
        effects = [
            effect(f"{least} of {end}", (cell_at[least], cell_at[end]), self.metric, None, is_less=True)
            for end in (first, last)
        ]
        return [made for made in effects if made is not None]


@dataclass(frozen=True)
class Within:
    """A value lies from `low` to `high`, as the paper's do, with its whole interval."""

    text: str
    metric: Metric
    system: str
    low: float
    high: float
    at: Sequence[str] | None = None

    def effects(self, cells: Cells) -> list[Effect]:
        effects = []
        for (point, system), cell in cells.items():
            sample = cell.samples.get(self.metric.name)
            if system != self.system or sample is None or (self.at is not None and point not in self.at):
                continue
            effects += self._distances(f"{system}, {point}" if point else system, sample, cell.is_modelled)
        return effects

    def _distances(self, label: str, sample: Sample, is_modelled: bool) -> list[Effect]:
        """From each bound, of it; positive within."""
        value, interval = sample.value, sample.interval
        shown = f"{label} {FORMATS[self.metric.unit](value)}"
        effects = []
        for bound, sign in ((self.low, 1), (self.high, -1)):
            if bound in (0.0, float("inf")):
                continue
            distances = [sign * (x / bound - 1) for x in (value, *(interval or ()))]
            bounds = (min(distances[1:]), max(distances[1:])) if interval else None
            effects.append(Effect(shown, distances[0], bounds, None, is_modelled))
        return [min(effects, key=lambda made: made.value)]
