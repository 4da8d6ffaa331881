"""The engine's transports under a scheduler that loads ahead and whose every answer is checked: every byte computed
with is the expert's own, whatever is guessed, withdrawn, joined or fails.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch

from expertly.core.errors import TransferError
from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.engine import reads
from expertly.engine.cpu import CpuDevice
from expertly.engine.device import Device
from expertly.engine.tiered import CudaDevice
from expertly.policies.eviction.simple import LRU
from expertly.scheduler.budget import split_budget
from expertly.scheduler.loop import Prefetcher, run_layer
from expertly.scheduler.observations import InlineChannel
from expertly.testing.made_up import ListFuture
from tests.engine.disk import Disk
from tests.scheduler.checked import CheckedScheduler
from tests.scheduler.drive import routed
from tests.scheduler.soak import LAYERS, RandomGuesses, nothing_seen, random_router

pytestmark = pytest.mark.timeout(120)

Mark = tuple[str, int]

RUNS = [
    (0.4, "resident", "early"),
    (0.6, "resident", "early"),
    (0.6, "id", "early"),
    (0.5, "resident", "late"),
    (0.6, "id", "late"),
]


class RandomStreams:
    """A copy stream and a compute stream that get on when somebody asks whether they have, if the dice say so."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._chance = dice.choice([0.2, 0.6, 1.0])
        self._queue: list[tuple[torch.Tensor, torch.Tensor, list[Mark]]] = []
        self._made = {"copy": 0, "compute": 0}
        self._done = {"copy": 0, "compute": 0}

    def is_capturing(self) -> bool:
        return False

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: list[Mark]) -> None:
        self._queue.append((target, source, after))
        self._made["copy"] += 1

    def mark_copy(self) -> Mark:
        return "copy", self._made["copy"]

    def mark_compute(self) -> Mark:
        self._made["compute"] += 1
        return "compute", self._made["compute"]

    def has_run(self, mark: Mark) -> bool:
        return mark[1] <= self._done[mark[0]]

    def is_past(self, mark: Mark) -> bool:
        if self._dice.random() < self._chance:
            if mark[0] == "compute":
                self._run_compute(mark[1])
            else:
                self._run_copies(self._done["copy"] + 1)
        return self.has_run(mark)

    def hold_compute(self, mark: Mark) -> None:
        self._run_copies(mark[1])

    def synchronize(self) -> None:
        self._run_copies(self._made["copy"])
        self._run_compute(self._made["compute"])

    def stall_ns(self) -> int:
        return 0

    def register(self, memory: torch.Tensor) -> Callable[[], None]:
        return lambda: None

    def _run_copies(self, until: int) -> None:
        while self._done["copy"] < until and self._queue:
            target, source, after = self._queue.pop(0)
            for mark in after:
                self._run_compute(mark[1])
            target.copy_(source)
            self._done["copy"] += 1

    def _run_compute(self, until: int) -> None:
        self._done["compute"] = max(self._done["compute"], until)


class WatchedBackend(CudaDevice):
    """Notes what a copy finds before it on the stream."""

    _streams: RandomStreams

    def watch(self) -> WatchedBackend:
        self.demands: list[Mark] = []
        self.ahead: list[Mark] = []
        return self

    def _copy(self, transfer: Any, source: Span) -> None:
        streams = self._streams
        before = [mark for mark in self.ahead if not streams.has_run(mark)]
        assert len(before) <= 1, "one segment ahead is on the stream at a time"
        if transfer.is_ahead:
            assert not before and all(map(streams.has_run, self.demands)), "nothing begins beside a demand"
            assert all(map(streams.has_run, self._readers_of(transfer.span))), "it would wait for kernels"
        super()._copy(transfer, source)
        (self.ahead if transfer.is_ahead else self.demands).append(transfer.mark)


def make(kind: str, disk: Any, shape: Geometry, slots: list[int], dice: random.Random) -> Device:
    if kind == "cpu":
        return CpuDevice(disk, shape, slots, torch.bfloat16)
    nbytes = shape.nbytes if kind == "tiered" else int(shape.nbytes * 0.45)
    device, streams = torch.device("cpu"), RandomStreams(dice)
    return WatchedBackend(device, streams, disk, shape, slots, torch.bfloat16, nbytes).watch()


class Counted:
    """An PrefetchTransport that counts what goes through it."""

    def __init__(self, backend: Device) -> None:
        self.submit, self.poll, self.wait = backend.submit, backend.poll, backend.wait
        self._backend = backend
        self.num_ahead = self.num_withdrawn = 0

    def submit_ahead(self, spans: Sequence[Span]) -> None:
        self.num_ahead += len(spans)
        self._backend.submit_ahead(spans)

    def withdraw(self, layer: int, experts: Collection[int] | None = None) -> list[Span]:
        gone = self._backend.withdraw(layer, experts)
        assert all(span.layer == layer and (experts is None or span.expert in experts) for span in gone)
        self.num_withdrawn += len(gone)
        return gone


@pytest.mark.parametrize("failures", [0.0, 0.04])
@pytest.mark.parametrize("ahead", ["cache", "ring"])
@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("kind", ["cpu", "tiered", "tiered with little host memory"])
def test_whatever_is_guessed_every_byte_is_right(
    kind: str, segments: int, ahead: str, failures: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[str] = Counter()
    for share, order, preemption in RUNS:
        seen += soak(kind, segments, ahead, failures, share, order, preemption, monkeypatch)
    assert seen["ahead"] > 50 and seen["withdrawn"] + seen["joined"] > 5
    assert bool(seen["failed"]) == bool(failures)


def soak(
    kind: str,
    segments: int,
    ahead: str,
    failures: float,
    share: float,
    order: str,
    preemption: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Counter[str]:
    seed = f"{share} {order} {preemption}"
    dice, bad_luck = random.Random(seed), random.Random(seed)
    shape = Geometry(LAYERS, segments)
    phases = [dice.choice(["token", "token", "token", "prefill", "mixed"]) for _ in range(20)]
    routers = [random_router(dice, layer, one, phase) for phase in phases for layer, one in enumerate(LAYERS)]
    future = ListFuture(shape, [(router.layer, router.experts) for router in routers])
    budget = split_budget(shape, int(shape.nbytes * share))
    way = {"order": order, "preemption": preemption, "ahead": ahead}
    control = CheckedScheduler(shape, budget, lambda capacity: LRU(), future=future, **way)
    disk = Disk(shape, random.Random(seed))
    disk.fails = lambda layer, expert: bad_luck.random() < failures
    monkeypatch.setattr(reads, "ExpertFile", disk.open)
    backend = make(kind, disk, shape, budget.pool_slots(), dice)
    transport = Counted(backend)
    guesses = RandomGuesses(dice, shape, routers)
    loads = Prefetcher(control, transport, InlineChannel(guesses))
    num_failed = 0

    def compute(spans: Sequence[Span]) -> None:
        for span in spans:
            neurons = shape.neurons_per_segment(span.layer)
            rows = backend.rows(span.layer)[span.slot * neurons : (span.slot + span.num_segments) * neurons]
            assert bytes(rows.contiguous().view(torch.uint8).numpy()) == disk.content(span)
            backend.used(span)

    for step, router in enumerate(routers):
        future.step = guesses.step = step
        try:
            if router.layer == 0:
                loads.begin_iteration(nothing_seen)
            run_layer(control, transport, router, compute, loads, routed(router))
        except TransferError:
            num_failed += 1
            backend.drain()
            control.abandon()
    control.counts_agree()
    if not failures:
        loaded = sum(phase.loaded_nbytes for one in control.counters for phase in (one.decode, one.prefill))
        coming_nbytes = sum(
            mask.bit_count() * shape.segment_nbytes(shape.layer_of_expert(eid))
            for eid, mask in control.slots.prefetching.items()
        )
        moved = backend.stats()
        if kind == "cpu":
            assert moved["disk_nbytes"] == loaded
        else:
            assert loaded - coming_nbytes <= moved["copied_nbytes"] <= loaded
    backend.drain()
    control.abandon()
    assert backend.poll() is None
    assert disk.num_ended == len(disk.begun), "nothing is being read any more"
    if not failures:
        assert backend.stats()["disk_nbytes"] == backend.stats()["buffered_nbytes"], "what was dropped was not read"
    backend.close()
    return Counter(
        ahead=transport.num_ahead,
        withdrawn=transport.num_withdrawn,
        joined=control.happened["joined"],
        failed=num_failed,
    )
