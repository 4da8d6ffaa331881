"""MoE-Infinity: section 4.1, figures 2 and 7 to 9, tables 1 and 3, sections 4.5 to 4.7. Left out: table 2, figure 4
(an elbow of K-means is found in shuffled layers, too, and the order of our requests is made up) and B.1 (a clock).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from expertly.scheduler.systems import get_system
from expertly_lab.papers.experiment import Experiment, Paper, Sweep
from expertly_lab.papers.judge import HITS, TPOT, Better, Cell, Cells, Metric, Sample, Trend, Within
from expertly_lab.papers.runs import CannotRun, Lab
from expertly_lab.sim.hardware import Hardware
from expertly_lab.sim.schedule import Schedule, with_answer
from expertly_lab.sim.study import Memory, Study
from expertly_lab.sim.workload import RowRange
from expertly_lab.trace.schema import max_experts

MACHINE = "a5000"
CACHES = {"on-demand": "on-demand", "lru": "lru"}
OWN = "moe-infinity"
RIVALS = {name: name for name in ("brainstorm", "mixtral-offloading", "deepspeed-index")}
TAIL = Metric("TPOT p90", "s")

LESS = {"on-demand": 0.68, "brainstorm": 0.83, "mixtral-offloading": 0.88, "deepspeed-index": 0.79}
LESS_TAIL = {"on-demand": 0.66, "mixtral-offloading": 0.89, "deepspeed-index": 0.79}
"""Of DeepSeek-V2-Lite: 155 (tail 169) ms against 485 (493) of vLLM, which loads on demand with LRU, 934 of BrainStorm,
1250 (1530) of Mixtral-Offloading and 737 (803) of DeepSpeed.
"""

# -- 4.1, 2: what requests use --------------------------------------------------------------------------------------

REUSED = Metric("experts used twice or more", "share")
EVEN = Metric("entropy, of the most", "share", lower_is_better=False)

Counts = npt.NDArray[np.int64]


def matrices(lab: Lab) -> Iterator[Counts]:
    """The activation matrix [L, E] of each request's decode."""
    num_experts, num_layers = max_experts(lab.trace.manifest.layers), len(lab.trace.manifest.layers)
    for request in lab.trace.requests:
        rows = request.first_row, request.first_row + request.num_rows
        experts = lab.trace.rows("experts", *rows)[~lab.trace.rows("is_prefill", *rows)].astype(np.int64)
        experts[experts >= num_experts] = num_experts  # no choice
        flat = (experts + (np.arange(num_layers) * (num_experts + 1))[:, None]).ravel()
        counts = np.bincount(flat, minlength=num_layers * (num_experts + 1)).reshape(num_layers, -1)[:, :-1]
        if counts.any():
            yield counts


def used(counts: Counts) -> float:
    """The share of experts that serve two tokens or more."""
    return float((counts > 1).mean())


def evenness(each: list[Counts]) -> Sample:
    """The entropy of what requests use together, of the most there can be: as the mean over tokens of how surprising
    their experts are.
    """
    total = np.sum(each, axis=0)
    shares = total / total.sum(axis=1, keepdims=True)
    bits = -np.log2(shares, out=np.zeros_like(shares), where=shares > 0) / np.log2(total.shape[1])
    sums = np.array([float((counts * bits).sum()) for counts in each])
    return Sample(sums, np.array([float(counts.sum()) for counts in each]))


def use(lab: Lab) -> Cells:
    each = list(matrices(lab))
    shares = Sample.of([used(counts) for counts in each])
    return {("", "a request"): Cell({REUSED.name: shares}), ("", "all requests"): Cell({EVEN.name: evenness(each)})}


# -- table 3: how many requests a change of workload costs -------------------------------------------------------------

BACK = Metric("hits, of those without a change", "share", lower_is_better=False)
BEFORE, SERVED, NUM_JUDGED, MOST_TOKENS = 12, 20, 5, 40
FIRST, LAST = f"first {NUM_JUDGED} requests", f"last {NUM_JUDGED} requests"


def recovery(lab: Lab) -> Cells:
    """Requests of one category, after some of another and after some of their own; nothing was learned before."""
    counted = Counter(request.category for request in lab.trace.requests).most_common(2)
    if len(counted) < 2 or counted[1][1] < 2 * NUM_JUDGED:
        raise CannotRun(f"needs two categories of at least {2 * NUM_JUDGED} requests each")
    kinds = [
        [
            with_answer(lab.trace, RowRange(request.number, request.first_row, request.num_rows), MOST_TOKENS)
            for request in lab.trace.requests
            if request.category == category
        ]
        for category, _ in counted
    ]
    before = min(BEFORE, len(kinds[1]) // 3)
    served = kinds[1][before : before + SERVED]
    hits = {}
    for name, earlier in (("changed", kinds[0]), ("same", kinds[1])):
        schedule = Schedule([], [*earlier[:before], *served])
        study = Study(lab.trace, schedule, Hardware.read(MACHINE), lab.subject.layers, lab.subject.dense)
        rates = study.row(get_system(OWN), Memory("25%"))["hit_rate_by_request"]
        hits[name] = np.array(rates[before:], np.float64)
    cells = {(FIRST, name): Cell({HITS.name: Sample.of(rates[:NUM_JUDGED])}) for name, rates in hits.items()}
    cells[LAST, "changed"] = Cell({BACK.name: Sample(hits["changed"][-NUM_JUDGED:], hits["same"][-NUM_JUDGED:])})
    return cells


# -- the paper ------------------------------------------------------------------------------------------------------

PAPER = Paper(
    "moe-infinity",
    "MoE-Infinity: Efficient MoE Inference on Personal Machines with Sparsity-Aware Expert Cache",
    [
        Experiment(
            "4.1",
            "How many experts a request uses, and all requests together",
            "of about 100 experts a layer fewer than 5 % are repeatedly activated in a request's decode, of Mixtral's "
            "8 only 25 %; over 1000 sequences use becomes uniform (figure 2).",
            [
                Within("a request uses fewer than 5 % of the experts repeatedly", REUSED, "a request", 0.0, 0.05),
                Within("and fewer than Mixtral's 25 %", REUSED, "a request", 0.0, 0.25),
                Within("merged over requests use is uniform, to 5 %", EVEN, "all requests", 0.95, float("inf")),
            ],
            measure=use,
        ),
        Experiment(
            "7",
            "TPOT beside others",
            "DeepSeek-V2-Lite on an A5000, mean (tail): 155 (169) ms, vLLM 485 (493), DeepSpeed 737 (803), BrainStorm "
            "934, Mixtral-Offloading 1250 (1530); Mixtral-8x7B: 836 ms, 1.4 times as fast as BrainStorm and "
            "Mixtral-Offloading.",
            [
                Better("MoE-Infinity has the lowest TPOT", TPOT, OWN, LESS),
                Better("and the lowest tail", TAIL, OWN, LESS_TAIL),
                Better("it hits most", HITS, OWN),
            ],
            {OWN: OWN, **RIVALS, **CACHES},
            Sweep("memory", ("25%", "70%")),
            MACHINE,
            note="vLLM is `on-demand`, which has an LRU cache over all layers. The paper's card holds about 70 % of "
            "the experts. The tail is the 90th percentile of requests.",
        ),
        Experiment(
            "8",
            "TPOT while the context takes the experts' memory",
            "from 2^12 to 2^17 tokens of context the buffer for DeepSeek-V2-Lite's experts shrinks from above 3 to "
            "1 GB; MoE-Infinity gets slower, by 137 ms, and stays the fastest.",
            [Better("it is the fastest with little memory, too", TPOT, OWN)],
            {OWN: OWN, "mixtral-offloading": "mixtral-offloading", "deepspeed-index": "deepspeed-index", **CACHES},
            Sweep("memory", ("12%", "3.5%")),
            MACHINE,
            note="12 and 3.5 % of the experts are the paper's buffers of 3 and 1 GB. That attention takes longer with "
            "the context is not simulated.",
        ),
        Experiment(
            "9",
            "TPOT by capacity of the collection",
            "latency falls from one matrix to 120, 3 % of the requests.",
            [Trend("more matrices make it faster", TPOT, OWN, rises=False)],
            {OWN: "moe-infinity:capacity={at}", **CACHES},
            Sweep("capacity", (1, 5, 20)),
            MACHINE,
            note="To 20: our traces have 23 to 120 requests to learn from, of which 120 matrices would be all.",
        ),
        Experiment(
            "table-3",
            "Hit rate after a change of workload",
            "latency is low again after 0 to 49 requests, 6 to 28 in the mean.",
            [
                Better("a change costs hits at first", HITS, "same", than=("changed",), at=(FIRST,)),
                Within(
                    f"they are back after {SERVED} requests, to 2 %", BACK, "changed", 0.98, float("inf"), at=(LAST,)
                ),
            ],
            measure=recovery,
            note="The two most frequent categories of a trace; of a trace with fewer requests after fewer than 20.",
        ),
        Experiment(
            "4.5",
            "Settings that the paper leaves open",
            "no numbers; ours were chosen on gpt-oss-20b's routing, and are judged on the others.",
            [
                Better(
                    "naming all later layers, from four matrices and the request's own, is faster than the next layer, "
                    "one matrix, the iteration's, and no prediction",
                    *(TPOT, OWN),
                )
            ],
            {
                OWN: OWN,
                "next layer": "moe-infinity:distance=1",
                "one matrix": "moe-infinity:matches=1",
                "iteration": "moe-infinity:matrix=pass",
                **CACHES,
            },
            machine=MACHINE,
        ),
        Experiment(
            "4.7",
            "Eviction: algorithm 1 beside LRU and LFU",
            "the predicted matrix and the layer say what goes; LRU and LFU, which know neither, hit less (figure 6).",
            [
                Better("algorithm 1 hits more than LFU, LRU and what predicts nothing", HITS, OWN),
                Better("and is faster", TPOT, OWN),
            ],
            {OWN: OWN, "LFU": "moe-infinity:eviction=lfu", "LRU": "moe-infinity:eviction=lru", **CACHES},
            machine=MACHINE,
        ),
    ],
)
