"""What is measured of a run: a column of tables, rules over several runs, and why a claim of them does not hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from expertly.core.units import format_nbytes
from expertly.lab.papers import findings as rules
from expertly.lab.papers.findings import NEGLIGIBLE, Check, FindingTable, OfPair, Told, Why, show
from expertly.lab.papers.runs import FASTER_LINK, Lab, Row

# -- why a claim does not hold, worked out from the runs that decided ----------------------------------------------


def of_time(ours: Row, other: Row) -> str:
    """Why `ours` is not faster: bytes, wrong guesses, a busy link, lateness; and whether the link is to blame."""
    ratio = ours["bytes_loaded"] / max(1, other["bytes_loaded"])
    said = [f"{ours.name} loads {ratio:.2f}x the bytes of {other.name}"]
    if ours["prefetched_bytes"]:
        wasted = ours["wasted_bytes"] / ours["prefetched_bytes"]
        said.append(f"{show(wasted, 'share')} of what it prefetches is not used")
    if ours["timeliness"] is not None:
        said.append(f"of what is, {show(ours['timeliness'], 'share')} arrives in time")
    said.append(f"the link is busy {show(other.link_share, 'share')} of {other.name}'s time already")
    tried = on_faster_link(ours, other)
    if len(tried) == 2:
        before, after = (show(one.tpot_s / two.tpot_s, "x") for one, two in ((ours, other), tried))
        said.append(f"{ON_FASTER_LINK} it takes {after} of {other.name}'s TPOT, where it took {before}")
    if less_right := _less_right(ours, other):
        ratio = show(ours.tpot_s / less_right.tpot_s, "x")
        said.append(f"{_as_right(ours, other)} {ours.name} takes {ratio} of its TPOT")
    return "; ".join(said)


ON_FASTER_LINK = f"tried with a link {FASTER_LINK} times as fast,"


def on_faster_link(*rows: Row) -> list[Row]:
    """Those of them that can be run on one."""
    return [replace(row.on_faster_link(), label=row.label) for row in rows if row.on_faster_link]


def of_hits(ours: Row, other: Row) -> str:
    """Why `ours` does not hit more: what it predicts, and what of it is resident in time."""
    said = []
    for row in (ours, other):
        if row["prediction_accuracy"] is None:
            said.append(f"{row.name} predicts nothing")
            continue
        named, right, there = (show(row[key], "share") for key in ("recall", "prediction_accuracy", "fetch_rate"))
        said.append(
            f"{row.name} predicts {named} of what is needed, {right} of what it predicts is right, {there} of it is "
            "resident when the router runs"
        )
    tried = on_faster_link(ours, other)
    if len(tried) == 2:
        hits = " and ".join(f"{one.name} {show(one.hit_rate, 'share')}" for one in tried)
        said.append(f"{ON_FASTER_LINK} {hits} are hits")
    if less_right := _less_right(ours, other):
        said.append(f"{_as_right(ours, other)} {show(less_right.hit_rate, 'share')} are hits")
    return "; ".join(said)


def _less_right(ours: Row, other: Row) -> Row | None:
    """`other` with the accuracy of `ours`, where its prediction is modelled and that of `ours` is not."""
    accuracy = ours["prediction_accuracy"]
    return None if other.as_right_as is None or ours.is_modelled or not accuracy else other.as_right_as(float(accuracy))


def _as_right(ours: Row, other: Row) -> str:
    return f"tried with modelled predictions of {other.name} that have the accuracy of {ours.name},"


def of_prompts(*rows: Row) -> str:
    """What a prompt of each goes to, and of the first and the last with a faster link."""

    def parts(row: Row) -> str:
        waiting = (row.waiting(False) or 0.0) * row.ttft_s
        return f"{row.name} computes {show(row.ttft_s - waiting, 'ms')} and waits {show(waiting, 'ms')}"

    return f"of a prompt {', '.join(map(parts, rows))}{_tried(rows, parts)}"


def _tried(rows: Sequence[Row], parts: Callable[[Row], str]) -> str:
    tried = on_faster_link(rows[0], *rows[1:][-1:])
    return f"; {ON_FASTER_LINK} {' and '.join(map(parts, tried))}" if tried else ""


def of_steps(*rows: Row) -> str:
    """What a decode pass of each goes to, and what it waits for; of the first and the last with a faster link, too."""

    def times(row: Row) -> str:
        waiting = (row.waiting(True) or 0.0) * row.tpot_s
        computes = show(row.tpot_s - waiting, "ms")
        return f"{row.name} ({row['memory']}) computes {computes}, waits {show(waiting, 'ms')}"

    def parts(row: Row) -> str:
        nbytes = row["bytes_loaded"] / max(1, len(row.passes_s))
        return f"{times(row)}, loads {format_nbytes(nbytes)} a pass and hits {show(row['hit_rate'], 'share')}"

    return f"{'; '.join(map(parts, rows))}{_tried(rows, times)}"


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
        slack: float = -NEGLIGIBLE,
        **told: Any,
    ) -> Check | None:
        """`name` has the best value."""
        return self._judged(rules.best, claim, rows, name, why=why, lowest=self.lowest, slack=slack, **told)

    def worst(self, claim: str, rows: Mapping[str, Row], name: str) -> Check | None:
        why = OfPair(lambda one, other: self.reason(rows[other], rows[one]))
        return self._judged(rules.best, claim, rows, name, why=why, lowest=not self.lowest)

    def ranked(self, claim: str, rows: Mapping[str, Row], why: Why, **told: Any) -> Check | None:
        """From the best to the worst."""
        return self._judged(rules.ranked, claim, rows, why=why, lowest=self.lowest, **told)

    def monotonic(self, claim: str, rows: Mapping[Any, Row], why: Why | None = None, **told: Any) -> Check | None:
        """From row to row; the reason is what a decode pass of each goes to, where none is given."""
        why = why or (lambda: of_steps(*rows.values()))
        return self._judged(rules.monotonic, claim, rows, why=why, **{"slack": NEGLIGIBLE, **told})

    def better(
        self, claim: str, rows: Mapping[str, Row], name: str, other: str, why: Why | None = None, **told: Any
    ) -> Check | None:
        """`name` is better than `other`, and not by next to nothing."""
        pair = {one: rows[one] for one in (name, other)}
        return self._judged(rules.above, claim, pair, why=why, lowest=self.lowest, slack=-NEGLIGIBLE, **told)

    def _judged(
        self, rule: Callable[..., Check], claim: str, rows: Mapping[Any, Row], *names: str, why: Why | None, **told: Any
    ) -> Check | None:
        """What a rule finds of the values; without a reason, it is that of the two rows that decide."""
        values, by_label = self.values(rows), {str(label): row for label, row in rows.items()}
        if None in values.values():
            return None
        why = why or OfPair(lambda one, other: self.reason(by_label[one], by_label[other]))
        check = rule(claim, values, *names, why, unit=self.unit, **told)
        return replace(check, is_modelled=any(row.is_modelled for row in rows.values()))

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
        told = rules.compare((name, other), self.values(rows), lowest=self.lowest, slack=slack)
        return told._replace(is_modelled=any(row.is_modelled for row in rows.values()))

    def everywhere(
        self,
        claim: str,
        found: Mapping[Any, Mapping[str, Row]],
        name: str,
        *,
        paper: str = "",
        also: Callable[[Any, Row], str] = lambda at, better: "",
    ) -> Check | None:
        """`name` has the best value in each of several runs. `also`: what else is to be said where it does not, given
        which run and what is better there.
        """
        if any(None in self.values(rows).values() for rows in found.values()):
            return None
        cases = {str(at): self.told(rows, name) for at, rows in found.items()}

        def why() -> str:
            at, rows = next((at, rows) for at, rows in found.items() if cases[str(at)].holds is False)
            better = rows[cases[str(at)].names[1]]
            return f"at {at}: {self.reason(rows[name], better)}{also(at, better)}"

        rule = f"{'lowest' if self.lowest else 'highest'} {self.header}, by {show(NEGLIGIBLE, 'share')} or more"
        return rules.everywhere(claim, cases, rule, why, unit=self.unit, paper=paper)


TTFT = Metric("TTFT", "ms", lambda row: row.ttft_s, reason=of_prompts)
TPOT = Metric("TPOT", "ms", lambda row: row.tpot_s)
HITS = Metric("hit rate", "share", lambda row: row.hit_rate, lowest=False, reason=of_hits)
KEPT = Metric("kept", "share", lambda row: row.kept, lowest=False, reason=of_hits)
LOADED = Metric("loaded a pass", "MB", lambda row: row.loaded)
WAITING = Metric("waiting", "share", lambda row: row.waiting(True), reason=of_steps)
RIGHT = Metric("right, of named", "share", lambda row: row["prediction_accuracy"], lowest=False, reason=of_hits)


def labelled(label: Any, row: Row) -> Any:
    return f"{label} (modelled)" if row.is_modelled and isinstance(label, str) else label


def table_of(title: str, rows: Mapping[Any, Row], *metrics: Metric, key: str = "") -> FindingTable:
    """A line a row: its label, then each metric."""
    columns = {key: ""} | {metric.header: metric.unit for metric in metrics}
    cells = [(labelled(label, row), *(metric.of(row) for metric in metrics)) for label, row in rows.items()]
    return FindingTable.of(title, columns, cells)


def grid(
    title: str, found: Mapping[Any, Mapping[str, Row]], metrics: Metric | Sequence[Metric], key: str = ""
) -> FindingTable:
    """A line for each of `found`, a column a system, or one for each metric of it; not all need be in each line."""
    several = [metrics] if isinstance(metrics, Metric) else metrics
    columns, known = {key: ""}, {label: row for rows in found.values() for label, row in rows.items()}
    for label, row in known.items():
        name = labelled(label, row)
        columns |= {name if len(several) == 1 else f"{name}, {one.header}": one.unit for one in several}
    cells = [
        (at, *(one.of(rows[label]) if label in rows else None for label in known for one in several))
        for at, rows in found.items()
    ]
    return FindingTable.of(title, columns, cells)
