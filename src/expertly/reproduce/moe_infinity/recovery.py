"""Table 3: how many requests a change of workload costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import numpy as np

from expertly.core.errors import ConfigError
from expertly.reproduce import rules
from expertly.reproduce.experiment import Experiment
from expertly.reproduce.finding import Cell, Finding, FindingTable
from expertly.reproduce.lab import Lab
from expertly.sim.schedule import Schedule
from expertly.sim.workload import RowRange
from expertly.trace.reader import TraceRequest

HARDWARE = "a5000"
WINDOW = 3
"""Requests over whose hit rates the mean is taken."""
POINTS = 0.02
SYSTEMS = ("moe-infinity", "brainstorm")
MOST_ROWS = 60
"""Of a request."""


def requests_back(misses: Sequence[float]) -> int | None:
    """Requests served before the hit rate is back for good, given what each request misses; None: it never was."""
    means = [float(np.mean(misses[i : i + WINDOW])) for i in range(len(misses) - WINDOW + 1)]
    behind = [i for i, mean in enumerate(means) if mean > POINTS]
    if not behind:
        return 0
    return None if behind[-1] == len(means) - 1 else behind[-1] + 1


def _run(lab: Lab) -> Finding:
    own = [request for request in lab.trace.requests if request.num_rows]
    counted = Counter(request.category for request in own).most_common(2)
    if len(counted) < 2:
        raise ConfigError("requests of two categories are needed, and this trace has one")
    domains = [[one for one in own if one.category == category] for category, _ in counted]
    fewest = min(map(len, domains))
    before, runs = fewest // 3, 1 if lab.quick else 2
    after = min(20, fewest - before) if not lab.quick else min(8, fewest - before)
    if before < 2 or after <= WINDOW:
        raise ConfigError(f"too few requests of a category ({fewest}); 12 and more are needed")
    before = min(before, 12)
    rows: list[tuple[Cell, ...]] = []
    cases, firsts = {}, {}
    misses_of: dict[str, list[list[float]]] = {}
    for system in SYSTEMS:
        back: list[int | None] = []
        misses: list[list[float]] = []
        for run in range(runs):
            first, then = ([*requests] for requests in domains)
            Random(lab.seed + run).shuffle(first)
            Random(lab.seed + run).shuffle(then)
            served = then[before : before + after]
            changed, same = (_hits(lab, system, [*past[:before], *served])[before:] for past in (first, then))
            misses.append([b - a for a, b in zip(changed, same, strict=True) if a is not None and b is not None])
            back.append(requests_back(misses[-1]))
        known = [one for one in back if one is not None]
        misses_of[system] = misses
        cases[system], firsts[system] = back, float(np.mean([one[0] for one in misses]))
        mean = float(np.mean(known)) if known else None
        rows.append(
            (system, firsts[system], min(known, default=None), mean, max(known, default=None), len(back) - len(known))
        )
    columns = {"": "", "the first request misses": "points", "back after, least": "", "mean": "number", "most": ""}
    columns |= {"not back": ""}
    checks = [
        rules.everywhere(
            "MoE-Infinity's hit rate is back within the requests served",
            {f"draw {number}": one is not None for number, one in enumerate(cases["moe-infinity"], start=1)},
            f"means over {WINDOW} requests are for good within {POINTS:.0%} of what they are without the change",
            lambda: (
                "answers differ among themselves by more than the change costs: what a request misses varies by "
                f"{float(np.std(np.concatenate(misses_of['moe-infinity']))):.1%} (standard deviation), so that means "
                f"beyond {POINTS:.0%} are found at the end, too"
            ),
        ),
        rules.compared(
            "a change costs hits at first",
            ("the first request misses", firsts["moe-infinity"]),
            ("nothing", 0.0),
            above=True,
            unit="share",
            why=lambda: (
                "the other category's matrices serve this one as well as its own: over all requests "
                f"{float(np.mean(np.concatenate(misses_of['moe-infinity']))):+.1%} are missed"
            ),
        ),
    ]
    names = " to ".join(str(category) for category, _ in counted)
    setting = f"{HARDWARE}; 25%; {names}; {before} requests, then {after}, of {MOST_ROWS} rows at most; {runs} draws; "
    setting += "caches and stores begin empty"
    return lab.finding(setting, [FindingTable.of("Requests until the hit rate is back", columns, rows)], checks)


def _hits(lab: Lab, system: str, requests: Sequence[TraceRequest]) -> list[float | None]:
    """The hit rate of each request's decode."""
    spans = [RowRange(one.number, one.first_row, min(one.num_rows, MOST_ROWS)) for one in requests]
    found: list[float | None] = lab.runs_of(Schedule([], spans), HARDWARE).row(system)["hit_rate_by_request"]
    return found


EXPERIMENT = Experiment(
    "moe-infinity",
    ("table-3",),
    "Requests until a change of workload is over",
    "Requests until latency is low again, least-mean-most: within MMLU 0-14-43 (NLLB), 0-9-49 (Mixtral), 28-43-45 "
    "(Arctic); MMLU to BIGBench 0-6-17, 0-27-42, 2-28-41: about 50 at most within a data set, about 30 in the mean "
    "between two.",
    _run,
    most=2,
)
