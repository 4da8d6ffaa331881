"""A cache of expert segments with dicts and sorting, as docs/conventions.md words it: slow, and obviously right."""

from __future__ import annotations

from expertly.core.geometry import Geometry
from expertly.scheduler.presets import get_system


class Reference:
    """What is kept of each expert, by dense expert id, and what each layer loads. One cache a layer, or one in all."""

    def __init__(self, shape: Geometry, system: str, shares: tuple[int, ...]) -> None:
        self.shape, self.shares = shape, shares
        self.eviction, self.is_global = get_system(system).eviction, get_system(system).scope == "global"
        self.kept: dict[int, set[int]] = {}
        self.tokens_served: dict[int, int] = {}
        self.last_use: dict[int, tuple[int, int]] = {}  # (call, tokens in it)
        self.last_token: dict[int, int] = {}  # token of the layer's own clock, of the whole cache's where it is one
        self.calls = 0
        self.clock = [0] * shape.num_layers

    def layer(self, layer: int, experts: list[int], tokens: list[int], decode: list[bool]) -> dict[int, set[int]]:
        """Run a layer; the segments that had to be loaded, by expert."""
        self.calls += 1
        first, every = self.shape.first_expert_id(layer), set(range(self.shape.segments_per_expert))
        loads = {e: every - self.kept.get(first + e, set()) for e in experts}
        loads = {e: segments for e, segments in loads.items() if segments}
        evicting = [e for e, num, is_decode in zip(experts, tokens, decode, strict=True) if num and is_decode]
        count = dict(zip(experts, tokens, strict=True))
        filling = sorted((e for e in experts if e not in evicting), key=lambda e: (-count[e], e))
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
            of_layer = sum(len(s) for e, s in self.kept.items() if self.shape.layer_of_expert(e) == layer)
            room = max(0, min(room, self.shares[layer] - of_layer))
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
        return [e for e in self.kept if self.is_global or self.shape.layer_of_expert(e) == layer]

    def room(self, layer: int) -> int:
        capacity = sum(self.shares) if self.is_global else self.shares[layer]
        return capacity - sum(len(self.kept[e]) for e in self.in_cache(layer))

    def clock_of(self, layer: int) -> int:
        return self.clock[0 if self.is_global else layer]
