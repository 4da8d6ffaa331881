"""Figure 6: router inputs of adjacent layers are alike."""

from __future__ import annotations

import numpy as np

from expertly.reproduce import rules
from expertly.reproduce.experiment import Experiment
from expertly.reproduce.finding import Cell, Finding, FindingTable
from expertly.reproduce.lab import Lab

LEAST = 0.7
_ROWS = 512


def _run(lab: Lab) -> Finding:
    num = min(lab.trace.num_rows, 4 * lab.num_tokens)
    sums = np.zeros(len(lab.subject.layers) - 1)
    for first in range(0, num, _ROWS):
        inputs = lab.trace.rows("router_inputs", first, min(num, first + _ROWS)).astype(np.float32)  # [T, L, H]
        norms = np.linalg.norm(inputs, axis=2) + 1e-9
        dots = (inputs[:, :-1] * inputs[:, 1:]).sum(axis=2)
        sums += (dots / (norms[:, :-1] * norms[:, 1:])).sum(axis=0)
    found = sums / num
    cells: list[tuple[Cell, ...]] = [(f"{layer} and {layer + 1}", float(value)) for layer, value in enumerate(found)]
    cells.append(("mean", float(found.mean())))
    later = float(np.sort(found)[len(found) // 4 :].mean())
    checks = [
        rules.compared(
            f"adjacent layers' inputs are alike: a mean cosine of {LEAST} and more",
            ("mean", float(found.mean())),
            (f"{LEAST}", LEAST),
            above=True,
            why=(
                f"a model of {len(lab.subject.layers)} layers changes more from layer to layer than one of 24 or 32; "
                f"the first do most: without the quarter of least similarity it is {later:.2f}"
            ),
        )
    ]
    return lab.finding(
        f"{num} tokens", [FindingTable.of("Mean cosine", {"layers": "", "similarity": "number"}, cells)], checks
    )


EXPERIMENT = Experiment(
    "moepic",
    ("6",),
    "Similarity of router inputs of adjacent layers",
    "Cosine similarities of adjacent layers' activations are high in all layers of both models (ProMoE, section 4, "
    "prints 91.7 % for DeepSeek-V2-Lite).",
    _run,
    needs=("router_inputs",),
    most=1,
)
