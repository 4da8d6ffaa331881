"""How near simulated times are to measured ones: the same tokens in engine and simulator, on this machine.

    python bench/simulated.py [--memory 25%] [--systems lru,expertly] [--out FILE]

Of the demo model, with experts as they are (0.1 MB), inflated to 0.8 MB in int4 and to 2.8 MB. Its routing is recorded
once. Each system is fed the same tokens from an empty cache: `--warm` requests that only fill it, and those that are
compared; systems take turns. One profile of six numbers, measured beside them with `lru`, serves all systems. `ratio`
is the median over requests of simulated to measured TPOT. Simulated times are +-15 %; hits are the engine's where
systems do not predict.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import Quiet, child, inflated_model, options, play, predictor_of, print_report, run
from pages import make_requests, record_requests

PROMPT_TOKENS = 16
SYSTEMS = ("lru", "expertly", "expertly-ahead", "fmoe")
STORES = (("2.8 MB", 1.0, None), ("0.8 MB", 1.0, "int4"), ("0.1 MB", 0.0, None))


def measure(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """In a child: a row for each system."""
    import torch

    import expertly
    from expertly.data import demo_predictor
    from expertly.policies.learned import read_learned
    from expertly.policies.promoe import LearnedWeights
    from expertly.scheduler.systems import get_system
    from expertly_lab.model_profile import Measurement
    from expertly_lab.sim.schedule import Selection, make_schedule, num_prompt_rows
    from expertly_lab.sim.study import Memory, Study
    from expertly_lab.trace.reader import Trace

    store, memory, warm = arguments["store"], arguments["memory"], arguments["warm"]
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        model, _ = expertly.load(store, system="resident")
        record_requests(model, arguments["requests"], Path(scratch) / "trace")
        expertly.unload(model)
        trace = Trace.open(Path(scratch) / "trace")
        schedule = make_schedule(trace, Selection(len(arguments["requests"])))
        beside, _ = expertly.load(store, memory=memory, system="lru")
        weights = str(predictor_of(beside, Path(scratch)))
        measurement, quiet = Measurement(beside), Quiet()
        models: dict[str, Any] = {}
        for name in arguments["systems"]:
            given = {"predictor": weights} if get_system(name).weights is not None else {}
            models[name], _ = expertly.load(store, memory=memory, system=name, **given)
        ran: dict[str, list[dict[str, Any]]] = {name: [] for name in models}
        for turn, span in enumerate(schedule.test):
            tokens = trace.rows("token", span.first_row, span.first_row + span.num_rows).tolist()
            names = list(models)
            for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
                quiet.wait()
                ran[name].append(play(models[name], tokens, num_prompt_rows(trace, span)))
                measurement.run()
        study = Study(
            trace,
            schedule,
            measurement.hardware(),
            trace.manifest.geometries,
            trace.manifest.dense,
            learned=read_learned(demo_predictor(), LearnedWeights).learned,
        )
        rows = []
        for name, runs in ran.items():
            found = study.row(get_system(name), Memory(memory))
            simulated = [one["tpot_s"] for one in found["times_by_request"][warm:]]
            measured = [one["tpot_s"] for one in runs[warm:]]
            counts = {key: sum(one[key] for one in runs[warm:]) for key in ("hits", "partial_hits", "misses")}
            steps = sum(one["steps"] for one in runs[warm:])
            row = {"system": name, "memory": memory, "tpot_s": statistics.mean(measured)}
            row["stall_s"] = sum(one["stall_s"] for one in runs[warm:]) / steps
            row["hit_rate"] = counts["hits"] / sum(counts.values())
            row["simulated_tpot_s"] = statistics.mean(simulated)
            row["ratio"] = statistics.median(a / b for a, b in zip(simulated, measured, strict=True))
            row["simulated_hit_rate"] = statistics.mean(found["hit_rate_by_request"][warm:])
            rows.append(row)
        for model in (*models.values(), beside):
            expertly.unload(model)
    return rows


def main() -> None:
    from expertly.data import demo_folder
    from expertly.model.packing import pack_cached

    args = options(__doc__, systems=",".join(SYSTEMS), memory="25%", warm=2, requests=6, tokens=12, out=None)
    rows = []
    for size, gib, quantize in STORES:
        folder = inflated_model(gib) if gib else demo_folder()
        store = pack_cached(str(folder), None, quantize=quantize)
        requests = make_requests(folder, args.warm + args.requests, PROMPT_TOKENS, args.tokens)
        settings = {"store": str(store.folder), "warm": args.warm, "requests": requests, "memory": args.memory}
        settings["systems"] = args.systems.split(",")
        rows += [{"expert": size} | row for row in child("simulated.py", settings)]
    common = {name: getattr(args, name) for name in ("memory", "warm", "requests", "tokens")}
    print_report("simulated", rows, common, args.out)


if __name__ == "__main__":
    run(main, measure)
