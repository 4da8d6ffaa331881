"""A scheduler whose every answer is checked from outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from expertly.core.messages import Plan, Prediction, RouterRan, Span
from expertly.scheduler.counters import PhaseCounters
from expertly.scheduler.decisions import JournaledScheduler
from expertly.scheduler.slots import bits
from expertly.testing.made_up import ListFuture
from tests.scheduler.drive import mask_of


@dataclass
class Seen:
    """A naive count of one layer in one phase."""

    numbers: Counter[str] = field(default_factory=Counter)
    by_distance: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def agrees(self, counted: PhaseCounters) -> None:
        for name in (
            "loaded_nbytes",
            "prefetched_nbytes",
            "predicted",
            "predicted_needed",
            "predicted_resident",
        ):
            assert getattr(counted, name) == self.numbers[name], name
        for name in (
            "predicted_of",
            "wasted_nbytes",
            "prefetched",
            "prefetched_needed",
            "prefetched_in_time",
            "hits",
            "partial_hits",
            "misses",
        ):
            assert getattr(counted, name) == self.numbers[name], name
        assert counted.by_distance == self.by_distance


class CheckedController(JournaledScheduler):
    """Asserts at every call what a user of the control plane may rely on, from what goes in and comes out."""

    def watch(self, future: ListFuture | None = None) -> CheckedController:
        """Before the first call. `steps` will be those of `future` at which layers began."""
        self.future = future
        self.steps: list[int] = []
        self.memory: dict[tuple[int, int], tuple[int, int]] = {}  # (size class, slot) -> (expert, segment) written last
        self.coming: set[tuple[int, int]] = set()  # slots that a transfer writes
        self.seen = [{True: Seen(), False: Seen()} for _ in self.geometry.layers]
        self.ahead: dict[int, int] = {}  # expert -> mask loaded ahead; its layer has not run
        self.asked: dict[Span, bool] = {}  # in flight ahead -> was decode running?
        self.said: list[dict[int, list[int]]] = [{} for _ in self.geometry.layers]
        self.left: dict[int, int] = {}  # of the running layer: expert -> mask not computed yet
        self.settling: dict[int, int] = {}  # of the running layer: expert -> mask loaded ahead for it
        self.was_asked: dict[Span, bool] = {}  # joined by the running layer -> see `asked`
        self.early: dict[Span, None] = {}  # demanded before its turn, and not here
        self.was_decoding = True
        self.num_joined = self.num_events = self.num_promoted = self.num_early = self.num_stale = 0
        return self

    # -- calls -------------------------------------------------------------------------------------------------

    def begin_layer(self, router: RouterRan, withdrawn: Sequence[Span] = ()) -> Plan:
        layer, full, first = router.layer, self.residency.full, self.geometry.first_expert_id(router.layer)
        resident = list(self.residency.resident)
        assert not withdrawn or not self.finds_late
        for span in withdrawn:
            self._taken_back(span)
            if self._eid(span) in self.ahead:
                self.ahead[self._eid(span)] &= ~mask_of(span)
        held = self._held(withdrawn)
        self.was_decoding = True in router.is_decode
        self._count_router(router, resident)
        ahead = {e: m for e, m in self.ahead.items() if self.geometry.layer_of_expert(e) == layer}
        self.ahead = {e: m for e, m in self.ahead.items() if e not in ahead}
        self.settling, self.resident = ahead, resident
        self.left = dict.fromkeys([first + e for e in router.experts], full)
        if not self.finds_late:  # nothing of it is withdrawn any more
            self._count_loaded_ahead(router)
        if self.future is not None:
            self.steps.append(self.future.step)
        step = super().begin_layer(router, withdrawn)
        if self._turns is None:
            here = {eid: sum(mask_of(p) for p in step.ready if self._eid(p) == eid) for eid in self.left}
            assert here == {eid: resident[eid] for eid in self.left}, "what is here is computed from here"
        self._demanded(step, held)
        for eid in dict(ahead):
            if eid not in self.left:
                assert not self.keeper.unkept(layer, eid) & resident[eid], "a wrong guess frees its place"
        self._promises()
        return step

    def loaded(self, span: Span) -> bool:
        is_awaited = super().loaded(span)
        for slot in self._slots(span):
            self.coming.remove(slot)
        if span in self.asked or span in self.early:
            self.asked.pop(span, None)
            self.early.pop(span, None)
            assert not is_awaited
        self._promises()
        return is_awaited

    def computed(self, span: Span) -> Plan | None:
        eid, mask = self._eid(span), mask_of(span)
        assert self.left[eid] & mask == mask, "every needed segment is computed once"
        for segment, slot in zip(bits(mask), self._slots(span), strict=True):
            assert slot not in self.coming and self.memory[slot] == (eid, segment), "with its own bytes"
        self.left[eid] &= ~mask
        held = self._held()
        step = super().computed(span)
        if step is not None:
            self._demanded(step, held)
        self._promises()
        return step

    def promote(self, spans: Sequence[Span]) -> None:
        router = self._router
        assert router is not None
        for span in spans:
            was_decoding = self.was_asked.pop(span)
            self._count_ahead(span, was_decoding, -1)
            self.settling[self._eid(span)] &= ~mask_of(span)
            self.num_promoted += 1
            is_decode = router.is_decode[router.experts.index(span.expert)]
            nbytes = span.num_segments * self.geometry.segment_nbytes(span.layer)
            self.seen[span.layer][is_decode].numbers["loaded_nbytes"] += nbytes
        super().promote(spans)

    def end_layer(self, withdrawn: Sequence[Span] = ()) -> None:
        assert not any(self.left.values()), "everything needed has been computed"
        assert not self.early, "and awaited"
        router = self._router
        assert router is not None
        for span in withdrawn:
            assert span.layer == router.layer and self._eid(span) not in self.left
            self._taken_back(span)
            self.settling[self._eid(span)] &= ~mask_of(span)
            self.num_stale += 1
        self._count_loaded_ahead(router)
        super().end_layer(withdrawn)
        self.was_asked.clear()
        self.check()
        self._promises()

    def predict(self, prediction: Prediction) -> None:
        super().predict(prediction)
        self.said[prediction.layer][prediction.distance] = prediction.experts

    def load_ahead(self) -> list[Span]:
        kept, held = [dict(cache.kept) for cache in self.caches], self._held()
        passing = list(self.keeper.passing)
        spans = super().load_ahead()
        for span in spans:
            if not self._ahead_evicts or self._eid(span) in self.speculation.likely[span.layer]:
                assert not held[self._eid(span)] & mask_of(span), "no segment is loaded twice"
            self._takes_slots(span)
            self._count_ahead(span, self.was_decoding, 1)
            self.asked[span] = self.was_decoding
            self.ahead[self._eid(span)] = self.ahead.get(self._eid(span), 0) | mask_of(span)
        num_ahead = sum(span.num_segments for span in self.asked)
        num_segments = self.geometry.segments_per_expert
        assert not spans or num_ahead <= max(self.speculation.window, num_segments)
        if not self._ahead_evicts or not self.was_decoding:  # guesses evict nothing
            for cache, before in zip(self.caches, kept, strict=True):
                assert all(cache.kept.get(eid, 0) & mask == mask for eid, mask in before.items())
        is_split, free = self.keeper.is_split, "an expert's worth is free, or a segment where others pass as well"
        for before, now, ring in zip(passing, self.keeper.passing, self.keeper.ring, strict=True):
            most = ring - (1 if is_split else num_segments)
            assert now == before or ((is_split or not self._ahead_evicts) and now <= most), free
        self._promises()
        return spans

    def abandon(self) -> None:
        super().abandon()
        self.coming.clear()
        self.ahead.clear()
        self.asked.clear()
        self.left.clear()
        self.settling.clear()
        self.was_asked.clear()
        self.early.clear()
        for said in self.said:
            said.clear()
        self.check()

    # -- what is promised --------------------------------------------------------------------------------------

    def _promises(self) -> None:
        self.num_events += 1
        if not self.num_events % 7:  # they look at every slot
            self.keeper.check() if self.left else self.check()
        held = self._held()
        for eid, mask in self.ahead.items():
            assert held[eid] & mask == mask, "what was loaded ahead stays until its layer has run"
        for eid, mask in self.left.items():
            passed = self.residency.full & ~mask & ~self.ahead.get(eid, 0)
            assert not self.keeper.unkept(self._layer(eid), eid) & passed, "what has passed is free"

    def _demanded(self, step: Plan, held: list[int]) -> None:
        router = self._router
        assert router is not None
        for span in step.joined:
            if span in self.early:
                del self.early[span]
                continue
            self.was_asked[span] = self.asked.pop(span)  # a demand joins what is in flight
            self.num_joined += 1
        for span in step.asked:
            self.early[span] = None
            self.num_early += 1
        for span in [*step.loads, *step.asked]:
            is_held = self.residency.resident if span in self.early else held  # it may have gone for the one before
            assert not is_held[self._eid(span)] & mask_of(span), "no segment is loaded twice"
            self._takes_slots(span)
            is_decode = router.is_decode[router.experts.index(span.expert)]
            nbytes = span.num_segments * self.geometry.segment_nbytes(span.layer)
            self.seen[span.layer][is_decode].numbers["loaded_nbytes"] += nbytes

    def _count_router(self, router: RouterRan, resident: list[int]) -> None:
        layer, full, first = router.layer, self.residency.full, self.geometry.first_expert_id(router.layer)
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

    def _count_loaded_ahead(self, router: RouterRan) -> None:
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
                numbers["prefetched_in_time"] += eid in needed and self.resident[eid] == self.residency.full
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
        self._forget(span)
        self._count_ahead(span, self.asked.pop(span), -1)

    def _takes_slots(self, span: Span) -> None:
        eid, pool = self._eid(span), self.residency.pool_of(span.layer)
        for segment, slot in zip(bits(mask_of(span)), self._slots(span), strict=True):
            assert slot[1] < pool.num_slots, "never more slots than the budget"
            assert slot not in self.coming, "a slot is written by one transfer"
            self.memory[slot] = (eid, segment)
            self.coming.add(slot)

    def _forget(self, span: Span) -> None:
        for slot in self._slots(span):
            self.coming.remove(slot)

    def _held(self, without: Sequence[Span] = ()) -> list[int]:
        held = [here | coming for here, coming in zip(self.residency.resident, self.residency.loading, strict=True)]
        for span in without:
            held[self._eid(span)] &= ~mask_of(span)
        return held

    def _slots(self, span: Span) -> list[tuple[int, int]]:
        size_class = self.geometry.size_classes[span.layer]
        return [(size_class, span.slot + i) for i in range(span.num_segments)]

    def _eid(self, span: Span) -> int:
        return self.geometry.expert_id(span.layer, span.expert)

    def _layer(self, eid: int) -> int:
        return self.geometry.layer_of_expert(eid)
