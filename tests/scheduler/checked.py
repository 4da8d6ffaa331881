"""A scheduler whose every answer is checked from outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from expertly.core.messages import Plan, Prediction, RouterRan, Span
from expertly.scheduler.cache import RESIDENT
from expertly.scheduler.scheduler import Scheduler

COUNTED = (
    *("loaded_nbytes", "prefetched_nbytes", "wasted_nbytes", "hits", "partial_hits", "misses"),
    *("predicted", "predicted_needed", "predicted_resident", "predicted_of"),
    *("prefetched", "prefetched_needed", "prefetched_in_time"),
)


class CheckedScheduler(Scheduler):
    """Asserts at every call what a user of the scheduler may rely on, from what goes in and comes out."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.memory: dict[tuple[int, int], int] = {}  # (size class, slot) -> the unit written last
        self.coming: set[tuple[int, int]] = set()  # slots that a transfer writes
        self.seen: list[dict[bool, Counter[str]]] = [{True: Counter(), False: Counter()} for _ in self.geometry.layers]
        self.ahead: set[int] = set()  # units prefetched; their layer has not run
        self.prefetching: dict[int, bool] = {}  # units in flight ahead -> was decode running?
        self.predicted: list[dict[int, list[int]]] = [{} for _ in self.geometry.layers]
        self.left: set[int] = set()  # units of the running layer that are not computed yet
        self.was_decoding = True
        self.num_events = 0
        self.happened: Counter[str] = Counter()

    # -- calls -------------------------------------------------------------------------------------------------

    def begin_layer(self, router: RouterRan, cancelled: Sequence[Span] = ()) -> Plan:
        layer, cache = router.layer, self.cache
        num_parts_there = cache.residency()
        resident = [num == cache.num_parts for num in num_parts_there]
        for unit in self._units(cancelled):
            self.coming.remove(self._slot(unit))
            self._count_ahead(unit, self.prefetching.pop(unit), -1)
            self.ahead.discard(unit)
        held = self._held() - set(self._units(cancelled))
        self.was_decoding = True in router.is_decode
        self._count_router(router, num_parts_there)
        ended = {unit for unit in self.ahead if self.geometry.layer_of[self._expert(unit)] == layer}
        self.ahead -= ended
        first = self.geometry.first_ids[layer]
        self.left = {unit for expert in router.experts for unit in cache.units(first + expert)}
        self._count_prefetched(router, ended, resident)
        plan = super().begin_layer(router, cancelled)
        there = {unit for unit in self.left if cache.state[unit] == RESIDENT}
        held_back = {unit for units in self.held.values() for unit in units}
        assert set(self._units(plan.ready)) | held_back == there, "what is there is computed from there"
        self._demanded(plan, held)
        wrong = {unit for unit in ended - self.left if cache.state[unit] == RESIDENT}
        assert wrong <= self._kept(), "a wrong prefetch frees its slot"
        self._promises()
        return plan

    def loaded(self, span: Span) -> Sequence[Span] | None:
        units = list(self._units([span]))
        slots = [self._slot(unit) for unit in units]
        computable = super().loaded(span)
        self.coming.difference_update(slots)
        for unit in units:
            assert (unit in self.prefetching) == (computable is None)
            self.prefetching.pop(unit, None)
        self._promises()
        return computable

    def computed(self, spans: Sequence[Span]) -> Sequence[Span]:
        for unit in self._units(spans):
            slot = self._slot(unit)
            assert slot not in self.coming and self.memory[slot] == unit, "with its own bytes"
            self.left.remove(unit)  # every needed unit is computed once
        held = self._held()
        loads = super().computed(spans)
        self._demanded(Plan(loads=list(loads)), held)
        self._promises()
        return loads

    def end_layer(self) -> None:
        assert not self.left, "everything needed has been computed"
        super().end_layer()
        self.check()
        self._promises()

    def predict(self, prediction: Prediction) -> None:
        super().predict(prediction)
        self.predicted[prediction.layer][prediction.distance] = prediction.experts

    def prefetch(self) -> list[Span]:
        kept, held, pools = self._kept(), self._held(), self.cache.pools
        staged = [pool.num_staged for pool in pools]
        spans = super().prefetch()
        for unit in self._units(spans):
            assert unit not in held or unit in kept, "what is prefetched was absent, or is evicted before"
            self._takes_slot(unit)
            self._count_ahead(unit, self.was_decoding, 1)
            self.prefetching[unit] = self.was_decoding
            if self._expert(unit) in waiting(self):
                self.ahead.add(unit)
            else:
                assert unit in self._kept(), "else new quotas have room for it"
                self.happened["of new quotas"] += 1
        num_parts = self.cache.num_parts
        assert not spans or len(self.prefetching) <= max(self.queue.window, num_parts)
        evicts = self.queue.evicts and (self.was_decoding or self.prompts_evict)
        assert evicts or kept <= self._kept()
        is_split = self.cache.is_split
        for before, pool in zip(staged, pools, strict=True):
            most = pool.staging - (1 if is_split else num_parts)
            assert pool.num_staged in (before, *(range(most + 1) if is_split or not evicts else ())), (
                "room for a load stays free"
            )
        self._promises()
        return spans

    def abandon(self) -> None:
        super().abandon()
        for noted in (self.coming, self.ahead, self.prefetching, self.left, *self.predicted):
            noted.clear()
        self.check()

    # -- what is promised --------------------------------------------------------------------------------------

    def _promises(self) -> None:
        self.num_events += 1
        if not self.num_events % 7:  # they look at every slot
            self.check()
        held, kept = self._held(), self._kept()
        assert self.ahead <= held, "what was prefetched stays until its layer has run"
        router = self.router
        if router is not None:
            first = self.geometry.first_ids[router.layer]
            needed = {unit for expert in router.experts for unit in self.cache.units(first + expert)}
            assert needed & held <= kept | self.left | self.ahead, "what was staged and used is free"

    def _demanded(self, plan: Plan, held: set[int]) -> None:
        router = self.router
        assert router is not None
        for unit in self._units(plan.in_flight):
            del self.prefetching[unit]  # only what is in flight is awaited
            self.happened["awaited"] += 1
        for span in plan.loads:
            for unit in self._units([span]):
                assert unit not in held, "no unit is loaded twice"
                self._takes_slot(unit)
            is_decode = router.is_decode[router.experts.index(span.expert)]
            nbytes = span.num_segments * self.geometry.unit_nbytes[span.layer]
            self.seen[span.layer][is_decode]["loaded_nbytes"] += nbytes

    def _count_router(self, router: RouterRan, num_parts_there: list[int]) -> None:
        layer, num_parts, first = router.layer, self.cache.num_parts, self.geometry.first_ids[router.layer]
        numbers = self.seen[layer][self.was_decoding]
        needed = {e for e, num in zip(router.experts, router.num_tokens, strict=True) if num}
        for experts in self.predicted[layer].values():
            right = [e for e in experts if e in needed]
            numbers["predicted"] += len(experts)
            numbers["predicted_needed"] += len(right)
            numbers["predicted_of"] += len(needed)
            numbers["predicted_resident"] += sum(num_parts_there[first + e] == num_parts for e in experts)
        self.predicted[layer].clear()
        for expert, num, is_decode in zip(router.experts, router.num_tokens, router.is_decode, strict=True):
            if num:
                there = num_parts_there[first + expert]
                kind = "hits" if there == num_parts else "partial_hits" if there else "misses"
                self.seen[layer][is_decode][kind] += 1

    def _count_prefetched(self, router: RouterRan, ended: set[int], resident: list[bool]) -> None:
        """What of it did come; it was in time if it was there when the router ran."""
        numbers, first = self.seen[router.layer][self.was_decoding], self.geometry.first_ids[router.layer]
        needed = {first + e for e, num in zip(router.experts, router.num_tokens, strict=True) if num}
        for eid, num in Counter(map(self._expert, ended)).items():
            numbers["prefetched"] += 1
            numbers["prefetched_needed"] += eid in needed
            numbers["prefetched_in_time"] += eid in needed and resident[eid]
            if eid not in needed:
                numbers["wasted_nbytes"] += num * self.geometry.unit_nbytes[router.layer]

    def counts_agree(self) -> None:
        """The counters are the naive count."""
        for counters, seen in zip(self.counters, self.seen, strict=True):
            for name in COUNTED:
                assert getattr(counters.decode, name) == seen[True][name], name
                assert getattr(counters.prefill, name) == seen[False][name], name

    # -- helpers -----------------------------------------------------------------------------------------------

    def _count_ahead(self, unit: int, is_decode: bool, sign: int) -> None:
        layer = self.geometry.layer_of[self._expert(unit)]
        for name in ("loaded_nbytes", "prefetched_nbytes"):
            self.seen[layer][is_decode][name] += sign * self.geometry.unit_nbytes[layer]

    def _takes_slot(self, unit: int) -> None:
        slot = self._slot(unit)
        assert slot[1] < self.cache.pools[slot[0]].num_slots, "never more slots than the budget"
        assert slot not in self.coming, "a slot is written by one transfer"
        self.memory[slot] = unit
        self.coming.add(slot)

    def _held(self) -> set[int]:
        return {unit for unit, slot in enumerate(self.cache.slot) if slot >= 0}

    def _kept(self) -> set[int]:
        return {unit for unit, is_kept in enumerate(self.cache.kept) if is_kept}

    def _units(self, spans: Iterable[Span]) -> Iterable[int]:
        """The units of these spans, whose slots are those that the table says."""
        for span in spans:
            for number, unit in enumerate(self.cache.units_of(span)):
                assert self.cache.slot[unit] in (-1, span.slot + number)
                yield unit

    def _slot(self, unit: int) -> tuple[int, int]:
        layer = self.geometry.layer_of[self._expert(unit)]
        return self.geometry.size_classes[layer], self.cache.slot[unit]

    def _expert(self, unit: int) -> int:
        return unit // self.cache.num_parts


def waiting(control: Scheduler) -> set[int]:
    """Experts that were prefetched for layers that have not run."""
    return {eid for forecast in control.queue.forecasts.values() for eid in forecast.prefetched}
