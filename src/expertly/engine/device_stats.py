"""What each device has done so far, and what of it is told as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from expertly.core.messages import Phase
from expertly.engine.shard import Shard
from expertly.scheduler.counters import PhaseCounters
from expertly.scheduler.system import System


def of_device(device: Shard, system: System) -> dict[str, Any]:
    """Its memory, its counts over all layers by phase, and its own time; `resident_bytes` are those that are there.

    Devices run side by side: their stalls and times add up to more than those of the model.
    """
    scheduler = device.scheduler
    geometry, budget = scheduler.geometry, scheduler.budget
    phases = {phase: PhaseCounters() for phase in Phase}
    for layer in range(geometry.num_layers):
        for phase, total in phases.items():
            total.add(device.layer_counters(layer).of(phase))
    resident = sum(
        mask.bit_count() * geometry.segment_nbytes(geometry.layer_of_expert(eid))
        for eid, mask in enumerate(scheduler.slots.resident)
    )
    node = device.device.node
    return {
        "device": device.name,
        "experts": geometry.num_experts,
        "memory_bytes": budget.kept_nbytes(geometry) + budget.ring_nbytes(geometry),
        "kept_bytes": budget.kept_nbytes(geometry),
        "ring_bytes": budget.ring_nbytes(geometry),
        "resident_bytes": resident,
        "bytes_loaded": sum(one.loaded_nbytes for one in phases.values()),
        **moved(device),
        **{phase.value: _of_phase(one) for phase, one in phases.items()},
        "predictions_late": device.num_late,
        "allocation": system.sharing(scheduler),
        "gate": None if scheduler.filter is None else scheduler.filter.facts(),
        "numa": None if node is None else node.facts(),
    }


def moved(device: Shard) -> dict[str, float]:
    """What its backend counts, as it is told: `bytes_disk`, and times in seconds, `decode_s`."""
    told: dict[str, float] = {}
    for name, value in device.device.stats().items():
        if name.endswith("_ns"):
            told[f"{name.removesuffix('_ns')}_s"] = value / 1e9
        else:
            told[f"bytes_{name.removesuffix('_nbytes')}"] = value
    return told


def allocation_over(allocations: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """What the layers keep on all devices together; what each one's allocation says of itself is with the device."""
    told = [one for one in allocations if one is not None]
    if len(told) < 2:
        return told[0] if told else None
    experts = [sum(of_devices) for of_devices in zip(*(one["experts"] for one in told), strict=True)]
    return {"name": told[0]["name"], "experts": experts}


def _of_phase(counters: PhaseCounters) -> dict[str, Any]:
    return {
        **{name: getattr(counters, name) for name in ("hits", "partial_hits", "misses", "predicted", "prefetched")},
        "hit_rate": counters.rates()["hit_rate"],
        "bytes_loaded": counters.loaded_nbytes,
        "stall_s": counters.stall_ns / 1e9,
        "experts_s": counters.expert_ns / 1e9,
    }
