"""MoE-Infinity against what it was compared with, on one trace: its figure 9, its table 3 and what is ours to say.

    python bench/moe_infinity.py TRACE [--study compare,matches,distance,width,capacity,recovery] [--memory 25%]
                                 [--hardware rtx3090] [--geometry NAME] [--seed 0] [--tokens N] [--out FILE]

Collections, stores and counts are filled from 70 % of the requests, the rest is simulated from an empty cache; hit
rates are of decode.

compare   beside on-demand, lru, lfu, request counts and fmoe; and what goes: its own eviction, lru, lfu, fmoe's
matches   m, the matrices that are summed
distance  layers looked ahead
width     experts named of a layer, by number and by share of the matched tokens
capacity  matrices of each collection (figure 9)
recovery  table 3: a collection filled from requests of all categories but one meets those: after how many of them is
          the hit rate of five in a row, for good, what it is with a collection that knows the category, less a point;
          0: it never was below. Half of the category's requests make it known, half are simulated
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fmoe import Bench
from report import print_report

from expertly.scheduler.presets import get_system
from expertly.sim.schedule import Schedule
from expertly.sim.study import Study
from expertly.sim.workload import RowRange

COUNTS = "fmoe:prediction=counts:eviction=lfu"
STUDIES = ("compare", "matches", "distance", "width", "capacity", "recovery")
OURS = "moe-infinity"
WINDOW, SLACK = 5, 0.01


class Studies(Bench):
    """One trace, one budget, one machine."""

    def variants(self, label: str, key: str, values: tuple[Any, ...], also: str = "") -> Iterator[dict[str, Any]]:
        """A row for each value of a part."""
        study = self.study()
        for value in values:
            yield from self.rows(study, label, [f"{OURS}:{key}={value}{also}"])

    def compare(self) -> Iterator[dict[str, Any]]:
        own = [OURS, *(f"{OURS}:eviction={name}" for name in ("lru", "lfu", "fmoe")), f"{OURS}:admission=best"]
        yield from self.rows(self.study(), "compare", ["on-demand", "lru", "lfu", COUNTS, "fmoe", *own])
        yield from self.rows(self.study(is_online=True), "compare, online", ["fmoe", OURS])

    def matches(self) -> Iterator[dict[str, Any]]:
        yield from self.variants("matches", "matches", (1, 2, 4, 8, 16, 32))

    def distance(self) -> Iterator[dict[str, Any]]:
        yield from self.variants("distance", "distance", (1, 2, 3, 4, 6))

    def width(self) -> Iterator[dict[str, Any]]:
        yield from self.variants("width", "width", (1, 2, 3, 4, 6))
        yield from self.variants("threshold", "threshold", (0.2, 0.3, 0.5), ":width=1024")

    def capacity(self) -> Iterator[dict[str, Any]]:
        yield from self.variants("capacity", "capacity", (1, 5, 20, 40, 80, 120, 250, 500, 1000))

    def recovery(self) -> Iterator[dict[str, Any]]:
        requests = [request for request in self.trace.requests if request.num_rows]
        for category in sorted({str(request.category) for request in requests}):
            own = [request for request in requests if str(request.category) == category]
            half = len(own) // 2
            if half < 2 * WINDOW:
                continue
            others = [request for request in requests if str(request.category) != category]
            spans = [[RowRange(one.number, one.first_row, one.num_rows) for one in part] for part in (others, own)]
            after = self.hits(Schedule(spans[0], spans[1][half:]))
            known = self.hits(Schedule([*spans[0], *spans[1][:half]], spans[1][half:]))
            below = [at for at, (ours, theirs) in enumerate(zip(after, known, strict=True)) if ours < theirs - SLACK]
            yield {
                "study": "recovery",
                "category": category,
                "requests": half,
                "first_hit_rate": after[0],
                "first_hit_rate_known": known[0],
                "last_hit_rate": after[-1],
                "last_hit_rate_known": known[-1],
                "back_after": below[-1] + WINDOW if below else 0,
            }

    def hits(self, schedule: Schedule) -> list[float]:
        """Hit rates of WINDOW requests in a row, each of them weighing as many demands as it has."""
        study = Study(self.trace, schedule, self.hardware, self.layers, self.dense, seed=self.seed)
        simulator = study.simulate(get_system(OURS), self.memory.budget(study.geometry))
        found = simulator.metrics.hits_by_request()
        windows = [found[at : at + WINDOW] for at in range(len(found) - WINDOW + 1)]
        return [sum(hits for hits, _ in one) / max(1, sum(num for _, num in one)) for one in windows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--study", default=",".join(STUDIES))
    parser.add_argument("--memory", default="25%")
    parser.add_argument("--hardware", default="rtx3090")
    parser.add_argument("--geometry")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--out")
    args = parser.parse_args()
    bench = Studies(args)
    rows: list[dict[str, Any]] = []
    for name in args.study.split(","):
        if name not in STUDIES:
            parser.error(f"--study {name!r}: accepted: {', '.join(STUDIES)}")
        rows += getattr(bench, name)()
    settings = {key: str(value) for key, value in vars(args).items() if key != "out"}
    print_report("moe_infinity", rows, settings, args.out)


if __name__ == "__main__":
    main()
