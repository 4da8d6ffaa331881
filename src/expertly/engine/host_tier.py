"""The host tier: RAM between disk and device, a least-recently-used cache of segments over all layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container

import torch

from expertly.core.errors import BudgetError
from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.engine.numa import MemoryNode
from expertly.engine.pool import HostPool
from expertly.engine.reads import ExtentSource
from expertly.engine.transfer import Readers
from expertly.policies.eviction.simple import LRU
from expertly.scheduler.budget import class_segment_nbytes, split_budget
from expertly.scheduler.cache import Partition
from expertly.scheduler.slots import SlotTable


class HostTier:
    """Brings the segments of a device span into host slots. Its spans carry host slots, not device slots.

    `is_busy(expert id)` says that a copy out of the expert's host slots may still be running: it is not evicted.
    `wait_idle()` makes no expert busy.
    """

    def __init__(
        self,
        store: ExtentSource,
        geometry: Geometry,
        memory_nbytes: int,
        dtype: torch.dtype,
        is_busy: Callable[[int], bool],
        wait_idle: Callable[[], None],
        node: MemoryNode | None = None,
    ) -> None:
        try:
            slots = split_budget(geometry, memory_nbytes).pool_slots()
        except BudgetError as error:
            raise BudgetError(f"host_{error}") from None
        self._slot_nbytes = class_segment_nbytes(geometry)
        self.memory_nbytes = sum(num * nbytes for num, nbytes in zip(slots, self._slot_nbytes, strict=True))
        """Of all its slots."""
        self._geometry = geometry
        self._slots = SlotTable(geometry, slots)
        self._caches = [Partition(num_slots, LRU()) for num_slots in slots]
        self.pool = pool = HostPool(geometry, slots, self._slot_nbytes, dtype, node)
        self.readers = Readers(
            store, geometry, lambda span: pool.buffer(span.layer, span.slot, span.num_segments), node=node
        )
        self._is_busy, self._wait_idle = is_busy, wait_idle
        self._loading: dict[Span, None] = {}

    def request(
        self, wanted: Span, is_ahead: bool = False, spared: Container[int] = ()
    ) -> tuple[list[Span], list[Span]] | None:
        """(host spans that are here, host spans now to be read) of a device span; None: no room until reads end.

        `is_ahead`: read behind all others, and have room only where nothing must be waited for and no expert of
        `spared` (ids) goes.
        """
        geometry, slots = self._geometry, self._slots
        eid, mask = self._segments(wanted)
        cache = self._caches[geometry.size_classes[wanted.layer]]
        here, missing = mask & slots.resident[eid], mask & ~slots.resident[eid]
        assert not missing & slots.in_flight[eid], "a device span is asked for once"
        if missing:
            if not self._make_room(cache, missing.bit_count(), eid, is_ahead, spared):
                return None
            cache.keep(eid, missing)
        cache.policy.used([eid], [1], 1)
        found = slots.spans(eid, here) if here else []
        reads = slots.allocate(eid, missing, slots.awaited) if missing else []
        self._loading.update(dict.fromkeys(reads))
        (self.readers.submit_ahead if is_ahead else self.readers.submit)(reads)
        return found, reads

    def find(self, wanted: Span) -> list[Span]:
        """The host spans of a device span that is here; none where a part of it is not."""
        eid, mask = self._segments(wanted)
        if self._slots.resident[eid] & mask != mask:
            return []
        return self._slots.spans(eid, mask)

    def withdraw(self, layer: int | None = None, experts: Collection[int] | None = None) -> list[Span]:
        """Give up the host spans of this layer, or of these experts of it, or of any, that were requested ahead and
        that no reader has begun.
        """
        gone = self.readers.withdraw(layer, experts)
        for span in gone:
            del self._loading[span]
            self._release(span)
        return gone

    def arrived(self, span: Span) -> None:
        """A host span has been read."""
        del self._loading[span]
        eid, mask = self._segments(span)
        self._slots.arrived(eid, mask, self._slots.awaited)

    def abandon(self) -> None:
        """Nothing is being read any more; what had not arrived is absent again."""
        self.readers.drain()
        for span in self._loading:
            self._release(span)
        self._loading.clear()

    @property
    def resident_nbytes(self) -> int:
        """Of the segments that are here. Any thread may ask."""
        geometry = self._geometry
        return sum(
            mask.bit_count() * self._slot_nbytes[geometry.size_classes[geometry.layer_of_expert(eid)]]
            for eid, mask in enumerate(self._slots.resident)
        )

    def check(self) -> None:
        """Slots, masks and budget agree."""
        slots = self._slots
        slots.check()
        kept: dict[int, int] = {}
        for cache in self._caches:
            assert cache.used == sum(mask.bit_count() for mask in cache.kept.values()) <= cache.capacity
            kept.update(cache.kept)
        loading = [0] * self._geometry.num_experts
        for span in self._loading:
            eid, mask = self._segments(span)
            loading[eid] |= mask
        assert loading == slots.in_flight
        held = [here | coming for here, coming in zip(slots.resident, slots.in_flight, strict=True)]
        assert [kept.get(eid, 0) for eid in range(self._geometry.num_experts)] == held

    def _segments(self, span: Span) -> tuple[int, int]:
        """The expert id and the mask of its segments."""
        eid = self._geometry.expert_id(span.layer, span.expert)
        return eid, ((1 << span.num_segments) - 1) << span.segment

    def _release(self, span: Span) -> None:
        eid, mask = self._segments(span)
        self._caches[self._geometry.size_classes[span.layer]].drop(eid, mask)
        self._slots.release(eid, mask)

    def _make_room(
        self, cache: Partition, num_segments: int, wanted: int, is_ahead: bool, spared: Container[int]
    ) -> bool:
        short = num_segments - cache.room
        if short <= 0:
            return True
        victims = cache.evict(short, _Protected(wanted, self._slots, lambda e: e in spared or self._is_busy(e)))
        if victims is None:
            if is_ahead or self._loading:
                return False
            self._wait_idle()
            victims = cache.evict(short, _Protected(wanted, self._slots, lambda eid: False))
        assert victims is not None, "the host tier holds at least one token's experts"
        for eid, mask in victims:
            self._slots.release(eid, mask)
        return True


class _Protected:
    """The experts that may not be evicted now, as a container."""

    def __init__(self, wanted: int, slots: SlotTable, is_busy: Callable[[int], bool]) -> None:
        self._wanted, self._slots, self._is_busy = wanted, slots, is_busy

    def __contains__(self, eid: object) -> bool:
        assert isinstance(eid, int)
        return eid == self._wanted or bool(self._slots.in_flight[eid]) or self._is_busy(eid)
