"""Where every unit is: its state, its slot, and whether a cache keeps it."""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Sequence
from itertools import filterfalse
from operator import gt

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import RouterRan, Span
from expertly.policies.allocation import whole_tops
from expertly.policies.eviction import EvictionPolicy, MakePolicy, ScoredPolicy
from expertly.scheduler.budget import Budget, check_quotas
from expertly.scheduler.counters import LayerCounters
from expertly.scheduler.pool import Pool, runs

ABSENT, QUEUED, LOADING, PREFETCHING, RESIDENT = range(5)
"""States of a unit. ABSENT: it has no slot. QUEUED: the running layer needs it, and it has no slot yet. LOADING: in
flight, and the running layer waits for it. PREFETCHING: in flight, and no layer waits. RESIDENT: it is in its slot.
"""

_NO_SLOT = -1


class Partition:
    """The cache of one layer, or of all of a size class. The policy orders experts, the partition counts units."""

    def __init__(self, capacity: int, top: int, policy: EvictionPolicy, pool: Pool) -> None:
        self.capacity = self.room = capacity  # the quotas of its layers, in units, and how many of these are free
        self.top = top  # how many first units of a kept expert are kept; the others are staged
        self.policy = policy
        self.pool = pool  # of slots, which all layers of the size class share


class Cache:
    """Where every unit of a model is. A *unit* is one of the P parts of an expert: unit = expert * P + part, where
    experts are dense ids; a Span calls adjacent units its segments. A layer keeps the *top* of an expert: its first
    units, where not all of them. A unit with a slot is either kept (a partition counts it) or staged (its slot is freed
    once its layer has used it). Kept units have slots, except between `keep` and `allocate`.
    """

    def __init__(
        self,
        geometry: Geometry,
        budget: Budget,
        make_policy: MakePolicy,
        scope: str = "global",
        tops: Sequence[int] | None = None,
    ) -> None:
        """`scope`: one partition a "layer", or a "global" one for each size class. `tops`: for each layer, how many
        units of an expert it keeps; None: whole experts.
        """
        num_parts = geometry.segments_per_expert
        num_units = geometry.num_experts * num_parts
        self.geometry = geometry
        self.num_parts = num_parts
        self.counters = [LayerCounters() for _ in geometry.layers]
        self.is_decoding = True  # whether the running layer, or the last one, serves decode: the phase of evictions
        # Whether victims lose all their units, where layers keep whole experts. True once something was predicted: then
        # experts come unit by unit, and single free slots would scatter later experts over many spans.
        self.evicts_whole = False
        # Whether layers keep parts of experts. Then quotas hold whole tops; the rest is for staging.
        self.is_split = tops is not None
        self.state = [ABSENT] * num_units
        self.slot = [_NO_SLOT] * num_units
        self.kept = [False] * num_units
        self.prefetching: dict[int, bool] = {}  # units in this state -> whether they were asked for in decode
        self.whole: list[Span | None] = [None] * geometry.num_experts  # the span of an expert that is resident in one
        self.first_slot = array("q", [_NO_SLOT]) * geometry.num_experts  # of that span: native code reads it
        self.quotas = list(budget.layer_quotas)  # most units a layer keeps; in a shared partition, for prompts only
        self.targets: list[int] | None = None  # quotas that `rearrange` moves towards; None once reached
        if tops is not None:
            every = zip(self.quotas, tops, geometry.layers, strict=True)
            self.quotas = [whole_tops(quota, top, layer.num_experts) for quota, top, layer in every]
        pools = [Pool(*nums, num_parts) for nums in zip(budget.kept_slots, budget.staging_slots, strict=True)]
        of_layers = [pools[size_class] for size_class in geometry.size_classes]
        if scope == "layer":
            every_top = tops or [num_parts] * geometry.num_layers
            self.partitions = [
                Partition(quota, top, make_policy(quota // top, [layer]), pool)
                for layer, (quota, top, pool) in enumerate(zip(self.quotas, every_top, of_layers, strict=True))
            ]
        else:
            shared = {
                pool: Partition(
                    num, num_parts, make_policy(num // num_parts, geometry.layers_of_class(size_class)), pool
                )
                for size_class, (num, pool) in enumerate(zip(budget.kept_slots, pools, strict=True))
            }
            self.partitions = [shared[pool] for pool in of_layers]
        if self.is_split:
            self._set_staging()

    @property
    def pools(self) -> list[Pool]:
        """Of each size class."""
        return list(dict.fromkeys([partition.pool for partition in self.partitions]))

    @property
    def tops(self) -> list[int]:
        """For each layer, how many units of an expert it keeps, from the first one."""
        return [partition.top for partition in self.partitions]

    @property
    def is_shared(self) -> bool:
        """Whether layers share a partition."""
        return len(self.distinct_partitions()) < len(self.partitions)

    def distinct_partitions(self) -> list[Partition]:
        return list(dict.fromkeys(self.partitions))

    # -- units -------------------------------------------------------------------------------------------------

    def units(self, eid: int) -> range:
        num_parts = self.num_parts
        return range(eid * num_parts, (eid + 1) * num_parts)

    def units_of(self, span: Span) -> range:
        geometry = self.geometry
        first = (geometry.first_ids[span.layer] + span.expert) * self.num_parts + span.segment
        return range(first, first + span.num_segments)

    def in_state(self, eid: int, state: int) -> Sequence[int]:
        """The units of an expert that are in this state."""
        first, stop = eid * self.num_parts, (eid + 1) * self.num_parts
        states = self.state[first:stop]
        if states.count(state) == self.num_parts:  # nearly always, or none
            return range(first, stop)
        return [unit for unit in range(first, stop) if self.state[unit] == state] if state in states else ()

    def absent(self, eids: Iterable[int]) -> list[Sequence[int]]:
        """The absent units of each of these experts."""
        num_parts, state, every = self.num_parts, self.state, list[Sequence[int]]()
        for first in map(num_parts.__mul__, eids):
            units: Sequence[int] = range(first, first + num_parts)
            if state[first : first + num_parts].count(ABSENT) < num_parts:
                units = [unit for unit in units if state[unit] == ABSENT]
            every.append(units)
        return every

    def kept_of(self, eid: int) -> Sequence[int]:
        """The units of an expert that are kept."""
        first, stop = eid * self.num_parts, (eid + 1) * self.num_parts
        kept = self.kept[first:stop]
        return range(first, stop) if False not in kept else [unit for unit in range(first, stop) if self.kept[unit]]

    def lacking(self, layer: int, eids: Iterable[int]) -> list[Sequence[int]]:
        """Of each of these experts of a layer, the units of its top that are not kept."""
        num_parts, top, every = self.num_parts, self.partitions[layer].top, list[Sequence[int]]()
        for first in map(num_parts.__mul__, eids):
            kept = self.kept[first : first + top]
            units: Sequence[int] = range(first, first + top)
            if True in kept:
                units = () if False not in kept else [unit for unit in units if not self.kept[unit]]
            every.append(units)
        return every

    def num_resident(self, eid: int) -> int:
        first = eid * self.num_parts
        return self.state[first : first + self.num_parts].count(RESIDENT)

    def count_resident(self, eids: Iterable[int]) -> int:
        """How many of these experts are wholly resident."""
        state, num = self.state, self.num_parts
        return sum([state[eid * num : (eid + 1) * num].count(RESIDENT) == num for eid in eids])

    def is_top(self, unit: int) -> bool:
        """Whether its layer keeps the unit, if it keeps the expert."""
        return unit % self.num_parts < self.partitions[self.geometry.layer_of[unit // self.num_parts]].top

    def residency(self) -> list[int]:
        """Of each expert, how many of its units are there. Any thread may ask."""
        return list(map(self.num_resident, range(self.geometry.num_experts)))

    def resident_nbytes(self) -> int:
        """Of the units that are there. Any thread may ask."""
        geometry, nbytes = self.geometry, 0
        for layer, first, shape in zip(range(geometry.num_layers), geometry.first_ids, geometry.layers, strict=True):
            units = slice(self.units(first).start, self.units(first + shape.num_experts).start)
            nbytes += self.state[units].count(RESIDENT) * geometry.unit_nbytes[layer]
        return nbytes

    def spans(self, units: Sequence[int]) -> list[Span]:
        """Units of one expert, rising, as runs of adjacent units in adjacent slots."""
        if not units:
            return []
        geometry, slot_of = self.geometry, self.slot
        eid = units[0] // self.num_parts
        layer, first = geometry.layer_of[eid], eid * self.num_parts
        spans: list[Span] = []
        begin = units[0]
        for unit, following in zip(units, [*units[1:], -1], strict=True):
            if following != unit + 1 or slot_of[following] != slot_of[unit] + 1:
                expert = eid - geometry.first_ids[layer]
                spans.append(Span(layer, expert, begin - first, unit + 1 - begin, slot_of[begin]))
                begin = following
        return spans

    # -- slots -------------------------------------------------------------------------------------------------

    def allocate(self, units: Sequence[int], state: int) -> list[Span]:
        """Allocate slots for units of one expert that have none, beside its other units where possible. Enough slots
        are free. Returns the spans to load.
        """
        geometry, num_parts = self.geometry, self.num_parts
        eid = units[0] // num_parts
        layer = geometry.layer_of[eid]
        pool = self.partitions[layer].pool
        if state == PREFETCHING:
            self.prefetching.update(dict.fromkeys(units, self.is_decoding))
        if len(units) == num_parts and pool.blocks:  # nearly always
            first, slot = units[0], pool.blocks.pop()
            pool.num_free -= num_parts
            assert self.slot[first] == _NO_SLOT, "a unit has one slot"
            self.slot[first : first + num_parts] = range(slot, slot + num_parts)
            self.state[first : first + num_parts] = [state] * num_parts
            return [Span(layer, eid - geometry.first_ids[layer], 0, num_parts, slot)]
        for run in runs(units):
            before = self.slot[run.start - 1] if run.start % num_parts else _NO_SLOT
            assert self.slot[run.start : run.stop] == [_NO_SLOT] * len(run), "a unit has one slot"
            self.slot[run.start : run.stop] = pool.take(len(run), None if before == _NO_SLOT else before + 1)
            self.state[run.start : run.stop] = [state] * len(run)
        return self.spans(units)

    def arrived(self, span: Span) -> bool:
        """A span that was on its way is there. Returns whether the running layer waits for it."""
        num, num_parts = span.num_segments, self.num_parts
        eid = self.geometry.first_ids[span.layer] + span.expert
        first = eid * num_parts + span.segment
        state = self.state[first]
        assert state in (LOADING, PREFETCHING), "only what is on its way arrives"
        assert self.state[first : first + num].count(state) == num
        self.state[first : first + num] = [RESIDENT] * num
        if state == PREFETCHING:
            for unit in range(first, first + num):
                del self.prefetching[unit]
        if num < num_parts:
            units = self.in_state(eid, RESIDENT)
            spans = self.spans(units) if len(units) == num_parts else []
            if len(spans) != 1:
                return state == LOADING
            span = spans[0]
        self.whole[eid], self.first_slot[eid] = span, span.slot
        return state == LOADING

    def await_prefetched(self, eid: int) -> list[Span]:
        """The running layer needs the expert now, and waits for what is being prefetched of it. Returns its spans."""
        units = self.in_state(eid, PREFETCHING)
        for unit in units:
            self.state[unit] = LOADING
            del self.prefetching[unit]
        return self.spans(units)

    def release(self, units: Sequence[int], *, to_staging: bool = False) -> None:
        """Stop keeping units of one expert, and free their slots. `to_staging`: they keep their slots until the running
        layer has computed them.
        """
        eid = units[0] // self.num_parts
        partition, num_kept = self.partitions[self.geometry.layer_of[eid]], sum(map(self.kept.__getitem__, units))
        if num_kept:
            partition.room += num_kept
            partition.pool.num_kept -= num_kept
            for unit in units:
                self.kept[unit] = False
            if True not in self.kept[eid * self.num_parts : (eid + 1) * self.num_parts]:
                partition.policy.removed(eid)
        if to_staging:
            return
        pool, span = partition.pool, self.whole[eid]
        if span is not None and len(units) == pool.block_size and not span.slot % pool.block_size:  # nearly always
            pool.blocks.append(span.slot)
            pool.num_free += pool.block_size
        else:
            pool.give(list(map(self.slot.__getitem__, units)))
        for unit in units:
            self.state[unit], self.slot[unit] = ABSENT, _NO_SLOT
            self.prefetching.pop(unit, None)
        self.whole[eid], self.first_slot[eid] = None, _NO_SLOT

    def free_staged(self, units: Iterable[int]) -> None:
        """Free the slots of those of an expert's units that are not kept."""
        if staged := [unit for unit in units if self.slot[unit] >= 0 and not self.kept[unit]]:
            self.release(staged)

    # -- counting ----------------------------------------------------------------------------------------------

    def count_demand(self, router: RouterRan, missing: Sequence[int], parts_there: Sequence[int]) -> None:
        """Count the experts that real tokens demand, before anything is admitted; not those that only pads chose.

        `missing`: positions in the router's list of experts that are not wholly resident; `parts_there`: how many of
        the P units of each are.
        """
        counters, num_parts = self.counters[router.layer], self.num_parts
        unit_nbytes = self.geometry.unit_nbytes[router.layer]
        is_decode, num_tokens = router.is_decode, router.num_tokens
        groups = [(True in is_decode, len(num_tokens), parts_there)]  # nearly always all are of one phase
        if 0 in num_tokens or (True in is_decode and False in is_decode):
            there = dict(zip(missing, parts_there, strict=True))
            groups = []
            for of_decode in (True, False):
                positions = [i for i, num in enumerate(num_tokens) if num and is_decode[i] == of_decode]
                groups.append((of_decode, len(positions), [there[i] for i in positions if i in there]))
        for of_decode, num_experts, nums_there in groups:
            phase = counters.decode if of_decode else counters.prefill
            hits, num_partial = num_experts - len(nums_there), sum(map(bool, nums_there))
            phase.hits += hits
            phase.partial_hits += num_partial
            phase.misses += len(nums_there) - num_partial
            phase.demanded_nbytes += num_experts * num_parts * unit_nbytes
            phase.hit_nbytes += (hits * num_parts + sum(nums_there)) * unit_nbytes

    # -- keeping and evicting ----------------------------------------------------------------------------------

    def keep(self, experts: Iterable[Sequence[int]]) -> None:
        """Keep units that are not kept yet, a list for each expert; some may be staged. The partition has room."""
        geometry, num_parts = self.geometry, self.num_parts
        for units in filter(None, experts):
            eid = units[0] // num_parts
            partition = self.partitions[geometry.layer_of[eid]]
            partition.room -= len(units)
            assert partition.room >= 0, "a partition never exceeds its capacity"
            partition.pool.num_kept += len(units)
            is_new = True not in self.kept[eid * num_parts : (eid + 1) * num_parts]
            for unit in units:
                self.kept[unit] = True
            if is_new:
                partition.policy.admitted(eid)

    def make_room(self, layer: int, num_units: int, protected: Container[int]) -> int:
        """Evict until `num_units` fit, or nothing if they cannot. Returns the room afterwards."""
        partition = self.partitions[layer]
        if partition.room < num_units <= partition.capacity:
            victims, lacking = self._victims(layer, num_units - partition.room, protected)
            if not lacking:
                self.evict(victims)
        return partition.room

    def room_of_prompts(self, layer: int) -> int:
        """Of the layer's quota, what its prompts may fill."""
        geometry = self.geometry
        first = geometry.first_ids[layer]
        units = slice(self.units(first).start, self.units(first + geometry.layers[layer].num_experts).start)
        return max(0, min(self.partitions[layer].room, self.quotas[layer] - self.kept[units].count(True)))

    def evict(self, victims: Iterable[Sequence[int]], *, to_staging: bool = False) -> None:
        """Release kept units, a list for each expert. Counts the bytes of the layers that lost them, in the phase of
        the layer that needed the room.
        """
        for units in filter(None, victims):
            layer = self.geometry.layer_of[units[0] // self.num_parts]
            self.release(units, to_staging=to_staging)
            counters = self.counters[layer]
            phase = counters.decode if self.is_decoding else counters.prefill
            phase.evicted_nbytes += len(units) * self.geometry.unit_nbytes[layer]

    def _victims(self, layer: int, num_units: int, protected: Container[int]) -> tuple[list[Sequence[int]], int]:
        """Returns the units to evict of each victim outside `protected`, and how many units are still lacking then.
        Unless whole experts go, a victim loses its last kept units first.
        """
        partition = self.partitions[layer]
        is_whole = self.evicts_whole and partition.top == self.num_parts
        victims: list[Sequence[int]] = []
        for eid in partition.policy.victims(protected) if num_units > 0 else ():
            kept = self.kept_of(eid)
            victims.append(kept if is_whole else kept[-num_units:])
            num_units -= len(victims[-1])
            if num_units <= 0:
                break
        return victims, max(0, num_units)

    def admit_best(self, router: RouterRan, needed: Sequence[int], upcoming: Iterable[int]) -> None:
        """Keep the most valuable of the kept and the needed experts. Needed ones that lose are staged until they are
        computed; of their kept units, only as many as staging has room for. Never evicts `upcoming`.
        """
        layer = router.layer
        partition, pool, policy = self.partitions[layer], self.partitions[layer].pool, self.partitions[layer].policy
        assert isinstance(policy, ScoredPolicy), "admission `best` compares scores"
        policy.needed(needed, router)
        new = dict(zip(needed, self.lacking(layer, needed), strict=True))
        excess = sum(map(len, new.values())) - partition.room
        if excess > 0:
            victims = policy.cheapest({*needed, *upcoming}, excess)[::-1]
            rivals = sorted(zip(policy.scores(needed), needed, strict=True), reverse=True)
            can_stage = max(0, pool.staging - (pool.num_slots - pool.num_free - pool.num_kept))
            to_go, to_stage = list[Sequence[int]](), list[Sequence[int]]()
            while excess and (rivals or victims):
                if victims and (not rivals or victims[-1] <= rivals[-1]):
                    to_go.append(self.kept_of(victims.pop()[1])[-excess:])
                    excess -= len(to_go[-1])
                    continue
                eid = rivals.pop()[1]
                kept = self.kept_of(eid)
                # Units that are not kept yet, and kept ones that staging can take; the last go first.
                losing = sorted([*new[eid], *kept[max(0, len(kept) - can_stage) :]])[-excess:]
                excess -= len(losing)
                new[eid] = list(filterfalse(losing.__contains__, new[eid]))
                to_stage.append(list(filter(losing.__contains__, kept)))
                can_stage -= len(to_stage[-1])
            self.evict(to_go)
            if to_stage:
                self.evict(to_stage, to_staging=True)
        self.keep(new.values())

    # -- quotas ------------------------------------------------------------------------------------------------

    def resize(self, quotas: Sequence[int], tops: Sequence[int] | None = None) -> None:
        """Set the quotas to reach, in units, and how many units of an expert layers keep (`tops`); `rearrange` moves
        towards them. Without `tops` the sum in each size class stays the same; with `tops` it may be below the slots
        that the budget keeps, and the rest is staging. Only where each layer has its own partition.
        """
        sums = check_quotas(self.geometry, quotas)
        if tops is None:
            accepted = self.geometry.class_sums(self.targets or self.quotas)
            if sums != accepted:
                raise ConfigError(f"allocation: quotas={list(quotas)}: must have the sum of {accepted} by size class")
        else:
            accepted = [pool.num_slots - pool.least_staging for pool in self.pools]
            if any(map(gt, sums, accepted)):
                raise ConfigError(f"allocation: quotas={list(quotas)}: must be at most {accepted} by size class")
            self.is_split = True
            for partition, top in zip(self.partitions, tops, strict=True):
                partition.top = top
        self.targets = list(quotas)

    def rearrange(self, protected: Container[int]) -> None:
        """Between layers: move towards `targets`, which is None once they are reached. First evicts units beyond the
        tops, and, where whole experts are kept, those that lie in several spans: computing these would cost more. Then
        layers that shrink evict, by their policies, what is not `protected`. Then layers that grow get the room, the
        lowest first. An expert of which less than the top is kept is filled when it is needed next.
        """
        if self.targets is None:
            return
        is_cut = not self.is_split or self._cut(protected)
        for layer, (partition, target) in enumerate(zip(self.partitions, self.targets, strict=True)):
            if target < self.quotas[layer]:
                less = self.quotas[layer] - target
                victims, lacking = self._victims(layer, less - partition.room, protected)
                self.evict(victims)
                self._change_quota(layer, lacking - less)
        sums = self.geometry.class_sums(self.quotas)
        room = []
        for pool, quotas in zip(self.pools, sums, strict=True):
            staged = pool.num_staged + self.num_parts if pool.num_staged else 0  # and room for one load
            room.append(pool.num_slots - max(pool.least_staging, staged) - quotas)
        for layer, (size_class, target) in enumerate(zip(self.geometry.size_classes, self.targets, strict=True)):
            more = max(0, min(target - self.quotas[layer], room[size_class]))
            room[size_class] -= more
            self._change_quota(layer, more)
        if self.is_split:
            self._set_staging()
        if is_cut and self.quotas == self.targets:
            self.targets = None

    def _change_quota(self, layer: int, change: int) -> None:
        self.quotas[layer] += change
        self.partitions[layer].capacity += change
        self.partitions[layer].room += change

    def _cut(self, protected: Container[int]) -> bool:
        """Evict what is kept beyond the tops, or in several spans; returns whether all of it is gone."""
        is_cut, num_parts = True, self.num_parts
        for eid, layer in enumerate(self.geometry.layer_of):
            kept, top = self.kept_of(eid), self.partitions[layer].top
            is_scattered = top == num_parts and self.whole[eid] is None
            units = kept if is_scattered else [unit for unit in kept if unit % num_parts >= top]
            if units and eid in protected:
                is_cut = False
            elif units:
                self.evict([units])
        return is_cut

    def _set_staging(self) -> None:
        for pool, kept in zip(self.pools, self.geometry.class_sums(self.quotas), strict=True):
            pool.staging = pool.num_slots - kept

    def check(self) -> None:
        """Assert that slots, units, quotas and budget agree."""
        taken: dict[Pool, list[int]] = {pool: [] for pool in self.pools}
        for eid, layer in enumerate(self.geometry.layer_of):
            units = self.units(eid)
            self._check_whole(eid)
            taken[self.partitions[layer].pool] += [self.slot[unit] for unit in units if self.slot[unit] != _NO_SLOT]
        for pool, used in taken.items():
            pool.check(used)
        assert sorted(self.prefetching) == [unit for unit, state in enumerate(self.state) if state == PREFETCHING]
        assert self.is_shared or self.quotas == [partition.capacity for partition in self.partitions]
        self._check_kept()

    def _check_whole(self, eid: int) -> None:
        spans = self.spans(self.in_state(eid, RESIDENT))
        whole = next((span for span in spans if span.num_segments == self.num_parts), None)
        assert self.whole[eid] == whole
        assert self.first_slot[eid] == (whole.slot if whole else _NO_SLOT)

    def _check_kept(self) -> None:
        num_kept = dict.fromkeys(self.partitions, 0)
        for unit, (state, slot, is_kept) in enumerate(zip(self.state, self.slot, self.kept, strict=True)):
            assert (slot != _NO_SLOT) == (state >= LOADING), "what has a slot is not absent"
            if is_kept:
                assert slot != _NO_SLOT, "kept units have slots"
                assert self.targets or self.is_top(unit), "only tops are kept"
                num_kept[self.partitions[self.geometry.layer_of[unit // self.num_parts]]] += 1
        for partition, num in num_kept.items():
            assert num == partition.capacity - partition.room <= partition.capacity
        for pool in self.pools:
            assert pool.num_kept == sum(num for partition, num in num_kept.items() if partition.pool is pool)
