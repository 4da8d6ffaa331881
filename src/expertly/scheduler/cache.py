"""What a device keeps between layers, and what it only stages for a layer."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import RouterRan, Span
from expertly.policies.allocation import whole_tops
from expertly.policies.eviction import EvictionPolicy, MakePolicy, ScoredPolicy
from expertly.scheduler.budget import Budget, check_quotas
from expertly.scheduler.counters import LayerCounters
from expertly.scheduler.slots import SlotTable

_Victims = list[tuple[int, list[int]]]
"""Experts, and the units of each that go."""


class Partition:
    """The cache of one layer, or of all layers of a size class. It counts units; its policy orders experts."""

    def __init__(self, capacity: int, policy: EvictionPolicy) -> None:
        self.capacity = capacity
        self.policy = policy
        self.num_kept = 0
        self.kept: dict[int, list[int]] = {}  # expert -> its kept units, rising

    @property
    def room(self) -> int:
        return self.capacity - self.num_kept

    def keep(self, eid: int, units: Sequence[int]) -> None:
        """Keep units that are not kept; there is room for them."""
        assert self.num_kept + len(units) <= self.capacity, "a partition never exceeds its capacity"
        self.num_kept += len(units)
        before = self.kept.get(eid)
        if before is None:
            self.kept[eid] = list(units)
            self.policy.admitted(eid)
        else:
            self.kept[eid] = sorted([*before, *units])

    def drop(self, eid: int, units: Collection[int]) -> None:
        kept = self.kept[eid]
        left = [unit for unit in kept if unit not in units] if len(units) < len(kept) else []
        self.num_kept -= len(units)
        if left:
            self.kept[eid] = left
        else:
            del self.kept[eid]
            self.policy.removed(eid)

    def victims(self, num_units: int, protected: Container[int], *, whole: bool) -> tuple[_Victims, int]:
        """The victims for so many units, outside `protected`, and how many units are then still lacking. Unless `whole`
        experts go, a victim loses its last units first and keeps its top.
        """
        victims: _Victims = []
        for eid in self.policy.victims(protected) if num_units > 0 else ():
            units = self.kept[eid]
            if len(units) > num_units and not whole:
                units = units[len(units) - num_units :]
            victims.append((eid, units))
            num_units -= len(units)
            if num_units <= 0:
                break
        return victims, max(0, num_units)


class Cache:
    """Owns the slot table and the partitions. A unit with a slot is either kept (a partition counts it) or staged (its
    slot is freed once its layer has used it). Experts are dense ids.
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
    ) -> None:
        """`tops`: for each layer, how many units of an expert it keeps, from its top; None: whole experts.
        `prompts_evict`: see the Scheduler.
        """
        num_parts = geometry.segments_per_expert
        self._geometry = geometry
        self._budget = budget
        self._counters = counters
        self._prompts_evict = prompts_evict
        self.evicts_whole = False
        """Whether victims lose all their units, where layers keep whole experts. True once something was predicted:
        then experts come unit by unit, and some units are cancelled; single free slots would scatter later experts over
        many spans, each of which costs a launch.
        """
        self.slots = SlotTable(geometry, budget.pool_slots())
        self.is_split = tops is not None
        """Whether layers keep parts of experts. Then quotas hold whole tops; the rest is for staging."""
        self.tops = [num_parts] * geometry.num_layers if tops is None else list(tops)
        """For each layer, how many units it keeps of a kept expert; the others are staged."""
        self.quotas = list(budget.layer_quotas)
        """For each layer, the units that its partition keeps at most, or where layers share one, that prompts fill."""
        if tops is not None:
            assert scope == "layer", "a cache over all layers has no splits"
            every = zip(self.quotas, tops, geometry.layers, strict=True)
            self.quotas = [whole_tops(quota, top, layer.num_experts) for quota, top, layer in every]
        self.targets: list[int] | None = None
        """The quotas to reach, where they differ from `quotas`."""
        self.num_kept = [0] * geometry.num_layers
        """Of each layer, the units that are kept."""
        self.staging = list(budget.staging_slots)
        """For each size class, the slots that belong to no quota."""
        self._find_staging()
        self.staged = [0] * geometry.num_size_classes
        """For each size class, the units that have slots and are not kept."""
        self.is_decoding = True
        """Whether the running layer, or the last one, serves decode. Evictions count in its phase."""
        if scope == "layer":
            self.partitions = [
                Partition(quota, make_policy(quota // top, [layer]))
                for layer, (quota, top) in enumerate(zip(self.quotas, self.tops, strict=True))
            ]
            """By layer."""
        else:
            shared = [
                Partition(num, make_policy(num // num_parts, geometry.layers_of_class(size_class)))
                for size_class, num in enumerate(budget.kept_slots)
            ]
            self.partitions = [shared[size_class] for size_class in geometry.size_classes]

    @property
    def may_evict(self) -> bool:
        """Whether prefetches may evict now."""
        return self.is_decoding or self._prompts_evict

    def distinct_partitions(self) -> list[Partition]:
        return list({id(partition): partition for partition in self.partitions}.values())

    def kept(self, eid: int) -> Sequence[int]:
        """The units of an expert that are kept."""
        return self.partitions[self.slots.layer_of[eid]].kept.get(eid, ())

    def staged_of(self, eid: int) -> list[int]:
        """The units of an expert that have slots and are not kept."""
        kept = self.kept(eid)
        return [unit for unit in self.slots.with_slots(eid) if unit not in kept]

    # -- keeping and evicting ----------------------------------------------------------------------------------

    def keep(self, eid: int, units: Sequence[int]) -> None:
        """Keep units that are not, of which some may be staged; the partition has room."""
        layer = self.slots.layer_of[eid]
        size_class = self._geometry.size_classes[layer]
        if self.staged[size_class]:
            self.staged[size_class] -= sum([self.slots.slot[unit] >= 0 for unit in units])
        self.partitions[layer].keep(eid, units)
        self.num_kept[layer] += len(units)

    def keep_no_more(self, eid: int, units: Collection[int]) -> None:
        """The caller frees the slots of the units, or they have none."""
        layer = self.slots.layer_of[eid]
        self.partitions[layer].drop(eid, units)
        self.num_kept[layer] -= len(units)

    def admit(
        self, layer: int, evicting: Sequence[int], filling: Sequence[int], protected: Container[int] = ()
    ) -> None:
        """Keep what can be kept of the tops of these experts of a layer: for those that are `evicting`, experts outside
        `protected` go; those that are `filling` take what is free of the layer's quota.
        """
        lacking = {eid: self._lacking(layer, eid) for eid in (*evicting, *filling)}
        if len(evicting) > 1:  # making room for all at once is cheaper, and evicts the same experts
            self.make_room(layer, sum([len(lacking[eid]) for eid in evicting]), protected)
        partition = self.partitions[layer]
        for eid in evicting:
            units, room = lacking[eid], partition.capacity - partition.num_kept
            if len(units) > room:
                units = units[: self.make_room(layer, len(units), protected)]
            if units:
                self.keep(eid, units)
        for eid in filling:
            room = min(self.partitions[layer].room, self.quotas[layer] - self.num_kept[layer])
            if room > 0 and lacking[eid]:
                self.keep(eid, lacking[eid][:room])

    def make_room(self, layer: int, num_units: int, protected: Container[int]) -> int:
        """Evict so that so many units fit, or nothing if they cannot. Returns the room that there is then."""
        partition = self.partitions[layer]
        short = num_units + partition.num_kept - partition.capacity
        if 0 < short <= partition.num_kept:
            victims, lacking = self._victims(layer, short, protected)
            if not lacking:
                for eid, units in victims:
                    self._evict(eid, units)
        return partition.capacity - partition.num_kept

    def admit_best(self, router: RouterRan, needed: list[int], upcoming: Iterable[int]) -> None:
        """Keep the most valuable of the kept and the needed experts. Needed ones that lose are staged until they are
        computed: at most as many units that were kept as there are free staging slots. Never evicts `upcoming`.
        """
        layer = router.layer
        partition, staging = self.partitions[layer], self.staging[self._geometry.size_classes[layer]]
        policy = partition.policy
        assert isinstance(policy, ScoredPolicy), "admission `best` compares scores"
        policy.needed(needed, router)
        every_kept, top = partition.kept, self.tops[layer]
        new = {eid: [] if len(every_kept.get(eid, ())) == top else self._lacking(layer, eid) for eid in needed}
        excess = sum(map(len, new.values())) + partition.num_kept - partition.capacity
        if excess > 0:
            others = policy.scored_victims({*needed, *upcoming})
            other = next(others, None)
            rivals = sorted(zip(policy.scores(needed), needed, strict=True), reverse=True)
            can_stage = max(0, staging - self.staged[self._geometry.size_classes[layer]])
            to_stage: _Victims = []
            while excess and (rivals or other):
                if not rivals or (other and other <= rivals[-1]):
                    assert other is not None
                    units = partition.kept[other[1]][-excess:]
                    excess -= len(units)
                    self._evict(other[1], units)
                    other = next(others, None)
                    continue
                eid = rivals.pop()[1]
                kept = partition.kept.get(eid, [])
                losing = sorted([*new[eid], *kept[max(0, len(kept) - can_stage) :]])[-excess:]
                excess -= len(losing)
                if not kept:
                    new[eid] = new[eid][: len(new[eid]) - len(losing)]
                    continue
                new[eid] = [unit for unit in new[eid] if unit not in losing]
                units = [unit for unit in kept if unit in losing]
                can_stage -= len(units)
                if units:
                    to_stage.append((eid, units))
            for eid, units in to_stage:
                self.keep_no_more(eid, units)
                self.staged[self._geometry.size_classes[layer]] += len(units)
                self._count_evicted(layer, len(units))
        for eid, units in new.items():
            if units:
                self.keep(eid, units)

    def make_prefetch_room(
        self, eid: int, units: Sequence[int], protected: Container[int] | None, *, is_next: bool = False
    ) -> bool:
        """Make room for a prefetch of these units; returns False, with nothing changed, if there is none. The expert's
        top is kept, evicting experts outside `protected`; the rest is staged. With None, and in a prompt that must not
        evict, nothing is evicted: all is staged, or the top is kept where the partition has room.

        Staging slots for one expert stay free, so that a load never waits for a prefetch. Where layers keep parts of
        experts and this layer `is_next` to run, one free slot is enough: its wrong prefetches go when its router ran.
        """
        layer, num_parts, count = self.slots.layer_of[eid], self.slots.num_parts, len(units)
        size_class, partition, pool = self._geometry.size_classes[layer], self.partitions[layer], self.slots.pool(layer)
        spare = 1 if self.is_split and is_next else num_parts
        room_to_stage = self.staging[size_class] - spare - self.staged[size_class]
        top = [unit for unit in units if unit % num_parts < self.tops[layer]]
        can_stage_rest = len(top) == count or count - len(top) <= room_to_stage
        can_stage = count <= room_to_stage and count <= pool.num_free
        if protected is None:
            if can_stage:
                return True
            if not can_stage_rest or partition.room < len(top):
                return False
        elif not self.may_evict and min(partition.room, self.quotas[layer] - self.num_kept[layer]) < len(top):
            return can_stage
        else:
            short = max(0, len(top) - partition.room)
            if not can_stage_rest or pool.num_free + short < count:
                return False
            if self.make_room(layer, len(top), protected) < len(top):
                return False
        if pool.num_free < count:
            return False
        if top:
            self.keep(eid, top)
        return True

    def _victims(self, layer: int, num_units: int, protected: Container[int]) -> tuple[_Victims, int]:
        is_whole = self.evicts_whole and self.tops[layer] == self.slots.num_parts
        return self.partitions[layer].victims(num_units, protected, whole=is_whole)

    def _lacking(self, layer: int, eid: int) -> list[int]:
        """Units of the expert's top that are not kept."""
        kept, first = self.partitions[layer].kept.get(eid), eid * self.slots.num_parts
        top = range(first, first + self.tops[layer])
        return list(top) if kept is None else [unit for unit in top if unit not in kept]

    def _evict(self, eid: int, units: Sequence[int]) -> None:
        """Counts the bytes of the layer that lost them, in the phase of the layer that needed the room."""
        layer = self.slots.layer_of[eid]
        self.partitions[layer].drop(eid, units)
        self.num_kept[layer] -= len(units)
        self.slots.release(units)
        counters = self._counters[layer].decode if self.is_decoding else self._counters[layer].prefill
        counters.evicted_nbytes += len(units) * self.slots.segment_nbytes[layer]

    def _count_evicted(self, layer: int, num_units: int) -> None:
        counters = self._counters[layer].decode if self.is_decoding else self._counters[layer].prefill
        counters.evicted_nbytes += num_units * self.slots.segment_nbytes[layer]

    # -- quotas ------------------------------------------------------------------------------------------------

    def resize(self, quotas: Sequence[int], tops: Sequence[int] | None = None) -> None:
        """Set the quotas to reach, in units, and how many units of an expert layers keep (`tops`); `rearrange` moves
        towards them. Without `tops` the sum in each size class stays the same; with it, it may be less, down from what
        the budget keeps, and the rest is for staging. Only where each layer has its own partition.
        """
        assert len(self.distinct_partitions()) == len(self.partitions), "a cache over all layers has no quotas"
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
            self.tops = list(tops)

    def rearrange(self, protected: Container[int]) -> None:
        """Between layers: move towards `targets`, which is None once they are reached. Units beyond the tops go, and
        where whole experts are kept, those that lie in several places: computing them in spans would cost more;
        layers that shrink evict, by their policies, what is not `protected`; layers that grow, the lowest first, get
        the room there is then. An expert of which less than the top is kept is filled when it is needed next.
        """
        if self.targets is None:
            return
        geometry = self._geometry
        is_cut = not self.is_split or self._cut(protected)
        for layer, (partition, target) in enumerate(zip(self.partitions, self.targets, strict=True)):
            if target < partition.capacity:
                excess = partition.num_kept - target
                victims, lacking = self._victims(layer, excess, protected)
                for eid, units in victims:
                    self._evict(eid, units)
                self._set_quota(layer, target + lacking)
        staged = [num and num + geometry.segments_per_expert for num in self.staged]  # and room for one load
        sums = geometry.class_sums(self.quotas)
        every = zip(self.slots.pools, self._budget.staging_slots, staged, sums, strict=True)
        room = [pool.num_slots - max(least, num) - kept for pool, least, num, kept in every]
        for layer, (size_class, target) in enumerate(zip(geometry.size_classes, self.targets, strict=True)):
            more = min(target - self.quotas[layer], room[size_class])
            if more > 0:
                room[size_class] -= more
                self._set_quota(layer, self.quotas[layer] + more)
        self._find_staging()
        if is_cut and self.quotas == self.targets:
            self.targets = None

    def _cut(self, protected: Container[int]) -> bool:
        """Evict what is kept beyond the tops, or in several spans; returns whether all of it is gone."""
        is_cut, num_parts = True, self.slots.num_parts
        for partition, top in zip(self.partitions, self.tops, strict=True):
            for eid, kept in list(partition.kept.items()):
                is_scattered = top == num_parts and self.slots.whole[eid] is None
                units = kept if is_scattered else [unit for unit in kept if unit % num_parts >= top]
                if units and eid in protected:
                    is_cut = False
                elif units:
                    self._evict(eid, units)
        return is_cut

    def _find_staging(self) -> None:
        if self.is_split:
            pools = zip(self.slots.pools, self._geometry.class_sums(self.quotas), strict=True)
            self.staging = [pool.num_slots - kept for pool, kept in pools]

    def _set_quota(self, layer: int, quota: int) -> None:
        self.quotas[layer] = self.partitions[layer].capacity = quota

    # -- slots -------------------------------------------------------------------------------------------------

    def allocate(self, eid: int, units: Sequence[int], state: int) -> list[Span]:
        """Give units slots, as `SlotTable.allocate`; those that are not kept count as staged."""
        layer = self.slots.layer_of[eid]
        kept = self.partitions[layer].kept.get(eid, ())
        if len(kept) < self.slots.num_parts:
            size_class = self._geometry.size_classes[layer]
            self.staged[size_class] += sum([unit not in kept for unit in units]) if kept else len(units)
        return self.slots.allocate(units, state)

    def free_staged(self, eid: int, units: Iterable[int]) -> None:
        """Free the slots of those of an expert's units that are not kept."""
        kept, slot = self.partitions[self.slots.layer_of[eid]].kept.get(eid, ()), self.slots.slot
        units = [unit for unit in units if slot[unit] >= 0 and unit not in kept]
        if units:
            self.staged[self._geometry.size_classes[self.slots.layer_of[eid]]] -= len(units)
            self.slots.release(units)

    def forget(self, eid: int, units: Sequence[int]) -> None:
        """Units on their way will not come: free their slots, and do not keep them."""
        kept = [unit for unit in self.kept(eid) if unit in units]
        if kept:
            self.keep_no_more(eid, kept)
        self.staged[self._geometry.size_classes[self.slots.layer_of[eid]]] -= len(units) - len(kept)
        self.slots.release(units)

    def check(self) -> None:
        """Assert that slots, units, quotas and budget agree."""
        slots, geometry = self.slots, self._geometry
        slots.check()
        for partition in self.distinct_partitions():
            assert partition.num_kept == sum(map(len, partition.kept.values())) <= partition.capacity
        is_shared = len(self.distinct_partitions()) < len(self.partitions)
        assert is_shared or self.quotas == [partition.capacity for partition in self.partitions]
        staged, num_kept = [0] * geometry.num_size_classes, [0] * geometry.num_layers
        for eid, layer in enumerate(slots.layer_of):
            kept = self.kept(eid)
            num_kept[layer] += len(kept)
            top = slots.units(eid)[: self.tops[layer]]
            assert self.targets is not None or set(kept) <= set(top), "only tops are kept"
            assert set(kept) <= set(slots.with_slots(eid)), "kept units have slots"
            staged[geometry.size_classes[layer]] += len(self.staged_of(eid))
        assert num_kept == self.num_kept
        assert staged == self.staged, "units that are not kept are staged"
        sums = zip(geometry.class_sums(self.quotas), self._budget.kept_slots, strict=True)
        assert all(num <= most for num, most in sums), "quotas never exceed the budget"
