"""Experts in other machines' memory: the engine's side of a worker (`worker.py`).

A token's hidden state is kilobytes where an expert is megabytes: rows go to the worker, and its experts' outputs come
back, as the same kernels make them here. A worker that dies, fails or passes its deadline is ended: from then on its
experts are computed here from the store, through staging slots.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from expertly.core.errors import ExpertlyError, TransferError
from expertly.core.placement import Share
from expertly.engine import wire
from expertly.engine.compute import Dispatch
from expertly.engine.peer import Peer
from expertly.engine.shard import Shard
from expertly.scheduler.counters import LayerCounters

_log = logging.getLogger("expertly.workers")

DEADLINE_S = 30.0
"""How long a worker may take for a layer. After that it is dropped, and its experts are computed here."""

_STATS_S = 2.0
"""How long statistics wait for a worker that computes. After that they are what it told last."""

_LEAST_WAIT_S = 1e-4
"""A shorter wait for an answer is none: it was there."""

LOST = (OSError, wire.WorkerFailedError)
"""What messages to a worker raise that is dead, fails or does not answer."""


def words_of(error: BaseException) -> str:
    return "no answer within its deadline" if isinstance(error, TimeoutError) else str(error) or type(error).__name__


class RemoteShard:
    """The experts of `share`, in a worker. Only the forward pass calls it, but for statistics.

    A layer is `send`, then `take`; the worker computes between the two.
    """

    def __init__(
        self,
        peer: Peer,
        share: Share,
        said: dict[str, Any],
        make_standby: Callable[[], Shard],
        dtype: torch.dtype,
    ) -> None:
        """`said`: what the worker said of itself when it held these experts. `make_standby`: a shard for the same
        experts in this process, in as little memory as works.
        """
        self.share = share
        self.problem: str | None = None
        """Why the worker was dropped; None while it computes."""
        self.report = said
        """What the worker said last of itself: see `ExpertWorker`."""
        self._peer = peer
        self._make_standby = make_standby
        self._standby: Shard | None = None  # made when the worker was dropped
        self._modules: Sequence[nn.Module] = ()
        self._dtype = dtype
        self._begins = False  # a pass began, and the worker was sent no layer of it
        self._sent_s: float | None = None  # when it was sent the layer that runs
        self._counts: Counter[str] = Counter()  # *_ns: where `take` waited, from sending rows until outputs are here
        self._is_report_old = False

    def bind(self, modules: Sequence[nn.Module]) -> None:
        """The model's experts modules, in layer order, for computing here."""
        self._modules = modules

    def close(self) -> None:
        """Free what computes here in the worker's place; `start_workers` says who ends the worker. Idempotent."""
        self._modules = ()
        if self._standby is not None:
            self._standby.close()

    # -- a pass ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A forward pass begins."""
        self._begins = True

    def send(self, work: Dispatch, hidden: torch.Tensor) -> None:
        """Ask the worker for its rows of a layer. `hidden` [T, H] is in host memory."""
        if self.problem is not None or not work.num_rows:
            return
        message, self._begins = wire.layer_message(self._begins, work, hidden.to(self._dtype)), False
        sent_s = time.monotonic()
        try:
            self._peer.send(message)
        except LOST as error:
            self._drop(error)
            return
        self._sent_s = sent_s
        self._counts["calls"] += 1
        self._counts["bytes_sent"] += len(message)

    def take(self, work: Dispatch, hidden: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        """The outputs [n, H] of the work that was sent, from the worker, else computed here; and how long transfers
        held them up, None where they were there already. Raises TransferError where they cannot be computed.
        """
        if not work.num_rows:
            return torch.empty(0, hidden.shape[1], dtype=self._dtype), None
        if self._sent_s is not None:
            begin_s, sent_s, self._sent_s = time.monotonic(), self._sent_s, None
            try:
                answer = self._peer.receive(max(0.0, sent_s + DEADLINE_S - begin_s))
                ran = wire.ran_in(answer, self._dtype, work.num_rows)
            except LOST as error:
                self._drop(error)
            else:
                now_s, self._is_report_old = time.monotonic(), True
                self._counts["bytes_received"] += len(answer)
                if now_s - begin_s <= _LEAST_WAIT_S:
                    return ran.outputs, None
                self._counts["call_ns"] += int((now_s - sent_s) * 1e9)
                self._counts["busy_ns"] += ran.took_ns
                return ran.outputs, ran.waited_ns
        try:
            if self._standby is None:
                self._standby = self._make_standby()
                self._standby.bind(self._modules, self.share.experts)
            outputs, waits = self._standby.run_layer(work, hidden, None)
            return outputs, sum(end - begin for begin, end in waits)
        except (ExpertlyError, OSError) as error:
            reason = f"worker {self._peer.name} was dropped ({self.problem}), and its experts cannot be computed here"
            raise TransferError(f"{reason}: {error}") from error

    def abandon(self) -> None:
        """The layer failed elsewhere: nobody wants what the worker answers."""
        if self._sent_s is not None:
            self._sent_s, self._is_report_old = None, True
            try:
                self._peer.receive(DEADLINE_S)
            except LOST as error:
                self._drop(error)
        if self._standby is not None:
            self._standby.abandon()

    def _drop(self, error: Exception) -> None:
        """End the worker; its experts are computed here from now on."""
        self.problem = words_of(error)
        _log.warning("worker %s was lost: %s; its experts are computed here now", self._peer.name, self.problem)
        self._peer.end()
        device = {**self.report["device"], "resident_bytes": 0}
        self.report = {**self.report, "device": device, "resident": [0] * self.share.geometry.num_experts}

    # -- statistics, for any thread ----------------------------------------------------------------------------

    def hear(self) -> None:
        """Have the worker say anew what it holds and has done. While it is busy or gone, `report` stays."""
        if self._is_report_old and self.problem is None:
            self._is_report_old = False  # before asking: a layer that runs meanwhile makes it old again
            try:
                self._peer.send(wire.message(wire.Kind.STATS, {}), _STATS_S)
                self.report = wire.parts_of(self._peer.receive(DEADLINE_S))[0]
            except LOST:  # the next pass will notice
                self._is_report_old = True

    def facts(self) -> dict[str, Any]:
        """For results: the state of the worker and of the way to it. Times are of the calls that a layer waited for."""
        counts, names = self._counts, ("calls", "bytes_sent", "bytes_received")
        return {
            "alive": self.problem is None,
            "problem": self.problem,
            **{name: counts[name] for name in names},
            "call_s": counts["call_ns"] / 1e9,
            "link_s": max(0, counts["call_ns"] - counts["busy_ns"]) / 1e9,
        }

    def layer_counters(self, layer: int) -> LayerCounters:
        """What the worker has counted, and what was counted here in its place. Counts since it was last heard are lost
        with a worker that dies.
        """
        total = LayerCounters.from_dict(self.report["layers"][layer])
        if (standby := self._standby) is not None:
            total.add(standby.layer_counters(layer))
        return total
