"""The arithmetic of one layer's experts on slot views, in the order and precision of the reference.

An expert in several spans is activated span by span. Its output is summed in float32 by the compiled products; else
its down rows are gathered side by side, and one product makes it. Either way it is rounded once, as that of the whole
expert, whatever the slots (docs/conventions.md, Segments).
Shapes: T tokens, K top-k, H hidden, I intermediate, n tokens of one expert, r neurons of one span.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from expertly.core.geometry import LayerGeometry
from expertly.core.messages import Span
from expertly.engine.compute_native import NativeProducts
from expertly.native.kernels import Kernels

_DEFAULT_GATE = ("transformers.integrations.moe", "_default_apply_gate")


class LayerCompute:
    """Computes spans of one layer. `rows` are the layer's slots [S * r1, M, H], r1 neurons a segment. `experts` are
    the module's experts that these slots may hold, by their numbers there; None: all. `kernels` multiply; None: torch.
    """

    def __init__(
        self,
        module: nn.Module,
        geometry: LayerGeometry,
        num_segments: int,
        rows: torch.Tensor,
        experts: Sequence[int] | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        self._rows = rows
        self._kernels = kernels
        self.neurons_per_segment = geometry.intermediate_size // num_segments
        self.num_segments = num_segments
        self.intermediate_size = geometry.intermediate_size
        self._is_gated = geometry.num_matrices == 3
        self._native: NativeProducts | None = None
        if kernels is not None and kernels.takes(rows.dtype, rows.device):
            self._native = NativeProducts(kernels, rows, self.neurons_per_segment)
        self._whole_views: dict[int, tuple[torch.Tensor, ...]] = {}  # by slot; as many as there are frames
        # One pass over gate and up rows together is 1.1x faster than two for one bfloat16 token on CPU (docs/log.md).
        self._doubles = self._is_gated and rows.dtype == torch.bfloat16 and rows.device.type == "cpu"
        self._doubled = rows.new_zeros(2, 2, geometry.hidden_size)  # (x, 0) and (0, x)
        self._doubled_of: torch.Tensor | None = None
        self.activate: Callable[..., torch.Tensor] = _activation(module, self._is_gated, rows.dtype)
        in_bias, down_bias = _biases(module, self._is_gated)
        if experts is not None and down_bias is not None:
            of_experts = torch.tensor(experts, device=down_bias.device)
            in_bias = None if in_bias is None else tuple(bias[of_experts].to(rows.device) for bias in in_bias)
            down_bias = down_bias[of_experts].to(rows.device)
        self._in_bias, self.down_bias = in_bias, down_bias

    @property
    def dtype(self) -> torch.dtype:
        return self._rows.dtype

    def begin(self) -> None:
        """A call of the layer begins: its inputs are new, and may lie where those of the last one lay."""
        self._doubled_of = None

    def matrices(self, span: Span) -> tuple[torch.Tensor, ...]:
        """Gate [r, H], up [r, H] and down [r, H] rows of a span; without a gate, up and down."""
        if span.num_segments == self.num_segments:
            views = self._whole_views.get(span.slot)
            if views is None:
                views = self._whole_views[span.slot] = self._cut(span)
            return views
        return self._cut(span)

    def _cut(self, span: Span) -> tuple[torch.Tensor, ...]:
        start = span.slot * self.neurons_per_segment
        return self._rows[start : start + span.num_segments * self.neurons_per_segment].unbind(1)

    def whole(self, x: torch.Tensor, span: Span, out: torch.Tensor) -> None:
        """out[n, H] = expert(x [n, H]), for a span that is the whole expert."""
        if self.is_native(x):
            self.together(x, (span,), (0,), out)
            return
        self.count_torch()
        matrices = self.matrices(span)
        torch.mm(self.inner(x, matrices, span), matrices[-1], out=out)
        if self.down_bias is not None:
            out += self.down_bias[span.expert]

    def is_native(self, x: torch.Tensor) -> bool:
        """Whether the compiled products take such inputs [n, H]."""
        return self._native is not None and self._native.take(x)

    def together(self, x: torch.Tensor, spans: Sequence[Span], places: Sequence[int], out: torch.Tensor) -> None:
        """out[place] = expert(x [1, H]) for several spans that are whole experts; for one, x may be [n, H] and out is
        [n, H] from its place on. Only where `is_native`.
        """
        assert self._native is not None
        self._native.outer(self._activated(x, spans), spans, places, out, adds=False)
        if self.down_bias is not None:
            for span, place in zip(spans, places, strict=True):
                out[place : place + x.shape[0]] += self.down_bias[span.expert]

    def add_part(self, x: torch.Tensor, span: Span, total: torch.Tensor) -> None:
        """total [n, H] += the span's part of expert(x [n, H]), in float32. Only where `is_native`."""
        assert self._native is not None
        self._native.outer(self._activated(x, (span,)), (span,), (0,), total, adds=True)

    def _activated(self, x: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        """Activations [spans * n, r]; of one token, or one span."""
        assert self._native is not None
        inner = self._native.inner(x, spans)
        if self._in_bias is not None:
            first = spans[0].segment * self.neurons_per_segment
            cut = slice(first, first + inner[0].shape[1])
            inner = tuple(
                values + torch.stack([bias[span.expert, cut] for span in spans])
                for values, bias in zip(inner, self._in_bias, strict=True)
            )
        return self.activate(*inner)

    def count_torch(self) -> None:
        """A span is multiplied by torch."""
        if self._kernels is not None:
            self._kernels.num_torch += 1

    def inner(self, x: torch.Tensor, matrices: tuple[torch.Tensor, ...], span: Span) -> torch.Tensor:
        """Activations [n, r] of a span's neurons."""
        bias = self._in_bias
        if self._is_gated:
            gate, up = self._gate_up(x, matrices)
            if bias is not None:
                first = span.segment * self.neurons_per_segment
                cut = slice(first, first + gate.shape[1])
                gate, up = gate + bias[0][span.expert, cut], up + bias[1][span.expert, cut]
            return self.activate(gate, up)
        up = linear(x, matrices[0])
        if bias is not None:
            first = span.segment * self.neurons_per_segment
            up = up + bias[0][span.expert, first : first + up.shape[1]]
        return self.activate(up)

    def _gate_up(self, x: torch.Tensor, matrices: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        if x.shape[0] != 1 or not self._doubles:
            return linear(x, matrices[0]), linear(x, matrices[1])
        doubled = self._doubled
        if self._doubled_of is not x:
            self._doubled_of = x
            doubled[0, 0], doubled[1, 1] = x[0], x[0]
        width = x.shape[1]
        gate = matrices[0]  # [r, H] of [r, M, H]: its row and the up row that follows are 2H neighbours
        rows = gate.as_strided((gate.shape[0], 2 * width), gate.stride())
        return linear(doubled.view(2, 2 * width), rows).split(1)  # type: ignore[return-value]


class PartialExpert:
    """One expert whose spans come one by one; `add` is True when the output has been written."""

    def __init__(self, compute: LayerCompute, x: torch.Tensor, out: torch.Tensor) -> None:
        self._compute = compute
        self._x, self.out = x, out
        width = compute.intermediate_size
        self._neurons_left = width
        self._sum: torch.Tensor | None = None
        if compute.is_native(x):
            self._sum = torch.zeros(out.shape, dtype=torch.float32)
            return
        self._inner = torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device)
        self._down = torch.empty(width, out.shape[1], dtype=compute.dtype, device=x.device)

    def add(self, span: Span) -> bool:
        """Use a span's bytes; its slots may be reused afterwards."""
        compute = self._compute
        if self._sum is not None:
            compute.add_part(self._x, span, self._sum)
            self._neurons_left -= span.num_segments * compute.neurons_per_segment
            if self._neurons_left:
                return False
            self.out.copy_(self._sum)
        elif not self._add_rows(span):
            return False
        if compute.down_bias is not None:
            self.out += compute.down_bias[span.expert]
        return True

    def _add_rows(self, span: Span) -> bool:
        compute = self._compute
        compute.count_torch()
        matrices = compute.matrices(span)
        first = span.segment * compute.neurons_per_segment
        cut = slice(first, first + matrices[0].shape[0])
        self._inner[:, cut] = compute.inner(self._x, matrices, span)
        self._down[cut] = matrices[-1]
        self._neurons_left -= matrices[0].shape[0]
        if self._neurons_left:
            return False
        torch.mm(self._inner, self._down, out=self.out)
        return True


def _activation(module: Any, is_gated: bool, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """The module's own gating of (gate [n, r], up [n, r]), or its activation of (up [n, r]), in the weights' `dtype`,
    as the reference has it before the next product: a module may compute them in another.
    """
    if not is_gated:
        activation = module.act_fn
        return lambda up: activation(up).to(dtype)
    apply_gate = module._apply_gate
    function = getattr(apply_gate, "__func__", None)
    if function is not None and (function.__module__, function.__name__) == _DEFAULT_GATE:
        act_fn = module.act_fn
        return lambda gate, up: (act_fn(gate) * up).to(dtype)
    if getattr(module, "is_concatenated", True):
        return lambda gate, up: apply_gate(torch.cat((gate, up), dim=-1)).to(dtype)
    # interleaved: g0 u0 g1 u1 ...
    return lambda gate, up: apply_gate(torch.stack((gate, up), dim=-1).flatten(-2)).to(dtype)


def _biases(module: Any, is_gated: bool) -> tuple[tuple[torch.Tensor, ...] | None, torch.Tensor | None]:
    """Biases before the activation, (gate [E, I], up [E, I]) or (up [E, I],), and after, [E, H]."""
    if not getattr(module, "has_bias", False):
        return None, None
    down = module.down_proj_bias.detach()
    if not is_gated:
        return (module.up_proj_bias.detach(),), down
    fused = module.gate_up_proj_bias.detach()
    if getattr(module, "is_concatenated", True):
        gate, up = fused.chunk(2, dim=-1)
    else:
        gate, up = fused[..., ::2], fused[..., 1::2]
    return (gate.contiguous(), up.contiguous()), down
