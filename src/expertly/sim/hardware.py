"""The machines to simulate, each a TOML file: shipped profiles, files of users, files that `doctor` wrote."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from expertly.core.costs import CodecCosts, Link, MeasuredCompute
from expertly.core.errors import HardwareError
from expertly.sim.geometry_file import read_layer
from expertly.sim.toml_file import Table, write_toml

__all__ = ["HARDWARE_NAMES", "CodecCosts", "Hardware", "Link", "MeasuredCompute", "PredictorCosts"]

HARDWARE_NAMES = ("rtx3090", "rtx4090", "a5000", "a6000", "a100", "h100-pcie", "h200", "laptop-nvme", "infinite")
"""The shipped profiles."""

_FOLDER = Path(__file__).resolve().parent.parent / "data" / "hardware"


@dataclass(frozen=True, slots=True)
class PredictorCosts:
    """What the host takes to predict: a time for each thing it is told, and the larger of reading and computing.

    The defaults are rounded from what `bench/matcher.py` measures of fMoE on one core of an Intel Xeon: with 1000 maps
    42 us a layer of a decode row (41 by these), 0.42 ms a semantic search (0.70), for 512 rows 3.1 ms a layer and 79 ms
    an update (3.3 and 85); with 32000 maps 0.99 ms a layer (0.70).
    """

    call_ns: int = 20_000
    read_nbytes_per_s: float = 12e9
    flops_per_s: float = 20e9

    def work_ns(self, read_nbytes: int, flops: int) -> int:
        """Of so many bytes read from memory and so many operations."""
        return round(max(read_nbytes / self.read_nbytes_per_s, flops / self.flops_per_s) * 1e9)


@dataclass(frozen=True, slots=True)
class Hardware:
    """One machine: a device that computes from its memory, the link that fills it, what lies behind, and the host."""

    name: str
    memory_nbytes_per_s: float  # weights streamed by the computing device
    flops_per_s: float  # peak, dense, of the weights' 16-bit type
    efficiency: float  # of both, above 0 to 1: what kernels reach
    launch_ns: int  # fixed cost of computing one span of an expert
    layer_ns: int  # fixed cost of one layer: its kernels' launches, router, control plane
    iteration_ns: int  # fixed cost of one iteration
    link: Link  # into the device's memory: PCIe, or the disk where that memory is RAM
    disk: Link | None  # behind the host tier; None: nothing is, or everything fits
    host_memory_nbytes: int | None  # of the host tier, for experts; None: everything fits
    compute: MeasuredCompute | None
    predictor: PredictorCosts = PredictorCosts()
    codec: CodecCosts | None = None  # of the experts on disk; None: nobody measured it here

    @property
    def experts_come_from_disk(self) -> bool:
        """Whether the disk is in the way at all: it is the link, or lies behind a host tier that does not hold them."""
        return self.disk is None or self.host_memory_nbytes is not None

    @classmethod
    def read(cls, name_or_file: str) -> Hardware:
        """A shipped profile by its name, else a TOML file by its path.

        Raises HardwareError naming the file, the key, its value and what is accepted.
        """
        if name_or_file in HARDWARE_NAMES:
            return _parse(Table.read(_FOLDER / f"{name_or_file}.toml"))
        if not os.path.exists(name_or_file):
            accepted = f"{', '.join(HARDWARE_NAMES)}, or a TOML file"
            raise HardwareError(f"hardware={name_or_file!r}: no such profile and no such file; accepted: {accepted}")
        return _parse(Table.read(Path(name_or_file)))

    def write(self, path: Path, comments: Sequence[str] = ()) -> None:
        """Replace `path` atomically by what `read` reads back. Raises HardwareError where it cannot be written."""
        write_toml(path, comments, self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def with_model(self, link: Link, compute: MeasuredCompute) -> Hardware:
        """The same machine with what was measured of one model."""
        return replace(self, link=link, compute=compute)

    def with_disk(self, disk: Link) -> Hardware:
        """The same machine with another disk, which is the link where the weights are in RAM."""
        return replace(self, link=disk) if self.disk is None else replace(self, disk=disk)


def _parse(table: Table) -> Hardware:
    hardware = Hardware(
        name=table.text("name"),
        memory_nbytes_per_s=table.rate("memory_nbytes_per_s", can_be_infinite=True),
        flops_per_s=table.rate("flops_per_s", can_be_infinite=True),
        efficiency=table.factor("efficiency", 0, 1),
        launch_ns=table.whole("launch_ns"),
        layer_ns=table.whole("layer_ns"),
        iteration_ns=table.whole("iteration_ns"),
        host_memory_nbytes=table.whole("host_memory_nbytes", 1) if table.has("host_memory_nbytes") else None,
        link=_link(table.table("link")),
        disk=_link(table.table("disk")) if table.has("disk") else None,
        compute=_compute(table.table("compute")) if table.has("compute") else None,
        predictor=_predictor(table.table("predictor")) if table.has("predictor") else PredictorCosts(),
        codec=_codec(table.table("codec")) if table.has("codec") else None,
    )
    table.end()
    if hardware.host_memory_nbytes is not None and hardware.disk is None:
        raise table.fail("host_memory_nbytes", "a host tier that does not hold everything needs a [disk] behind it")
    return hardware


def _link(table: Table) -> Link:
    link = Link(
        nbytes_per_s=table.rate("nbytes_per_s", can_be_infinite=True),
        latency_ns=table.whole("latency_ns"),
        overhead_ns=table.whole("overhead_ns"),
    )
    table.end()
    return link


def _predictor(table: Table) -> PredictorCosts:
    costs = PredictorCosts(
        call_ns=table.whole("call_ns"),
        read_nbytes_per_s=table.rate("read_nbytes_per_s", can_be_infinite=True),
        flops_per_s=table.rate("flops_per_s", can_be_infinite=True),
    )
    table.end()
    return costs


def _codec(table: Table) -> CodecCosts:
    ratio = table.factor("ratio", 0, 2)
    decode_nbytes_per_s = table.rate("decode_nbytes_per_s", can_be_infinite=True)
    threads = table.whole("threads", 1)
    beside = table.whole("threads_beside") if table.has("threads_beside") else max(1, threads - 1)
    if beside > threads:
        raise table.fail("threads_beside", f"at most the {threads} threads")
    read_processors = 0.0
    if table.has("read_processors"):
        read_processors = table.factor("read_processors", 0, threads, can_be_zero=True)
    table.end()
    return CodecCosts(ratio, decode_nbytes_per_s, threads, beside, read_processors)


def _compute(table: Table) -> MeasuredCompute:
    tokens = table.wholes("tokens", least=1)
    if list(tokens) != sorted(set(tokens)):
        raise table.fail("tokens", "must rise")
    n = len(tokens)
    compute = MeasuredCompute(
        model=table.text("model"),
        dtype=table.text("dtype"),
        num_threads=table.whole("num_threads", 1),
        context=table.whole("context"),
        num_layers=table.whole("num_layers", 1),
        layer=read_layer(table.table("layer")),
        tokens=tokens,
        dense_ns=table.wholes("dense_ns", n),
        head_ns=table.wholes("head_ns", n),
        expert_ns=table.wholes("expert_ns", n),
        parts_ns=table.wholes("parts_ns", n),
        part_ns=table.wholes("part_ns", n),
        submit_ns=table.whole("submit_ns"),
        load_ns=table.whole("load_ns"),
        slowdown_while_loading=table.factor("slowdown_while_loading", 1, 1000),
    )
    table.end()
    return compute
