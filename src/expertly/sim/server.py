"""One queue of a link or a disk: serves one transfer at a time, those that somebody waits for first."""

from __future__ import annotations

from collections.abc import Callable, Collection
from heapq import heapify, heappop, heappush

from expertly.core.costs import Link
from expertly.core.messages import Span

NEVER_NS = 1 << 62

_Entry = tuple[int, int, Span, int]  # when it may move, order of arrival, what, how long it takes


class Server:
    """Times are in nanoseconds. A transfer begins when its latency has passed since it was submitted and the one before
    it has ended; one that was submitted ahead only where no other begins as early.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._occupies: dict[int, int] = {}
        self._demands: list[_Entry] = []  # heaps
        self._ahead: list[_Entry] = []
        self._free_at_ns = 0
        self._waiting_ns = 0  # what all those that have not begun will take
        self._order = 0
        self.next_ns = NEVER_NS
        """When the next transfer begins; NEVER_NS where none waits."""

    @property
    def num_waiting(self) -> int:
        return len(self._demands) + len(self._ahead)

    def submit(self, span: Span, since_ns: int, nbytes: int, is_ahead: bool) -> None:
        """A transfer waits from `since_ns` on."""
        takes_ns = self._takes_ns(nbytes)
        self._waiting_ns += takes_ns
        self._order += 1
        entry = (since_ns + self._link.latency_ns, self._order, span, takes_ns)
        heappush(self._ahead if is_ahead else self._demands, entry)
        if entry[0] < self.next_ns:
            self.next_ns = max(entry[0], self._free_at_ns)

    def next_span(self) -> Span:
        """What that is."""
        return self._next()[0][2]

    def begin(self, nbytes: int | None = None) -> tuple[Span, bool, int, int]:
        """Begin it: (what, whether it was submitted ahead, its begin, its end). `nbytes` where it became less."""
        queue = self._next()
        is_ahead = queue is self._ahead
        _, _, span, takes_ns = heappop(queue)
        self._waiting_ns -= takes_ns
        if nbytes is not None:
            takes_ns = self._takes_ns(nbytes) if nbytes else 0
        begin = self.next_ns
        self._free_at_ns = begin + takes_ns
        self._find_next()
        return span, is_ahead, begin, self._free_at_ns

    def withdraw(self, layer: int, experts: Collection[int] | None = None) -> list[Span]:
        """Forget what was submitted ahead of this layer, or of these experts of it, and has not begun."""
        return self.withdraw_where(lambda span: span.layer == layer and (experts is None or span.expert in experts))

    def withdraw_where(self, is_meant: Callable[[Span], bool]) -> list[Span]:
        """Forget what was submitted ahead, is meant, and has not begun."""
        ahead: list[_Entry] = []
        gone: list[_Entry] = []
        for entry in self._ahead:
            (gone if is_meant(entry[2]) else ahead).append(entry)
        if gone:
            self._waiting_ns -= sum(entry[3] for entry in gone)
            self._ahead = ahead
            heapify(self._ahead)
            self._find_next()
        return [entry[2] for entry in sorted(gone)]

    def busy_until_ns(self, now_ns: int) -> int:
        """When everything that waits has been served, if it could begin at once."""
        return max(self._free_at_ns, now_ns) + self._waiting_ns

    def _next(self) -> list[_Entry]:
        demands, ahead = self._demands, self._ahead
        if not demands or not ahead:
            return demands or ahead
        return demands if demands[0][0] <= max(ahead[0][0], self._free_at_ns) else ahead

    def _find_next(self) -> None:
        first = min((queue[0][0] for queue in (self._demands, self._ahead) if queue), default=NEVER_NS)
        self.next_ns = max(first, self._free_at_ns)

    def _takes_ns(self, nbytes: int) -> int:
        found = self._occupies.get(nbytes)
        if found is None:
            found = self._occupies[nbytes] = self._link.occupies_ns(nbytes)
        return found
