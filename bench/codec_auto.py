"""What `codec=auto` with `compressed=auto` does, in the simulator: over hardware profiles, disks, budgets and traces.

    python bench/codec_auto.py demo=TRACE gpt-oss-20b=TRACE ... [--hardware all] [--memory 25%,50%,75%]
                               [--disk-mb-per-s 20,100,500,0] [--shares 0.3,0.6,0.9] [--tokens 200] [--held-out]

`to_none` is the tokens a second of `auto` over those of experts as they are, `best` that of the best share tried (and
which). With `--held-out` a trace's own reuse is left out of those that `auto` decides by, where its name is one of
them. On profiles of accelerators host memory holds `--host-memory` of the experts, and the disk is behind it; 0 is the
disk of the profile. Experts that a trace gives tiny sizes take those of the inflated model. Where `auto` chooses `none`
it is the same configuration, and 1 is not measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from expertly.scheduler.compressed_share import MEASURED
from report import print_report

from expertly.core.codecs import CodecRates, choose_codec
from expertly.core.geometry import LayerGeometry
from expertly.scheduler.presets import get_system
from expertly.sim import storage
from expertly.sim.hardware import HARDWARE_NAMES, Hardware
from expertly.sim.schedule import Schedule, Selection, make_schedule
from expertly.sim.storage import Storage
from expertly.sim.study import Memory, Study
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

    def tpot_s(self, hardware: Hardware, memory: str, codec: str, share: str) -> float:
        study = Study(
            self.trace,
            self.schedule,
            hardware,
            self.layers,
            self.trace.manifest.dense,
            segments=1,
            storage=Storage(codec, share),
        )
        simulator = study.simulate(get_system("lru"), Memory(memory).budget(study.geometry))
        return float(simulator.metrics.tpot_s or 0.0)

    def share(self, hardware: Hardware, memory: str) -> float:
        """That `auto` chooses."""
        study = Study(self.trace, self.schedule, hardware, self.layers, self.trace.manifest.dense, segments=1)
        chosen = Storage("planes", "auto").choose(hardware, study.geometry, Memory(memory).budget(study.geometry))
        assert chosen is not None
        return chosen.share


def _worth_compressing(layer: LayerGeometry) -> LayerGeometry:
    return layer if layer.expert_nbytes >= SMALL_NBYTES else replace(layer, intermediate_size=INFLATED)


def machine(profile: Hardware, disk_nbytes_per_s: float, experts_nbytes: int, host_share: float) -> Hardware:
    """The profile with another disk, and on an accelerator with little host memory."""
    if profile.disk is None:
        rate = disk_nbytes_per_s or profile.link.nbytes_per_s
        return replace(profile, link=replace(profile.link, nbytes_per_s=rate))
    disk = replace(profile.disk, nbytes_per_s=disk_nbytes_per_s or profile.disk.nbytes_per_s)
    return replace(profile, disk=disk, host_memory_nbytes=int(experts_nbytes * host_share))


def row_of(recorded: Recorded, hardware: Hardware, memory: str, shares: Sequence[str]) -> dict[str, Any]:
    """A row: what `auto` chose and what came of it, against experts as they are and against other shares."""
    disk = hardware.disk or hardware.link
    costs = Storage("planes").costs(hardware)
    rates = CodecRates(costs.ratio, disk.nbytes_per_s, costs.decode_nbytes_per_s, costs.threads)
    codec = choose_codec(rates).codec
    share = recorded.share(hardware, memory) if codec == "planes" else 0.0
    none = recorded.tpot_s(hardware, memory, "none", "0") if codec == "planes" or shares else None
    to_none = 1.0
    if none is not None and codec == "planes":
        to_none = none / recorded.tpot_s(hardware, memory, codec, str(share))
    tried = {} if none is None else {one: none / recorded.tpot_s(hardware, memory, "planes", one) for one in shares}
    best = max(tried, key=lambda one: tried[one], default=None)
    return {
        "trace": recorded.name,
        "hardware": hardware.name,
        "disk_bytes_per_s": disk.nbytes_per_s,
        "memory": memory,
        "codec": codec,
        "share": share,
        "to_none": to_none,
        "best_share": best,
        "best": None if best is None else tried[best],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", metavar="NAME=TRACE")
    parser.add_argument("--hardware", default="laptop-nvme", help="profiles with commas between, or all")
    parser.add_argument("--memory", default="25%,50%,75%")
    parser.add_argument("--disk-mb-per-s", default="20,100,500,0")
    parser.add_argument("--shares", default="0,0.3,0.6,0.9")
    parser.add_argument("--host-memory", type=float, default=0.5)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args()
    names = [name for name in HARDWARE_NAMES if name != "infinite"] if args.hardware == "all" else None
    profiles = [Hardware.read(name) for name in names or args.hardware.split(",")]
    shares = [share for share in args.shares.split(",") if share]
    rows = []
    for name, _, folder in (one.partition("=") for one in args.traces):
        recorded = Recorded(name, Path(folder), args.tokens)
        if args.held_out:
            storage.REUSES = tuple(reuse for whose, reuse in MEASURED.items() if whose != name)
        for profile in profiles:
            for disk in args.disk_mb_per_s.split(","):
                nbytes = sum(layer.nbytes for layer in recorded.layers)
                hardware = machine(profile, float(disk) * 1e6, nbytes, args.host_memory)
                for memory in args.memory.split(","):
                    rows.append(row_of(recorded, hardware, memory, shares))
    worst = min(row["to_none"] for row in rows)
    missed = [row["best"] / row["to_none"] - 1 for row in rows if row["best"] is not None]
    settings = {key: value for key, value in vars(args).items() if key not in ("traces", "out")}
    told = {"worst_to_none": worst, "most_missed": max(missed, default=None)}
    print_report("codec_auto", rows, settings | told, args.out)


if __name__ == "__main__":
    main()
