"""Runs the experts of a model: asks the controller, moves pieces, computes them as they become available."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from torch import nn

from expertly.control.controller import Controller
from expertly.control.loop import run_layer
from expertly.core.errors import EngineClosedError, ExpertlyError, ModelUseError, TransferError
from expertly.core.iteration import IterationInfo
from expertly.core.messages import Phase, Piece
from expertly.engine.backend import Backend
from expertly.engine.compute import LayerCompute, PartialExpert
from expertly.engine.observer import Observer
from expertly.engine.prediction import Prefetching
from expertly.engine.routing import Dispatch, dispatch

_COMBINE_NBYTES = 16 << 20
"""The weighted sum over K is done for so many bytes of tokens at a time, to keep the prefill's peak low."""


class Engine:
    """The runtime behind one model's experts. One forward pass at a time; see models.runtime.Runtime."""

    def __init__(self, controller: Controller, backend: Backend) -> None:
        self.controller = controller
        self.backend = backend
        self.observer: Observer | None = None
        self.prefetching: Prefetching | None = None
        self.num_prefill_iterations = 0
        self.num_decode_iterations = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self._layers: list[LayerCompute] = []
        self._info: IterationInfo | None = None
        self._is_closed = False
        self._is_broken = False
        self._must_abandon = False  # an interrupt came while a failed layer was undone
        self._process = os.getpid()

    def bind(self, modules: list[nn.Module]) -> None:
        """Attach the experts modules, in layer order."""
        geometry = self.controller.geometry
        self._layers = [
            LayerCompute(module, geometry.layers[layer], geometry.segments_per_expert, self.backend.rows(layer))
            for layer, module in enumerate(modules)
        ]

    def preload(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Load and keep every expert; `progress(done_nbytes, total_nbytes)`."""
        geometry, done = self.controller.geometry, 0
        for layer in range(geometry.num_layers):
            for expert in range(geometry.layers[layer].num_experts):
                pieces = self.controller.preload(layer, expert)
                self.backend.submit(pieces)
                for _ in pieces:
                    self.controller.loaded(self.backend.wait())
                done += geometry.layers[layer].expert_nbytes
                if progress is not None:
                    progress(done, geometry.nbytes)

    # -- Runtime -----------------------------------------------------------------------------------------------

    @property
    def wants_token_ids(self) -> bool:
        """Only who watches or predicts needs them."""
        return self.observer is not None or self.prefetching is not None

    def begin_iteration(self, info: IterationInfo) -> None:
        """A forward pass begins."""
        self._check_open()
        self.backend.begin()
        if self.prefetching is not None:
            try:
                self.prefetching.begin_iteration(info)
            except BaseException as error:
                self._abandon(error)
                raise
        self._info = info
        if self.observer is not None:
            self.observer.begin_iteration(info)

    def end_iteration(self, ok: bool) -> None:
        """It ended; `ok` is False when it raised."""
        info, self._info = self._info, None
        if self.observer is not None:
            self.observer.end_iteration(ok)
        if self.prefetching is not None:
            self.prefetching.end_iteration(ok)
        if info is None or not ok:
            return
        is_real = None if info.is_pad is None else ~info.is_pad
        num_tokens = len(info.is_prefill) if is_real is None else int(is_real.sum())
        num_prefill = 0
        if info.phase == "prefill":
            self.num_prefill_iterations += 1
            num_prefill = int((info.is_prefill if is_real is None else info.is_prefill & is_real).sum())
        else:
            self.num_decode_iterations += 1
        self.num_prefill_tokens += num_prefill
        self.num_decode_tokens += num_tokens - num_prefill

    def forward_experts(
        self,
        module: nn.Module,
        layer: int,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """[T, H] from hidden states [T, H], chosen experts [T, K] and their weights [T, K].

        Raises TransferError when bytes could not be brought; the layer is undone and the next pass may work.
        """
        self._check_open()
        if hidden_states.requires_grad and torch.is_grad_enabled():
            raise ModelUseError("the experts' weights come and go: gradients cannot be computed; use torch.no_grad()")
        if self.observer is not None:
            self.observer.router_ran(layer, hidden_states, top_k_index, top_k_weights)
        start = time.perf_counter_ns()
        compute = self._layers[layer]
        with torch.no_grad():
            work = dispatch(layer, top_k_index, self.controller.geometry.layers[layer].num_experts, self._info)
            try:
                outputs, stall_ns = self._run_layer(compute, work, hidden_states, top_k_index, top_k_weights)
            except BaseException as error:
                self._abandon(error)
                if isinstance(error, OSError):
                    raise TransferError(f"layer {layer}: reading experts failed: {error}") from error
                raise
            result = _combine(outputs, top_k_weights, hidden_states)
        phase = Phase.DECODE if any(work.router.is_decode) else Phase.PREFILL
        counters = self.controller.counters[layer].of(phase)
        counters.stall_ns += stall_ns + self.backend.stall_ns()
        counters.expert_ns += time.perf_counter_ns() - start
        return result

    def close(self) -> None:
        """Free threads, files and memory; write what was learned. Idempotent. Raises as Prefetching.close.

        In a process forked from the one that made it there is nothing to end, and nothing is written.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._layers = []
        if not self.is_of_this_process:
            return
        try:
            if self.prefetching is not None:
                self.prefetching.close()
        finally:
            self.backend.close()

    @property
    def is_of_this_process(self) -> bool:
        """False in a forked child, where none of its threads runs."""
        return os.getpid() == self._process

    # -- one layer ---------------------------------------------------------------------------------------------

    def _run_layer(
        self,
        compute: LayerCompute,
        work: Dispatch,
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> tuple[torch.Tensor, int]:
        """Expert outputs [T * K, H] in the reference's row order, and the time waited for transfers."""
        backend, prefetching = self.backend, self.prefetching
        runner = _LayerRun(compute, work, hidden)

        def use(piece: Piece) -> None:
            runner.compute(piece)
            backend.used(piece)

        transport = _TimedTransport(backend)
        if prefetching is None:
            run_layer(self.controller, transport, work.router, use)
        else:
            routed = prefetching.router_ran(work.router, top_k_index, top_k_weights)
            run_layer(self.controller, transport, work.router, use, prefetching.ahead, routed)
        return runner.outputs, transport.stall_ns

    def _abandon(self, error: BaseException) -> None:
        """Undo the layer, and drop what is loaded ahead. An interrupt may have come in the middle of a decision: then
        nothing runs any more.
        """
        is_expected = isinstance(error, ExpertlyError | OSError)
        self._must_abandon = True
        try:
            self.backend.drain()
            self.controller.abandon()
            if not is_expected:
                self.controller.check()
        except (AssertionError, LookupError):
            if is_expected:
                raise
            self._is_broken = True
        self._must_abandon = False

    def _check_open(self) -> None:
        if self._is_broken:
            raise EngineClosedError("this model was interrupted half-way through a decision; call expertly.load again")
        if self._is_closed:
            raise EngineClosedError("this model was unloaded; call expertly.load again")
        if not self.is_of_this_process:
            raise EngineClosedError("this model was loaded before this process was forked; call expertly.load again")
        if self._must_abandon:
            self._abandon(KeyboardInterrupt())
            self._check_open()


class _TimedTransport:
    """The backend, with the time waited for it."""

    def __init__(self, backend: Backend) -> None:
        self.submit = backend.submit
        self.poll = backend.poll
        self._wait = backend.wait
        self.stall_ns = 0

    def wait(self) -> Piece:
        """See Transport."""
        start = time.perf_counter_ns()
        piece = self._wait()
        self.stall_ns += time.perf_counter_ns() - start
        return piece


class _LayerRun:
    """The outputs of one layer, filled piece by piece."""

    def __init__(self, compute: LayerCompute, work: Dispatch, hidden: torch.Tensor) -> None:
        self._compute = compute
        self._work = work
        self._hidden = hidden if hidden.dtype == compute.dtype else hidden.to(compute.dtype)
        self._partial: dict[int, PartialExpert] = {}
        num_rows = hidden.shape[0] * work.top_k
        self.outputs = torch.empty(num_rows, hidden.shape[1], dtype=compute.dtype, device=hidden.device)
        if not work.covers_all_rows:
            self.outputs.zero_()

    def compute(self, piece: Piece) -> None:
        """Use the bytes of a piece: a whole expert at once, else a part of it."""
        compute, expert = self._compute, piece.expert
        work = self._work
        if work.positions is not None:
            row = work.positions[expert]
            x, out, rows = self._hidden, self.outputs[row : row + 1], None
        else:
            assert work.rows is not None
            rows = work.rows[expert]
            x = self._hidden[rows // work.top_k]
            out = torch.empty(len(rows), self._hidden.shape[1], dtype=compute.dtype, device=x.device)
        if piece.num_segments == compute.num_segments:
            compute.whole(x, piece, out)
        else:
            partial = self._partial.get(expert)
            if partial is None:
                partial = self._partial[expert] = PartialExpert(compute, x, out)
            if not partial.add(piece):
                return
            out = self._partial.pop(expert).out
        if rows is not None:
            self.outputs[rows] = out


def _combine(outputs: torch.Tensor, weights: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Weigh and sum over K as the reference does: product in the promoted type, sum, round to the input's type."""
    num_tokens, top_k = weights.shape
    width = outputs.shape[1]
    outputs = outputs.view(num_tokens, top_k, width)
    step = max(1, _COMBINE_NBYTES // (top_k * width * 4))
    if num_tokens <= step:
        return (outputs * weights.unsqueeze(-1)).sum(dim=1).to(hidden.dtype)
    result = torch.empty(num_tokens, width, dtype=hidden.dtype, device=hidden.device)
    for i in range(0, num_tokens, step):
        cut = slice(i, i + step)
        result[cut] = (outputs[cut] * weights[cut].unsqueeze(-1)).sum(dim=1).to(hidden.dtype)
    return result
