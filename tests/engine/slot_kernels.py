"""Kernels over slots as an accelerator has them, by torch: they see what lies in slots when they are queued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from expertly.core.geometry import LayerGeometry
from expertly.core.messages import Span
from expertly.engine import shard
from expertly.native.kernels import Kernels, Work
from tests.engine.streams import Accelerator

MOST_TOKENS = 32


class SlotKernels(Kernels):
    """Each span takes `span_ns` of the accelerator's time."""

    def __init__(self, accelerator: Accelerator | None = None, span_ns: int = 0) -> None:
        super().__init__(None, "for a test")
        self._accelerator, self._span_ns = accelerator, span_ns

    def slots(self, *layer: Any) -> Any:
        return _Layer(self, *layer)

    def queued(self, memory: torch.Tensor) -> None:
        if self._accelerator is not None:
            self._accelerator.kernel(self._span_ns)
            self._accelerator.reads(memory)


class _Layer:
    def __init__(
        self,
        kernels: SlotKernels,
        geometry: LayerGeometry,
        dtype: torch.dtype,
        num_segments: int,
        rows: torch.Tensor,
        activate: Callable[..., torch.Tensor],
        inner_bias: Sequence[torch.Tensor],
        down_bias: torch.Tensor | None,
    ) -> None:
        self.kernels, self.num_segments, self.rows, self.activate = kernels, num_segments, rows, activate
        self.inner_bias, self.down_bias = inner_bias, down_bias
        self.num_neurons = geometry.intermediate_size // num_segments

    def begin(self, hidden: torch.Tensor, out: torch.Tensor) -> _Call | None:
        return _Call(self, hidden, out) if len(hidden) <= MOST_TOKENS else None


class _Call:
    def __init__(self, layer: _Layer, hidden: torch.Tensor, out: torch.Tensor) -> None:
        self._layer, self._hidden, self._out = layer, hidden, out
        self._sums: dict[int, tuple[int, torch.Tensor]] = {}  # by expert: segments that came, and their sum

    def add(self, works: Sequence[Work]) -> None:
        layer = self._layer
        layer.kernels.counts.native += len(works)
        for span, of_x, of_out in works:
            num, total = self._sums.pop(span.expert, (0, torch.zeros(())))
            num, total = num + span.num_segments, total + self._product(span, list(of_x))
            if num < layer.num_segments:
                self._sums[span.expert] = num, total
            else:
                self._write(list(of_out), total, span.expert)

    def find(self, ids: torch.Tensor, spans: Sequence[Span | None]) -> None:
        chosen = ids.as_subclass(torch.Tensor).reshape(-1).tolist()
        for row, expert in enumerate(chosen):
            if not 0 <= expert < len(spans):
                self._out[row] = 0
            elif (span := spans[expert]) is not None:
                self._write([row], self._product(span, [row // ids.shape[1]]), expert)

    def _product(self, span: Span, of_x: list[int]) -> torch.Tensor:
        layer, r = self._layer, self._layer.num_neurons
        rows, x = layer.rows[span.slot * r : (span.slot + span.num_segments) * r], self._hidden[of_x]
        layer.kernels.queued(rows)
        inner = [x @ matrix.T for matrix in rows.unbind(1)[:-1]]
        if layer.inner_bias:
            cut = slice(span.segment * r, (span.segment + span.num_segments) * r)
            inner = [values + bias[span.expert, cut] for values, bias in zip(inner, layer.inner_bias, strict=True)]
        return layer.activate(*inner).float() @ rows[:, -1].float()

    def _write(self, of_out: list[int], total: torch.Tensor, expert: int) -> None:
        bias = self._layer.down_bias
        out = total.to(self._out.dtype)
        self._out[of_out] = out if bias is None else out + bias[expert]


def put_slot_kernels(
    monkeypatch: pytest.MonkeyPatch, accelerator: Accelerator | None = None, span_ns: int = 0
) -> SlotKernels:
    """Models loaded from now on have them."""
    kernels = SlotKernels(accelerator, span_ns)
    monkeypatch.setattr(shard, "choose_kernels", lambda **_: kernels)
    return kernels
