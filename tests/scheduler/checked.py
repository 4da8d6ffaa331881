"""A scheduler whose every answer is checked from outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from expertly.core.messages import Plan, Prediction, RouterRan, Span
from expertly.scheduler.counters import PhaseCounters
from expertly.scheduler.scheduler import Scheduler
from expertly.scheduler.slots import bits
from expertly.testing.made_up import ListFuture


def mask_of(span: Span) -> int:
    return ((1 << span.num_segments) - 1) << span.segment


@dataclass
class Seen:
    """A naive count of one layer in one phase."""

    numbers: Counter[str] = field(default_factory=Counter)
    by_distance: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def agrees(self, counted: PhaseCounters) -> None:
        for name in (
            *("loaded_nbytes", "prefetched_nbytes", "wasted_nbytes", "hits", "partial_hits", "misses"),
            *("predicted", "predicted_needed", "predicted_resident", "predicted_of"),
            *("prefetched", "prefetched_needed", "prefetched_in_time"),
        ):
            assert getattr(counted, name) == self.numbers[name], name
        assert counted.by_distance == self.by_distance


class CheckedScheduler(Scheduler):
    """Asserts at every call what a user of the control plane may rely on, from what goes in and comes out."""

    def __init__(self, *arguments: Any, future: ListFuture | None = None, **named: Any) -> None:
        """`steps` will be those of `future` at which layers began."""
        super().__init__(*arguments, **named)
        self.computed = self._computed
        self._evicts_ahead = named.get("ahead", "cache") == "cache"
        self.future = future
        self.steps: list[int] = []
        self.memory: dict[tuple[int, int], tuple[int, int]] = {}  # (size class, slot) -> (expert, segment) written last
        self.coming: set[tuple[int, int]] = set()  # slots that a transfer writes
        self.seen = [{True: Seen(), False: Seen()} for _ in self.geometry.layers]
        self.ahead: dict[int, int] = {}  # expert -> mask prefetched; its layer has not run
        self.prefetching: dict[Span, bool] = {}  # in flight ahead -> was decode running?
        self.said: list[dict[int, list[int]]] = [{} for _ in self.geometry.layers]
        self.left: dict[int, int] = {}  # of the running layer: expert -> mask not computed yet
        self.settling: dict[int, int] = {}  # of the running layer: expert -> mask prefetched for it
        self.was_prefetching: dict[Span, bool] = {}  # awaited by the running layer -> see `prefetching`
        self.early: dict[Span, None] = {}  # demanded before its turn, and not here
        self.was_decoding = True
        self.num_events = 0
        self.happened: Counter[str] = Counter()

    # -- calls -------------------------------------------------------------------------------------------------

    def begin_layer(self, router: RouterRan, cancelled: Sequence[Span] = ()) -> Plan:
        layer, full, first = router.layer, self.slots.full, self.geometry.first_expert_id(router.layer)
        resident = list(self.slots.resident)
        assert not cancelled or not self.finds_late
        for span in cancelled:
            self._taken_back(span)
            if self._eid(span) in self.ahead:
                self.ahead[self._eid(span)] &= ~mask_of(span)
        held = self._held(cancelled)
        self.was_decoding = True in router.is_decode
        self._count_router(router, resident)
        ahead = {e: m for e, m in self.ahead.items() if self.geometry.layer_of_expert(e) == layer}
        self.ahead = {e: m for e, m in self.ahead.items() if e not in ahead}
        self.settling, self.resident = ahead, resident
        self.left = dict.fromkeys([first + e for e in router.experts], full)
        if not self.finds_late:  # nothing of it is cancelled any more
            self._count_prefetched(router)
        if self.future is not None:
            self.steps.append(self.future.step)
        plan = super().begin_layer(router, cancelled)
        if not self._takes_turns:
            here = {eid: sum(mask_of(p) for p in plan.ready if self._eid(p) == eid) for eid in self.left}
            assert here == {eid: resident[eid] for eid in self.left}, "what is here is computed from here"
        self._demanded(plan, held)
        for eid in dict(ahead):
            if eid not in self.left:
                assert not self.cache.staged_of(layer, eid) & resident[eid], "a wrong prefetch frees its slot"
        self._promises()
        return plan

    def loaded(self, span: Span) -> bool:
        is_awaited = super().loaded(span)
        for slot in self._slots(span):
            self.coming.remove(slot)
        if span in self.prefetching or span in self.early:
            self.prefetching.pop(span, None)
            self.early.pop(span, None)
            assert not is_awaited
        self._promises()
        return is_awaited

    def _computed(self, spans: Sequence[Span]) -> Plan | None:
        for span in spans:
            eid, mask = self._eid(span), mask_of(span)
            assert self.left[eid] & mask == mask, "every needed segment is computed once"
            for segment, slot in zip(bits(mask), self._slots(span), strict=True):
                assert slot not in self.coming and self.memory[slot] == (eid, segment), "with its own bytes"
            self.left[eid] &= ~mask
        held = self._held()
        plan = self._running.computed(spans)
        if plan is not None:
            self._demanded(plan, held)
        self._promises()
        return plan

    def promote(self, spans: Sequence[Span]) -> None:
        router = self._running.router
        assert router is not None
        for span in spans:
            was_decoding = self.was_prefetching.pop(span)
            self._count_ahead(span, was_decoding, -1)
            self.settling[self._eid(span)] &= ~mask_of(span)
            self.happened["promoted"] += 1
            is_decode = router.is_decode[router.experts.index(span.expert)]
            nbytes = span.num_segments * self.geometry.segment_nbytes(span.layer)
            self.seen[span.layer][is_decode].numbers["loaded_nbytes"] += nbytes
        super().promote(spans)

    def end_layer(self, cancelled: Sequence[Span] = ()) -> None:
        assert not any(self.left.values()), "everything needed has been computed"
        assert not self.early, "and awaited"
        router = self._running.router
        assert router is not None
        for span in cancelled:
            assert span.layer == router.layer and self._eid(span) not in self.left
            self._taken_back(span)
            self.settling[self._eid(span)] &= ~mask_of(span)
            self.happened["cancelled late"] += 1
        self._count_prefetched(router)
        super().end_layer(cancelled)
        self.was_prefetching.clear()
        self.check()
        self._promises()

    def predict(self, prediction: Prediction) -> None:
        super().predict(prediction)
        self.said[prediction.layer][prediction.distance] = prediction.experts

    def prefetch(self) -> list[Span]:
        kept, held = [dict(one.kept) for one in self.cache.partitions], self._held()
        staged = list(self.cache.staged)
        spans = super().prefetch()
        for span in spans:
            if not self._evicts_ahead or self._eid(span) in self.queue._likely[span.layer]:
                assert not held[self._eid(span)] & mask_of(span), "no segment is loaded twice"
            self._takes_slots(span)
            self._count_ahead(span, self.was_decoding, 1)
            self.prefetching[span] = self.was_decoding
            self.ahead[self._eid(span)] = self.ahead.get(self._eid(span), 0) | mask_of(span)
        num_ahead = sum(span.num_segments for span in self.prefetching)
        num_segments = self.geometry.segments_per_expert
        assert not spans or num_ahead <= max(self.queue.window, num_segments)
        evicts = self._evicts_ahead and (self.was_decoding or self.cache.prompts_evict)
        if not evicts:
            for one, before in zip(self.cache.partitions, kept, strict=True):
                assert all(one.kept.get(eid, 0) & mask == mask for eid, mask in before.items())
        is_split = self.cache.is_split
        for before, now, staging in zip(staged, self.cache.staged, self.cache.staging, strict=True):
            most = staging - (1 if is_split else num_segments)
            assert now == before or ((is_split or not evicts) and now <= most), "room for a load stays free"
        self._promises()
        return spans

    def abandon(self) -> None:
        super().abandon()
        for noted in (
            *(self.coming, self.ahead, self.prefetching, self.left, self.settling, self.was_prefetching, self.early),
            *self.said,
        ):
            noted.clear()
        self.check()

    # -- what is promised --------------------------------------------------------------------------------------

    def _promises(self) -> None:
        self.num_events += 1
        if not self.num_events % 7:  # they look at every slot
            self.cache.check() if self.left else self.check()
        held = self._held()
        for eid, mask in self.ahead.items():
            assert held[eid] & mask == mask, "what was prefetched stays until its layer has run"
        for eid, mask in self.left.items():
            passed = self.slots.full & ~mask & ~self.ahead.get(eid, 0)
            assert not self.cache.staged_of(self._layer(eid), eid) & passed, "what was staged and used is free"

    def _demanded(self, plan: Plan, held: list[int]) -> None:
        router = self._running.router
        assert router is not None
        for span in plan.in_flight:
            parts = [one for one in (*self.early, *self.prefetching) if self._contains(span, one)]
            assert sum(mask_of(one) for one in parts) == mask_of(span), "only what is in flight is awaited"
            for one in parts:
                if one in self.early:
                    del self.early[one]
                else:
                    self.was_prefetching[one] = self.prefetching.pop(one)
                    self.happened["awaited"] += 1
        for span in plan.requested:
            self.early[span] = None
            self.happened["requested"] += 1
        for span in [*plan.loads, *plan.requested]:
            is_held = self.slots.resident if span in self.early else held  # it may have gone for the one before
            assert not is_held[self._eid(span)] & mask_of(span), "no segment is loaded twice"
            self._takes_slots(span)
            is_decode = router.is_decode[router.experts.index(span.expert)]
            nbytes = span.num_segments * self.geometry.segment_nbytes(span.layer)
            self.seen[span.layer][is_decode].numbers["loaded_nbytes"] += nbytes

    def _count_router(self, router: RouterRan, resident: list[int]) -> None:
        layer, full, first = router.layer, self.slots.full, self.geometry.first_expert_id(router.layer)
        seen = self.seen[layer][self.was_decoding]
        numbers = seen.numbers
        needed = {e for e, num in zip(router.experts, router.num_tokens, strict=True) if num}
        for distance, experts in self.said[layer].items():
            right = [e for e in experts if e in needed]
            numbers["predicted"] += len(experts)
            numbers["predicted_needed"] += len(right)
            numbers["predicted_of"] += len(needed)
            there = sum(resident[first + e] == full for e in experts)
            numbers["predicted_resident"] += there
            before = seen.by_distance.get(distance, (0, 0, 0))
            seen.by_distance[distance] = (before[0] + len(experts), before[1] + len(right), before[2] + there)
        self.said[layer].clear()
        for expert, num, is_decode in zip(router.experts, router.num_tokens, router.is_decode, strict=True):
            if num:
                mask = resident[first + expert]
                kind = "hits" if mask == full else "partial_hits" if mask else "misses"
                self.seen[layer][is_decode].numbers[kind] += 1

    def _count_prefetched(self, router: RouterRan) -> None:
        """What of it did come; it was in time if it was here when the router spoke."""
        numbers = self.seen[router.layer][self.was_decoding].numbers
        first = self.geometry.first_expert_id(router.layer)
        needed = {first + e for e, num in zip(router.experts, router.num_tokens, strict=True) if num}
        for eid, mask in self.settling.items():
            if mask:
                numbers["prefetched"] += 1
                numbers["prefetched_needed"] += eid in needed
                if eid not in needed:
                    numbers["wasted_nbytes"] += mask.bit_count() * self.geometry.segment_nbytes(router.layer)
                numbers["prefetched_in_time"] += eid in needed and self.resident[eid] == self.slots.full
        self.settling = {}

    def counts_agree(self) -> None:
        """The counters are the naive count."""
        for counters, seen in zip(self.counters, self.seen, strict=True):
            seen[True].agrees(counters.decode)
            seen[False].agrees(counters.prefill)

    # -- helpers -----------------------------------------------------------------------------------------------

    def _count_ahead(self, span: Span, is_decode: bool, sign: int) -> None:
        nbytes = sign * span.num_segments * self.geometry.segment_nbytes(span.layer)
        numbers = self.seen[span.layer][is_decode].numbers
        numbers["loaded_nbytes"] += nbytes
        numbers["prefetched_nbytes"] += nbytes

    def _taken_back(self, span: Span) -> None:
        """A span that was predicted will not come."""
        self.coming.difference_update(self._slots(span))
        self._count_ahead(span, self.prefetching.pop(span), -1)

    def _takes_slots(self, span: Span) -> None:
        eid, pool = self._eid(span), self.slots.pools[self.geometry.size_classes[span.layer]]
        for segment, slot in zip(bits(mask_of(span)), self._slots(span), strict=True):
            assert slot[1] < pool.num_slots, "never more slots than the budget"
            assert slot not in self.coming, "a slot is written by one transfer"
            self.memory[slot] = (eid, segment)
            self.coming.add(slot)

    def _held(self, without: Sequence[Span] = ()) -> list[int]:
        held = [here | coming for here, coming in zip(self.slots.resident, self.slots.in_flight, strict=True)]
        for span in without:
            held[self._eid(span)] &= ~mask_of(span)
        return held

    def _contains(self, span: Span, part: Span) -> bool:
        is_within = mask_of(part) & mask_of(span) == mask_of(part) and self._eid(part) == self._eid(span)
        return is_within and part.slot - span.slot == part.segment - span.segment

    def _slots(self, span: Span) -> list[tuple[int, int]]:
        size_class = self.geometry.size_classes[span.layer]
        return [(size_class, span.slot + i) for i in range(span.num_segments)]

    def _eid(self, span: Span) -> int:
        return self.geometry.expert_id(span.layer, span.expert)

    def _layer(self, eid: int) -> int:
        return self.geometry.layer_of_expert(eid)
