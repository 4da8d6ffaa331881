"""From a model to a plot: record what it routes, add a policy, simulate, and draw it beside what is possible.

    python examples/simulate_and_plot.py [TRACE] plot.png

TRACE: what own_trace.py or `expertly lab trace record` made; without it the demo model answers some prompts first. The
parts between the `# %%` are cells: editors and Jupyter run them one by one.
"""

# %% Record: or take a trace that is there.
import sys
import tempfile
from math import inf, log
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

import expertly
from expertly.policies.eviction import ScoredPolicy
from expertly.scheduler.systems import get_system
from expertly_lab.recording import record
from expertly_lab.sim.hardware import Hardware
from expertly_lab.sim.schedule import Selection, make_schedule
from expertly_lab.sim.study import Memory, Study
from expertly_lab.trace.reader import Trace

PROMPTS = ("Once upon a time", "The ship left the harbour at dawn", "She opened the letter and", "A grey cat wanted")


def recorded(folder: Path) -> Path:
    model, tokenizer = expertly.load(memory="50%")
    with record(model, folder, name="demo") as recording:
        for prompt in PROMPTS:
            inputs = tokenizer(prompt, return_tensors="pt")
            recording.begin_request(prompt=prompt, num_prompt_tokens=inputs["input_ids"].shape[1])
            model.generate(**inputs, max_new_tokens=48, do_sample=False)
    expertly.unload(model)
    return folder


# %% A policy: what has been used least lately goes first.
class Fading(ScoredPolicy):
    """Keeps the experts that were used most, where a use counts less with every step since."""

    KEEPS = 0.98

    def __init__(self):
        super().__init__()
        self.now, self.uses = 0, {}  # of an expert: its uses as they counted at a step

    def score(self, expert):
        uses, step = self.uses.get(expert, (0.0, 0))
        return log(uses) - step * log(self.KEEPS) if uses else -inf  # all fade alike: compared as of step 0

    def used(self, experts, num_tokens, batch_tokens):
        self.now += 1
        for expert, num in zip(experts, num_tokens, strict=True):
            uses, step = self.uses.get(expert, (0.0, self.now))
            self.uses[expert] = (uses * self.KEEPS ** (self.now - step) + num, self.now)
        self.rescore(experts)


# %% Simulate: systems, yours among them, and the bounds: Belady's replacement, and an oracle that also loads ahead.
SYSTEMS = ("lru", "lfu", "lru:eviction=simulate_and_plot.Fading", "belady-global", "oracle")
SHARES = (25, 50, 75)  # percent of the experts in memory


def simulated(trace: Trace) -> dict[str, list[dict]]:
    layers = tuple(layer.geometry() for layer in trace.manifest.layers)
    study = Study(trace, make_schedule(trace, Selection()), Hardware.read("rtx3090"), layers, trace.manifest.dense)
    return {name: [study.row(get_system(name), Memory(f"{share}%")) for share in SHARES] for name in SYSTEMS}


# %% Plot: what lies between a system and the bounds is what is left to gain.
def plot(trace: Trace, found: dict[str, list[dict]], file: str) -> None:
    _, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for axis, key, scale, title in (
        (axes[0], "hit_rate", 100, "hit rate, %"),
        (axes[1], "tpot_s", 1e3, "time per token, ms"),
    ):
        for name, rows in found.items():
            is_bound = name in ("belady-global", "oracle")
            values = [row[key] * scale for row in rows]
            axis.plot(SHARES, values, marker="o", linestyle="--" if is_bound else "-", label=name)
        axis.set_xlabel("experts in memory, %")
        axis.set_title(title)
    axes[1].legend(fontsize="small")
    pyplot.suptitle(f"{trace.manifest.model} on an RTX 3090, simulated")
    pyplot.savefig(file, dpi=120)


# %% All of it.
def main(*names: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        trace = Trace.open(Path(names[0]) if len(names) > 1 else recorded(Path(scratch) / "trace"))
        found = simulated(trace)
        for name, rows in found.items():
            rates = ", ".join(f"{row['hit_rate']:.0%} hits {row['tpot_s'] * 1e3:.3f} ms" for row in rows)
            print(f"{name.rpartition('.')[2]:>14}: {rates}")
        plot(trace, found, names[-1])


if __name__ == "__main__":
    main(*sys.argv[1:])
