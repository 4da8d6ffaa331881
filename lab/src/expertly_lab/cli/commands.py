"""`expertly lab`: the entry point of `expertly.commands`."""

from __future__ import annotations

from expertly.cli.frame import group
from expertly_lab.cli import compare, machine, reproduce, simulate, trace, train

lab = group(
    "For research: routing traces, simulation, comparison, papers.",
    {
        "simulate": simulate.run,
        "compare": compare.run,
        "reproduce": reproduce.run,
        "train": train.run,
        "machine": machine.run,
    },
)
lab.add_typer(
    group(
        "Routing traces: record, import, make up, look at.",
        {"record": trace.record, "info": trace.info, "import": trace.import_routing, "synth": trace.synth},
    ),
    name="trace",
)
