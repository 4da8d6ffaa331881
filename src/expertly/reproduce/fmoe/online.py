"""Figure 10: requests that arrive while nothing has been learned."""

from __future__ import annotations

import numpy as np

from expertly.reproduce import reasons, rules
from expertly.reproduce.experiment import Experiment
from expertly.reproduce.finding import Finding, Table
from expertly.reproduce.lab import SPLIT, Lab
from expertly.sim.schedule import Arrivals, Schedule, Selection, make_schedule

HARDWARE = "rtx3090"
REQUESTS = 64
SYSTEMS = ("fmoe", "mixtral-offloading", "promoe", "moe-infinity-lfu", "on-demand")
MEAN_GAP_S = 2.0
"""Between arrivals that are made up."""


def _run(lab: Lab) -> Finding:
    arrivals = _sample(lab)
    selection = Selection(len(arrivals), None, SPLIT, lab.seed)
    schedule = make_schedule(lab.trace, selection, arrivals)
    online = Schedule([], schedule.test, schedule.num_cut)
    runs = lab.runs_of(online, HARDWARE, is_queued=True)
    rows = {name: runs.row(name) for name in SYSTEMS}
    columns = {"": "", "mean": "s", "median": "s", "p90": "s", "p99": "s", "hit rate": "share"}
    cells = [
        (row.label, *(row["latency_s"][key] for key in ("mean", "p50", "p90", "p99")), row.hit_rate)
        for row in rows.values()
    ]
    fastest = min((row for name, row in rows.items() if name != "fmoe"), key=lambda row: row["latency_s"]["mean"])
    checks = [
        rules.best(
            f"fMoE has the lowest latency ({label})",
            {name: row["latency_s"][key] for name, row in rows.items()},
            "fmoe",
            lowest=True,
            unit="s",
            why=lambda: reasons.of_time(rows["fmoe"], fastest),
        )
        for key, label in (("mean", "mean"), ("p50", "median"), ("p90", "90 %"))
    ]
    num = rows["fmoe"]["requests"]
    notes = [
        f"{num} requests; {schedule.num_cut} of them are shorter than their arrivals say: the trace holds no more of "
        "them"
    ]
    if lab.arrivals is None:
        notes = [
            f"{num} requests; arrivals are made up: {MEAN_GAP_S} s apart in the mean, exponential; --arrivals takes "
            "recorded ones"
        ]
    return lab.finding(
        f"{lab.setting(runs, '25%')}; online", [Table.of("Latency of requests", columns, cells)], checks, notes
    )


def _sample(lab: Lab) -> Arrivals:
    num = REQUESTS // (6 if lab.quick else 1)
    dice = np.random.default_rng(lab.seed)
    given = lab.arrivals
    if given is None:
        times = np.cumsum(dice.exponential(MEAN_GAP_S * 1e9, num)).astype(np.int64)
        most = np.full(num, 1 << 30, np.int64)
        return Arrivals(times - times[0], most, most)
    chosen = np.sort(dice.choice(len(given), min(num, len(given)), replace=False))
    times = given.times_ns[chosen]
    return Arrivals(times - times[0], given.prompt_tokens[chosen], given.output_tokens[chosen])


EXPERIMENT = Experiment(
    "fmoe",
    ("10",),
    "Latency of requests, online",
    "64 requests sampled from Azure's trace (arrivals and lengths), with empty stores: the CDF of fMoE's request "
    "latency lies left of those of ProMoE, MoE-Infinity, Mixtral-Offloading and DeepSpeed for all three models.",
    _run,
    needs=("prompts",),
    most=1,
)
