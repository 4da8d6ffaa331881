"""Workers: other machines that hold experts and compute them, behind a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from expertly.core.messages import RouterRan
from expertly.core.placement import RouterSplit, Share
from expertly.sim.hardware import ClusterNetwork

if TYPE_CHECKING:
    from expertly.sim.simulator import Simulator


class SimulatedWorkers:
    """In each layer, every worker that holds a chosen expert is called once: the tokens' hidden rows go there (as many
    as it returns, at most all of the pass), and one output row comes back for each (token, expert) chosen there. When
    all calls are sent, the local machine computes its own experts. Then it takes the answers, by the workers' number.

    All calls leave over the local machine's link, one after the other, and all answers come in over it, in the order in
    which they reach it. A worker is a simulated device with its own clock, scheduler and disk.
    """

    def __init__(self, local: Share, workers: Sequence[tuple[Share, Simulator]], network: ClusterNetwork) -> None:
        self.network_ns = 0
        """Time by which layers took longer than with an infinitely fast network."""
        self.stall_ns = 0
        """Of layers that ended with a worker: time that it waited for transfers, less the local machine's time."""
        self.sent_nbytes = self.received_nbytes = 0
        self.schedulers = [worker.scheduler for _, worker in workers]
        self._workers = workers
        self._split = RouterSplit([local, *(share for share, _ in workers)])
        self._network = network
        self._row_nbytes = [layer.hidden_size * layer.itemsize for layer in local.geometry.layers]
        self._answers: list[tuple[int, int]] = []  # of the running layer: when each is in, the worker's stall
        self._end_without_ns = self._sending_ns = 0

    def begin_layer(self, router: RouterRan, now_ns: int) -> tuple[RouterRan, int]:
        """Call the workers. Returns the local machine's part of the router's choice, and when it begins with it."""
        network, row_nbytes = self._network, self._row_nbytes[router.layer]
        sent_ns, self._sending_ns, self._end_without_ns = now_ns, 0, 0
        reached: list[tuple[int, int, int, int]] = []  # when at the local link, the call's number, bytes, stall
        here, *parts = self._split(router)
        for part, (_, worker) in zip(parts, self._workers, strict=True):
            clock = worker.clock
            if not part.experts:
                continue
            num_rows, stalled_ns = sum(part.num_tokens), worker.link.stall_ns
            nbytes = min(num_rows, router.batch_tokens) * row_nbytes
            self.sent_nbytes += nbytes
            sent_ns += network.takes_ns(nbytes)
            clock.now_ns = begin_ns = sent_ns + network.latency_ns + network.call_ns - network.take_ns
            worker.run_experts(part)
            self._end_without_ns = max(self._end_without_ns, now_ns + clock.now_ns - begin_ns)
            stalled_ns = worker.link.stall_ns - stalled_ns
            reached.append((clock.now_ns + network.latency_ns, len(reached), num_rows * row_nbytes, stalled_ns))
            sent_ns += network.send_ns
            self._sending_ns += network.send_ns
        self._answers, in_ns = [(0, 0)] * len(reached), 0
        for ready_ns, number, nbytes, stalled_ns in sorted(reached):
            self.received_nbytes += nbytes
            in_ns = max(in_ns, ready_ns) + network.takes_ns(nbytes)
            self._answers[number] = in_ns, stalled_ns
        return here, now_ns + self._sending_ns

    def end_layer(self, now_ns: int, stalled_ns: int) -> int:
        """The local part has ended, which waited so long for transfers. Returns when the layer ends."""
        if not self._answers:
            return now_ns
        end_ns, last_stalled_ns, wake_ns = now_ns, stalled_ns, 0
        for in_ns, of_worker_ns in self._answers:
            if in_ns > end_ns:
                end_ns, last_stalled_ns, wake_ns = in_ns, of_worker_ns, self._network.wake_ns
            end_ns += self._network.take_ns
        end_ns += wake_ns
        self.stall_ns += last_stalled_ns - stalled_ns
        self.network_ns += end_ns - max(now_ns - self._sending_ns, self._end_without_ns)
        return end_ns
