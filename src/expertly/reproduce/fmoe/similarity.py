"""Figure 8: does a similar map mean that what it names is needed?"""

from __future__ import annotations

from expertly.reproduce import rules
from expertly.reproduce.experiment import Experiment
from expertly.reproduce.finding import Finding, FindingTable, show
from expertly.reproduce.lab import Lab

HARDWARE = "rtx3090"
LEAST = 0.3


def _run(lab: Lab) -> Finding:
    runs = lab.runs(HARDWARE)
    row = runs.row("fmoe")
    kinds = {"semantic": row["similarity_correlation_semantic"], "trajectory": row["similarity_correlation_trajectory"]}
    found = {name: value for name, value in kinds.items() if value is not None}
    facts = row["predictor"]
    table = FindingTable.of(
        "Pearson's r of similarity and share of what was needed",
        {"": "", "r": "number", "mean similarity": "number"},
        [(name, value, facts.get(f"{name}_score")) for name, value in kinds.items()],
    )
    checks = [
        rules.within(
            f"{name} similarity goes with hits",
            f"r, {name}",
            value,
            LEAST,
            1.0,
            why=f"the mean similarity is {facts.get(f'{name}_score') or 0:.2f}; of what is needed "
            f"{show(row['recall'], 'share')} was named",
        )
        for name, value in found.items()
    ]
    notes = [] if len(found) == 2 else ["no embeddings were recorded: trajectories alone are matched"]
    return lab.finding(lab.setting(runs, "25%"), [table], checks, notes)


EXPERIMENT = Experiment(
    "fmoe",
    ("8",),
    "Correlation of similarity and hit rate",
    "Pearson's r from 0.74 to 0.97 over three models and two data sets, semantic and trajectory similarity alike: high "
    f"similarity goes with a high hit rate. Taken as shown here from r = {LEAST} on.",
    _run,
)
