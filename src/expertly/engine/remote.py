"""Experts in other machines' memory: the engine's side of a worker (`worker.py`).

A token's hidden state is kilobytes where an expert is megabytes: rows go to the worker, and its experts' outputs come
back, as the same kernels make them here. A worker that dies, fails or passes its deadline is dropped: its experts are
computed here from the store, through staging slots, until it is back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from expertly.core.errors import ConfigError, ExpertlyError, TransferError
from expertly.core.placement import Share
from expertly.engine import wire
from expertly.engine.compute import Dispatch
from expertly.engine.shard import Shard
from expertly.scheduler.counters import LayerCounters

_log = logging.getLogger("expertly.workers")

OPENING_S = 180.0
"""How long a worker may take until it holds its experts: it starts Python and torch, and may load all of them."""

DEADLINE_S = 30.0
"""How long a worker may take for a layer. After that it is dropped, and its experts are computed here."""

_STATS_S = 2.0
"""How long statistics wait for a worker that computes. After that they are what it told last."""

_FRESH_S = 0.2
"""While a pass runs, statistics that are younger are not asked for again."""

_LEAST_WAIT_S = 1e-4
"""A shorter wait for an answer is none: it was there."""

_AGAIN_S = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Pauses before the attempts to have a dropped worker back; the last one before all others."""


class PeerLostError(Exception):
    """The process behind a peer is dead, or cannot be reached."""


class Answer(Protocol):
    """The answer to a message."""

    def result(self, timeout_s: float) -> bytes:
        """Raises TimeoutError or PeerLostError."""


class AskedAnswer(Answer, Protocol):
    """The answer to what a worker was asked beside the layers."""

    def is_there(self) -> bool:
        """Whether `result` returns or raises at once."""


class Peer(Protocol):
    """A way to one worker. No method waits; what sends a message raises PeerLostError where the worker is known to be
    dead.
    """

    name: str
    is_here: bool
    """Whether it runs on this machine."""

    def ask(self, message: bytes) -> AskedAnswer:
        """Send a message beside the layers: HELLO, OPEN or STATS. Any thread may ask."""

    def call(self, message: bytes) -> Answer:
        """Send a layer to an open worker. Layers come to it in order, from one thread."""

    def renew(self) -> None:
        """Start the worker anew: it holds nothing then. Does not wait. Raises PeerLostError."""

    def close(self) -> None:
        """End the worker. Idempotent."""


class _WorkerFailedError(Exception):
    """A worker's own reason for not doing what it was asked for."""


_GONE = (PeerLostError, TimeoutError, _WorkerFailedError)


def ask(peer: Peer, message: bytes) -> AskedAnswer:
    """Raises ConfigError where the worker cannot be reached."""
    try:
        return peer.ask(message)
    except PeerLostError as error:
        raise ConfigError(f"workers: {peer.name}: {_words(error)}") from error


def result_of(peer: Peer, answer: Answer) -> Any:
    """The JSON that a worker answers when it is opened. Raises ConfigError with the reason where it does not."""
    try:
        return wire.told_in(_content(answer, OPENING_S))
    except _GONE as error:
        raise ConfigError(f"workers: {peer.name}: {_words(error)}") from error


def _content(answer: Answer, timeout_s: float) -> bytes:
    content = answer.result(timeout_s)
    if (reason := wire.reason_in(content)) is not None:
        raise _WorkerFailedError(reason)
    return content


def _words(error: BaseException) -> str:
    return "no answer within its deadline" if isinstance(error, TimeoutError) else str(error) or type(error).__name__


class RemoteShard:
    """The experts of `share`, in a worker. Only the forward pass calls it, except `told` and `layer_counters`.

    A layer is `send`, then `take`; the worker computes between the two.
    """

    def __init__(
        self,
        peer: Peer,
        share: Share,
        opening: bytes,
        make_standby: Callable[[], Shard],
        dtype: torch.dtype,
    ) -> None:
        """`opening`: the message by which the worker holds these experts; `wait_open` waits for that. `make_standby`: a
        shard for the same experts in this process, in as little memory as works. Raises ConfigError as `ask`.
        """
        self.name = peer.name
        self.share = share
        self.problem: str | None = None
        """Why the worker was dropped; None while it computes."""
        self.num_drops = self.num_joins = 0
        self.num_calls = self.sent_nbytes = self.received_nbytes = 0
        self.made_us_wait = False
        """Whether the last `take` had to wait for the worker."""
        self.call_ns = 0  # where it did: from sending rows until their outputs are here
        self.busy_ns = 0  # of these, in the worker
        self._peer = peer
        self._opening = opening
        self._make_standby = make_standby
        self._standby: Shard | None = None
        self._modules: Sequence[nn.Module] = ()
        self._dtype = dtype
        self._answer: Answer | None = None  # of the layer that runs
        self._sent_s = 0.0
        self._begins = False  # a pass began, and the worker was sent no layer of it
        # A worker that was dropped:
        self._is_dead = False
        self._reopening: AskedAnswer | None = ask(peer, opening)
        self._reopened_s = 0.0
        self._again_s = 0.0  # when to try next
        self._num_attempts = 0
        # Statistics:
        self._is_running = False  # a pass
        self._told: dict[str, Any] = {}
        self._counted: list[LayerCounters] = []  # what it says of its layers
        self._told_s = 0.0
        self._is_told_old = False
        self._is_silent = False  # it did not answer when last asked
        self._past = [LayerCounters() for _ in share.geometry.layers]  # of the worker's earlier lives, and standbys

    def wait_open(self) -> None:
        """Raises ConfigError where the worker does not hold its experts."""
        assert self._reopening is not None
        self._hear(result_of(self._peer, self._reopening))
        self._reopening = None

    def bind(self, modules: Sequence[nn.Module]) -> None:
        """The model's experts modules, in layer order, for computing here."""
        self._modules = modules

    # -- a pass ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A forward pass begins: a worker that was dropped may join again. Never waits."""
        self._is_running = True
        self._begins = True
        if self.problem is not None:
            if self._reopening is not None and self._reopening.is_there():
                self._join(self._reopening)
            elif time.monotonic() >= self._again_s:
                self._reopen()

    def settle(self) -> None:
        """The pass ended."""
        self._is_running = False

    # -- a layer -----------------------------------------------------------------------------------------------

    def send(self, work: Dispatch, hidden: torch.Tensor) -> None:
        """Ask the worker for its rows of a layer. `hidden` [T, H] is in host memory."""
        self._answer = None
        if self.problem is not None or not work.num_rows:
            return
        message, self._begins = wire.layer_message(self._begins, work, hidden.to(self._dtype)), False
        self._sent_s = time.monotonic()
        self._is_told_old = True
        self.num_calls += 1
        self.sent_nbytes += len(message)
        try:
            self._answer = self._peer.call(message)
        except PeerLostError as error:
            self._drop(error)

    def take(self, work: Dispatch, hidden: torch.Tensor) -> wire.LayerRan:
        """The outputs [n, H] of the work that was sent, from the worker, else computed here. Raises TransferError where
        neither can.
        """
        answer, self._answer, self.made_us_wait = self._answer, None, False
        if not work.num_rows:
            return wire.LayerRan(torch.empty(0, hidden.shape[1], dtype=self._dtype), 0, 0)
        if answer is not None and self.problem is None:
            begin_s = time.monotonic()
            try:
                content = _content(answer, max(0.0, self._sent_s + DEADLINE_S - begin_s))
            except _GONE as error:
                self._drop(error)
            else:
                now_s = time.monotonic()
                self.made_us_wait = now_s - begin_s > _LEAST_WAIT_S
                ran = wire.ran_in(content, self._dtype, work.num_rows)
                if self.made_us_wait:
                    self.call_ns += int((now_s - self._sent_s) * 1e9)
                    self.busy_ns += ran.took_ns
                self.received_nbytes += len(content)
                return ran
        return self._compute_here(work, hidden)

    def abandon(self) -> None:
        """The layer failed elsewhere: nobody wants what the worker answers."""
        self._answer = None
        if self._standby is not None:
            self._standby.abandon()

    def close(self) -> None:
        """Free what computes here in the worker's place; `start_workers` says who ends the worker. Idempotent."""
        self._end_standby()
        self._modules = ()

    # -- without the worker ------------------------------------------------------------------------------------

    def _drop(self, error: BaseException) -> None:
        """From now on its experts are computed here, until it joins again."""
        self.problem = _words(error)
        _log.warning("worker %s was lost: %s; its experts are computed here until it is back", self.name, self.problem)
        device = {**self._told["device"], "resident_bytes": 0}
        self._told = {**self._told, "device": device, "resident": [0] * self.share.geometry.num_experts}
        self.num_drops += 1
        self._num_attempts = 0
        self._reopening = None
        self._is_dead = isinstance(error, PeerLostError)
        self._again_s = time.monotonic() + _AGAIN_S[0]

    def _compute_here(self, work: Dispatch, hidden: torch.Tensor) -> wire.LayerRan:
        begin = time.perf_counter_ns()
        try:
            if self._standby is None:
                self._standby = self._make_standby()
                self._standby.bind(self._modules, self.share.experts)
            outputs, waits = self._standby.run_layer(work, hidden, None)
        except (ExpertlyError, OSError) as error:
            why = f"worker {self.name} was dropped ({self.problem}), and its experts cannot be computed here"
            raise TransferError(f"{why}: {error}") from error
        self.made_us_wait = True
        return wire.LayerRan(outputs, sum(there - here for here, there in waits), time.perf_counter_ns() - begin)

    def _reopen(self) -> None:
        """Ask a dropped worker to hold its experts again; start it anew where it is dead, or does not answer that."""
        now_s = time.monotonic()
        self._again_s = now_s + _AGAIN_S[min(self._num_attempts, len(_AGAIN_S) - 1)]
        self._num_attempts += 1
        is_stuck = self._reopening is not None and now_s - self._reopened_s > OPENING_S
        if self._reopening is not None and not is_stuck:
            return
        try:
            if self._is_dead or is_stuck:
                self._peer.renew()
            self._reopening, self._reopened_s = self._peer.ask(self._opening), now_s
        except PeerLostError as error:
            self.problem, self._is_dead, self._reopening = _words(error), True, None

    def _join(self, answer: AskedAnswer) -> None:
        self._reopening = None
        try:
            told = wire.told_in(_content(answer, 0.0))
        except _GONE as error:
            self.problem, self._is_dead = _words(error), isinstance(error, PeerLostError)
            return
        for past, one in zip(self._past, self._counted, strict=True):
            past.add(one)
        self._hear(told)
        self._end_standby()
        self.problem = None
        self.num_joins += 1
        _log.info("worker %s is back", self.name)

    def _end_standby(self) -> None:
        standby, self._standby = self._standby, None
        if standby is not None:
            for layer, past in enumerate(self._past):
                past.add(standby.layer_counters(layer))
            standby.close()

    # -- statistics, for any thread ----------------------------------------------------------------------------

    def told(self) -> dict[str, Any]:
        """What the worker says of itself (ExpertWorker). While it computes or is gone, what it said last."""
        is_old = time.monotonic() - self._told_s >= _FRESH_S or not (self._is_running or self._is_silent)
        if self._is_told_old and self.problem is None and is_old:
            self._is_told_old = self._is_running
            try:
                answer = self._peer.ask(wire.asking(wire.Kind.STATS))
                self._hear(wire.told_in(_content(answer, _STATS_S)))
                self._is_silent = False
            except _GONE:  # the next pass will notice
                self._is_told_old = self._is_silent = True
                self._told_s = time.monotonic()  # asking took long, and each layer's counters come here
        return self._told

    def _hear(self, told: dict[str, Any]) -> None:
        self._told, self._counted = told, [LayerCounters.from_dict(raw) for raw in told["layers"]]
        self._told_s = time.monotonic()

    def facts(self) -> dict[str, Any]:
        """For results: the state of the worker and of the way to it. Times are of the calls that a layer waited for."""
        return {
            "alive": self.problem is None,
            "problem": self.problem,
            "drops": self.num_drops,
            "joins": self.num_joins,
            "calls": self.num_calls,
            "bytes_sent": self.sent_nbytes,
            "bytes_received": self.received_nbytes,
            "call_s": self.call_ns / 1e9,
            "link_s": max(0, self.call_ns - self.busy_ns) / 1e9,
        }

    def layer_counters(self, layer: int) -> LayerCounters:
        """What the worker has counted, and what was counted here in its place. Counts since it was last asked are lost
        with a worker that dies.
        """
        total = LayerCounters()
        self.told()
        total.add(self._past[layer])
        total.add(self._counted[layer])
        standby = self._standby
        if standby is not None:
            total.add(standby.layer_counters(layer))
        return total
