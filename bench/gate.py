"""The gate of what is loaded ahead, against loading all of it and none: TPOT on every shipped machine, or on this one.

    python bench/gate.py TRACE[,TRACE] [--geometry FILE] [--memory 25%] [--hardware NAMES] [--requests 24] [--tokens N]
                         [--families NAMES] [--seed 0] [--out FILE]
    python bench/gate.py TRACE --engine [--memory 25%] [--requests 6] [--tokens 48] [--warm-up 2] [--experts-gib 3]

Simulated: 70 % of a trace's requests are for training, the first --requests of the others are run (of a trace that is
one request, its first --tokens). A family is a system without prefetch ("off") and with it ("on"); `confidence` is
the ratio of TPOT with that gate to the better of both, `to_lru` that to lru's. Families of which a trace lacks what
they need are left out. The geometry is of the first trace.

With --engine, of the demo model inflated: requests are fed token by token, systems taking turns, request by request, in
another order each time; ratios are medians over the requests behind the first --warm-up.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from common import child, child_arguments, inflated_model
from report import print_report
from tpot import requests_of, run_request

FAMILIES = {
    "lookahead": ("lru", "lru:prediction=lookahead"),
    "adapmoe": ("adapmoe:prediction=none", "adapmoe"),
    "moepic": ("moepic:prediction=none", "moepic"),
    "modelled": ("lru", "modelled-lookahead"),
    "token-id": ("lru", "lru:prediction=token-id"),
    "popularity": ("lru", "lru:prediction=popularity"),
    "eam": ("lru", "lru:prediction=eam"),
}
"""Without prefetch, and with it."""


def simulated(args: argparse.Namespace, name: str, geometry: str | None) -> list[dict[str, Any]]:
    """A row a machine and family."""
    from expertly.cli.trace_geometry import trace_geometry
    from expertly.scheduler.presets import get_system
    from expertly.sim.hardware import Hardware
    from expertly.sim.schedule import Selection, make_schedule
    from expertly.sim.study import Memory, Study
    from expertly.trace.reader import Trace

    trace = Trace.open(Path(name))
    layers, dense, geometry_name = trace_geometry(trace, geometry)
    split = (7, 3) if len(trace.requests) > 1 else None
    num_requests = args.requests if split is not None and args.tokens is None else None
    schedule = make_schedule(trace, Selection(num_requests, args.tokens, split, args.seed))
    rows = []
    for machine in args.hardware.split(","):
        study = Study(trace, schedule, Hardware.read(machine), layers, dense, seed=args.seed)
        run = cache(lambda system, study=study: study.row(get_system(system), Memory(args.memory)))
        for family in args.families.split(","):
            off, on = FAMILIES[family]
            if run(on)["skipped"] is not None:
                continue
            tpot = {"off": run(off)["tpot_s"], "on": run(on)["tpot_s"]}
            gated = run(f"{on}:gate=confidence")
            better, lru = min(tpot.values()), run("lru")["tpot_s"]
            rows.append(
                {
                    "trace": Path(name).name,
                    "geometry": geometry_name,
                    "hardware": machine,
                    "family": family,
                    **{f"{way}_ms": 1e3 * seconds for way, seconds in tpot.items()},
                    "confidence": gated["tpot_s"] / better,
                    "to_lru": gated["tpot_s"] / lru,
                    "tokens": gated["tokens"],
                    "says": gated["gate"]["says"],
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def engine_systems(args: argparse.Namespace) -> list[str]:
    """lru first; each family without prefetch, with it, and with it behind the gate."""
    names = ["lru"]
    for family in args.families.split(","):
        off, on = FAMILIES[family]
        names += [off, on, f"{on}:gate=confidence"]
    return list(dict.fromkeys(names))


def measure(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """In a child: a row a system, on the engine."""
    import torch

    import expertly
    from expertly.sim.schedule import Selection, make_schedule
    from expertly.trace.reader import Trace

    trace = Trace.open(Path(arguments["trace"]))
    schedule = make_schedule(trace, Selection(split=(7, 3), seed=arguments["seed"]))
    requests = requests_of(trace, schedule, arguments)
    names, first = arguments["systems"], arguments["warm_up"]
    models = {}
    for name in names:
        models[name], _ = expertly.load(
            arguments["model"], system=name, memory=arguments["memory"], maps="off", codec="none", device="cpu"
        )
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with torch.no_grad():
        for turn, request in enumerate(requests):
            shift = turn % len(names)
            for name in (*names[shift:], *names[:shift]):
                runs[name].append(run_request(models[name], *request))
    rows = []
    for name in names:
        ratios = [
            one["tpot_s"] / other["tpot_s"] for one, other in zip(runs[name][first:], runs["lru"][first:], strict=True)
        ]
        prediction = expertly.stats(models[name]).as_dict()["prediction"] or {}
        gate = prediction.get("gate") or {}
        row: dict[str, Any] = {"system": name, "to_lru": statistics.median(ratios)}
        row |= {"least": min(ratios), "most": max(ratios)}
        row |= {key: statistics.mean(run[key] for run in runs[name][first:]) for key in ("tpot_s", "hit_rate")}
        row |= {"loaded_a_token": statistics.mean(run["loaded_a_token"] for run in runs[name][first:])}
        row |= {"stall_share": statistics.mean(run["stall_share"] for run in runs[name][first:])}
        rows.append(row | {"state": gate.get("says")})
    for model in models.values():
        expertly.unload(model)
    return rows


def shipped() -> str:
    """Names of the machines that are described in the package, but for the one without limits."""
    folder = files("expertly.data") / "hardware"
    names = sorted(one.name.removesuffix(".toml") for one in folder.iterdir() if one.name.endswith(".toml"))
    return ",".join(name for name in names if name != "infinite")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("traces")
    add("--geometry")
    add("--memory", default="25%")
    add("--hardware", default=shipped())
    add("--requests", type=int)
    add("--tokens", type=int)
    add("--families", default=None)
    add("--seed", type=int, default=0)
    add("--engine", action="store_true")
    add("--warm-up", type=int, default=2, help="requests that are not counted")
    add("--experts-gib", type=float, default=3.0, help="0: the demo model as it is")
    add("--out")
    args = parser.parse_args()
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    if args.engine:
        args.families = args.families or "lookahead"
        model = str(inflated_model(args.experts_gib)) if args.experts_gib else None
        asked = {"model": model, "systems": engine_systems(args), "trace": str(Path(args.traces).resolve())}
        asked |= {"requests": args.requests or 6, "tokens": args.tokens or 48}
        rows = child("gate.py", vars(args) | asked, timeout=3000)
    else:
        args.families = args.families or ",".join(FAMILIES)
        args.requests = args.requests or 24
        traces = args.traces.split(",")
        rows = [
            row
            for number, name in enumerate(traces)
            for row in simulated(args, name, args.geometry if number == 0 else None)
        ]
    print_report("gate", rows, settings | {"families": args.families}, args.out)


if __name__ == "__main__":
    given = child_arguments()
    if given is None:
        main()
    else:
        print(json.dumps(measure(given)))
