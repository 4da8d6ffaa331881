"""From what a user states to what computes experts: how memory is divided over devices, and what stands behind each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from expertly.core.errors import BudgetError
from expertly.core.geometry import Geometry
from expertly.core.placement import Placement, Share
from expertly.core.resources import parse_memory
from expertly.engine.backends import available_nbytes
from expertly.engine.device import Device
from expertly.engine.device_group import DeviceGroup, Handover, NoHandover
from expertly.engine.memory import WORKING_NBYTES, AutoBudget, available_host_nbytes, choose_budget
from expertly.engine.reads import ExtentSource
from expertly.engine.shard import Shard
from expertly.scheduler.budget import Budget, least_nbytes, split_budget
from expertly.scheduler.scheduler import Scheduler
from expertly.store.frames import FrameIndex

MakeBackend = Callable[[torch.device, ExtentSource, Geometry, list[int], torch.dtype, "str | int"], Device]


class StoreOfShare:
    """The experts of one device, in the files of the whole store. See ExtentSource."""

    def __init__(self, store: ExtentSource, share: Share) -> None:
        self._store = store
        self._share = share

    def layer_extent(self, layer: int) -> tuple[Path, int]:
        """The model's."""
        return self._store.layer_extent(layer)

    def expert_in_file(self, layer: int, expert: int) -> int:
        """By its number in the model."""
        return self._store.expert_in_file(layer, self._share.experts[layer][expert])

    def frame_index(self, layer: int) -> FrameIndex | None:
        """The model's."""
        return self._store.frame_index(layer)


def shares_of(nbytes: int, geometries: Sequence[Geometry]) -> list[int]:
    """An amount divided over devices in proportion to their experts; of what is left over nobody has anything."""
    total = sum(one.nbytes for one in geometries)
    return [nbytes * one.nbytes // total for one in geometries]


def split_over(geometries: Sequence[Geometry], amounts: Sequence[int], ring: int | None) -> list[Budget]:
    """The slots of each device from its amount; `ring`: those of each. Raises BudgetError naming the least that all
    need together.
    """
    if len(geometries) == 1:
        return [split_budget(geometries[0], amounts[0], ring)]
    least = [least_nbytes(one, ring) if ring is None or ring > 0 else 0 for one in geometries]
    if any(amount < need for amount, need in zip(amounts, least, strict=True)):
        total = sum(one.nbytes for one in geometries)
        enough = max(-(-need * total // one.nbytes) for need, one in zip(least, geometries, strict=True))
        raise BudgetError(
            f"memory={sum(amounts)} bytes over {len(geometries)} devices: below the rings through which each streams "
            f"its experts; the least that works is {enough} bytes"
        )
    return [split_budget(one, amount, ring) for one, amount in zip(geometries, amounts, strict=True)]


def choose_amounts(
    targets: Sequence[torch.device],
    geometries: Sequence[Geometry],
    dense_nbytes: int,
    cache_nbytes: int,
    context: int,
    working_nbytes: int = WORKING_NBYTES,
) -> tuple[list[int], str]:
    """What each device can give, and why: of the memory that is free, which logical devices share, the first one's
    after the dense part and the KV cache. `working_nbytes`: what a forward pass takes beside these.
    """
    amounts = [0] * len(targets)
    reasons = []
    owners = ["cpu" if target.type == "cpu" else str(target) for target in targets]
    for owner in dict.fromkeys(owners):
        here = [number for number, one in enumerate(owners) if one == owner]
        expert_nbytes = sum(geometries[number].nbytes for number in here)
        dense, cache = (dense_nbytes, cache_nbytes) if 0 in here else (0, 0)
        chosen: AutoBudget = choose_budget(
            available_nbytes(targets[here[0]]), expert_nbytes, dense, cache, context if 0 in here else 0, working_nbytes
        )
        for number, amount in zip(here, shares_of(chosen.nbytes, [geometries[i] for i in here]), strict=True):
            amounts[number] = amount
        reasons.append(chosen.reason)
    if len(targets) == 1:
        return amounts, reasons[0]
    whys = [reason.removeprefix("memory auto: ") for reason in reasons]
    told = [f"{owner}: {why}" for owner, why in zip(dict.fromkeys(owners), whys, strict=True)]
    return amounts, f"memory auto over {len(targets)} devices: {'; '.join(told)}"


def make_group(
    placement: Placement,
    targets: Sequence[torch.device],
    schedulers: Sequence[Scheduler],
    store: ExtentSource,
    dtype: torch.dtype,
    host_memory: str | int,
    make_backend: MakeBackend,
) -> DeviceGroup:
    """Several devices as one. `host_memory`: of all accelerators together."""
    amounts: Sequence[str | int] = [host_memory] * len(targets)
    if targets[0].type == "cuda":
        nbytes = parse_memory(host_memory, placement.geometry.nbytes)
        if nbytes is None:
            nbytes = max(0, min(placement.geometry.nbytes, available_host_nbytes() - WORKING_NBYTES))
        amounts = shares_of(nbytes, [share.geometry for share in placement.shares])
    devices: list[Shard] = []
    try:
        for target, share, scheduler, amount in zip(targets, placement.shares, schedulers, amounts, strict=True):
            slots = scheduler.budget.pool_slots()
            backend = make_backend(target, StoreOfShare(store, share), share.geometry, slots, dtype, amount)
            devices.append(Shard(str(target), scheduler, backend))
        return DeviceGroup(placement, devices, _handover(targets[0]))
    except BaseException:
        for device in devices:
            device.close()
        raise


def _handover(home: torch.device) -> Handover:
    if home.type != "cuda":
        return NoHandover()
    from expertly.engine.cuda import CudaHandover

    return CudaHandover(home)
