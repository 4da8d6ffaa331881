"""Drives a controller as an engine would, in any order of arrival, and notes what it did."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from expertly.control.budget import split_budget
from expertly.control.controller import Controller
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Piece, RouterRan
from expertly.systems import get_system


def geometry(layers: int = 2, experts: int = 8, top_k: int = 2, segments: int = 1, width: int = 16) -> Geometry:
    return Geometry(tuple(LayerGeometry(experts, top_k, 4, width, 3, 2) for _ in range(layers)), segments)


def controller(
    shape: Geometry, share: float, system: str = "lru", ring: int | None = None, order: str = "resident"
) -> Controller:
    """A controller whose whole budget is `share` of the experts."""
    budget = split_budget(shape, int(shape.nbytes * share), ring)
    return get_system(system).controller(shape, budget, order=order)


@dataclass
class Ran:
    """What happened in one layer: masks computed and loaded by expert, in the order of the loads."""

    computed: dict[int, int] = field(default_factory=dict)
    loaded: dict[int, int] = field(default_factory=dict)
    loads: list[Piece] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)


def mask_of(piece: Piece) -> int:
    return ((1 << piece.num_segments) - 1) << piece.segment


def run_layer(
    control: Controller,
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
    step = control.begin_layer(RouterRan(layer, experts, tokens, flags, max(tokens)))
    ready, loading = list(step.ready), list(step.loads)
    ran.hits = [p.expert for p in ready if p.num_segments == control.geometry.segments_per_expert]
    ran.loads += step.loads
    while ready or loading:
        take_load = bool(loading) and (not ready or (dice is not None and dice.random() < 0.5))
        source = loading if take_load else ready
        piece = source.pop(dice.randrange(len(source)) if dice else 0)
        if take_load:
            control.loaded(piece)
            ran.loaded[piece.expert] = ran.loaded.get(piece.expert, 0) | mask_of(piece)
        assert not ran.computed.get(piece.expert, 0) & mask_of(piece), "no segment is computed twice"
        ran.computed[piece.expert] = ran.computed.get(piece.expert, 0) | mask_of(piece)
        following = control.computed(piece)
        if following is not None:
            ready += following.ready
            loading += following.loads
            ran.loads += following.loads
        if check:
            control.residency.check()
    control.end_layer()
    if check:
        control.check()
    full = control.residency.full
    assert ran.computed == dict.fromkeys(experts, full), "every needed expert is computed, whole"
    return ran


def kept(control: Controller, layer: int) -> set[int]:
    """Experts of a layer that are wholly resident."""
    first, full = control.geometry.first_expert_id(layer), control.residency.full
    resident = control.residency.resident
    return {e for e in range(control.geometry.layers[layer].num_experts) if resident[first + e] == full}
