"""Figures 14a and 16: how many maps are kept, what that is worth, and what it takes."""

from __future__ import annotations

from expertly.core.geometry import Geometry
from expertly.policies.learned import ModelShape
from expertly.policies.predictor.fmoe.store import MapStore
from expertly.reproduce import rules
from expertly.reproduce.experiment import Experiment
from expertly.reproduce.finding import Cell, Finding, Table
from expertly.reproduce.lab import Lab, Row
from expertly.sim.hardware import read_geometry

HARDWARE = "rtx3090"
CAPACITIES = (125, 250, 500, 1000, 1500, 2000)
MODELS = ("mixtral-8x7b", "qwen1.5-moe", "phi-3.5-moe")
STORES = (1000, 2000, 4000, 8000, 16000, 32000)
MOST = 200e6


def _capacity(lab: Lab) -> Finding:
    runs = lab.runs(HARDWARE)
    found = {num: runs.row(f"fmoe:capacity={num}") for num in CAPACITIES}
    scores: dict[str, dict[str, float]] = {}
    for kind in ("semantic", "trajectory"):
        values = {str(num): row["predictor"].get(f"{kind}_score") for num, row in found.items()}
        if all(value is not None for value in values.values()):
            scores[kind] = values
    rows: list[tuple[Cell, ...]] = [
        (num, *(scores[kind][str(num)] for kind in scores), row.hit_rate, row.tpot_s) for num, row in found.items()
    ]
    columns = {"maps": "", **{f"{kind} similarity": "number" for kind in scores}, "hit rate": "share", "TPOT": "ms"}
    checks = []
    for kind, values in scores.items():
        checks.append(
            rules.monotonic(
                f"{kind} similarity rises with the capacity", values, rises=True, slack=0.001, why=lambda: _held(found)
            )
        )
        early = values["1000"] - values["500"]
        late = values["2000"] - values["1000"]
        checks.append(
            rules.compared(
                f"{kind}: beyond 1000 maps twice as many win less than below it",
                ("1000 to 2000", late),
                ("500 to 1000", early),
                above=False,
                why=lambda: _held(found),
            )
        )
    return lab.finding(lab.setting(runs, "25%"), [Table.of("By capacity of the store", columns, rows)], checks)


def _held(found: dict[int, Row]) -> str:
    return "maps in the store at the end: " + ", ".join(
        f"{row['predictor']['maps']} of {num}" for num, row in found.items()
    )


def _memory(lab: Lab) -> Finding:
    shapes = {name: ModelShape.of(Geometry(read_geometry(name).layers)) for name in MODELS}
    hidden = {name: read_geometry(name).layers[0].hidden_size for name in MODELS}
    sizes = {name: {num: MapStore.nbytes_of(shapes[name], num, hidden[name]) for num in STORES} for name in MODELS}
    columns = {"": "", **{f"{num} maps": "MB" for num in STORES}}
    rows: list[tuple[Cell, ...]] = []
    for name in MODELS:
        rows.append((f"{name}: maps", *(sizes[name][num][0] for num in STORES)))
        rows.append((f"{name}: embeddings", *(sizes[name][num][1] for num in STORES)))
    largest = {name: float(sizes[name][STORES[-1]][0]) for name in MODELS}
    checks = [
        rules.best(
            "Qwen1.5-MoE's maps take the most memory",
            largest,
            "qwen1.5-moe",
            lowest=False,
            unit="MB",
            why=lambda: ", ".join(
                f"{name}: {shape.num_layers} layers of {shape.max_experts}" for name, shape in shapes.items()
            ),
        ),
        rules.everywhere(
            "32K maps take less than 200 MB",
            {name: value < MOST for name, value in largest.items()},
            "maps at 32 000 below 200 MB",
            "maps are float32 in memory, so that matching is a BLAS product",
        ),
    ]
    notes = ["maps alone, as in the paper; the embeddings beside them are on a line of their own"]
    return lab.finding(
        "no trace: sizes of the papers' models", [Table.of("Memory of a full store", columns, rows)], checks, notes
    )


CAPACITY = Experiment(
    "fmoe",
    ("14a", "14"),
    "Similarity by capacity of the map store",
    "Mean semantic and trajectory similarity rise steeply below 1K maps and little beyond (axis 0.8 to 1.0, 500 to "
    "1500 maps).",
    _capacity,
    most=1,
)
MEMORY = Experiment(
    "fmoe",
    ("16",),
    "Memory of the map store",
    "From 1K to 32K maps Qwen1.5-MoE takes the most, and all three models less than 200 MB at 32K.",
    _memory,
    most=1,
)
