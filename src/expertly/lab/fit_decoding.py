"""How fast readers decode beside computing: fitted to how long layers with absent experts took.

Measured alone, decoding is faster than in a pass: there threads wait for the interpreter lock and to be woken.
The link of experts that are stored as they are is fitted to the same times (layer_profile.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from expertly.core.costs import CodecCosts, LayerTime, Link, MeasuredCompute
from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.sim.hardware import Hardware
from expertly.sim.link import Clock, VirtualLink

_LEAST_SHARE = 0.2
"""Of the rate that was measured alone: no less is believed."""

_POINTS = 17
_ROUNDS = 3


def fit_decoding(
    layers: Sequence[LayerTime], disk: Link, costs: CodecCosts, compute: MeasuredCompute, geometry: Geometry
) -> CodecCosts:
    """`costs` with the rate under which layers take what they took; never more than it says. Without layers that had
    something to load, as it is.
    """
    loading = [one for one in layers if one.num_absent]
    if not loading:
        return costs
    resident = [one.total_ns for one in layers if not one.num_absent]
    around_ns = max(0, resident[0] - compute.layer.top_k * compute.expert_ns[0]) if resident else 0

    def error(rate: float) -> float:
        codec = replace(costs, decode_nbytes_per_s=rate)
        simulated = [around_ns + _layer_ns(one.num_absent, disk, codec, compute, geometry) for one in loading]
        return sum(one.num_samples * (ns / one.total_ns - 1) ** 2 for ns, one in zip(simulated, loading, strict=True))

    least, most = _LEAST_SHARE * costs.decode_nbytes_per_s, costs.decode_nbytes_per_s
    best = most
    for _ in range(_ROUNDS):
        rates = [*np.geomspace(least, most, _POINTS).tolist(), best]
        best = min(rates, key=error)
        step = (most / least) ** (1 / (_POINTS - 1))
        least, most = max(least, best / step), min(most, best * step)
    return replace(costs, decode_nbytes_per_s=best)


def _layer_ns(num_absent: int, disk: Link, codec: CodecCosts, compute: MeasuredCompute, geometry: Geometry) -> int:
    """What the loop of a layer takes: what has arrived is computed first, then what is here, then it waits."""
    clock = Clock()
    link = VirtualLink(
        clock,
        Hardware.read("infinite").with_disk(disk),
        geometry,
        lambda layer, num_segments: compute.load_ns,
        submit_ns=compute.submit_ns,
        codec=codec,
    )
    num_segments = geometry.segments_per_expert
    link.submit([Span(0, expert, 0, num_segments, expert * num_segments) for expert in range(num_absent)])
    left, here = num_absent, compute.layer.top_k - num_absent
    while left or here:
        arrived = link.poll() if left else None
        if arrived is None and not here:
            arrived = link.wait()
        if arrived is None:
            here -= 1
        else:
            left -= 1
        link.computing(clock.now_ns, clock.now_ns + compute.expert_ns[0])
        clock.now_ns += compute.expert_ns[0]
    return clock.now_ns
