"""Figures 11 to 17: beside static and LRU caches, technique by technique, and by how much is kept."""

from __future__ import annotations

from itertools import pairwise

from expertly.reproduce import reasons, rules
from expertly.reproduce.experiment import Experiment
from expertly.reproduce.finding import Cell, Check, Finding, FindingTable
from expertly.reproduce.lab import Lab, Row, Runs
from expertly.reproduce.promoe.baseline import LRU, RATES
from expertly.scheduler.counters import PhaseCounters
from expertly.scheduler.presets import get_system
from expertly.sim.study import Memory

HARDWARE = "rtx4090"
STATIC = "static:order=id:preemption=late"
SYSTEMS = {"static": STATIC, "lru": LRU, "promoe": "promoe"}
TECHNIQUES = {
    "LRU, by id, late": LRU,
    "+ prefetch": "promoe:order=id:preemption=late:segments=1",
    "+ chunked": "promoe:order=id:preemption=late",
    "+ early preemption": "promoe:order=id",
    "+ reordered": "promoe",
}


def fastest_checks(rows: dict[str, Row], has_prompts: bool, where: str) -> list[Check]:
    """ProMoE before static and LRU in prompts and in decode."""

    def why() -> str:
        winner = min(rows.values(), key=lambda row: row.tpot_s)
        return reasons.of_time(rows["promoe"], winner)

    tpot = {name: row.tpot_s for name, row in rows.items()}
    checks = [rules.best(f"ProMoE has the lowest TPOT{where}", tpot, "promoe", lowest=True, unit="ms", why=why)]
    if has_prompts:
        ttft = {name: row["ttft_s"] for name, row in rows.items()}
        checks.insert(
            0,
            rules.best(
                f"ProMoE has the lowest TTFT{where}",
                ttft,
                "promoe",
                lowest=True,
                unit="ms",
                why=lambda: reasons.of_prompts(rows["promoe"], min(rows.values(), key=lambda row: row["ttft_s"])),
            ),
        )
    return checks


def _overall(lab: Lab) -> Finding:
    runs = lab.runs(HARDWARE)
    rows = {name: runs.row(system, "50%") for name, system in SYSTEMS.items()}
    ours = rows["promoe"]
    columns = {"": "", "TTFT": "ms", "ProMoE is faster": "x", "TPOT": "ms", "ProMoE is faster, decode": "x"}
    cells: list[tuple[Cell, ...]] = [
        (
            f"{name} (modelled)" if row.is_modelled else name,
            row["ttft_s"],
            row["ttft_s"] / ours["ttft_s"] if lab.subject.has_prompts else None,
            row.tpot_s,
            row.tpot_s / ours.tpot_s,
        )
        for name, row in rows.items()
    ]
    checks = fastest_checks(rows, lab.subject.has_prompts, "")
    checks.append(
        rules.compared(
            "LRU is faster than static in decode",
            ("lru", rows["lru"].tpot_s),
            ("static", rows["static"].tpot_s),
            above=False,
            unit="ms",
            why=f"static hits {rows['static'].hit_rate:.1%}, LRU {rows['lru'].hit_rate:.1%}: popularity lasts here",
        )
    )
    if lab.subject.has_prompts:
        checks.append(
            rules.compared(
                "and slower in prompts, by thrashing",
                ("lru", rows["lru"]["ttft_s"]),
                ("static", rows["static"]["ttft_s"]),
                above=True,
                unit="ms",
                why=lambda: reasons.of_prompts(rows["lru"], rows["static"]),
            )
        )
    return lab.finding(lab.setting(runs, "50%"), [FindingTable.of("At half of the experts", columns, cells)], checks)


def _reads(runs: Runs, system: str, memory: str) -> float | None:
    """What prompts demanded, in units of what was absent when their routers spoke."""
    parts = get_system(runs.subject.fitted(system)[0])
    prompts = PhaseCounters()
    simulator = runs.study.simulate(parts, Memory(memory).budget(runs.study.geometry_of(parts)))
    for counters in simulator.scheduler.counters:
        prompts.add(counters.prefill)
    absent = prompts.demanded_nbytes - prompts.hit_nbytes
    return (prompts.loaded_nbytes - prompts.prefetched_nbytes) / absent if absent else None


def _techniques(lab: Lab) -> Finding:
    runs = lab.runs(HARDWARE)
    rows = {label: runs.row(system) for label, system in TECHNIQUES.items()}
    base, whole = rows["LRU, by id, late"], rows["+ reordered"]
    has_prompts = lab.subject.has_prompts
    reads = {label: _reads(runs, system, "25%") if has_prompts else None for label, system in TECHNIQUES.items()}
    columns = {
        "": "",
        "TTFT": "ms",
        "of the first": "x",
        "read, of absent": "number",
        "TPOT": "ms",
        "of the first, decode": "x",
    }
    cells: list[tuple[Cell, ...]] = [
        (
            label,
            row["ttft_s"],
            row["ttft_s"] / base["ttft_s"] if has_prompts else None,
            reads[label],
            row.tpot_s,
            row.tpot_s / base.tpot_s,
        )
        for label, row in rows.items()
    ]
    checks = [
        rules.monotonic(
            "in decode each technique makes it faster",
            {label: row.tpot_s for label, row in rows.items()},
            rises=False,
            unit="ms",
            slack=0.005,
            why=lambda: _why_slower(list(rows.values())),
        )
    ]
    if has_prompts:
        checks += [
            rules.compared(
                "prefetching alone brings a prompt little, or costs",
                ("LRU", base["ttft_s"]),
                ("+ prefetch", rows["+ prefetch"]["ttft_s"] * 1.05),
                above=False,
                unit="ms",
                why=lambda: reasons.of_prompts(base, rows["+ prefetch"]),
            ),
            rules.compared(
                "early preemption and reordering bring prompts most of it",
                ("with both", whole["ttft_s"]),
                ("without", rows["+ chunked"]["ttft_s"] * 0.95),
                above=False,
                unit="ms",
                why=lambda: reasons.of_prompts(whole, rows["+ chunked"]),
            ),
            rules.compared(
                "reordering ends the thrash: nothing is read twice",
                ("read, of absent", reads["+ reordered"] or 0.0),
                ("LRU by id", reads["LRU, by id, late"] or 0.0),
                above=False,
                why=lambda: reasons.of_prompts(whole, base),
            ),
        ]
    return lab.finding(
        lab.setting(runs, "25%"), [FindingTable.of("One technique after the other", columns, cells)], checks
    )


def _why_slower(rows: list[Row]) -> str:
    """Of the first technique that costs time."""
    before, after = next((a, b) for a, b in pairwise(rows) if b.tpot_s > a.tpot_s)
    said = reasons.of_time(after, before)
    is_cut = after["segments"] > before["segments"]
    return said + ("; and every piece of an expert takes a launch of its own" if is_cut else "")


def _rates(lab: Lab) -> Finding:
    runs = lab.runs(HARDWARE)
    found = {rate: {name: runs.row(system, rate) for name, system in SYSTEMS.items()} for rate in RATES}
    tables = []
    for title, decode in (("TTFT", False), ("TPOT", True)):
        if decode or lab.subject.has_prompts:
            columns = {"kept": "", **dict.fromkeys(SYSTEMS, "ms"), **{f"{name}, waiting": "share" for name in SYSTEMS}}
            cells: list[tuple[Cell, ...]] = [
                (
                    rate,
                    *(row.tpot_s if decode else row["ttft_s"] for row in rows.values()),
                    *(row.waiting(decode) for row in rows.values()),
                )
                for rate, rows in found.items()
            ]
            tables.append(FindingTable.of(title, columns, cells))
    checks: list[Check] = []
    for rate, rows in found.items():
        checks += fastest_checks(rows, lab.subject.has_prompts, f", {rate} kept")
    checks.append(
        rules.everywhere(
            "and waits least in decode",
            {rate: _waits_least(rows) for rate, rows in found.items()},
            "share of decode that is waiting",
            lambda: next(reasons.of_steps(*rows.values()) for rows in found.values() if not _waits_least(rows)),
        )
    )
    return lab.finding(lab.setting(runs), tables, checks)


def _waits_least(rows: dict[str, Row]) -> bool:
    return (rows["promoe"].waiting(True) or 0) <= min(row.waiting(True) or 0 for row in rows.values())


OVERALL = Experiment(
    "promoe",
    ("11", "12"),
    "Beside static and LRU caches",
    "Prefill 1.52x and 2.32x faster than static and LRU, decode 1.52x and 1.33x (transformers); 1.36x and 2.12x, "
    "1.49x and 1.09x (llama.cpp). LRU thrashes in prefill, and is faster than static in decode.",
    _overall,
)
TECHNIQUE = Experiment(
    "promoe",
    ("13", "14"),
    "Technique by technique",
    "In prefill prefetching alone brings little or costs, early preemption 1.27x and reordered inference 2.29x; in "
    "decode each technique brings something, 1.37x in all (transformers; llama.cpp alike).",
    _techniques,
)
RATE = Experiment(
    "promoe",
    ("15", "16", "17"),
    "By cache rate, and what is waited for",
    "At all cache rates ProMoE is fastest: in prefill 1.72x and 1.75x before LRU, 1.22x and 1.43x before static "
    "(DS-1, QW-2), in decode 1.58x and 1.34x; loading on the critical path falls to 25.61 and 11.18 % of decode (LRU "
    "45.52 and 36.31 %).",
    _rates,
)
