"""What a loaded model has done so far, in all, on its device and in each worker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from expertly.core.messages import Phase
from expertly.engine.observe import Prefetching
from expertly.engine.remote import RemoteShard
from expertly.engine.runtime import Engine
from expertly.engine.shard import Shard
from expertly.scheduler.counters import LayerCounters, PhaseCounters
from expertly.scheduler.systems import System
from expertly.store.packed import PackedStore

_MEMORY = ("memory_bytes", "kept_bytes", "ring_bytes")

_OF_DEVICE = (
    *("hits", "partial_hits", "misses", "predicted", "prefetched"),
    *("hit_rate", "bytes_loaded", "stall_s", "experts_s"),
)
"""Counts of a phase that are also told for the device and each worker."""


@dataclass(frozen=True)
class Stats:
    """A live view of a model's counters: each call reads them as they are now."""

    _engine: Engine
    _system: System
    _store: PackedStore
    memory_reason: str
    system_reason: str | None = None  # where expertly chose the system
    kv: dict[str, Any] | None = None  # how the KV cache is rounded

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain numbers: seconds in `_s`, bytes where the name says so, rates None when undefined."""
        engine, executor, rounding = self._engine, self._engine.executor, self._store.manifest.rounding
        shard = executor.shard
        devices = [of_device(shard, self._system), *map(_of_worker, executor.remotes)]
        layers = [executor.layer_counters(layer) for layer in range(executor.geometry.num_layers)]
        totals = _totals(layers)
        moved = _moved(shard)
        formats = self._store.dense_by_format(is_decoded=shard.kernels.library is None)
        return {
            "system": self._system.name,
            "system_reason": self.system_reason,
            "segments": executor.geometry.segments_per_expert,
            **{name: sum(device[name] for device in devices) for name in _MEMORY},
            "expert_bytes": executor.geometry.nbytes,
            "memory_reason": self.memory_reason,
            "kernels": shard.kernels.facts(),
            "rounding": None if rounding is None else {"to": rounding.to},
            "kv": self.kv,
            "dense": {"bytes": sum(formats.values()), "formats": formats},
            "bytes_loaded": sum(phase.loaded_nbytes for phase in totals.values()),
            "stall_s": sum(phase.stall_ns for phase in totals.values()) / 1e9,
            "allocation": _allocation_over(device["allocation"] for device in devices),
            "prediction": None if engine.prefetching is None else _of_prediction(engine.prefetching),
            **{name: sum(device.get(name, 0) for device in devices) for name in moved},
            "synchronisations_per_pass": _per_pass(engine, moved.get("synchronisations")),
            "devices": devices,
            "phases": {
                phase.value: {
                    "iterations": engine.num_passes[phase],
                    "tokens": engine.num_tokens[phase],
                    **_as_dict(counters),
                }
                for phase, counters in totals.items()
            },
            "layers": [
                {"layer": number, "prefill": _as_dict(layer.prefill), "decode": _as_dict(layer.decode)}
                for number, layer in enumerate(layers)
            ],
        }


def _per_pass(engine: Engine, count: int | None) -> float | None:
    """None where nothing ran, or nothing is counted: of a device that works in step with the host."""
    num_passes = sum(engine.num_passes.values())
    return count / num_passes if count is not None and num_passes else None


def _of_worker(remote: RemoteShard) -> dict[str, Any]:
    """As `of_device`."""
    remote.hear()
    facts = remote.report
    return {**facts["device"], "worker": {**remote.facts(), "pid": facts["pid"], "kernels": facts["kernels"]["name"]}}


def _totals(layers: Iterable[LayerCounters]) -> dict[Phase, PhaseCounters]:
    total = LayerCounters()
    for layer in layers:
        total.add(layer)
    return {phase: total.of(phase) for phase in Phase}


def _of_prediction(prefetching: Prefetching) -> dict[str, Any]:
    error = prefetching.error
    return {
        "predictor": prefetching.predictor.facts(),
        "failed": None if error is None else f"{type(error).__name__}: {error}",
        "layers_left_out": prefetching.left_out,
    }


def _as_dict(counters: PhaseCounters) -> dict[str, Any]:
    fields = {name: value for name, value in asdict(counters).items() if not name.endswith("_ns")}
    return {
        **{name.replace("_nbytes", "_bytes"): value for name, value in fields.items() if name != "loaded_nbytes"},
        "bytes_loaded": counters.loaded_nbytes,
        "stall_s": counters.stall_ns / 1e9,
        "experts_s": counters.expert_ns / 1e9,
        "compute_s": (counters.expert_ns - counters.stall_ns) / 1e9,
        **counters.rates(),
    }


def of_device(device: Shard, system: System) -> dict[str, Any]:
    """Memory, counts of all layers by phase, and times of the device, or of a worker, whose `worker` says how it is
    (RemoteShard.facts). They run side by side: their stalls and times add up to more than those of the model.
    """
    scheduler = device.scheduler
    geometry, budget = scheduler.geometry, scheduler.budget
    phases = {phase.value: _as_dict(counters) for phase, counters in _totals(scheduler.counters).items()}
    kept, staging = budget.kept_nbytes(geometry), budget.staging_nbytes(geometry)
    return {
        "device": device.name,
        "experts": geometry.num_experts,
        "memory_bytes": kept + staging,
        "kept_bytes": kept,
        "ring_bytes": staging,
        "resident_bytes": scheduler.cache.resident_nbytes(),
        "bytes_loaded": sum(counts["bytes_loaded"] for counts in phases.values()),
        **_moved(device),
        **{phase: {name: counts[name] for name in _OF_DEVICE} for phase, counts in phases.items()},
        "allocation": system.allocation_facts(scheduler),
        "host_memory": device.device.host_memory,
        "worker": None,
    }


def _moved(device: Shard) -> dict[str, int]:
    """The device's own counts, under the names of results: bytes as `bytes_disk`."""
    return {
        f"bytes_{name.removesuffix('_nbytes')}" if name.endswith("_nbytes") else name: value
        for name, value in device.device.stats().items()
    }


def _allocation_over(allocations: Iterable[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The experts that layers keep here and in workers together. Each tells the rest of its allocation itself."""
    known = [allocation for allocation in allocations if allocation is not None]
    if len(known) < 2:
        return known[0] if known else None
    experts = [sum(of_devices) for of_devices in zip(*(allocation["experts"] for allocation in known), strict=True)]
    return {"name": known[0]["name"], "experts": experts}
