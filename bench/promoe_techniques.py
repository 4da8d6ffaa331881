"""What each of ProMoE's techniques brings, in prefill and in decode (its figures 13 and 14): simulated and measured.

    python bench/promoe_techniques.py TRACE [--memory 25%] [--requests 6] [--tokens 32] [--experts-gib 3] [--seed 0]
                                      [--simulated-tokens 4000] [--hardware rtx3090] [--geometry bench/demo-3gib.toml]
                                      [--simulated-only]

The trace is a full one of the demo model (see prompts.py); inflating it does not change what it routes. The techniques
are switched on one after the other, as in the paper, from an LRU cache whose misses are found one expert at a time, by
rising id. `simulated` rows are of the profile and the sizes given; `engine` rows are of this machine, the inflated
model, tokens of recorded requests fed to every system in turn, in another order each time. Ratios are to the first row
of their kind, the engine's as medians over the requests. `reads` is what prompts demanded, in units of what was absent
when their routers spoke: above 1 something was read twice in a layer. `ahead` is the share of what they loaded that was
loaded ahead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import child, child_arguments, inflated_model
from report import print_report
from tpot import requests_of

TECHNIQUES = {
    "LRU, by id, late": "lru:order=id:preemption=late",
    "+ prefetch": "promoe:order=id:preemption=late:segments=1",
    "+ chunked": "promoe:order=id:preemption=late",
    "+ early preemption": "promoe:order=id",
    "+ reordered": "promoe",
}
PHASES = ("prefill", "decode")


def reads(prefill: dict[str, Any]) -> float | None:
    """Demanded in prompts, of what was absent when their routers spoke."""
    absent = prefill["demanded_bytes"] - prefill["hit_bytes"]
    return (prefill["bytes_loaded"] - prefill["prefetched_bytes"]) / absent if absent else None


def simulated(args: argparse.Namespace, weights: Any, trace: Any, schedule: Any) -> list[dict[str, Any]]:
    """A row a technique."""
    from expertly.scheduler.counters import PhaseCounters
    from expertly.scheduler.presets import get_system
    from expertly.sim.hardware import Hardware, read_geometry
    from expertly.sim.study import Memory, Study

    sizes = read_geometry(args.geometry)
    study = Study(
        trace, schedule, Hardware.read(args.hardware), sizes.layers, sizes.dense, seed=args.seed, learned=weights
    )
    rows: list[dict[str, Any]] = []
    for label, name in TECHNIQUES.items():
        system = get_system(name)
        budget = Memory(args.memory).budget(study.geometry_of(system))
        simulator = study.simulate(system, budget)
        phases = {phase: PhaseCounters() for phase in PHASES}
        for counters in simulator.scheduler.counters:
            phases["prefill"].add(counters.prefill)
            phases["decode"].add(counters.decode)
        prefill, decode = phases["prefill"], phases["decode"]
        bytes_of = {
            "demanded_bytes": prefill.demanded_nbytes,
            "hit_bytes": prefill.hit_nbytes,
            "bytes_loaded": prefill.loaded_nbytes,
            "prefetched_bytes": prefill.prefetched_nbytes,
        }
        row = {"ttft_s": simulator.metrics.ttft_s(False), "tpot_s": simulator.metrics.tpot_s}
        first = rows[0] if rows else row
        rows.append(
            {
                "kind": "simulated",
                "technique": label,
                "system": name,
                "ttft_ratio": row["ttft_s"] / first["ttft_s"],
                "tpot_ratio": row["tpot_s"] / first["tpot_s"],
                **row,
                "reads": reads(bytes_of),
                "ahead": prefill.prefetched_nbytes / max(1, prefill.loaded_nbytes),
                "hit_rate": decode.rates()["hit_rate"],
                "goodpred": decode.rates()["goodpred"],
                "stall_share": simulator.metrics.stall_share,
            }
        )
    return rows


def measure(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """In a child: a row a technique."""
    import torch

    import expertly
    from expertly.policies.learned import read_learned, save_learned
    from expertly.policies.predictor.learned import LearnedWeights
    from expertly.sim.schedule import Selection, make_schedule
    from expertly.trace.reader import Trace

    trace = Trace.open(Path(arguments["trace"]))
    schedule = make_schedule(trace, Selection(split=(7, 3), seed=arguments["seed"]))
    requests = requests_of(trace, schedule, arguments)
    models = {}
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "predictor.safetensors"
        file = read_learned(Path(arguments["predictor"]), LearnedWeights)
        beside, _ = expertly.load(arguments["model"], memory="25%", system="lru", device="cpu")
        identity = beside._expertly_handle.store.manifest.identity
        expertly.unload(beside)
        save_learned(weights, file.learned, identity, file.header.about)
        for label, name in TECHNIQUES.items():
            models[label], _ = expertly.load(
                arguments["model"],
                memory=arguments["memory"],
                system=name,
                device="cpu",
                predictor=weights if name.startswith("promoe") else "auto",
            )
    runs: dict[str, list[dict[str, float]]] = {label: [] for label in models}
    with torch.no_grad():
        for model in models.values():
            run_request(model, *requests[0])
        before = {label: expertly.stats(model).as_dict()["phases"] for label, model in models.items()}
        labels = list(models)
        for turn, request in enumerate(requests):
            shift = turn % len(labels)
            for label in (*labels[shift:], *labels[:shift]):
                runs[label].append(run_request(models[label], *request))
    rows = []
    base = runs[labels[0]]
    for label, model in models.items():
        phases = expertly.stats(model).as_dict()["phases"]
        names = ("demanded_bytes", "hit_bytes", "bytes_loaded", "prefetched_bytes", "hits", "misses", "partial_hits")
        done = {
            phase: {name: phases[phase][name] - before[label][phase][name] for name in (*names, "stall_s")}
            for phase in PHASES
        }
        decode = done["decode"]
        rows.append(
            {
                "kind": "engine",
                "technique": label,
                "system": TECHNIQUES[label],
                **{
                    f"{key.removesuffix('_s')}_ratio": statistics.median(
                        one[key] / other[key] for one, other in zip(runs[label], base, strict=True)
                    )
                    for key in ("ttft_s", "tpot_s")
                },
                **{key: statistics.mean(run[key] for run in runs[label]) for key in ("ttft_s", "tpot_s")},
                "reads": reads(done["prefill"]),
                "ahead": done["prefill"]["prefetched_bytes"] / max(1, done["prefill"]["bytes_loaded"]),
                "hit_rate": decode["hits"] / max(1, decode["hits"] + decode["misses"] + decode["partial_hits"]),
                "goodpred": phases["decode"]["goodpred"],
                "stall_share": sum(one["stall_s"] for one in done.values()) / sum(r["all_s"] for r in runs[label]),
            }
        )
    for model in models.values():
        expertly.unload(model)
    return rows


def run_request(model: Any, ids: list[int], num_prompt: int) -> dict[str, float]:
    """Seconds of the prompt, of a mean decode step, and of all."""
    import torch

    tokens, times = torch.tensor([ids]), []
    past = None
    for first, end in [(0, num_prompt), *((i, i + 1) for i in range(num_prompt, len(ids)))]:
        start = time.perf_counter()
        out = model(tokens[:, first:end], past_key_values=past, use_cache=True, logits_to_keep=1)
        out.logits[:, -1].argmax(-1).tolist()
        past = out.past_key_values
        times.append(time.perf_counter() - start)
    return {"ttft_s": times[0], "tpot_s": statistics.mean(times[1:]), "all_s": sum(times)}


def main() -> None:
    from expertly.lab.study import study
    from expertly.lab.train import TrainOptions
    from expertly.policies.learned import save_learned
    from expertly.scheduler.presets import get_system
    from expertly.sim.schedule import Selection, make_schedule
    from expertly.trace.reader import Trace

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("trace")
    add("--memory", default="25%")
    add("--requests", type=int, default=6)
    add("--tokens", type=int, default=32)
    add("--simulated-tokens", type=int, default=4000)
    add("--experts-gib", type=float, default=3.0)
    add("--hardware", default="rtx3090")
    add("--geometry", default=str(Path(__file__).parent / "demo-3gib.toml"))
    add("--seed", type=int, default=0)
    add("--simulated-only", action="store_true")
    add("--out")
    args = parser.parse_args()
    trace = Trace.open(Path(args.trace))
    schedule = make_schedule(trace, Selection(None, args.simulated_tokens, (7, 3), args.seed))
    options = TrainOptions((get_system("promoe").distance,), seed=args.seed)
    trained = study(trace, (7, 3), options).trained  # on what is not served below
    rows = simulated(args, trained.weights, trace, schedule)
    if not args.simulated_only:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "predictor.safetensors"
            save_learned(path, trained.weights, "0" * 64, {})
            settings = vars(args) | {"model": str(inflated_model(args.experts_gib)), "predictor": str(path)}
            settings["trace"] = str(Path(args.trace).resolve())
            rows += child("promoe_techniques.py", settings, timeout=3000)
    print_report("promoe-techniques", rows, {key: value for key, value in vars(args).items() if key != "out"}, args.out)


if __name__ == "__main__":
    given = child_arguments()
    if given is None:
        main()
    else:
        print(json.dumps(measure(given)))
