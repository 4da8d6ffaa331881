"""Figures 18 to 25: several requests at once, and fewer bits a weight."""

from __future__ import annotations

from dataclasses import replace

from expertly.reproduce import reasons, rules
from expertly.reproduce.batches import batched, prompts_need
from expertly.reproduce.experiment import Experiment
from expertly.reproduce.finding import Cell, Check, Finding, FindingTable, show
from expertly.reproduce.lab import Lab, Runs
from expertly.reproduce.promoe.speed import HARDWARE, SYSTEMS, fastest_checks
from expertly.sim.hardware import Hardware

SIZES = (1, 2, 4)
BITS = (16, 8, 4)


def _batches(lab: Lab) -> Finding:
    found = {}
    for size in SIZES:
        runs = batched(lab, HARDWARE, size)
        found[size] = {name: runs.row(system, "50%") for name, system in SYSTEMS.items()}
    has_prompts = lab.subject.has_prompts
    columns = {"batch": "", **{f"{name}, decode": "number" for name in SYSTEMS}, "ProMoE of LRU": "x"}
    cells: list[tuple[Cell, ...]] = []
    tables: list[FindingTable] = []
    gain = {size: rows["lru"].tpot_s / rows["promoe"].tpot_s for size, rows in found.items()}
    for size, rows in found.items():
        cells.append((size, *(size / row.tpot_s for row in rows.values()), gain[size]))
    tables.append(FindingTable.of("Tokens a second of decode, about: batch over the time of a pass", columns, cells))
    checks: list[Check] = []
    if has_prompts:
        columns = {"batch": "", **dict.fromkeys(SYSTEMS, "ms")}
        tables.append(
            FindingTable.of(
                "Time of a batch's prompts",
                columns,
                [(size, *(row["ttft_s"] for row in rows.values())) for size, rows in found.items()],
            )
        )
        first, last = found[SIZES[0]]["promoe"]["ttft_s"], found[SIZES[-1]]["promoe"]["ttft_s"]
        checks.append(
            rules.compared(
                "four prompts together take much less than four times one",
                ("4 together", last),
                ("twice one", 2 * first),
                above=False,
                unit="ms",
                why=lambda: (
                    f"one prompt needs {show(prompts_need(lab, HARDWARE, SIZES[0]), 'share')} of a layer's experts, "
                    f"four together {show(prompts_need(lab, HARDWARE, SIZES[-1]), 'share')}"
                ),
            )
        )
    for size, rows in found.items():
        checks += fastest_checks(rows, has_prompts, f", batch {size}")
    checks += [
        rules.monotonic(
            "the gain over LRU grows with the batch",
            {str(size): value for size, value in gain.items()},
            rises=True,
            unit="x",
            slack=0.02,
            why=lambda: reasons.of_time(found[SIZES[-1]]["promoe"], found[SIZES[-1]]["lru"]),
        ),
        rules.compared(
            "a decode pass takes nearly as many times longer as there are requests",
            ("4 of 1", found[4]["promoe"].tpot_s / found[1]["promoe"].tpot_s),
            ("1.5 times", 1.5),
            above=True,
            unit="x",
            why=lambda: (
                f"with half of the experts kept {found[4]['promoe'].hit_rate:.1%} are hits at batch 4: requests share "
                "experts"
            ),
        ),
    ]
    return lab.finding(
        lab.setting(batched(lab, HARDWARE, 1), "50%"), tables, checks, ["requests of a batch begin together"]
    )


def _bits(lab: Lab) -> Finding:
    machine = Hardware.read(HARDWARE)
    schedule = lab.schedule()
    found = {}
    runs: Runs | None = None
    for bits in BITS:
        link = replace(machine.link, nbytes_per_s=machine.link.nbytes_per_s * 16 / bits)
        runs = lab.runs_of(schedule, replace(machine, link=link))
        found[bits] = {name: runs.row(system, "50%") for name, system in SYSTEMS.items()}
    assert runs is not None
    columns = {"bits": "", **{f"{name}, TPOT": "ms" for name in SYSTEMS}, "ProMoE of LRU": "x", "ProMoE waits": "share"}
    cells: list[tuple[Cell, ...]] = [
        (
            bits,
            *(row.tpot_s for row in rows.values()),
            rows["lru"].tpot_s / rows["promoe"].tpot_s,
            rows["promoe"].waiting(True),
        )
        for bits, rows in found.items()
    ]
    checks: list[Check] = []
    for bits, rows in found.items():
        checks += fastest_checks(rows, lab.subject.has_prompts, f", {bits} bits")
    checks.append(
        rules.monotonic(
            "with fewer bits ProMoE waits less",
            {str(bits): rows["promoe"].waiting(True) or 0.0 for bits, rows in found.items()},
            rises=False,
            unit="share",
            why=lambda: reasons.of_steps(*(rows["promoe"] for rows in found.values())),
        )
    )
    notes = [
        "bytes to load are scaled by the bits, by a link as many times faster; computing stays as it is, as the paper "
        "says of it; what unpacking takes is not counted"
    ]
    return lab.finding(lab.setting(runs, "50%"), [FindingTable.of("By bits a weight", columns, cells)], checks, notes)


BATCH = Experiment(
    "promoe",
    ("18", "19", "20", "21", "22"),
    "Throughput and latency by batch size",
    "Prefill throughput grows linearly with the batch, decode's hardly: experts used grow with it. ProMoE is 2.19x "
    "and 1.19x before LRU and static in prefill, 1.22x and 1.59x in decode (llama.cpp); over LRU the gain grows from "
    "1.16x to 1.34x from batch 1 to 4.",
    _batches,
    most=1,
)
BIT = Experiment(
    "promoe",
    ("23", "24", "25"),
    "By bits per weight",
    "From 16 to 4 bits at the same cache rate ProMoE stays 2.049x (1.21x) before LRU and 1.29x (1.742x) before static "
    "in prefill (decode) of DS-1, stable over bits; in transformers prefetching is hidden completely as bits fall.",
    _bits,
    most=1,
)
