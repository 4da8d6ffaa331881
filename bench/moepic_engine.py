"""MoEpic's ablation (its table 3) on the engine: the inflated demo model replays recorded requests, token by token.

    python bench/moepic_engine.py TRACE [--memory 25%] [--requests 4] [--tokens 24] [--warm-up 96] [--also NAMES]
                                  [--experts-gib 3] [--seed 0] [--out FILE]

The trace is of the demo model (see prompts.py); inflating it does not change what it routes. Requests of 70 % of it are
fed to every system first, until --warm-up tokens were decoded, so that the first configurations are made; then those
of the other 30 %, systems taking turns, request by request, in another order each time. Ratios are to `moepic`, medians
over the requests, with the least and the most. `kept` counts an expert whose top is there as hit. `--also` names more
systems, with commas between.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from common import child, child_arguments, inflated_model
from moepic import WITHOUT
from promoe_techniques import run_request
from report import print_report
from tpot import requests_of

COUNTS = ("hits", "partial_hits", "misses", "bytes_loaded", "prefetched_bytes", "wasted_bytes", "stall_s", "tokens")


def measure(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """In a child: a row a system."""
    import torch

    import expertly
    from expertly.sim.schedule import Schedule, Selection, make_schedule
    from expertly.trace.reader import Trace

    trace = Trace.open(Path(arguments["trace"]))
    schedule = make_schedule(trace, Selection(split=(7, 3), seed=arguments["seed"]))
    requests = [one for one in requests_of(trace, schedule, arguments) if len(one[0]) > one[1]]
    before = Schedule([], schedule.training)
    warm_up = requests_of(trace, before, {"requests": len(schedule.training), "tokens": arguments["tokens"]})
    systems = arguments["systems"]
    models = {}
    for label, name in systems.items():
        models[label], _ = expertly.load(
            arguments["model"], system=name, memory=arguments["memory"], maps="off", codec="none", device="cpu"
        )
    runs: dict[str, list[dict[str, float]]] = {label: [] for label in systems}
    with torch.no_grad():
        for model in models.values():
            num_tokens = 0
            for ids, num_prompt in warm_up:
                if num_tokens >= arguments["warm_up"]:
                    break
                if len(ids) > num_prompt:
                    run_request(model, ids, num_prompt)
                    num_tokens += len(ids) - num_prompt
        first = {label: decode_of(expertly.stats(model)) for label, model in models.items()}
        labels = list(models)
        for turn, request in enumerate(requests):
            shift = turn % len(labels)
            for label in (*labels[shift:], *labels[:shift]):
                runs[label].append(run_request(models[label], *request))
    rows = []
    for label, name in systems.items():
        facts = expertly.stats(models[label])
        done = {key: value - first[label][key] for key, value in decode_of(facts).items()}
        asked = done["hits"] + done["partial_hits"] + done["misses"]
        decoding = sum(run["all_s"] - run["ttft_s"] for run in runs[label])
        allocation = facts.as_dict()["allocation"] or {}
        rows.append(
            {
                "without": label,
                "system": name,
                **ratios("tpot", runs[label], runs["nothing"]),
                **ratios("ttft", runs[label], runs["nothing"]),
                **{key: statistics.mean(run[key] for run in runs[label]) for key in ("ttft_s", "tpot_s")},
                "kept": (done["hits"] + done["partial_hits"]) / asked,
                "hit_rate": done["hits"] / asked,
                "stall_share": done["stall_s"] / decoding,
                "loaded_a_token": done["bytes_loaded"] / done["tokens"],
                "ahead_a_token": done["prefetched_bytes"] / done["tokens"],
                "wasted_a_token": done["wasted_bytes"] / done["tokens"],
                "configurations": allocation.get("configurations"),
            }
        )
    for model in models.values():
        expertly.unload(model)
    return rows


def decode_of(facts: Any) -> dict[str, float]:
    """What decode counted so far."""
    decode = facts.as_dict()["phases"]["decode"]
    return {key: decode[key] for key in COUNTS}


def ratios(what: str, runs: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, float]:
    """Of each request to the same one of `base`."""
    found = [one[f"{what}_s"] / other[f"{what}_s"] for one, other in zip(runs, base, strict=True)]
    return {f"{what}_ratio": statistics.median(found), f"{what}_least": min(found), f"{what}_most": max(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("trace")
    add("--memory", default="25%")
    add("--requests", type=int, default=4)
    add("--tokens", type=int, default=24)
    add("--warm-up", type=int, default=96)
    add("--also", default="")
    add("--experts-gib", type=float, default=3.0, help="0: the demo model as it is")
    add("--seed", type=int, default=0)
    add("--out")
    args = parser.parse_args()
    model = str(inflated_model(args.experts_gib)) if args.experts_gib else None
    systems = WITHOUT | {name: name for name in args.also.split(",") if name}
    settings = vars(args) | {"model": model, "systems": systems, "trace": str(Path(args.trace).resolve())}
    rows = child("moepic_engine.py", settings, timeout=3000)
    print_report("moepic-engine", rows, {key: value for key, value in vars(args).items() if key != "out"}, args.out)


if __name__ == "__main__":
    given = child_arguments()
    if given is None:
        main()
    else:
        print(json.dumps(measure(given)))
