"""The scheduler beside the naive reference, layer by layer: the same loads, the same hits, the same cache."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.scheduler.budget import split_budget
from expertly.scheduler.presets import get_system
from expertly.scheduler.scheduler import Scheduler
from expertly.scheduler.slots import bits
from tests.scheduler.drive import geometry, run_layer
from tests.scheduler.reference import Reference


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
    return parts.scheduler(shape, replace(budget, layer_shares=tuple(shares)))


@pytest.mark.parametrize("system", ["lru", "lfu", "lcp", "on-demand"])
@pytest.mark.parametrize("segments", [1, 2, 4])
@pytest.mark.parametrize("kinds", [["token"], ["token", "decode"], ["token", "token", "prefill", "decode", "mixed"]])
def test_every_decision_is_the_references(system: str, segments: int, kinds: list[str]) -> None:
    layers, experts, top_k = 3, 10, 3
    for share in (0.13, 0.31, 0.5, 0.77):
        shape = geometry(layers, experts, top_k, segments)
        control = by_the_slot(shape, share, system)
        reference = Reference(shape, system, control.budget.layer_shares)
        dice = random.Random(f"{share} {kinds}")
        seen: Counter[tuple[bool, str]] = Counter()
        for step in range(120):
            for layer in range(layers):
                chosen, tokens, decode = batch(dice, experts, top_k, dice.choice(kinds))
                ran = run_layer(control, layer, chosen, tokens=tokens, decode=decode, dice=dice)
                loads = reference.layer(layer, chosen, tokens, decode)
                assert {e: set(bits(mask)) for e, mask in ran.loaded.items()} == loads, f"step {step}"
                for expert, num, is_decode in zip(chosen, tokens, decode, strict=True):
                    if num:
                        missing = len(loads.get(expert, ()))
                        kind = "hits" if not missing else "misses" if missing == segments else "partial_hits"
                        seen[is_decode, kind] += 1
                resident = {eid: set(bits(mask)) for eid, mask in enumerate(control.slots.resident) if mask}
                assert resident == reference.kept, f"step {step}"
        control.check()
        for is_decode, kind in list(seen):
            phases = [one.decode if is_decode else one.prefill for one in control.counters]
            assert sum(getattr(phase, kind) for phase in phases) == seen[is_decode, kind]
        assert share < 0.5 or (seen[True, "hits"] and seen[True, "misses"]), "both happened"


@pytest.mark.parametrize("system", ["lru", "lfu", "lcp"])
def test_layers_of_several_shapes_decide_each_for_itself(system: str) -> None:
    small, large = LayerGeometry(5, 2, 4, 16, 3, 2), LayerGeometry(9, 4, 4, 32, 3, 2)
    shape = Geometry((small, large, large, small), 2)
    control = by_the_slot(shape, 0.55, system)
    reference = Reference(shape, system, control.budget.layer_shares)
    dice = random.Random(1)
    for _ in range(150):
        for layer, one in enumerate(shape.layers):
            chosen, tokens, decode = batch(dice, one.num_experts, one.top_k, dice.choice(["token", "mixed"]))
            ran = run_layer(control, layer, chosen, tokens=tokens, decode=decode, dice=dice, check=True)
            loads = reference.layer(layer, chosen, tokens, decode)
            assert {e: set(bits(mask)) for e, mask in ran.loaded.items()} == loads
            assert {e: set(bits(m)) for e, m in enumerate(control.slots.resident) if m} == reference.kept
