"""What a reader does: it brings a part of a span into its slot. Here for experts that are stored as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from expertly.core.geometry import PAGE_NBYTES, Geometry
from expertly.core.messages import Span
from expertly.store.frames import FrameIndex
from expertly.store.reader import ExpertFile

MIN_READ_NBYTES = 1 << 20
"""A read is split over the readers down to this: smaller ones are slowed by the interpreter lock."""


class ExtentSource(Protocol):
    """What readers need of a PackedStore."""

    def layer_extent(self, layer: int) -> tuple[Path, int]:
        """The file of a layer's experts and the offset of the first of them in it."""

    def expert_in_file(self, layer: int, expert: int) -> int:
        """The place of an expert in that file, from 0, where its number here is `expert`."""

    def frame_index(self, layer: int) -> FrameIndex | None:
        """Where the layer's frames lie, by the experts' places in the file; None where they are stored as they are."""


class Moved(NamedTuple):
    """What one read did."""

    buffered_nbytes: int  # read through the page cache
    decoded_nbytes: int = 0
    decode_ns: int = 0  # processor time


class Read(Protocol):
    """A part of a span. It runs once, in a reader."""

    def run(self, worker: Any) -> Moved:
        """Bring it into its slot. `worker`: what `Source.worker` made for this reader. Raises TransferError."""


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """All that is to be read of a span."""

    reads: Sequence[Read]
    nbytes: int  # of weights that it brings
    disk_nbytes: int  # of what is asked of the disk


class Source(Protocol):
    """Where spans come from. All but `worker` and what it makes belongs to the thread that submits."""

    batch_nbytes: int
    """Spans of one read travel together up to so many bytes of weights."""

    def load(self, span: Span, buffer: memoryview) -> Load:
        """The reads that fill `buffer`, the span's slots."""

    def worker(self) -> Any:
        """What a reader needs of its own."""

    def close(self) -> None:
        """Close files. Idempotent."""


class PlainSource:
    """Experts that lie in the file as they lie in memory: a read goes straight into the slot. See Source."""

    batch_nbytes = MIN_READ_NBYTES

    def __init__(self, store: ExtentSource, geometry: Geometry, num_readers: int) -> None:
        self._files = open_files(store, geometry)
        self._offsets = [  # of each expert
            [offset + store.expert_in_file(layer, e) * shape.expert_nbytes for e in range(shape.num_experts)]
            for layer, shape in enumerate(geometry.layers)
            for offset in [store.layer_extent(layer)[1]]
        ]
        self._geometry = geometry
        self._num_readers = num_readers

    def load(self, span: Span, buffer: memoryview) -> Load:
        """Cut over the readers."""
        offset = self._offsets[span.layer][span.expert] + span.segment * self._geometry.segment_nbytes(span.layer)
        size = -(-len(buffer) // self._num_readers)
        size = max(MIN_READ_NBYTES, -(-size // PAGE_NBYTES) * PAGE_NBYTES)
        file = self._files[span.layer]
        starts = range(0, len(buffer), size)
        reads = [_PlainRead(file, offset + start, buffer[start : start + size]) for start in starts]
        return Load(reads, len(buffer), len(buffer))

    def worker(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()
        self._files = []


@dataclass(frozen=True, slots=True, eq=False)
class _PlainRead:
    file: ExpertFile
    offset: int
    buffer: memoryview

    def run(self, worker: None) -> Moved:
        """One read."""
        is_direct = self.file.read_into(self.offset, [self.buffer])
        return Moved(0 if is_direct else len(self.buffer))


def open_files(store: ExtentSource, geometry: Geometry) -> list[ExpertFile]:
    """The file of each layer's experts. Raises StoreError where one cannot be opened; none is left open then."""
    files: list[ExpertFile] = []
    with contextlib.ExitStack() as undo:
        for layer in range(geometry.num_layers):
            files.append(ExpertFile(store.layer_extent(layer)[0]))
            undo.callback(files[-1].close)
        undo.pop_all()
    return files
