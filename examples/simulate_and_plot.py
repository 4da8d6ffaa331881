"""What systems would do with a trace on another machine, as a plot of time per token by memory.

    python examples/simulate_and_plot.py TRACE plot.png

TRACE: what own_trace.py or `expertly lab trace record` made. `expertly lab simulate TRACE --plot plot.png` draws more.
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

from expertly.scheduler.presets import get_system
from expertly.sim.hardware import Hardware
from expertly.sim.schedule import Selection, make_schedule
from expertly.sim.study import Memory, Study
from expertly.trace.reader import Trace

SYSTEMS = ("lru", "lfu", "belady-global", "oracle")
SHARES = (25, 50, 75)  # percent of the experts in memory

trace = Trace.open(Path(sys.argv[1]))
layers = tuple(layer.geometry() for layer in trace.manifest.layers)
study = Study(trace, make_schedule(trace, Selection()), Hardware.read("rtx3090"), layers, trace.manifest.dense)

for name in SYSTEMS:
    rows = [study.row(get_system(name), Memory(f"{share}%")) for share in SHARES]
    print(f"{name:>14}: " + ", ".join(f"{row['hit_rate']:.0%} hits {row['tpot_s'] * 1e3:.3f} ms" for row in rows))
    pyplot.plot(SHARES, [row["tpot_s"] * 1e3 for row in rows], marker="o", label=name)

pyplot.xlabel("experts in memory, %")
pyplot.ylabel("time per token, ms")
pyplot.title(f"{trace.manifest.model} on an RTX 3090, simulated")
pyplot.legend()
pyplot.savefig(sys.argv[2], dpi=120)
