"""What `codec=auto` does, in the simulator: over hardware profiles, disks, budgets and traces.

    python bench/codec_auto.py demo=TRACE gpt-oss-20b=TRACE ... [--hardware all] [--memory 25%,50%,75%]
                               [--disk-mb-per-s 20,100,500,0] [--tokens 200]

`to_none` is the tokens a second of `planes` over those of experts as they are, `codec` what `auto` chooses. On profiles
of accelerators host memory holds `--host-memory` of the experts, and the disk is behind it; 0: the profile's disk.
Experts that a trace gives tiny sizes take those of the inflated model.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import print_report

from expertly.core.costs import CodecCosts
from expertly.core.geometry import LayerGeometry
from expertly.scheduler.presets import get_system
from expertly.sim.hardware import HARDWARE_NAMES, Hardware
from expertly.sim.schedule import Schedule, Selection, make_schedule
from expertly.sim.study import Memory, Study
from expertly.store.codec_choice import CodecRates, choose_codec
from expertly.trace.reader import Trace

SMALL_NBYTES = 1 << 20
"""Of an expert. Smaller ones are of a model for tests."""

INFLATED = 5504
"""Neurons of an expert of the model that other benchmarks of compression run."""


class Recorded:
    """A trace, the first requests of it, and its experts' sizes."""

    def __init__(self, name: str, folder: Path, tokens: int) -> None:
        self.name = name
        self.trace = Trace.open(folder)
        self.schedule: Schedule = make_schedule(self.trace, Selection(num_tokens=tokens))
        layers = [layer.geometry() for layer in self.trace.manifest.layers]
        assert None not in layers, f"{name}: sizes of experts are not in the trace"
        self.layers = tuple(_worth_compressing(layer) for layer in layers if layer is not None)

    def tpot_s(self, hardware: Hardware, memory: str, codec: str) -> float:
        study = Study(
            self.trace,
            self.schedule,
            hardware,
            self.layers,
            self.trace.manifest.dense,
            segments=1,
            codec=codec,
        )
        simulator = study.simulate(get_system("lru"), Memory(memory).budget(study.geometry))
        return float(simulator.metrics.tpot_s or 0.0)


def _worth_compressing(layer: LayerGeometry) -> LayerGeometry:
    return layer if layer.expert_nbytes >= SMALL_NBYTES else replace(layer, intermediate_size=INFLATED)


def machine(profile: Hardware, disk_nbytes_per_s: float, experts_nbytes: int, host_share: float) -> Hardware:
    """The profile with another disk, and on an accelerator with little host memory."""
    if profile.disk is None:
        rate = disk_nbytes_per_s or profile.link.nbytes_per_s
        return replace(profile, link=replace(profile.link, nbytes_per_s=rate))
    disk = replace(profile.disk, nbytes_per_s=disk_nbytes_per_s or profile.disk.nbytes_per_s)
    return replace(profile, disk=disk, host_memory_nbytes=int(experts_nbytes * host_share))


def row_of(recorded: Recorded, hardware: Hardware, memory: str) -> dict[str, Any]:
    """A row: what `auto` chose, and what `planes` comes to against experts as they are."""
    disk = hardware.disk or hardware.link
    costs = hardware.codec or CodecCosts()
    rates = CodecRates(costs.ratio, disk.nbytes_per_s, costs.decode_nbytes_per_s, costs.threads)
    codec = choose_codec(rates).codec
    none, planes = (recorded.tpot_s(hardware, memory, one) for one in ("none", "planes"))
    return {
        "trace": recorded.name,
        "hardware": hardware.name,
        "disk_bytes_per_s": disk.nbytes_per_s,
        "memory": memory,
        "codec": codec,
        "to_none": none / planes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", metavar="NAME=TRACE")
    parser.add_argument("--hardware", default="laptop-nvme", help="profiles with commas between, or all")
    parser.add_argument("--memory", default="25%,50%,75%")
    parser.add_argument("--disk-mb-per-s", default="20,100,500,0")
    parser.add_argument("--host-memory", type=float, default=0.5)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--out")
    args = parser.parse_args()
    names = [name for name in HARDWARE_NAMES if name != "infinite"] if args.hardware == "all" else None
    profiles = [Hardware.read(name) for name in names or args.hardware.split(",")]
    rows = []
    for name, _, folder in (one.partition("=") for one in args.traces):
        recorded = Recorded(name, Path(folder), args.tokens)
        for profile in profiles:
            for disk in args.disk_mb_per_s.split(","):
                nbytes = sum(layer.nbytes for layer in recorded.layers)
                hardware = machine(profile, float(disk) * 1e6, nbytes, args.host_memory)
                for memory in args.memory.split(","):
                    rows.append(row_of(recorded, hardware, memory))
    worst = min((row["to_none"] for row in rows if row["codec"] == "planes"), default=1.0)
    settings = {key: value for key, value in vars(args).items() if key not in ("traces", "out")}
    print_report("codec_auto", rows, settings | {"worst_to_none": worst}, args.out)


if __name__ == "__main__":
    main()
