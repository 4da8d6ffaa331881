"""Figures 8 and 9: how often predictors are right, by layer and distance."""

from __future__ import annotations

import numpy as np

from expertly.lab.accuracy import Accuracy, accuracies, is_below, means
from expertly.lab.dataset import Dataset
from expertly.reproduce import rules
from expertly.reproduce.experiment import Experiment
from expertly.reproduce.finding import Cell, Finding, FindingTable
from expertly.reproduce.lab import Lab
from expertly.sim.schedule import first_rows
from expertly.sim.workload import RowRange

LEARNED_AT = (2, 4, 8)


def _rows(spans: list[RowRange]) -> list[int]:
    return [row for span in spans for row in range(span.first_row, span.first_row + span.num_rows)]


def _run(lab: Lab) -> Finding:
    schedule = lab.schedule(2)
    training = first_rows(schedule.training, 6 * lab.num_tokens)
    spans = [*training, *schedule.test]
    weights = lab.subject.weights
    assert weights is not None, "an experiment's needs are met"
    data = Dataset(lab.trace, spans)
    rows = np.array(_rows(spans))
    num = sum(span.num_rows for span in training)
    test = np.arange(num, len(rows))
    is_prefill = np.concatenate(
        [lab.trace.rows("is_prefill", s.first_row, s.first_row + s.num_rows) for s in schedule.test]
    )
    judged = test[~is_prefill] if not is_prefill.all() else test
    found = accuracies(lab.trace, data, rows, weights, np.arange(num), judged)
    mean = means(found)
    columns = {"k": "", "learned": "share", "skip": "share", "token id": "share", "layers skip < token id": ""}
    cells: list[tuple[Cell, ...]] = [
        (k, row["learned"], row["lookahead"], row["token_id"], row["lookahead_below_token_id"])
        for k, row in mean.items()
    ]
    by_layer: list[tuple[Cell, ...]] = [
        (layer, *(_of(found, layer, k, name) for k in mean for name in ("learned", "lookahead")))
        for layer in sorted({one.layer for one in found})
    ]
    columns_of = {"layer": "", **{f"{name}, k={k}": "share" for k in mean for name in ("learned", "skip")}}
    from_first = ", ".join(f"{min(k, len(lab.subject.layers))} at k = {k}" for k in mean)
    first_layer = f"layers nearer to the first than k are predicted from it, {from_first} of {len(lab.subject.layers)}"
    why_learned = f"{lab.subject.weights_note}; {num} tokens of it count token ids"
    crossover = next((k for k, row in mean.items() if row["lookahead"] < row["token_id"]), None)
    checks = [
        rules.everywhere(
            "the learned predictor is at least as good as both others",
            {
                f"k={k}": mean[k]["learned"] >= max(mean[k]["lookahead"], mean[k]["token_id"])
                for k in LEARNED_AT
                if k in mean
            },
            "mean over layers, at k = 2, 4, 8",
            why_learned,
        ),
        rules.monotonic(
            "skip prediction gets worse with k",
            {f"k={k}": row["lookahead"] for k, row in mean.items()},
            rises=False,
            unit="share",
            why=first_layer,
        ),
        rules.compared(
            "from k = 8 on skip prediction is about as good as the token id, or worse",
            ("skip at the largest k", mean[max(mean)]["lookahead"]),
            ("token id", mean[max(mean)]["token_id"]),
            above=False,
            unit="share",
            by=-0.02,
            why=first_layer,
        ),
        rules.monotonic(
            "the learned one loses less by distance: it falls, too",
            {f"k={k}": row["learned"] for k, row in mean.items()},
            rises=False,
            unit="share",
            why=first_layer,
        ),
    ]
    below = sum(is_below(one) for one in found)
    notes = [
        f"skip prediction falls below the token id from k = {crossover} on in the mean (the paper: past 8, with 26 "
        f"layers; {len(lab.subject.layers)} here), and in {below} of {len(found)} pairs of layer and distance",
        "a layer nearer to the first than k is predicted from the first, by skip prediction too",
    ]
    tables = [
        FindingTable.of("Mean over layers: right, of the K named", columns, cells),
        FindingTable.of("By layer", columns_of, by_layer),
    ]
    setting = f"{len(judged)} decode tokens; token ids counted over {num} tokens; {lab.subject.weights_note}"
    return lab.finding(setting, tables, checks, notes)


def _of(found: list[Accuracy], layer: int, distance: int, name: str) -> float | None:
    for one in found:
        if (one.layer, one.distance) == (layer, distance):
            value: float | None = getattr(one, name)
            return value
    return None


EXPERIMENT = Experiment(
    "promoe",
    ("8", "9"),
    "Accuracy of predictors by layer and distance",
    "Token id 54 % on average; skip prediction 90.5 % at k = 1, 54.5 % at k = 8, then worse than the token id (DS-2); "
    "the learned predictor stays highest at k = 2, 4, 8, in QW-2's layers 16 and 27, too.",
    _run,
    needs=("router_inputs", "lookahead", "weights"),
    most=1,
)
