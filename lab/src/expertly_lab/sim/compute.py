"""How long computing takes: weights are read at one rate, and a layer, a step and a load have times of their own."""

from __future__ import annotations

from functools import cache

from expertly.core.geometry import DenseShape, Geometry
from expertly.policies.moepic import Timing
from expertly_lab.sim.hardware import Hardware

FREE_TOKENS = 64
"""So many tokens are computed in the time of reading the weights; more take as much longer as they are more."""


class ComputeModel:
    """Times in nanoseconds of computing alone, as whole numbers; they depend on the arguments only. Without `dense`, a
    layer's block and the head cost their fixed times alone.
    """

    def __init__(self, hardware: Hardware, geometry: Geometry, dense: DenseShape | None) -> None:
        self._hardware = hardware
        self._geometry = geometry
        self._dense = dense or DenseShape(0, 0)
        self.dense_ns = cache(self._dense_ns)
        self.span_ns = cache(self._span_ns)
        self.head_ns = cache(self._head_ns)

    def _dense_ns(self, layer: int, num_tokens: int) -> int:
        """One MoE layer's block without its experts: attention, norms, router, always-on experts, control plane."""
        return self._reading_ns(self._dense.layer_nbytes, num_tokens) + self._hardware.layer_ns

    def _span_ns(self, layer: int, num_tokens: int, num_segments: int) -> int:
        """`num_segments` adjacent segments of one expert, for that many of its tokens."""
        return self._reading_ns(num_segments * self._geometry.unit_nbytes[layer], num_tokens)

    def _head_ns(self, num_tokens: int) -> int:
        """Once an iteration: embedding, layers without experts, last norm, head, choosing the token."""
        return self._reading_ns(self._dense.head_nbytes, num_tokens) + self._hardware.head_ns

    def _reading_ns(self, nbytes: int, num_tokens: int) -> int:
        return round(nbytes / self._hardware.expert_nbytes_per_s * max(1, num_tokens / FREE_TOKENS) * 1e9)


def step_times(hardware: Hardware, geometry: Geometry, compute: ComputeModel) -> Timing:
    """Times of the parts of a decode step of one token (MoEpic, section 3.4.1), over an idle link."""
    layers, whole = range(geometry.num_layers), geometry.segments_per_expert
    return Timing(
        [layer.top_k for layer in geometry.layers],
        attention_ns=[compute.dense_ns(layer, 1) for layer in layers],
        moe_ns=[geometry.layers[layer].top_k * compute.span_ns(layer, 1, whole) for layer in layers],
        load_ns=[
            hardware.link.occupies_ns(geometry.layers[layer].expert_nbytes) + whole * hardware.miss_ns
            for layer in layers
        ],
        head_ns=compute.head_ns(1),
    )
