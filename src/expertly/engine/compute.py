"""The arithmetic of one layer's experts on slot views, in the order and precision of the reference.

An expert in several spans is activated span by span. Its output is summed in float32 by the compiled products; else
its down rows are gathered side by side, and one product makes it. Either way it is rounded once, as that of the whole
expert, whatever the slots (docs/conventions.md, Segments).
Shapes: T tokens, K top-k, H hidden, I intermediate, n tokens of one expert, r neurons of one span.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from expertly.core.geometry import LayerGeometry
from expertly.core.messages import RouterRan, Span
from expertly.formats import ExpertFormat, expert_format
from expertly.native.kernels import Kernels

_MAX_TOKENS = 16
"""Most tokens for which the kernels read quantised weights again for every few, and do not decode them first."""

_DEFAULT_GATE = ("transformers.integrations.moe", "_default_apply_gate")


@dataclass(slots=True)
class Dispatch:
    """The rows of each expert. A row is a (token, choice) pair, token * K + choice, as the reference numbers them."""

    router: RouterRan
    top_k: int
    num_rows: int  # of the outputs
    covers_all_rows: bool  # False where a choice is no expert: its row is zero
    rows: dict[int, torch.Tensor] | None  # expert -> rows [n]; None for a single token
    positions: dict[int, int] | None  # expert -> row, for a single token
    places: dict[int, slice] | None = None  # expert -> where its rows are in the outputs; None: at their numbers


class LayerCompute:
    """Computes spans of one layer. `rows` are the layer's slots [S * r1, M, H], r1 neurons a segment; in a format
    blocks of bytes [S * r1 / G, nbytes], whose weights are decoded for what the kernels do not take. `experts` are the
    module's experts that these slots may hold, by their numbers there; None: all. `kernels` multiply few tokens where
    they take such matrices, else torch does.
    """

    def __init__(
        self,
        module: nn.Module,
        geometry: LayerGeometry,
        num_segments: int,
        rows: torch.Tensor,
        dtype: torch.dtype,
        experts: Sequence[int] | None,
        kernels: Kernels,
    ) -> None:
        self.dtype = dtype
        self.num_segments = num_segments
        self.intermediate_size = geometry.intermediate_size
        self._rows = rows
        self._kernels = kernels
        self._neurons_per_segment = geometry.intermediate_size // num_segments
        self._is_gated = geometry.num_matrices == 3
        self._activate: Callable[..., torch.Tensor] = _activation(module, self._is_gated, dtype)
        in_bias, down_bias = _biases(module, self._is_gated)
        if experts is not None and down_bias is not None:
            of_experts = torch.tensor(experts, device=down_bias.device)
            in_bias = None if in_bias is None else tuple(bias[of_experts].to(rows.device) for bias in in_bias)
            down_bias = down_bias[of_experts].to(rows.device)
        self._in_bias, self.down_bias = in_bias, down_bias
        # Of the compiled products: tokens they take, and where rows are.
        self._max_tokens = (_MAX_TOKENS if geometry.format else kernels.max_tokens) if kernels.takes(dtype) else 0
        self._format = expert_format(geometry.format) if geometry.format else None
        self._block_size = geometry.block_size
        self._shape = geometry.num_matrices, geometry.hidden_size
        self._num_inner = geometry.num_matrices - 1  # gate and up, or up
        self._matrix_nbytes = geometry.hidden_size * dtype.itemsize
        self._row_nbytes = geometry.num_matrices * self._matrix_nbytes
        self._slot_nbytes = geometry.expert_nbytes // num_segments
        self._address = rows.data_ptr()
        self._down_address = self._address + self._num_inner * self._matrix_nbytes
        # Of torch's.
        self._whole_views: dict[int, tuple[torch.Tensor, ...]] = {}  # by slot; as many as there are blocks of slots
        # One pass over gate and up rows together is 1.1x faster than two for one bfloat16 token on CPU (docs/log.md).
        self._doubles = self._is_gated and rows.dtype == torch.bfloat16 and rows.is_cpu
        self._doubled = torch.zeros(2, 2, geometry.hidden_size, dtype=dtype, device=rows.device)  # (x, 0) and (0, x)

    def is_native(self, x: torch.Tensor) -> bool:
        """Whether the compiled products take such inputs [n, H]."""
        return x.shape[0] <= self._max_tokens and x.dtype == self.dtype

    # -- the compiled products ---------------------------------------------------------------------------------

    def multiply(
        self,
        x: torch.Tensor,
        spans: Sequence[Span],
        positions: Mapping[int, int],
        out: torch.Tensor,
        *,
        adds: bool = False,
    ) -> None:
        """out[positions[expert]] = expert(x [1, H]) for several spans of equal size; for one, x may be [n, H] and out
        is [n, H] from there on. `adds`: a span's part of the sum is added to `out`, which is float32 and without bias.
        Only where `is_native`.
        """
        kernels, n = self._kernels, x.shape[0]
        together = [(first, min(kernels.max_tokens, n - first)) for first in range(0, n, kernels.max_tokens)]
        tasks: list[int] = []
        for k, span in enumerate(spans):
            for first, num in together:
                tasks += (self._address + span.slot * self._slot_nbytes, first, num, k * n + first)
        if x.stride(1) != 1:
            x = x.contiguous()
        num_neurons = spans[0].num_segments * self._neurons_per_segment
        products = x.new_empty(self._num_inner, len(spans) * n, num_neurons)
        if self._format is None:
            kernels.dots(tasks, x, products, self._row_nbytes, self._matrix_nbytes)
        else:
            kernels.tile_dots(self._format.kernels, tasks, x, products)
        inner = products.unbind(0)
        if self._in_bias is not None:
            begin = spans[0].segment * self._neurons_per_segment
            cut = slice(begin, begin + num_neurons)
            inner = tuple(
                values + torch.stack([bias[span.expert, cut] for span in spans])
                for values, bias in zip(inner, self._in_bias, strict=True)
            )
        tasks = []
        address = self._down_address if self._format is None else self._address
        for k, span in enumerate(spans):
            for first, num in together:
                place = positions[span.expert] + first
                tasks += (address + span.slot * self._slot_nbytes, k * n + first, num, place)
        h = self._activate(*inner).contiguous()
        if self._format is None:
            kernels.sums(tasks, h, out, self._row_nbytes, adds=adds)
        else:
            kernels.tile_sums(self._format.kernels, tasks, h, out, self._num_inner, adds=adds)
        kernels.num_native += len(spans)
        if self.down_bias is not None and not adds:
            for span in spans:
                place = positions[span.expert]
                out[place : place + n] += self.down_bias[span.expert]

    # -- torch's -----------------------------------------------------------------------------------------------

    def whole(self, x: torch.Tensor, span: Span, out: torch.Tensor) -> None:
        """out[n, H] = expert(x [n, H]), for a span that is the whole expert."""
        if self.is_native(x):
            self.multiply(x, (span,), {span.expert: 0}, out)
            return
        inner, down = self.inner(x, span)
        torch.mm(inner, down, out=out)
        if self.down_bias is not None:
            out += self.down_bias[span.expert]

    def inner(self, x: torch.Tensor, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        """Activations [n, r] of a span's neurons, and their down rows [r, H]."""
        self._kernels.num_torch += 1
        *matrices, down = self._matrices(span)
        gate_up = self._gate_up(x, matrices) if self._is_gated else (linear(x, matrices[0]),)
        if self._in_bias is not None:
            first = span.segment * self._neurons_per_segment
            cut = slice(first, first + down.shape[0])
            gate_up = tuple(
                values + bias[span.expert, cut] for values, bias in zip(gate_up, self._in_bias, strict=True)
            )
        return self._activate(*gate_up), down

    def _matrices(self, span: Span) -> tuple[torch.Tensor, ...]:
        """Gate [r, H], up [r, H] and down [r, H] rows of a span; without a gate, up and down."""
        if self._format is not None:
            return self._decoded(self._format, span).unbind(1)
        is_whole = span.num_segments == self.num_segments
        views = self._whole_views.get(span.slot) if is_whole else None
        if views is None:
            start = span.slot * self._neurons_per_segment
            views = self._rows[start : start + span.num_segments * self._neurons_per_segment].unbind(1)
            if is_whole:
                self._whole_views[span.slot] = views
        return views

    def _decoded(self, form: ExpertFormat, span: Span) -> torch.Tensor:
        """The weights of a span [r, M, H]."""
        num_neurons = span.num_segments * self._neurons_per_segment
        if self._max_tokens:
            weights = torch.empty(num_neurons, *self._shape, dtype=self.dtype)
            self._kernels.tile_decode(form.kernels, self._address + span.slot * self._slot_nbytes, weights)
            return weights
        first = span.slot * self._neurons_per_segment // self._block_size
        blocks = self._rows[first : first + num_neurons // self._block_size]
        return form.decode(blocks, *self._shape).to(self.dtype)

    def _gate_up(self, x: torch.Tensor, matrices: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if x.shape[0] != 1 or not self._doubles:
            return linear(x, matrices[0]), linear(x, matrices[1])
        doubled = self._doubled
        doubled[0, 0], doubled[1, 1] = x[0], x[0]
        width = x.shape[1]
        gate = matrices[0]  # [r, H] of [r, M, H]: its row and the up row that follows are 2H neighbours
        rows = gate.as_strided((gate.shape[0], 2 * width), gate.stride())
        return linear(doubled.view(2, 2 * width), rows).split(1)  # type: ignore[return-value]


class LayerCall:
    """One call of a layer: its outputs [rows, H], filled span by span. `hidden` [T, H] is on the layer's device."""

    def __init__(self, compute: LayerCompute, work: Dispatch, hidden: torch.Tensor) -> None:
        self._compute = compute
        self._work = work
        self._hidden = hidden if hidden.dtype == compute.dtype else hidden.to(compute.dtype)
        self._partial: dict[int, PartialExpert] = {}
        self.outputs = torch.empty(work.num_rows, hidden.shape[1], dtype=compute.dtype, device=hidden.device)
        if not work.covers_all_rows:
            self.outputs.zero_()
        self.takes_several = work.positions is not None and compute.is_native(self._hidden)
        """Whether experts that are here can be computed in one call: those of one token, by the compiled products."""

    def compute(self, spans: Sequence[Span]) -> None:
        """Use the bytes of spans: afterwards their slots may be used again."""
        if self.takes_several:
            compute, positions = self._compute, self._work.positions
            assert positions is not None
            if compute.num_segments == 1:
                compute.multiply(self._hidden, spans, positions, self.outputs)
                return
            whole = [span for span in spans if span.num_segments == compute.num_segments]
            if whole:
                compute.multiply(self._hidden, whole, positions, self.outputs)
            spans = [span for span in spans if span.num_segments != compute.num_segments]
        for span in spans:
            self._one(span)

    def _one(self, span: Span) -> None:
        compute, work, expert, rows = self._compute, self._work, span.expert, None
        if work.positions is not None:
            row = work.positions[expert]
            x, out = self._hidden, self.outputs[row : row + 1]
        else:
            assert work.rows is not None
            rows = work.rows[expert]
            x = self._hidden[rows // work.top_k]
            if work.places is None:
                out = torch.empty(len(rows), self._hidden.shape[1], dtype=compute.dtype, device=x.device)
            else:
                out, rows = self.outputs[work.places[expert]], None
        if span.num_segments == compute.num_segments:
            compute.whole(x, span, out)
        else:
            partial = self._partial.get(expert)
            if partial is None:
                partial = self._partial[expert] = PartialExpert(compute, x, out)
            if not partial.add(span):
                return
            out = self._partial.pop(expert).out
        if rows is not None:
            self.outputs[rows] = out


class PartialExpert:
    """One expert whose spans come one by one; `add` is True when the output has been written."""

    def __init__(self, compute: LayerCompute, x: torch.Tensor, out: torch.Tensor) -> None:
        self._compute = compute
        self._x, self.out = x, out
        self._segments_left = compute.num_segments
        self._sum: torch.Tensor | None = None
        if compute.is_native(x):
            self._sum = torch.zeros(out.shape, dtype=torch.float32)
            return
        width = compute.intermediate_size
        self._inner = torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device)
        self._down = torch.empty(width, out.shape[1], dtype=compute.dtype, device=x.device)

    def add(self, span: Span) -> bool:
        """Use a span's bytes; its slots may be used again afterwards."""
        compute = self._compute
        if self._sum is not None:
            compute.multiply(self._x, (span,), {span.expert: 0}, self._sum, adds=True)
        else:
            inner, down = compute.inner(self._x, span)
            first = span.segment * down.shape[0] // span.num_segments
            cut = slice(first, first + down.shape[0])
            self._inner[:, cut], self._down[cut] = inner, down
        self._segments_left -= span.num_segments
        if self._segments_left:
            return False
        if self._sum is not None:
            self.out.copy_(self._sum)
        else:
            torch.mm(self._inner, self._down, out=self.out)
        if compute.down_bias is not None:
            self.out += compute.down_bias[span.expert]
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
