"""fMoE: figures 4 and 8 to 15. Left out: 3 (Jensen's inequality says it), 14b (batches are not simulated here) and 16
(arithmetic).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from expertly.core.observation import Floats, History
from expertly.policies.fmoe import FMoE, FMoEOptions, MapStore, Search
from expertly_lab.papers.experiment import Experiment, Paper, Sweep
from expertly_lab.papers.judge import (
    HITS,
    LATENCY,
    TPOT,
    TTFT,
    WAITING,
    Better,
    Cell,
    Cells,
    Lowest,
    Metric,
    Order,
    Sample,
    Trend,
    Within,
)
from expertly_lab.papers.runs import Lab
from expertly_lab.sim.training import histories

DISTANCE = 3
CARDS = 6
"""Each on a link of its own; experts are dealt out to them in turn (sections 5, 6.1)."""
FMOE = f"fmoe:distance={DISTANCE}"
CACHES = {"on-demand": "on-demand", "lru": "lru"}
FAIR = {
    "fmoe": FMOE,
    "mixtral-offloading": "mixtral-offloading",
    "promoe": "promoe",
    "moe-infinity": "moe-infinity",
    **CACHES,
}
ARTIFACT = {name: name if name in CACHES else f"{name}-artifact" for name in FAIR}
COUNTS = "fmoe:prediction=counts:eviction=lfu"

LESS_TTFT = {"on-demand": 0.44, "mixtral-offloading": 0.35, "promoe": 0.33, "moe-infinity": 0.30}
LESS_TPOT = {"on-demand": 0.70, "mixtral-offloading": 0.61, "promoe": 0.55, "moe-infinity": 0.48}
MORE_HITS = {"on-demand": 1.47, "mixtral-offloading": 0.11, "promoe": 0.34, "moe-infinity": 0.63}
LESS_AT_LEAST = {"on-demand": 0.32, "mixtral-offloading": 0.24, "promoe": 0.18, "moe-infinity": 0.18}
OVERALL = (
    "TTFT is 44, 35, 33, 30 % less than that of DeepSpeed, Mixtral-Offloading, ProMoE and MoE-Infinity, TPOT 70, 61, "
    "55, 48 % less; hits are 147, 11, 34, 63 % more; means over three models."
)

# -- 8, 14a: maps alone, without a cache ----------------------------------------------------------------------------

PEARSON = Metric("Pearson's r", "number", lower_is_better=False)
GAIN = Metric("gain in similarity", "number", lower_is_better=False)
CAPACITIES = (250, 1000, 4000)


def filled(lab: Lab, capacity: int) -> MapStore:
    """Of the training part."""
    predictor = lab.taught(FMOE if capacity == FMoEOptions().capacity else f"{FMOE}:capacity={capacity}")
    assert isinstance(predictor, FMoE)
    return predictor.store


def requests(lab: Lab) -> Iterator[History]:
    """The decoded rows of each request that is not learned from."""
    for span in lab.schedule().test:
        for history in histories(lab.trace, [span], {"scores", "embedding"}):
            rows = ~history.is_prefill
            embedding = None if history.embedding is None else history.embedding[rows]
            if rows.any():
                yield History(
                    history.requests[rows], history.is_prefill[rows], history.experts[rows], history.scores[rows],
                    embedding,
                )  # fmt: skip


def matched(store: MapStore, rows: History, kind: str) -> tuple[Floats, Floats]:
    """Of each iteration the similarity of its matches, [T], and how many of the experts that it needed are among the
    matched maps' K likeliest: by the embedding for the first layers, or by the layers so far for those d ahead.
    """
    search, (_, num_layers, top_k) = Search(store, len(rows.requests)), rows.experts.shape
    similar, right = [], []
    for layer in range(num_layers if kind == "trajectory" else DISTANCE):
        ahead, cosines = layer, search.semantics
        if kind == "trajectory":
            search.observe(layer, rows.scores[:, layer])
            ahead, cosines = layer + DISTANCE, search.cosines()
        elif cosines is None and rows.embedding is not None:
            cosines = search.semantic(rows.embedding)
        if ahead >= num_layers or cosines is None:
            break
        slots, scores = search.nearest(cosines)
        named = np.argsort(-store.maps[ahead, slots], axis=1, kind="stable")[:, :top_k]
        similar.append(scores)
        right.append((rows.experts[:, ahead, :, None] == named[:, None]).any(axis=2).mean(axis=1))
    return np.mean(similar, axis=0), np.mean(right, axis=0)


def pearson(pairs: list[tuple[Floats, Floats]]) -> Sample:
    """Of (x, y) [T] of each request, over all of them: the mean product of what they are in standard deviations."""
    x, y = (np.concatenate(values).astype(np.float64) for values in zip(*pairs, strict=True))
    products = [np.sum((a - x.mean()) / (x.std() or 1) * (b - y.mean()) / (y.std() or 1)) for a, b in pairs]
    return Sample(np.array(products), np.array([float(len(a)) for a, _ in pairs]))


def similarity(lab: Lab) -> Cells:
    store, cells = filled(lab, 1000), {}
    for kind in ("trajectory", "semantic"):
        if kind == "trajectory" or lab.trace.is_real("embedding"):
            pairs = [matched(store, rows, kind) for rows in requests(lab)]
            strangers = [(similar, np.roll(right, len(right) // 2)) for similar, right in pairs]
            cells["", kind] = Cell({PEARSON.name: pearson(pairs)})
            cells["", f"{kind}, of another token"] = Cell({PEARSON.name: pearson(strangers)})
    return cells


def capacities(lab: Lab) -> Cells:
    """By how much the similarity of a request's matches rises from one capacity to the next, four times as large."""
    stores = [filled(lab, capacity) for capacity in CAPACITIES]
    means = np.array([[matched(store, rows, "trajectory")[0].mean() for store in stores] for rows in requests(lab)])
    steps = [f"{less} to {more} maps" for less, more in pairwise(CAPACITIES)]
    return {("", step): Cell({GAIN.name: Sample.of(gain)}) for step, gain in zip(steps, np.diff(means).T, strict=True)}


# -- the paper ------------------------------------------------------------------------------------------------------


def beside(figure: str, title: str, systems: dict[str, str], note: str) -> Experiment:
    return Experiment(
        figure,
        title,
        OVERALL,
        [
            Better("fMoE has the lowest TTFT", TTFT, "fmoe", LESS_TTFT),
            Better("fMoE has the lowest TPOT", TPOT, "fmoe", LESS_TPOT),
            Better("fMoE hits most", HITS, "fmoe", MORE_HITS),
        ],
        systems,
        num_devices=CARDS,
        note=note,
    )


PAPER = Paper(
    "fmoe",
    "fMoE: Taming Latency-Memory Trade-Off in MoE-Based LLM Serving",
    [
        Experiment(
            "4",
            "Hit rate by prefetch distance: maps, and what a request chose so far",
            "hit rates fall as the distance grows; maps of iterations hit significantly more than a request's counts, "
            "everywhere (no numbers).",
            [
                Trend("with maps hits fall with the distance", HITS, "fmoe", rises=False),
                Better("at every distance maps hit more than a request's counts, and than no prediction", HITS, "fmoe"),
            ],
            {"fmoe": "fmoe:distance={at}", "counts": COUNTS + ":distance={at}", **CACHES},
            Sweep("distance", (1, DISTANCE, 6)),
            num_devices=CARDS,
        ),
        Experiment(
            "8",
            "Whether a similar map means that what it names is needed",
            "Pearson's r of similarity and hit rate is 0.74 to 0.97 over three models and two data sets.",
            [
                Within("by trajectory, as in the paper", PEARSON, "trajectory", 0.74, float("inf")),
                Within("by embedding, as in the paper", PEARSON, "semantic", 0.74, float("inf")),
            ],
            measure=similarity,
            note="Hits are those of a map's K likeliest experts, without a cache.",
        ),
        beside(
            "9",
            "Beside others, each as its own paper has it",
            FAIR,
            "The paper's ProMoE is a prototype of its authors, a stride without training; here it is ProMoE's.",
        ),
        beside(
            "9-artifact",
            "Beside others, all as the artifact runs them",
            ARTIFACT,
            "What each puts into the prefetch queue is the artifact's (commit 051cb7e); nothing waits for transfers.",
        ),
        Experiment(
            "10",
            "Latency of requests that arrive and queue",
            "the CDF of fMoE's latencies lies left of its rivals', with empty stores (no numbers).",
            [Better("fMoE has the lowest latency", LATENCY, "fmoe")],
            FAIR,
            num_devices=CARDS,
            is_online=True,
            needs=("prompts",),
        ),
        Experiment(
            "11",
            "TPOT by memory",
            "fMoE is fastest from 6 to 96 GB; at 6 GB by 32, 24, 18, 18 % against DeepSpeed, Mixtral-Offloading, "
            "ProMoE and MoE-Infinity.",
            [
                Better("at the least memory fMoE has the lowest TPOT", TPOT, "fmoe", LESS_AT_LEAST, at=("10%",)),
                Better("and with more", TPOT, "fmoe", at=("25%",)),
            ],
            FAIR,
            Sweep("memory", ("10%", "25%")),
            num_devices=CARDS,
        ),
        Experiment(
            "12a",
            "Hit rate by predictor",
            "hit count is worst; Map (T) < Map (T+S) < Map (T+S+delta), which is best; speculation lies between.",
            [
                Better("a full map hits most", HITS, "map (T+S+delta)"),
                Order(
                    "hit count < Map (T) < Map (T+S) < Map (T+S+delta)",
                    *(HITS, ("map (T+S+delta)", "map (T+S)", "map (T)", "hit count")),
                ),
            ],
            {
                "speculate": f"fmoe:prediction=lookahead:eviction=lfu:distance={DISTANCE}",
                "hit count": f"{COUNTS}:distance={DISTANCE}",
                "map (T)": f"fmoe:semantic=no:select=top-k:distance={DISTANCE}",
                "map (T+S)": f"fmoe:select=top-k:distance={DISTANCE}",
                "map (T+S+delta)": FMOE,
                **CACHES,
            },
            num_devices=CARDS,
            needs=("probs", "embedding", "lookahead"),
        ),
        Experiment(
            "12b",
            "Hit rate by eviction policy",
            "LRU hits least, LFU more, fMoE's 1 / (p x freq) most (no numbers).",
            [
                Order(
                    "fMoE > LFU > LRU with the same prediction, > LRU without one",
                    *(HITS, ("fmoe", "fmoe, LFU", "fmoe, LRU", "lru")),
                )
            ],
            {
                "fmoe": FMOE,
                "fmoe, LFU": f"fmoe:eviction=lfu:distance={DISTANCE}",
                "fmoe, LRU": f"fmoe:eviction=lru:distance={DISTANCE}",
                **CACHES,
            },
            num_devices=CARDS,
        ),
        Experiment(
            "13",
            "TPOT by prefetch distance",
            "below d = 3 matching is not hidden, above it hit rates fall: latency is least at 3.",
            [Lowest("TPOT is least between d = 1 and 6", TPOT, "fmoe")],
            {"fmoe": "fmoe:distance={at}", **CACHES},
            Sweep("distance", (1, DISTANCE, 6)),
            num_devices=CARDS,
            note="Matching takes no time here, so that there is less to hide than in the paper.",
        ),
        Experiment(
            "14a",
            "Similarity by capacity of the map store",
            "similarity rises steeply below 1000 maps, and little beyond.",
            [
                Better(
                    "four times as many maps win more below 1000 than beyond",
                    GAIN,
                    f"{CAPACITIES[0]} to {CAPACITIES[1]} maps",
                )
            ],
            measure=capacities,
        ),
        Experiment(
            "15",
            "What an iteration waits for",
            "all that is not asynchronous, loading on demand included, adds less than 5 % to an iteration.",
            [Within("waiting for experts is below 5 % of decode", WAITING, "fmoe", 0.0, 0.05)],
            {"fmoe": FMOE, **CACHES},
            num_devices=CARDS,
        ),
    ],
)
