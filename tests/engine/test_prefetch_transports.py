"""The engine's transports under a scheduler that prefetches and whose every answer is checked: every byte computed with
is the expert's own, whatever is predicted, cancelled, joined or fails.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from expertly.core.errors import TransferError
from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.core.observation import Routed
from expertly.engine import cuda
from expertly.engine.cpu import CpuDevice
from expertly.engine.cuda import CudaDevice
from expertly.engine.device import Device
from expertly.policies.lru import LRU
from expertly.scheduler.budget import split_budget
from expertly.scheduler.cache import LOADING, PREFETCHING
from expertly.scheduler.loop import Prefetcher, run_layer
from expertly.scheduler.tier import Tier
from tests.engine import streams
from tests.engine.disk import Disk
from tests.engine.streams import Accelerator, Link, Mark, RandomStreams
from tests.scheduler.checked import CheckedScheduler
from tests.scheduler.soak import LAYERS, RandomPredictor, nothing_seen, random_routers

pytestmark = pytest.mark.timeout(120)

SHARES = (0.4, 0.6, 0.8)


class WatchedDevice(CudaDevice):
    """Asserts what a copy finds before it on the stream."""

    streams: RandomStreams

    def watch(self, most: int) -> WatchedDevice:
        """`most`: prefetched segments on the stream at a time."""
        self.most = most
        self.loads: list[Mark] = []
        self.prefetches: list[Mark] = []
        return self

    def _copy(self, transfer: Any, source: Span) -> None:
        has_run = self.streams.has_run
        num_before = sum(not has_run(mark) for mark in self.prefetches)
        assert num_before <= self.most, "so many prefetched segments are on the stream at a time"
        if transfer.is_prefetch:
            assert num_before < self.most and all(map(has_run, self.loads)), "nothing begins beside a load"
            assert all(map(has_run, self._uses_of(transfer.span))), "it would wait for kernels"
        super()._copy(transfer, source)
        (self.prefetches if transfer.is_prefetch else self.loads).append(transfer.mark)


def make(kind: str, disk: Any, shape: Geometry, slots: list[int], dice: random.Random) -> Device:
    if kind == "cpu":
        return CpuDevice(disk, shape, slots, torch.bfloat16)
    tier = Tier(shape, int(shape.nbytes * 0.45) if "little" in kind else shape.nbytes)
    device = torch.device("cpu")
    if kind.startswith("accelerator"):
        link = Link(dice.choice([1e8, 1e9, 1e10]), dice.choice([0, 2000]))
        times = {name: dice.choice([0, 300, 20_000]) for name in ("kernel_ns", "host_ns", "wake_ns")}
        return streams.WatchedDevice(device, Accelerator(link, **times), disk, shape, slots, torch.bfloat16, tier)
    if kind.startswith("threads"):
        made = streams.ThreadStreams(dice.choice([0, 1e-4]))
        return CudaDevice(device, made, disk, shape, slots, torch.bfloat16, tier)
    most = -(-cuda.AHEAD_NBYTES // min(shape.unit_nbytes[layer] for layer in range(shape.num_layers)))
    return WatchedDevice(device, RandomStreams(dice), disk, shape, slots, torch.bfloat16, tier).watch(most)


class Counted:
    """A Transport that counts what goes through it."""

    def __init__(self, device: Device, happened: Counter[str]) -> None:
        self.submit, self.poll, self.wait = device.submit, device.poll, device.wait
        self._device, self._happened = device, happened

    def prefetch(self, spans: Sequence[Span]) -> None:
        self._happened["prefetched"] += len(spans)
        self._device.prefetch(spans)

    def cancel(self, layer: int) -> list[Span]:
        cancelled = self._device.cancel(layer)
        assert all(span.layer == layer for span in cancelled)
        self._happened["cancelled"] += len(cancelled)
        return cancelled


WAYS = [(1, "cache", 0.0), (4, "staging", 0.0), (1, "staging", 0.04), (4, "cache", 0.04)]
LITTLE = ", little host memory"
KINDS = ["accelerator", f"accelerator{LITTLE}", "threads", f"threads{LITTLE}", f"cuda{LITTLE}"]


@pytest.mark.parametrize(
    ("kind", "segments", "ahead", "failures"),
    [
        *((kind, *way) for kind in ("cpu", "cuda") for way in WAYS),
        *((kind, *WAYS[(i + j) % 4]) for i, kind in enumerate(KINDS) for j in (0, 2)),  # one with failures
    ],
)
def test_whatever_is_predicted_every_byte_is_right(
    kind: str, segments: int, ahead: str, failures: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: Counter[str] = Counter()
    for share in SHARES:
        happened += soak(kind, segments, share, failures, ahead, monkeypatch)
    assert happened["prefetched"] > 50
    assert happened["cancelled"] > 5 or kind == "cpu", "there, prefetches go on by themselves"
    assert bool(happened["failed"]) == bool(failures)


def soak(
    kind: str, segments: int, share: float, failures: float, ahead: str, monkeypatch: pytest.MonkeyPatch
) -> Counter[str]:
    seed = f"{share}"
    dice, bad_luck, happened = random.Random(seed), random.Random(seed), Counter[str]()
    shape = Geometry(LAYERS, segments)
    routers = random_routers(dice, 20)
    budget = split_budget(shape, int(shape.nbytes * share))
    control = CheckedScheduler(shape, budget, lambda capacity, layers: LRU(), ahead=ahead)
    disk = Disk(shape, random.Random(seed))
    disk.fails = lambda layer, expert: bad_luck.random() < failures
    disk.put(monkeypatch)
    monkeypatch.setattr(cuda, "AHEAD_NBYTES", dice.choice([1, 2 * shape.unit_nbytes[0]]))
    device = make(kind, disk, shape, budget.pool_slots(), dice)
    transport, predictor = Counted(device, happened), RandomPredictor(dice, shape, routers)
    prefetcher = Prefetcher(control, transport, predictor)

    def compute(spans: Sequence[Span]) -> None:
        for span in spans:
            neurons = shape.blocks_per_segment(span.layer)
            rows = device.rows(span.layer)[span.slot * neurons : (span.slot + span.num_segments) * neurons]
            assert bytes(rows.contiguous().view(torch.uint8).numpy()) == disk.content(span)
        device.used(spans)

    for step, router in enumerate(routers):
        predictor.step = step
        try:
            if router.layer == 0:
                prefetcher.begin_iteration(nothing_seen)
            run_layer(control, transport, router, compute, prefetcher, partial(Routed, router))
        except TransferError:
            happened["failed"] += 1
            device.drain()
            control.abandon()
        control.check()
    control.counts_agree()
    if not failures:
        loaded = sum(phase.loaded_nbytes for counter in control.counters for phase in (counter.decode, counter.prefill))
        moved = device.stats()
        if kind == "cpu":
            assert moved["disk_nbytes"] == loaded
        else:
            assert loaded - in_flight_nbytes(control) <= moved["copied_nbytes"] <= loaded
    device.drain()
    control.abandon()
    assert device.poll() is None
    assert disk.num_ended == len(disk.begun), "nothing is being read any more"
    if not failures:
        assert device.stats()["disk_nbytes"] == disk.read_nbytes, "what was dropped was not read"
    device.close()
    return happened


def in_flight_nbytes(control: CheckedScheduler) -> int:
    shape = control.geometry
    coming = [unit for unit, state in enumerate(control.cache.state) if state in (LOADING, PREFETCHING)]
    return sum(shape.unit_nbytes[shape.layer_of[unit // shape.segments_per_expert]] for unit in coming)
