"""The threads that decode what has been read: one queue, several at work."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace

from expertly.core.messages import Piece
from expertly.sim.server import NEVER_NS

_Job = tuple[int, int, Piece, int]  # when its bytes are there, order of arrival, of which piece, how long it takes


class Decoders:
    """Times are in nanoseconds. A job begins when its bytes are there and one of `threads` has nothing to do, in the
    order in which bytes come.
    """

    def __init__(self, threads: int) -> None:
        self._jobs: list[_Job] = []  # a heap
        self._free_at_ns = [0] * threads  # a heap
        self._waiting_ns = 0
        self._order = 0
        self.next_ns = NEVER_NS
        """When the next job begins; NEVER_NS where none waits."""

    @property
    def num_waiting(self) -> int:
        return len(self._jobs)

    def submit(self, piece: Piece, ready_ns: int, takes_ns: int) -> None:
        """A part of a piece, whose bytes are there from `ready_ns` on."""
        self._order += 1
        self._waiting_ns += takes_ns
        heappush(self._jobs, (ready_ns, self._order, piece, takes_ns))
        self._find_next()

    def begin(self) -> tuple[Piece, int, int]:
        """Begin the next job: (of which piece, its begin, its end)."""
        _, _, piece, takes_ns = heappop(self._jobs)
        begin = self.next_ns
        self._waiting_ns -= takes_ns
        heapreplace(self._free_at_ns, begin + takes_ns)
        self._find_next()
        return piece, begin, begin + takes_ns

    def withdraw_where(self, is_meant: Callable[[Piece], bool]) -> None:
        """Forget the jobs of such pieces."""
        self._waiting_ns -= sum(job[3] for job in self._jobs if is_meant(job[2]))
        self._jobs = [job for job in self._jobs if not is_meant(job[2])]
        heapify(self._jobs)
        self._find_next()

    def busy_until_ns(self, now_ns: int) -> int:
        """When everything that waits has been decoded, if it could begin at once and be shared out evenly."""
        work = self._waiting_ns + sum(max(0, free - now_ns) for free in self._free_at_ns)
        return now_ns + work // len(self._free_at_ns)

    def _find_next(self) -> None:
        self.next_ns = max(self._jobs[0][0], self._free_at_ns[0]) if self._jobs else NEVER_NS
