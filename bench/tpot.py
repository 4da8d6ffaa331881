"""TPOT of systems side by side in one run: the inflated demo model replays recorded requests, token by token.

    python bench/tpot.py TRACE [--systems lru,lfu,fmoe] [--memory 25%] [--requests 6] [--tokens 48] [--experts-gib 3]
    python bench/tpot.py TRACE --ablation promoe|moepic [--warm-up 96]

The trace is of the demo model (see prompts.py); inflating it does not change what it routes. 70 % of its requests
fill stores and counts, requests of the other 30 % are fed to the engine, the same tokens for every system. Systems
take turns, request by request, in another order each time. `--ablation`: the steps of ProMoE's figures 13 and 14 from
an LRU cache on, or MoEpic without each of its parts (table 3). `ratio` is the median over the requests of a system's
TPOT to the first system's, `ttft_ratio` that of prompts; `reads` is what prompts demanded, in units of what was absent
when their routers spoke: above 1 something was read twice in a layer. `kept` counts an expert whose top is there as
hit. `collect_share` is the forward pass's own time for noting what predictors see (bound: 5 %).
Simulated beside it, with the costs measured on this machine in the same run: the same requests, with `oracle` and
`belady-global`; `gap_closed` is of the simulated gap between the first system and the oracle, by the measured ratio.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import child, inflated_model, options, print_report, run

from expertly.lab.papers.moepic import WITHOUT
from expertly.lab.papers.promoe import TECHNIQUES

BOUNDS = ("belady-global", "oracle")
ABLATIONS = {"promoe": TECHNIQUES, "moepic": WITHOUT}
PROMPT_COUNTS = ("demanded_bytes", "hit_bytes", "bytes_loaded", "prefetched_bytes")


def requests_of(trace: Any, schedule: Any, arguments: dict[str, Any]) -> list[tuple[list[int], int]]:
    """(token ids, how many of them are the prompt) of the first test requests."""
    from expertly.lab.playing import recorded_requests
    from expertly.sim.schedule import Schedule, with_answer

    spans = [with_answer(trace, span, arguments["tokens"]) for span in schedule.test[: arguments["requests"]]]
    return [(list(one.tokens), one.num_prompt) for one in recorded_requests(trace, Schedule([], spans))]


def run_request(model: Any, ids: list[int], num_prompt: int) -> dict[str, float]:
    """Mean seconds of a decode step, and what the experts did meanwhile."""
    import torch

    import expertly

    tokens, times = torch.tensor([ids], device=model.device), []
    asked = expertly.stats(model).as_dict()["phases"]["prefill"]
    start = time.perf_counter()
    out = model(tokens[:, :num_prompt], use_cache=True, logits_to_keep=1)
    out.logits[:, -1].argmax(-1).tolist()
    ttft_s = time.perf_counter() - start
    before = expertly.stats(model).as_dict()
    prompt = {key: before["phases"]["prefill"][key] - asked[key] for key in PROMPT_COUNTS}
    absent = prompt["demanded_bytes"] - prompt["hit_bytes"]
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
    asked_of = changed["hits"] + changed["misses"] + changed["partial_hits"]
    return {
        "tpot_s": statistics.mean(times),
        "ttft_s": ttft_s,
        "reads": (prompt["bytes_loaded"] - prompt["prefetched_bytes"]) / max(1, absent),
        "hit_rate": changed["hits"] / asked_of,
        "kept": (changed["hits"] + changed["partial_hits"]) / asked_of,
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
    from expertly.scheduler.presets import get_system
    from expertly.sim.schedule import Schedule, Selection, make_schedule
    from expertly.sim.training import histories
    from expertly.trace.reader import Trace

    trace = Trace.open(Path(arguments["trace"]))
    schedule = make_schedule(trace, Selection(split=(7, 3), seed=arguments["seed"]))
    requests = requests_of(trace, schedule, arguments)
    settings = {"memory": arguments["memory"], "segments": arguments["segments"], "device": "cpu"}
    names = arguments["systems"]
    models = {}
    beside, _ = expertly.load(arguments["model"], system="lru", learned="off", **settings)
    for name in names:
        system, _, matcher = name.partition("@")
        parts, how = get_system(system), settings | {"learned": "off", "predict": matcher or "auto"}
        if parts.prediction == "learned":
            how["predictor"] = predictor_of(beside, arguments["scratch"])
        if parts.keeps_everything:
            how["memory"] = "100%"
        models[name], _ = expertly.load(arguments["model"], system=system, **how)
        prefetching = handle(models[name]).engine.prefetching
        if prefetching is not None:
            for history in histories(trace, schedule.training, prefetching.predictor.wants):
                prefetching.predictor.learn(history)
    earlier = requests_of(trace, Schedule([], schedule.training), arguments | {"requests": None})
    measurement = Measurement(beside)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with torch.no_grad():
        for task in measurement.tasks():
            task()
        for model in models.values():
            run_request(model, *requests[0])
            num_tokens = 0
            for ids, num_prompt in earlier:
                if num_tokens >= arguments["warm_up"]:
                    break
                if len(ids) > num_prompt:
                    run_request(model, ids, num_prompt)
                    num_tokens += len(ids) - num_prompt
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
        prompts = statistics.median(a["ttft_s"] / b["ttft_s"] for a, b in zip(runs[name], runs[first], strict=True))
        row: dict[str, Any] = {"system": name, "ratio": ratio, "ttft_ratio": prompts}
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


def predictor_of(model: Any, folder: str) -> Path:
    """The demo model's predictor, under the identity of the model inflated from it."""
    from expertly.api import handle
    from expertly.data import demo_predictor
    from expertly.policies.learned import read_learned, save_learned
    from expertly.policies.predictor.learned import LearnedWeights

    file, out = read_learned(demo_predictor(), LearnedWeights), Path(folder) / "predictor.safetensors"
    save_learned(out, file.learned, handle(model).store.manifest.identity, file.header.about)
    return out


def simulate(arguments: dict[str, Any], trace: Any, schedule: Any, profile: Any) -> dict[str, float]:
    """Simulated TPOT of every system on this machine over the same requests."""
    from dataclasses import replace

    from expertly.data import demo_predictor
    from expertly.policies.learned import read_learned
    from expertly.policies.predictor.learned import LearnedWeights
    from expertly.scheduler.presets import get_system
    from expertly.sim.hardware import Hardware, PredictorCosts
    from expertly.sim.schedule import Schedule, with_answer
    from expertly.sim.study import Memory, Study

    spans = [with_answer(trace, span, arguments["tokens"]) for span in schedule.test[: arguments["requests"]]]
    schedule = Schedule(schedule.training, [spans[0], *spans])  # the first one warms the caches up
    hardware = Hardware.read("infinite").with_model(profile.link, profile.compute)
    hardware = replace(hardware, predictor=PredictorCosts())
    layers = (profile.compute.layer,) * profile.compute.num_layers
    weights = read_learned(demo_predictor(), LearnedWeights).learned
    about = {"segments": arguments["segments"], "seed": arguments["seed"], "learned": weights}
    study = Study(trace, schedule, hardware, layers, None, **about)
    memory = Memory(arguments["memory"])
    names = dict.fromkeys((*arguments["systems"], *BOUNDS))
    return {name: float(study.row(get_system(name.partition("@")[0]), memory)["tpot_s"]) for name in names}


def main() -> None:
    args = options(
        __doc__, "trace", systems="lru,lfu,on-demand,fmoe", ablation=(None, *ABLATIONS), warm_up=0, memory="25%",
        segments=1, requests=6, tokens=48, experts_gib=3.0, seed=0,
    )  # fmt: skip
    model = str(inflated_model(args.experts_gib)) if args.experts_gib else None
    settings = vars(args) | {"model": model, "systems": args.systems.split(",")}
    settings["trace"] = str(Path(args.trace).resolve())
    if args.ablation is not None:
        settings |= {"systems": list(ABLATIONS[args.ablation].values()), "segments": None}
    with tempfile.TemporaryDirectory() as scratch:
        rows = child("tpot.py", settings | {"scratch": scratch}, timeout=3000)
    print_report("tpot", rows, vars(args))


if __name__ == "__main__":
    run(main, measure)
