"""How long computing takes: as the engine measured it for this model, or by a roofline."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from typing import Protocol

from expertly.core.costs import Link, MeasuredCompute
from expertly.core.errors import HardwareError
from expertly.core.geometry import DenseShape, Geometry
from expertly.policies.allocation.moepic import Timing
from expertly.sim.hardware import Hardware


class ComputeModel(Protocol):
    """Times in nanoseconds of computing alone, as whole numbers; they depend on the arguments only."""

    slowdown_while_loading: float
    """At least 1: how many times longer everything but experts takes while the link is busy."""
    load_ns: int
    """The computing thread's own time for each span, when it takes it."""
    submit_ns: int
    """The computing thread's own time to submit spans that are loaded together, besides the link's."""
    observe_ns: int
    """What showing a router's choice to a predictor takes from the computing thread."""
    observe_light_ns: int
    """And to one that goes by counts alone."""
    plan_ns: int
    """And deciding what of its predictions to prefetch."""
    prefetch_ns: int
    """And what experts take that are prefetched together."""
    prefetch_each_ns: int
    """And each of them, besides `load_ns`."""
    decide_ns: int
    """What an eviction policy that learns takes in each layer."""

    def dense_ns(self, layer: int, num_tokens: int, /) -> int:
        """One MoE layer's block without its experts: attention, norms, router, always-on experts, control plane."""

    def span_ns(self, layer: int, num_tokens: int, num_segments: int, /) -> int:
        """`num_segments` adjacent segments of one expert, for that many of its tokens."""

    def head_ns(self, num_tokens: int, /) -> int:
        """Once an iteration: embedding, layers without experts, last norm, head, choosing the token."""


def compute_model(hardware: Hardware, geometry: Geometry, dense: DenseShape | None) -> ComputeModel:
    """The measured times of `hardware`, if it has any; otherwise a roofline over the bytes of `geometry` and `dense`.

    Raises HardwareError where the measured model has another geometry. Without `dense`, a layer's block and the head
    cost their fixed times alone.
    """
    if hardware.compute is None:
        return Roofline(hardware, geometry, dense or DenseShape(0, 0))
    measured = hardware.compute
    if geometry.num_layers != measured.num_layers or set(geometry.layers) != {measured.layer}:
        raise HardwareError(
            f"hardware {hardware.name!r}: its [compute] was measured for {measured.model} "
            f"({measured.num_layers} layers of {measured.layer}), which is not the geometry to simulate "
            f"({geometry.num_layers} layers, the first {geometry.layers[0]}); remove [compute] to use a roofline, or "
            "measure this model with `expertly doctor MODEL --hardware-out FILE.toml`"
        )
    return Measured(measured, geometry.segments_per_expert)


class Roofline:
    """max(bytes / memory rate, operations / peak) / efficiency, and a fixed time: Williams et al., CACM 52(4), 2009.

    A weight is read once a pass and used in two operations a token. Activations and the KV cache are not counted.
    """

    slowdown_while_loading = 1.0  # copies to an accelerator are made by engines of their own
    load_ns = 0
    submit_ns = 0
    observe_ns = 0
    observe_light_ns = 0
    plan_ns = 0
    prefetch_ns = 0
    prefetch_each_ns = 0
    decide_ns = 0

    def __init__(self, hardware: Hardware, geometry: Geometry, dense: DenseShape) -> None:
        self._hardware = hardware
        self._geometry = geometry
        self._dense = dense
        self.dense_ns = cache(self._dense_ns)
        self.span_ns = cache(self._span_ns)
        self.head_ns = cache(self._head_ns)

    def _dense_ns(self, layer: int, num_tokens: int) -> int:
        return self._dense_part_ns(self._dense.layer_nbytes, layer, num_tokens) + self._hardware.layer_ns

    def _span_ns(self, layer: int, num_tokens: int, num_segments: int) -> int:
        shape, geometry = self._geometry.layers[layer], self._geometry
        num_weights = num_segments * geometry.neurons_per_segment(layer) * shape.neuron_nbytes / shape.itemsize
        nbytes = num_segments * geometry.segment_nbytes(layer)
        rate = self._hardware.format_nbytes_per_s if shape.format else None
        return self._ns(nbytes, num_weights, max(1, num_tokens), rate) + self._hardware.launch_ns

    def _head_ns(self, num_tokens: int) -> int:
        return self._dense_part_ns(self._dense.head_nbytes, 0, num_tokens) + self._hardware.iteration_ns

    def _dense_part_ns(self, nbytes: int, layer: int, num_tokens: int) -> int:
        return self._ns(nbytes, nbytes / self._geometry.layers[layer].itemsize, num_tokens)

    def _ns(self, nbytes: int, num_weights: float, num_tokens: int, nbytes_per_s: float | None = None) -> int:
        hardware = self._hardware
        reading = nbytes / (nbytes_per_s or hardware.memory_nbytes_per_s)
        computing = 2 * num_tokens * num_weights / hardware.flops_per_s
        return round(max(reading, computing) / hardware.efficiency * 1e9)


class Measured:
    """The engine's measurements: between the measured numbers of tokens by straight lines, beyond them by the last
    one.
    """

    def __init__(self, measured: MeasuredCompute, segments_per_expert: int) -> None:
        self._measured = measured
        self._num_segments = segments_per_expert
        self.slowdown_while_loading = measured.slowdown_while_loading
        self.load_ns, self.submit_ns, self.observe_ns = measured.load_ns, measured.submit_ns, measured.observe_ns
        light_ns = measured.observe_light_ns
        self.observe_light_ns = self.observe_ns if light_ns is None else light_ns
        self.prefetch_ns, self.prefetch_each_ns = measured.prefetch_ns, measured.prefetch_each_ns
        self.plan_ns, self.decide_ns = measured.plan_ns, measured.decide_ns
        self.dense_ns = cache(self._dense_ns)
        self.span_ns = cache(self._span_ns)
        self.head_ns = cache(self._head_ns)

    def _dense_ns(self, layer: int, num_tokens: int) -> int:
        return self._at(self._measured.dense_ns, num_tokens)

    def _span_ns(self, layer: int, num_tokens: int, num_segments: int) -> int:
        measured, tokens = self._measured, max(1, num_tokens)
        if num_segments == self._num_segments:
            return self._at(measured.expert_ns, tokens)
        parts = self._at(measured.parts_ns, tokens) * num_segments // self._num_segments
        return parts + self._at(measured.part_ns, tokens)

    def _head_ns(self, num_tokens: int) -> int:
        return self._at(self._measured.head_ns, num_tokens)

    def _at(self, times_ns: Sequence[int], num_tokens: int) -> int:
        return interpolate(self._measured.tokens, times_ns, num_tokens)


def interpolate(points: Sequence[int], values: Sequence[int], at: int) -> int:
    """The value at `at` on straight lines through (points, values), of which the outermost continue; at least 0."""
    if len(points) == 1:
        return values[0]
    right = min(max(bisect_left(points, at), 1), len(points) - 1)
    left = right - 1
    slope = (values[right] - values[left]) / (points[right] - points[left])
    return max(0, round(values[left] + slope * (at - points[left])))


def step_times(geometry: Geometry, link: Link, compute: ComputeModel) -> Timing:
    """How long the parts of a decode step of one token take (MoEpic, section 3.4.1). An expert is loaded a segment at a
    time from where the link begins, over an idle link.
    """
    layers, whole = range(geometry.num_layers), geometry.segments_per_expert
    halves = [num for num in (whole // 2, whole - whole // 2) if num]  # of an expert; together they take longer
    return Timing.of(
        geometry,
        attention_ns=[compute.dense_ns(layer, 1) for layer in layers],
        moe_ns=[geometry.layers[layer].top_k * compute.span_ns(layer, 1, whole) for layer in layers],
        load_ns=[
            round(geometry.layers[layer].expert_nbytes / link.nbytes_per_s * 1e9)
            + whole * (link.overhead_ns + compute.load_ns)
            for layer in layers
        ],
        head_ns=compute.head_ns(1),
        span_ns=[
            max(0, sum(compute.span_ns(layer, 1, num) for num in halves) - compute.span_ns(layer, 1, whole))
            for layer in layers
        ],
        ask_ns=compute.submit_ns,
    )
