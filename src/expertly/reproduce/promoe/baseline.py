"""Figures 3 to 5: what an LRU cache leaves to wait for, by how much is kept; and how evenly experts are used."""

from __future__ import annotations

import numpy as np

from expertly.core.geometry import Geometry
from expertly.reproduce import reasons, rules
from expertly.reproduce.experiment import Experiment
from expertly.reproduce.finding import Cell, Finding, Table, show
from expertly.reproduce.lab import Lab
from expertly.sim.training import popularity

HARDWARE = "rtx4090"
LRU = "lru:order=id:preemption=late"
RATES = ("10%", "25%", "50%", "75%")
EVEN = 0.5
"""Of all demands, at most, that the most popular quarter serves where use counts as even."""


def _latency(lab: Lab) -> Finding:
    runs = lab.runs(HARDWARE)
    found = {rate: runs.row(LRU, rate) for rate in RATES}
    columns = {"kept": "", "TTFT": "ms", "of it blocked": "share", "TPOT": "ms", "of it blocked, decode": "share"}
    columns["hit rate"] = "share"
    cells: list[tuple[Cell, ...]] = [
        (rate, row["ttft_s"], row.waiting(False), row.tpot_s, row.waiting(True), row.hit_rate)
        for rate, row in found.items()
    ]
    half = found["50%"]
    blocked, in_prompts = half.waiting(True) or 0.0, half.waiting(False)
    checks = [
        rules.monotonic(
            "TPOT falls with the cache rate",
            {rate: row.tpot_s for rate, row in found.items()},
            rises=False,
            unit="ms",
            why=lambda: reasons.of_steps(*found.values()),
        ),
        rules.compared(
            "with half of the experts kept waiting is a large part of decode still",
            ("blocked in decode", blocked),
            ("a quarter", 0.25),
            above=True,
            unit="share",
            why=f"{half.hit_rate:.1%} are hits at 50 %: these tokens share more experts than the paper's",
        ),
    ]
    if in_prompts is not None:
        checks.append(
            rules.compared(
                "and a larger part of prompts",
                ("blocked in prompts", in_prompts),
                ("in decode", blocked),
                above=True,
                unit="share",
                why=lambda: f"{reasons.of_prompts(half)}; in decode {reasons.of_steps(half)}",
            )
        )
    counts = popularity(lab.trace, runs.study.schedule.training, Geometry(lab.subject.layers))
    uses = np.zeros((len(lab.subject.layers), lab.num_experts))
    for key, count in counts.items():
        uses[key // lab.num_experts, key % lab.num_experts] = count
    ranked = np.sort(uses, axis=1)[:, ::-1]
    parts = (0.1, 0.25, 0.5, 0.75)
    total = np.maximum(ranked.sum(axis=1), 1)
    cdf = {
        part: float((ranked[:, : -(-int(lab.num_experts * part * 100) // 100)].sum(axis=1) / total).mean())
        for part in parts
    }
    checks.append(
        rules.compared(
            "5: use of experts is even",
            ("the most popular quarter serves", cdf[0.25]),
            ("half of all", EVEN),
            above=False,
            unit="share",
            why=f"the requests are of {reasons.of_categories(lab)}; the popular half serves {show(cdf[0.5], 'share')}",
        )
    )
    tables = [
        Table.of(f"3, 4: `{LRU}`", columns, cells),
        Table.of("5: access by popularity", {"most popular": "share", "serve": "share"}, list(cdf.items())),
    ]
    return lab.finding(lab.setting(runs), tables, checks)


EXPERIMENT = Experiment(
    "promoe",
    ("3", "4", "5"),
    "LRU: latency, blocking share and access by popularity",
    "With half of the experts kept 60.4 % of decode and 82.7 % of prefill are blocked (DS-1, transformers), 79.0 and "
    "94.2 % (QW-2, llama.cpp); latency falls with the cache rate; modern models use experts nearly evenly (figure 5).",
    _latency,
)
