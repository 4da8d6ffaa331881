"""The arithmetic of one layer's experts on slot views, in the order and precision of the reference.

An expert in several spans is activated span by span. The compiled products sum its output in float32. torch gathers its
activations and down rows side by side, for one product. Either way the output is rounded once, as that of the whole
expert, whatever the slots (docs/conventions.md, Segments).
Shapes: T tokens, K top-k, H hidden, I intermediate, n tokens of one expert, r neurons of one span.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from expertly.core.geometry import LayerGeometry
from expertly.core.messages import RouterRan, Span
from expertly.formats import expert_format
from expertly.native.activations import recognise
from expertly.native.kernels import MANY_TOKENS, NO_DOWN, TASK_TOKENS, ChosenExperts, ExpertProducts, Kernels, Work
from expertly.native.widened import MAX_ROWS, linear, mm, nbytes_at_once

if TYPE_CHECKING:
    from expertly.native.triton_slots import SlotCall

_FIRST = (0,)

_DEFAULT_GATE = ("transformers.integrations.moe", "_default_apply_gate")

EARLY_TOKENS = 4
"""Most tokens of a layer that begins before the host knows its experts: its kernels read an expert's weights once for
each choice of it.
"""

_CHUNK_NBYTES, _SUMS_NBYTES = 256 << 10, 16 << 20
"""Of the compiled products: bytes of weights in a chunk of an expert (EXPERTS_CHUNK_NBYTES of products.c), and about
the most bytes of a call's sums: H float32 for each chunk and row.
"""

_PART_NBYTES = 2 << 20
"""Bytes of weights decoded at a time for a prompt on a CPU, results included; at least one block."""

_VALUES_OF_NEURON = 4
"""Values that exist at a time for a neuron and a token: gate, up, what is activated, and the product."""


def expert_nbytes_at_once(layer: LayerGeometry) -> int:
    """Bytes that torch needs on a CPU for an expert of a prompt, beside its slot."""
    row_nbytes = layer.intermediate_size * layer.itemsize
    if not layer.format:
        wide = nbytes_at_once(layer.itemsize, layer.hidden_size, layer.intermediate_size)
        return MAX_ROWS * _VALUES_OF_NEURON * row_nbytes + wide
    gathered = (layer.hidden_size + MAX_ROWS) * row_nbytes
    num_values = layer.num_matrices * layer.hidden_size + _VALUES_OF_NEURON * MAX_ROWS  # of a neuron
    native = MANY_TOKENS * (layer.intermediate_size + layer.hidden_size) * 33 // 8  # products.h: 132 bytes for 32
    return max(_PART_NBYTES, layer.block_size * num_values * layer.itemsize, native) + gathered


@dataclass(slots=True)
class Dispatch:
    """The rows of each expert. A row is a (token, choice) pair, token * K + choice, as the reference numbers them."""

    router: RouterRan
    top_k: int
    num_rows: int  # of the outputs
    covers_all_rows: bool  # False where ids choose no expert: their rows are zero
    rows: dict[int, torch.Tensor] | None  # expert -> rows [n], in the host's memory; None for a single token
    positions: dict[int, int] | None  # expert -> row, for a single token
    places: dict[int, slice] | None = None  # expert -> where its rows are in the outputs; None: at their row numbers


@dataclass(slots=True)
class Early:
    """A layer's call that began before the host knew which experts are chosen."""

    outputs: torch.Tensor
    call: SlotCall
    spans: list[Span | None]
    """By expert: the span that the queued kernels use if a token chose the expert; None: they skip it."""
    choice: tuple[torch.Tensor, Any] | None
    """Chosen ids [T, K], in host memory once the mark is reached. None: all experts are resident, and the ids are read
    later.
    """


@dataclass(slots=True)
class Part:
    """Some experts of a layer, which are computed apart. Their n output rows lie side by side."""

    work: Dispatch
    rows: torch.Tensor  # [n] their places in the outputs of the layer, on the device that has those


def part_of(work: Dispatch, router: RouterRan, held: Sequence[int], device: torch.device) -> Part:
    """The part of a layer that `router` names; expert e of `router` is expert `held[e]` of `work`. `device`: where the
    outputs are gathered.
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
    """Computes spans of one layer, by an accelerator's kernels over its slots, by the compiled products for few tokens,
    or by torch: `LayerCall.compute` decides.
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
        """`rows`: the layer's S slots [S * r1, M, H] of r1 neurons; in a format blocks of G neurons
        [S * r1 / G, nbytes]. `experts`: the module's experts that these slots may hold, by their numbers there; None:
        all.
        """
        self.geometry, self.num_segments, self.dtype, self.kernels = geometry, num_segments, dtype, kernels
        self._rows = rows
        of_slot = geometry.expert_nbytes // num_segments, geometry.intermediate_size // num_segments
        self.memory = rows.data_ptr(), *of_slot
        """Address of slot 0, and a slot's bytes and neurons."""
        is_gated = geometry.num_matrices == 3
        self._activate = _activation(module, is_gated, dtype)
        norm: Any = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
        self.norm: nn.Module | None = None if norm is None else norm.to(rows.device)
        """The module's norm of an expert's output [n, H], or None."""
        self._in_bias, self.down_bias = _biases(module, is_gated, experts, rows.device)
        self._format = form = expert_format(geometry.format) if geometry.format else None
        self.slot_kernels = kernels.slots(
            geometry, dtype, num_segments, rows, self._activate, self._in_bias, self.down_bias
        )
        """An accelerator's kernels over slots, for whole experts and segments in one call; or None."""
        self.products: ExpertProducts | None = None
        """The compiled products; None: they do not know the dtype, or the activation."""
        biases = self._in_bias if self.down_bias is None else (*self._in_bias, self.down_bias)
        activation, max_tokens = None, kernels.most_tokens(dtype, geometry.format or "")
        if max_tokens and all(bias.dtype == dtype for bias in biases):
            activation = recognise(self._activate, dtype, is_gated=is_gated)
        if activation is not None:
            formats = (NO_DOWN,) * 3 if form is None else form.kernels
            matrix_nbytes = geometry.hidden_size * dtype.itemsize
            nbytes = geometry.block_nbytes or geometry.num_matrices * matrix_nbytes, matrix_nbytes
            shape = geometry.num_matrices - 1, geometry.hidden_size
            self.products = ExpertProducts(formats, shape, *nbytes, activation, self._in_bias, self.down_bias)
        self.max_tokens = 0 if self.products is None else max_tokens
        """Most tokens of one expert that the compiled products take."""
        sums_nbytes = -(-geometry.expert_nbytes // _CHUNK_NBYTES) * geometry.hidden_size * 4
        self.most_rows = max(TASK_TOKENS, _SUMS_NBYTES // sums_nbytes)
        """Most rows of all experts in one call of the compiled products."""

    def begin_early(
        self, hidden: torch.Tensor, ids: torch.Tensor, spans: list[Span | None], choice: tuple[torch.Tensor, Any] | None
    ) -> Early:
        """Queue kernels for those chosen experts `ids` [T, K] that have a span; `spans` is by expert. Needs slot
        kernels, and at most EARLY_TOKENS tokens.
        """
        hidden = hidden if hidden.dtype == self.dtype else hidden.to(self.dtype)
        outputs = hidden.new_empty(ids.numel(), hidden.shape[1])
        call = None if self.slot_kernels is None else self.slot_kernels.begin(hidden, outputs)
        assert call is not None, "slot kernels take few tokens"
        call.find(ids, spans)
        return Early(outputs, call, spans, choice)

    # -- the compiled products ---------------------------------------------------------------------------------

    def chosen(self, table: int, num_experts: int, tensors: Sequence[torch.Tensor]) -> ChosenExperts | None:
        """A program's step for a token's experts, see ChosenExperts; None where it takes more than the kernels."""
        x, ids, weights, out = tensors
        if (
            self.products is None
            or self.norm is not None
            or x.shape[0] > self.max_tokens
            or not x.dtype == out.dtype == self.dtype
            or weights.dtype not in (torch.float32, self.dtype)
            or ids.dtype != torch.int64
            or not all(tensor.is_contiguous() for tensor in tensors)
        ):
            return None
        places = table, num_experts, *self.memory[:2]
        dtype = self.kernels.dtypes[weights.dtype]
        return ChosenExperts(self.products, self.geometry.intermediate_size, places, tensors, dtype)

    # -- torch's -----------------------------------------------------------------------------------------------

    def whole(self, x: torch.Tensor, span: Span) -> torch.Tensor:
        """expert(x [n, H]), [n, H], for a span that is the whole expert."""
        parts = [mm(*self.inner(rows, span)) for rows in x.split(MAX_ROWS if x.is_cpu else max(1, len(x)))]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if self.down_bias is None else out.add_(self.down_bias[span.expert])

    def inner(self, x: torch.Tensor, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        """Activations [n, r] of a span's neurons, and their down rows [r, H]: a view of the slots, or decoded, on a CPU
        some blocks at a time.
        """
        self.kernels.counts.torch += 1
        geometry, (_, _, of_slot) = self.geometry, self.memory
        slot, num_neurons = span.slot * of_slot, span.num_segments * of_slot
        step = num_neurons
        if self._format is not None and self._rows.is_cpu:
            num_values = geometry.num_matrices * geometry.hidden_size + _VALUES_OF_NEURON * x.shape[0]  # of a neuron
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
                first = span.segment * of_slot
                biases = [bias[span.expert, first + begin : first + end] for bias in self._in_bias]
                gate_up = [values + bias for values, bias in zip(gate_up, biases, strict=True)]
            activated = self._activate(*gate_up)
            if step == num_neurons:
                return activated, down
            if not begin:
                gathered = self.empty_inner(len(x), num_neurons)
            gathered[0][:, begin:end], gathered[1][begin:end] = activated, down
        return gathered

    def empty_inner(self, num_tokens: int, num_neurons: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for activations [n, r] and down rows [r, H]."""
        empty = partial(torch.empty, dtype=self.dtype, device=self._rows.device)
        return empty(num_tokens, num_neurons), empty(num_neurons, self.geometry.hidden_size)


class LayerCall:
    """One call of a layer: its outputs [rows, H], filled span by span. `hidden` [T, H] is on the layer's device."""

    def __init__(self, compute: LayerCompute, work: Dispatch, hidden: torch.Tensor, early: Early | None = None) -> None:
        """`early`: the call that this one completes."""
        self._compute = compute
        self.work = work
        self.hidden = hidden if hidden.dtype == compute.dtype else hidden.to(compute.dtype)
        self._partial: dict[int, _PartialExpert] = {}
        self._rows_on_device: dict[int, torch.Tensor] = {}  # of experts, for an accelerator
        self._slot_call: SlotCall | None = None
        if early is not None:
            self.outputs, self._slot_call = early.outputs, early.call
        else:
            self.outputs = self.hidden.new_empty(work.num_rows, hidden.shape[1])
            if not work.covers_all_rows:
                self.outputs.zero_()
            if compute.slot_kernels is not None:
                self._slot_call = compute.slot_kernels.begin(self.hidden, self.outputs)
        self.takes_several = self._slot_call is not None or hidden.shape[0] <= min(compute.max_tokens, TASK_TOKENS)
        """Whether one call may take several experts, with what arrives meanwhile: few tokens, by kernels."""

    def compute(self, spans: Sequence[Span]) -> None:
        """Compute spans: afterwards their slots may be overwritten. Which code computes a span is decided here."""
        if self._slot_call is not None:
            self._slot_call.add([(span, *self._rows(span.expert)) for span in spans])
            return
        compute, positions = self._compute, self.work.positions
        experts, products, memory = compute.kernels.experts, compute.products, compute.memory
        works: list[Work] = []
        room = compute.most_rows
        for span in spans:
            of_x, of_out = self._rows(span.expert) if positions is None else (_FIRST, (positions[span.expert],))
            if span.num_segments < compute.num_segments:
                self._compute_part(span, of_x)
            elif len(of_x) <= min(compute.max_tokens, TASK_TOKENS):
                if len(of_x) > room:
                    experts(products, memory, works, self.hidden, self.outputs)
                    works, room = [], compute.most_rows
                works.append((span, of_x, of_out))
                room -= len(of_x)
            elif len(of_x) <= compute.max_tokens:
                experts(products, memory, ((span, of_x, of_out),), self.hidden, self.outputs)
            else:
                x, rows = self._inputs(span.expert)
                self.outputs[rows] = compute.whole(x, span)
        if works:
            experts(products, memory, works, self.hidden, self.outputs)

    def _rows(self, expert: int) -> tuple[Sequence[int], Sequence[int]]:
        """Its rows of the hidden states, and of the outputs."""
        work = self.work
        if work.positions is not None:
            return _FIRST, (work.positions[expert],)
        assert work.rows is not None
        rows = work.rows[expert].tolist()
        tokens = [row // work.top_k for row in rows]
        return tokens, rows if work.places is None else range(work.places[expert].start, work.places[expert].stop)

    def _inputs(self, expert: int) -> tuple[torch.Tensor, torch.Tensor | slice]:
        """Its hidden states [n, H], and where its outputs [n, H] go, for torch. All experts' rows are copied to an
        accelerator at once; the host does not wait.
        """
        work = self.work
        if work.positions is not None:
            row = work.positions[expert]
            return self.hidden, slice(row, row + 1)
        assert work.rows is not None
        rows = work.rows[expert]
        if not self.hidden.is_cpu:
            if not self._rows_on_device:
                every = torch.cat(list(work.rows.values())).to(self.hidden.device, non_blocking=True)
                lengths = [len(some) for some in work.rows.values()]
                self._rows_on_device = dict(zip(work.rows, every.split(lengths), strict=True))
            rows = self._rows_on_device[expert]
        return self.hidden[rows // work.top_k], rows if work.places is None else work.places[expert]

    def _compute_part(self, span: Span, of_x: Sequence[int]) -> None:
        part = self._partial.get(span.expert)
        if part is None:
            part = self._partial[span.expert] = _PartialExpert(self._compute, *self._inputs(span.expert))
        if part.add(span):
            self.outputs[part.rows] = part.output(span.expert)
            del self._partial[span.expert]


class _PartialExpert:
    """One expert whose spans come one by one, with hidden states `x` [n, H]; its output goes to `rows`."""

    def __init__(self, compute: LayerCompute, x: torch.Tensor, rows: torch.Tensor | slice) -> None:
        self._compute, self._x, self.rows = compute, x, rows
        self._segments_left = compute.num_segments
        self._sum: torch.Tensor | None = None
        if len(x) <= compute.max_tokens:
            self._sum = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        else:
            self._inner, self._down = compute.empty_inner(len(x), compute.geometry.intermediate_size)

    def add(self, span: Span) -> bool:
        """Use a span's bytes; its slots may be used again afterwards. Whether it was the last one."""
        if self._sum is not None:
            rows = range(len(self._x))
            compute, works = self._compute, ((span, rows, rows),)
            compute.kernels.experts(compute.products, compute.memory, works, self._x, self._sum, adds=True)
        else:
            inner, down = self._compute.inner(self._x, span)
            first = span.segment * down.shape[0] // span.num_segments
            some = slice(first, first + down.shape[0])
            self._inner[:, some], self._down[some] = inner, down
        self._segments_left -= span.num_segments
        return not self._segments_left

    def output(self, expert: int) -> torch.Tensor:
        """[n, H]"""
        compute = self._compute
        out = mm(self._inner, self._down) if self._sum is None else self._sum.to(compute.dtype)
        return out if compute.down_bias is None else out.add_(compute.down_bias[expert])


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
