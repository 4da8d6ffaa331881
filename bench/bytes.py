"""What the preset `expertly` loads, beside the better of lru and lfu and the least that replacement must (belady).

    python bench/bytes.py TRACE[,TRACE...] [--memory 25%,50%] [--split 7:3] [--tokens 3000] [--domains]
        [--hardware rtx3090,laptop-nvme,h100-pcie] [--geometry NAME,NAME...] [--systems expertly] [--out FILE]

Of every trace the training part teaches `expertly` (lru and lfu begin empty, as always), the rest is simulated; with
`--domains` each category of it by itself. A geometry a trace: a shipped description, a TOML file or `-`, its own.

gap       (better of lru and lfu - system) / (better of lru and lfu - belady), in bytes loaded a token, prompts included
tpot      of the system / of the better of lru and lfu, on each machine; and of lru alone
The last rows are means over traces (domains of a trace first).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from common import print_report

from expertly.cli.arguments import split
from expertly.cli.inputs import trace_geometry
from expertly.scheduler.presets import get_system
from expertly.sim.hardware import Hardware
from expertly.sim.schedule import Schedule, Selection, first_rows, make_schedule
from expertly.sim.study import Memory, Study
from expertly.trace.reader import Trace

PLAIN = ("lru", "lfu")
BOUND = "belady"


def schedules(trace: Trace, args: argparse.Namespace) -> Iterator[tuple[str, Schedule]]:
    """(domain, what is learned from and simulated)."""
    whole = make_schedule(trace, Selection(split=args.split, seed=args.seed))
    if not args.domains:
        yield "all", Schedule(whole.training, first_rows(whole.test, args.tokens))
        return
    category = {request.number: request.category for request in trace.requests}
    for name in dict.fromkeys(category[span.request] for span in whole.test if span.request is not None):
        spans = [span for span in whole.test if span.request is not None and category[span.request] == name]
        yield str(name), Schedule(whole.training, first_rows(spans, args.tokens))


def results(trace: Trace, geometry: str | None, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    layers, dense, _ = trace_geometry(trace, geometry)
    for domain, schedule in schedules(trace, args):
        names = [*PLAIN, BOUND, *args.systems]
        found: dict[str, dict[str, dict[str, Any]]] = {}  # memory -> system -> its row, with TPOTs of every machine
        for machine in args.hardware:
            study = Study(trace, schedule, Hardware.read(machine), layers, dense, seed=args.seed)
            for memory in args.memory:
                rows = found.setdefault(memory, {})
                for name in names:
                    row = study.row(get_system(name), Memory(memory))
                    rows.setdefault(name, row | {"tpot_s": {}})["tpot_s"][machine] = row["tpot_s"]
        for memory, rows in found.items():
            for name in args.systems:
                yield {"trace": trace.folder.name, "domain": domain, "memory": memory, **_compared(rows, name)}


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
        "hit_rate": rows[name]["hit_rate"],
        **{f"{system}_hit_rate": rows[system]["hit_rate"] for system in (*PLAIN, BOUND)},
        **{f"tpot_{machine}": value for machine, value in ratio.items()},
        "tpot_of_lru": max(t / tpots["lru"][m] for m, t in tpots[name].items()),
    }


def means(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Over the domains of each trace, then over traces."""
    for system in dict.fromkeys(row["system"] for row in rows):
        for memory in dict.fromkeys(row["memory"] for row in rows):
            of_traces = []
            for trace in dict.fromkeys(row["trace"] for row in rows):
                some = [r for r in rows if (r["system"], r["memory"], r["trace"]) == (system, memory, trace)]
                of_traces.append(_mean(some, trace, memory, system))
                if len(some) > 1:
                    yield of_traces[-1]
            yield _mean(of_traces, "mean", memory, system)


def _mean(rows: list[dict[str, Any]], trace: str, memory: str, system: str) -> dict[str, Any]:
    keys = ("gap", *(key for key in rows[0] if key.startswith("tpot_") and key != "tpot_of_lru"))
    worst = {"tpot_of_lru": max(row["tpot_of_lru"] for row in rows)}
    about = {"trace": trace, "domain": "mean", "memory": memory, "system": system}
    return about | {key: fmean(row[key] for row in rows) for key in keys} | worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = lambda text: [one.strip() for one in text.split(",")]  # noqa: E731
    parser.add_argument("traces", type=names)
    parser.add_argument("--memory", type=names, default="25%,50%")
    parser.add_argument("--split", type=split, default="7:3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=3000, help="simulated of each trace or domain at most")
    parser.add_argument("--domains", action="store_true")
    parser.add_argument("--hardware", type=names, default="rtx3090,laptop-nvme,h100-pcie")
    parser.add_argument("--geometry", type=names)
    parser.add_argument("--systems", type=names, default="expertly")
    parser.add_argument("--out")
    args = parser.parse_args()
    geometries = args.geometry or ["-"] * len(args.traces)
    if len(geometries) != len(args.traces):
        parser.error(f"--geometry: {len(geometries)} for {len(args.traces)} traces; give one each, `-` for its own")
    rows: list[dict[str, Any]] = []
    for path, geometry in zip(args.traces, geometries, strict=True):
        rows += results(Trace.open(Path(path)), None if geometry == "-" else geometry, args)
    settings = {key: str(value) for key, value in vars(args).items() if key != "out"}
    print_report("bytes", [*rows, *means(rows)], settings, args.out)


if __name__ == "__main__":
    main()
