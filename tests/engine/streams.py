"""Streams of an accelerator that is not there. Its device is RAM; its copies run on a clock, or when a test says so."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

import pytest
import torch

from expertly.core.messages import Span
from expertly.engine import cpu
from expertly.engine.cuda import CopyThread, CudaDevice
from expertly.scheduler.tier import Tier

POISON = 0xFF
"""Each byte of a slot that a copy goes to, until it has come: NaN in every format."""


# -- a clock -----------------------------------------------------------------------------------------------------------


class Moment(NamedTuple):
    """A mark: behind so many copies, or behind kernels that have run by then."""

    at_ns: int
    num_copies: int


class Copied(NamedTuple):
    begin_ns: int
    end_ns: int
    nbytes: int


class Link(NamedTuple):
    nbytes_per_s: float
    latency_ns: int  # before a copy moves


class LateValues:
    """What leaves the device: garbage until its mark is reached. Nothing is captured, and all memory can be pinned."""

    mark_compute: Callable[[], Any]

    def is_capturing(self) -> bool:
        return False

    def register(self, memory: torch.Tensor) -> Callable[[], None]:
        return lambda: None

    def to_host_later(self, values: torch.Tensor) -> tuple[torch.Tensor, Any]:
        values = values.as_subclass(torch.Tensor)
        present = torch.empty_like(values)
        present.view(torch.uint8).fill_(POISON)
        return present, (self.mark_compute(), present, values.clone())

    def reach(self, mark: Any) -> None:
        _, present, values = mark
        present.copy_(values)


class Accelerator(LateValues):
    """CudaStreams on a virtual clock.

    `now_ns` is the time of the host, which runs ahead of its kernels; a copy occupies the link for as long as `link`
    says, and begins behind the marks that it waits for. What a copy brings is in its slot when the copy's mark has been
    waited for, or seen to be past: until then there is garbage, as on a device whose kernels come too early. A copy
    that begins while a kernel reads what it overwrites fails. The copy thread runs `wake_ns` after what it waits for,
    at that time of the clock, whatever the host does.
    """

    def __init__(self, link: Link, kernel_ns: int = 0, host_ns: int = 0, wake_ns: int = 0) -> None:
        """`kernel_ns`: of what was queued before each mark of the compute stream; `host_ns`: of queueing that, or a
        copy.
        """
        self.now_ns = 0
        self.compute_free_ns = 0
        self.num_synchronised = 0
        self.copied: list[Copied] = []
        self._link, self._kernel_ns, self._host_ns, self._wake_ns = link, kernel_ns, host_ns, wake_ns
        self._link_free_ns = 0
        self._at_ns: int | None = None  # the time in the copy thread, while that runs
        self._coming: deque[tuple[torch.Tensor, torch.Tensor]] = deque()  # copies whose bytes nobody may rely on
        self._num_copies = self._num_come = 0
        self._reads: list[tuple[int, int, int]] = []  # (first byte, behind the last, when) of kernels
        self._events: list[tuple[int, int]] = []  # when the copy thread runs
        self._ended: Callable[[], None] = lambda: None

    # -- the clock -----------------------------------------------------------------------------------------------------

    def sleep(self, duration_ns: int) -> None:
        """The forward thread does nothing for so long."""
        self._run_until(self.now_ns + duration_ns)

    def kernel(self, duration_ns: int) -> None:
        """Queue what takes so long."""
        self.compute_free_ns = max(self.compute_free_ns, self.now_ns) + duration_ns

    def join(self) -> None:
        """The forward thread waits for all that it has queued."""
        self._run_until(max(self.now_ns, self.compute_free_ns))

    def reads(self, memory: torch.Tensor) -> None:
        """The kernels queued so far read this last."""
        begin = memory.data_ptr()
        self._reads = [read for read in self._reads if read[2] > self.now_ns]
        self._reads.append((begin, begin + memory.nbytes, self.compute_free_ns))

    def busy_ns(self, begin_ns: int, end_ns: int) -> int:
        """Time within these that the link moved something."""
        return sum(max(0, min(each.end_ns, end_ns) - max(each.begin_ns, begin_ns)) for each in self.copied)

    def _run_until(self, then_ns: int) -> None:
        while self._events and self._events[0][0] <= then_ns:
            self._at_ns, _ = heappop(self._events)
            self.now_ns = max(self.now_ns, self._at_ns)
            self._ended()
        self._at_ns = None
        self.now_ns = max(self.now_ns, then_ns)

    def _here_ns(self) -> int:
        return self.now_ns if self._at_ns is None else self._at_ns

    def _come(self, num_copies: int) -> None:
        """The bytes of so many copies are where they should be."""
        while self._num_come < num_copies:
            target, source = self._coming.popleft()
            target.copy_(source)
            self._num_come += 1

    def _at(self, then_ns: int) -> None:
        heappush(self._events, (then_ns + self._wake_ns, len(self._events)))

    # -- CudaStreams ---------------------------------------------------------------------------------------------------

    def watch(self, ended: Callable[[], None]) -> None:
        self._ended = ended

    def wake(self) -> None:
        """Whoever waits looks for reads by itself."""

    def notice(self, mark: Moment) -> None:
        self._at(mark.at_ns)

    def block(self, changed: threading.Condition) -> None:
        if self._events:
            self._run_until(max(self.now_ns, self._events[0][0]))
        else:
            changed.wait(0.001)  # for a reader

    def close(self) -> None:
        self._ended = lambda: None

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: list[Moment]) -> Moment:
        earliest = self._here_ns() + self._link.latency_ns
        begin = max([earliest, self._link_free_ns, *(mark.at_ns for mark in after)])
        first, last = target.data_ptr(), target.data_ptr() + target.nbytes
        assert not any(each < last and first < behind and then > begin for each, behind, then in self._reads), (
            "a copy overwrites what kernels still read"
        )
        self._link_free_ns = end = begin + round(target.nbytes / self._link.nbytes_per_s * 1e9)
        self.copied.append(Copied(begin, end, target.nbytes))
        target.view(torch.uint8).fill_(POISON)
        self._coming.append((target, source))
        self._num_copies += 1
        self._at(end)
        if self._at_ns is None:
            self.now_ns += self._host_ns
        return Moment(end, self._num_copies)

    def mark_compute(self) -> Moment:
        self.kernel(self._kernel_ns)
        self.now_ns += self._host_ns
        return Moment(self.compute_free_ns, 0)

    def is_past(self, mark: Moment) -> bool:
        if mark.at_ns > self._here_ns():
            return False
        self._come(mark.num_copies)
        return True

    def hold_compute(self, mark: Moment) -> None:
        self.compute_free_ns = max(self.compute_free_ns, self.now_ns, mark.at_ns)
        self._come(mark.num_copies)

    def to_host(self, values: torch.Tensor) -> torch.Tensor:
        self.num_synchronised += 1
        self.join()
        return values.as_subclass(torch.Tensor)

    def wait_for(self, mark: Any) -> None:
        self.num_synchronised += 1
        self._run_until(max(self.now_ns, mark[0].at_ns))
        self.reach(mark)

    def synchronize(self) -> None:
        self._come(self._num_copies)
        self.now_ns = max(self.now_ns, self.compute_free_ns, self._link_free_ns)

    def stamp(self) -> int:
        return max(self.now_ns, self.compute_free_ns)

    def between_ns(self, begin: int, end: int) -> int | None:
        return end - begin if end <= self.now_ns else None


class OnDevice(torch.Tensor):
    """Values that a host has only by waiting for them: it may not look."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        looks = {"tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__"}
        assert func.__name__ not in looks, f"{func.__name__} waits for the device"
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class WatchedDevice(CudaDevice):
    """Says which bytes kernels read."""

    def used(self, spans: Sequence[Span]) -> None:
        for _ in spans[1:]:  # each is a kernel
            self.streams.mark_compute()
        super().used(spans)
        streams, blocks = self.streams, self._geometry.blocks_per_segment(spans[0].layer)
        if isinstance(streams, Accelerator):
            for span in spans:
                streams.reads(self.rows(span.layer)[span.slot * blocks : (span.slot + span.num_segments) * blocks])


# -- no clock ----------------------------------------------------------------------------------------------------------


class Mark(NamedTuple):
    is_copy: bool
    number: int


class LateStreams(LateValues):
    """Copies run only when somebody waits for them, so that order mistakes show as wrong tokens. Kernels are over at
    once.
    """

    def __init__(self) -> None:
        self.queue: list[tuple[torch.Tensor, torch.Tensor, list[Mark]]] = []
        self.num_copies = self.num_copied = 0
        self.num_kernels = self.num_over = 0
        self.num_synchronised = 0

    def watch(self, ended: Callable[[], None]) -> None:
        """Who asks gets on."""

    wake = close = lambda self: None

    def notice(self, mark: Mark) -> None:
        """Who asks gets on."""

    def block(self, changed: threading.Condition) -> None:
        if self.queue:
            self.let(1)
        else:
            changed.wait(0.001)  # for a reader

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: list[Mark]) -> Mark:
        self.queue.append((target, source, after))
        self.num_copies += 1
        return Mark(True, self.num_copies)

    def mark_compute(self) -> Mark:
        self.num_kernels += 1
        return Mark(False, self.num_kernels)

    def has_run(self, mark: Mark) -> bool:
        return mark.number <= (self.num_copied if mark.is_copy else self.num_over)

    def is_past(self, mark: Mark) -> bool:
        return not mark.is_copy or self.has_run(mark)

    def hold_compute(self, mark: Mark) -> None:
        self.let(mark.number - self.num_copied)

    def to_host(self, values: torch.Tensor) -> torch.Tensor:
        self.num_synchronised += 1
        return values

    def wait_for(self, mark: Any) -> None:
        self.num_synchronised += 1
        self.reach(mark)

    def synchronize(self) -> None:
        self.let(len(self.queue))
        self.num_over = self.num_kernels

    def stamp(self) -> int:
        return time.perf_counter_ns()

    def between_ns(self, begin: int, end: int) -> int | None:
        return end - begin

    def let(self, count: int) -> None:
        """So many copies run, each after the kernels that it waits for."""
        for _ in range(count):
            target, source, after = self.queue.pop(0)
            self.num_over = max([self.num_over, *(mark.number for mark in after)])
            target.copy_(source)
            self.num_copied += 1


class ThreadStreams(CopyThread, LateStreams):
    """Time passes as it does: a copy runs when somebody waits for its mark, as the copy thread does, and takes
    `seconds`.
    """

    class Copy:
        def __init__(self, before: ThreadStreams.Copy | None, seconds: float, run: Callable[[], object]) -> None:
            self._before, self._seconds, self._run = before, seconds, run
            self._lock = threading.Lock()
            self.is_over = False

        def synchronize(self) -> None:
            with self._lock:
                if not self.is_over:
                    if self._before is not None:
                        self._before.synchronize()
                    self._before = None
                    time.sleep(self._seconds)
                    self._run()
                    self.is_over = True

    def __init__(self, seconds: float) -> None:
        CopyThread.__init__(self)
        LateStreams.__init__(self)
        self._seconds = seconds
        self._last: ThreadStreams.Copy | None = None

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: list[Any]) -> Any:
        target.view(torch.uint8).fill_(POISON)
        self._last = self.Copy(self._last, self._seconds, lambda: target.copy_(source))
        self.notice(self._last)
        return self._last

    def is_past(self, mark: Any) -> bool:
        return not isinstance(mark, self.Copy) or mark.is_over

    def hold_compute(self, mark: Any) -> None:
        mark.synchronize()

    def synchronize(self) -> None:
        if self._last is not None:
            self._last.synchronize()


class RandomStreams(LateStreams):
    """Both streams get on when somebody asks whether they have, if the dice say so."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self._dice = dice
        self._chance = dice.choice([0.2, 0.6, 1.0])

    def is_past(self, mark: Mark) -> bool:
        if self._dice.random() < self._chance:
            if not mark.is_copy:
                self.num_over = max(self.num_over, mark.number)
            elif self.queue:
                self.let(1)
        return self.has_run(mark)


def usual_accelerator() -> Accelerator:
    """Whose copies of these models' segments (some kB) take several of its kernels."""
    return Accelerator(Link(2e8, 3_000), kernel_ns=10_000, host_ns=1_000, wake_ns=2_000)


def put_in_place(
    monkeypatch: pytest.MonkeyPatch, host_share: int = 100, make: Callable[[], Any] = usual_accelerator
) -> list[CudaDevice]:
    """Models loaded from now on have such devices instead of the CPU, with host memory for `host_share` percent of the
    experts. The devices that were made.
    """
    made: list[CudaDevice] = []

    def make_device(device: Any, store: Any, geometry: Any, slots: Any, dtype: Any, _: None) -> CudaDevice:
        tier = Tier(geometry, geometry.nbytes * host_share // 100)
        made.append(WatchedDevice(torch.device("cpu"), make(), store, geometry, slots, dtype, tier))
        return made[-1]

    monkeypatch.setattr(cpu.KIND, "make", make_device)
    return made
