"""Several devices as one: experts are placed by hash or recorded routing, hidden states are sent to their devices and
outputs gathered (MoE-Infinity, appendix B.2). Each device is a Shard, several have a thread each.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import nn

from expertly.core.errors import EngineClosedError, TransferError
from expertly.core.messages import Phase
from expertly.core.observation import Began, Routed
from expertly.core.placement import Placement, RouterSplit, Share
from expertly.engine.compute import Dispatch, Early, Part, part_of
from expertly.engine.device import Handover, kind_of
from expertly.engine.memory import shares_of
from expertly.engine.reading import ExtentSource
from expertly.engine.remote import RemoteShard
from expertly.engine.runtime import Executor
from expertly.engine.shard import Moments, Shard, Waits
from expertly.engine.transfer import LOOK_EVERY_S
from expertly.scheduler.counters import LayerCounters, PhaseCounters
from expertly.scheduler.observations import Channel, Seen
from expertly.scheduler.scheduler import Scheduler
from expertly.store.packed import LayerFile

# -- making the devices of a model -----------------------------------------------------------------------------------


def make_executor(
    placement: Placement,
    targets: Sequence[torch.device],
    schedulers: Sequence[Scheduler],
    store: ExtentSource,
    dtype: torch.dtype,
    host_memory: str | int,
    remotes: Sequence[RemoteShard] = (),
) -> Executor:
    """One device, or several as one; the last shares of the placement are those of the workers, `remotes`.
    `host_memory`: RAM for experts behind all devices together.
    """
    kind, shares = kind_of(targets[0]), placement.shares[: len(targets)]
    host_nbytes = kind.host_nbytes(targets[0], host_memory, sum(share.geometry.nbytes for share in shares))
    amounts = shares_of(host_nbytes, [share.geometry for share in shares])
    shards: list[Shard] = []
    with ExitStack() as opened:  # closed again if a later step raises
        for target, share, scheduler, amount in zip(targets, shares, schedulers, amounts, strict=True):
            source: ExtentSource = store if len(placement.shares) == 1 else StoreOfShare(store, share)
            slots = scheduler.budget.pool_slots()
            device = kind.make(target, source, share.geometry, slots, dtype, amount)
            opened.callback(device.close)
            shards.append(Shard(str(target), scheduler, device))
        executor: Executor = shards[0]
        if len(placement.shares) > 1:
            executor = ShardGroup(placement, shards, kind.handover(targets[0]), remotes)
        opened.pop_all()
    return executor


class StoreOfShare:
    """The packed store as one device sees it: only its experts, by their numbers on that device."""

    def __init__(self, store: ExtentSource, share: Share) -> None:
        self._store = store
        self._share = share

    def layer_file(self, layer: int) -> LayerFile:
        whole = self._store.layer_file(layer)
        return whole._replace(places=[whole.places[expert] for expert in self._share.experts[layer]])


class _Ran(NamedTuple):
    """A device's part of a layer: its outputs, which are on the first device once it has reached `mark`."""

    outputs: torch.Tensor
    mark: Any
    waits: Waits
    end_ns: int


class ShardGroup:
    """The Executor of several devices, and of workers on other machines. While the model runs, only a device's own
    thread calls its scheduler and device. A layer ends when all devices have ended their parts, also where one has
    failed.

    The time a layer waits for transfers is that of the device or worker that ended last.
    """

    def __init__(
        self, placement: Placement, shards: Sequence[Shard], handover: Handover, remotes: Sequence[RemoteShard] = ()
    ) -> None:
        """The shares of the placement are those of `shards`, then those of `remotes`."""
        self.placement = placement
        self.geometry = placement.geometry
        self.shards = shards
        self.remotes = remotes
        self._handover = handover
        self._split = RouterSplit(placement.shares)
        self.stamp, self.to_host = shards[0].stamp, shards[0].to_host
        self._moments = Moments(shards[0].device)
        self._times = [LayerCounters() for _ in placement.geometry.layers]  # stall_ns and expert_ns alone
        self._workers = Workers([f"expertly-device-{number}" for number in range(len(shards))])

    def bind(self, modules: Sequence[nn.Module]) -> None:
        for shard, share in zip(self.shards, self.placement.shares, strict=False):
            shard.bind(modules, share.experts)
        for remote in self.remotes:
            remote.bind(modules)

    def predict_from(self, channel: Channel) -> None:
        channels = iter(SharedChannel(channel, self.placement).of_shards)
        for shard, own in zip(self.shards, channels, strict=False):
            shard.predict_from(own)
        for remote, own in zip(self.remotes, channels, strict=True):
            remote.predict_from(own)

    def preload(self, layer: int) -> None:
        self._run([partial(shard.preload, layer) for shard in self.shards])

    def begin(self) -> None:
        for shard in self.shards:  # in this thread: a CUDA graph is captured from its streams
            shard.begin()
        for remote in self.remotes:
            remote.begin()

    def begin_iteration(self, began: Callable[[], Began], layers: range | None) -> None:
        for remote in self.remotes:
            remote.begin_iteration(layers)
        self._run([partial(shard.begin_iteration, began, layers) for shard in self.shards])
        for remote in self.remotes:
            remote.tell(-1)

    def run_layer(
        self, work: Dispatch, hidden: torch.Tensor, routed: Callable[[], Routed] | None, early: Early | None = None
    ) -> tuple[torch.Tensor, Waits]:
        assert early is None, "which devices compute is known with the choice"
        shares, num_here, layer = self.placement.shares, len(self.shards), work.router.layer
        lost = {num_here + number for number, remote in enumerate(self.remotes) if remote.problem is not None}
        routers = self._split(work.router, lost)
        parts = [
            part_of(work, router, share.experts[layer], hidden.device)
            for share, router in zip(shares, routers, strict=True)
        ]
        here, away = parts[:num_here], parts[num_here:]
        is_behind = self.shards[0].device.queues_uses
        on_host = self.to_host(hidden).clone() if away and is_behind else hidden
        for remote, part in zip(self.remotes, away, strict=True):
            remote.send(part.work, on_host)
        mark, both = self._handover.give(), zip(self.shards, here, strict=True)
        ran = self._run([partial(self._run_part, shard, part, hidden, routed, mark) for shard, part in both])
        outputs = torch.empty(work.num_rows, hidden.shape[1], dtype=ran[0].outputs.dtype, device=hidden.device)
        if not work.covers_all_rows:
            outputs.zero_()
        for part, one in zip(here, ran, strict=True):
            self._handover.take(one.mark, hidden.device)
            self._handover.keep(one.outputs)
            outputs.index_copy_(0, part.rows, one.outputs)
        waits: Waits = max(ran, key=lambda one: one.end_ns).waits
        for remote, part in zip(self.remotes, away, strict=True):
            took = remote.take(part.work, on_host)
            outputs.index_copy_(0, part.rows, took.outputs.to(hidden.device))
            if remote.made_us_wait and not is_behind:  # an accelerator's stamps are no times
                waits = [(0, took.waited_ns)]
        return outputs, waits

    def settle(self) -> None:
        self._moments.settle()
        for shard in self.shards:  # their threads are idle between layers
            shard.settle()
        for remote in self.remotes:
            remote.settle()

    def note_times(self, layer: int, phase: Phase, begin: Any, end: Any, waits: Waits) -> None:
        self._moments.note(begin, end, waits, partial(self._ran, self._times[layer].of(phase)))

    def _ran(self, counters: PhaseCounters, begin_ns: int, end_ns: int, waited_ns: int) -> None:
        counters.stall_ns += waited_ns
        counters.expert_ns += end_ns - begin_ns

    def layer_counters(self, layer: int) -> LayerCounters:
        total = LayerCounters()
        of_members = [shard.layer_counters(layer) for shard in self.shards]
        of_members += [remote.layer_counters(layer) for remote in self.remotes]
        for phase in Phase:
            one, times = total.of(phase), self._times[layer].of(phase)
            for counters in of_members:
                one.add(counters.of(phase))
            one.stall_ns, one.expert_ns = times.stall_ns, times.expert_ns
        return total

    def abandon(self, is_in_doubt: bool) -> None:
        """Queued behind what the threads still do for a pass that was interrupted."""
        for remote in self.remotes:
            remote.abandon(is_in_doubt)
        self._run([partial(shard.abandon, is_in_doubt) for shard in self.shards])

    def close(self) -> None:
        self._workers.close()
        for shard in self.shards:
            shard.close()
        for remote in self.remotes:
            remote.close()

    def _run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one call on each device's thread, wait for all, and raise the exception that came first."""
        results, failure = self._workers.run(calls)
        if failure is None:
            return results
        if isinstance(failure.error, TransferError | OSError):
            raise TransferError(f"{self.shards[failure.thread].name}: {failure.error}") from failure.error
        raise failure.error

    def _run_part(
        self, shard: Shard, part: Part, hidden: torch.Tensor, routed: Callable[[], Routed] | None, mark: Any
    ) -> _Ran:
        """Run a device's part of a layer, in the device's thread."""
        target, router = shard.device.torch_device, part.work.router
        self._handover.take(mark, target)
        begin = shard.stamp()
        outputs, waits = shard.run_layer(part.work, hidden.to(target, non_blocking=True), routed)
        outputs = outputs.to(hidden.device, non_blocking=True)
        phase = Phase.DECODE if router.serves_decode else Phase.PREFILL
        shard.note_times(router.layer, phase, begin, shard.stamp(), waits)
        return _Ran(outputs, self._handover.give(), waits, time.perf_counter_ns())


# -- one predictor for all devices -------------------------------------------------------------------------------------


class SharedChannel:
    """Connects the devices of a placement to one predictor: `of_shards` has a Channel for each device.

    All devices publish the same observations; the first one's is passed on (an inline predictor makes the others wait).
    Each prediction is cut to the experts of each device. Devices may call from threads of their own.
    """

    def __init__(self, channel: Channel, placement: Placement) -> None:
        self.of_shards = [ShardChannel(self, share) for share in placement.shares]
        self._channel = channel
        self._lock = threading.RLock()  # re-entrant: a garbage collection may close the predictor
        self._begun_at = -2  # the step at which the last pass began; the first begins at -1
        self._step = -1  # of the last router that was published
        self._is_open = False  # a pass has begun whose end was not published

    def begin_iteration(self, step: int, began: Callable[[], Began]) -> None:
        with self._lock:
            if step > self._begun_at:
                self._begun_at = self._step = step
                self._is_open = True
                self._channel.begin_iteration(step, began)

    def router_ran(self, step: int, routed: Callable[[], Routed]) -> None:
        with self._lock:
            if step > self._step:
                self._step = step
                self._channel.router_ran(step, routed)

    def end_iteration(self, ok: bool) -> None:
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._channel.end_iteration(ok)

    def hand_out(self) -> None:
        """Give each device its part of the predictions that are ready."""
        with self._lock:
            while (seen := self._channel.take()) is not None:
                for one in self.of_shards:
                    one.ready.append(Seen(seen.step, one.share.prediction(seen.prediction)))


class ShardChannel:
    """A device gets the predictions of a step only once it has reached that step itself, however far the others are.
    So an inline predictor's predictions come at the same moments in every run.
    """

    def __init__(self, shared: SharedChannel, share: Share) -> None:
        self.share = share
        self.ready: deque[Seen] = deque()
        self._shared = shared
        self._step = -1

    def begin_iteration(self, step: int, began: Callable[[], Began]) -> None:
        self._step = step
        self._shared.begin_iteration(step, began)

    def router_ran(self, step: int, routed: Callable[[], Routed]) -> None:
        self._step = step
        self._shared.router_ran(step, routed)

    def end_iteration(self, ok: bool) -> None:
        self._shared.end_iteration(ok)

    def reach(self, step: int) -> None:
        """As `router_ran`, of a worker: the devices have published what it was shown."""
        self._step = step

    def take(self) -> Seen | None:
        self._shared.hand_out()
        if self.ready and self.ready[0].step <= self._step:
            return self.ready.popleft()
        return None


# -- their threads ---------------------------------------------------------------------------------------------------


class CallFailure(NamedTuple):
    """The exception of one thread's call."""

    thread: int
    error: BaseException


class _WorkerCall(NamedTuple):
    function: Callable[[], Any]
    number: int
    done: SimpleQueue[tuple[int, Any, BaseException | None]]


class Workers:
    """One thread for each name; a thread runs its calls in order. Used by one caller at a time. A single name has no
    thread: the caller's runs its calls.

    An interrupt may end the caller's wait: the calls run on, and its next calls run after them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        names = names if len(names) > 1 else ()
        self._queues: list[SimpleQueue[_WorkerCall | None]] = [SimpleQueue() for _ in names]
        self._threads = [
            threading.Thread(target=_serve, args=(queue,), name=name, daemon=True)
            for name, queue in zip(names, self._queues, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, functions: Sequence[Callable[[], Any]]) -> tuple[list[Any], CallFailure | None]:
        """Run one call on each thread, in parallel, and wait for all. Returns their results and the failure that came
        first. Raises EngineClosedError where a thread has ended.
        """
        if not self._queues:
            (function,) = functions
            try:
                return [function()], None
            except Exception as failure:
                return [None], CallFailure(0, failure)
        done: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()
        calls = [_WorkerCall(function, number, done) for number, function in enumerate(functions)]
        deque(map(SimpleQueue.put, self._queues, calls), maxlen=0)  # in one step: an interrupt gives to all or to none
        results: list[Any] = [None] * len(calls)
        first: CallFailure | None = None
        for _ in calls:
            number, results[number], error = self._next(done)
            if error is not None and first is None:
                first = CallFailure(number, error)
        return results, first

    def close(self) -> None:
        """End the threads once they have run their calls. Idempotent."""
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # a garbage collection in the thread itself
                thread.join()

    def _next(self, done: SimpleQueue[Any]) -> Any:
        while True:
            try:
                return done.get(timeout=LOOK_EVERY_S)
            except Empty:
                for thread in self._threads:
                    if not thread.is_alive() and done.empty():
                        raise EngineClosedError(
                            f"the thread {thread.name} has ended, so its device cannot run; call expertly.load again"
                        ) from None


def _serve(queue: SimpleQueue[_WorkerCall | None]) -> None:
    with torch.inference_mode():
        while (call := queue.get()) is not None:
            result: Any = None
            error: BaseException | None = None
            try:
                result = call.function()
            except BaseException as e:  # a thread's entry: the caller raises it
                error = e
            call.done.put((call.number, result, error))
            del call, result, error  # an idle thread keeps no tensors alive
