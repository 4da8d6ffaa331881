"""How far simulated times are from measured ones: the same routing, on this machine, engine and simulator side by side.

    python bench/fidelity.py [--experts-gib 3] [--systems on-demand,lru,lfu,lcp] [--memory 10%,25%,50%] [--tokens 64]
    python bench/fidelity.py --codec planes --systems lru --memory 25%

For every budget and P, in a process of its own: the costs of the model are measured in that budget (with `lru` and
random tokens), the engine runs two requests under each system (a prompt of 16 tokens, then a text token by token) while
its routing is recorded, and all of it in rounds; the recorded traces are simulated with the medians of what was
measured in between. A run in which the virtual machine's host took over 2 % of the processors' time is repeated, up to
three times (`stolen`). Compared is the second request (the median of the rounds), when the places of the experts have
been used before: a first use costs the kernel's zeroing of their pages, which is not simulated. Bound: TPOT within
10 %.

With `--codec planes` the engine reads compressed experts. Then the disk and decoding are measured by themselves, before
each round. What they come to together, and beside computing, is the simulator's to say.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from common import child, inflated_model, options, print_report, quietly, run

PROMPT_TOKENS = 16
TEXTS = (
    "The old man looked at the sea and said that he would go out again in the morning, with the boy, as before. ",
    "Question: what is 12 + 30? Answer: 42. The function returns a list of all the files in the folder, sorted. ",
)


def run_engine(arguments: dict[str, Any], system: str, folder: Path) -> dict[str, Any]:
    """Run and record both requests; what the second one's decode took."""
    import torch

    import expertly
    from expertly.lab.recording import record

    shutil.rmtree(folder, ignore_errors=True)  # of a run that is repeated
    asked = {name: arguments[name] for name in ("memory", "segments", "codec")}
    model, _ = expertly.load(arguments["model"], system=system, learned="off", **asked)
    times: list[float] = []
    with record(model, folder, name="demo", created="", command="") as recording, torch.no_grad():
        for ids in map(torch.tensor, arguments["ids"]):
            times.clear()
            before = expertly.stats(model).as_dict()["phases"]["decode"]
            recording.begin_request(None, None, PROMPT_TOKENS)
            out = model(ids[None, :PROMPT_TOKENS], use_cache=True, logits_to_keep=1)
            for i in range(PROMPT_TOKENS, len(ids)):
                start = time.perf_counter()
                past = out.past_key_values
                out = model(ids[None, i : i + 1], past_key_values=past, use_cache=True, logits_to_keep=1)
                out.logits[:, -1].argmax(-1).tolist()
                times.append(time.perf_counter() - start)
    told = expertly.stats(model).as_dict()
    decode = told["phases"]["decode"]
    expertly.unload(model)
    hits, misses = (decode[key] - before[key] for key in ("hits", "misses"))
    return {
        "tpot_s": statistics.mean(times),
        "stall": (decode["stall_s"] - before["stall_s"]) / sum(times),
        "hit_rate": hits / (hits + misses + decode["partial_hits"] - before["partial_hits"]),
        "bytes_disk": told["bytes_disk"],
        "decode_s": told["decode_s"],
    }


def codec_costs(arguments: dict[str, Any]) -> Any:
    """The disk under the compressed store, and what its frames cost; None where nothing is compressed."""
    from expertly.hardware.measure import store_costs
    from expertly.model.packing import pack_cached

    if arguments["codec"] == "none":
        return None
    return store_costs(pack_cached(arguments["model"], None, codec=arguments["codec"]))


def median_costs(measured: list[Any], link: Any) -> tuple[Any, Any]:
    """(link, codec) for the simulator: `link` as it was fitted, where nothing is compressed."""
    from expertly.core.costs import Link

    if measured[0] is None:
        return link, None
    disks, costs = zip(*measured, strict=True)
    rate, latency_ns = (
        statistics.median(getattr(one, name) for one in disks) for name in ("nbytes_per_s", "latency_ns")
    )
    names = ("decode_nbytes_per_s", "read_processors")
    medians = {name: statistics.median(getattr(one, name) for one in costs) for name in names}
    return Link(rate, round(latency_ns), 0), replace(costs[0], **medians)


def simulate(
    arguments: dict[str, Any], system: str, folder: Path, link: Any, compute: Any, costs: Any
) -> tuple[float, Any]:
    """Seconds of a decode step of the second request: of both requests, less those of the first alone; and what was
    read and decoded.
    """
    from expertly.scheduler.presets import get_system
    from expertly.sim.hardware import Hardware
    from expertly.sim.schedule import Selection, make_schedule
    from expertly.sim.study import Memory, Study
    from expertly.trace.reader import Trace

    trace = Trace.open(folder)
    layers = tuple(layer.geometry() for layer in trace.manifest.layers)
    assert None not in layers
    hardware = replace(Hardware.read("infinite").with_model(link, compute), codec=costs)
    ran = []
    coded = None
    for num_requests in (2, 1):
        schedule = make_schedule(trace, Selection(num_requests))
        study = Study(
            trace,
            schedule,
            hardware,
            layers,
            trace.manifest.dense,
            segments=arguments["segments"],
            codec=arguments["codec"],
        )
        budget = Memory(arguments["memory"]).budget(study.geometry)
        simulator = study.simulate(get_system(system), budget)
        ran.append(simulator.metrics)
        coded = coded or simulator.link.decoder
    num_steps = ran[0].num_decode_iterations - ran[1].num_decode_iterations
    return float(ran[0].decode_ns - ran[1].decode_ns) / num_steps / 1e9, coded


def measure(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """In a child: the lines of one budget, a system each."""
    import torch

    import expertly
    from expertly.api import handle
    from expertly.lab.model_profile import Measurement

    is_resident = arguments["memory"] == "100%"
    beside, _ = expertly.load(
        arguments["model"],
        memory="50%" if is_resident else arguments["memory"],
        system="lru",
        segments=arguments["segments"],
        codec="none" if is_resident else arguments["codec"],  # what nobody decodes is computed by all threads
    )
    measurement = Measurement(beside)

    def measure_costs(tasks: Iterable[Callable[[], None]]) -> None:
        with torch.no_grad():
            for task in tasks:
                task()

    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        measure_costs(measurement.tasks())
        measured = []
        ran: dict[str, list[dict[str, Any]]] = {system: [] for system in arguments["systems"]}
        for turn in range(arguments["rounds"]):
            measured.append(quietly(partial(codec_costs, arguments))[0])
            for system, runs in ran.items():
                run, stolen = quietly(partial(run_engine, arguments, system, Path(scratch) / f"{system}-{turn}"))
                runs.append(run | {"stolen": stolen})
                measure_costs(measurement.tasks_of_a_token())
        profile = measurement.profile()
        link, costs = median_costs(measured, profile.link)
        if costs is not None:
            from expertly.lab.profile_fits import fit_decoding

            alone = costs.all_nbytes_per_s
            costs = fit_decoding(profile.layers, link, costs, profile.compute, handle(beside).store.geometry(1))
        for system, runs in ran.items():
            row = {"system": system} | {key: arguments[key] for key in ("memory", "segments", "codec")}
            row |= {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            row["tpot_from_s"], row["tpot_to_s"] = (pick(run["tpot_s"] for run in runs) for pick in (min, max))
            folder = Path(scratch) / f"{system}-0"
            row["simulated_tpot_s"], coded = simulate(arguments, system, folder, link, profile.compute, costs)
            if coded is not None:
                row["simulated_bytes_disk"] = coded.read_nbytes
                row["ratio_on_disk"], row["decode_gb_per_s"] = costs.ratio, costs.all_nbytes_per_s / 1e9
                row["alone_gb_per_s"], row["read_processors"] = alone / 1e9, costs.read_processors
            row["ratio"] = row["simulated_tpot_s"] / row["tpot_s"]
            row["link_gb_per_s"] = link.nbytes_per_s / 1e9
            rows.append(row)
    expertly.unload(beside)
    return rows


def main() -> None:
    args = options(
        __doc__,
        experts_gib=3.0,
        systems="on-demand,lru,lfu,lcp",
        memory="10%,25%,50%",
        segments="1,4",
        tokens=32,
        rounds=2,
        codec="none",
    )
    model = inflated_model(args.experts_gib)
    from transformers import AutoTokenizer

    from expertly.model.packing import pack_cached

    for codec in dict.fromkeys(("none", args.codec)):
        pack_cached(str(model), None, codec=codec)
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [tokenizer(text * 8)["input_ids"][: PROMPT_TOKENS + args.tokens] for text in TEXTS]
    rows = []
    for segments in map(int, args.segments.split(",")):
        for memory in [*args.memory.split(","), "100%"]:
            systems = args.systems.split(",") if memory != "100%" else ["resident"]
            settings = {"memory": memory, "segments": segments, "systems": systems, "rounds": args.rounds}
            settings |= {"codec": args.codec, "model": str(model), "ids": ids}
            rows += child("fidelity.py", settings)
            print(json.dumps(rows[-len(systems) :]), flush=True)
    worst = max(rows, key=lambda row: abs(row["ratio"] - 1))
    print_report("fidelity", rows, vars(args) | {"worst_ratio": worst["ratio"]})


if __name__ == "__main__":
    run(main, measure)
