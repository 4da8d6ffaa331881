"""The simulator's clock, and its transport: a link that brings one span after the other, loads before prefetches."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from functools import cache, partial
from heapq import heapify, heappop, heappush, nsmallest
from typing import Protocol

from expertly.core.costs import CodecCosts, Link
from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.core.resources import NUM_READERS
from expertly.sim.decoding import NEVER_NS, DecodingDisk, is_of
from expertly.sim.hardware import Hardware

_Entry = tuple[int, int, Span, int, int]  # when it may move, order of arrival, what, how long it takes, reads
_Key = tuple[int, int, int]  # layer, expert, segment


class Clock:
    """The time of a simulation, in nanoseconds."""

    def __init__(self) -> None:
        self.now_ns = 0


class SimulationWatcher(Protocol):
    """Is told what a simulation does, with its times."""

    def computed(self, what: str, layer: int, begin_ns: int, end_ns: int) -> None:
        """The device computed: "dense", "expert 7" or "head"."""

    def moved(self, where: str, span: Span, begin_ns: int, end_ns: int) -> None:
        """The "link" or the "disk" served a span, or the part of it that was to be read."""

    def spent(self, what: str, begin_ns: int, end_ns: int) -> None:
        """The computing thread spent time on submitting spans ("ask"), on one that had arrived ("take") or until what
        it waits for was predicted ("decide").
        """

    def predicted(self, what: str, begin_ns: int, end_ns: int) -> None:
        """The predictor read what a pass showed when it began ("begin"), of a router ("router") or at its end
        ("update").
        """


class VirtualLink:
    """A PrefetchTransport on a virtual clock. Spans arrive one after the other. `wait` moves the clock, and so does the
    time that submitting and taking spans costs.

    Behind the link there may be a disk: spans that the host's memory does not hold are read from it first; meanwhile
    the link serves others. With a `codec`, what comes from the disk (or from the link, where no disk is behind it) is
    decoded before it has arrived. `load_ns` is the computing thread's own time for a span that it takes, `submit_ns`
    that for spans that are loaded together, `prefetch_ns` that for those that are prefetched together,
    `prefetch_each_ns` that for each expert of these.
    """

    def __init__(
        self,
        clock: Clock,
        hardware: Hardware,
        geometry: Geometry,
        watcher: SimulationWatcher | None = None,
        load_ns: int = 0,
        submit_ns: int = 0,
        codec: CodecCosts | None = None,
        prefetch_ns: int = 0,
        prefetch_each_ns: int = 0,
    ) -> None:
        self.stall_ns = 0
        """Time that `wait` took."""
        self.effective = hardware.link
        """The link as loading experiences it, decoding included."""
        self.decoder: DecodingDisk | None = None
        """Where experts are read and decoded, if they are stored compressed."""
        self._clock = clock
        self._submit_ns, self._prefetch_ns, self._prefetch_each_ns = submit_ns, prefetch_ns, prefetch_each_ns
        self._num_segments = geometry.segments_per_expert
        self._load_ns = load_ns
        self._watcher = watcher
        self._segment_nbytes = [geometry.segment_nbytes(layer) for layer in range(geometry.num_layers)]
        self._arrivals: deque[tuple[int, Span]] = deque()
        slowdown = 1.0 if hardware.host is None else hardware.host.link_slowdown
        self._link: TransferQueue | DecodingDisk = TransferQueue(hardware.link, slowdown)
        self._disk: TransferQueue | DecodingDisk = TransferQueue(hardware.disk or hardware.link)
        self._host: HostMemory | None = None  # then nothing is submitted to the disk
        if has_host_tier(hardware, geometry):
            assert hardware.host_memory_nbytes is not None
            self._host = HostMemory(geometry, hardware.host_memory_nbytes)
        if codec is not None:
            where, source = ("link", hardware.link) if self._host is None else ("disk", hardware.disk)
            assert source is not None
            self.decoder = DecodingDisk(source, codec, None if watcher is None else partial(watcher.moved, where))
            if self._host is None:
                self._link = self.decoder
                rate = min(source.nbytes_per_s / codec.ratio, codec.all_nbytes_per_s)
                self.effective = Link(rate, source.latency_ns, source.overhead_ns)
            else:
                self._disk = self.decoder
        is_plain = self._host is None and self._link is not self.decoder
        self._arrive_together = hardware.link.arrive_together and is_plain
        self._prefetches_when_called = hardware.link.prefetches_when_called and is_plain

    @property
    def decodes_beside_computing(self) -> bool:
        """Whether decoding shares the processors with computing, so that `computing` must be called."""
        return self._link is self.decoder

    def submit(self, spans: Sequence[Span]) -> None:
        self._submit(spans, False)
        if self._submit_ns:
            self._spend("ask", self._submit_ns)

    def prefetch(self, spans: Sequence[Span]) -> None:
        if spans:
            self._submit(spans, True)
            self._called()
            num_segments = sum([span.num_segments for span in spans])
            self._spend("ask", self._prefetch_ns + self._prefetch_each_ns * num_segments // self._num_segments)

    def cancel(self, layer: int, experts: Collection[int] | None = None) -> list[Span]:
        """Spans on their way from the disk to the link have not begun, unless they are decoded."""
        self._begin_until(self._clock.now_ns)
        return self._link.cancel(layer, experts) + self._disk.cancel(layer, experts)

    def poll(self) -> Span | None:
        now, arrivals = self._clock.now_ns, self._arrivals
        self._called()
        if self._link.next_ns <= now or self._disk.next_ns <= now:
            self._begin_until(now)
        return self._take() if arrivals and arrivals[0][0] <= now else None

    def wait(self) -> Span:
        self._called(waits=True)
        while not self._arrivals:
            self._begin_next()
        arrival = self._arrivals[0][0]
        if arrival > self._clock.now_ns:
            self.stall_ns += arrival - self._clock.now_ns
            self._clock.now_ns = arrival
        self._called()
        return self._take()

    def computing(self, begin_ns: int, end_ns: int, slowdown: float = 1.0) -> None:
        """The model computes for so long, `slowdown` times slower than if nothing was loaded. Processors that compute
        decode nothing meanwhile.
        """
        if self._link is self.decoder:
            self._begin_until(begin_ns)
            self.decoder.computing(begin_ns, end_ns, slowdown)

    def host_computes(self, end_ns: int) -> None:
        """From now until then the host computes from the memory that the link copies from."""
        self._begin_until(self._clock.now_ns)
        assert isinstance(self._link, TransferQueue)
        self._link.slow_until_ns = end_ns

    def wait_for_host(self, end_ns: int) -> None:
        """Wait for what the host has computed by then, which comes behind the copy that is made at that time."""
        self._begin_until(end_ns)
        assert isinstance(self._link, TransferQueue)
        then_ns = self._link.under_way_until_ns(end_ns)
        if then_ns > self._clock.now_ns:
            self.stall_ns += then_ns - self._clock.now_ns
            self._clock.now_ns = then_ns

    def busy_until_ns(self) -> int:
        """When the link will have brought everything submitted so far."""
        self._begin_until(self._clock.now_ns)
        return self._link.busy_until_ns(self._clock.now_ns)

    def _called(self, *, waits: bool = False) -> None:
        if self._prefetches_when_called:
            assert isinstance(self._link, TransferQueue)
            now = self._clock.now_ns
            self._link.called(now, waits=waits)
            self._begin_until(now)

    def _submit(self, spans: Sequence[Span], is_prefetch: bool) -> None:
        now, host, link = self._clock.now_ns, self._host, self._link
        self._begin_until(now)
        if self._arrive_together and not is_prefetch:
            assert isinstance(link, TransferQueue)
            link.submit_together(spans, now, [span.num_segments * self._segment_nbytes[span.layer] for span in spans])
            return
        for span in spans:
            segment_nbytes = self._segment_nbytes[span.layer]
            if host is None:
                link.submit(span, now, span.num_segments * segment_nbytes, is_prefetch)
            elif num_missing := host.num_missing(span):
                self._disk.submit(span, now, num_missing * segment_nbytes, is_prefetch)
            else:
                link.submit(span, host.use(span, now), span.num_segments * segment_nbytes, is_prefetch)

    def _take(self) -> Span:
        span = self._arrivals.popleft()[1]
        self._spend("take", self._load_ns)
        return span

    def _spend(self, what: str, duration_ns: int) -> None:
        if duration_ns:
            begin = self._clock.now_ns
            self._clock.now_ns = begin + duration_ns
            self.computing(begin, begin + duration_ns)
            if self._watcher is not None:
                self._watcher.spent(what, begin, begin + duration_ns)

    def _begin_until(self, now_ns: int) -> None:
        """Begin, in order, every transfer that begins by then: nothing that is submitted later can go before these."""
        while self._link.next_ns <= now_ns or self._disk.next_ns <= now_ns:
            self._begin_next()

    def _begin_next(self) -> None:
        """Begin the earliest transfer."""
        if self._host is not None and NEVER_NS != self._disk.next_ns <= self._link.next_ns:
            self._read(self._host)
        else:
            assert self._link.next_ns != NEVER_NS, "nothing is in flight that could arrive"
            self._bring()

    def _bring(self) -> None:
        begun = self._link.begin()
        if begun is None:  # a step of decoding
            return
        span, _, begin, end = begun
        self._arrivals.append((end, span))
        if self._watcher is not None and self._link is not self.decoder:
            self._watcher.moved("link", span, begin, end)

    def _read(self, host: HostMemory) -> None:
        """Read from the disk into the host's memory; then the span waits for the link."""
        if isinstance(self._disk, TransferQueue):
            span = self._disk.next_span()
            num_missing = host.num_missing(span)  # what was missing when it was submitted may have come since
            _, is_prefetch, begin, end = self._disk.begin(num_missing * self._segment_nbytes[span.layer])
            if self._watcher is not None and num_missing:
                self._watcher.moved("disk", span, begin, end)
        else:
            begun = self._disk.begin()
            if begun is None:
                return
            span, is_prefetch, _, end = begun
        nbytes = span.num_segments * self._segment_nbytes[span.layer]
        self._link.submit(span, host.put(span, end), nbytes, is_prefetch)


class TransferQueue:
    """The queue of a link or a disk, which serves one transfer at a time. Times are in nanoseconds.

    A transfer begins when its latency has passed since it was submitted and the one before it has ended; a prefetch
    only if no load begins as early. Where the link has a time of its own for prefetches, that is part of each instead,
    none begins while a load waits or is served, and as many begin before the first has ended as have NUM_READERS reads
    together: then what is submitted waits for all of them. If they begin when the link is `called`, one that might have
    begun since then waits for the next call.
    """

    def __init__(self, link: Link, slowdown: float = 1.0) -> None:
        """`slowdown`: how many times longer a transfer takes that begins before `slow_until_ns`, until then."""
        self.next_ns = NEVER_NS
        """When the next transfer begins; NEVER_NS where none waits."""
        self.slow_until_ns = 0
        self._slowdown = slowdown
        self._latency_ns, self._prefetch_latency_ns = link.latency_ns, link.prefetch_latency_ns
        self._takes_ns = cache(link.occupies_ns)
        self._arrive_together = link.arrive_together
        self._num_joining = 0  # prefetches that begin and arrive with the last one that began
        self._loads: list[_Entry] = []  # heaps
        self._prefetches: list[_Entry] = []
        self._begun: deque[tuple[int, int]] = deque(maxlen=64)  # begin and end of the last ones
        self._read_nbytes = link.prefetch_read_nbytes
        self._reads_end_ns: deque[int] = deque([0] * NUM_READERS, NUM_READERS)  # of prefetches, the last ones
        self._free_at_ns = 0
        self._loads_end_ns = 0
        self._when_called = link.prefetches_when_called
        self._called_ns = 0
        self._is_waited_for = False
        self._waiting_ns = 0  # what all those that have not begun will take
        self._order = 0

    def submit(self, span: Span, since_ns: int, nbytes: int, is_prefetch: bool) -> None:
        """A transfer waits from `since_ns` on."""
        takes_ns, ready_ns = self._takes_ns(nbytes), since_ns + self._latency_ns
        if is_prefetch and self._prefetch_latency_ns:
            ready_ns = since_ns
            takes_ns += 0 if self._arrive_together else self._prefetch_latency_ns
        num_reads = NUM_READERS
        if self._read_nbytes:
            num_reads = min(NUM_READERS, -(-nbytes // self._read_nbytes))
        self._waiting_ns += takes_ns
        self._order += 1
        heappush(self._prefetches if is_prefetch else self._loads, (ready_ns, self._order, span, takes_ns, num_reads))
        self._find_next()

    def submit_together(self, spans: Sequence[Span], since_ns: int, nbytes: Sequence[int]) -> None:
        """Loads, of so many bytes each, wait from `since_ns` on and arrive when all of them have moved."""
        takes_ns, ready_ns = sum(map(self._takes_ns, nbytes)), since_ns + self._latency_ns
        self._waiting_ns += takes_ns
        for span in spans:
            self._order += 1
            heappush(self._loads, (ready_ns, self._order, span, takes_ns, 0))
            takes_ns = 0
        self._find_next()

    def called(self, now_ns: int, *, waits: bool) -> None:
        """The computing thread looks at the link; with `waits`, until the next call."""
        self._called_ns, self._is_waited_for = now_ns, waits
        self._find_next()

    def next_span(self) -> Span:
        return self._next()[0][2]

    def begin(self, nbytes: int | None = None) -> tuple[Span, bool, int, int]:
        """Begin the next transfer: (span, whether it is a prefetch, its begin, its end). `nbytes`: where fewer are left
        to move.
        """
        queue, begin = self._next() if self._prefetches else self._loads, self.next_ns
        is_prefetch = queue is self._prefetches
        _, _, span, takes_ns, num_reads = heappop(queue)
        self._waiting_ns -= takes_ns
        if nbytes is not None:
            takes_ns = self._takes_ns(nbytes) if nbytes else 0
        if is_prefetch and self._prefetch_latency_ns:
            if self._arrive_together:
                takes_ns = self._together_ns(begin, takes_ns, num_reads)
            begin = max(begin, self._free_at_ns)
        if begin < self.slow_until_ns:
            takes_ns += round(min(takes_ns, self.slow_until_ns - begin) * (self._slowdown - 1))
        end = self._free_at_ns = begin + takes_ns
        if is_prefetch:
            self._reads_end_ns.extend([end] * num_reads)
        else:
            self._loads_end_ns = end
        self._begun.append((begin, end))
        self._find_next()
        return span, is_prefetch, begin, end

    def cancel(self, layer: int, experts: Collection[int] | None = None) -> list[Span]:
        """Drop prefetches of this layer, or of these experts of it, that have not begun; returns their spans."""
        cancelled = sorted(entry for entry in self._prefetches if is_of(entry[2], layer, experts))
        if cancelled:
            self._waiting_ns -= sum(entry[3] for entry in cancelled)
            self._prefetches = [entry for entry in self._prefetches if not is_of(entry[2], layer, experts)]
            heapify(self._prefetches)
            self._find_next()
        return [entry[2] for entry in cancelled]

    def under_way_until_ns(self, at_ns: int) -> int:
        """When the transfer that is under way then ends; `at_ns` where there is none."""
        return next((end for begin, end in self._begun if begin <= at_ns < end), at_ns)

    def busy_until_ns(self, now_ns: int) -> int:
        """When everything that waits would have been served, if it began at once."""
        return max(self._free_at_ns, now_ns) + self._waiting_ns

    def _together_ns(self, begin: int, takes_ns: int, num_reads: int) -> int:
        """What a prefetch adds that begins then: the first of several all of their time."""
        if self._num_joining:
            self._num_joining -= 1
            return 0
        takes_ns += self._prefetch_latency_ns
        num_free = sum([end <= begin for end in self._reads_end_ns]) - num_reads
        for ready_ns, _, _, other_ns, num in nsmallest(num_free, self._prefetches):
            num_free -= num
            if ready_ns > begin or num_free < 0:
                break
            takes_ns += other_ns
            self._num_joining += 1
        return takes_ns

    def _next(self) -> list[_Entry]:
        loads, prefetches = self._loads, self._prefetches
        if not loads or not prefetches:
            return loads or prefetches
        is_first = self._prefetch_latency_ns or loads[0][0] <= max(prefetches[0][0], self._free_at_ns)
        return loads if is_first else prefetches

    def _find_next(self) -> None:
        first = self._loads[0][0] if self._loads else NEVER_NS
        if self._prefetches and self._prefetch_latency_ns:
            if not self._loads:
                ready_ns, _, _, _, num_reads = self._prefetches[0]
                first = max(ready_ns, self._reads_end_ns[num_reads - 1], self._loads_end_ns)
                if self._when_called:
                    can_begin = self._is_waited_for or first <= self._called_ns
                    first = max(first, self._called_ns) if can_begin else NEVER_NS
                self.next_ns = first
                return
        elif self._prefetches:
            first = min(first, self._prefetches[0][0])
        self.next_ns = max(first, self._free_at_ns)


class HostMemory:
    """RAM between disk and link, as in the engine: a least recently used cache of segments.

    At the start it is filled from the first layer on, which takes no time. What is read moves on to the link even if it
    cannot stay.
    """

    def __init__(self, geometry: Geometry, memory_nbytes: int) -> None:
        self._segment_nbytes = [geometry.segment_nbytes(layer) for layer in range(geometry.num_layers)]
        self._room = memory_nbytes
        self._held: OrderedDict[_Key, int] = OrderedDict()  # when it is there; oldest use first
        for layer, shape in enumerate(geometry.layers):
            nbytes = self._segment_nbytes[layer]
            for expert in range(shape.num_experts):
                for segment in range(geometry.segments_per_expert):
                    if nbytes > self._room:
                        return
                    self._held[layer, expert, segment] = 0
                    self._room -= nbytes

    def num_missing(self, span: Span) -> int:
        """How many segments of a span must be read."""
        return sum(key not in self._held for key in _keys(span))

    def use(self, span: Span, now_ns: int) -> int:
        """A span that is held or on its way into memory is used; returns when all of it is there."""
        for key in _keys(span):
            self._held.move_to_end(key)
            now_ns = max(now_ns, self._held[key])
        return now_ns

    def put(self, span: Span, end_ns: int) -> int:
        """The missing part of a span has been read by then; returns when all of it is there."""
        for key in _keys(span):
            if key not in self._held:
                self._held[key] = end_ns
                self._room -= self._segment_nbytes[span.layer]
        here = self.use(span, end_ns)
        while self._room < 0:
            (layer, _, _), _ = self._held.popitem(last=False)
            self._room += self._segment_nbytes[layer]
        return here


def _keys(span: Span) -> list[_Key]:
    return [(span.layer, span.expert, span.segment + i) for i in range(span.num_segments)]


def has_host_tier(hardware: Hardware, geometry: Geometry) -> bool:
    """Whether a disk lies behind a host's memory that does not hold everything."""
    return hardware.host_memory_nbytes is not None and hardware.host_memory_nbytes < geometry.nbytes
