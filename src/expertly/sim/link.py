"""The simulator's clock and its transport: a link that brings one span after the other, demands first."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.sim.coded import CodedDisk, Coding
from expertly.sim.hardware import Hardware
from expertly.sim.host_tier import HostTier, segments_of
from expertly.sim.server import Server


class Clock:
    """The time of a simulation, in nanoseconds."""

    def __init__(self) -> None:
        self.now_ns = 0


class LinkWatcher(Protocol):
    """Sees what is moved, with its times."""

    def moved(self, where: str, span: Span, begin_ns: int, end_ns: int) -> None:
        """The "link" or the "disk" served a span, or what of it was to be read."""
        ...

    def spent(self, what: str, begin_ns: int, end_ns: int) -> None:
        """The computing thread spent time on asking for spans ("ask") or on one that had arrived ("take")."""
        ...


class VirtualLink:
    """An AheadTransport on a clock that it moves in `wait`, and by what asking for spans and taking them costs. Spans
    arrive one after the other.

    Behind the link there may be a disk: what the host tier does not hold is read from there first, and meanwhile the
    link serves others. With a `coding`, what comes from the disk (from the link, where no disk is behind it) is decoded
    before it is there. `taking_ns(layer, segments)` is the computing thread's
    own time for a span it takes, `submit_ns` for spans that are demanded together.
    """

    def __init__(
        self,
        clock: Clock,
        hardware: Hardware,
        geometry: Geometry,
        taking_ns: Callable[[int, int], int],
        watcher: LinkWatcher | None = None,
        submit_ns: int = 0,
        coding: Coding | None = None,
    ) -> None:
        self._clock = clock
        self._submit_ns = submit_ns
        self._link: Server | CodedDisk = Server(hardware.link)
        self._host: HostTier | None = None
        self.coded: CodedDisk | None = None
        if hardware.host_memory_nbytes is not None and hardware.host_memory_nbytes < geometry.nbytes:
            assert hardware.disk is not None, "a host tier that does not hold everything has a disk behind it"
            self._host = HostTier(geometry, hardware.host_memory_nbytes)
            self._disk: Server | CodedDisk = Server(hardware.disk)
            if coding is not None:
                self._disk = self.coded = CodedDisk(hardware.disk, geometry, coding, watcher, "disk")
        elif coding is not None:
            self._link = self.coded = CodedDisk(hardware.link, geometry, coding, watcher, "link")
        self.brings = hardware.link if coding is None or self._host is not None else coding.link(hardware.link)
        """What loading comes to, for who decides by that."""
        self._segment_nbytes = [geometry.segment_nbytes(layer) for layer in range(geometry.num_layers)]
        self._taking_ns = taking_ns
        self._watcher = watcher
        self._arrivals: deque[tuple[int, Span]] = deque()
        self.stall_ns = 0
        self.moved_nbytes = 0

    def submit(self, spans: Sequence[Span]) -> None:
        """See Transport."""
        self._submit(spans, False)
        self._spend("ask", self._submit_ns)

    def submit_ahead(self, spans: Sequence[Span]) -> None:
        """See AheadTransport."""
        if spans:
            self._submit(spans, True)

    def withdraw(self, layer: int, experts: Collection[int] | None = None) -> list[Span]:
        """See AheadTransport. What is on its way from the disk to the link has not been begun, unless it is decoded."""
        self._begin_until(self._clock.now_ns)
        gone = self._link.withdraw(layer, experts)
        return gone if self._host is None else gone + self._disk.withdraw(layer, experts)

    def poll(self) -> Span | None:
        """See Transport."""
        now = self._clock.now_ns
        if self._host is not None or self._link.next_ns <= now:
            self._begin_until(now)
        if not self._arrivals or self._arrivals[0][0] > now:
            return None
        return self._take()

    def wait(self) -> Span:
        """See Transport: the clock moves on to the next arrival."""
        while not self._arrivals:
            assert self._begin_next(), "nothing is in flight that could arrive"
        if self._link is self.coded:  # what begins later may be there sooner
            self._begin_before_arrival()
        arrival = self._arrivals[0][0]
        if arrival > self._clock.now_ns:
            self.stall_ns += arrival - self._clock.now_ns
            self._clock.now_ns = arrival
        return self._take()

    def computing(self, begin_ns: int, end_ns: int, slowdown: float = 1.0) -> None:
        """The model computes for so long, which it would do `slowdown` times faster if nothing was loaded: processors
        that do so decode nothing meanwhile.
        """
        if self._link is self.coded:
            self._begin_until(begin_ns)
            self._link.computing(begin_ns, end_ns, slowdown)

    def busy_until_ns(self) -> int:
        """When the link has brought everything that could be on it by now."""
        self._begin_until(self._clock.now_ns)
        return self._link.busy_until_ns(self._clock.now_ns)

    def _submit(self, spans: Sequence[Span], is_ahead: bool) -> None:
        now = self._clock.now_ns
        self._begin_until(now)
        for span in spans:
            here = now if self._host is None else self._host.here_ns(span, now)
            server, since = (self._disk, now) if here is None else (self._link, here)
            if isinstance(server, Server):
                server.submit(span, since, self._nbytes(span), is_ahead)
            else:
                segments = segments_of(span) if self._host is None else self._host.missing(span)
                server.submit(span, since, segments, is_ahead)

    def _take(self) -> Span:
        span = self._arrivals.popleft()[1]
        self._spend("take", self._taking_ns(span.layer, span.num_segments))
        return span

    def _spend(self, what: str, duration_ns: int) -> None:
        if duration_ns:
            begin = self._clock.now_ns
            self._clock.now_ns = begin + duration_ns
            self.computing(begin, begin + duration_ns)
            if self._watcher is not None:
                self._watcher.spent(what, begin, begin + duration_ns)

    def _begin_until(self, now_ns: int) -> None:
        """Begin every transfer that begins by then, in order: what is submitted later cannot go before it."""
        link = self._link
        if self._host is None:
            while link.next_ns <= now_ns:
                self._bring()
            return
        while min(self._disk.next_ns, link.next_ns) <= now_ns:
            self._begin_next()

    def _begin_next(self) -> bool:
        """Begin the transfer that begins first; False where there is none."""
        if self._host is not None and self._disk.num_waiting and self._disk.next_ns <= self._link.next_ns:
            self._read()
        elif self._link.num_waiting:
            self._bring()
        else:
            return False
        return True

    def _begin_before_arrival(self) -> None:
        while self._link.next_ns <= self._arrivals[0][0]:
            self._bring()

    def _bring(self) -> None:
        begun = self._link.begin()
        if begun is None:  # a step on the way
            return
        span, _, begin, end = begun
        self.moved_nbytes += self._nbytes(span)
        if self._link is self.coded:
            insort(self._arrivals, (end, span))
            return
        self._arrivals.append((end, span))
        if self._watcher is not None:
            self._watcher.moved("link", span, begin, end)

    def _read(self) -> None:
        """From the disk into the host tier; then it waits for the link."""
        assert self._host is not None and isinstance(self._link, Server)
        if isinstance(self._disk, Server):
            span = self._disk.next_span()
            missing = len(self._host.missing(span))
            _, is_ahead, begin, end = self._disk.begin(missing * self._segment_nbytes[span.layer])
            if self._watcher is not None and missing:
                self._watcher.moved("disk", span, begin, end)
        else:
            begun = self._disk.begin()
            if begun is None:
                return
            span, is_ahead, _, end = begun
        self._link.submit(span, self._host.read(span, end), self._nbytes(span), is_ahead)

    def _nbytes(self, span: Span) -> int:
        return self._segment_nbytes[span.layer] * span.num_segments
