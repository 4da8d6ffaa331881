"""What is loaded ahead beside demands, story by story, on a disk and streams that get on when they are told to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from expertly.core.errors import TransferError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Span
from expertly.engine import reads
from expertly.engine.reads import MIN_READ_NBYTES
from expertly.engine.tiered import CudaDevice
from tests.engine.disk import Disk

pytestmark = pytest.mark.timeout(60)

NUM_EXPERTS = 8


class Mark(NamedTuple):
    is_copy: bool
    number: int


class ManualStreams:
    """Copies run when they are let through or waited for; kernels are over when it is said."""

    def __init__(self) -> None:
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_copies = self.num_copied = 0
        self.num_kernels = self.num_over = 0

    def is_capturing(self) -> bool:
        return False

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: list[Any]) -> None:
        self.queue.append((target, source))
        self.num_copies += 1

    def mark_copy(self) -> Mark:
        return Mark(True, self.num_copies)

    def mark_compute(self) -> Mark:
        self.num_kernels += 1
        return Mark(False, self.num_kernels)

    def is_past(self, mark: Mark) -> bool:
        return mark.number <= (self.num_copied if mark.is_copy else self.num_over)

    def hold_compute(self, mark: Mark) -> None:
        self.let(mark.number - self.num_copied)

    def let(self, count: int) -> None:
        """So many copies run."""
        for _ in range(count):
            target, source = self.queue.pop(0)
            target.copy_(source)
            self.num_copied += 1

    def synchronize(self) -> None:
        self.let(len(self.queue))
        self.num_over = self.num_kernels

    def stall_ns(self) -> int:
        return 0

    def register(self, memory: torch.Tensor) -> Callable[[], None]:
        return lambda: None


class Bench:
    """A backend of 3 layers of 8 experts, one segment each, whose host tier has room for `num_host` of all of them."""

    def __init__(self, num_host: int, monkeypatch: pytest.MonkeyPatch) -> None:
        nbytes = 4 * MIN_READ_NBYTES  # one span ahead occupies all readers
        layer = LayerGeometry(NUM_EXPERTS, 1, 2048, nbytes // 4096, 2, 1)
        shape = Geometry((layer,) * 3)
        self.disk, self.streams = Disk(shape), ManualStreams()
        monkeypatch.setattr(reads, "ExpertFile", self.disk.open)
        self.device = CudaDevice(
            torch.device("cpu"), self.streams, self.disk, shape, [32], torch.uint8, num_host * nbytes
        )
        self.readers = self.device.tier.readers

    def arrived(self, count: int) -> None:
        """Wait until the readers have handed over so many more spans, and let the backend see them."""
        while count:
            self.device._read(self.readers.wait())
            count -= 1
        self.device._begin_ahead()

    def in_host(self, spans: Sequence[Span]) -> None:
        """Bring these into the host tier, and to the device."""
        self.disk.let_all_end()
        self.device.submit(spans)
        for _ in spans:
            self.check(self.device.wait())
        self.disk.hold()
        self.disk.begun.clear()

    def check(self, span: Span | None) -> Span:
        assert span is not None
        rows = self.device.rows(span.layer)
        neurons = self.disk.geometry.neurons_per_segment(span.layer)
        assert bytes(rows[span.slot * neurons : (span.slot + 1) * neurons].numpy()) == self.disk.content(span)
        return span


MakeBench = Callable[[int], Bench]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeBench]:
    made: list[Bench] = []

    def make(num_host: int) -> Bench:
        made.append(Bench(num_host, monkeypatch))
        return made[-1]

    yield make
    for bench in made:
        bench.disk.let_all_end()
        bench.device.drain()
        bench.device.close()


def span(expert: int, layer: int = 0, slot: int | None = None) -> Span:
    return Span(layer, expert, 0, 1, layer * NUM_EXPERTS + expert if slot is None else slot)


def again(expert: int, layer: int = 0) -> Span:
    """The same expert into another slot."""
    return span(expert, layer, 24 + expert)


def test_one_copy_ahead_is_on_the_stream_and_none_beside_a_demand(make: MakeBench) -> None:
    bench = make(24)
    backend, streams = bench.device, bench.streams
    bench.in_host([span(i) for i in range(5)])
    backend.submit_ahead([again(0), again(1), again(2)])
    assert len(streams.queue) == 1 and backend.poll() is None
    backend.submit([again(3)])
    assert len(streams.queue) == 2, "the demand is right behind it"
    streams.let(1)
    assert bench.check(backend.poll()) == again(0)
    assert len(streams.queue) == 1, "frozen while the demand moves"
    streams.let(1)
    assert bench.check(backend.poll()) == again(3)
    assert len(streams.queue) == 1 and backend.poll() is None, "it goes on"
    streams.let(1)
    assert bench.check(backend.poll()) == again(1)
    streams.let(1)
    assert bench.check(backend.poll()) == again(2)
    assert not streams.queue and backend.poll() is None
    assert backend.stats()["host_hit_nbytes"] == 4 * 4 * MIN_READ_NBYTES


def test_a_demand_that_the_stream_waits_for_is_still_moving(make: MakeBench) -> None:
    """`wait` hands a span out when its copy is queued; what is ahead waits until it has been made."""
    bench = make(24)
    bench.in_host([span(i) for i in range(4)])
    hold = bench.streams.hold_compute
    bench.streams.hold_compute = lambda mark: None  # type: ignore[method-assign]
    bench.device.submit([again(0)])
    bench.device.submit_ahead([again(1)])
    assert bench.device.wait() == again(0)
    assert bench.device.poll() is None and len(bench.streams.queue) == 1
    bench.streams.hold_compute = hold  # type: ignore[method-assign]
    bench.streams.let(1)
    assert bench.device.poll() is None and len(bench.streams.queue) == 1
    bench.streams.let(1)
    assert bench.check(bench.device.poll()) == again(1)


def test_a_copy_ahead_does_not_make_the_stream_wait_for_kernels(make: MakeBench) -> None:
    bench = make(24)
    bench.in_host([span(0), span(1)])
    bench.device.used(span(1))
    target = span(0, slot=span(1).slot)
    bench.device.submit_ahead([target])
    assert not bench.streams.queue, "a kernel reads the slot"
    bench.device.submit([again(0)])
    assert bench.check(bench.device.wait()) == again(0), "a demand does not wait for that kernel"
    bench.streams.num_over = bench.streams.num_kernels
    assert bench.device.poll() is None and len(bench.streams.queue) == 1
    bench.streams.let(1)
    assert bench.check(bench.device.poll()) == target


def test_what_is_neither_read_nor_copied_is_withdrawn_wherever_it_waits(make: MakeBench) -> None:
    bench = make(24)
    backend, disk, streams = bench.device, bench.disk, bench.streams
    bench.in_host([span(0), span(1)])
    backend.submit_ahead([again(0), again(1), span(2), span(3), span(4, layer=1)])
    assert len(streams.queue) == 1
    disk.until_begun(4)  # 2 is being read, 3 is not
    assert backend.withdraw(0) == [again(1), span(3)]
    backend.submit([span(3)])  # the layer needs it, and waits for 0 and 2, too
    assert bench.check(backend.wait()) == again(0)
    disk.let_all_end()
    assert {bench.check(backend.wait()) for _ in range(2)} == {span(2), span(3)}
    bench.arrived(1)
    streams.let(1)
    assert bench.check(backend.poll()) == span(4, layer=1)
    assert disk.begun == [(0, 2)] * 4 + [(0, 3)] * 4 + [(1, 4)] * 4
    backend.tier.check()
    moved = backend.stats()
    assert moved["disk_nbytes"] + moved["host_hit_nbytes"] == moved["copied_nbytes"]


def test_the_spans_of_one_expert_are_withdrawn_alone_wherever_they_wait(make: MakeBench) -> None:
    bench = make(24)
    backend, disk, streams = bench.device, bench.disk, bench.streams
    bench.in_host([span(0), span(1)])
    backend.submit_ahead([again(0), again(1), span(2), span(3), span(4)])
    disk.until_begun(4)  # 0 is on the stream, 1 in the host tier, 2 being read, 3 and 4 are not
    assert backend.withdraw(0, [1, 2, 4]) == [again(1), span(4)]
    disk.let_all_end()
    assert bench.check(backend.wait()) == span(2), "it is a demand now, and goes before the others"
    bench.arrived(1)
    streams.let(len(streams.queue))
    assert bench.check(backend.poll()) == again(0)
    streams.let(len(streams.queue))
    assert bench.check(backend.poll()) == span(3)
    assert backend.poll() is None and not streams.queue
    backend.tier.check()


def test_a_begun_read_of_the_running_layer_is_copied_as_a_demand_is(make: MakeBench) -> None:
    bench = make(24)
    backend, disk = bench.device, bench.disk
    bench.in_host([span(0)])
    backend.submit_ahead([span(2)])
    disk.until_begun(4)
    assert backend.withdraw(0) == []
    bench.streams.hold_compute = lambda mark: None  # type: ignore[method-assign]
    backend.submit([again(0)])  # is on the stream, and stays there
    assert backend.wait() == again(0)
    disk.let_all_end()
    bench.arrived(1)
    assert len(bench.streams.queue) == 2, "its copy is queued though a demand moves"
    assert backend.wait() == span(2)


def test_a_demand_takes_the_host_tier_s_room_from_what_is_not_begun(make: MakeBench) -> None:
    bench = make(3)
    backend, disk = bench.device, bench.disk
    guesses = [span(i, layer=1) for i in range(3)]
    backend.submit_ahead(guesses)
    disk.until_begun(4)
    backend.submit([span(0), span(1), span(2)])
    disk.let_end(*[(1, 0)] * 4)
    assert disk.until_begun(8)[4:] == [(0, 0)] * 4
    disk.let_all_end()
    seen = [bench.check(backend.wait()) for _ in range(3)]
    assert {one.layer for one in seen} == {0}, "demands first"
    for _ in range(2000):
        bench.streams.synchronize()
        if (arrived := backend.poll()) is not None:
            seen.append(bench.check(arrived))
        elif backend._waiting:
            bench.arrived(1)
    assert sorted(seen) == sorted([*guesses, span(0), span(1), span(2)]), "and the guesses come all the same"
    backend.tier.check()


def test_what_a_demand_evicts_from_the_host_before_it_is_copied_is_read_again(make: MakeBench) -> None:
    bench = make(3)
    backend, streams = bench.device, bench.streams
    bench.in_host([span(0), span(1), span(2)])
    streams.num_copies += 1  # something occupies the stream
    backend._demand_mark = streams.mark_copy()
    backend.submit_ahead([again(0)])
    assert not streams.queue
    streams.num_copies -= 1
    bench.disk.let_all_end()
    backend.submit([span(i, layer=1) for i in range(3)])
    for i in range(3):
        assert bench.check(backend.wait()) == span(i, layer=1)
    seen = None
    for _ in range(1000):
        streams.synchronize()
        if backend._waiting:
            bench.arrived(1)
        seen = seen or backend.poll()
    assert bench.check(seen) == again(0)
    assert bench.disk.begun.count((0, 0)) == 4, "in four parts"
    backend.tier.check()


def test_guesses_evict_neither_each_other_from_the_host_nor_what_is_being_copied(make: MakeBench) -> None:
    bench = make(3)
    backend, streams = bench.device, bench.streams
    bench.in_host([span(0), span(1), span(2)])
    backend.submit_ahead([again(0), again(1), again(2), span(5), span(6)])
    assert len(streams.queue) == 1, "one is copied, two wait for the stream, two for room: nothing waits for the device"
    assert all(backend.tier.find(again(i)) for i in range(3)) and not bench.disk.begun
    bench.disk.let_all_end()
    assert {bench.check(backend.wait()) for _ in range(5)} == {again(0), again(1), again(2), span(5), span(6)}
    backend.tier.check()


def test_waiting_ends_when_only_guesses_are_in_flight(make: MakeBench) -> None:
    bench = make(24)
    bench.in_host([span(0), span(1)])
    bench.device.submit_ahead([again(0), again(1), span(2), span(3)])
    bench.disk.let_all_end()
    seen = {bench.check(bench.device.wait()) for _ in range(4)}
    assert seen == {again(0), again(1), span(2), span(3)}


def test_a_failed_read_ahead_is_raised_and_drain_forgets_the_rest(make: MakeBench) -> None:
    bench = make(24)
    backend = bench.device
    bench.in_host([span(0), span(1)])
    bench.disk.let_all_end()
    bench.disk.fails = lambda layer, expert: expert == 5
    backend.submit_ahead([again(0), again(1), span(5), span(6)])
    with pytest.raises(TransferError, match="expert 5"):
        for _ in range(4):
            backend.wait()
    backend.drain()
    assert backend.poll() is None and not bench.streams.queue and backend.withdraw(0) == []
    backend.tier.check()
    bench.disk.fails = lambda layer, expert: False
    backend.submit([span(5)])
    assert bench.check(backend.wait()) == span(5)
