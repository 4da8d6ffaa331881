"""Which source a store is read by."""

from __future__ import annotations

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.engine.compressed_pool import CompressedPool
from expertly.engine.frame_extents import SegmentFrames
from expertly.engine.frame_reads import FrameSource
from expertly.engine.numa import MemoryNode
from expertly.engine.reads import ExtentSource, PlainSource, Source, open_files
from expertly.engine.stored_reads import StoredSource


def make_source(
    store: ExtentSource,
    geometry: Geometry,
    num_readers: int,
    compressed_nbytes: int = 0,
    node: MemoryNode | None = None,
    as_stored: bool = False,
) -> Source:
    """By how the store's experts are stored. `compressed_nbytes`: memory in which they stay so; its pages are those of
    `node`, where one is given. `as_stored`: slots are filled with frames, which whoever reads the slots decodes.
    """
    indexes = [store.frame_index(layer) for layer in range(geometry.num_layers)]
    if not any(index is not None for index in indexes):
        if compressed_nbytes:
            raise ConfigError("compressed: the store's experts are not compressed; accepted: a store of codec planes")
        return PlainSource(store, geometry, num_readers)
    frames = SegmentFrames(store, geometry)
    if as_stored:
        return StoredSource(open_files(store, geometry), frames, geometry, num_readers)
    pool = CompressedPool(frames, geometry, compressed_nbytes, node) if compressed_nbytes else None
    return FrameSource(open_files(store, geometry), frames, geometry, num_readers, pool)
