"""Figures 7 to 9 and table 1: time per token beside others, by context and by capacity."""

from __future__ import annotations

from functools import partial

from expertly.reproduce import reasons, rules
from expertly.reproduce.experiment import Experiment
from expertly.reproduce.finding import Cell, Finding, FindingTable
from expertly.reproduce.lab import Lab, Row, Runs
from expertly.sim.schedule import Schedule, first_rows

HARDWARE = "a5000"
OUTPUT = 32
SYSTEMS = ("moe-infinity", "brainstorm", "mixtral-offloading", "deepspeed-index")
BUDGETS = ("25%", "70%")
CONTEXTS = {"up to 2^15": "12%", "2^16": "7%", "2^17": "3.5%"}
"""Share of DeepSeek-V2-Lite's experts (29 GB) that the paper's buffers of more than 3, of 2 and of 1 GB are."""
LONG = ("moe-infinity", "mixtral-offloading", "deepspeed-index")
CAPACITIES = (1, 20, 40, 60, 80, 100, 120)


def _short(lab: Lab) -> Runs:
    """Answers of 32 tokens."""

    def make() -> Runs:
        schedule = lab.schedule()
        spans = []
        for span in lab.requests_to_test():
            is_prefill = lab.trace.rows("is_prefill", span.first_row, span.first_row + span.num_rows)
            num = int(is_prefill.sum()) + OUTPUT
            spans += first_rows([span], min(num, span.num_rows))
        return lab.runs_of(Schedule(schedule.training, first_rows(spans, lab.num_tokens)), HARDWARE)

    return lab.once(("short answers",), make)


def _mean_and_tail(lab: Lab) -> Finding:
    runs = _short(lab)
    tables, checks = [], []
    for memory in BUDGETS:
        rows = {name: runs.row(name, memory) for name in SYSTEMS}
        columns = {"": "", "mean TPOT": "ms", "p90": "ms", "p99": "ms", "waiting": "share", "hit rate": "share"}
        cells: list[tuple[Cell, ...]] = [
            (row.label, row.tpot_s, row.tail_s(90), row.tail_s(99), row.waiting(True), row.hit_rate)
            for row in rows.values()
        ]
        tables.append(FindingTable.of(f"{memory} of the experts", columns, cells))
        fastest = min((row for row in rows.values() if row.system != "moe-infinity"), key=lambda row: row.tpot_s)
        for what, times in {
            "mean": {name: row.tpot_s for name, row in rows.items()},
            "tail (99 %)": {name: row.tail_s(99) for name, row in rows.items()},
        }.items():
            checks.append(
                rules.best(
                    f"MoE-Infinity has the lowest {what} TPOT, {memory}",
                    times,
                    "moe-infinity",
                    lowest=True,
                    unit="ms",
                    why=partial(reasons.of_time, rows["moe-infinity"], fastest),
                )
            )
    notes = [f"answers of {OUTPUT} tokens; prompts as long as the trace has them (the paper: 512)"]
    notes.append("vLLM and llama.cpp (Ollama), also in the paper's figure, are other programs and not simulated")
    return lab.finding(lab.setting(runs), tables, checks, notes)


def _context(lab: Lab) -> Finding:
    runs = _short(lab)
    found = {label: {name: runs.row(name, memory) for name in LONG} for label, memory in CONTEXTS.items()}
    first = found[next(iter(CONTEXTS))]
    columns = {"context": "", "experts": "", **{f"TPOT, {row.label}": "ms" for row in first.values()}}
    cells: list[tuple[Cell, ...]] = [
        (label, CONTEXTS[label], *(row.tpot_s for row in rows.values())) for label, rows in found.items()
    ]
    last = found[list(CONTEXTS)[-1]]
    growth = {name: last[name].tpot_s / first[name].tpot_s for name in LONG}
    checks = [
        rules.monotonic(
            "MoE-Infinity gets slower as the cache of keys and values takes the experts' memory",
            {label: rows["moe-infinity"].tpot_s for label, rows in found.items()},
            rises=True,
            unit="ms",
            why=lambda: reasons.of_steps(*(rows["moe-infinity"] for rows in found.values())),
        ),
        rules.everywhere(
            "and stays the fastest",
            {label: _is_fastest(rows) for label, rows in found.items()},
            "lowest TPOT",
            lambda: _why_slower(next(rows for rows in found.values() if not _is_fastest(rows))),
        ),
        rules.compared(
            "DeepSpeed, which loads by index, grows less",
            ("deepspeed-index", growth["deepspeed-index"]),
            ("moe-infinity", growth["moe-infinity"]),
            above=False,
            unit="x",
            why=lambda: (
                "it keeps what was used last, too, in a cache over all layers: its hits fall from "
                f"{first['deepspeed-index'].hit_rate:.1%} to {last['deepspeed-index'].hit_rate:.1%}, MoE-Infinity's "
                f"from {first['moe-infinity'].hit_rate:.1%} to {last['moe-infinity'].hit_rate:.1%}"
            ),
        ),
    ]
    notes = [
        "the budgets are the paper's buffers as shares of DeepSeek-V2-Lite's experts; that attention takes longer with "
        "the context is not simulated"
    ]
    return lab.finding(lab.setting(runs), [FindingTable.of("TPOT by context", columns, cells)], checks, notes)


def _why_slower(rows: dict[str, Row]) -> str:
    return reasons.of_time(rows["moe-infinity"], min(rows.values(), key=lambda row: row.tpot_s))


def _is_fastest(rows: dict[str, Row]) -> bool:
    return rows["moe-infinity"].tpot_s <= min(row.tpot_s for row in rows.values())


def _capacity(lab: Lab) -> Finding:
    runs = lab.runs(HARDWARE)
    found = {num: runs.row(f"moe-infinity:capacity={num}") for num in CAPACITIES}
    columns = {"matrices": "", "TPOT": "ms", "hit rate": "share", "right, of named": "share"}
    cells = [(num, row.tpot_s, row.hit_rate, row["prediction_accuracy"]) for num, row in found.items()]
    times = {str(num): row.tpot_s for num, row in found.items()}
    checks = [
        rules.compared(
            "120 matrices are faster than 1",
            ("120", times["120"]),
            ("1", times["1"]),
            above=False,
            unit="ms",
            why=lambda: reasons.of_time(found[120], found[1]),
        ),
        rules.near_best(
            "120 are enough",
            times,
            "120",
            lowest=True,
            unit="ms",
            slack=0.01,
            why=lambda: reasons.of_time(found[120], min(found.values(), key=lambda row: row.tpot_s)),
        ),
    ]
    return lab.finding(
        lab.setting(runs, "25%"), [FindingTable.of("By capacity of the collection", columns, cells)], checks
    )


TPOT = Experiment(
    "moe-infinity",
    ("7", "table-1"),
    "Mean and tail TPOT, 32 tokens out",
    "DeepSeek-V2-Lite on an A5000, mean (tail): MoE-Infinity 155 (169) ms, vLLM 485 (493), DeepSpeed 737 (803), "
    "Mixtral-Offloading 1250 (1530), Ollama 2590 (2599); for Mixtral-8x7B 836 ms, 1.4x faster than BrainStorm and "
    "Mixtral-Offloading.",
    _mean_and_tail,
    most=3,
)
CONTEXT = Experiment(
    "moe-infinity",
    ("8",),
    "TPOT while the context takes the experts' memory",
    "From 2^12 to 2^17 tokens of context the buffer for experts shrinks from above 3 GB (to 2^15) to 2 and 1 GB; "
    "MoE-Infinity then gets slower (by 137 ms), less than vLLM and Mixtral-Offloading; DeepSpeed is slow and stable.",
    _context,
    most=3,
)
CAPACITY = Experiment(
    "moe-infinity",
    ("9",),
    "Latency by capacity of the collection",
    "Latency falls from capacity 1 to 120, where all models have their lowest (NLLB, Switch, Mixtral).",
    _capacity,
    most=1,
)
