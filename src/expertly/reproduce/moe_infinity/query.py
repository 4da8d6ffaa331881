"""Section B.1: what finding the nearest activation matrix costs."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.policies.learned import ModelShape
from expertly.policies.predictor.eam.matrices import Collection, Match
from expertly.reproduce import rules
from expertly.reproduce.experiment import Experiment
from expertly.reproduce.finding import Finding, Table
from expertly.reproduce.lab import Lab

LAYERS, EXPERTS, TOP_K = 26, 64, 6
SHAPE = Geometry(tuple(LayerGeometry(EXPERTS, TOP_K, 64, 64, 3, 2) for _ in range(LAYERS)))
WARM_UP = 8
BOUNDS_US = {1000: 21.0, 10000: 226.0}
"""As the paper measured."""
SHARE_OF = 0.120
"""Seconds a token, of which the paper's query takes less than 1 %."""


def clocked(call: Callable[[], object]) -> float:
    """Microseconds of one call."""
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def choices(dice: np.random.Generator, num_rows: int) -> npt.NDArray[np.int64]:
    """[T, L, K], some experts more often than others."""
    likely = np.exp(1.5 * dice.standard_normal((LAYERS, EXPERTS)))
    noise = dice.gumbel(size=(num_rows, LAYERS, EXPERTS))
    chosen: npt.NDArray[np.int64] = np.argsort(-(np.log(likely) + noise), axis=-1)[..., :TOP_K]
    return chosen


def full(capacity: int, dice: np.random.Generator) -> Collection:
    """Matrices of requests of 20 tokens."""
    collection = Collection(ModelShape.of(SHAPE), capacity)
    places = np.arange(LAYERS)[:, None] * EXPERTS
    for _ in range(capacity):
        counts = np.bincount((choices(dice, 20) + places).ravel(), minlength=LAYERS * EXPERTS)
        collection.add(counts.reshape(LAYERS, EXPERTS))
    return collection


def query(collection: Collection, dice: np.random.Generator, num_tokens: int, matches: int) -> float:
    """Median microseconds of one layer."""
    times = []
    for token in range(WARM_UP + num_tokens):
        match = Match(collection)
        for layer, experts in enumerate(choices(dice, 1)[0].tolist()):
            counts = dict.fromkeys(experts, 1)

            def one(match: Match = match, layer: int = layer, counts: dict[int, int] = counts) -> None:
                match.observe(layer, counts)
                match.nearest(matches)

            spent = clocked(one)
            if token >= WARM_UP:
                times.append(spent)
    return statistics.median(times)


def _run(lab: Lab) -> Finding:
    capacities = (120, 1000) if lab.quick else (120, 1000, 10000)
    found = {}
    for capacity in capacities:
        dice = np.random.default_rng(lab.seed)
        found[capacity] = query(full(capacity, dice), dice, 48, 1) / 1e6
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    rows = [(num, spent, BOUNDS_US[num] / 1e6 if num in BOUNDS_US else None) for num, spent in found.items()]
    checks = [
        rules.compared(
            f"a query of {num} matrices takes no longer than the paper's",
            ("here", spent),
            ("the paper", BOUNDS_US[num] / 1e6),
            above=False,
            unit="us",
            why=f"measured on {machine}; another run is in `bench/results/matrices.json`",
        )
        for num, spent in found.items()
        if num in BOUNDS_US
    ]
    most = max(found.values()) * LAYERS
    checks.append(
        rules.compared(
            "all queries of a token take less than 1 % of it",
            (f"{LAYERS} layers", most),
            (f"1 % of {SHARE_OF * 1e3:.0f} ms", SHARE_OF / 100),
            above=False,
            unit="ms",
            why="the paper queries at most once a layer, and counts one query; here all layers of a token are counted",
        )
    )
    table = Table.of(
        "One layer's increment and the nearest matrix", {"matrices": "", "here": "us", "paper": "us"}, rows
    )
    setting = f"no trace: {LAYERS} layers, {EXPERTS} experts, top-{TOP_K}; medians"
    return Finding("made up", setting, (table,), tuple(checks), (), machine)


EXPERIMENT = Experiment(
    "moe-infinity",
    ("B.1",),
    "What a query costs",
    "21 us a query of 1K matrices, 226 us of 10K, at most one a layer: less than 1 % of the latency, typically above "
    "120 ms a token.",
    _run,
    most=1,
    is_timed=True,
)
