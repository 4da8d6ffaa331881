"""How long each system takes to get over a change of workload (MoE-Infinity, section 5.2, table 3), in the simulator.

    python bench/workload_change.py TRACE [TRACE] [--first NAME --then NAME] [--system A,B] [--memory 25%]
                                    [--before 12] [--after 20] [--runs 3] [--hardware rtx3090] [--geometry NAME]
                                    [--predictor FILE] [--seed 0] [--out FILE]

Two traces of one model are the two domains; of a single trace, two categories of its requests are (`--first`, `--then`:
the two with the most requests). Each run draws other requests. A system starts empty and serves `--before` requests of
the first domain, then `--after` of the other. Beside it the same system serves the same last requests after `--before`
others of their own domain: what a request misses in hit rate against that is what the change costs. Requests until the
hit rate is back: the first from which on every mean over WINDOW requests is within POINTS of it; the least, the mean
and the most over the runs, and in how many it was not back at the end. Systems that need what the trace lacks are left
out and named.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from report import print_report

from expertly.core.errors import ExpertlyError
from expertly.policies.learned import read_learned
from expertly.policies.predictor.learned import LearnedWeights
from expertly.reproduce.moe_infinity.recovery import requests_back
from expertly.scheduler.presets import get_system, runnable_systems
from expertly.sim.hardware import Hardware, read_geometry
from expertly.sim.schedule import Schedule
from expertly.sim.study import Memory, Study
from expertly.sim.workload import RowRange
from expertly.trace.reader import Trace, TraceRequest
from expertly.trace.writer import TraceWriter


def joined(traces: Sequence[Trace], folder: Path) -> Trace:
    """One trace of all their rows; the requests of each are a category, named after its folder."""
    first = traces[0].manifest
    for trace in traces:
        if trace.manifest.layers != first.layers or set(trace.manifest.fields) != set(first.fields):
            raise SystemExit(f"{trace.folder}: not a trace of the model of {traces[0].folder}, with the same fields")
    fields = [field for name, field in first.fields.items() if name != "iteration"]
    with TraceWriter(folder, model=first.model, layers=first.layers, fields=fields, scoring=first.scoring) as writer:
        for trace in traces:
            for request in trace.requests:
                writer.begin_request(trace.folder.name, request.prompt, request.num_prompt_tokens)
                stored = [field.name for field in first.stored_fields if field.name not in ("iteration", "request")]
                stop = request.first_row + request.num_rows
                for block in trace.blocks(["iteration", *stored], request.first_row, stop):
                    sizes = np.unique(block.columns["iteration"], return_counts=True)[1]
                    writer.extend({name: block.columns[name] for name in stored}, sizes)
    return Trace.open(folder)


class Change:
    """One trace, two domains."""

    def __init__(self, trace: Trace, args: argparse.Namespace) -> None:
        self._trace = trace
        self._args = args
        self._hardware = Hardware.read(args.hardware)
        self._memory = Memory(args.memory)
        self._weights = None if args.predictor is None else read_learned(args.predictor, LearnedWeights).learned
        sizes = [layer.geometry() for layer in trace.manifest.layers]
        self._layers = tuple(size for size in sizes if size is not None) or None
        self._dense = trace.manifest.dense
        if args.geometry is not None:
            given = read_geometry(args.geometry)
            self._layers, self._dense = given.layers, given.dense
        counted = Counter(request.category for request in trace.requests if request.num_rows)
        most = [name for name, _ in counted.most_common(2)]
        if len(most) < 2 and not (args.first and args.then):
            raise SystemExit(f"{trace.folder}: requests of two categories, or two traces, are needed")
        self.domains = args.first or most[0], args.then or most[1]
        self._requests = [
            [request for request in trace.requests if request.num_rows and request.category == domain]
            for domain in self.domains
        ]
        needed = args.before, args.before + args.after
        for domain, requests, num in zip(self.domains, self._requests, needed, strict=True):
            if len(requests) < num:
                raise SystemExit(f"{domain}: {len(requests)} requests; --before, --after take {num} of it")

    def row(self, system: str) -> dict[str, Any]:
        """What the change costs this system."""
        back: list[int | None] = []
        misses: list[list[float]] = []
        before, levels = self._args.before, []
        for run in range(self._args.runs):
            first, then = ([*requests] for requests in self._requests)
            Random(self._args.seed + run).shuffle(first)
            Random(self._args.seed + run).shuffle(then)
            served = then[before : before + self._args.after]
            changed, same = (self._hits(system, [*past[:before], *served])[before:] for past in (first, then))
            pairs = [(a, b) for a, b in zip(changed, same, strict=True) if a is not None and b is not None]
            misses.append([b - a for a, b in pairs])
            levels += [b for _, b in pairs]
            back.append(requests_back(misses[-1]))
        known = [one for one in back if one is not None]
        return {
            "system": system,
            "hit_rate": float(np.mean(levels)),
            "first_request_misses": float(np.mean([one[0] for one in misses])),
            "first_five_miss": float(np.mean([np.mean(one[:5]) for one in misses])),
            "least": min(known, default=None),
            "mean": float(np.mean(known)) if known else None,
            "most": max(known, default=None),
            "never_back": len(back) - len(known),
        }

    def _hits(self, system: str, requests: Sequence[TraceRequest]) -> list[float | None]:
        """The hit rate of each request's decode."""
        schedule = Schedule([], [RowRange(one.number, one.first_row, one.num_rows) for one in requests])
        study = Study(
            self._trace,
            schedule,
            self._hardware,
            self._layers,
            self._dense,
            seed=self._args.seed,
            learned=self._weights,
        )
        row = study.row(get_system(system), self._memory)
        if row["skipped"] is not None:
            raise LookupError(row["skipped"])
        hits: list[float | None] = row["hit_rate_by_request"]
        return hits


def results(change: Change, systems: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row a system."""
    for system in systems:
        try:
            yield change.row(system)
        except (LookupError, ExpertlyError) as error:
            yield {"system": system, "left_out": str(error)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("traces", type=Path, nargs="+")
    add("--first")
    add("--then")
    add("--system", help="default: all that an engine can run, but resident")
    add("--memory", default="25%")
    add("--before", type=int, default=12)
    add("--after", type=int, default=20)
    add("--runs", type=int, default=3)
    add("--hardware", default="rtx3090")
    add("--geometry")
    add("--predictor", type=Path, help="weights for systems that need some; they stay as they are")
    add("--seed", type=int, default=0)
    add("--out")
    args = parser.parse_args()
    systems = args.system.split(",") if args.system else [name for name in runnable_systems() if name != "resident"]
    with tempfile.TemporaryDirectory() as scratch:
        traces = [Trace.open(path) for path in args.traces]
        trace = traces[0] if len(traces) == 1 else joined(traces, Path(scratch) / "joined")
        change = Change(trace, args)
        settings = {key: str(value) for key, value in vars(args).items() if key != "out"}
        settings["domains"] = " -> ".join(map(str, change.domains))
        print_report("workload-change", list(results(change, systems)), settings, args.out)


if __name__ == "__main__":
    main()
