"""Slots in RAM, filled straight from disk."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.engine.numa import MemoryNode
from expertly.engine.pool import HostPool
from expertly.engine.reads import ExtentSource
from expertly.engine.transfer import Readers
from expertly.scheduler.budget import class_segment_nbytes


class CpuBackend:
    """The device tier is RAM; there is no host tier. See Backend."""

    def __init__(
        self,
        store: ExtentSource,
        geometry: Geometry,
        slots_per_class: list[int],
        dtype: torch.dtype,
        node: MemoryNode | None = None,
    ) -> None:
        self.device = torch.device("cpu")
        self.node = node
        self._pool: HostPool | None = HostPool(geometry, slots_per_class, class_segment_nbytes(geometry), dtype, node)
        self._readers = Readers(store, geometry, self._buffer, node=node)

    def _buffer(self, span: Span) -> memoryview:
        assert self._pool is not None
        return self._pool.buffer(span.layer, span.slot, span.num_segments)

    def rows(self, layer: int) -> torch.Tensor:
        """[S * I/P, M, H], see Backend."""
        assert self._pool is not None
        return self._pool.rows(layer)

    def begin(self) -> None:
        """Always possible."""

    def submit(self, spans: Iterable[Span]) -> None:
        """Queue the reads."""
        self._readers.submit(spans)

    def submit_ahead(self, spans: Iterable[Span]) -> None:
        """Queue the reads behind all others."""
        self._readers.submit_ahead(spans)

    def withdraw(self, layer: int, experts: Collection[int] | None = None) -> list[Span]:
        """Forget those of this layer, or of these experts of it, that no reader has begun."""
        return self._readers.withdraw(layer, experts)

    def poll(self) -> Span | None:
        """A span that has been read, or None."""
        return self._readers.poll() if self._readers.num_in_flight else None

    def wait(self) -> Span:
        """Block until a span has been read."""
        return self._readers.wait()

    def used(self, span: Span) -> None:
        """Computing is synchronous here: nothing to remember."""

    def drain(self) -> None:
        """Drop what waits ahead, and wait for the reads under way."""
        self._readers.drain()

    def stall_ns(self) -> int:
        """Nothing beyond `wait`."""
        return 0

    def stats(self) -> dict[str, int]:
        """What its readers moved."""
        return self._readers.stats()

    def close(self) -> None:
        """End the readers and let go of the slots."""
        self._readers.close()
        self._pool = None
