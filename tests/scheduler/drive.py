"""Drives a scheduler as an engine would, in any order of arrival, and notes what it did."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Plan, Prediction, RouterRan, Span
from expertly.core.observation import Routed
from expertly.policies.eviction.simple import LRU
from expertly.scheduler.budget import Budget, split_budget
from expertly.scheduler.presets import SYSTEMS, get_system, runnable_systems
from expertly.scheduler.scheduler import Scheduler
from tests.scheduler.checked import CheckedScheduler, mask_of

WAYS = [("resident", "early"), ("resident", "late"), ("id", "early"), ("id", "late")]
"""(order, preemption): how a layer can run."""


def control_planes() -> list[str]:
    """A preset of each control plane: where nothing is predicted every other preset runs as one of these does."""
    found: dict[tuple[str, ...], str] = {}
    for name in runnable_systems():
        one = SYSTEMS[name]
        if not one.keeps_everything:
            found.setdefault((one.eviction, one.scope, one.allocation, one.admission), name)
    return list(found.values())


def ways() -> list[tuple[str, str, str]]:
    """(system, order, preemption): each control plane in every way that it can run."""
    found = []
    for system in control_planes():
        has_choice = SYSTEMS[system].admission == "best"  # of all that a layer needs at once
        found += [(system, *way) for way in (WAYS[:1] if has_choice else WAYS)]
    return found


def geometry(layers: int = 2, experts: int = 8, top_k: int = 2, segments: int = 1, width: int = 16) -> Geometry:
    return Geometry(tuple(LayerGeometry(experts, top_k, 4, width, 3, 2) for _ in range(layers)), segments)


def scheduler(
    shape: Geometry,
    share: float,
    system: str = "lru",
    staging: int | None = None,
    order: str | None = None,
    preemption: str = "early",
) -> Scheduler:
    """A scheduler whose whole budget is `share` of the experts."""
    parts = replace(get_system(system), preemption=preemption)
    budget = parts.budget(shape, split_budget(shape, int(shape.nbytes * share), staging))
    return parts.scheduler(shape, budget, order=order)


@dataclass
class Ran:
    """What happened in one layer: masks computed and loaded by expert, in the order of the loads."""

    computed: dict[int, int] = field(default_factory=dict)
    loaded: dict[int, int] = field(default_factory=dict)
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
        span, is_here = todo.pop(0)
        assert is_here or control.loaded(span)
        following = control.computed([span])
        if following is not None:
            todo += [(one, True) for one in following.ready]
            todo += [(one, False) for one in [*following.in_flight, *following.loads]]
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
    ran.loads += [*plan.loads, *plan.requested]
    requested = list(plan.requested)  # computed when a later plan says so
    while ready or loading:
        take_load = bool(loading) and (not ready or (dice is not None and dice.random() < 0.5))
        source = loading if take_load else ready
        span = source.pop(dice.randrange(len(source)) if dice else 0)
        if take_load:
            assert control.loaded(span)
            ran.loaded[span.expert] = ran.loaded.get(span.expert, 0) | mask_of(span)
        assert not ran.computed.get(span.expert, 0) & mask_of(span), "no segment is computed twice"
        ran.computed[span.expert] = ran.computed.get(span.expert, 0) | mask_of(span)
        following = control.computed([span])
        if following is not None:
            ready += following.ready
            arriving = {span.expert for span in following.in_flight}  # they arrive as they were requested
            loading += [*following.loads, *(span for span in requested if span.expert in arriving)]
            requested = [*(span for span in requested if span.expert not in arriving), *following.requested]
            ran.loads += [*following.loads, *following.requested]
        if requested and dice is not None and dice.random() < 0.5:
            span = requested.pop(dice.randrange(len(requested)))
            assert not control.loaded(span), "its turn has not come"
            ran.loaded[span.expert] = ran.loaded.get(span.expert, 0) | mask_of(span)
        if check:
            control.slots.check()
    assert not requested
    control.end_layer()
    if check:
        control.check()
    full = control.slots.full
    assert ran.computed == dict.fromkeys(experts, full), "every needed expert is computed, whole"
    return ran


def kept(control: Scheduler, layer: int) -> set[int]:
    """Experts of a layer that are wholly resident."""
    first, full = control.geometry.first_expert_id(layer), control.slots.full
    resident = control.slots.resident
    return {e for e in range(control.geometry.layers[layer].num_experts) if resident[first + e] == full}


def routed(router: RouterRan) -> Callable[[], Routed]:
    """What a predictor sees of a router: its choice."""
    return partial(Routed, router)
