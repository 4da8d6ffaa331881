"""What the preset `expertly` loads, beside the better of lru and lfu and the least that replacement must (belady).

    python bench/bytes.py TRACE[,TRACE...] [--memory 25%,50%] [--split 7:3] [--tokens 3000] [--groups 1]
        [--hardware rtx3090,laptop-nvme,h100-pcie] [--geometry NAME,NAME...] [--systems expertly] [--out FILE]
        [--left-out [--teachers TRACE,TRACE...] [--taught 3000]]

Of every trace the training part teaches `expertly` (lru and lfu begin empty, as always), the rest is simulated, at
most `--tokens` of each; with `--groups` each group of its categories by itself, in the order of their names: a domain.
A geometry a trace: a shipped description, a TOML file or `-`, its own.

With `--left-out` nothing of a domain itself teaches: it begins from nothing, from training parts of all other domains
of its model, and from `--teachers` (`expertly lab trace synth` makes routing up), `--taught` tokens; `--systems` learn
of reuse.

gap       (better of lru and lfu - system) / (better of lru and lfu - belady), in bytes loaded a token, prompts included
of_best   bytes loaded, of the least of lru, lfu, lcp and fmoe: with `--left-out`
tpot      of the system / of the better of lru and lfu, on each machine; of lru alone; of the best of those four
The last rows are means over traces (domains of a trace first).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from common import options, print_report

from expertly.core.geometry import ModelShape
from expertly.policies.reuse import ReuseModel
from expertly.scheduler.systems import get_system
from expertly_lab.cli.arguments import split
from expertly_lab.cli.inputs import trace_geometry
from expertly_lab.sim.hardware import Hardware
from expertly_lab.sim.schedule import Schedule, Selection, first_rows, make_schedule
from expertly_lab.sim.study import Memory, Study
from expertly_lab.sim.training import teach
from expertly_lab.sim.workload import RowRange
from expertly_lab.trace.reader import Trace

PLAIN = ("lru", "lfu")
OTHERS = ("lcp", "fmoe")
BOUND = "belady"
WORST = ("tpot_of_lru", "of_best", "tpot_of_best")  # what a mean has of its rows


@dataclass(frozen=True)
class Domain:
    """Some categories of a trace."""

    trace: Trace
    geometry: str | None
    name: str
    schedule: Schedule

    def rows(
        self, schedule: Schedule, reuse: ReuseModel | None, names: Sequence[str], args: argparse.Namespace
    ) -> dict[str, dict[str, dict[str, Any]]]:
        """memory -> system -> its row, with TPOTs of every machine."""
        layers, dense, _ = trace_geometry(self.trace, self.geometry)
        found: dict[str, dict[str, dict[str, Any]]] = {memory: {} for memory in args.memory}
        for machine in args.hardware:
            study = Study(self.trace, schedule, Hardware.read(machine), layers, dense, seed=args.seed, taught=reuse)
            for memory, rows in found.items():
                for name in names:
                    row = study.row(get_system(name), Memory(memory))
                    rows.setdefault(name, row | {"tpot_s": {}})["tpot_s"][machine] = row["tpot_s"]
        return found


def domains(trace: Trace, geometry: str | None, args: argparse.Namespace) -> Iterator[Domain]:
    whole = make_schedule(trace, Selection(split=args.split, seed=args.seed))
    category = {request.number: str(request.category) for request in trace.requests}
    names = sorted(set(category.values()))
    num = min(args.groups, len(names))
    for group in range(num):
        some = names[group * len(names) // num : (group + 1) * len(names) // num]
        parts = [[one for one in part if category[one.request] in some] for part in (whole.training, whole.test)]
        training = parts[0] if args.left_out else whole.training
        name = "all" if num == 1 else "-".join(dict.fromkeys((some[0], some[-1])))
        yield Domain(trace, geometry, name, Schedule(training, first_rows(parts[1], args.tokens)))


def shape_of(trace: Trace) -> ModelShape:
    layers = trace.manifest.layers
    return ModelShape(tuple(one.num_experts for one in layers), tuple(one.top_k for one in layers))


def taught(some: list[tuple[Trace, list[RowRange]]], num_tokens: int) -> ReuseModel:
    """From as many tokens of each."""
    model = ReuseModel(shape_of(some[0][0]))
    for trace, spans in some:
        teach(model, trace, first_rows(spans, num_tokens // len(some)))
    return model


def teachings(
    one: Domain, all_of_them: list[Domain], args: argparse.Namespace
) -> Iterator[tuple[str, Schedule, ReuseModel | None]]:
    """(what teaches, what is learned from within the study and simulated, what was learned before)."""
    if not args.left_out:
        yield "its training part", one.schedule, None
        return
    empty = Schedule([], one.schedule.test)
    yield "nothing", empty, None
    others = [(other.trace, other.schedule.training) for other in all_of_them if other is not one]
    teachers = [(trace, [RowRange(None, 0, trace.num_rows)]) for trace in map(Trace.open, map(Path, args.teachers))]
    for name, some in (("other domains", others), ("teachers", teachers)):
        alike = [(trace, spans) for trace, spans in some if shape_of(trace) == shape_of(one.trace)]
        if alike:
            yield name, empty, taught(alike, args.taught)


def results(one: Domain, all_of_them: list[Domain], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    names = (*PLAIN, BOUND, *(OTHERS if args.left_out else ()))
    plain = one.rows(Schedule([], one.schedule.test), None, names, args)
    for teacher, schedule, reuse in teachings(one, all_of_them, args):
        found = one.rows(schedule, reuse, args.systems, args)
        about = {"trace": one.trace.folder.name, "domain": one.name, "learned from": teacher}
        for memory, rows in found.items():
            for name in args.systems:
                yield about | {"memory": memory, **_compared(plain[memory] | rows, name)}


def _compared(rows: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    num_tokens = rows[name]["tokens"]
    loaded = {system: row["bytes_loaded"] / num_tokens for system, row in rows.items()}
    best = min(loaded[system] for system in PLAIN)
    tpots = {system: row["tpot_s"] for system, row in rows.items()}
    ratio = {m: t / min(tpots[system][m] for system in PLAIN) for m, t in tpots[name].items()}
    return {
        "system": name,
        **{f"{system}_mib": value / 2**20 for system, value in loaded.items() if system in (*PLAIN, BOUND)},
        "mib": loaded[name] / 2**20,
        "gap": (best - loaded[name]) / (best - loaded[BOUND]),
        **_of_best(loaded, tpots, name),
        "hit_rate": rows[name]["hit_rate"],
        **{f"{system}_hit_rate": rows[system]["hit_rate"] for system in (*PLAIN, BOUND)},
        **{f"tpot_{machine}": value for machine, value in ratio.items()},
        "tpot_of_lru": max(t / tpots["lru"][m] for m, t in tpots[name].items()),
    }


def _of_best(loaded: dict[str, float], tpots: dict[str, dict[str, float]], name: str) -> dict[str, float]:
    others = [*PLAIN, *OTHERS]
    if not loaded.keys() >= {*others}:
        return {}
    slowest = max(t / min(tpots[one][m] for one in others) for m, t in tpots[name].items())
    return {"of_best": loaded[name] / min(loaded[one] for one in others), "tpot_of_best": slowest}


def means(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Over the domains of each trace, then over traces."""
    of = itemgetter("system", "memory", "learned from")
    for key in dict.fromkeys(map(of, rows)):
        alike, of_traces = [row for row in rows if of(row) == key], []
        for trace in dict.fromkeys(row["trace"] for row in alike):
            some = [row for row in alike if row["trace"] == trace]
            of_traces.append(_mean(some, trace))
            if len(some) > 1:
                yield of_traces[-1]
        yield _mean(of_traces, "mean")


def _mean(rows: list[dict[str, Any]], trace: str) -> dict[str, Any]:
    """Of what hangs on the better of all, the worst."""
    keys = ("gap", *(key for key in rows[0] if key.startswith("tpot_") and key not in WORST))
    worst = {key: max(row[key] for row in rows) for key in WORST if key in rows[0]}
    about = {key: rows[0][key] for key in ("memory", "learned from", "system")}
    return {"trace": trace, "domain": "mean"} | about | {key: fmean(row[key] for row in rows) for key in keys} | worst


def main() -> None:
    args = options(
        __doc__, "traces", memory="25%,50%", split="7:3", seed=0, tokens=3000, groups=1, left_out=False, teachers="",
        taught=3000, hardware="rtx3090,laptop-nvme,h100-pcie", geometry="", systems="expertly", out=None,
    )  # fmt: skip
    for name in ("traces", "memory", "teachers", "hardware", "geometry", "systems"):
        setattr(args, name, [one.strip() for one in getattr(args, name).split(",") if one])
    args.split = split(args.split)
    geometries = args.geometry or ["-"] * len(args.traces)
    if len(geometries) != len(args.traces):
        sys.exit(f"--geometry: {len(geometries)} for {len(args.traces)} traces; give one each, `-` for its own")
    found: list[Domain] = []
    for path, geometry in zip(args.traces, geometries, strict=True):
        found += domains(Trace.open(Path(path)), None if geometry == "-" else geometry, args)
    rows = [row for one in found for row in results(one, found, args)]
    settings = {key: str(value) for key, value in vars(args).items() if key != "out"}
    print_report("bytes", [*rows, *means(rows)], settings, args.out)


if __name__ == "__main__":
    main()
