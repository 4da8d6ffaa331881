"""Figure 4: layers that take longer than others, and how much of an expert to keep."""

from __future__ import annotations

from expertly.reproduce import reasons, rules
from expertly.reproduce.experiment import Experiment
from expertly.reproduce.finding import Cell, Finding, FindingTable, show
from expertly.reproduce.lab import Lab, Row
from expertly.reproduce.moepic.stand_in import NAME

HARDWARE = "a6000"
SEGMENTS = 8
HALVES = "moepic:eviction=lfu:allocation=split:theta=0.5:segments=2"
UNEVEN = 1.1


def _layers(lab: Lab) -> Finding:
    runs = lab.runs(HARDWARE, times=lab.share)
    row = runs.row(HALVES)
    times = {f"layer {layer}": float(time) for layer, time in enumerate(row.layers_s)}
    slowest, fastest = max(times, key=lambda key: times[key]), min(times, key=lambda key: times[key])
    ranked = sorted(times.values())
    median = ranked[len(ranked) // 2]
    cells: list[tuple[Cell, ...]] = [(name, time, time / median) for name, time in times.items()]
    checks = [
        rules.compared(
            "some layers take significantly longer than others, with equal budgets",
            (slowest, times[slowest] / median),
            ("the median layer", 1.0),
            above=True,
            by=UNEVEN - 1,
            unit="x",
            why=lambda: (
                f"layers of this routing are alike: they hit {_range(row, 'hit_rate')}, and of what is named for "
                f"them {_range(row, 'prediction_accuracy')} is right"
            ),
        )
    ]
    table = FindingTable.of(f"`{HALVES}`", {"": "", "a layer": "ms", "of the median": "x"}, cells)
    notes = [f"fastest: {fastest}"]
    return lab.finding(lab.setting(runs, "25%"), [table], checks, notes)


def _range(row: Row, key: str) -> str:
    """From the layer with the least to that with the most."""
    known = [layer[key] for layer in row["layers"] or [] if layer.get(key) is not None]
    return f"{show(min(known, default=None), 'share')} to {show(max(known, default=None), 'share')}"


def _ratio(lab: Lab) -> Finding:
    is_made_up = lab.subject.name == NAME
    memory = "75%" if is_made_up else "50%"
    runs = lab.runs("h100-pcie", sizes="mixtral-8x7b") if is_made_up else lab.runs(HARDWARE, times=lab.share)
    cut = f"moepic:allocation=split:segments={SEGMENTS}"
    systems = {"prefetch only": f"moepic:allocation=none:segments={SEGMENTS}"}
    systems |= {f"{top / SEGMENTS:g}": f"{cut}:theta={top / SEGMENTS:g}" for top in range(1, SEGMENTS + 1)}
    systems["cache only"] = f"lcp:segments={SEGMENTS}"
    rows = {theta: runs.row(system, memory) for theta, system in systems.items()}
    cells: list[tuple[Cell, ...]] = [(theta, row.tpot_s, row.waiting(True), row.kept) for theta, row in rows.items()]
    times = {theta: row.tpot_s for theta, row in rows.items()}
    own = {theta: time for theta, time in times.items() if theta[0].isdigit()}
    at = min(own, key=lambda theta: own[theta])
    waits = {theta: (row.waiting(True) or 0.0) * row.tpot_s for theta, row in rows.items()}
    least = min((theta for theta in own), key=lambda theta: waits[theta])

    def why() -> str:
        return (
            f"what is waited for is least at theta = {least} ({waits[least] * 1e3:.2f} ms; whole experts "
            f"{waits['1'] * 1e3:.2f} ms), but an expert in two pieces takes a launch more, and tops of more experts "
            "are asked for less often where use is skewed, so that more bytes are loaded"
        )

    inner = {"prefetch only": times["prefetch only"], **own}
    checks = [
        rules.between("the optimum lies strictly between theta = 0 and 1", inner, lowest=True, unit="ms", why=why),
        rules.compared(
            "it beats caching alone",
            (f"theta = {at}", own[at]),
            ("cache only", times["cache only"]),
            above=False,
            unit="ms",
            why=lambda: reasons.of_steps(rows[at], rows["cache only"]),
        ),
        rules.compared(
            "and loading alone",
            (f"theta = {at}", own[at]),
            ("prefetch only", times["prefetch only"]),
            above=False,
            unit="ms",
            why=lambda: reasons.of_steps(rows[at], rows["prefetch only"]),
        ),
    ]
    table = FindingTable.of(
        "By theta, all layers alike, P = 8", {"theta": "", "TPOT": "ms", "waiting": "share", "kept": "share"}, cells
    )
    return lab.finding(lab.setting(runs, memory), [table], checks)


LAYERS = Experiment(
    "moepic",
    ("4a",),
    "Latency of each layer with equal budgets",
    "With halves of 30 of 60 experts kept in every layer (LFU), layers 3, 10 and 21 take significantly longer than "
    "others; hit rates differ by up to 5.55 points.",
    _layers,
    stand_in=True,
)
RATIO = Experiment(
    "moepic",
    ("4b", "4"),
    "TPOT by split ratio",
    "With 288 experts' worth of memory the optimum is at theta = 0.4, 37.97 to 48.67 % below caching alone (theta = "
    "1) and prefetching alone (theta = 0).",
    _ratio,
    most=1,
    stand_in=True,
)
