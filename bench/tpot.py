"""TPOT of systems side by side in one run: the inflated demo model replays recorded requests, token by token.

    python bench/tpot.py TRACE [--systems lru,lfu,fmoe] [--memory 25%] [--requests 6] [--tokens 48] [--experts-gib 3]

The trace is of the demo model (see prompts.py); inflating it does not change what it routes. 70 % of its requests
fill stores and counts, requests of the other 30 % are fed to the engine, the same tokens for every system. Systems
take turns, request by request, in another order each time. `ratio` is the median over the requests of a system's TPOT
to the first system's. `collect_share` is the forward pass's own time for noting what predictors see (bound: 5 %).
Simulated beside it, with the costs measured on this machine in the same run: the same requests, with `oracle` and
`belady- global`; `gap_closed` is of the simulated gap between the first system and the oracle, by the measured ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from common import child, child_arguments, inflated_model
from report import print_report

BOUNDS = ("belady-global", "oracle")


def requests_of(trace: Any, schedule: Any, arguments: dict[str, Any]) -> list[tuple[list[int], int]]:
    """(token ids, how many of them are the prompt) of the first test requests."""
    found = []
    for span in schedule.test[: arguments["requests"]]:
        first, end = span.first_row, span.first_row + span.num_rows
        num_prompt = int(trace.rows("is_prefill", first, end).sum())
        ids = trace.rows("token", first, min(end, first + num_prompt + arguments["tokens"])).tolist()
        found.append((ids, num_prompt))
    return found


def run_request(model: Any, ids: list[int], num_prompt: int) -> dict[str, float]:
    """Mean seconds of a decode step, and what the experts did meanwhile."""
    import torch

    import expertly

    tokens, times = torch.tensor([ids]), []
    out = model(tokens[:, :num_prompt], use_cache=True, logits_to_keep=1)
    before = expertly.stats(model).as_dict()
    for i in range(num_prompt, len(ids)):
        start = time.perf_counter()
        out = model(tokens[:, i : i + 1], past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
        out.logits[:, -1].argmax(-1).tolist()
        times.append(time.perf_counter() - start)
    after = expertly.stats(model).as_dict()
    decode, earlier = after["phases"]["decode"], before["phases"]["decode"]
    changed = {key: decode[key] - earlier[key] for key in ("hits", "misses", "partial_hits", "bytes_loaded", "stall_s")}
    seconds = sum(times)
    prediction = after.get("prediction")
    collect = prediction["collect_s"] - before["prediction"]["collect_s"] if prediction else None
    return {
        "tpot_s": statistics.mean(times),
        "hit_rate": changed["hits"] / (changed["hits"] + changed["misses"] + changed["partial_hits"]),
        "stall_share": changed["stall_s"] / seconds,
        "loaded_a_token": changed["bytes_loaded"] / len(times),
        **({} if collect is None else {"collect_share": collect / seconds}),
    }


def measure(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """In a child: a row a system."""
    import torch

    import expertly
    from expertly.api import handle
    from expertly.lab.model_profile import Measurement
    from expertly.sim.schedule import Selection, make_schedule
    from expertly.sim.training import histories
    from expertly.trace.reader import Trace

    trace = Trace.open(Path(arguments["trace"]))
    schedule = make_schedule(trace, Selection(split=(7, 3), seed=arguments["seed"]))
    requests = requests_of(trace, schedule, arguments)
    settings = {"memory": arguments["memory"], "segments": arguments["segments"], "device": "cpu"}
    names = arguments["systems"]
    models = {}
    for name in names:
        system, _, matcher = name.partition("@")
        models[name], _ = expertly.load(
            arguments["model"], system=system, maps="off", matcher=matcher or "auto", **settings
        )
        prefetching = handle(models[name]).engine.prefetching
        if prefetching is not None:
            for history in histories(trace, schedule.training, prefetching.predictor.wants):
                prefetching.predictor.learn(history)
    beside, _ = expertly.load(arguments["model"], system="lru", maps="off", **settings)
    measurement = Measurement(beside)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with torch.no_grad():
        for task in measurement.tasks():
            task()
        warm_up = requests[0]
        for model in models.values():
            run_request(model, *warm_up)
        for turn, request in enumerate(requests):
            shift = turn % len(names)
            for name in (*names[shift:], *names[:shift]):
                runs[name].append(run_request(models[name], *request))
            for task in measurement.tasks_of_a_token():
                task()
    simulated = simulate(arguments, trace, schedule, measurement.profile())
    first = names[0]
    rows = []
    for name in names:
        ratio = statistics.median(a["tpot_s"] / b["tpot_s"] for a, b in zip(runs[name], runs[first], strict=True))
        row: dict[str, Any] = {"system": name, "ratio": ratio}
        row |= {key: statistics.mean(run[key] for run in runs[name]) for key in runs[name][0]}
        facts = expertly.stats(models[name]).as_dict().get("prediction") or {}
        row |= {key: facts[key] for key in ("predictions_late", "contexts_dropped") if key in facts}
        row["simulated_ratio"] = simulated[name] / simulated[first]
        gap = 1 - simulated["oracle"] / simulated[first]
        row["gap_closed"] = (1 - ratio) / gap if gap > 0 else None
        rows.append(row)
    rows += [{"system": name, "simulated_ratio": simulated[name] / simulated[first]} for name in BOUNDS]
    for row in rows:
        row["simulated_tpot_s"] = simulated[row["system"]]
    for model in (*models.values(), beside):
        expertly.unload(model)
    return rows


def simulate(arguments: dict[str, Any], trace: Any, schedule: Any, profile: Any) -> dict[str, float]:
    """Simulated TPOT of every system on this machine over the same requests."""
    from dataclasses import replace

    from expertly.scheduler.presets import get_system
    from expertly.sim.hardware import Hardware, PredictorCosts
    from expertly.sim.schedule import Schedule
    from expertly.sim.study import Memory, Study
    from expertly.sim.workload import RowRange

    spans = []
    for span in schedule.test[: arguments["requests"]]:
        num_prompt = int(trace.rows("is_prefill", span.first_row, span.first_row + span.num_rows).sum())
        spans.append(RowRange(span.request, span.first_row, min(span.num_rows, num_prompt + arguments["tokens"])))
    schedule = Schedule(schedule.training, [spans[0], *spans])  # the first one warms the caches up
    hardware = Hardware.read("infinite").with_model(profile.link, profile.compute)
    hardware = replace(hardware, predictor=PredictorCosts())
    layers = (profile.compute.layer,) * profile.compute.num_layers
    study = Study(trace, schedule, hardware, layers, None, segments=arguments["segments"], seed=arguments["seed"])
    memory = Memory(arguments["memory"])
    found = {}
    for name in dict.fromkeys((*arguments["systems"], *BOUNDS)):
        tpot = study.row(get_system(name.partition("@")[0]), memory)["tpot_s"]
        assert tpot is not None
        found[name] = float(tpot)
    found["link"] = profile.link.nbytes_per_s
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--systems", default="lru,lfu,on-demand,fmoe")
    parser.add_argument("--memory", default="25%")
    parser.add_argument("--segments", type=int, default=1)
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--experts-gib", type=float, default=3.0, help="0: the demo model as it is")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model = str(inflated_model(args.experts_gib)) if args.experts_gib else None
    settings = vars(args) | {"model": model, "systems": args.systems.split(",")}
    settings["trace"] = str(Path(args.trace).resolve())
    print_report("tpot", child("tpot.py", settings, timeout=3000), vars(args))


if __name__ == "__main__":
    given = child_arguments()
    if given is None:
        main()
    else:
        print(json.dumps(measure(given)))
