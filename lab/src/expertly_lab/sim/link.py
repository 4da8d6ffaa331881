"""The simulator's clock, and its transport: a link that brings one span after the other, loads before prefetches, or
one such link for each of several devices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly_lab.sim.hardware import Hardware

NEVER_NS = 1 << 62

_Entry = tuple[int, int, Span]  # when it may move, order of arrival, what


class Clock:
    """The time of a simulation, in nanoseconds."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.busy_until_ns = 0  # some device computes until then; with one device never later than now


class SimulationWatcher(Protocol):
    """Is told what a simulation does, with its times."""

    def computed(self, label: str, layer: int, begin_ns: int, end_ns: int) -> None:
        """The device computed: "dense", "expert 7" or "head"."""

    def moved(self, span: Span, begin_ns: int, end_ns: int) -> None:
        """The link served a span."""

    def took(self, begin_ns: int, end_ns: int) -> None:
        """The computing thread spent time on a span that had arrived."""


class VirtualLink:
    """A Transport on a virtual clock. Spans arrive one after the other: each begins when the link's latency has
    passed since it was submitted and the one before it has ended; a prefetch only if no load begins as early. `wait`
    moves the clock, and so does `miss_ns` of the hardware for each span that is taken.
    """

    num_devices = 1

    def __init__(
        self, clock: Clock, hardware: Hardware, geometry: Geometry, watcher: SimulationWatcher | None = None
    ) -> None:
        self.stall_ns = 0
        """Time that `wait` took while no device computed."""
        self._clock = clock
        self._watcher = watcher
        self._latency_ns, self._miss_ns = hardware.link.latency_ns, hardware.miss_ns
        num_parts = geometry.segments_per_expert
        self._takes_ns = [  # by layer and number of segments
            [hardware.link.occupies_ns(num * geometry.unit_nbytes[layer]) for num in range(1 + num_parts)]
            for layer in range(geometry.num_layers)
        ]
        self._arrivals: deque[tuple[int, Span]] = deque()
        self._loads: list[_Entry] = []  # heaps
        self._prefetches: list[_Entry] = []
        self._free_at_ns = 0
        self._next_ns = NEVER_NS  # when the next transfer begins
        self._order = 0

    def device_of(self, layer: int, expert: int) -> int:
        return 0

    def submit(self, spans: Sequence[Span]) -> None:
        self._ask(spans, self._loads)

    def prefetch(self, spans: Sequence[Span]) -> None:
        self._ask(spans, self._prefetches)

    def cancel(self, layer: int) -> list[Span]:
        """Drop prefetches of this layer that have not begun; returns their spans."""
        self._begin_until(self._clock.now_ns)
        is_cancelled = [entry[2].layer == layer for entry in self._prefetches]
        if not any(is_cancelled):
            return []
        pairs = list(zip(self._prefetches, is_cancelled, strict=True))
        self._prefetches = [entry for entry, cancelled in pairs if not cancelled]
        heapify(self._prefetches)
        self._find_next()
        return [entry[2] for entry in sorted(entry for entry, cancelled in pairs if cancelled)]

    def poll(self) -> Span | None:
        now, arrivals = self._clock.now_ns, self._arrivals
        if self._next_ns <= now:
            self._begin_until(now)
        return self._take() if arrivals and arrivals[0][0] <= now else None

    def wait(self) -> Span:
        while not self._arrivals:
            assert self._next_ns != NEVER_NS, "nothing is in flight that could arrive"
            self._begin()
        arrival_ns = self._arrivals[0][0]
        clock = self._clock
        if arrival_ns > clock.now_ns:
            self.stall_ns += max(0, arrival_ns - max(clock.now_ns, clock.busy_until_ns))
            clock.now_ns = arrival_ns
        return self._take()

    @property
    def arrives_ns(self) -> int:
        """When the next span arrives if nothing else is asked for; NEVER_NS: nothing is in flight."""
        if self._arrivals:
            return self._arrivals[0][0]
        if self._next_ns == NEVER_NS:
            return NEVER_NS
        span = self._first(self._next_ns)[0][2]
        return self._next_ns + self._takes_ns[span.layer][span.num_segments]

    def _ask(self, spans: Sequence[Span], queue: list[_Entry]) -> None:
        now = self._clock.now_ns
        self._begin_until(now)
        for span in spans:
            self._order += 1
            heappush(queue, (now + self._latency_ns, self._order, span))
        self._find_next()

    def _take(self) -> Span:
        span = self._arrivals.popleft()[1]
        if self._miss_ns:
            begin = self._clock.now_ns
            self._clock.now_ns = begin + self._miss_ns
            if self._watcher is not None:
                self._watcher.took(begin, begin + self._miss_ns)
        return span

    def _begin_until(self, now_ns: int) -> None:
        """Begin, in order, every transfer that begins by then: nothing that is submitted later can go before these."""
        while self._next_ns <= now_ns:
            self._begin()

    def _begin(self) -> None:
        """Begin the next transfer."""
        begin = self._next_ns
        span = heappop(self._first(begin))[2]
        self._free_at_ns = end = begin + self._takes_ns[span.layer][span.num_segments]
        self._find_next()
        self._arrivals.append((end, span))
        if self._watcher is not None:
            self._watcher.moved(span, begin, end)

    def _first(self, begin_ns: int) -> list[_Entry]:
        """The queue whose first span begins then."""
        return self._loads if self._loads and self._loads[0][0] <= begin_ns else self._prefetches

    def _find_next(self) -> None:
        first = self._loads[0][0] if self._loads else NEVER_NS
        if self._prefetches:
            first = min(first, self._prefetches[0][0])
        self._next_ns = max(first, self._free_at_ns)


class VirtualLinks:
    """A Transport of several devices that share a clock: expert parallelism, each device on a link of its own. Experts
    are dealt out to them in turn (fMoE, section 5).
    """

    def __init__(self, geometry: Geometry, links: Sequence[VirtualLink]) -> None:
        self.num_devices = len(links)
        self._links = links
        self._geometry = geometry

    @property
    def stall_ns(self) -> int:
        return sum([link.stall_ns for link in self._links])

    def device_of(self, layer: int, expert: int) -> int:
        return self._geometry.expert_id(layer, expert) % self.num_devices

    def submit(self, spans: Sequence[Span]) -> None:
        for link, its_spans in self._dealt(spans):
            link.submit(its_spans)

    def prefetch(self, spans: Sequence[Span]) -> None:
        for link, its_spans in self._dealt(spans):
            link.prefetch(its_spans)

    def cancel(self, layer: int) -> list[Span]:
        return [span for link in self._links for span in link.cancel(layer)]

    def poll(self) -> Span | None:
        return self._next().poll()

    def wait(self) -> Span:
        return self._next().wait()

    def _next(self) -> VirtualLink:
        """The link whose next span arrives first; what others bring begins no earlier than it would have."""
        return min(self._links, key=lambda link: link.arrives_ns)

    def _dealt(self, spans: Sequence[Span]) -> Iterator[tuple[VirtualLink, list[Span]]]:
        for device, link in enumerate(self._links):
            if its_spans := [span for span in spans if self.device_of(span.layer, span.expert) == device]:
                yield link, its_spans
