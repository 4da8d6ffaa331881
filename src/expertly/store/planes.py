"""The files of a layer whose experts are stored in planes: frames one after another, and beside them their index."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from expertly.core.errors import StoreError, TransferError
from expertly.core.geometry import LayerGeometry
from expertly.store.frame_index import MAX_INDEX_NBYTES, FrameIndex, parse_index
from expertly.store.frames import FrameDecoder
from expertly.store.manifest import MANIFEST_NAME, FileEntry


def planes_name(layer: int) -> str:
    """File of a layer's frames, and of nothing else but zeros at its end."""
    return f"experts-{layer:05d}.planes"


def index_name(layer: int) -> str:
    """File that says where they lie: see `frame_index.index_bytes`."""
    return f"experts-{layer:05d}.frames.safetensors"


def open_index(folder: Path, index: int, layer: LayerGeometry, entry: FileEntry) -> FrameIndex:
    """The index of the layer of that number; `entry` is the manifest's. Raises StoreError naming what is damaged."""
    path, frames_path = folder / index_name(index), folder / planes_name(index)
    try:
        if entry.nbytes > MAX_INDEX_NBYTES:
            raise StoreError(f"{path}: {entry.nbytes} bytes, more than the {MAX_INDEX_NBYTES} accepted")
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise StoreError(f"{path}: cannot be read ({error.strerror})") from None
        if len(raw) != entry.nbytes or zlib.crc32(raw) != entry.checksum:
            raise StoreError(f"{path}: checksum {zlib.crc32(raw):08x}, but {MANIFEST_NAME} says {entry.checksum:08x}")
        found = parse_index(path, raw, frames_path, layer)
        if frames_path.stat().st_size != found.file_nbytes:
            raise StoreError(f"{path}: describes {found.file_nbytes} bytes, but {frames_path.name} has another length")
        return found
    except StoreError as error:
        raise StoreError(f"{error}: remove the store and pack again") from None


def checked_chunks(index: FrameIndex) -> Iterator[memoryview]:
    """All bytes of the file of frames, in order; each frame has been decoded. Raises StoreError naming the first that
    cannot be.
    """
    decoder = FrameDecoder()
    out = memoryview(bytearray(index.frame_nbytes))
    try:
        with index.path.open("rb", buffering=0) as file:
            for expert in range(index.num_experts):
                for frame in range(index.num_frames):
                    stored = _read(file.fileno(), index.path, index.frame_extent(expert, frame)[1])
                    try:
                        decoder.decode(index, expert, frame, stored, out)
                    except TransferError as error:
                        raise StoreError(str(error)) from None
                    yield stored
            yield _read(file.fileno(), index.path, index.file_nbytes - index.stored_nbytes)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise StoreError(f"{index.path}: cannot be read ({error.strerror})") from None


def _read(fd: int, path: Path, nbytes: int) -> memoryview:
    data = bytearray()
    while len(data) < nbytes:
        part = os.read(fd, nbytes - len(data))
        if not part:
            raise StoreError(f"{path}: truncated: remove the store and pack again")
        data += part
    return memoryview(data)
