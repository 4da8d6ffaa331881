"""The future that `belady` and `oracle` need."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from expertly.core.geometry import Geometry
from expertly_lab.baselines.oracle import NEVER
from expertly_lab.sim.workload import Iteration, TraceWorkload
from expertly_lab.trace.schema import NO_EXPERT, max_experts, max_top_k
from expertly_lab.trace.shards import scratch

NEVER_AGAIN = np.iinfo(np.int32).max
_CHUNK_ROWS = 1024

Int32s = npt.NDArray[np.int32]


def next_uses(workload: TraceWorkload) -> Int32s:
    """[rows, L, K]: the next iteration that chooses the same expert, or NEVER_AGAIN.

    In an iteration of several rows only the last row of an expert points beyond it. Filled from the last row to the
    first, a chunk at a time. Raises ConfigError where the disk has no room for it.
    """
    shape = (workload.num_rows, workload.num_layers, max_top_k(workload.layers))
    uses: Int32s = scratch("int32", shape, "belady and oracle")
    no_expert = max_experts(workload.layers)
    following = np.full(workload.num_layers * (no_expert + 1), NEVER_AGAIN, dtype=np.int32)
    offsets = (np.arange(workload.num_layers) * (no_expert + 1))[None, :, None]
    for row, first, num, iteration in _chunks_backwards(workload):
        ids = workload.trace.rows("experts", first, first + num).astype(np.int64)
        ids[ids == NO_EXPERT] = no_expert
        keys = (ids + offsets).reshape(-1)
        times = np.repeat(iteration, ids.shape[1] * ids.shape[2]).astype(np.int32)
        order = np.argsort(keys, kind="stable")
        sorted_keys, sorted_times = keys[order], times[order]
        is_last = np.append(sorted_keys[1:] != sorted_keys[:-1], True)
        after = np.append(sorted_times[1:], np.int32(0))
        after[is_last] = following[sorted_keys[is_last]]
        is_first = np.append(True, sorted_keys[1:] != sorted_keys[:-1])
        following[sorted_keys[is_first]] = sorted_times[is_first]
        result = np.empty_like(after)
        result[order] = after
        uses[row : row + num] = result.reshape(ids.shape)
    return uses


def _chunks_backwards(workload: TraceWorkload) -> Iterator[tuple[int, int, int, npt.NDArray[np.int64]]]:
    """(first row in the workload, first row in the trace, number of rows, iteration of each row), from the end."""
    firsts = []  # row and iteration of the workload with which each span begins
    row = iteration = 0
    for span in workload.spans:
        firsts.append((row, iteration))
        row += span.num_rows
        iteration += _iteration_of(workload, span.last_row) - _iteration_of(workload, span.first_row) + 1
    for span, (row, iteration) in reversed(list(zip(workload.spans, firsts, strict=True))):
        shift = iteration - _iteration_of(workload, span.first_row)
        for begin in reversed(range(0, span.num_rows, _CHUNK_ROWS)):
            num = min(_CHUNK_ROWS, span.num_rows - begin)
            first = span.first_row + begin
            yield row + begin, first, num, workload.trace.rows("iteration", first, first + num) + shift


def _iteration_of(workload: TraceWorkload, row: int) -> int:
    return int(workload.trace.rows("iteration", row, row + 1)[0])


class TraceFuture:
    """The demands to come of a workload: it knows the running iteration and the next one."""

    def __init__(self, workload: TraceWorkload, geometry: Geometry, uses: Int32s) -> None:
        """`uses` is `next_uses(workload)`, which several runs may share."""
        self._workload = workload
        self._geometry = geometry
        self._next_uses = uses
        self._num_layers = workload.num_layers
        self.step = 0
        self._running: Iteration | None = None
        self._next: Iteration | None = None
        self._uses: dict[int, int] = {}  # of the running layer: expert -> step
        self._uses_of = -1

    def iterations(self) -> Iterator[Iteration]:
        """The iterations of the workload, each while the next one is known."""
        iterations = self._workload.iterations()
        self._next = next(iterations, None)
        while self._next is not None:
            self._running, self._next = self._next, next(iterations, None)
            yield self._running

    def begin_layer(self, layer: int) -> None:
        """The running iteration has reached this layer."""
        assert self._running is not None
        self.step = self._running.index * self._num_layers + layer

    def next_use(self, expert: int) -> int:
        if self._uses_of != self.step:
            self._uses_of = self.step
            self._uses = self._of_layer(self.step % self._num_layers)
        return self._uses[expert]

    def _of_layer(self, layer: int) -> dict[int, int]:
        """The next use of each expert, by dense id, in the order in which rows choose: an expert's last row counts."""
        running = self._running
        assert running is not None
        first_id = self._geometry.first_ids[layer]
        uses = self._next_uses[running.first_row :][: running.num_tokens, layer].reshape(-1).tolist()
        demand = next(demanded for demanded in running.layers if demanded.layer == layer)
        chosen = demand.experts
        if running.num_tokens > 1 or len(chosen) != len(uses):
            end = running.trace_row + running.num_tokens
            chosen = self._workload.trace.rows("experts", running.trace_row, end)[:, layer].reshape(-1).tolist()
        num_layers = self._num_layers
        return {
            first_id + expert: NEVER if use == NEVER_AGAIN else use * num_layers + layer
            for expert, use in zip(chosen, uses, strict=True)
            if expert != NO_EXPERT
        }

    def needs(self, ahead: int) -> tuple[int, list[int]] | None:
        """Reaches to the end of the next iteration."""
        assert self._running is not None
        index, layer = divmod(self.step + ahead, self._num_layers)
        iteration = {0: self._running, 1: self._next}.get(index - self._running.index)
        if iteration is None:
            return None
        return layer, next((demand.experts for demand in iteration.layers if demand.layer == layer), [])
