"""Figure 15: what an iteration's time goes to."""

from __future__ import annotations

from expertly.reproduce import rules
from expertly.reproduce.experiment import Experiment
from expertly.reproduce.finding import Cell, Finding, FindingTable, show
from expertly.reproduce.lab import Lab

HARDWARE = "rtx3090"
MOST = 0.05


def _run(lab: Lab) -> Finding:
    runs = lab.runs(HARDWARE)
    row = runs.row("fmoe")
    num, total = len(row.passes_s), float(row.passes_s.sum())
    waiting = float(row.waiting_s.sum())
    parts: dict[str, tuple[float, str]] = {
        "inference: computing": (total - waiting - row.asking_s, "in the pass"),
        "expert load: waiting for experts": (waiting, "in the pass"),
        "asking for experts": (row.asking_s, "in the pass"),
        "map match": (row.predicting_s.get("begin", 0.0) + row.predicting_s.get("router", 0.0), "beside it"),
        "map update": (row.predicting_s.get("update", 0.0), "beside it"),
        "link busy: loads and prefetches": (row.loading_s, "beside it"),
    }
    rows: list[tuple[Cell, ...]] = [(what, where, time / num, time / total) for what, (time, where) in parts.items()]
    beside = sum(row.predicting_s.values()) / total
    checks = [
        rules.compared(
            "matching and updating fit beside the pass",
            ("matcher busy", beside),
            ("the iteration", 1.0),
            above=False,
            unit="share",
            why="matching takes longer than the layers that it runs beside: "
            f"{row['predictions_late']} predictions were late",
        ),
    ]
    if row.asking_s:  # profiles that were not measured know of no such time
        checks.append(
            rules.compared(
                "what fMoE adds to the pass itself is below 5 % of an iteration",
                ("asking for experts", row.asking_s / total),
                ("5 %", MOST),
                above=False,
                unit="share",
                why=f"an iteration takes {show(total / num, 'ms')}, {show(row.asking_s / num, 'ms')} of it for asking",
            )
        )
    notes = [
        "simulated: matching is charged what it was measured to read and compute; collecting context is not modelled "
        "(the engine keeps references in the pass, and copies them in the matcher's thread)"
        + ("" if row.asking_s else f", nor what asking for experts takes: the profile {HARDWARE} has no time for it")
    ]
    columns = {"": "", "where": "", "an iteration": "ms", "of its time": "share"}
    return lab.finding(lab.setting(runs, "25%"), [FindingTable.of("Of all iterations", columns, rows)], checks, notes)


EXPERIMENT = Experiment(
    "fmoe",
    ("15",),
    "Latency breakdown of an iteration",
    "Matching, prefetching and updating are asynchronous; without them all other operations add less than 30 ms, 5 % "
    "of an iteration (100 to 500 ms), for all three models.",
    _run,
)
