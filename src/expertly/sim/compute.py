"""How long computing takes: from what the engine measured for this model, else from a roofline."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from expertly.core.costs import MeasuredCompute
from expertly.core.errors import HardwareError
from expertly.core.geometry import DenseShape, Geometry

if TYPE_CHECKING:
    from expertly.sim.hardware import Hardware


class ComputeModel(Protocol):
    """Times in nanoseconds of computing alone, as whole numbers; a function of its arguments and nothing else."""

    @property
    def slowdown_while_loading(self) -> float:
        """At least 1: what is computed beside the experts takes so many times longer while the link is busy."""

    def dense_ns(self, layer: int, num_tokens: int) -> int:
        """Of one MoE layer's block without its experts: attention, norms, router, always-on experts, control plane."""

    def span_ns(self, layer: int, num_tokens: int, num_segments: int) -> int:
        """Of `num_segments` adjacent segments of one expert, for that many of its tokens."""

    @property
    def submit_ns(self) -> int:
        """The computing thread's own time for spans that are demanded together, besides what the link takes."""

    def load_ns(self, layer: int, num_segments: int) -> int:
        """And for each of them, when it is taken."""

    def head_ns(self, num_tokens: int) -> int:
        """Once an iteration: embedding, layers without experts, last norm, head, choosing the token."""


def compute_model(hardware: Hardware, geometry: Geometry, dense: DenseShape | None) -> ComputeModel:
    """What `hardware` measured, if it measured anything; else a roofline over the bytes of `geometry` and `dense`.

    Raises HardwareError where what was measured is of another geometry. Without `dense`, a layer's block and the head
    cost their fixed times alone.
    """
    if hardware.compute is None:
        return Roofline(hardware, geometry, dense)
    measured = hardware.compute
    if geometry.num_layers != measured.num_layers or set(geometry.layers) != {measured.layer}:
        raise HardwareError(
            f"hardware {hardware.name!r}: its [compute] was measured for {measured.model} "
            f"({measured.num_layers} layers of {measured.layer}), which is not the geometry to simulate "
            f"({geometry.num_layers} layers, the first {geometry.layers[0]}); remove [compute] to use a roofline, or "
            "measure this model with `expertly doctor --model MODEL --hardware-out FILE.toml`"
        )
    return Measured(measured, geometry.segments_per_expert)


class Roofline:
    """max(bytes / memory rate, operations / peak) / efficiency, and a fixed time: Williams et al., CACM 52(4), 2009.

    A weight is read once a pass and used in two operations a token. Activations and the KV cache are not counted.
    """

    slowdown_while_loading = 1.0  # copies to an accelerator are made by engines of their own
    submit_ns = 0

    def __init__(self, hardware: Hardware, geometry: Geometry, dense: DenseShape | None) -> None:
        self._hardware = hardware
        self._dense = dense or DenseShape(0, 0)
        shapes = {layer: i for i, layer in enumerate(dict.fromkeys(geometry.layers))}
        self._shape_of = [shapes[layer] for layer in geometry.layers]
        self._segment_nbytes = [geometry.segment_nbytes(layer) for layer in range(geometry.num_layers)]
        self._itemsize = [layer.itemsize for layer in geometry.layers]
        self._dense_ns: dict[tuple[int, int], int] = {}
        self._span_ns: dict[tuple[int, int, int], int] = {}
        self._head_ns: dict[int, int] = {}

    def dense_ns(self, layer: int, num_tokens: int) -> int:
        key = (self._shape_of[layer], num_tokens)
        found = self._dense_ns.get(key)
        if found is None:
            work = self._ns(self._dense.layer_nbytes, self._itemsize[layer], num_tokens)
            found = self._dense_ns[key] = work + self._hardware.layer_ns
        return found

    def span_ns(self, layer: int, num_tokens: int, num_segments: int) -> int:
        key = (self._shape_of[layer], num_tokens, num_segments)
        found = self._span_ns.get(key)
        if found is None:
            work = self._ns(num_segments * self._segment_nbytes[layer], self._itemsize[layer], max(1, num_tokens))
            found = self._span_ns[key] = work + self._hardware.launch_ns
        return found

    def load_ns(self, layer: int, num_segments: int) -> int:
        return 0

    def head_ns(self, num_tokens: int) -> int:
        found = self._head_ns.get(num_tokens)
        if found is None:
            work = self._ns(self._dense.head_nbytes, self._itemsize[0], num_tokens)
            found = self._head_ns[num_tokens] = work + self._hardware.iteration_ns
        return found

    def _ns(self, nbytes: int, itemsize: int, num_tokens: int) -> int:
        hardware = self._hardware
        reading = nbytes / hardware.memory_nbytes_per_s
        computing = 2 * num_tokens * (nbytes / itemsize) / hardware.flops_per_s
        return round(max(reading, computing) / hardware.efficiency * 1e9)


class Measured:
    """What the engine measured, between the measured numbers of tokens by straight lines, beyond them by the last."""

    def __init__(self, measured: MeasuredCompute, segments_per_expert: int) -> None:
        self._measured = measured
        self._num_segments = segments_per_expert
        self.slowdown_while_loading = measured.slowdown_while_loading
        self.submit_ns = measured.submit_ns
        self._dense_ns: dict[int, int] = {}
        self._span_ns: dict[tuple[int, int], int] = {}
        self._head_ns: dict[int, int] = {}

    def dense_ns(self, layer: int, num_tokens: int) -> int:
        found = self._dense_ns.get(num_tokens)
        if found is None:
            found = self._dense_ns[num_tokens] = self._at(self._measured.dense_ns, num_tokens)
        return found

    def span_ns(self, layer: int, num_tokens: int, num_segments: int) -> int:
        key = (num_tokens, num_segments)
        found = self._span_ns.get(key)
        if found is None:
            measured, tokens = self._measured, max(1, num_tokens)
            if num_segments == self._num_segments:
                found = self._at(measured.expert_ns, tokens)
            else:
                parts = self._at(measured.parts_ns, tokens) * num_segments // self._num_segments
                found = parts + self._at(measured.part_ns, tokens)
            self._span_ns[key] = found
        return found

    def load_ns(self, layer: int, num_segments: int) -> int:
        return self._measured.load_ns * num_segments // self._num_segments

    def head_ns(self, num_tokens: int) -> int:
        found = self._head_ns.get(num_tokens)
        if found is None:
            found = self._head_ns[num_tokens] = self._at(self._measured.head_ns, num_tokens)
        return found

    def _at(self, times_ns: Sequence[int], num_tokens: int) -> int:
        return interpolate(self._measured.tokens, times_ns, num_tokens)


def interpolate(points: Sequence[int], values: Sequence[int], at: int) -> int:
    """The value at `at` on the straight lines through (points, values), the outermost ones going on; never under 0."""
    if len(points) == 1:
        return values[0]
    right = min(max(bisect_left(points, at), 1), len(points) - 1)
    left = right - 1
    slope = (values[right] - values[left]) / (points[right] - points[left])
    return max(0, round(values[left] + slope * (at - points[left])))
