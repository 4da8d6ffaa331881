"""ProMoE: figures 7 to 9, 11 to 13, 15 and 23 to 25, in the simulator. Left out: 3 (what an LRU cache leaves to wait
for follows from the computing that the machine's profile assumes).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from expertly.policies.promoe import LearnedWeights
from expertly_lab.accuracy import accuracies
from expertly_lab.dataset import Dataset
from expertly_lab.papers.experiment import Experiment, Paper, Sweep
from expertly_lab.papers.judge import RIGHT, TPOT, TTFT, WAITING, Better, Cell, Order, Sample, Trend, Within, less
from expertly_lab.papers.runs import Lab

TRANSFORMERS, LLAMA_CPP = "rtx4090", "rtx4090-llamacpp"
"""The machines of its two codebases."""
DISTANCES = (1, 2, 4, 8)
FARTHER = tuple(map(str, DISTANCES[1:]))
BY_ID = "LRU, by id"
SYSTEMS = {
    "promoe": "promoe",
    "static": "static:loop=by-id",
    BY_ID: "lru:loop=by-id",
    "lru": "lru",
    "on-demand": "on-demand",
}
"""The paper's LRU and static caches run experts in the order of their ids, and ask for one when its turn comes. `lru`
asks for all that a layer lacks at once and computes what is there first, as ProMoE does.
"""
CACHES = ("static", BY_ID)
ASSUMED = "llama.cpp's overheads are assumed. "


def fastest(ttft: tuple[float, float], tpot: tuple[float, float]) -> list[Better]:
    """ProMoE beside static and LRU caches, so many times as fast in the paper; and beside ours, of which it prints
    nothing.
    """
    return [
        Better(
            f"ProMoE has the lowest {metric.name}", metric, "promoe", dict(zip(CACHES, map(less, times), strict=True))
        )
        for metric, times in ((TTFT, ttft), (TPOT, tpot))
    ]


class _ByRequest(float):
    """A share, with what each request contributes."""

    right: npt.NDArray[np.float64]
    named: npt.NDArray[np.float64]


def predictors(lab: Lab) -> dict[tuple[str, str], Cell]:
    """Right, of those named, over all layers, by distance: the networks, skip prediction and the token id."""
    schedule, weights = lab.schedule(), lab.subject.weights[LearnedWeights]
    assert isinstance(weights, LearnedWeights)
    spans = [*schedule.training, *schedule.test]
    num_tests = len(schedule.test)
    request_of = np.repeat(np.arange(len(spans)) - len(schedule.training), [span.num_rows for span in spans])

    def by_request(right: npt.NDArray[np.int64], named: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> float:
        share = _ByRequest(right.sum() / named.sum())
        share.right, share.named = (
            np.bincount(request_of[rows], counts, num_tests).astype(np.float64) for counts in (right, named)
        )
        return share

    data = Dataset(lab.trace, spans)
    layers, _ = accuracies(lab.trace, data, schedule.training, schedule.test, weights, by_request)
    cells = {}
    for distance in weights.distances:
        for name, field in (("learned", "learned"), ("skip", "lookahead"), ("token id", "token_id")):
            shares = [getattr(layer, field) for layer in layers if layer.distance == distance]
            known: Sequence[_ByRequest] = [share for share in shares if share is not None]
            if known:
                sample = Sample(sum(share.right for share in known), sum(share.named for share in known))  # type: ignore[arg-type]
                cells[str(distance), name] = Cell({RIGHT.name: sample})
    return cells


PAPER = Paper(
    "promoe",
    "ProMoE: Fast MoE-based LLM Serving using Proactive Caching",
    [
        Experiment(
            "7",
            "Predictors by how far they look ahead",
            "looking farther ahead leaves time to prefetch, if the prediction stays right; skip prediction's does not.",
            [
                Better(
                    "beyond the next layer learned prediction is faster than skip prediction and none",
                    *(TPOT, "learned"),
                    at=FARTHER,
                )
            ],
            {
                "learned": "promoe:distance={at}",
                "skip": "promoe:prediction=lookahead:distance={at}",
                "lru": "lru",
                "on-demand": "on-demand",
            },
            Sweep("distance", DISTANCES),
            machine=TRANSFORMERS,
            memory="50%",
            needs=("router_inputs", "lookahead", "weights"),
        ),
        Experiment(
            "8",
            "Accuracy of predictors by distance",
            "token id 54 % on average; skip prediction 90.5 % at k = 1, 54.5 % at k = 8, then worse than the token id; "
            "the learned predictor stays highest at k = 2, 4, 8 (DS-2; figure 9: two layers of QW-2).",
            [
                Better("beyond the next layer the learned predictor is right most often", RIGHT, "learned", at=FARTHER),
                Trend("skip prediction gets worse with the distance", RIGHT, "skip", False, 1 - 54.5 / 90.5),
                Order("8 layers ahead it is the worst", RIGHT, ("learned", "token id", "skip"), ("8",)),
            ],
            measure=predictors,
            needs=("router_inputs", "lookahead", "weights"),
            note="A layer nearer to the first than k is predicted from the first, by skip prediction too.",
        ),
        Experiment(
            "11",
            "Latency beside static and LRU caches, transformers",
            "prefill 1.52x and 2.32x faster than static and LRU, decode 1.52x and 1.33x; LRU is faster than static in "
            "decode, and slower in prefill, as it thrashes.",
            [
                *fastest((1.52, 2.32), (1.52, 1.33)),
                Order("in decode ProMoE, then LRU, then static", TPOT, ("promoe", BY_ID, "static")),
                Order("in prompts ProMoE, then static, then LRU", TTFT, ("promoe", "static", BY_ID)),
            ],
            SYSTEMS,
            machine=TRANSFORMERS,
            memory="50%",
            note="Factors are the paper's means over five models. Unified memory and layers that stay on the host (UM, "
            "TO, LO) are left out.",
        ),
        Experiment(
            "12",
            "Latency beside static and LRU caches, llama.cpp",
            "prefill 1.36x and 2.12x faster than static and LRU, decode 1.49x and 1.09x.",
            fastest((1.36, 2.12), (1.49, 1.09)),
            SYSTEMS,
            machine=LLAMA_CPP,
            memory="50%",
            note=ASSUMED + "Factors are the paper's means over five models.",
        ),
        Experiment(
            "13",
            "As each technique is added, transformers",
            "in decode each technique brings something, 1.37x in all; in prefill prefetching alone brings little or "
            "costs, all together 2.29x.",
            [
                Order("in decode each technique makes it faster", TPOT, ("promoe", "+ prefetch", "lru", BY_ID)),
                Better("all of it is fastest in decode", TPOT, "promoe", {BY_ID: less(1.37)}),
                Better("and in prompts", TTFT, "promoe", {BY_ID: less(2.29)}),
            ],
            {
                BY_ID: SYSTEMS[BY_ID],
                "lru": "lru",
                "+ prefetch": "promoe:segments=1",
                "promoe": "promoe",
                "on-demand": "on-demand",
            },
            machine=TRANSFORMERS,
            memory="25%",
            note="`lru` is LRU with early preemption and reordering, which come together here; then prefetching is "
            "added, then chunks. The paper adds them in another order.",
        ),
        Experiment(
            "15",
            "Latency and waiting by cache rate, transformers",
            "at all cache rates ProMoE is fastest: 1.72x and 1.22x before LRU and static in prefill (DS-1), 1.34x and "
            "1.58x in decode; what waits falls to 25.61 % of decode, LRU's 45.52 %.",
            [
                *fastest((1.22, 1.72), (1.58, 1.34)),
                Better("ProMoE waits least in decode", WAITING, "promoe", {BY_ID: 1 - 25.61 / 45.52}),
            ],
            SYSTEMS,
            Sweep("memory", ("10%", "25%", "75%")),
            machine=TRANSFORMERS,
            note="Factors are means over the paper's cache rates.",
        ),
        Experiment(
            "23",
            "Latency by bits a weight, llama.cpp",
            "from 16 to 4 bits at the same cache rate ProMoE stays 2.049x and 1.29x before LRU and static in prefill, "
            "1.21x and 1.742x in decode (DS-1).",
            fastest((1.29, 2.049), (1.742, 1.21)),
            SYSTEMS,
            Sweep("links", (1, 2, 4)),
            machine=LLAMA_CPP,
            memory="50%",
            note=ASSUMED + "16, 8 and 4 bits are a link 1, 2 and 4 times as fast: computing stays as it is, as the "
            "paper says of it.",
        ),
        Experiment(
            "25",
            "Waiting at 4 bits a weight, transformers",
            "as bits fall prefetching hides completely behind computing.",
            [Within("at 4 bits hardly anything waits", WAITING, "promoe", 0.0, 0.05)],
            {name: SYSTEMS[name] for name in ("promoe", "lru", "on-demand")},
            machine=TRANSFORMERS,
            memory="50%",
            links=4,
            note="4 bits are a link 4 times as fast.",
        ),
    ],
)
