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
    """In each layer, every worker that holds a chosen expert is called once, all at the same time: the tokens' hidden
    rows go there (as many as it returns, at most all of the pass), and one output row comes back for each (token,
    expert) chosen there. The local machine computes its own experts meanwhile; the layer ends when the last has ended.

    All calls leave over the local machine's link, one after the other by the workers' number, and all answers come in
    over it, in the order in which they reach it. A worker is a simulated device with its own clock, scheduler and disk.
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
        self._end_ns = self._end_without_ns = self._stalled_ns = 0  # of the running layer

    def begin_layer(self, router: RouterRan, now_ns: int) -> RouterRan:
        """Call the workers. Returns the local machine's part of the router's choice."""
        network, row_nbytes = self._network, self._row_nbytes[router.layer]
        sent_ns = now_ns + network.call_ns
        self._end_ns = self._end_without_ns = 0
        answers: list[tuple[int, int, int]] = []  # when it reaches the local link, its bytes, the worker's stall
        here, *parts = self._split(router)
        for part, (_, worker) in zip(parts, self._workers, strict=True):
            clock = worker.clock
            if not part.experts:
                continue
            num_rows, stalled_ns = sum(part.num_tokens), worker.link.stall_ns
            nbytes = min(num_rows, router.batch_tokens) * row_nbytes
            self.sent_nbytes += nbytes
            sent_ns += network.takes_ns(nbytes)
            clock.now_ns = begin_ns = sent_ns + network.latency_ns
            worker.run_experts(part)
            self._end_without_ns = max(self._end_without_ns, now_ns + clock.now_ns - begin_ns)
            stalled_ns = worker.link.stall_ns - stalled_ns
            answers.append((clock.now_ns + network.latency_ns, num_rows * row_nbytes, stalled_ns))
            sent_ns += network.send_ns
        for ready_ns, nbytes, self._stalled_ns in sorted(answers):
            self.received_nbytes += nbytes
            self._end_ns = max(self._end_ns, ready_ns) + network.takes_ns(nbytes)
        return here

    def end_layer(self, now_ns: int, stalled_ns: int) -> int:
        """The local part has ended, which waited so long for transfers. Returns when the layer ends."""
        if self._end_ns <= now_ns:
            return now_ns
        self.stall_ns += self._stalled_ns - stalled_ns
        self.network_ns += self._end_ns - max(now_ns, self._end_without_ns)
        return self._end_ns
