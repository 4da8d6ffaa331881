"""Several devices as one: experts are placed by hash, hidden states go to where they are, what comes back is gathered
(MoE-Infinity, appendix B.2).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from expertly.core.errors import TransferError
from expertly.core.geometry import Geometry
from expertly.core.messages import Phase
from expertly.core.observation import Began, Routed
from expertly.core.placement import Placement, Share
from expertly.engine.compute import Dispatch
from expertly.engine.shard import Shard
from expertly.engine.taps import Taps
from expertly.engine.workers import Workers
from expertly.scheduler.counters import LayerCounters
from expertly.scheduler.observations import Channel


class Handover(Protocol):
    """Orders what the threads of several devices queue. No call makes the host wait. Marks are made and read here."""

    def give(self) -> Any:
        """Behind all that this thread has queued on the first device."""

    def take(self, mark: Any, device: torch.device) -> None:
        """What this thread queues on the first device and on `device` comes after the mark."""

    def keep(self, tensor: torch.Tensor) -> None:
        """What this thread has queued on the first device may read the tensor, which another thread has made there."""


class NoHandover:
    """Where nothing is queued: what has been called has been done."""

    def give(self) -> Any:
        """See Handover."""

    def take(self, mark: Any, device: torch.device) -> None:
        """See Handover."""

    def keep(self, tensor: torch.Tensor) -> None:
        """See Handover."""


class _Ran(NamedTuple):
    """What a device has made of its part of a layer, on the first device and behind `mark`."""

    outputs: torch.Tensor
    mark: Any
    stall_ns: int
    end_ns: int


class DeviceGroup:
    """See Executor. Each device has a thread, which does all that its scheduler and backend are asked for while the
    model runs; a layer ends when all devices have ended theirs, however they did.

    The time a layer waits for transfers is that of the device that ended last.
    """

    def __init__(self, placement: Placement, shards: Sequence[Shard], handover: Handover) -> None:
        self.placement = placement
        self.shards = shards
        self._handover = handover
        self._times = [LayerCounters() for _ in placement.geometry.layers]  # only times are counted here
        self._workers = Workers([f"expertly-device-{number}" for number in range(len(shards))])

    @property
    def geometry(self) -> Geometry:
        return self.placement.geometry

    @property
    def num_late(self) -> int:
        """See Executor."""
        return sum(device.num_late for device in self.shards)

    def bind(self, modules: Sequence[nn.Module]) -> None:
        """See Executor."""
        for device, share in zip(self.shards, self.placement.shares, strict=True):
            device.bind(modules, share.experts)

    def predict_from(self, channel: Channel) -> None:
        """See Executor."""
        taps = Taps(channel, self.placement)
        for device, tap in zip(self.shards, taps.of_devices, strict=True):
            device.predict_from(tap)

    def preload(self, layer: int) -> None:
        """See Executor."""
        self._run([partial(device.preload, layer) for device in self.shards])

    def begin(self) -> None:
        """See Executor. Asked of the streams of the thread that runs the model."""
        for device in self.shards:
            device.begin()

    def begin_iteration(self, began: Callable[[], Began], layers: range | None) -> None:
        """See Executor."""
        self._run([partial(device.begin_iteration, began, layers) for device in self.shards])

    def end_iteration(self, ok: bool) -> None:
        """See Executor."""
        for device in self.shards:
            device.end_iteration(ok)

    def run_layer(
        self, work: Dispatch, hidden: torch.Tensor, routed: Callable[[], Routed] | None
    ) -> tuple[torch.Tensor, int]:
        """See Executor."""
        parts = [part_of(work, share, hidden.device) for share in self.placement.shares]
        mark = self._handover.give()
        ran = self._run(
            [
                partial(self._run_part, device, part, hidden, routed, mark)
                for device, part in zip(self.shards, parts, strict=True)
            ]
        )
        outputs = torch.empty(work.num_rows, hidden.shape[1], dtype=ran[0].outputs.dtype, device=hidden.device)
        if not work.covers_all_rows:
            outputs.zero_()
        for part, one in zip(parts, ran, strict=True):
            self._handover.take(one.mark, hidden.device)
            self._handover.keep(one.outputs)
            outputs.index_copy_(0, part.rows, one.outputs)
        last = max(ran, key=lambda one: one.end_ns)
        return outputs, last.stall_ns

    def note_times(self, layer: int, phase: Phase, stall_ns: int, expert_ns: int) -> None:
        """See Executor. Each device's own are with its own counters."""
        counters = self._times[layer].of(phase)
        counters.stall_ns += stall_ns
        counters.expert_ns += expert_ns

    def layer_counters(self, layer: int) -> LayerCounters:
        """See Executor."""
        total = LayerCounters()
        for phase in Phase:
            one, times = total.of(phase), self._times[layer].of(phase)
            for device in self.shards:
                one.add(device.layer_counters(layer).of(phase))
            one.stall_ns, one.expert_ns = times.stall_ns, times.expert_ns
        return total

    def abandon(self, is_in_doubt: bool) -> None:
        """See Executor. Comes after what the threads are still doing for a pass that was interrupted."""
        self._run([partial(device.abandon, is_in_doubt) for device in self.shards])

    def close(self) -> None:
        """See Executor."""
        self._workers.close()
        for device in self.shards:
            device.close()

    def _run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one call on each device's thread; raise what failed first, when all have ended."""
        results, failure = self._workers.run(calls)
        if failure is None:
            return results
        if isinstance(failure.error, TransferError | OSError):
            raise TransferError(f"{self.shards[failure.thread].name}: {failure.error}") from failure.error
        raise failure.error

    def _run_part(
        self, device: Shard, part: Part, hidden: torch.Tensor, routed: Callable[[], Routed] | None, mark: Any
    ) -> _Ran:
        """In the device's thread: what it has to do of a layer."""
        start = time.perf_counter_ns()
        target, router = device.device.torch_device, part.work.router
        self._handover.take(mark, target)
        work = part.to(target)
        outputs, stall_ns = device.run_layer(work, hidden.to(target, non_blocking=True), routed)
        outputs = outputs.to(hidden.device, non_blocking=True)
        end = time.perf_counter_ns()
        phase = Phase.DECODE if router.serves_decode else Phase.PREFILL
        device.note_times(router.layer, phase, stall_ns, end - start)
        return _Ran(outputs, self._handover.give(), stall_ns, end)


@dataclass(slots=True)
class Part:
    """What one device has to do of a layer: its outputs have only its own rows, side by side."""

    work: Dispatch
    rows: torch.Tensor  # [n] where they go in the outputs of the layer

    def to(self, device: torch.device) -> Dispatch:
        """With its rows on the device that reads them; the host does not wait."""
        if self.work.places is None:
            return self.work
        rows = self.rows.to(device, non_blocking=True)
        return replace(self.work, rows={expert: rows[place] for expert, place in self.work.places.items()})


def part_of(work: Dispatch, share: Share, device: torch.device) -> Part:
    """The part of the experts of `share`, with their numbers there; `device` is where the outputs are gathered."""
    router = share.router(work.router)
    held = share.experts[router.layer]
    if work.positions is not None:
        where = [work.positions[held[number]] for number in router.experts]
        positions = {number: i for i, number in enumerate(router.experts)}
        part = Dispatch(router, work.top_k, len(where), True, None, positions)
        return Part(part, torch.tensor(where, dtype=torch.int64, device=device))
    assert work.rows is not None
    rows = [work.rows[held[number]] for number in router.experts]
    places, end = {}, 0
    for number, some in zip(router.experts, rows, strict=True):
        places[number] = slice(end, end + len(some))
        end += len(some)
    every = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64, device=device)
    return Part(Dispatch(router, work.top_k, end, True, {}, None, places), every)
