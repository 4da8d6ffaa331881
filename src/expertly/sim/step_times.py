"""How long the parts of a decode step take on a described machine, for who decides by that (MoEpic, section 3.4.1)."""

from __future__ import annotations

from expertly.core.costs import Link
from expertly.core.geometry import Geometry
from expertly.policies.allocation.moepic import Timing
from expertly.sim.compute import ComputeModel


def step_times(geometry: Geometry, link: Link, compute: ComputeModel) -> Timing:
    """Of one token. An expert is loaded a segment at a time from where the link begins, over an idle link."""
    layers, whole = range(geometry.num_layers), geometry.segments_per_expert
    return Timing.of(
        geometry,
        attention_ns=[compute.dense_ns(layer, 1) for layer in layers],
        moe_ns=[geometry.layers[layer].top_k * compute.span_ns(layer, 1, whole) for layer in layers],
        load_ns=[
            round(geometry.layers[layer].expert_nbytes / link.nbytes_per_s * 1e9)
            + whole * (link.overhead_ns + compute.load_ns(layer, 1))
            for layer in layers
        ],
        head_ns=compute.head_ns(1),
        piece_ns=[_further_span_ns(compute, layer, whole) for layer in layers],
        ask_ns=compute.submit_ns,
    )


def _further_span_ns(compute: ComputeModel, layer: int, whole: int) -> int:
    """What two halves of an expert take beyond the whole."""
    if whole == 1:
        return 0
    halves_ns = sum(compute.span_ns(layer, 1, num) for num in (whole // 2, whole - whole // 2))
    return max(0, halves_ns - compute.span_ns(layer, 1, whole))
