"""Figures 9 and 11: fMoE beside four others, at one budget and over budgets."""

from __future__ import annotations

from itertools import pairwise

from expertly.reproduce import reasons, rules
from expertly.reproduce.experiment import Experiment
from expertly.reproduce.finding import Cell, Finding, FindingTable
from expertly.reproduce.lab import Lab, Row

HARDWARE = "rtx3090"
SYSTEMS = ("fmoe", "mixtral-offloading", "promoe", "moe-infinity-lfu", "on-demand")
BUDGETS = ("10%", "25%", "50%", "75%")


def _overall(lab: Lab) -> Finding:
    runs = lab.runs(HARDWARE)
    rows = {name: runs.row(name) for name in (*SYSTEMS, "lru", "oracle")}
    columns = {"": "", "TTFT": "ms", "TPOT": "ms", "hit rate": "share", "loaded": "GiB"}
    cells = [(row.label, row["ttft_s"], row.tpot_s, row.hit_rate, row["bytes_loaded"]) for row in rows.values()]
    others = {name: rows[name] for name in SYSTEMS}
    fastest = min((row for name, row in others.items() if name != "fmoe"), key=lambda row: row.tpot_s)
    checks = [
        rules.best(
            "fMoE has the lowest TPOT",
            {name: row.tpot_s for name, row in others.items()},
            "fmoe",
            lowest=True,
            unit="ms",
            why=lambda: reasons.of_time(rows["fmoe"], fastest),
        ),
        rules.ranked(
            "hit rate: fMoE > Mixtral-Offloading > ProMoE > MoE-Infinity > DeepSpeed",
            {name: row.hit_rate for name, row in others.items()},
            lowest=False,
            unit="share",
            why=lambda: reasons.of_hits(rows["fmoe"], rows["mixtral-offloading"]),
        ),
        rules.best(
            "Mixtral-Offloading hits more than the other three, but waiting for its prefetches costs time",
            {name: rows[name].tpot_s for name in ("mixtral-offloading", "promoe", "moe-infinity-lfu")},
            "mixtral-offloading",
            lowest=False,
            unit="ms",
            why=lambda: reasons.of_time(rows["moe-infinity-lfu"], rows["mixtral-offloading"]),
        ),
    ]
    if lab.subject.has_prompts:
        ttft = {name: row["ttft_s"] for name, row in others.items()}
        checks.insert(
            0,
            rules.best(
                "fMoE has the lowest TTFT",
                ttft,
                "fmoe",
                lowest=True,
                unit="ms",
                why=lambda: reasons.of_prompts(rows["fmoe"], min(others.values(), key=lambda row: row["ttft_s"])),
            ),
        )
    return lab.finding(lab.setting(runs, "25%"), [FindingTable.of("At 25 % of the experts", columns, cells)], checks)


def _budgets(lab: Lab) -> Finding:
    runs = lab.runs(HARDWARE)
    found = {memory: {name: runs.row(name, memory) for name in SYSTEMS} for memory in BUDGETS}
    labels = [row.label for row in found[BUDGETS[0]].values()]
    columns = {"memory": "", **dict.fromkeys(labels, "ms")}
    cells: list[tuple[Cell, ...]] = [(memory, *(row.tpot_s for row in rows.values())) for memory, rows in found.items()]

    def why() -> str:
        lost = [(rows, min(rows.values(), key=lambda row: row.tpot_s)) for rows in found.values()]
        rows, winner = next(one for one in lost if one[1].system != "fmoe")
        return f"for instance: {reasons.of_time(rows['fmoe'], winner)}"

    is_best = {
        f"{memory} ({min(rows, key=lambda name: rows[name].tpot_s)})": all(
            rows["fmoe"].tpot_s <= row.tpot_s for row in rows.values()
        )
        for memory, rows in found.items()
    }
    least = found[BUDGETS[0]]
    checks = [
        rules.everywhere("fMoE is fastest at every budget", is_best, "lowest TPOT (the fastest is in brackets)", why),
        rules.everywhere(
            "every system gets faster with memory",
            {name: all(_is_faster(found[b][name], found[a][name]) for a, b in pairwise(BUDGETS)) for name in SYSTEMS},
            "TPOT falls from budget to budget, to 1 %",
            lambda: reasons.of_steps(*next((b, a) for a, b in _growing(found) if not _is_faster(b, a))),
        ),
        rules.best(
            "at the least memory DeepSpeed is slowest",
            {name: row.tpot_s for name, row in least.items()},
            "on-demand",
            lowest=False,
            unit="ms",
            why=lambda: reasons.of_time(max(least.values(), key=lambda row: row.tpot_s), least["on-demand"]),
        ),
    ]
    return lab.finding(lab.setting(runs), [FindingTable.of("TPOT", columns, cells)], checks)


def _growing(found: dict[str, dict[str, Row]]) -> list[tuple[Row, Row]]:
    """Of every system, each budget's run and the next larger one's."""
    return [(found[a][name], found[b][name]) for name in SYSTEMS for a, b in pairwise(BUDGETS)]


def _is_faster(larger: Row, smaller: Row) -> bool:
    return larger.tpot_s <= smaller.tpot_s * 1.01


OVERALL = Experiment(
    "fmoe",
    ("9",),
    "TTFT, TPOT and hit rate beside four systems",
    "Against DeepSpeed-Inference, Mixtral-Offloading, ProMoE and MoE-Infinity fMoE takes 44, 35, 33, 30 % off TTFT and "
    "70, 61, 55, 48 % off TPOT, and hits 147, 11, 34, 63 % more. Its ProMoE is a prototype of the authors' own "
    "(section 6.1); here it is ProMoE with networks trained on this model.",
    _overall,
)
BUDGETED = Experiment(
    "fmoe",
    ("11",),
    "TPOT by memory for experts",
    "From 6 to 96 GB fMoE is fastest; at 6 GB it takes 32, 24, 18, 18 % off the TPOT of DeepSpeed-Inference, "
    "Mixtral-Offloading, ProMoE and MoE-Infinity. DeepSpeed is slowest.",
    _budgets,
    most=1,
)
