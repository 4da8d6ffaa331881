"""A link with host memory on its way: disk -> host memory -> device, as an accelerator's transfers go."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.scheduler.tier import Tier
from expertly_lab.sim.hardware import Hardware
from expertly_lab.sim.link import Clock, SimulationWatcher, VirtualLink


@dataclass(slots=True, eq=False)
class _Transfer:
    """A device's span under way."""

    span: Span
    is_prefetch: bool
    num_reads: int = 0  # spans of the tier that it waits for


class TieredLink(VirtualLink):
    """Two links one behind the other, and the same Tier as behind an accelerator in an engine. Each serves loads before
    prefetches; a span is copied once all of it has been read. What is being read, or is to be copied, is not evicted.
    """

    def __init__(
        self,
        clock: Clock,
        hardware: Hardware,
        geometry: Geometry,
        tier: Tier,
        watcher: SimulationWatcher | None = None,
    ) -> None:
        super().__init__(clock, hardware, geometry, watcher)
        assert hardware.disk is not None
        self.disk_nbytes = 0
        """Bytes that were read from disk."""
        self._tier, self._geometry = tier, geometry
        self._events = Clock()  # the time of the last event: what follows from it begins then
        self._disk = VirtualLink(self._events, replace(hardware, link=hardware.disk, miss_ns=0), geometry)
        self._copies = VirtualLink(self._events, replace(hardware, miss_ns=0), geometry, watcher)
        self._waiting: tuple[deque[_Transfer], deque[_Transfer]] = deque(), deque()  # loads, prefetches: for room
        self._reading: dict[Span, _Transfer] = {}  # by span of the tier
        self._copying: set[Span] = set()

    def submit(self, spans: Sequence[Span]) -> None:
        self._ask_tier(spans, is_prefetch=False)

    def prefetch(self, spans: Sequence[Span]) -> None:
        self._ask_tier(spans, is_prefetch=True)

    def cancel(self, layer: int) -> list[Span]:
        """Drop prefetches of this layer that are neither being read nor copied; returns their spans."""
        self._go_on()
        cancelled = self._copies.cancel(layer)
        self._copying.difference_update(cancelled)
        for span in self._disk.cancel(layer):
            self._tier.cancelled(span)
            cancelled.append(self._reading.pop(span).span)
        for transfer in self._reading.values():
            transfer.is_prefetch = transfer.is_prefetch and transfer.span.layer != layer
        prefetches = self._waiting[True]
        dropped = [transfer for transfer in prefetches if transfer.span.layer == layer]
        for transfer in dropped:
            prefetches.remove(transfer)
        self._find_next()
        return cancelled + [transfer.span for transfer in dropped]

    def _ask_tier(self, spans: Sequence[Span], *, is_prefetch: bool) -> None:
        self._go_on()
        self._waiting[is_prefetch].extend([_Transfer(span, is_prefetch) for span in spans])
        self._start()

    def _go_on(self) -> None:
        """Let all happen that happens by now."""
        self._begin_until(self._clock.now_ns)
        self._events.now_ns = max(self._events.now_ns, self._clock.now_ns)

    def _begin(self) -> None:
        """The next event: something has been read, or copied."""
        if self._disk.arrives_ns <= self._copies.arrives_ns:
            read = self._disk.wait()
            self._tier.arrived(read)
            self.disk_nbytes += read.num_segments * self._geometry.unit_nbytes[read.layer]
            transfer = self._reading.pop(read)
            transfer.num_reads -= 1
            if not transfer.num_reads:
                self._copy(transfer)
        else:
            span = self._copies.wait()
            self._copying.remove(span)
            self._arrivals.append((self._events.now_ns, span))
        self._start()

    def _start(self) -> None:
        """Begin what the tier has room for; prefetches where no load waits."""
        for waiting in self._waiting:
            while waiting:
                decided = self._tier.request(waiting[0].span, self._busy)
                if decided is None:
                    break
                transfer, (_, reads) = waiting.popleft(), decided
                transfer.num_reads = len(reads)
                self._reading.update(dict.fromkeys(reads, transfer))
                (self._disk.prefetch if transfer.is_prefetch else self._disk.submit)(reads)
                if not reads:
                    self._copy(transfer)
            if waiting:
                break
        self._find_next()

    def _copy(self, transfer: _Transfer) -> None:
        self._copying.add(transfer.span)
        (self._copies.prefetch if transfer.is_prefetch else self._copies.submit)([transfer.span])

    def _busy(self) -> Iterable[int]:
        spans = [*self._copying, *(transfer.span for transfer in self._reading.values())]
        return [self._geometry.expert_id(span.layer, span.expert) for span in spans]

    def _find_next(self) -> None:
        self._next_ns = min(self._disk.arrives_ns, self._copies.arrives_ns)
