"""Experts in other machines' memory: the engine's side of a worker (`worker.py`).

A token's hidden state is kilobytes where an expert is megabytes: rows go to the worker, and its experts' outputs come
back, as the same kernels make them here. A worker that dies, fails or passes its deadline is dropped: its experts are
computed here from the store, through staging slots, until it is back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from expertly.core.errors import ConfigError, ExpertlyError, TransferError
from expertly.core.placement import Share
from expertly.engine import wire
from expertly.engine.compute import Dispatch
from expertly.engine.peer import OPENING_S, Peer
from expertly.engine.shard import Shard
from expertly.scheduler.counters import LayerCounters

_log = logging.getLogger("expertly.workers")

DEADLINE_S = 30.0
"""How long a worker may take for a layer. After that it is dropped, and its experts are computed here."""

_STATS_S = 2.0
"""How long statistics wait for a worker that computes. After that they are what it told last."""

_LEAST_WAIT_S = 1e-4
"""A shorter wait for an answer is none: it was there."""

_AGAIN_S = 5.0
"""Pause before an attempt to have a dropped worker back."""


_LOST = (ConnectionError, TimeoutError, wire.WorkerFailedError)


@contextmanager
def naming(peer: Peer) -> Iterator[None]:
    """Raises ConfigError naming the worker, and the reason why it is lost."""
    try:
        yield
    except _LOST as error:
        raise ConfigError(f"workers: {peer.name}: {_words(error)}") from error


def ask_all(peers: Sequence[Peer], messages: Sequence[bytes]) -> list[dict[str, Any]]:
    """What each answers, all at the same time. Raises ConfigError naming a worker that does not."""
    for peer, message in zip(peers, messages, strict=True):
        with naming(peer):
            peer.send(message, OPENING_S)
    headers = []
    for peer in peers:
        with naming(peer):
            headers.append(wire.parts_of(peer.receive(OPENING_S))[0])
    return headers


def _words(error: BaseException) -> str:
    return "no answer within its deadline" if isinstance(error, TimeoutError) else str(error) or type(error).__name__


class RemoteShard:
    """The experts of `share`, in a worker. Only the forward pass calls it, but for statistics.

    A layer is `send`, then `take`; the worker computes between the two.
    """

    def __init__(
        self,
        peer: Peer,
        share: Share,
        opening: bytes,
        told: dict[str, Any],
        make_standby: Callable[[], Shard],
        dtype: torch.dtype,
    ) -> None:
        """`opening`: the message by which the worker holds these experts, which it answered by `told`. `make_standby`:
        a shard for the same experts in this process, in as little memory as works.
        """
        self.name = peer.name
        self.share = share
        self.problem: str | None = None
        """Why the worker was dropped; None while it computes."""
        self.made_us_wait = False
        """Whether the last `take` had to wait for the worker."""
        self.told = told
        """What the worker said last of itself: see `ExpertWorker`."""
        self._peer = peer
        self._opening = opening
        self._make_standby = make_standby
        self._standby: Shard | None = None
        self._modules: Sequence[nn.Module] = ()
        self._dtype = dtype
        self._begins = False  # a pass began, and the worker was sent no layer of it
        self._is_asked = False  # for a layer, of which no answer was received
        self._sent_s = 0.0
        self._num_drops = self._num_joins = self._num_calls = self._sent_nbytes = self._received_nbytes = 0
        self._call_ns = 0  # where `take` waited: from sending rows until their outputs are here
        self._busy_ns = 0  # of these, in the worker
        self._is_told_old = False
        self._past = [LayerCounters() for _ in share.geometry.layers]  # of the worker's earlier lives, and standbys
        # A worker that was dropped:
        self._is_dead = False
        self._reopening: Future[dict[str, Any]] | None = None
        self._again_s = 0.0  # when to try next

    def bind(self, modules: Sequence[nn.Module]) -> None:
        """The model's experts modules, in layer order, for computing here."""
        self._modules = modules

    def close(self) -> None:
        """Free what computes here in the worker's place; `start_workers` says who ends the worker. Idempotent."""
        self._end_standby()
        self._modules = ()

    # -- a pass ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A forward pass begins: a worker that was dropped may join again. Never waits."""
        self._begins = True
        if self.problem is not None:
            if self._reopening is not None:
                if self._reopening.done():
                    self._join(self._reopening)
            elif time.monotonic() >= self._again_s:
                self._reopening = Future()
                threading.Thread(target=self._reopen, args=(self._reopening,), name="reopening", daemon=True).start()

    def send(self, work: Dispatch, hidden: torch.Tensor) -> None:
        """Ask the worker for its rows of a layer. `hidden` [T, H] is in host memory."""
        if self.problem is not None or not work.num_rows:
            return
        message, self._begins = wire.layer_message(self._begins, work, hidden.to(self._dtype)), False
        self._sent_s = time.monotonic()
        self._num_calls += 1
        self._sent_nbytes += len(message)
        try:
            self._peer.send(message)
            self._is_asked = True
        except _LOST as error:
            self._drop(error)

    def take(self, work: Dispatch, hidden: torch.Tensor) -> wire.LayerRan:
        """The outputs [n, H] of the work that was sent, from the worker, else computed here. Raises TransferError where
        neither can.
        """
        self.made_us_wait = False
        if not work.num_rows:
            return wire.LayerRan(torch.empty(0, hidden.shape[1], dtype=self._dtype), 0, 0)
        if not self._is_asked:
            return self._compute_here(work, hidden)
        begin_s, self._is_asked = time.monotonic(), False
        try:
            answer = self._peer.receive(max(0.0, self._sent_s + DEADLINE_S - begin_s))
            ran = wire.ran_in(answer, self._dtype, work.num_rows)
        except _LOST as error:
            self._drop(error)
            return self._compute_here(work, hidden)
        now_s, self._is_told_old = time.monotonic(), True
        self._received_nbytes += len(answer)
        self.made_us_wait = now_s - begin_s > _LEAST_WAIT_S
        if self.made_us_wait:
            self._call_ns += int((now_s - self._sent_s) * 1e9)
            self._busy_ns += ran.took_ns
        return ran

    def abandon(self) -> None:
        """The layer failed elsewhere: nobody wants what the worker answers."""
        if self._is_asked:
            self._peer.forget()
            self._is_asked, self._is_told_old = False, True
        if self._standby is not None:
            self._standby.abandon()

    # -- without the worker ------------------------------------------------------------------------------------

    def _drop(self, error: Exception) -> None:
        """From now on its experts are computed here, until it joins again."""
        self._num_drops += 1
        self._lost(error, is_dead=isinstance(error, ConnectionError))
        _log.warning("worker %s was lost: %s; its experts are computed here until it is back", self.name, self.problem)
        device = {**self.told["device"], "resident_bytes": 0}
        self.told = {**self.told, "device": device, "resident": [0] * self.share.geometry.num_experts}

    def _lost(self, error: BaseException, *, is_dead: bool) -> None:
        self.problem, self._is_dead, self._reopening = _words(error), is_dead, None
        self._again_s = time.monotonic() + _AGAIN_S

    def _compute_here(self, work: Dispatch, hidden: torch.Tensor) -> wire.LayerRan:
        begin = time.perf_counter_ns()
        try:
            if self._standby is None:
                self._standby = self._make_standby()
                self._standby.bind(self._modules, self.share.experts)
            outputs, waits = self._standby.run_layer(work, hidden, None)
        except (ExpertlyError, OSError) as error:
            reason = f"worker {self.name} was dropped ({self.problem}), and its experts cannot be computed here"
            raise TransferError(f"{reason}: {error}") from error
        self.made_us_wait = True
        return wire.LayerRan(outputs, sum(end - start for start, end in waits), time.perf_counter_ns() - begin)

    def _reopen(self, answer: Future[dict[str, Any]]) -> None:
        """Ask a dropped worker to hold its experts again; start it anew where it is dead, or did not answer that."""
        try:
            if self._is_dead:
                self._peer.start()
            answer.set_result(wire.parts_of(self._peer.ask(self._opening, OPENING_S))[0])
        except Exception as error:  # whatever it is: who waits is told
            answer.set_exception(error)

    def _join(self, answer: Future[dict[str, Any]]) -> None:
        if (error := answer.exception()) is not None:
            self._lost(error, is_dead=not isinstance(error, wire.WorkerFailedError))
            return
        self._end_standby()
        for past, layer in zip(self._past, self.told["layers"], strict=True):
            past.add(LayerCounters.from_dict(layer))
        self.told, self.problem, self._reopening = answer.result(), None, None
        self._num_joins += 1
        _log.info("worker %s is back", self.name)

    def _end_standby(self) -> None:
        standby, self._standby = self._standby, None
        if standby is not None:
            for layer, past in enumerate(self._past):
                past.add(standby.layer_counters(layer))
            standby.close()

    # -- statistics, for any thread ----------------------------------------------------------------------------

    def hear(self) -> None:
        """Have the worker say anew what it holds and has done. While it computes for long or is gone, `told` stays."""
        if self._is_told_old and self.problem is None:
            self._is_told_old = False  # before asking: a layer that runs meanwhile makes it old again
            try:
                self.told = wire.parts_of(self._peer.ask(wire.message(wire.Kind.STATS, {}), _STATS_S))[0]
            except _LOST:  # the next pass will notice
                self._is_told_old = True

    def facts(self) -> dict[str, Any]:
        """For results: the state of the worker and of the way to it. Times are of the calls that a layer waited for."""
        return {
            "alive": self.problem is None,
            "problem": self.problem,
            "drops": self._num_drops,
            "joins": self._num_joins,
            "calls": self._num_calls,
            "bytes_sent": self._sent_nbytes,
            "bytes_received": self._received_nbytes,
            "call_s": self._call_ns / 1e9,
            "link_s": max(0, self._call_ns - self._busy_ns) / 1e9,
        }

    def layer_counters(self, layer: int) -> LayerCounters:
        """What the worker has counted, and what was counted here in its place. Counts since it was last heard are lost
        with a worker that dies.
        """
        total = LayerCounters.from_dict(self.told["layers"][layer])
        total.add(self._past[layer])
        if (standby := self._standby) is not None:
            total.add(standby.layer_counters(layer))
        return total
