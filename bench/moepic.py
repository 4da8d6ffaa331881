"""MoEpic against its parts and against others, in the simulator: its table 1, figures 4b, 7 and 8, and table 3.

    python bench/moepic.py TRACE [--study hits,ratio,ablation,compare,memory,rearrange] [--memory 10%,25%,50%]
                           [--keep 4,8,12,16,20,24] [--tokens 2500] [--hardware rtx3090] [--geometry NAME]
                           [--launch-us N] [--layer-us N] [--targets-ms N,..] [--seed 0] [--out FILE]

Stores, weights and counts of the others are filled from 70 % of the requests, the rest is simulated from an empty
cache; `hits` takes the first tokens of the trace as they come, as nothing in it learns beforehand. MoEpic configures
itself while it runs; `planned` is it beginning with a plan made from the first of those 70 %, four times --tokens. Hit
rates are of decode; `kept` counts an expert whose top is there as hit, as the paper's tables do. In a trace without
lookahead whoever looks ahead has a modelled one; where the trace's is modelled (`trace synth --lookahead`) rows say so.

hits       hit rates of random, lfu, lru, lcp, an lcp with omega = 32, not 128, and one that leaves prompts out, each
           layer keeping --keep experts
ratio      time by the kept part of an expert, theta, all layers alike, with its two ends: nothing kept, nothing ahead;
           computing is what a decode step takes where it waits for no load
ablation   without the prefetcher (random, none), without LCP, without the configurator, with it as the paper has it, at
           the middle of --memory
compare    TTFT, TPOT and hits beside other systems, by memory
memory     the least memory for a TPOT, to one percent of the experts, by bisection; TPOTs of --targets-ms, else between
           that of all experts here and that of lru at the least of --memory
rearrange  TPOT of each request while its domain changes, with a small tau, beside the first configuration kept
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from report import print_report

from expertly.core.messages import Span
from expertly.lab.routing_rates import rates_of_trace
from expertly.lab.study import study as train
from expertly.lab.train import TrainOptions
from expertly.policies.allocation.moepic import SplitPlan, configure
from expertly.policies.eviction.lcp import LCP
from expertly.policies.predictor.learned import LearnedWeights
from expertly.scheduler.presets import get_system
from expertly.sim.compute import compute_model, step_times
from expertly.sim.hardware import Hardware, read_geometry
from expertly.sim.schedule import Schedule, Selection, first_rows, make_schedule
from expertly.sim.study import Memory, Study
from expertly.trace.reader import Trace

SPLIT = (7, 3)
POLICIES = {
    "random": "random",
    "lfu": "lfu",
    "lru": "lru",
    "lcp": "lcp",
    "lcp_omega_32": "lcp:omega=32",
    "lcp_decode": "lcp:eviction=moepic.LCPOfDecode",
}


class LCPOfDecode(LCP):
    """LCP whose counts and tokens are those of passes of one token."""

    def used(self, experts: Sequence[int], num_tokens: Sequence[int], batch_tokens: int) -> None:
        if batch_tokens == 1:
            super().used(experts, num_tokens, batch_tokens)


SEGMENTS = 8  # of the sweep over theta
OTHERS = ("lru", "lcp", "mixtral-offloading", "adapmoe", "fmoe", "promoe", "moe-infinity", "oracle", "resident")
WITHOUT = {
    "nothing": "moepic",
    "prefetcher: random": "moepic:prediction=random",
    "prefetcher: none": "moepic:prediction=none",
    "LCP: random": "moepic:eviction=random",
    "configurator": "moepic:allocation=split",
    "all three": "moepic:allocation=split:eviction=random:prediction=random",
    "cost of spans and timed start": "moepic:pieces=no:start=half",
}
IN_MEMORY = ("mixtral-offloading", "adapmoe", "moe-infinity", "lru", "moepic")
TARGETS = (0.25, 0.5, 0.75)  # of the way from resident's TPOT to lru's
TAUS = (32, 128)
NEVER = 10**9
Bools = npt.NDArray[np.bool_]
STUDIES = ("hits", "ratio", "ablation", "compare", "memory", "rearrange")


class Passes:
    """Stands where a timeline would be: when each pass ended, and how long it computed, in nanoseconds."""

    def __init__(self) -> None:
        self.ends: list[int] = []
        self.computing: list[int] = []
        self._computing = 0

    def begin_run(self, name: str) -> Passes:
        self.__init__()  # type: ignore[misc]
        return self

    def computed(self, what: str, layer: int, begin_ns: int, end_ns: int) -> None:
        self._computing += end_ns - begin_ns
        if what == "head":
            self.ends.append(end_ns)
            self.computing.append(self._computing)
            self._computing = 0

    def moved(self, where: str, span: Span, begin_ns: int, end_ns: int) -> None: ...

    def spent(self, what: str, begin_ns: int, end_ns: int) -> None: ...

    def predicted(self, what: str, begin_ns: int, end_ns: int) -> None: ...


class Bench:
    """One trace, one machine, several budgets."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.trace = Trace.open(args.trace)
        self.hardware = Hardware.read(args.hardware)
        for key in ("launch", "layer"):
            given = getattr(args, f"{key}_us")
            if given is not None:
                self.hardware = replace(self.hardware, **{f"{key}_ns": round(given * 1e3)})
        self.memories = [Memory(label) for label in args.memory.split(",")]
        self.keep = [int(num) for num in args.keep.split(",")]
        self.targets = [float(num) / 1e3 for num in args.targets_ms.split(",")] if args.targets_ms else None
        self.seed: int = args.seed
        self.num_tokens: int = args.tokens
        if args.geometry is None:
            sizes = [layer.geometry() for layer in self.trace.manifest.layers]
            self.layers, self.dense = tuple(size for size in sizes if size is not None), self.trace.manifest.dense
        else:
            sizes_of = read_geometry(args.geometry)
            self.layers, self.dense = sizes_of.layers, sizes_of.dense

    def study(self, schedule: Schedule | None = None, learned: LearnedWeights | None = None) -> Study:
        if schedule is None:
            selection = Selection(num_tokens=self.num_tokens, split=SPLIT, seed=self.seed)
            schedule = make_schedule(self.trace, selection)
        return Study(self.trace, schedule, self.hardware, self.layers, self.dense, seed=self.seed, learned=learned)

    def row(self, study: Study, name: str, memory: Memory) -> dict[str, Any]:
        """What a system did, in the columns of this report."""
        if not self.trace.has("lookahead"):
            parts = get_system(name)
            if parts.prediction in ("lookahead", "speculative"):
                name += ":prediction=modelled"
        passes = study.chrome = Passes()  # type: ignore[assignment]
        row = study.row(get_system(name), memory)
        if row["skipped"] is not None:
            raise SystemExit(row["skipped"])
        kept = row["hit_rate"] + row["partial_hit_rate"]
        columns = ("ttft_s", "tpot_s", "hit_rate", "byte_hit_rate", "bytes_loaded")
        about = {"system": name, "memory": memory.label, "kept": kept, **{key: row[key] for key in columns}}
        if passes.ends:  # with all experts here it may have run before
            is_decode = np.concatenate([self._is_decode(span) for span in study.schedule.test])
            about["computing_ms"] = float(np.array(passes.computing)[is_decode].mean()) / 1e6
            about["waiting_ms"] = row["tpot_s"] * 1e3 - about["computing_ms"]
        if self.trace.is_modelled("lookahead"):
            about["lookahead"] = self.trace.manifest.fields["lookahead"].note
        return about

    def _is_decode(self, span: Span) -> Bools:
        """Of each of its passes."""
        rows = span.first_row, span.first_row + span.num_rows
        _, firsts = np.unique(self.trace.rows("iteration", *rows), return_index=True)
        is_decode: Bools = ~self.trace.rows("is_prefill", *rows)[firsts]
        return is_decode

    def plan(self, study: Study, memory: Memory) -> SplitPlan:
        """What the training part says."""
        geometry = study.geometry_of(get_system("moepic"))
        times = step_times(geometry, self.hardware.link, compute_model(self.hardware, geometry, self.dense))
        spans = first_rows(study.schedule.training, 4 * self.num_tokens)
        rates = rates_of_trace(self.trace, spans).layers
        return configure(geometry, memory.budget(geometry).kept_slots, rates, times).plan

    def planned(self, study: Study, name: str, memory: Memory) -> dict[str, Any]:
        study.plan = self.plan(study, memory)
        row = self.row(study, name, memory)
        study.plan = None
        return row | {"system": f"{row['system']}, planned"}

    # -- the studies -------------------------------------------------------------------------------------------

    def hits(self) -> Iterator[dict[str, Any]]:
        study = self.study(make_schedule(self.trace, Selection(num_tokens=self.num_tokens)))
        for num in self.keep:
            memory = Memory(f"{num}/layer", num)
            found = {key: study.row(get_system(name), memory)["hit_rate"] for key, name in POLICIES.items()}
            best = max(found["lru"], found["lfu"])
            above = {"lcp_above_best": found["lcp"] - best, "holds": found["lcp"] >= best - 0.005}
            yield {"study": "hits", "kept_experts": num, "of": self.layers[0].num_experts, **found, **above}

    def ratio(self) -> Iterator[dict[str, Any]]:
        study = self.study()
        cut = f"moepic:allocation=split:segments={SEGMENTS}"
        for memory in self.memories:
            about = {"study": "ratio", "memory": memory.label}
            lcp = self.row(study, f"lcp:segments={SEGMENTS}", memory)
            only = self.row(study, f"{cut}:theta=1:prediction=none", memory)
            equal = all(lcp[key] == only[key] for key in lcp if key != "system")
            none = self.row(study, f"moepic:allocation=none:segments={SEGMENTS}", memory)
            yield about | {"theta": "prefetch only", **none}
            for top in range(1, SEGMENTS + 1):
                theta = top / SEGMENTS
                yield about | {"theta": theta, **self.row(study, f"{cut}:theta={theta}", memory)}
            yield about | {"theta": "cache only", **only, "equals_lcp": equal}
            configured = self.row(study, f"moepic:segments={SEGMENTS}", memory)
            yield about | {"theta": "configured", **configured}

    def ablation(self) -> Iterator[dict[str, Any]]:
        study, memory = self.study(), self.memories[len(self.memories) // 2]
        rows = {without: self.row(study, name, memory) for without, name in WITHOUT.items()}
        if self.trace.has("lookahead"):
            rows["planned"] = self.planned(study, "moepic", memory)
        first = rows["nothing"]
        for without, row in rows.items():
            ratios = {f"{key}_ratio": row[f"{key}_s"] / first[f"{key}_s"] for key in ("ttft", "tpot")}
            yield {"study": "ablation", "without": without, **ratios, **row}

    def compare(self) -> Iterator[dict[str, Any]]:
        options = TrainOptions((get_system("promoe").distance,), seed=self.seed)
        study = self.study(learned=train(self.trace, SPLIT, options).trained.weights)
        for memory in self.memories:
            for name in ("moepic", *OTHERS):
                yield {"study": "compare", **self.row(study, name, memory)}
            yield {"study": "compare", **self.planned(study, "moepic", memory)}

    def memory(self) -> Iterator[dict[str, Any]]:
        study = self.study()
        nbytes = study.geometry.nbytes
        tpots: dict[tuple[str, int], float] = {}

        def tpot(name: str, percent: int) -> float:
            if (name, percent) not in tpots:
                tpots[name, percent] = self.row(study, name, Memory(f"{percent}%"))["tpot_s"]
            return tpots[name, percent]

        fastest = self.row(study, "resident", Memory("100%"))["tpot_s"]
        slowest = self.row(study, "lru", self.memories[0])["tpot_s"]
        ring = study.geometry.layers[0].top_k * study.geometry.layers[0].expert_nbytes
        between = [fastest + share * (slowest - fastest) for share in TARGETS]
        for target in self.targets or between:
            needed: dict[str, int] = {}
            for name in IN_MEMORY:
                low, high = -(-100 * ring // nbytes), 100  # the least is from `low` on; `high` is enough
                while low < high:
                    middle = (low + high) // 2
                    low, high = (low, middle) if tpot(name, middle) <= target else (middle + 1, high)
                needed[name] = high
            least = min(num for name, num in needed.items() if name != "moepic")
            gib = {name: num * nbytes / 100 / (1 << 30) for name, num in needed.items()}
            yield {"study": "memory", "target_ms": target * 1e3, **gib, "of_best_other": needed["moepic"] / least}

    def rearrange(self) -> Iterator[dict[str, Any]]:
        """Requests of two categories, one after the other, in the order of the trace."""
        counted = Counter(request.category for request in self.trace.requests if request.num_rows)
        spans: list[Span] = []
        domains = [category for category, _ in counted.most_common(2)]
        firsts = []
        for domain in domains:
            requests = [one for one in self.trace.requests if one.category == domain and one.num_rows]
            firsts.append(len(spans))
            own = [Span(one.number, one.first_row, one.num_rows) for one in requests]
            spans += first_rows(own, self.num_tokens // 2)
        study, memory = self.study(Schedule([], spans)), self.memories[len(self.memories) // 2]
        held, _, _ = self._tpots(study, spans, f"tau={NEVER}", memory)
        for tau in TAUS:
            found, times, moved = self._tpots(study, spans, f"tau={tau}", memory)
            ratios = [a / b for a, b in zip(found, held, strict=True)]
            yield {
                "study": "rearrange",
                "domains": ", ".join(map(str, domains)),
                "memory": memory.label,
                "tau": tau,
                "requests": len(found),
                "changes_at": firsts[1],
                "configurations": times,
                "bytes_loaded": moved,
                "mean_ratio": statistics.mean(ratios),
                "after_change_ratio": statistics.mean(ratios[firsts[1] :]),
                "least_ratio": min(ratios),
                "most_ratio": max(ratios),
                "holds": max(ratios) <= 1.2,
            }

    def _tpots(self, study: Study, spans: list[Span], options: str, memory: Memory) -> tuple[list[float], int, int]:
        """Of each request the mean time of its decode steps; how often was configured; bytes loaded."""
        passes = study.chrome = Passes()  # type: ignore[assignment]
        row = study.row(get_system(f"moepic:{options}"), memory)
        times = np.diff([0, *passes.ends])
        tpots, begin = [], 0
        for span in spans:
            is_decode = self._is_decode(span)
            if is_decode.any():
                tpots.append(float(times[begin : begin + len(is_decode)][is_decode].mean()))
            begin += len(is_decode)
        assert begin == len(times), "every pass is of a request"
        return tpots, row["allocation"]["configurations"], row["bytes_loaded"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--study", default=",".join(STUDIES))
    parser.add_argument("--memory", default="10%,25%,50%")
    parser.add_argument("--keep", default="4,8,12,16,20,24")
    parser.add_argument("--tokens", type=int, default=2500)
    parser.add_argument("--hardware", default="rtx3090")
    parser.add_argument("--geometry")
    parser.add_argument("--launch-us", type=float, help="to start one span of an expert, instead of the profile's")
    parser.add_argument("--layer-us", type=float, help="to start a layer without its experts, instead of the profile's")
    parser.add_argument("--targets-ms", help="TPOTs to find memory for, with commas between")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    args = parser.parse_args()
    bench = Bench(args)
    rows: list[dict[str, Any]] = []
    for name in args.study.split(","):
        if name not in STUDIES:
            parser.error(f"--study {name!r}: accepted: {', '.join(STUDIES)}")
        rows += getattr(bench, name)()
    print_report("moepic", rows, {key: str(value) for key, value in vars(args).items() if key != "out"}, args.out)


if __name__ == "__main__":
    main()
