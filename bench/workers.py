"""How far simulated times with workers are from measured ones: the engine on one core, its workers on another.

    python bench/workers.py [--experts-gib 0,1] [--workers 1,2] [--requests 5] [--tokens 40] [--rounds 3] [--out FILE]

Of the demo model, with experts inflated to so many GiB (0: as they are), all of which are in memory, here or in a
worker. What the simulator is told is measured apart from what it predicts: computing, on the engine's core, of a model
that nobody shares (`lab.model_profile`); and a call, on random tokens, with the workers of an earlier load. Then the
engine with its workers, and a model that has all experts by itself, take turns with requests of recorded routing.
`ratio` is the median over requests of simulated to measured TPOT, `ratio_alone` that of the model by itself. Bound:
within 15 %. The simulator does not know that several workers share a core. Needs two cores and Ray.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from common import child, inflated_model, options, print_report, run
from pages import make_requests, record_requests

CORES = 0, 1  # of the engine, of the workers
PROMPT_TOKENS = 16
OWN_S = 0.003  # what own experts take where all answers are to be there before


def pin(process: int, core: int) -> None:
    for thread in os.listdir(f"/proc/{process}/task"):
        os.sched_setaffinity(int(thread), {core})


@contextmanager
def loaded(settings: dict[str, Any], **how: Any) -> Iterator[Any]:
    import torch

    import expertly

    model, _ = expertly.load(settings["store"], learned="off", device="cpu", verify="never", **how)
    torch.set_num_threads(1)
    pin(os.getpid(), CORES[0])
    for one in expertly.stats(model).as_dict()["devices"] if "workers" in how else ():
        if one["worker"]:
            pin(one["worker"]["pid"], CORES[1])
    yield model
    expertly.unload(model)


class Timed:
    """A model whose layers' decode steps note when they began and ended, and their own part of it, in ns."""

    def __init__(self, model: Any) -> None:
        from expertly.api import handle

        self.own_takes_s = 0.0
        self._model, self._dice = model, random.Random(7)
        self._rows: list[dict[str, int]] = []
        self._own = (0, 0)
        executor = handle(model).engine.executor
        self._whole, self._workers = executor.run_layer, []
        executor.run_layer = self._run
        if hasattr(executor, "placement"):
            self._workers = executor.placement.shares[1:]
            self._part, executor.shards[0].run_layer = executor.shards[0].run_layer, self._run_part

    def rows(self, requests: int) -> list[dict[str, int]]:
        """Of each layer and decode step of so many requests of random tokens, behind one that warms up."""
        from expertly.lab.playing import feed

        for number in range(1 + requests):
            if number < 2:
                self._rows = []
            ids = [self._dice.randrange(self._model.config.vocab_size) for _ in range(PROMPT_TOKENS + 60)]
            feed(self._model, ids, PROMPT_TOKENS)
        return self._rows

    def _run_part(self, *args: Any) -> Any:
        begin = time.perf_counter_ns()
        result = self._part(*args)
        time.sleep(self.own_takes_s)
        self._own = begin, time.perf_counter_ns()
        return result

    def _run(self, work: Any, *args: Any) -> Any:
        begin = time.perf_counter_ns()
        result = self._whole(work, *args)
        router = work.router
        if router.batch_tokens == 1:
            away = [len({*share.experts[router.layer]} & {*router.experts}) for share in self._workers]
            row = {"layer": router.layer, "begin": begin, "own": self._own[0], "own_end": self._own[1]}
            row |= {"end": time.perf_counter_ns(), "away": sum(away), "calls": sum(map(bool, away))}
            self._rows.append(row | {"here": len(router.experts) - sum(away)})
        return result


def between(rows: list[dict[str, int]]) -> float:
    """From the end of a layer to the next one's begin: behind calls, or where no layer has any."""
    any_calls = any(row["calls"] for row in rows)
    pairs = [(a, b) for a, b in pairwise(rows) if b["layer"] and (a["calls"] > 0) == any_calls]
    return statistics.fmean(b["begin"] - a["end"] for a, b in pairs)


def measured_network(settings: dict[str, Any], expert_ns: float) -> Any:
    """What a call to a worker costs."""
    from expertly.sim.hardware import ClusterNetwork

    with loaded(settings, **settings["away"]) as model:
        timed = Timed(model)
        usual, timed.own_takes_s = timed.rows(4), OWN_S
        slow = timed.rows(1)
    with loaded(settings, system="resident") as model:
        alone = Timed(model).rows(4)
    num = settings["workers"]
    one = [row for row in usual if row["calls"] == 1 and row["away"] > row["here"]]
    call = statistics.fmean(row["end"] - row["begin"] - row["away"] * expert_ns for row in one)
    send = statistics.fmean(row["own"] - row["begin"] for row in usual if row["calls"] == num) / num
    take = statistics.fmean(row["end"] - row["own_end"] for row in slow if row["calls"] == num) / num
    wake = max(0.0, between(usual) - between(alone))
    return ClusterNetwork("measured", 2e9, 0, round(call), round(send), round(min(take, call)), round(wake))


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """In a child: a row."""
    import ray
    import torch

    ray.init(address="local", include_dashboard=False, object_store_memory=256 << 20, log_to_driver=False)
    from expertly.api import handle
    from expertly.lab.model_profile import measure_model
    from expertly.lab.playing import feed, recorded_requests
    from expertly.scheduler.presets import get_system
    from expertly.sim.hardware import Hardware
    from expertly.sim.schedule import Selection, make_schedule
    from expertly.sim.study import Memory, Study
    from expertly.trace.reader import Trace

    num = settings["workers"]
    settings["away"] = {"system": "resident", "workers": num, "memory": "100%", "worker_memory": "100%"}
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        with loaded(settings, system="resident") as model:
            record_requests(model, settings["requests"], Path(scratch) / "trace")
        with loaded(settings, system="lru", memory="90%") as model:  # few layers load, as here none does
            profile = measure_model(model, 15.0, (1, 2, 4, PROMPT_TOKENS))
        network = measured_network(settings, profile.compute.expert_ns[0])
        trace = Trace.open(Path(scratch) / "trace")
        schedule = make_schedule(trace, Selection(len(settings["requests"])))
        requests = recorded_requests(trace, schedule)
        hardware = Hardware.read("infinite").with_model(profile.link, profile.compute, profile.predictor)
        study = Study(trace, schedule, hardware, trace.manifest.geometries, trace.manifest.dense)
        with loaded(settings, **settings["away"]) as away, loaded(settings, system="resident") as alone:
            shares = handle(away).engine.executor.placement.shares
            group, _ = study.simulate_group(get_system("lru"), shares, [Memory("100%")] * (num + 1), network)
            ran: dict[str, list[list[float]]] = {"": [[] for _ in requests], "_alone": [[] for _ in requests]}
            for turn in range(1 + settings["rounds"]):
                for number, request in enumerate(requests):
                    for name, model in zip(ran, (away, alone), strict=True):
                        found = feed(model, request.tokens, request.num_prompt).tpot_s
                        ran[name][number] += [found] if turn and found else []  # the first round warms up
        simulated = {"": group.metrics.times_by_request(False)}
        simulated["_alone"] = study.row(get_system("resident"), Memory("100%"))["times_by_request"]
    row: dict[str, Any] = {"workers": num}
    for name, times in simulated.items():
        found, took = [one["tpot_s"] for one in times], [statistics.median(one) for one in ran[name]]
        row[f"tpot_s{name}"], row[f"simulated_tpot_s{name}"] = statistics.median(took), statistics.median(found)
        row[f"ratio{name}"] = statistics.median(a / b for a, b in zip(found, took, strict=True))
    ray.shutdown()
    return row | {key: getattr(network, key) for key in ("call_ns", "send_ns", "take_ns", "wake_ns")}


def main() -> None:
    from expertly.data import demo_folder
    from expertly.model.packing import pack_cached

    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    args = options(__doc__, experts_gib="0,1", workers="1,2", requests=5, tokens=40, rounds=3, out=None)
    rows = []
    for gib, num in product(map(float, args.experts_gib.split(",")), map(int, args.workers.split(","))):
        folder = inflated_model(gib, no_zeros=True) if gib else Path(demo_folder())
        settings = {"store": str(pack_cached(str(folder), None).folder), "workers": num, "rounds": args.rounds}
        settings["requests"] = make_requests(folder, args.requests, PROMPT_TOKENS, args.tokens)
        rows.append({"experts_gib": gib} | child("workers.py", settings))
    print_report("workers", rows, {name: value for name, value in vars(args).items() if name != "out"}, args.out)


if __name__ == "__main__":
    run(main, measure)
