"""How fast the simulator is, on one core: a decode trace of 26 layers, 64 experts, top-6 (made up: Zipf, half of a
token's experts stay for the next) with a quarter of the memory.

    python bench/simulate.py [--iterations 2000] [--systems lru,lfu] [--segments 1]

Bounds: 100 000 iterations in 5 minutes of a core's time a system, without prediction; memory that does not grow with
the trace. `seconds_100k` is extrapolated from the longer of two runs; `rss_*` is the peak of a fresh process that
simulated so many iterations, with Python, NumPy and the trace's mapped pages in it.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from common import child, options, print_report, run

from expertly.scheduler.systems import SYSTEMS
from expertly_lab import synth

LAYERS, EXPERTS, TOP_K = 26, 64, 6
MEMORY = "25%"
DEFAULT_SYSTEMS = ("lru", "lfu", "lcp", "on-demand", "random", "static", "belady", "belady-global", "oracle")


def measure(folder: str, system: str, iterations: int, segments: int) -> dict[str, Any]:
    """Simulate the first `iterations` tokens of a trace in this process."""
    from expertly.core.geometry import LayerGeometry
    from expertly.engine.process import peak_rss_nbytes
    from expertly_lab.sim.hardware import Hardware
    from expertly_lab.sim.schedule import Selection, make_schedule
    from expertly_lab.sim.study import Memory, Study
    from expertly_lab.trace.reader import Trace

    trace = Trace.open(Path(folder))
    layers = (LayerGeometry(EXPERTS, TOP_K, 2048, 1408, 3, 2),) * LAYERS
    schedule = make_schedule(trace, Selection(num_tokens=iterations))
    study = Study(trace, schedule, Hardware.read("rtx3090"), layers, None, segments=segments)
    start = time.process_time()
    simulator = study.simulate(SYSTEMS[system], Memory(MEMORY).budget(study.geometry_of(SYSTEMS[system])))
    seconds = time.process_time() - start
    assert simulator.metrics.num_decode_iterations == iterations
    return {"seconds": seconds, "peak_nbytes": peak_rss_nbytes()}


def main() -> None:
    args = options(__doc__, iterations=2000, systems=",".join(DEFAULT_SYSTEMS), segments=1)
    short = max(1, args.iterations // 4)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "trace"
        made = synth.zipf(LAYERS, EXPERTS, TOP_K, args.iterations, keep=0.5)
        synth.write_workload(folder, made, model="made up")
        for system in args.systems.split(","):
            asked = {"folder": str(folder), "system": system, "segments": args.segments}
            few, many = (child("simulate.py", asked | {"iterations": num}) for num in (short, args.iterations))
            per_iteration = many["seconds"] / args.iterations
            rows.append(
                {
                    "system": system,
                    "iterations_per_s": 1 / per_iteration,
                    "us_per_layer": 1e6 * per_iteration / LAYERS,
                    "seconds_100k": 1e5 * per_iteration,
                    f"rss_{short}": few["peak_nbytes"],
                    f"rss_{args.iterations}": many["peak_nbytes"],
                }
            )
    print_report("simulate", rows, vars(args) | {"memory": MEMORY})


if __name__ == "__main__":
    run(main, lambda arguments: measure(**arguments))
