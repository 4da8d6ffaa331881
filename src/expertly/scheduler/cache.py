"""What a device keeps between layers, what it only stages for a layer, and who has which slots."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import RouterRan, Span
from expertly.policies.admission import Worth
from expertly.policies.allocation.uniform import whole_tops
from expertly.policies.eviction import EvictionPolicy, MakePolicy, ScoredPolicy
from expertly.scheduler.budget import Budget, check_quotas
from expertly.scheduler.counters import LayerCounters
from expertly.scheduler.slots import SlotTable, bits, highest_bits, lowest_bits

_NONE_REFUSED = 1 << 62


class Partition:
    """The cache of one layer, or of all layers of a size class. It counts segments; its policy orders experts."""

    def __init__(self, capacity: int, policy: EvictionPolicy) -> None:
        self.evicts_whole = False
        """Whether a victim loses all its segments (see `Cache.expect_prefetches`)."""
        self.capacity = capacity
        self.policy = policy
        self.used = 0
        self.kept: dict[int, int] = {}  # expert id -> mask of kept segments

    @property
    def room(self) -> int:
        return self.capacity - self.used

    def keep(self, expert: int, mask: int) -> None:
        """Keep segments that are not kept; there is room for them."""
        before = self.kept.get(expert, 0)
        assert not before & mask
        self.used += mask.bit_count()
        assert self.used <= self.capacity, "a partition never exceeds its capacity"
        self.kept[expert] = before | mask
        if not before:
            self.policy.admitted(expert)

    def drop(self, expert: int, mask: int) -> None:
        left = self.kept[expert] & ~mask
        self.used -= mask.bit_count()
        if left:
            self.kept[expert] = left
        else:
            del self.kept[expert]
            self.policy.removed(expert)

    def evict(self, num_segments: int, protected: Container[int]) -> list[tuple[int, int]] | None:
        """Drop so many segments of experts outside `protected`; returns (expert, mask) of each victim, or None, with
        nothing dropped, if there are not enough. Unless whole experts go, a victim loses its last segments first and
        keeps its top.
        """
        if num_segments > self.used:
            return None
        victims, missing = self._victims(num_segments, protected)
        if missing:
            return None
        for expert, mask in victims:
            self.drop(expert, mask)
        return victims

    def shrink(self, capacity: int, protected: Container[int]) -> list[tuple[int, int]]:
        """Take this capacity, or the least above it that `protected` allows. Returns the victims, as `evict` does."""
        victims, missing = self._victims(max(0, self.used - capacity), protected)
        for expert, mask in victims:
            self.drop(expert, mask)
        self.capacity = capacity + missing
        return victims

    def _victims(self, num_segments: int, protected: Container[int]) -> tuple[list[tuple[int, int]], int]:
        """The victims for so many segments, and how many segments are then still lacking."""
        victims: list[tuple[int, int]] = []
        if not num_segments:
            return victims, 0
        missing = num_segments
        for expert in self.policy.victims(protected):
            mask = self.kept[expert]
            count = mask.bit_count()
            if count > missing and not self.evicts_whole:
                mask = sum(1 << segment for segment in bits(mask)[count - missing :])
                count = missing
            victims.append((expert, mask))
            missing -= count
            if missing <= 0:
                break
        return victims, max(0, missing)


class Cache:
    """Owns the slot table and the partitions. A segment with a slot is either kept (a partition counts it) or staged
    (its slot is freed once its layer has used it). Experts are dense ids, masks have a bit a segment.
    """

    def __init__(
        self,
        geometry: Geometry,
        budget: Budget,
        make_policy: MakePolicy,
        scope: str,
        counters: list[LayerCounters],
        tops: Sequence[int] | None = None,
        *,
        prompts_evict: bool = False,
        worth: Worth | None = None,
    ) -> None:
        """`tops`: for each layer, how many segments of an expert it keeps, from its top; None: whole experts.
        `prompts_evict`: whether prompts evict (prefill "evict" of the Scheduler). `worth`: of the admission; None:
        scores are compared as they are.
        """
        self._worth = worth
        self.prompts_evict = prompts_evict
        self._geometry = geometry
        self._budget = budget
        self._counters = counters
        self._classes = geometry.size_classes
        self._layer_of = [geometry.layer_of_expert(eid) for eid in range(geometry.num_experts)]
        self._segment_nbytes = [geometry.segment_nbytes(layer) for layer in range(geometry.num_layers)]
        self.slots = SlotTable(geometry, budget.pool_slots(), in_parts=tops is not None)
        self.is_split = tops is not None
        """Whether layers keep parts of experts. Then quotas hold whole tops; the rest is for staging."""
        self.tops = [self.slots.full] * geometry.num_layers if tops is None else [top_mask(num) for num in tops]
        """For each layer, the segments that it keeps of a kept expert; the others are staged."""
        self.quotas = list(budget.layer_quotas)
        """For each layer, in segments: the capacity of its partition, where it has its own."""
        if tops is not None:
            assert scope == "layer", "a cache over all layers has no splits"
            every = zip(self.quotas, tops, geometry.layers, strict=True)
            self.quotas = [whole_tops(quota, top, layer.num_experts) for quota, top, layer in every]
        self.staging = list(budget.staging_slots)
        """For each size class, the slots that belong to no quota."""
        self._find_staging()
        if scope == "layer":
            self.partitions = [
                Partition(quota, make_policy(quota // top.bit_count(), [layer]))
                for layer, (quota, top) in enumerate(zip(self.quotas, self.tops, strict=True))
            ]
            """By layer."""
        else:
            shared = [
                Partition(num, make_policy(num // geometry.segments_per_expert, geometry.layers_of_class(size_class)))
                for size_class, num in enumerate(budget.kept_slots)
            ]
            self.partitions = [shared[size_class] for size_class in self._classes]
        self.distinct_partitions = list({id(one): one for one in self.partitions}.values())
        self.targets: list[int] | None = None
        """The quotas to reach, where they differ from `quotas`."""
        self.staged = [0] * geometry.num_size_classes
        """For each size class, the segments that have slots and are not kept."""
        self._unfilled = list(self.quotas)  # of each layer, segments below its quota; below 0: above it
        self._refused = _NONE_REFUSED  # evicting so many segments failed for the running layer: more would, too
        self.is_decoding = True
        """Whether the running layer, or the last one, serves decode. Evictions count in its phase."""
        self.may_evict = True
        """Whether prefetches may evict now."""

    def expect_prefetches(self) -> None:
        """Something is predicted: from now on experts come segment by segment, and some segments are cancelled. So
        victims go whole: single free slots would scatter later experts over many spans, each of which costs a launch.
        Where a layer keeps parts of experts, victims still go in parts.
        """
        self._choose_whole_or_parts()

    def _choose_whole_or_parts(self) -> None:
        for partition, top in zip(self.partitions, self.tops, strict=True):
            partition.evicts_whole = top == self.slots.full

    def begin(self, is_decoding: bool) -> None:
        """Another layer runs: what it may evict is not known yet."""
        self.is_decoding = is_decoding
        self.may_evict = is_decoding or self.prompts_evict
        self._refused = _NONE_REFUSED

    def not_kept(self, layer: int, eid: int) -> int:
        """Segments that are not kept, with a slot or without."""
        return self.slots.full & ~self.partitions[layer].kept.get(eid, 0)

    def staged_of(self, layer: int, eid: int) -> int:
        """Segments with a slot that are not kept."""
        held = self.slots.resident[eid] | self.slots.in_flight[eid]
        return held & ~self.partitions[layer].kept.get(eid, 0)

    def staging_room(self, layer: int) -> int:
        """Segments that may be staged beside those that are."""
        size_class = self._classes[layer]
        return max(0, self.staging[size_class] - self.staged[size_class])

    # -- keeping and evicting ----------------------------------------------------------------------------------

    def keep(self, layer: int, eid: int, mask: int) -> None:
        """Keep these segments, of which some may be staged; the partition has room."""
        if self.staged[self._classes[layer]]:
            self.staged[self._classes[layer]] -= (self.staged_of(layer, eid) & mask).bit_count()
        self.partitions[layer].keep(eid, mask)
        self._unfilled[layer] -= mask.bit_count()

    def keep_no_more(self, layer: int, eid: int, mask: int) -> None:
        """Take back that segments are kept, which have no slots yet."""
        self.partitions[layer].drop(eid, mask)
        self._unfilled[layer] += mask.bit_count()

    def admit(self, layer: int, eid: int, mask: int, protected: Container[int] | None) -> int:
        """Keep what can be kept of `mask`, which is not kept yet; returns the part that now is. Evicts experts outside
        `protected`; with None it evicts nothing and fills what is free of the layer's quota.
        """
        mask &= self.tops[layer]
        count = mask.bit_count()
        if protected is None:
            room = max(0, min(self.partitions[layer].room, self._unfilled[layer]))
        else:
            room = self.make_room(layer, count, protected)
        if room < count:
            mask = lowest_bits(mask, room)
        if mask:
            self.keep(layer, eid, mask)
        return mask

    def make_room(self, layer: int, count: int, protected: Container[int]) -> int:
        """Evict so that `count` segments fit, or nothing if they cannot. Returns the room that there is then."""
        partition = self.partitions[layer]
        missing = count - (partition.capacity - partition.used)
        if 0 < missing < self._refused:
            victims = partition.evict(missing, protected)
            if victims is None:
                self._refused = missing
            else:
                for victim, gone in victims:
                    self._evicted(victim, gone)
        return partition.capacity - partition.used

    def admit_best(self, router: RouterRan, needed: list[int], upcoming: Iterable[int]) -> dict[int, int]:
        """Keep the most valuable of the kept and the needed experts; returns the kept mask of each needed one. The rest
        is staged until it is computed: at most as many segments that were kept as there are free staging slots. Never
        evicts `upcoming`.
        """
        layer = router.layer
        partition, top = self.partitions[layer], self.tops[layer]
        policy, kept = partition.policy, partition.kept
        assert isinstance(policy, ScoredPolicy), "an admission that weighs scores needs them"
        policy.needed(needed, router)
        wanted: dict[int, int] = {}
        excess = partition.used - partition.capacity
        for eid in needed:
            here = kept.get(eid, 0)
            wanted[eid] = top | here  # it may hold more than the top, from before the tops changed
            excess += (top & ~here).bit_count()
        if excess > 0:
            others = policy.scored_victims({*needed, *upcoming})
            other = next(others, None)
            scores = policy.scores(needed)
            if self._worth is not None:
                scores = self._worth(scores, needed, kept)
            own = sorted(zip(scores, needed, strict=True), reverse=True)
            can_stage = self.staging_room(layer)
            while excess and (own or other):
                if not own or (other and other <= own[-1]):
                    assert other is not None
                    eid = other[1]
                    gone = highest_bits(kept[eid], excess)
                    partition.drop(eid, gone)
                    self._evicted(eid, gone)
                    other = next(others, None)
                else:
                    eid = own.pop()[1]
                    new = top & ~kept.get(eid, 0)
                    gone = highest_bits(new | highest_bits(wanted[eid] & ~new, can_stage), excess)
                    wanted[eid] &= ~gone
                    can_stage -= (gone & ~new).bit_count()
                excess -= gone.bit_count()
            for eid, mask in wanted.items():
                staged = kept.get(eid, 0) & ~mask
                if staged:
                    self._stage(layer, eid, staged)
        for eid, mask in wanted.items():
            new = mask & ~kept.get(eid, 0)
            if new:
                self.keep(layer, eid, new)
        return wanted

    def make_prefetch_room(
        self, layer: int, eid: int, mask: int, protected: Container[int] | None, *, is_next: bool = False
    ) -> bool:
        """Make room for a prefetch of `mask`; returns False, with nothing changed, if there is none. The expert's top
        is kept, evicting experts outside `protected`; the rest is staged. With None, and in a prompt that must not
        evict, nothing is evicted: all is staged, or the top is kept where the partition has room.

        Staging slots for one expert stay free, so that a load never waits for a prefetch. Where layers keep parts of
        experts and this layer `is_next` to run, one free slot is enough: its wrong prefetches go when its router ran.
        """
        count = mask.bit_count()
        num_free, partition = self.slots.num_free(layer), self.partitions[layer]
        size_class = self._classes[layer]
        staging = self.staging[size_class] - (1 if self.is_split and is_next else self._geometry.segments_per_expert)
        top = mask & self.tops[layer]
        num_kept = top.bit_count()
        can_stage_rest = num_kept == count or self.staged[size_class] + count - num_kept <= staging
        can_stage = self.staged[size_class] + count <= staging and num_free >= count
        if protected is None:
            if can_stage:
                return True
            if not can_stage_rest or partition.room < num_kept or num_free < count:
                return False
        elif not self.may_evict and min(partition.room, self._unfilled[layer]) < num_kept:
            return can_stage
        else:
            if not can_stage_rest:
                return False
            if partition.room < num_kept:
                if num_free + num_kept - partition.room < count:
                    return False
                self._refused = _NONE_REFUSED
                if self.make_room(layer, num_kept, protected) < num_kept:
                    return False
            if self.slots.num_free(layer) < count:
                return False
        if top:
            self.keep(layer, eid, top)
        return True

    # -- quotas ------------------------------------------------------------------------------------------------

    def resize(self, quotas: Sequence[int], tops: Sequence[int] | None = None) -> None:
        """Set the quotas to reach, in segments, and how many segments of an expert layers keep (`tops`); `rearrange`
        moves towards them. Without `tops` the sum in each size class stays the same; with it, it may be less, down from
        what the budget keeps, and the rest is for staging. Only where each layer has its own partition.
        """
        assert len(self.distinct_partitions) == len(self.partitions), "a cache over all layers has no quotas"
        sums, most = check_quotas(self._geometry, quotas), self._budget.kept_slots
        if tops is not None and any(num > accepted for num, accepted in zip(sums, most, strict=True)):
            raise ConfigError(f"allocation: quotas={list(quotas)}: must be at most {list(most)} in each size class")
        if tops is None and sums != check_quotas(self._geometry, self.targets or self.quotas):
            raise ConfigError(
                f"allocation: quotas={list(quotas)}: must have the sum of {self.quotas} in each size class"
            )
        self.targets = list(quotas)
        if tops is not None:
            self.is_split = True
            self.tops = [top_mask(num) for num in tops]
            self._choose_whole_or_parts()

    def rearrange(self, protected: Container[int]) -> None:
        """Between layers: move towards `targets`, which is None once they are reached. Segments beyond the tops go, and
        where whole experts are kept, those that lie in several places: computing them in spans would cost more;
        layers that shrink evict, by their policies, what is not `protected`; layers that grow, the lowest first, get
        the room there is then. An expert of which less than the top is kept is filled when it is needed next.
        """
        if self.targets is None:
            return
        self._refused = _NONE_REFUSED
        is_cut = not self.is_split or self._cut(protected)
        for layer, (partition, target) in enumerate(zip(self.partitions, self.targets, strict=True)):
            if target < self.quotas[layer]:
                for victim, gone in partition.shrink(target, protected):
                    assert not self.slots.in_flight[victim] & gone, "segments in flight are protected"
                    self._evicted(victim, gone)
                self._set_quota(layer, partition.capacity)
        num_segments = self._geometry.segments_per_expert
        staged = [num and num + num_segments for num in self.staged]  # and room for one load
        sums = self._geometry.class_sums(self.quotas)
        every = zip(self.slots.pools, self._budget.staging_slots, staged, sums, strict=True)
        room = [pool.num_slots - max(least, num) - kept for pool, least, num, kept in every]
        for layer, target in enumerate(self.targets):
            size_class = self._classes[layer]
            more = min(target - self.quotas[layer], room[size_class])
            if more > 0:
                room[size_class] -= more
                self.partitions[layer].capacity += more
                self._set_quota(layer, self.partitions[layer].capacity)
        self._find_staging()
        if is_cut and self.quotas == self.targets:
            self.targets = None

    def _cut(self, protected: Container[int]) -> bool:
        """Evict what is kept beyond the tops, or in several spans; returns whether all of it is gone."""
        is_cut, full, whole = True, self.slots.full, self.slots.whole
        for partition, top in zip(self.partitions, self.tops, strict=True):
            for eid, mask in list(partition.kept.items()):
                gone = mask & ~top if top != full or whole[eid] is not None else mask
                if gone and eid in protected:
                    is_cut = False
                elif gone:
                    partition.drop(eid, gone)
                    self._evicted(eid, gone)
        return is_cut

    def _find_staging(self) -> None:
        if self.is_split:
            pools = zip(self.slots.pools, self._geometry.class_sums(self.quotas), strict=True)
            self.staging = [pool.num_slots - kept for pool, kept in pools]

    def _set_quota(self, layer: int, quota: int) -> None:
        self._unfilled[layer] += quota - self.quotas[layer]
        self.quotas[layer] = quota

    # -- slots -------------------------------------------------------------------------------------------------

    def allocate(self, layer: int, eid: int, mask: int, purpose: dict[int, int]) -> list[Span]:
        """Give `mask` slots, as `SlotTable.allocate`; segments that are not kept count as staged."""
        staged = mask & ~self.partitions[layer].kept.get(eid, 0)
        if staged:
            self.staged[self._classes[layer]] += staged.bit_count()
        return self.slots.allocate(eid, mask, purpose)

    def free_staged(self, layer: int, eid: int, mask: int) -> None:
        """Free the slots of the segments in `mask` that are not kept."""
        held = self.slots.resident[eid] | self.slots.in_flight[eid]
        mask &= held & ~self.partitions[layer].kept.get(eid, 0)
        if mask:
            self.staged[self._classes[layer]] -= mask.bit_count()
            self.slots.release(eid, mask)

    def forget(self, layer: int, eid: int, mask: int) -> None:
        """Segments in flight will not come: free their slots, and do not keep them."""
        partition = self.partitions[layer]
        kept = partition.kept.get(eid, 0) & mask
        if kept:
            partition.drop(eid, kept)
            self._unfilled[layer] += kept.bit_count()
        self.staged[self._classes[layer]] -= (mask & ~kept).bit_count()
        self.slots.release(eid, mask)

    def _stage(self, layer: int, eid: int, mask: int) -> None:
        """No longer keep `mask`, but leave it in its slots until it is computed."""
        self.partitions[layer].drop(eid, mask)
        self.staged[self._classes[layer]] += mask.bit_count()
        self._lost(layer, mask)

    def _evicted(self, eid: int, mask: int) -> None:
        self.slots.release(eid, mask)
        self._lost(self._layer_of[eid], mask)

    def _lost(self, layer: int, mask: int) -> None:
        """Count evicted bytes: of the layer that lost them, in the phase of the layer that needed the room."""
        self._unfilled[layer] += mask.bit_count()
        counters = self._counters[layer]
        phase = counters.decode if self.is_decoding else counters.prefill
        phase.evicted_nbytes += mask.bit_count() * self._segment_nbytes[layer]

    def check(self) -> None:
        """Assert that slots, masks, quotas and budget agree."""
        slots, geometry = self.slots, self._geometry
        slots.check()
        kept: dict[int, int] = {}
        for partition in self.distinct_partitions:
            assert partition.used == sum(mask.bit_count() for mask in partition.kept.values()) <= partition.capacity
            kept.update(partition.kept)
        staged = [0] * geometry.num_size_classes
        is_cut = self.targets is None
        is_shared = len(self.distinct_partitions) < len(self.partitions)
        assert is_shared or self.quotas == [partition.capacity for partition in self.partitions]
        for layer, quota in enumerate(self.quotas):
            ids = range(geometry.first_expert_id(layer), geometry.expert_id(layer, geometry.layers[layer].num_experts))
            here = sum(kept.get(eid, 0).bit_count() for eid in ids)
            assert self._unfilled[layer] == quota - here, "prompts fill what is free of a quota"
            for eid in ids:
                held = slots.resident[eid] | slots.in_flight[eid]
                assert not (is_cut and kept.get(eid, 0) & ~self.tops[layer]), "only tops are kept"
                assert not kept.get(eid, 0) & ~held, "kept segments have slots"
                staged[self._classes[layer]] += (held & ~kept.get(eid, 0)).bit_count()
        given = zip(self._geometry.class_sums(self.quotas), self._budget.kept_slots, strict=True)
        assert all(num <= most for num, most in given), "quotas never exceed the budget"
        assert staged == self.staged, "segments that are not kept are staged"


def top_mask(num_segments: int) -> int:
    """The first so many segments of an expert."""
    return (1 << num_segments) - 1
