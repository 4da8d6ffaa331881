"""The arithmetic of one layer's experts on slot views, in the order and precision of the reference.

An expert in several spans is activated span by span. Its output is summed in float32 by the compiled products, on an
accelerator, and where a float32 model's experts are decoded. Else its down rows are gathered side by side, and one
product makes it: a processor multiplies 16-bit numbers 4 times as fast as float32. Either way it is rounded once, as
that of the whole expert, whatever the slots (docs/conventions.md, Segments).
Shapes: T tokens, K top-k, H hidden, I intermediate, n tokens of one expert, r neurons of one span.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import linear

from expertly.core.geometry import LayerGeometry
from expertly.core.messages import RouterRan, Span
from expertly.formats import expert_format
from expertly.native.activations import recognise
from expertly.native.kernels import MANY_TOKENS, NO_DOWN, TASK_TOKENS, ChosenExperts, ExpertProducts, Kernels, Work

if TYPE_CHECKING:
    from expertly.native.triton_slots import SlotCall

_FIRST = (0,)

_DEFAULT_GATE = ("transformers.integrations.moe", "_default_apply_gate")

_MAX_ROWS = 256
"""Tokens of a prompt for which torch computes an expert at a time on a CPU: more would not be quicker."""

_EARLY_TOKENS = 4
"""Most tokens of a layer that begins before the host knows its experts: each choice reads its expert's weights, from
the device's cache where several tokens made it.
"""

_PART_NBYTES = 2 << 20
"""Of weights that are decoded for a prompt at a time on a CPU, with what is computed from them; a block at least."""

_WIDE = 4
"""Values that exist at a time for a neuron and a token: gate, up, what is activated, and the product."""


def expert_nbytes_at_once(layer: LayerGeometry) -> int:
    """What torch takes on a CPU, beside its slot, for an expert of a prompt."""
    row_nbytes = layer.intermediate_size * layer.itemsize
    if not layer.format:
        return _MAX_ROWS * _WIDE * row_nbytes
    gathered = 0 if layer.itemsize == torch.float32.itemsize else (layer.hidden_size + _MAX_ROWS) * row_nbytes
    num_values = layer.num_matrices * layer.hidden_size + _WIDE * _MAX_ROWS  # of a neuron
    native = MANY_TOKENS * (layer.intermediate_size + layer.hidden_size) * 33 // 8  # a unit has 132 bytes for 32
    return max(_PART_NBYTES, layer.block_size * num_values * layer.itemsize, native) + gathered


@dataclass(slots=True)
class Dispatch:
    """The rows of each expert. A row is a (token, choice) pair, token * K + choice, as the reference numbers them."""

    router: RouterRan
    top_k: int
    num_rows: int  # of the outputs
    covers_all_rows: bool  # False where a choice is no expert: its row is zero
    rows: dict[int, torch.Tensor] | None  # expert -> rows [n], in the host's memory; None for a single token
    positions: dict[int, int] | None  # expert -> row, for a single token
    places: dict[int, slice] | None = None  # expert -> where its rows are in the outputs; None: at their numbers


@dataclass(slots=True)
class Early:
    """A layer's call that began before the host knew which experts are chosen."""

    outputs: torch.Tensor
    slots: SlotCall
    spans: list[Span | None]
    """Of each expert: where kernels that are queued use it, if a token chose it; None: they do not."""
    choice: tuple[torch.Tensor, Any] | None
    """The chosen ids [T, K], which are in host memory once this mark is reached; None: every expert was there, and the
    host can wait for them as long as it likes.
    """


@dataclass(slots=True)
class Part:
    """Some experts of a layer, which are computed apart. Their n output rows lie side by side."""

    work: Dispatch
    rows: torch.Tensor  # [n] their places in the outputs of the layer, on the device that has those


def part_of(work: Dispatch, router: RouterRan, held: Sequence[int], device: torch.device) -> Part:
    """The part of a layer that `router` names; its expert e is `held[e]` in `work`. `device`: where the outputs are
    gathered.
    """
    experts = router.experts
    if work.positions is not None:
        numbers = [work.positions[held[expert]] for expert in experts]
        positions = {expert: row for row, expert in enumerate(experts)}
        part = Dispatch(router, work.top_k, len(numbers), True, None, positions)
        return Part(part, torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True))
    assert work.rows is not None
    rows = {expert: work.rows[held[expert]] for expert in experts}
    ends = list(accumulate(map(len, rows.values()), initial=0))
    places = {expert: slice(*ends[i : i + 2]) for i, expert in enumerate(experts)}
    every = torch.cat([torch.empty(0, dtype=torch.int64), *rows.values()])
    part = Dispatch(router, work.top_k, ends[-1], True, rows, None, places)
    return Part(part, every.to(device, non_blocking=True))


class LayerCompute:
    """Computes spans of one layer. `rows` are the layer's slots [S * r1, M, H], r1 neurons a segment; in a format
    blocks of bytes [S * r1 / G, nbytes], whose weights are decoded for what the kernels do not take. `experts` are the
    module's experts that these slots may hold, by their numbers there; None: all. `kernels` multiply few tokens where
    they take such matrices, else torch does. `gathers`: torch has all down rows of a split expert side by side.
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
        *,
        gathers: bool = True,
    ) -> None:
        self.dtype = dtype
        self.num_segments = num_segments
        self.intermediate_size = geometry.intermediate_size
        self._adds_parts = dtype == torch.float32 and bool(geometry.format)  # which lie nowhere side by side
        self.gathers = gathers and not self._adds_parts
        self._geometry, self._rows, self._kernels = geometry, rows, kernels
        self._neurons_per_segment = geometry.intermediate_size // num_segments
        self._num_inner = geometry.num_matrices - 1  # gate and up, or up
        is_gated = self._num_inner == 2
        self._activate = _activation(module, is_gated, dtype)
        self._in_bias, self.down_bias = _biases(module, is_gated, experts, rows.device)
        self._format = form = expert_format(geometry.format) if geometry.format else None
        self._matrix_nbytes = geometry.hidden_size * dtype.itemsize
        self._row_nbytes = geometry.block_nbytes or geometry.num_matrices * self._matrix_nbytes  # or a block's
        self._slot_nbytes = geometry.expert_nbytes // num_segments
        self._address = rows.data_ptr()
        self.slots = kernels.slots(geometry, dtype, num_segments, rows, self._activate, self._in_bias, self.down_bias)
        """An accelerator's kernels over this layer's slots: whole experts and segments in one call; or None."""
        self.max_tokens = kernels.most_tokens(dtype, geometry.format or "")  # of an expert, for the compiled products
        self.products: ExpertProducts | None = None
        """One call of them for all that an expert is; None: torch activates."""
        biases = self._in_bias if self.down_bias is None else (*self._in_bias, self.down_bias)
        activation = None
        if self.max_tokens and all(bias.dtype == dtype for bias in biases):
            activation = recognise(self._activate, dtype, is_gated=is_gated)
        if activation is not None:
            formats = (NO_DOWN,) * 3 if form is None else form.kernels
            shape, nbytes = (self._num_inner, geometry.hidden_size), (self._row_nbytes, self._matrix_nbytes)
            self.products = ExpertProducts(formats, shape, *nbytes, activation, self._in_bias, self.down_bias)

    def is_native(self, x: torch.Tensor) -> bool:
        """Whether the compiled products take such inputs [n, H] of one expert."""
        return x.shape[0] <= self.max_tokens and x.dtype == self.dtype

    def can_begin_early(self, num_tokens: int) -> bool:
        """Whether it computes so many tokens before the host knows their experts."""
        return self.slots is not None and num_tokens <= _EARLY_TOKENS

    def begin_early(
        self, hidden: torch.Tensor, ids: torch.Tensor, spans: list[Span | None], choice: tuple[torch.Tensor, Any] | None
    ) -> Early:
        """Queue what computes those of the chosen experts `ids` [T, K] that have one of `spans`, which are by expert.
        Only where it `can_begin_early`.
        """
        hidden = hidden if hidden.dtype == self.dtype else hidden.to(self.dtype)
        outputs = hidden.new_empty(ids.numel(), hidden.shape[1])
        call = None if self.slots is None else self.slots.begin(hidden, outputs)
        assert call is not None, "few tokens are theirs"
        call.find(ids, spans)
        return Early(outputs, call, spans, choice)

    # -- the compiled products ---------------------------------------------------------------------------------

    def chosen(self, table: int, num_experts: int, tensors: Sequence[torch.Tensor]) -> ChosenExperts | None:
        """A program's step for a token's experts, see ChosenExperts; None where it takes more than the kernels."""
        x, ids, weights, out = tensors
        kernels = self._kernels
        if (
            self.products is None
            or not self.is_native(x)
            or out.dtype != self.dtype
            or weights.dtype not in (torch.float32, self.dtype)
            or ids.dtype != torch.int64
            or not all(tensor.is_contiguous() for tensor in tensors)
        ):
            return None
        slots = table, num_experts, self._address, self._slot_nbytes
        return ChosenExperts(self.products, self.intermediate_size, slots, tensors, kernels.dtypes[weights.dtype])

    def multiply(self, x: torch.Tensor, works: Sequence[Work], out: torch.Tensor, *, adds: bool = False) -> None:
        """out[o] = expert(x[i]) for each span, row i of `x` [*, H] and row o of `out` [*, H]; spans are of equal size.
        `adds`: a span's part of the sum is added to `out`, which is float32 and without bias. Only where `is_native`,
        and of several spans with several tokens where there are `products`.
        """
        kernels = self._kernels
        if x.stride(1) != 1:
            x = x.contiguous()
        kernels.num_native += len(works)
        if self.products is None:
            self._activated_by_torch(x, works, out, adds=adds)
            return
        tasks: list[int] = []
        x_rows: list[int] = []
        out_rows: list[int] = []
        for span, of_x, of_out in works:
            tasks += (self._address + span.slot * self._slot_nbytes, len(of_x), span.expert)
            x_rows += of_x
            out_rows += of_out
        span = works[0][0]
        num_neurons, begin = span.num_segments * self._neurons_per_segment, span.segment * self._neurons_per_segment
        kernels.experts(self.products, tasks, x_rows, out_rows, x, out, num_neurons, begin, adds=adds)

    def _activated_by_torch(self, x: torch.Tensor, works: Sequence[Work], out: torch.Tensor, *, adds: bool) -> None:
        """The same in two calls, of one span or of one token."""
        kernels, n = self._kernels, len(works[0][1])
        if n > _MAX_ROWS:
            ((span, of_x, of_out),) = works
            for first in range(0, n, _MAX_ROWS):
                some = slice(first, first + _MAX_ROWS)
                self._activated_by_torch(x, ((span, of_x[some], of_out[some]),), out, adds=adds)
            return
        num_neurons = works[0][0].num_segments * self._neurons_per_segment
        tasks: list[int] = []
        for k, (span, of_x, _) in enumerate(works):
            tasks += (self._address + span.slot * self._slot_nbytes, of_x[0], n, k * n)
        products = x.new_empty(self._num_inner, len(works) * n, num_neurons)
        if self._format is None:
            kernels.dots(tasks, x, products, self._row_nbytes, self._matrix_nbytes)
        else:
            kernels.tile_dots(self._format.kernels, self._row_nbytes, tasks, x, products)
        inner = products.unbind(0)
        if self._in_bias:
            begin = works[0][0].segment * self._neurons_per_segment
            cut = slice(begin, begin + num_neurons)
            inner = tuple(
                values + torch.stack([bias[span.expert, cut] for span, *_ in works])
                for values, bias in zip(inner, self._in_bias, strict=True)
            )
        tasks = []
        address = self._address + (self._num_inner * self._matrix_nbytes if self._format is None else 0)
        for k, (span, _, of_out) in enumerate(works):
            tasks += (address + span.slot * self._slot_nbytes, k * n, n, of_out[0])
        h = self._activate(*inner).contiguous()
        if self._format is None:
            kernels.sums(tasks, h, out, self._row_nbytes, adds=adds)
        else:
            kernels.tile_sums(self._format.kernels, self._row_nbytes, tasks, h, out, self._num_inner, adds=adds)
        if self.down_bias is not None and not adds:
            for span, _, of_out in works:
                out[of_out[0] : of_out[0] + n] += self.down_bias[span.expert]

    # -- torch's -----------------------------------------------------------------------------------------------

    def whole(self, x: torch.Tensor, span: Span, out: torch.Tensor) -> None:
        """out[n, H] = expert(x [n, H]), for a span that is the whole expert."""
        if self.is_native(x):
            self.multiply(x, ((span, range(len(x)), range(len(x))),), out)
            return
        num_rows = _MAX_ROWS if x.is_cpu else len(x)
        for rows, part in zip(x.split(num_rows), out.split(num_rows), strict=True):
            if self._adds_parts:
                self.add(rows, span, part.zero_())
            else:
                torch.mm(*self.inner(rows, span), out=part)
        if self.down_bias is not None:
            out += self.down_bias[span.expert]

    def add(self, x: torch.Tensor, span: Span, total: torch.Tensor) -> None:
        """total [n, H] += what a span's neurons make of x [n, H], in float32."""
        for _, inner, down in self._parts(x, span):
            if inner.dtype == total.dtype:
                total.addmm_(inner, down)
            elif inner.is_cpu:  # an accelerator that is simulated: torch has the product below on real ones alone
                total.addmm_(inner.float(), down.float())
            else:
                total += torch.mm(inner, down, out_dtype=total.dtype)

    def inner(self, x: torch.Tensor, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        """Activations [n, r] of a span's neurons, and their down rows [r, H]."""
        num_neurons = span.num_segments * self._neurons_per_segment
        inner: torch.Tensor | None = None
        for part, some, rows in self._parts(x, span):
            if part.stop - part.start == num_neurons:
                return some, rows
            if inner is None:
                inner = x.new_empty(x.shape[0], num_neurons, dtype=self.dtype)
                down = x.new_empty(num_neurons, self._geometry.hidden_size, dtype=self.dtype)
            inner[:, part], down[part] = some, rows
        assert inner is not None
        return inner, down

    def _parts(self, x: torch.Tensor, span: Span) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Some of a span's neurons, their activations [n, r], and their down rows [r, H], until the next are taken."""
        self._kernels.num_torch += 1
        geometry, slot = self._geometry, span.slot * self._neurons_per_segment
        num_neurons = step = span.num_segments * self._neurons_per_segment
        if self._format is not None and self._rows.is_cpu:
            num_values = geometry.num_matrices * geometry.hidden_size + _WIDE * x.shape[0]  # of a neuron
            num_blocks = _PART_NBYTES // (num_values * self.dtype.itemsize * geometry.block_size)
            step = min(num_neurons, max(1, num_blocks) * geometry.block_size)
        for begin in range(0, num_neurons, step):
            end = min(begin + step, num_neurons)
            rows = self._rows[(slot + begin) // geometry.block_size : (slot + end) // geometry.block_size]
            if self._format is not None:
                rows = self._format.decode(rows, geometry.num_matrices, geometry.hidden_size).to(self.dtype)
            *matrices, down = rows.unbind(1)
            gate_up = [linear(x, matrix) for matrix in matrices]
            if self._in_bias:
                first = span.segment * self._neurons_per_segment
                biases = [bias[span.expert, first + begin : first + end] for bias in self._in_bias]
                gate_up = [values + bias for values, bias in zip(gate_up, biases, strict=True)]
            yield slice(begin, end), self._activate(*gate_up), down


class LayerCall:
    """One call of a layer: its outputs [rows, H], filled span by span. `hidden` [T, H] is on the layer's device."""

    def __init__(self, compute: LayerCompute, work: Dispatch, hidden: torch.Tensor, early: Early | None = None) -> None:
        """`early`: the call that this one goes on with."""
        self._compute = compute
        self.work = work
        self.hidden = hidden if hidden.dtype == compute.dtype else hidden.to(compute.dtype)
        self._partial: dict[int, PartialExpert] = {}
        self._there: dict[int, torch.Tensor] | None = None  # the rows of experts, where they are computed
        self._slots: SlotCall | None = None
        if early is not None:
            self.outputs, self._slots = early.outputs, early.slots
        else:
            self.outputs = self.hidden.new_empty(work.num_rows, hidden.shape[1])
            if not work.covers_all_rows:
                self.outputs.zero_()
            if compute.slots is not None:
                self._slots = compute.slots.begin(self.hidden, self.outputs)
        few = min(compute.max_tokens, TASK_TOKENS)
        is_short = hidden.shape[0] <= few and (work.positions is not None or compute.products is not None)
        self.takes_several = self._slots is not None or is_short
        """Whether experts that are here can be computed in one call, by the kernels: those of few tokens."""

    def compute(self, spans: Sequence[Span]) -> None:
        """Use the bytes of spans: afterwards their slots may be used again."""
        if self._slots is not None:
            self._slots.add([(span, *self._rows(span.expert)) for span in spans])
            return
        if self.takes_several:
            compute, positions = self._compute, self.work.positions
            works: list[Work] = []
            parts: list[Span] = []
            for span in spans:
                rows = self._rows(span.expert) if positions is None else (_FIRST, (positions[span.expert],))
                if span.num_segments == compute.num_segments:
                    works.append((span, *rows))
                else:
                    parts.append(span)
            if works:
                compute.multiply(self.hidden, works, self.outputs)
            spans = parts
        for span in spans:
            self._one(span)

    def _rows(self, expert: int) -> tuple[Sequence[int], Sequence[int]]:
        """Its rows of the hidden states, and of the outputs."""
        work = self.work
        if work.positions is not None:
            return _FIRST, (work.positions[expert],)
        assert work.rows is not None
        rows = work.rows[expert].tolist()
        tokens = [row // work.top_k for row in rows]
        return tokens, rows if work.places is None else range(work.places[expert].start, work.places[expert].stop)

    def _rows_there(self, expert: int) -> torch.Tensor:
        """Its rows, on the device that computes. All experts' rows are copied at once; the host does not wait."""
        if self._there is None:
            rows, device = self.work.rows, self.hidden.device
            assert rows is not None
            self._there = rows
            if not self.hidden.is_cpu:
                every = torch.cat(list(rows.values())).to(device, non_blocking=True)
                self._there = dict(zip(rows, every.split([len(some) for some in rows.values()]), strict=True))
        return self._there[expert]

    def _one(self, span: Span) -> None:
        compute, work, expert, rows = self._compute, self.work, span.expert, None
        if work.positions is not None:
            row = work.positions[expert]
            x, out = self.hidden, self.outputs[row : row + 1]
        else:
            rows = self._rows_there(expert)
            x = self.hidden[rows // work.top_k]
            if work.places is None:
                out = torch.empty(len(rows), self.hidden.shape[1], dtype=compute.dtype, device=x.device)
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
        self._is_native = compute.is_native(x)
        if self._is_native or not compute.gathers:
            self._sum = torch.zeros(out.shape, dtype=torch.float32, device=x.device)
            return
        width = compute.intermediate_size
        self._inner = torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device)
        self._down = torch.empty(width, out.shape[1], dtype=compute.dtype, device=x.device)

    def add(self, span: Span) -> bool:
        """Use a span's bytes; its slots may be used again afterwards."""
        compute = self._compute
        if self._is_native:
            assert self._sum is not None
            rows = range(len(self._x))
            compute.multiply(self._x, ((span, rows, rows),), self._sum, adds=True)
        elif self._sum is not None:
            compute.add(self._x, span, self._sum)
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


def _biases(
    module: Any, is_gated: bool, experts: Sequence[int] | None, device: torch.device
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """Biases of these experts before the activation, (gate [E, I], up [E, I]) or (up [E, I],) or none, and after,
    [E, H].
    """
    if not getattr(module, "has_bias", False):
        return (), None
    down = module.down_proj_bias.detach()
    inner: Sequence[torch.Tensor]
    if not is_gated:
        inner = (module.up_proj_bias.detach(),)
    elif getattr(module, "is_concatenated", True):
        inner = module.gate_up_proj_bias.detach().chunk(2, dim=-1)
    else:
        fused = module.gate_up_proj_bias.detach()
        inner = fused[..., ::2], fused[..., 1::2]
    held = slice(None) if experts is None else torch.tensor(experts, device=down.device)
    *of_inner, of_down = (bias[held].to(device).contiguous() for bias in (*inner, down))
    return tuple(of_inner), of_down
