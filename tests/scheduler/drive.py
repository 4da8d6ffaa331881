"""Drives a scheduler as an engine would, in any order of arrival, and notes what it did."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Plan, Prediction, RouterRan, Span
from expertly.core.observation import Routed
from expertly.policies.lru import LRU
from expertly.scheduler.budget import Budget, split_budget
from expertly.scheduler.scheduler import Scheduler
from expertly.scheduler.systems import SYSTEMS, get_system, runnable_systems
from tests.scheduler.checked import CheckedScheduler


def control_planes() -> list[str]:
    """A preset of each control plane: where nothing is predicted every other preset runs as one of these does."""
    result: dict[tuple[str, ...], str] = {}
    for name in runnable_systems():
        each = SYSTEMS[name]
        if not each.keeps_everything:
            result.setdefault((each.eviction, each.scope, each.allocation, each.admission), name)
    return list(result.values())


def geometry(layers: int = 2, experts: int = 8, top_k: int = 2, segments: int = 1, width: int = 16) -> Geometry:
    return Geometry(tuple(LayerGeometry(experts, top_k, 4, width, 3, 2) for _ in range(layers)), segments)


def scheduler(shape: Geometry, share: float, system: str = "lru", staging: int | None = None) -> Scheduler:
    """A scheduler whose whole budget is `share` of the experts."""
    parts = get_system(system)
    budget = parts.budget(shape, split_budget(shape, int(shape.nbytes * share), staging))
    return parts.scheduler(shape, budget)


@dataclass
class Ran:
    """What happened in one layer: parts computed and loaded by expert, in the order of the loads."""

    computed: dict[int, set[int]] = field(default_factory=dict)
    loaded: dict[int, set[int]] = field(default_factory=dict)
    loads: list[Span] = field(default_factory=list)


def one_token(layer: int, experts: list[int], decode: bool = True) -> RouterRan:
    return RouterRan(layer, experts, [1] * len(experts), [decode] * len(experts), 1)


def prediction(layer: int, experts: list[int], distance: int = 1) -> Prediction:
    return Prediction(layer, experts, [1.0 - 0.01 * i for i in range(len(experts))], distance)


def made(
    shape: Geometry, quotas: list[int], staging: int, ahead: str = "cache", scope: str = "layer", **kwargs: Any
) -> CheckedScheduler:
    """With so many kept segments a layer, and LRU."""
    budget = Budget(0, (staging,), (sum(quotas),), tuple(quotas))
    return CheckedScheduler(shape, budget, lambda capacity, layers: LRU(), scope=scope, ahead=ahead, **kwargs)


def run(control: Scheduler, router: RouterRan) -> Plan:
    """A layer to its end; what is loaded arrives in order."""
    plan = control.begin_layer(router)
    todo = [(span, True) for span in plan.ready] + [(span, False) for span in [*plan.in_flight, *plan.loads]]
    while todo:
        span, is_there = todo.pop(0)
        spans = (span,) if is_there else control.loaded(span)
        assert spans is not None
        if spans:
            todo += [(load, False) for load in control.computed(spans)]
    control.end_layer()
    return plan


def run_layer(
    control: Scheduler,
    layer: int,
    experts: list[int],
    *,
    tokens: list[int] | None = None,
    decode: bool | list[bool] = True,
    dice: random.Random | None = None,
    check: bool = False,
) -> Ran:
    """One layer to its end; arrivals and computations in the order of `dice`, else first come, first served."""
    tokens = tokens or [1] * len(experts)
    flags = decode if isinstance(decode, list) else [decode] * len(experts)
    ran = Ran()
    plan = control.begin_layer(RouterRan(layer, experts, tokens, flags, max(tokens)))
    ready, loading = list(plan.ready), list(plan.loads)
    ran.loads += plan.loads
    while ready or loading:
        take_load = bool(loading) and (not ready or (dice is not None and dice.random() < 0.5))
        source = loading if take_load else ready
        span = source.pop(dice.randrange(len(source)) if dice else 0)
        spans: Sequence[Span] | None = (span,)
        if take_load:
            spans = control.loaded(span)
            assert spans is not None
            ran.loaded.setdefault(span.expert, set()).update(parts_of(span))
        for span in spans:
            computed = ran.computed.setdefault(span.expert, set())
            assert not computed.intersection(parts_of(span)), "no unit is computed twice"
            computed.update(parts_of(span))
            following = control.computed([span])
            loading += following
            ran.loads += following
        if check:
            control.cache.check()
    control.end_layer()
    if check:
        control.check()
    whole = set(range(control.cache.num_parts))
    assert ran.computed == dict.fromkeys(experts, whole), "every needed expert is computed, whole"
    return ran


def kept(control: Scheduler, layer: int) -> set[int]:
    """Experts of a layer that are wholly resident."""
    first, experts = control.geometry.first_ids[layer], range(control.geometry.layers[layer].num_experts)
    return {expert for expert in experts if control.cache.count_resident([first + expert])}


def kept_experts(control: Scheduler) -> set[int]:
    """Of all layers, by dense id, those of which a part is kept."""
    return set(filter(control.cache.kept_of, range(control.geometry.num_experts)))


def parts_of(span: Span) -> range:
    return range(span.segment, span.segment + span.num_segments)


def routed(router: RouterRan) -> Callable[[], Routed]:
    """What a predictor sees of a router: its choice."""
    return partial(Routed, router)
