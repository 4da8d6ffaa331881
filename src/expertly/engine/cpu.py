"""Slots in RAM, filled straight from disk."""

from __future__ import annotations

import time

import torch

from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.engine.numa import MemoryNode
from expertly.engine.pool import HostPool
from expertly.engine.reads import ExtentSource
from expertly.engine.transfer import Readers
from expertly.scheduler.budget import class_segment_nbytes


class CpuDevice:
    """The device tier is RAM; there is no host tier. See Device."""

    def __init__(
        self,
        store: ExtentSource,
        geometry: Geometry,
        slots_per_class: list[int],
        dtype: torch.dtype,
        node: MemoryNode | None = None,
    ) -> None:
        self.torch_device = torch.device("cpu")
        self.queues_uses = False
        self.node = node
        self._pool: HostPool | None = HostPool(geometry, slots_per_class, class_segment_nbytes(geometry), dtype, node)
        self._readers = readers = Readers(store, geometry, self._buffer, node=node)
        self.submit, self.submit_ahead, self.withdraw = readers.submit, readers.submit_ahead, readers.withdraw
        self.poll, self.drain, self.stats = readers.poll, readers.drain, readers.stats
        self.waited_ns = 0

    def _buffer(self, span: Span) -> memoryview:
        assert self._pool is not None
        return self._pool.buffer(span.layer, span.slot, span.num_segments)

    def rows(self, layer: int) -> torch.Tensor:
        """[S * I/P, M, H], see Device."""
        assert self._pool is not None
        return self._pool.rows(layer)

    def begin(self) -> None:
        """Always possible."""

    def wait(self) -> Span:
        start = time.perf_counter_ns()
        span = self._readers.wait()
        self.waited_ns += time.perf_counter_ns() - start
        return span

    def used(self, span: Span) -> None:
        """Computing is synchronous here: nothing to remember."""

    def close(self) -> None:
        """End the readers and let go of the slots."""
        self._readers.close()
        self._pool = None
