"""The scheduler beside the naive reference, layer by layer: the same loads, the same hits, the same cache."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.scheduler.budget import split_budget
from expertly.scheduler.cache import RESIDENT
from expertly.scheduler.scheduler import Scheduler
from expertly.scheduler.systems import get_system
from tests.scheduler.drive import geometry, run_layer
from tests.tables import pairs


class Reference:
    """A cache of expert segments with dicts and sorting, as docs/conventions.md words it: slow, and obviously right."""

    def __init__(self, shape: Geometry, system: str, quotas: tuple[int, ...]) -> None:
        self.shape, self.quotas = shape, quotas
        parts = get_system(system)
        self.eviction, self.is_global = parts.eviction, parts.scope == "global"
        self.prompts_evict = parts.prefill == "evict"
        self.kept: dict[int, set[int]] = {}
        self.tokens_served: dict[int, int] = {}
        self.last_use: dict[int, tuple[int, int]] = {}  # (call, tokens in it)
        self.last_token: dict[int, int] = {}  # token of the layer's own clock, of the whole cache's where it is one
        self.calls = 0
        self.clock = [0] * shape.num_layers

    def layer(self, layer: int, experts: list[int], tokens: list[int], decode: list[bool]) -> dict[int, set[int]]:
        """Run a layer; the segments that had to be loaded, by expert."""
        self.calls += 1
        first, every = self.shape.first_ids[layer], set(range(self.shape.segments_per_expert))
        loads = {e: every - self.kept.get(first + e, set()) for e in experts}
        loads = {e: segments for e, segments in loads.items() if segments}
        evicting = [e for e, num, is_decode in zip(experts, tokens, decode, strict=True) if num and is_decode]
        count = dict(zip(experts, tokens, strict=True))
        filling = sorted((e for e in experts if e not in evicting), key=lambda e: (-count[e], e))
        if self.prompts_evict:
            evicting += [e for e in filling if count[e]]
            filling = [e for e in filling if not count[e]]
        for expert in evicting + filling:
            if expert in loads:
                self.admit(
                    layer, first + expert, sorted(loads[expert]), expert in evicting, {first + e for e in experts}
                )
        now = self.clock_of(layer) + max(tokens)
        self.clock[0 if self.is_global else layer] = now
        for expert, num in count.items():
            if num:
                eid = first + expert
                self.tokens_served[eid] = self.tokens_served.get(eid, 0) + num
                self.last_use[eid] = (self.calls, num)
                self.last_token[eid] = now
        return loads

    def admit(self, layer: int, eid: int, wanted: list[int], may_evict: bool, protected: set[int]) -> None:
        """Keep `wanted`, the lowest first where there is room for a part only."""
        if may_evict and self.room(layer) < len(wanted):
            missing = len(wanted) - self.room(layer)
            victims = [e for e in sorted(self.in_cache(layer), key=self.worth) if e not in protected]
            if sum(len(self.kept[e]) for e in victims) >= missing:
                for victim in victims:
                    for segment in sorted(self.kept[victim], reverse=True)[:missing]:
                        self.kept[victim].remove(segment)
                        missing -= 1
                    if not self.kept[victim]:
                        del self.kept[victim]
        room = self.room(layer)
        if not may_evict:
            of_layer = sum(len(s) for e, s in self.kept.items() if self.shape.layer_of[e] == layer)
            room = max(0, min(room, self.quotas[layer] - of_layer))
        if wanted[:room]:
            if eid not in self.kept:
                self.last_use[eid] = (self.calls, 0)
            self.kept.setdefault(eid, set()).update(wanted[:room])

    def worth(self, eid: int) -> tuple[int, ...]:
        """The least goes first; ties go to the lowest id."""
        served = self.tokens_served.get(eid, 0)
        if self.eviction == "lru":
            return (*self.last_use[eid], eid)
        if self.eviction == "lfu":
            return (served, eid)
        return (served**64 << self.last_token.get(eid, 0), eid)  # (mu / 4 ** (nu / 128)) ** 64, exactly

    def in_cache(self, layer: int) -> list[int]:
        return [e for e in self.kept if self.is_global or self.shape.layer_of[e] == layer]

    def room(self, layer: int) -> int:
        capacity = sum(self.quotas) if self.is_global else self.quotas[layer]
        return capacity - sum(len(self.kept[e]) for e in self.in_cache(layer))

    def clock_of(self, layer: int) -> int:
        return self.clock[0 if self.is_global else layer]


def batch(dice: random.Random, experts: int, top_k: int, kind: str) -> tuple[list[int], list[int], list[bool]]:
    """Experts in router order, real tokens of each, and whether a decoding request is among them."""
    popular = sorted(range(experts), key=lambda e: dice.random() ** (1 / (1 + 3 / (1 + e))), reverse=True)
    num = top_k if kind == "token" else dice.randint(1, experts)
    chosen = popular[:num]
    dice.shuffle(chosen)
    if kind == "token":
        return chosen, [1] * num, [True] * num
    tokens = [dice.choice([0, 1, 1, 2, 9]) for _ in chosen]
    flags = {"decode": 1.0, "prefill": 0.0, "mixed": 0.5}[kind]
    return chosen, tokens, [dice.random() < flags for _ in chosen]


def by_the_slot(shape: Geometry, share: float, system: str) -> Scheduler:
    """Equal shares to the slot, so that every layer keeps a part of an expert."""
    budget = split_budget(shape, int(shape.nbytes * share))
    shares = [0] * shape.num_layers
    for size_class, slots in enumerate(budget.kept_slots):
        layers = [layer for layer, c in enumerate(shape.size_classes) if c == size_class]
        for i, layer in enumerate(layers):
            shares[layer] = slots // len(layers) + (i < slots % len(layers))
    parts = get_system(system)
    return parts.scheduler(shape, replace(budget, layer_quotas=tuple(shares)))


def resident(control: Scheduler) -> dict[int, set[int]]:
    """By expert, the parts that are there."""
    parts: dict[int, set[int]] = {}
    for unit, state in enumerate(control.cache.state):
        if state == RESIDENT:
            parts.setdefault(unit // control.cache.num_parts, set()).add(unit % control.cache.num_parts)
    return parts


KINDS = [["token"], ["token", "decode"], ["token", "token", "prefill", "decode", "mixed"]]


SYSTEMS = ["lru", "lfu", "lcp", "on-demand", "on-demand:prefill=stream", "lcp:prefill=evict"]
ALIKE = geometry(3, 10, 3).layers
SMALL, LARGE = LayerGeometry(5, 2, 4, 16, 3, 2), LayerGeometry(9, 4, 4, 32, 3, 2)


@pytest.mark.parametrize(
    ("system", "layers", "segments", "kinds"),
    [
        *((system, ALIKE, segments, kinds) for system, segments, kinds in pairs(SYSTEMS, [1, 2, 4], KINDS)),
        *((system, (SMALL, LARGE, LARGE, SMALL), 2, ["token", "mixed"]) for system in ("lru", "lfu", "lcp")),
    ],
)
def test_every_decision_is_the_references(
    system: str, layers: tuple[LayerGeometry, ...], segments: int, kinds: list[str]
) -> None:
    for share in (0.13, 0.31, 0.5, 0.77) if layers is ALIKE else (0.55,):
        shape = Geometry(layers, segments)
        control = by_the_slot(shape, share, system)
        reference = Reference(shape, system, control.budget.layer_quotas)
        dice = random.Random(f"{share} {kinds}")
        seen: Counter[tuple[bool, str]] = Counter()
        for step in range(60):
            for layer, each in enumerate(layers):
                chosen, tokens, decode = batch(dice, each.num_experts, each.top_k, dice.choice(kinds))
                ran = run_layer(control, layer, chosen, tokens=tokens, decode=decode, dice=dice)
                loads = reference.layer(layer, chosen, tokens, decode)
                assert ran.loaded == loads, f"step {step}"
                for expert, num, is_decode in zip(chosen, tokens, decode, strict=True):
                    if num:
                        missing = len(loads.get(expert, ()))
                        kind = "hits" if not missing else "misses" if missing == segments else "partial_hits"
                        seen[is_decode, kind] += 1
                assert resident(control) == reference.kept, f"step {step}"
            control.check()
        for is_decode, kind in list(seen):
            phases = [counter.decode if is_decode else counter.prefill for counter in control.counters]
            assert sum(getattr(phase, kind) for phase in phases) == seen[is_decode, kind]
        assert share < 0.5 or (seen[True, "hits"] and seen[True, "misses"]), "both happened"
