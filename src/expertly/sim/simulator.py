"""Runs a system over a workload on a virtual clock: the loop and the control plane are the engine's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import numpy as np

from expertly.control.channel import InlineChannel
from expertly.control.controller import Controller
from expertly.control.loop import Ahead, run_layer
from expertly.core.messages import Piece, RouterRan
from expertly.core.observation import Began
from expertly.policies.predictor import Predictor
from expertly.sim.compute import ComputeModel
from expertly.sim.future import TraceFuture
from expertly.sim.link import Clock, VirtualLink
from expertly.sim.metrics import Metrics
from expertly.sim.workload import Iteration


class Watcher(Protocol):
    """Sees what a simulation does, with its times."""

    def computed(self, what: str, layer: int, begin_ns: int, end_ns: int) -> None:
        """The device computed: "dense", "expert 7" or "head"."""
        ...


class Simulator:
    """One device, one request at a time or the batches of the trace. `run` may be called once."""

    def __init__(
        self,
        controller: Controller,
        compute: ComputeModel,
        clock: Clock,
        link: VirtualLink,
        *,
        predictor: Predictor | None = None,
        future: TraceFuture | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self.controller = controller
        self.metrics = Metrics()
        self._compute = compute
        self._clock = clock
        self._link = link
        self._ahead = None if predictor is None else Ahead(controller, link, InlineChannel(predictor))
        self._future = future
        self._watcher = watcher
        self._slowdown = compute.slowdown_while_loading
        self._tokens: dict[int, int] = {}  # of the running layer's experts

    def preload(self) -> None:
        """Keep every expert before anything runs; takes no time, as it is not part of any request."""
        geometry = self.controller.geometry
        for layer in range(geometry.num_layers):
            for expert in range(geometry.layers[layer].num_experts):
                for piece in self.controller.preload(layer, expert):
                    self.controller.loaded(piece)

    def run(self, iterations: Iterable[Iteration], progress: Callable[[int], None] | None = None) -> None:
        """Run them all; `progress(rows done)` now and then."""
        clock, link, future = self._clock, self._link, self._future
        for iteration in iterations:
            clock.now_ns = max(clock.now_ns, iteration.arrival_ns)
            begin, stalled = clock.now_ns, link.stall_ns
            if self._ahead is not None:
                self._ahead.begin_iteration(partial(_began, iteration))
            for router in iteration.layers:
                if future is not None:
                    future.begin_layer(router.layer)
                self._run_layer(router, iteration.num_tokens)
            if self._ahead is not None:
                self._ahead.end_iteration(True)
            self._spend("head", -1, self._compute.head_ns(iteration.num_tokens))
            self.metrics.add(iteration, begin, clock.now_ns, link.stall_ns - stalled)
            if progress is not None and not iteration.index % 256:
                progress(iteration.first_row)

    def _run_layer(self, router: RouterRan, num_tokens: int) -> None:
        self._spend("dense", router.layer, self._compute.dense_ns(router.layer, num_tokens))
        if num_tokens > 1:
            self._tokens = dict(zip(router.experts, router.num_tokens, strict=True))
        else:
            self._tokens = {}
        run_layer(self.controller, self._link, router, self._use, self._ahead)

    def _use(self, piece: Piece) -> None:
        num_tokens = self._tokens.get(piece.expert, 1) if self._tokens else 1
        duration_ns = self._compute.piece_ns(piece.layer, num_tokens, piece.num_segments)
        begin = self._clock.now_ns
        self._clock.now_ns = begin + duration_ns
        if self._watcher is not None:
            self._watcher.computed(f"expert {piece.expert}", piece.layer, begin, begin + duration_ns)

    def _spend(self, what: str, layer: int, duration_ns: int) -> None:
        """Compute for so long beside the experts; while the link is busy it takes longer by the slowdown."""
        begin = self._clock.now_ns
        if self._slowdown > 1.0:
            busy_ns = self._link.busy_until_ns() - begin
            if busy_ns > 0:
                slow_ns = min(duration_ns * self._slowdown, busy_ns)
                duration_ns = round(slow_ns + duration_ns - slow_ns / self._slowdown)
        self._clock.now_ns = begin + duration_ns
        if self._watcher is not None:
            self._watcher.computed(what, layer, begin, self._clock.now_ns)


def _began(iteration: Iteration) -> Began:
    num = iteration.num_tokens
    return Began(np.full(num, iteration.requests[0], np.int64), np.full(num, iteration.is_prefill))
