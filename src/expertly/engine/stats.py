"""What a loaded model has done so far, in all, on its device and in each worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from expertly.core.messages import Phase
from expertly.engine.observe import Prefetching
from expertly.engine.runtime import Engine
from expertly.engine.shard import Shard
from expertly.scheduler.counters import PhaseCounters
from expertly.scheduler.systems import System
from expertly.store.packed import PackedStore

_MEMORY = ("memory_bytes", "kept_bytes", "ring_bytes")

_OF_DEVICE = (
    *("hits", "partial_hits", "misses", "predicted", "prefetched"),
    *("hit_rate", "bytes_loaded", "stall_s", "experts_s"),
)
"""Counts of a phase that are also told for the device and each worker."""


class Stats:
    """A live view of a model's counters: each call reads them as they are now."""

    def __init__(
        self,
        engine: Engine,
        system: System,
        store: PackedStore,
        why_memory: str,
        why_system: str | None = None,
    ) -> None:
        """`why_memory`: the reason for the amount; `why_system`: the reason for the system, where expertly chose it."""
        self._engine = engine
        self._system = system
        self._store = store
        self.system = system.name
        self.memory_reason = why_memory
        self.system_reason = why_system

    def phase(self, phase: Phase | str, layer: int | None = None) -> PhaseCounters:
        """A copy of the counters of one phase, of one layer or summed over all."""
        total, executor = PhaseCounters(), self._engine.executor
        for number in range(executor.geometry.num_layers) if layer is None else [layer]:
            total.add(executor.layer_counters(number).of(Phase(phase)))
        return total

    def _synchronisations(self) -> float | None:
        """How often a pass waits for the device, on average; None where the device works in step with the host."""
        told = self._engine.device.stats().get("synchronisations")
        num_passes = self._engine.num_prefill_iterations + self._engine.num_decode_iterations
        return told / num_passes if num_passes and told is not None else None

    def _dense(self) -> dict[str, Any]:
        """Bytes of the dense part in memory, in all and by format or dtype."""
        is_decoded = self._engine.executor.shard.kernels.library is None
        formats = self._store.dense_by_format(is_decoded=is_decoded)
        return {"bytes": sum(formats.values()), "formats": formats}

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain numbers: seconds in `_s`, bytes where the name says so, rates None when undefined."""
        engine, executor, prefetching = self._engine, self._engine.executor, self._engine.prefetching
        geometry, shard = executor.geometry, executor.shard
        totals = {phase: self.phase(phase) for phase in Phase}
        told = [remote.told() for remote in executor.remotes]
        devices = [of_device(shard, self._system)]
        for one, remote in zip(told, executor.remotes, strict=True):
            worker = {**remote.facts(), "pid": one["pid"], "kernels": one["kernels"]["name"]}
            devices.append({**one["device"], "worker": worker})
        counts = sorted({*moved(shard)}.union(*(one["moved"] for one in told)))
        return {
            "system": self.system,
            "system_reason": self.system_reason,
            "segments": geometry.segments_per_expert,
            **{name: sum(one[name] for one in devices) for name in _MEMORY},
            "expert_bytes": geometry.nbytes,
            "memory_reason": self.memory_reason,
            "kernels": shard.kernels.facts(),
            "rounding": None if self._store.manifest.rounding is None else self._store.manifest.rounding.as_dict(),
            "dense": self._dense(),
            "bytes_loaded": sum(one.loaded_nbytes for one in totals.values()),
            "stall_s": sum(one.stall_ns for one in totals.values()) / 1e9,
            "allocation": allocation_over([one["allocation"] for one in devices]),
            "prediction": None if prefetching is None else _of_prediction(prefetching),
            "reuse": None if engine.reuse is None else engine.reuse.facts(),
            **{name: sum(one.get(name, 0) for one in devices) for name in counts},
            "synchronisations_per_pass": self._synchronisations(),
            "devices": devices,
            "phases": {
                phase.value: {"iterations": iterations, "tokens": tokens, **_as_dict(totals[phase])}
                for phase, iterations, tokens in (
                    (Phase.PREFILL, engine.num_prefill_iterations, engine.num_prefill_tokens),
                    (Phase.DECODE, engine.num_decode_iterations, engine.num_decode_tokens),
                )
            },
            "layers": [
                {"layer": layer, "prefill": _as_dict(one.prefill), "decode": _as_dict(one.decode)}
                for layer, one in enumerate(map(executor.layer_counters, range(geometry.num_layers)))
            ],
        }


def _of_prediction(prefetching: Prefetching) -> dict[str, Any]:
    """Facts of the predictor and its file."""
    saved, error = prefetching.saved, prefetching.error
    was_read = saved is not None and saved.num_read > 0
    return {
        "predictor": prefetching.predictor.facts(),
        "failed": None if error is None else f"{type(error).__name__}: {error}",
        "history": ("warm" if was_read else "cold") if prefetching.predictor.is_taught() else None,
        "maps_file": None if saved is None else str(saved.path),
        "maps_read": 0 if saved is None else saved.num_read,
        "maps_failed_writes": 0 if saved is None else saved.num_failed_writes,
        "maps_problem": None if saved is None else saved.problem,
    }


def _as_dict(counters: PhaseCounters) -> dict[str, Any]:
    fields: dict[str, Any] = {
        name.replace("_nbytes", "_bytes") if name.endswith("_nbytes") else name: value
        for name, value in asdict(counters).items()
        if not name.endswith("_ns")
    }
    fields["bytes_loaded"] = fields.pop("loaded_bytes")
    fields |= {
        "stall_s": counters.stall_ns / 1e9,
        "experts_s": counters.expert_ns / 1e9,
        "compute_s": (counters.expert_ns - counters.stall_ns) / 1e9,
    }
    return fields | counters.rates()


def of_device(device: Shard, system: System) -> dict[str, Any]:
    """Memory, counts of all layers by phase, and times of the device, or of a worker, whose `worker` says how it is
    (RemoteShard.facts). They run side by side: their stalls and times add up to more than those of the model.
    """
    scheduler = device.scheduler
    geometry, budget = scheduler.geometry, scheduler.budget
    phases = {phase: PhaseCounters() for phase in Phase}
    for layer in range(geometry.num_layers):
        for phase, total in phases.items():
            total.add(device.layer_counters(layer).of(phase))
    return {
        "device": device.name,
        "experts": geometry.num_experts,
        "memory_bytes": budget.kept_nbytes(geometry) + budget.staging_nbytes(geometry),
        "kept_bytes": budget.kept_nbytes(geometry),
        "ring_bytes": budget.staging_nbytes(geometry),
        "resident_bytes": scheduler.slots.resident_nbytes,
        "bytes_loaded": sum(one.loaded_nbytes for one in phases.values()),
        **moved(device),
        **{phase.value: {name: _as_dict(one)[name] for name in _OF_DEVICE} for phase, one in phases.items()},
        "allocation": system.allocation_facts(scheduler),
        "host_memory": device.device.host_memory,
        "worker": None,
    }


def moved(device: Shard) -> dict[str, int]:
    """The device's own counts, under the names of results: bytes as `bytes_disk`."""
    told = device.device.stats()
    return {
        f"bytes_{name.removesuffix('_nbytes')}" if name.endswith("_nbytes") else name: value
        for name, value in told.items()
    }


def allocation_over(allocations: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The experts that layers keep here and in workers together. Each tells the rest of its allocation itself."""
    told = [one for one in allocations if one is not None]
    if len(told) < 2:
        return told[0] if told else None
    experts = [sum(of_devices) for of_devices in zip(*(one["experts"] for one in told), strict=True)]
    return {"name": told[0]["name"], "experts": experts}
