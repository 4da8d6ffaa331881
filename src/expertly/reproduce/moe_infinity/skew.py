"""Figures 2 to 4 and table 2: few experts a request, all of them over many; groups of requests, what follows what."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from expertly.lab.trace_entropy import entropy
from expertly.reproduce import reasons, rules
from expertly.reproduce.experiment import Experiment
from expertly.reproduce.finding import Cell, Finding, FindingTable, show
from expertly.reproduce.lab import Lab
from expertly.reproduce.moe_infinity.groups import elbow, grouped, transitions
from expertly.trace.schema import NO_EXPERT, max_experts

UNIFORM = 0.95
"""Of the most entropy there can be: what counts as uniform."""
SPARSE = 0.12
MOST_GROUPS = 30
LARGEST = (0.06, 0.48)
"""Of the requests, in the largest group, as table 2 has it."""
MOST_REQUESTS = 600

Floats = npt.NDArray[np.float64]


def _counts(lab: Lab) -> Floats:
    """[requests, L, E], of decode; in the seed's order."""
    trace, layers = lab.trace, lab.trace.manifest.layers
    requests = [one for one in trace.requests if one.num_rows]
    order = np.random.default_rng(lab.seed).permutation(len(requests))[: MOST_REQUESTS // (5 if lab.quick else 1)]
    found = []
    for number in order.tolist():
        first, stop = requests[number].first_row, requests[number].first_row + requests[number].num_rows
        experts = trace.rows("experts", first, stop)[~trace.rows("is_prefill", first, stop)]
        counts = np.zeros((len(layers), max_experts(layers)))
        for layer in range(len(layers)):
            chosen = experts[:, layer][experts[:, layer] != NO_EXPERT]
            counts[layer] = np.bincount(chosen, minlength=counts.shape[1])
        if counts.any():
            found.append(counts)
    return np.stack(found)


def _skew(lab: Lab) -> Finding:
    counts = lab.once(("counts",), lambda: _counts(lab))
    top = -(-lab.num_experts // 4)
    bits = np.log2(lab.num_experts)
    requests = {
        "last layer": (_top(counts[:, -1], top), float(entropy(counts[:, -1]).mean()) / bits),
        "all layers": (_top(counts, top), float(entropy(counts).mean()) / bits),
    }
    merged = counts.sum(axis=0)
    together = {
        "last layer": (_top(merged[-1], top), float(entropy(merged[-1])) / bits),
        "all layers": (_top(merged, top), float(entropy(merged).mean()) / bits),
    }
    columns = {"": "", "the most used quarter serves": "share", "entropy, of the most there can be": "share"}
    rows: list[tuple[Cell, ...]] = [(f"one request, {name}", *values) for name, values in requests.items()]
    rows += [(f"all merged, {name}", *values) for name, values in together.items()]
    checks = [
        rules.compared(
            "a request uses few experts much more than the rest, many merged do less so",
            ("quarter of a request", requests["all layers"][0]),
            ("quarter of all merged", together["all layers"][0]),
            above=True,
            unit="share",
            by=0.05,
            why=f"these {len(counts)} requests are of {reasons.of_categories(lab)}: what all of them use together is "
            "nearly what each uses",
        ),
        rules.within(
            "merged over many requests use is uniform",
            "entropy of all merged",
            together["all layers"][1],
            UNIFORM,
            1.0,
            unit="share",
            why=f"the requests are of {reasons.of_categories(lab)}, and what they use stays popular when merged: "
            f"the most used quarter still serves {show(together['all layers'][0], 'share')}",
        ),
    ]
    setting = f"decode of {len(counts)} requests, {counts[:, 0].sum() / lab.top_k:.0f} tokens"
    return lab.finding(setting, [FindingTable.of("Use of experts", columns, rows)], checks)


def _top(counts: Floats, num: int) -> float:
    ranked = np.sort(counts, axis=-1)[..., ::-1]
    return float((ranked[..., :num].sum(-1) / np.maximum(counts.sum(-1), 1)).mean())


def _groups(lab: Lab) -> Finding:
    counts = lab.once(("counts",), lambda: _counts(lab))
    total = counts.sum(axis=2, keepdims=True)
    points = np.divide(counts, total, out=np.zeros_like(counts), where=total > 0).reshape(len(counts), -1)
    most = min(40, len(points) // 3)
    spread = {num: grouped(points, num, lab.seed)[1] for num in sorted({1, 2, 3, 5, 8, 12, 16, 20, 25, 30, 35, most})}
    num = elbow(spread)
    members = grouped(points, num, lab.seed)[0]
    matrix = transitions(members, num)
    seen = matrix[matrix.sum(axis=1) > 0]
    largest = float(np.bincount(members).max() / len(members))
    sparse = float((seen < SPARSE).mean())
    rows: list[tuple[Cell, ...]] = [
        ("requests", len(points), None),
        ("groups at the elbow", num, None),
        ("the largest group", None, largest),
        (f"transitions below {SPARSE}", None, sparse),
    ]
    checks = [
        rules.within(
            "requests form few groups",
            "groups",
            num,
            2,
            MOST_GROUPS,
            why=f"squared distances in {num} groups are {show(spread[num] / spread[1], 'share')} of those in one",
        ),
        rules.within(
            "and large ones: the largest holds what the paper's largest do",
            "largest group",
            largest,
            *LARGEST,
            unit="share",
            why=f"{len(points)} requests of {reasons.of_categories(lab)}, {num} groups: an even share is {1 / num:.2f}",
        ),
        rules.within(
            f"which group is next cannot be told: most transitions are below {SPARSE}",
            "share of transitions",
            sparse,
            0.5,
            1.0,
            unit="share",
            why=f"with {num} groups an even transition is {1 / num:.2f}: too few groups for small probabilities",
        ),
    ]
    notes = [
        "K-means of each request's activation matrix of decode, rows divided by their sums; the elbow is the number of "
        "groups farthest below the line from the first to the last; transitions from one request to the next, shuffled"
    ]
    return lab.finding(
        f"{len(points)} requests",
        [FindingTable.of("Groups", {"": "", "number": "", "share": "share"}, rows)],
        checks,
        notes,
    )


SKEW = Experiment(
    "moe-infinity",
    ("2",),
    "Use of experts by one request, and by many",
    "In two sample requests a few experts of the last layer are used much more than the others; over 1000 merged use "
    "is uniform (Mixtral-8x7B and DeepSeek-V2-Lite).",
    _skew,
    most=4,
)
GROUPS = Experiment(
    "moe-infinity",
    ("4", "3", "table-2"),
    "Groups of requests and transitions between them",
    "K-means finds 10 to 30 groups of activation matrices in 1000 requests, the largest with 0.06 to 0.48 of them "
    "(table 2); P(next group | group) is below 0.12 in most cases (figure 4).",
    _groups,
    most=2,
)
