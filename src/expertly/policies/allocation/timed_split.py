"""Where to begin when only times are known: one split for all layers, equal shares (ours)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.policies.allocation.split import Split, SplitOptions
from expertly.policies.moepic.configurator import Configuration
from expertly.policies.moepic.forecast import Forecaster
from expertly.policies.moepic.plan import LayerSplit, SplitPlan
from expertly.policies.moepic.statistics import LayerRates
from expertly.policies.moepic.timing import Timing

_RIGHT = 0.8
"""Of the first K predicted experts, so many are expected to be needed: about what a lookahead of one layer is right."""


def timed_split(geometry: Geometry, kept_segments: Sequence[int], timing: Timing) -> Configuration:
    """The theta of least exposed time, the same for all layers, where experts are needed alike and four of five of the
    first K that are predicted are needed; of equal ones the nearest to 0.5, and that where parts cost nothing of their
    own: there it is the paper's start.
    """
    rates = [_expected(layer) for layer in geometry.layers]
    forecaster, most = Forecaster(geometry, rates, timing), geometry.segments_per_expert
    start = _plan(geometry, kept_segments, 0.5)
    plan, exposed = start, forecaster.exposed_with(start.layers)
    start_exposed = exposed
    if any(timing.counts_parts(layer) for layer in range(geometry.num_layers)):
        for top in sorted(range(1, most + 1), key=lambda top: (abs(2 * top - most), top)):
            other = _plan(geometry, kept_segments, top / most)
            then = forecaster.exposed_with(other.layers)
            if sum(then) < sum(exposed):
                plan, exposed = other, then
    return Configuration(plan, exposed, start_exposed, start_exposed, 0, forecaster.outcomes_with(plan.layers))


def _plan(geometry: Geometry, kept_segments: Sequence[int], theta: float) -> SplitPlan:
    split = Split(geometry, SplitOptions(theta))
    shares = split.shares(kept_segments)
    tops = split.tops(shares) or [geometry.segments_per_expert] * geometry.num_layers
    return SplitPlan(geometry, tuple(map(_layer, shares, tops, geometry.layers)))


def _layer(share: int, top: int, layer: LayerGeometry) -> LayerSplit:
    kept = min(share // top, layer.num_experts)
    return LayerSplit(kept, top if kept else 0, share)


def _expected(layer: LayerGeometry) -> LayerRates:
    """Of a layer of which nothing has been seen."""
    num, top_k = layer.num_experts, layer.top_k
    hits = 1 - (1 - np.linspace(0, 1, num + 1)) ** 2
    accuracy, predicted_hits = np.full(num, _RIGHT if num > top_k else 1.0), np.tile(hits, (num, 1))
    if num > top_k:  # of all experts, C are among the C hottest
        accuracy[top_k:] = top_k * (1 - _RIGHT) / (num - top_k)
        predicted_hits[top_k:] = (np.arange(num + 1) - top_k * hits) / (num - top_k)
    return LayerRates(hits, accuracy, predicted_hits)
