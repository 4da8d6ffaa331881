"""What a device keeps between layers, and what it only stages for a layer."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from operator import eq, le

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
        self.num_kept -= len(units)
        if len(units) < len(self.kept[eid]):
            self.kept[eid] = [unit for unit in self.kept[eid] if unit not in units]
        else:
            del self.kept[eid]
            self.policy.removed(eid)

    def victims(self, num_units: int, protected: Container[int], *, whole: bool) -> tuple[_Victims, int]:
        """The victims for so many units, outside `protected`, and how many units are then still lacking. Unless `whole`
        experts go, a victim loses its last units first and keeps its top.
        """
        victims: _Victims = []
        for eid in self.policy.victims(protected) if num_units > 0 else ():
            units = self.kept[eid] if whole else self.kept[eid][-num_units:]
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
        tops: Sequence[int] | None,
        *,
        prompts_evict: bool,
    ) -> None:
        """`tops`: for each layer, how many units of an expert it keeps, from its top; None: whole experts.
        `prompts_evict`: see the Scheduler.
        """
        num_parts = geometry.segments_per_expert
        self._geometry, self._budget, self._counters = geometry, budget, counters
        self._class_of = geometry.size_classes
        self._prompts_evict = prompts_evict
        # Whether victims lose all their units, where layers keep whole experts. True once something was predicted: then
        # experts come unit by unit, and some units are cancelled; single free slots would scatter later experts over
        # many spans, each of which costs a launch.
        self.evicts_whole = False
        self.slots = SlotTable(geometry, budget.pool_slots())
        # Whether layers keep parts of experts. Then quotas hold whole tops; the rest is for staging.
        self.is_split = tops is not None
        # By layer: how many units it keeps of a kept expert, the others are staged; and the units that its partition
        # keeps at most, or where layers share one, that prompts fill.
        self.tops = [num_parts] * geometry.num_layers if tops is None else list(tops)
        self.quotas = list(budget.layer_quotas)
        if tops is not None:
            assert scope == "layer", "a cache over all layers has no splits"
            every = zip(self.quotas, tops, geometry.layers, strict=True)
            self.quotas = [whole_tops(quota, top, layer.num_experts) for quota, top, layer in every]
        self.targets: list[int] | None = None  # the quotas to reach, where they differ from `quotas`
        # By size class: the slots that belong to no quota; and the units that have slots and are not kept.
        self.staging = list(budget.staging_slots)
        self._find_staging()
        self.staged = [0] * geometry.num_size_classes
        self.is_decoding = True  # whether the running layer, or the last one, serves decode; evictions count there
        if scope == "layer":
            each = enumerate(zip(self.quotas, self.tops, strict=True))
            self.partitions = [Partition(quota, make_policy(quota // top, [layer])) for layer, (quota, top) in each]
        else:
            shared = [
                Partition(num, make_policy(num // num_parts, geometry.layers_of_class(size_class)))
                for size_class, num in enumerate(budget.kept_slots)
            ]
            self.partitions = [shared[size_class] for size_class in self._class_of]

    @property
    def may_evict(self) -> bool:
        """Whether prefetches may evict now."""
        return self.is_decoding or self._prompts_evict

    def distinct_partitions(self) -> list[Partition]:
        return list(dict.fromkeys(self.partitions))

    def partition_of(self, eid: int) -> Partition:
        return self.partitions[self.slots.layer_of[eid]]

    def kept(self, eid: int) -> Sequence[int]:
        """The units of an expert that are kept."""
        return self.partition_of(eid).kept.get(eid, ())

    def staged_of(self, eid: int) -> list[int]:
        """The units of an expert that have slots and are not kept."""
        kept = self.kept(eid)
        return [unit for unit in self.slots.with_slots(eid) if unit not in kept]

    # -- keeping and evicting ----------------------------------------------------------------------------------

    def keep(self, eid: int, units: Sequence[int]) -> None:
        """Keep units that are not, of which some may be staged; the partition has room. No units: does nothing."""
        if units:
            layer = self.slots.layer_of[eid]
            if self.staged[self._class_of[layer]]:
                self.staged[self._class_of[layer]] -= sum([self.slots.slot[unit] >= 0 for unit in units])
            self.partitions[layer].keep(eid, units)

    def admit(
        self, layer: int, evicting: Sequence[int], filling: Sequence[int], protected: Container[int] = ()
    ) -> None:
        """Keep what can be kept of the tops of these experts of a layer: for those that are `evicting`, experts outside
        `protected` go; those that are `filling` take what is free of the layer's quota.
        """
        lacking = {eid: self._lacking(layer, eid) for eid in (*evicting, *filling)}
        num_units = sum([len(lacking[eid]) for eid in evicting])
        # Room for all at once is cheaper, and evicts the same experts.
        room = self.make_room(layer, num_units, protected) if evicting else 0
        for eid in evicting:
            units = lacking[eid]
            if room < len(units):
                room = self.make_room(layer, len(units), protected)
            self.keep(eid, units[:room])
            room -= len(units[:room])
        room = self._free_room(layer) if filling else 0
        for eid in filling:
            units = lacking[eid][:room]
            self.keep(eid, units)
            room -= len(units)

    def make_room(self, layer: int, num_units: int, protected: Container[int]) -> int:
        """Evict so that so many units fit, or nothing if they cannot. Returns the room that there is then."""
        partition = self.partitions[layer]
        room = partition.capacity - partition.num_kept
        if room < num_units <= partition.capacity:
            victims, lacking = self._victims(layer, num_units - room, protected)
            if not lacking:
                self._evict_all(victims)
                room = partition.room
        return room

    def admit_best(self, router: RouterRan, needed: list[int], upcoming: Iterable[int]) -> None:
        """Keep the most valuable of the kept and the needed experts. Needed ones that lose are staged until they are
        computed: at most as many units that were kept as there are free staging slots. Never evicts `upcoming`.
        """
        layer = router.layer
        partition, size_class, top = self.partitions[layer], self._class_of[layer], self.tops[layer]
        policy, every_kept = partition.policy, partition.kept
        assert isinstance(policy, ScoredPolicy), "admission `best` compares scores"
        policy.needed(needed, router)
        new = {eid: [] if len(every_kept.get(eid, ())) == top else self._lacking(layer, eid) for eid in needed}
        excess = sum(map(len, new.values())) + partition.num_kept - partition.capacity
        if excess > 0:
            others = policy.scored_victims({*needed, *upcoming})
            other = next(others, None)
            rivals = sorted(zip(policy.scores(needed), needed, strict=True), reverse=True)
            can_stage = max(0, self.staging[size_class] - self.staged[size_class])
            to_stage: _Victims = []
            while excess and (rivals or other):
                if other and (not rivals or other <= rivals[-1]):
                    units = every_kept[other[1]][-excess:]
                    excess -= len(units)
                    self._evict(other[1], units)
                    other = next(others, None)
                    continue
                eid = rivals.pop()[1]
                kept = every_kept.get(eid, [])
                losing = sorted([*new[eid], *kept[max(0, len(kept) - can_stage) :]])[-excess:]
                excess -= len(losing)
                new[eid] = [unit for unit in new[eid] if unit not in losing]
                if units := [unit for unit in kept if unit in losing]:
                    can_stage -= len(units)
                    to_stage.append((eid, units))
            for eid, units in to_stage:
                self._evict(eid, units, is_staged=True)
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
        size_class, room, num_free = (
            self._class_of[layer],
            self.partitions[layer].room,
            self.slots.pool_of[layer].num_free,
        )
        spare = 1 if self.is_split and is_next else num_parts
        room_to_stage = self.staging[size_class] - spare - self.staged[size_class]
        top = [unit for unit in units if unit % num_parts < self.tops[layer]]
        can_stage = count <= min(room_to_stage, num_free)
        if protected is None and can_stage:
            return True
        if protected is not None and not self.may_evict and self._free_room(layer) < len(top):
            return can_stage
        short = max(0, len(top) - room)
        if len(top) < count and count - len(top) > room_to_stage:
            return False
        if num_free + short < count:
            return False
        if short and (protected is None or self.make_room(layer, len(top), protected) < len(top)):
            return False
        self.keep(eid, top)
        return True

    def _free_room(self, layer: int) -> int:
        """Of the layer's quota, what its prompts may fill."""
        partition, layer_of = self.partitions[layer], self.slots.layer_of
        num_kept = sum([len(units) for eid, units in partition.kept.items() if layer_of[eid] == layer])
        return max(0, min(partition.room, self.quotas[layer] - num_kept))

    def _victims(self, layer: int, num_units: int, protected: Container[int]) -> tuple[_Victims, int]:
        is_whole = self.evicts_whole and self.tops[layer] == self.slots.num_parts
        return self.partitions[layer].victims(num_units, protected, whole=is_whole)

    def _lacking(self, layer: int, eid: int) -> list[int]:
        """Units of the expert's top that are not kept."""
        kept, first = self.partitions[layer].kept.get(eid, ()), eid * self.slots.num_parts
        top = range(first, first + self.tops[layer])
        return [unit for unit in top if unit not in kept] if kept else list(top)

    def _evict_all(self, victims: _Victims) -> None:
        for eid, units in victims:
            self._evict(eid, units)

    def _evict(self, eid: int, units: Sequence[int], *, is_staged: bool = False) -> None:
        """Keep units no more; those that the running layer needs are staged now. Counts the bytes of the layer that
        lost them, in the phase of the layer that needed the room.
        """
        layer = self.slots.layer_of[eid]
        self.partitions[layer].drop(eid, units)
        if is_staged:
            self.staged[self._class_of[layer]] += len(units)
        else:
            self.slots.release(units)
        counters = self._counters[layer]
        phase = counters.decode if self.is_decoding else counters.prefill
        phase.evicted_nbytes += len(units) * self.slots.segment_nbytes[layer]

    # -- quotas ------------------------------------------------------------------------------------------------

    def resize(self, quotas: Sequence[int], tops: Sequence[int] | None = None) -> None:
        """Set the quotas to reach, in units, and how many units of an expert layers keep (`tops`); `rearrange` moves
        towards them. Without `tops` the sum in each size class stays the same; with it, it may be less, down from what
        the budget keeps, and the rest is for staging. Only where each layer has its own partition.
        """
        assert len(self.distinct_partitions()) == len(self.partitions), "a cache over all layers has no quotas"
        accepted: Sequence[int] = self._budget.kept_slots
        if tops is None:
            accepted = self._geometry.class_sums(self.targets or self.quotas)
        if not all(map(eq if tops is None else le, check_quotas(self._geometry, quotas), accepted)):
            bound = f"must {'have the sum of' if tops is None else 'be at most'} {list(accepted)} in each size class"
            raise ConfigError(f"allocation: quotas={list(quotas)}: {bound}")
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
        is_cut = not self.is_split or self._cut(protected)
        for layer, (partition, target) in enumerate(zip(self.partitions, self.targets, strict=True)):
            if target < partition.capacity:
                victims, lacking = self._victims(layer, partition.num_kept - target, protected)
                self._evict_all(victims)
                self.quotas[layer] = partition.capacity = target + lacking
        staged = [num and num + self.slots.num_parts for num in self.staged]  # and room for one load
        sums = self._geometry.class_sums(self.quotas)
        every = zip(self.slots.pools, self._budget.staging_slots, staged, sums, strict=True)
        room = [pool.num_slots - max(least, num) - kept for pool, least, num, kept in every]
        for layer, (size_class, target) in enumerate(zip(self._class_of, self.targets, strict=True)):
            more = max(0, min(target - self.quotas[layer], room[size_class]))
            room[size_class] -= more
            self.quotas[layer] = self.partitions[layer].capacity = self.quotas[layer] + more
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

    # -- slots -------------------------------------------------------------------------------------------------

    def allocate(self, eid: int, units: Sequence[int], state: int) -> list[Span]:
        """Give units slots, as `SlotTable.allocate`; those that are not kept count as staged."""
        layer = self.slots.layer_of[eid]
        kept = self.partitions[layer].kept.get(eid, ())
        if len(kept) < self.slots.num_parts:
            self.staged[self._class_of[layer]] += sum([unit not in kept for unit in units])
        return self.slots.allocate(units, state)

    def free_staged(self, eid: int, units: Iterable[int]) -> None:
        """Free the slots of those of an expert's units that are not kept."""
        layer, slot = self.slots.layer_of[eid], self.slots.slot
        kept = self.partitions[layer].kept.get(eid, ())
        if staged := [unit for unit in units if slot[unit] >= 0 and unit not in kept]:
            self.staged[self._class_of[layer]] -= len(staged)
            self.slots.release(staged)

    def forget(self, eid: int, units: Sequence[int]) -> None:
        """Units on their way will not come: free their slots, and do not keep them."""
        if kept := [unit for unit in self.kept(eid) if unit in units]:
            self.partition_of(eid).drop(eid, kept)
        self.staged[self._class_of[self.slots.layer_of[eid]]] -= len(units) - len(kept)
        self.slots.release(units)

    def check(self) -> None:
        """Assert that slots, units, quotas and budget agree."""
        slots, geometry, distinct = self.slots, self._geometry, self.distinct_partitions()
        slots.check()
        for partition in distinct:
            assert partition.num_kept == sum(map(len, partition.kept.values())) <= partition.capacity
        is_shared = len(distinct) < len(self.partitions)
        assert is_shared or self.quotas == [partition.capacity for partition in self.partitions]
        staged = [0] * geometry.num_size_classes
        for eid, layer in enumerate(slots.layer_of):
            kept = self.kept(eid)
            top = slots.units(eid)[: self.tops[layer]]
            assert self.targets is not None or set(kept) <= set(top), "only tops are kept"
            assert set(kept) <= set(slots.with_slots(eid)), "kept units have slots"
            staged[self._class_of[layer]] += len(self.staged_of(eid))
        assert staged == self.staged, "units that are not kept are staged"
        assert all(map(le, geometry.class_sums(self.quotas), self._budget.kept_slots)), "quotas never exceed the budget"
