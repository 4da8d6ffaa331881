"""fMoE against what it was compared with, on one trace: its figures 4, 8, 12, 13 and 14a, in the simulator.

    python bench/fmoe.py TRACE [--study distance,tracking,eviction,capacity,online,link] [--memory 25%]
                         [--hardware rtx3090] [--geometry NAME] [--seed 0] [--out FILE]

A trace with routing scores and embeddings (`expertly lab trace record --full`) shows everything; with imported routing
maps hold the chosen weights, and lookahead is left out. Stores, profiles and counts are filled from 70 % of the
requests, the rest is simulated from an empty cache; `online` starts with an empty store. Hit rates are of decode.

distance  hit rate of fmoe, of request-level counts and of lookahead by prefetch distance, and with K experts each
tracking  what predicts, at d = 3: lookahead, counts, maps by trajectory, by trajectory and embedding, and with delta
eviction  what goes, at d = 3: lru, lfu, fmoe, with the same prediction
capacity  similarity, hit rate and time by the capacity of the store
online    hit rate of each request, fmoe from an empty store beside lru
link      TPOT by the rate of the link, with the share of the gap from lru to the oracle that is closed
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from report import print_report

from expertly.core.geometry import DenseShape, LayerGeometry
from expertly.scheduler.presets import get_system
from expertly.sim.hardware import Hardware, read_geometry
from expertly.sim.schedule import Schedule, Selection, make_schedule
from expertly.sim.study import Memory, Study
from expertly.trace.reader import Trace

BASELINES = ("on-demand", "lru", "lfu")
COUNTS = "fmoe:prediction=counts:eviction=lfu"
LOOKAHEAD = "fmoe:prediction=lookahead:eviction=lfu"
PAPER_DISTANCE = 3
CAPACITIES = (125, 250, 500, 1000, 2000, 4000, 8000)
LINK_RATES = (0.5e9, 1e9, 2e9, 4e9, 8e9, 16e9, 32e9, 64e9)
STUDIES = ("distance", "tracking", "eviction", "capacity", "online", "link")

COLUMNS = (
    *("hit_rate", "prediction_accuracy", "recall", "coverage", "accuracy", "timeliness", "bytes_loaded", "tpot_s"),
    *("predictions_late", "similarity_correlation_semantic", "similarity_correlation_trajectory"),
)


class Bench:
    """One trace, one budget, one machine."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.trace = Trace.open(args.trace)
        self.hardware = Hardware.read(args.hardware)
        self.memory = Memory(args.memory)
        self.seed = args.seed
        self.num_tokens: int | None = args.tokens
        self.layers, self.dense = _sizes(self.trace, args.geometry)
        self.num_layers = len(self.trace.manifest.layers)
        self.has_lookahead = self.trace.has("lookahead")

    def study(self, is_online: bool = False, hardware: Hardware | None = None) -> Study:
        schedule = make_schedule(self.trace, Selection(split=(7, 3), seed=self.seed, num_tokens=self.num_tokens))
        if is_online:
            schedule = Schedule([], schedule.test)
        return Study(self.trace, schedule, hardware or self.hardware, self.layers, self.dense, seed=self.seed)

    def rows(self, study: Study, label: str, systems: Sequence[str], **about: Any) -> Iterator[dict[str, Any]]:
        """A row a system; bounds are left out."""
        for name in systems:
            outcome = study.row(get_system(name), self.memory)
            facts = outcome.get("predictor") or {}
            scores = {key: facts[key] for key in ("semantic_score", "trajectory_score") if key in facts}
            yield {"study": label, "system": name, **about, **{key: outcome.get(key) for key in COLUMNS}, **scores}

    # -- the studies -------------------------------------------------------------------------------------------

    def distance(self) -> Iterator[dict[str, Any]]:
        study = self.study()
        yield from self.rows(study, "distance", BASELINES)
        for d in range(1, self.num_layers // 2 + 1):
            names = ["fmoe", "fmoe:select=top-k", COUNTS, *([LOOKAHEAD] if self.has_lookahead and d <= 8 else [])]
            yield from self.rows(study, "distance", [f"{name}:distance={d}" for name in names], distance=d)

    def tracking(self) -> Iterator[dict[str, Any]]:
        names = [COUNTS, "fmoe:semantic=no:select=top-k", "fmoe:select=top-k", "fmoe"]
        names = [f"{name}:distance={PAPER_DISTANCE}" for name in ([LOOKAHEAD] if self.has_lookahead else []) + names]
        yield from self.rows(self.study(), "tracking", names)

    def eviction(self) -> Iterator[dict[str, Any]]:
        names = [f"fmoe:eviction={eviction}:distance={PAPER_DISTANCE}" for eviction in ("lru", "lfu", "fmoe")]
        yield from self.rows(self.study(), "eviction", names)

    def capacity(self) -> Iterator[dict[str, Any]]:
        study = self.study()
        for capacity in CAPACITIES:
            yield from self.rows(study, "capacity", [f"fmoe:capacity={capacity}"], capacity=capacity)

    def online(self) -> Iterator[dict[str, Any]]:
        """The first request from which on fmoe's hit rate so far is never again below lru's."""
        study = self.study(is_online=True)
        hits = {name: _hits_by_request(study, name, self.memory) for name in ("lru", "fmoe")}
        so_far = {name: _shares_so_far(one) for name, one in hits.items()}
        pairs = list(zip(so_far["fmoe"], so_far["lru"], strict=True))
        behind = [number for number, (ours, theirs) in enumerate(pairs, start=1) if ours <= theirs]
        overtakes = (behind[-1] + 1 if behind else 1) if not behind or behind[-1] < len(pairs) else None
        for number in sorted({1, 2, 3, 5, 10, 20, 50, 100, len(pairs)}):
            if number <= len(pairs):
                ours, theirs = pairs[number - 1]
                yield {"study": "online", "requests": number, "fmoe": ours, "lru": theirs, "overtakes_at": overtakes}

    def link(self) -> Iterator[dict[str, Any]]:
        for rate in LINK_RATES:
            hardware = replace(self.hardware, link=replace(self.hardware.link, nbytes_per_s=rate))
            study = self.study(hardware=hardware)
            names = ("lru", "lfu", "fmoe", "fmoe:distance=3", "oracle", "resident")
            found = {name: study.row(get_system(name), self.memory) for name in names}
            lru, oracle = found["lru"]["tpot_s"], found["oracle"]["tpot_s"]
            for name in names:
                row = found[name]
                closed = (lru - row["tpot_s"]) / (lru - oracle) if lru > oracle else None
                yield {
                    "study": "link",
                    "system": name,
                    "link_gb_per_s": rate / 1e9,
                    "tpot_s": row["tpot_s"],
                    "of_lru": row["tpot_s"] / lru,
                    "gap_closed": closed,
                    **{key: row.get(key) for key in ("hit_rate", "bytes_loaded", "predictions_late")},
                }


def _sizes(trace: Trace, name: str | None) -> tuple[tuple[LayerGeometry, ...] | None, DenseShape | None]:
    if name is not None:
        given = read_geometry(name)
        return given.layers, given.dense
    layers = [layer.geometry() for layer in trace.manifest.layers]
    known = tuple(layer for layer in layers if layer is not None)
    return (known if len(known) == len(layers) else None), trace.manifest.dense


def _hits_by_request(study: Study, name: str, memory: Memory) -> list[tuple[int, int]]:
    """(hits, demands) of each request's decode, in the order in which they ran."""
    metrics = study.simulate(get_system(name), memory.budget(study.geometry_of(get_system(name)))).metrics
    return metrics.hits_by_request()


def _shares_so_far(requests: Sequence[tuple[int, int]]) -> list[float]:
    hits = itertools.accumulate(hits for hits, _ in requests)
    demands = itertools.accumulate(demands for _, demands in requests)
    return [hit / max(1, demand) for hit, demand in zip(hits, demands, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--study", default=",".join(STUDIES))
    parser.add_argument("--memory", default="25%")
    parser.add_argument("--hardware", default="rtx3090")
    parser.add_argument("--geometry")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--out")
    args = parser.parse_args()
    bench = Bench(args)
    rows: list[dict[str, Any]] = []
    for name in args.study.split(","):
        if name not in STUDIES:
            parser.error(f"--study {name!r}: accepted: {', '.join(STUDIES)}")
        rows += getattr(bench, name)()
    settings = {key: str(value) for key, value in vars(args).items() if key != "out"}
    print_report("fmoe", rows, settings, args.out)


if __name__ == "__main__":
    main()
