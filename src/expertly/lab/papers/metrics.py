"""What is measured of a run: a column of tables, rules over several runs, and why a claim of them does not hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from expertly.lab.papers import findings as rules
from expertly.lab.papers.findings import NEGLIGIBLE, Check, FindingTable, Told, Why, show
from expertly.lab.papers.runs import Lab, Row

# -- why a claim does not hold, worked out from the runs that decided ----------------------------------------------


def of_time(ours: Row, other: Row) -> str:
    """Why `ours` is not faster: bytes, wrong guesses, a busy link, lateness."""
    ratio = ours["bytes_loaded"] / max(1, other["bytes_loaded"])
    said = [f"{ours.system} loads {ratio:.2f}x the bytes of {other.system}"]
    if ours["prefetched_bytes"]:
        wasted = ours["wasted_bytes"] / ours["prefetched_bytes"]
        said.append(f"{show(wasted, 'share')} of what it loads ahead is not needed")
    if ours["timeliness"] is not None:
        said.append(f"of what is, {show(ours['timeliness'], 'share')} comes in time")
    said.append(f"the link is busy {show(other.link_share, 'share')} of {other.system}'s time already")
    return "; ".join(said)


def of_hits(ours: Row, other: Row) -> str:
    """Why `ours` does not hit more: what it foretells, and what of it is there."""
    said = []
    for row in (ours, other):
        if row["prediction_accuracy"] is None:
            said.append(f"{row.system} foretells nothing")
            continue
        named, right, there = (show(row[key], "share") for key in ("recall", "prediction_accuracy", "fetch_rate"))
        said.append(
            f"{row.system} names {named} of what is needed, {right} of what it names is right, {there} of it is there "
            "when the router speaks"
        )
    return "; ".join(said)


def of_prompts(*rows: Row) -> str:
    """What a prompt of each goes to."""
    said = []
    for row in rows:
        waiting = (row.waiting(False) or 0.0) * row.ttft_s
        said.append(
            f"{row.system} computes {show(row['ttft_s'] - waiting, 'ms')} and waits {show(waiting, 'ms')}",
        )
    return f"of a prompt {', '.join(said)}"


def of_steps(*rows: Row) -> str:
    """What a decode pass of each goes to, and what it waits for."""
    said = []
    for row in rows:
        waiting = (row.waiting(True) or 0.0) * row.tpot_s
        nbytes = row["bytes_loaded"] / max(1, len(row.passes_s)) / 1e6
        said.append(
            f"{row.system} ({row['memory']}) computes {show(row.tpot_s - waiting, 'ms')}, waits {show(waiting, 'ms')}, "
            f"loads {nbytes:.1f} MB a pass and hits {show(row['hit_rate'], 'share')}"
        )
    return "; ".join(said)


def of_categories(lab: Lab) -> str:
    """What the requests of a trace are of."""
    num = len({request.category for request in lab.trace.requests})
    return "one category" if num == 1 else f"{num} categories"


HALF = 0.5
"""Of an effect whose size is the claim: what must be there of the paper's, as machines and models differ."""

# -- what is measured of a row -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Metric:
    """A column of tables, and rules over rows of runs: they know the unit, which way is better, and the reason to give
    where a claim does not hold. Of what a trace has no values (prompts) there is no check.
    """

    header: str
    unit: str
    of: Callable[[Row], Any]
    lowest: bool = True  # is better
    reason: Callable[[Row, Row], str] = of_time  # of a row and of another that is better

    def values(self, rows: Mapping[Any, Row]) -> dict[str, Any]:
        return {str(label): self.of(row) for label, row in rows.items()}

    def best(
        self,
        claim: str,
        rows: Mapping[str, Row],
        name: str,
        why: Why | None = None,
        *,
        slack: float = -NEGLIGIBLE,
        paper: str = "",
    ) -> Check | None:
        """`name` has the best value."""
        return self._extreme(claim, rows, name, why, self.lowest, slack, paper)

    def worst(
        self, claim: str, rows: Mapping[str, Row], name: str, why: Why | None = None, *, paper: str = ""
    ) -> Check | None:
        return self._extreme(claim, rows, name, why, not self.lowest, 0.0, paper)

    def _extreme(
        self, claim: str, rows: Mapping[str, Row], name: str, why: Why | None, lowest: bool, slack: float, paper: str
    ) -> Check | None:
        values = self.values(rows)
        if None in values.values():
            return None
        winner = (min if lowest else max)(
            (key for key in values if key != name), key=lambda key: values[key], default=name
        )
        pair = (rows[name], rows[winner]) if lowest == self.lowest else (rows[winner], rows[name])
        reason = why or (lambda: self.reason(*pair))
        return rules.best(claim, values, name, reason, lowest=lowest, unit=self.unit, slack=slack, paper=paper)

    def ranked(
        self,
        claim: str,
        rows: Mapping[str, Row],
        why: Why | None = None,
        *,
        slack: float = 0.0,
        paper: str = "",
    ) -> Check:
        """From the best to the worst."""
        values, labels = self.values(rows), list(rows)

        def reason() -> str:
            told = [rules.compare(pair, values, lowest=self.lowest, slack=slack) for pair in pairwise(labels)]
            one, other = next(one.names for one in told if one.holds is False)
            return self.reason(rows[one], rows[other])

        return rules.ranked(claim, values, why or reason, lowest=self.lowest, unit=self.unit, slack=slack, paper=paper)

    def monotonic(
        self, claim: str, rows: Mapping[Any, Row], why: Why | None = None, *, rises: bool, slack: float = NEGLIGIBLE
    ) -> Check:
        """From row to row; the reason is what a decode pass of each goes to, where none is given."""
        reason = why or (lambda: of_steps(*rows.values()))
        return rules.monotonic(claim, self.values(rows), reason, rises=rises, unit=self.unit, slack=slack)

    def better(
        self,
        claim: str,
        rows: Mapping[str, Row],
        name: str,
        other: str,
        why: Why | None = None,
        *,
        by: float = 0.0,
        slack: float = -NEGLIGIBLE,
        paper: str = "",
    ) -> Check | None:
        """`name` is better than `other`, and not by next to nothing; or not worse by more than `slack`, relative."""
        values = self.values({one: rows[one] for one in (name, other)})
        if None in values.values():
            return None
        reason = why or (lambda: self.reason(rows[name], rows[other]))
        return rules.above(
            claim, values, reason, lowest=self.lowest, unit=self.unit, by=by, slack=0.0 if by else slack, paper=paper
        )

    def sizes(
        self, claim: str, rows: Mapping[str, Row], name: str, less: Mapping[str, float], why: Why | None = None
    ) -> list[Check | None]:
        """`name` is better than each other; `less`: by which share, in the paper."""
        word = "less" if self.lowest else "more"
        return [
            self.better(f"{claim} {other}", rows, name, other, why, paper=f"{show(share, 'share')} {word}")
            for other, share in less.items()
        ]

    def times(self, base: Row, header: str) -> Metric:
        """In units of what it is in `base`."""
        return Metric(header, "x", lambda row: None if self.of(row) is None else self.of(row) / self.of(base))

    def told(self, rows: Mapping[str, Row], name: str, slack: float = -NEGLIGIBLE) -> Told:
        """Of `everywhere`: whether `name` has the best value, compared with the best of the others."""
        values = self.values({label: row for label, row in rows.items() if label != name})
        other = (min if self.lowest else max)(values, key=lambda key: values[key])
        return rules.compare((name, other), self.values(rows), lowest=self.lowest, slack=slack)

    def everywhere(self, claim: str, found: Mapping[str, Mapping[str, Row]], name: str, *, paper: str = "") -> Check:
        """`name` has the best value in each of several runs."""
        cases = {at: self.told(rows, name) for at, rows in found.items()}

        def why() -> str:
            at = next(at for at, one in cases.items() if one.holds is False)
            return f"at {at}: {self.reason(found[at][name], found[at][cases[at].names[1]])}"

        rule = f"{'lowest' if self.lowest else 'highest'} {self.header}, by {show(NEGLIGIBLE, 'share')} or more"
        return rules.everywhere(claim, cases, rule, why, unit=self.unit, paper=paper)


TTFT = Metric("TTFT", "ms", lambda row: row.ttft_s, reason=of_prompts)
TPOT = Metric("TPOT", "ms", lambda row: row.tpot_s)
HITS = Metric("hit rate", "share", lambda row: row.hit_rate, lowest=False, reason=of_hits)
KEPT = Metric("kept", "share", lambda row: row.kept, lowest=False, reason=of_hits)
LOADED = Metric("loaded a pass", "MB", lambda row: row.loaded)
WAITING = Metric("waiting", "share", lambda row: row.waiting(True), reason=of_steps)
RIGHT = Metric("right, of named", "share", lambda row: row["prediction_accuracy"], lowest=False, reason=of_hits)


def table_of(title: str, rows: Mapping[Any, Row], *metrics: Metric, key: str = "") -> FindingTable:
    """A line a row: its label, then each metric."""
    columns = {key: ""} | {metric.header: metric.unit for metric in metrics}
    cells = [
        (f"{label} (modelled)" if row.is_modelled and isinstance(label, str) else label, *(m.of(row) for m in metrics))
        for label, row in rows.items()
    ]
    return FindingTable.of(title, columns, cells)


def grid(title: str, found: Mapping[Any, Mapping[str, Row]], metric: Metric, key: str) -> FindingTable:
    """A line for each of `found`, a column a system."""
    first = next(iter(found.values()))
    labels = [f"{label} (modelled)" if row.is_modelled else label for label, row in first.items()]
    cells = [(label, *(metric.of(row) for row in rows.values())) for label, rows in found.items()]
    return FindingTable.of(title, {key: "", **dict.fromkeys(labels, metric.unit)}, cells)
