"""How far simulated times are from measured ones: the same requests, on this machine, in engine and simulator.

    python bench/fidelity.py [--experts-gib 1] [--quantize int4] [--memory 25%,50%] [--systems lru,lfu] [--out FILE]
    python bench/fidelity.py --codec planes --systems lru,resident --memory 25% --out FILE

Of the demo model, with experts inflated to so many GiB (0: as they are), rounded to `--quantize` or compressed with
`--codec`; by default under every preset that an engine can run. Its routing is recorded once. Each system is fed the
same tokens from an empty cache: `--warm` requests that only fill it, and those that are compared. Systems take turns,
request by request, in another order each time. One profile, of `lru` with a quarter of the experts, serves all systems
and budgets: it is measured before them and in turns with them, as `expertly doctor` measures it. Every request and
measurement begins when a fixed loop takes no more than 1.25 times as long as it ever did. `ratio` is the median over
requests of simulated to measured TPOT; `hit_rate` tells other decisions from other times. A step's time in parts,
measured and simulated: waits (`stall_s`); computing `experts` and calling for them (submitting, looking for, taking,
cancelling spans); deciding, in the simulation what predictors and policies take beyond a usual pass; all `else`:
attention, head, in the simulation usual decisions. Bound: within 10 %. `--plot` draws a step of each system beyond it,
measured above simulated. `--out` adds to a file, whose commit, machine and other settings must be those of this run,
the rows of other stores, budgets and systems, so that each run is short.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from itertools import count, product
from pathlib import Path
from typing import Any

from common import Quiet, child, earlier_report, inflated_model, options, play, predictor_of, print_report, run
from pages import make_requests, record_requests

PROMPT_TOKENS = 16
PROFILED = "25%"
NEAR = 0.1  # the bound


class Parts:
    """What the computing thread did in decode steps after `first` passes, of requests of `each` passes: nanoseconds,
    with the waits that it is told of among "expert"; and a step of the first as a timeline. A SimulationWatcher.
    """

    def __init__(self, first: int, each: int) -> None:
        from expertly.lab.compare.simulated import TokenTimeline

        self.ns = Counter[str]()
        self.timeline = TokenTimeline(first + each // 2)
        self.predicted = self.timeline.predicted
        self.moved = self.timeline.moved
        self._first, self._each = first, each
        self._pass = 0  # that runs

    def computed(self, what: str, layer: int, begin_ns: int, end_ns: int) -> None:
        self._add(what.split()[0], end_ns - begin_ns)
        self.timeline.computed(what, layer, begin_ns, end_ns)
        self._pass += what == "head"

    def spent(self, what: str, begin_ns: int, end_ns: int) -> None:
        self._add("decide" if what == "decide" else "expert", end_ns - begin_ns)
        self.timeline.spent(what, begin_ns, end_ns)

    def _add(self, kind: str, duration_ns: int) -> None:
        if self._pass >= self._first and self._pass % self._each:
            self.ns[kind] += duration_ns

    def as_row(self, num_steps: int, tpot_s: float, stall_s: float | None = None) -> dict[str, float]:
        """The parts of a step. `stall_s`: its waits, among experts' time; None: of a simulation, what is left."""
        experts_s = self.ns["expert"] / num_steps / 1e9
        if stall_s is None:
            stall_s = tpot_s - self.ns.total() / num_steps / 1e9
        else:
            experts_s -= stall_s
        decide_s = (self.ns["decide"] + self.ns["observe"]) / num_steps / 1e9
        times = {"stall_s": stall_s, "experts_s": experts_s, "decide_s": decide_s}
        return times | {"else_s": tpot_s - sum(times.values())}

    def begin_run(self, name: str) -> Parts:
        return self


def measure(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """In a child: a row for each system and budget."""
    import torch

    import expertly
    from expertly.data import demo_predictor
    from expertly.lab.model_profile import Measurement, compressed_costs
    from expertly.lab.playing import recorded_requests
    from expertly.lab.watching import watched
    from expertly.policies.learned import read_learned
    from expertly.policies.predictor.learned import LearnedWeights
    from expertly.scheduler.presets import get_system
    from expertly.sim.hardware import Hardware
    from expertly.sim.schedule import Selection, make_schedule
    from expertly.sim.study import Memory, Study
    from expertly.trace.reader import Trace

    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        model, _ = expertly.load(arguments["store"], system="resident", learned="off")
        record_requests(model, arguments["requests"], Path(scratch) / "trace")
        expertly.unload(model)
        trace = Trace.open(Path(scratch) / "trace")
        schedule = make_schedule(trace, Selection(len(arguments["requests"])))
        requests = recorded_requests(trace, schedule)
        beside, _ = expertly.load(arguments["store"], memory=PROFILED, system="lru", learned="off")
        weights = str(predictor_of(beside, Path(scratch)))
        measurement = Measurement(beside)
        quiet = Quiet()
        for task in measurement.tasks():
            quiet.wait()
            task()
        tasks = (task for _ in count() for task in measurement.tasks_of_a_token())
        models, ran, parts = {}, {}, {}
        each = 1 + len(requests[0].tokens) - requests[0].num_prompt
        first = arguments["warm"] * each
        for memory, name in product(arguments["memory"], arguments["systems"]):
            system = get_system(name)
            how = {"system": name, "memory": "100%" if system.keeps_everything else memory}
            given = {"predictor": weights} if system.takes_weights else {}
            key = tuple(how.values())
            if key not in models:
                how |= {"learned": "off", "segments": arguments["segments"]}
                models[key], _ = expertly.load(arguments["store"], **how, **given)
                ran[key], parts[key] = [], Parts(first, each)
        for turn, request in enumerate(requests):
            keys = list(models)
            for key in (*keys[turn % len(keys) :], *keys[: turn % len(keys)]):
                quiet.wait()
                with watched(models[key], parts[key]):
                    ran[key].append(play(models[key], request.tokens, request.num_prompt))
                next(tasks)()
        profile = measurement.profile()
        compressed = compressed_costs(beside, profile)
        hardware = Hardware.read("infinite").with_model(profile.link, profile.compute, profile.predictor)
        if compressed is not None:
            hardware = replace(hardware.with_disk(compressed[0]), codec=compressed[1])
        study = Study(
            trace, schedule, hardware, trace.manifest.geometries, trace.manifest.dense, segments=arguments["segments"],
            learned=read_learned(demo_predictor(), LearnedWeights).learned, codec=arguments["codec"],
        )  # fmt: skip
        rows, first_request = [], arguments["warm"]
        for memory, name in product(arguments["memory"], arguments["systems"]):
            key = (name, memory if (name, memory) in ran else "100%")
            runs, simulated = ran[key], Parts(first, each)
            found = replace(study, chrome=simulated).row(get_system(name), Memory(memory))
            times = [one["tpot_s"] for one in found["times_by_request"][first_request:]]
            counts = {key: sum(one[key] for one in runs[first_request:]) for key in runs[0]}
            demands = counts["hits"] + counts["misses"] + counts["partial_hits"]
            measured = [one["tpot_s"] for one in runs[first_request:]]
            row = {"memory": memory, "system": name, "tpot_s": statistics.mean(measured)}
            row |= {"simulated_tpot_s": statistics.mean(times)}
            row["ratio"] = statistics.median(a / b for a, b in zip(times, measured, strict=True))
            row |= parts[key].as_row(counts["steps"], row["tpot_s"], counts["stall_s"] / counts["steps"])
            of_simulated = simulated.as_row(counts["steps"], row["simulated_tpot_s"])
            row |= {f"simulated_{name}": value for name, value in of_simulated.items()}
            row["is_near"] = abs(row["ratio"] - 1) <= NEAR
            row["hit_rate"] = counts["hits"] / demands
            row["simulated_hit_rate"] = statistics.mean(found["hit_rate_by_request"][first_request:])
            row["drawn"] = [of.timeline.as_dict() for of in (parts[key], simulated)]
            rows.append(row)
        for model in (*models.values(), beside):
            expertly.unload(model)
    print(profile, f"{quiet.waited_s:.0f} s of waiting", file=sys.stderr)
    return rows


def main() -> None:
    from expertly.data import demo_folder
    from expertly.lab.compare.report import tokens_in_time
    from expertly.lab.plots import check_plot, drawing, save
    from expertly.model.packing import pack_cached
    from expertly.scheduler.presets import runnable_systems

    args = options(
        __doc__, experts_gib=1.0, quantize=None, codec="none", systems=",".join(runnable_systems()), memory="25%,50%",
        segments=0, warm=2, requests=4, tokens=24, out=None, plot=None,
    )  # fmt: skip
    check_plot(Path(args.plot) if args.plot else None)
    common = {name: getattr(args, name) for name in ("segments", "warm", "requests", "tokens")}
    earlier = earlier_report(args.out, common)
    folder = inflated_model(args.experts_gib, no_zeros=True) if args.experts_gib else demo_folder()
    store = pack_cached(str(folder), None, codec=args.codec, quantize=args.quantize)
    requests = make_requests(folder, args.warm + args.requests, PROMPT_TOKENS, args.tokens)
    settings = {"store": str(store.folder), "codec": args.codec, "warm": args.warm, "requests": requests}
    settings |= {
        "segments": args.segments or None,
        "memory": args.memory.split(","),
        "systems": args.systems.split(","),
    }
    stored = f"{args.experts_gib:g} GiB, {args.quantize or args.codec}"
    rows = [{"run": f"{stored}, {row['memory']}"} | row for row in child("fidelity.py", settings)]
    both = {f"{row['system']}, {row['run']}": (row.pop("drawn"), row["is_near"]) for row in rows}
    drawn = {name: timelines for name, (timelines, is_near) in both.items() if not is_near}
    if args.plot and drawn:
        pairs = [zip(("measured", "simulated"), two, strict=True) for two in drawn.values()]
        with drawing():
            each = {f"{name}, {how}": one for name, two in zip(drawn, pairs, strict=True) for how, one in two}
            save(tokens_in_time(each).figure, Path(args.plot))
    new = {(row["run"], row["system"]) for row in rows}
    rows = [row for row in earlier["results"] if (row["run"], row["system"]) not in new] + rows
    print_report("fidelity", rows, common, args.out, earlier["command"])


if __name__ == "__main__":
    run(main, measure)
