"""The decisions of a tier between disk and device: which units of experts memory holds, and which go."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from expertly.core.errors import BudgetError
from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.policies.allocation import uniform_quotas
from expertly.policies.eviction import MakePolicy
from expertly.policies.lru import LRU
from expertly.scheduler.budget import Budget, split_budget
from expertly.scheduler.cache import ABSENT, LOADING, RESIDENT, Cache


class Tier:
    """The cache in host memory that a device's transfers pass through. Pure, as the Scheduler is, with the same Cache
    and the same policies. It has no running layer: transfers of several layers overlap, and each is requested alone.
    The driver, a device or a simulator's link, moves bytes and reports what arrived or was cancelled.

    Every unit with a slot is kept, whatever its place in the expert: there are no staging slots.
    """

    def __init__(
        self, geometry: Geometry, memory_nbytes: int, make_policy: MakePolicy = lambda capacity, layers: LRU()
    ) -> None:
        """Raises BudgetError where the memory does not hold the experts of one token in a layer."""
        try:
            self.slots = split_budget(geometry, memory_nbytes).pool_slots()
        except BudgetError as error:
            raise BudgetError(f"host_{error}") from None
        self.geometry, self.memory_nbytes = geometry, memory_nbytes
        quotas = uniform_quotas(geometry, self.slots)
        budget = Budget(memory_nbytes, (0,) * len(self.slots), tuple(self.slots), tuple(quotas))
        self.cache = Cache(geometry, budget, make_policy)

    def request(self, span: Span, busy: Callable[[], Iterable[int]]) -> tuple[list[Span], list[Span]] | None:
        """Returns what is here of a device's span, and what to read now, as spans of this tier's slots; None while
        there is no room. `busy`: ids of experts that must not be evicted, as they are being read or copied.
        """
        cache, units = self.cache, self.cache.units_of(span)
        eid = units[0] // cache.num_parts
        partition = cache.partitions[span.layer]
        resident = [unit for unit in units if cache.state[unit] == RESIDENT]
        absent = [unit for unit in units if cache.state[unit] == ABSENT]
        assert len(resident) + len(absent) == len(units), "a device's span is asked for once"
        if len(absent) > partition.room:
            protected = {eid, *busy()}
            if cache.make_room(span.layer, len(absent), protected) < len(absent):
                assert len(protected) > 1, "a tier holds at least one token's experts"
                return None
        cache.keep([absent])
        partition.policy.used([eid], [1], 1)
        return cache.spans(resident), cache.allocate(absent, LOADING) if absent else []

    def find(self, span: Span) -> list[Span]:
        """The tier's spans of a device's span; none where a part of it is not here."""
        units = self.cache.units_of(span)
        return self.cache.spans(units) if all(self.cache.state[unit] == RESIDENT for unit in units) else []

    def arrived(self, span: Span) -> None:
        """A span of this tier has been read."""
        self.cache.arrived(span)

    def cancelled(self, span: Span) -> None:
        """A span of this tier will not be read."""
        self.cache.release(self.cache.units_of(span))

    def check(self) -> None:
        """Assert that slots, units and budget agree."""
        self.cache.check()
        assert self.cache.kept == [state != ABSENT for state in self.cache.state], "all that has a slot is kept"
