"""Writing a packed store: resumable file by file, and visible under its name only when complete."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import stat
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xxhash

from expertly.core.costs import CODECS
from expertly.core.errors import CheckpointError, DownloadError, StoreError
from expertly.core.files import (
    about_path,
    check_folder,
    create,
    is_at,
    json_bytes,
    open_lock,
    remove_files,
    sync_folder,
    take_lock,
    write_atomic,
)
from expertly.core.geometry import PAGE_NBYTES, LayerGeometry
from expertly.core.headers import TensorSpec, safetensors_header
from expertly.core.untrusted import Bounds, open_file, read_file, read_json_object
from expertly.store.cache import check_space, store_errors
from expertly.store.checkpoint import INDEX_NAME, Bytes
from expertly.store.frames import FrameEncoder, frames_per_expert, index_bytes, index_name, padded, planes_name
from expertly.store.manifest import JOURNAL_NAME, FileEntry, Manifest
from expertly.store.packed import (
    DENSE_NAME,
    PackedStore,
    dense_index,
    expert_files,
    experts_name,
    experts_spec,
    is_extra,
    is_packed_store,
    is_text,
)
from expertly.store.removal import LOCK_NAME, check_partial, is_store_name, listed_names, remove_in_place
from expertly.store.sums import BlockSummer, sums_name

Progress = Callable[[int, int], None]
"""`progress(done_nbytes, total_nbytes)`."""

_PART_SUFFIX = ".part"
_PART_CHUNK_NBYTES = 8 << 20

_WRITE_NBYTES, _NUM_WRITES = 1 << 20, 3
"""Size and number of a large file's buffers: one is being written, the others are filled or wait."""

_MAX_EXTRA_NBYTES = 64 << 20


def partial_folder(folder: Path) -> Path:
    """Where a store is while it is made."""
    whole = Path(os.path.abspath(folder))
    if not whole.name:
        raise StoreError(f"{folder}: the root of the file system; must be a new or empty folder")
    return whole.with_name(f"{whole.name}.partial")


def begun_codec(folder: Path) -> str | None:
    """The codec of a store for `folder` that was begun and not finished; None where none was."""
    with contextlib.suppress(StoreError):
        codec = read_json_object(partial_folder(folder) / JOURNAL_NAME, StoreError).get("codec")
        return codec if codec in CODECS else None
    return None


class StoreWriter(contextlib.AbstractContextManager["StoreWriter"]):
    """Makes, at `folder`, the store that `plan` (a manifest without files) and `dense` describe.

    Works in `<folder>.partial`, under a lock: another process that packs to the same place is waited for. Files that an
    earlier writer of the same plan finished there are kept (`is_done`). `finish` renames it to `folder`; a writer that
    is interrupted, or that a disk or the hub fails, leaves the partial folder, one that fails otherwise nothing.
    `ratio`: stored bytes / bytes of experts as far as is known, to see whether there is room. Raises StoreError where
    the disk is full or not writable, or something else is in the way.
    """

    def __init__(
        self,
        folder: Path,
        plan: Manifest,
        dense: tuple[TensorSpec, ...],
        progress: Progress | None,
        ratio: float = 1.0,
    ) -> None:
        self.folder = Path(os.path.abspath(folder))  # "." cannot be replaced
        self._partial = partial_folder(folder)
        self._plan = plan
        self._dense = dense
        self._progress = progress
        self._done: dict[str, FileEntry] = {}
        _check_place(folder, self._partial)
        with store_errors(self._partial, "making the folder"):
            self._lock = _acquire(self._partial)
        try:
            self._resume()
            layers, dense_nbytes = plan.layers, sum(spec.nbytes for spec in dense)
            experts_left = sum(one.nbytes for number, one in enumerate(layers) if not self.is_layer_done(number))
            dense_left = 0 if self.is_done(DENSE_NAME) else dense_nbytes
            check_space(self._partial, round(ratio * experts_left) + dense_left)
            self._total = sum(layer.nbytes for layer in layers) + dense_nbytes
            self._written = self._total - experts_left - dense_left
            self._report(0)
        except BaseException:
            if not self._done:  # there is nothing to resume
                self._remove()
            self.close()
            raise

    def finished_store(self) -> PackedStore | None:
        """The store, where another process has finished it while this one waited for the lock."""
        if not self.folder.is_dir() or not any(self.folder.iterdir()):
            return None
        store = PackedStore.open(self.folder, self._plan.identity, self._plan.stamp)
        self._remove()
        return store

    def is_done(self, name: str) -> bool:
        return name in self._done

    def is_layer_done(self, layer: int) -> bool:
        return all(map(self.is_done, expert_files(self._plan.codec, layer)))

    def write_layer(self, layer: int, experts: Iterable[Bytes]) -> None:
        """Write a layer's experts, given in order, in chunks that add up to `num_experts * expert_nbytes`."""
        geometry = self._plan.layers[layer]
        if self._plan.codec == "planes":
            self._write_planes(layer, geometry, experts)
            return
        spec = experts_spec(geometry, self._plan.dtype)
        summer = BlockSummer(geometry)

        def summed() -> Iterator[Bytes]:
            for chunk in experts:
                summer.add(chunk.data.cast("B") if chunk.nbytes else memoryview(b""))
                yield chunk

        entry = self._write_tensors(experts_name(layer), [spec], summed())
        sums = summer.file_bytes()
        with store_errors(self._partial, f"writing {sums_name(layer)}"):
            write_atomic(self._partial / sums_name(layer), sums)
        self._mark({experts_name(layer): entry, sums_name(layer): FileEntry(len(sums), zlib.crc32(sums))})

    def write_dense(self, chunks_of: Callable[[TensorSpec], Iterable[Bytes]]) -> None:
        """Write the dense tensors, each given in chunks that add up to it."""
        chunks = (chunk for spec in self._dense for chunk in chunks_of(spec))
        self._mark({DENSE_NAME: self._write_tensors(DENSE_NAME, self._dense, chunks)})

    def write_dense_part(self, number: int, chunks: Iterable[Bytes]) -> None:
        """Keep some dense tensors, one after the other, until `write_dense` reads them with `dense_part`."""
        entry = self._write(
            _part_name(number), ((chunk.data.cast("B") if chunk.nbytes else b"", 0) for chunk in chunks)
        )
        self._mark({_part_name(number): entry})

    def is_part_done(self, number: int) -> bool:
        return self.is_done(_part_name(number)) or self.is_done(DENSE_NAME)

    def dense_part(self, number: int, begin: int, nbytes: int) -> Iterator[Bytes]:
        """The bytes of one of its tensors; each chunk is only valid until the next."""
        with (
            store_errors(self._partial, "reading what was packed"),
            open_file(self._partial / _part_name(number), StoreError) as f,
        ):
            f.seek(begin)
            while nbytes:
                chunk = np.frombuffer(f.read(min(nbytes, _PART_CHUNK_NBYTES)), np.uint8)
                if not chunk.nbytes:
                    raise StoreError(
                        f"{self._partial / _part_name(number)}: truncated; remove the folder and pack again"
                    )
                nbytes -= chunk.nbytes
                yield chunk

    def drop_dense_parts(self) -> None:
        """Behind `write_dense`."""
        for name in [name for name in self._done if name.endswith(_PART_SUFFIX)]:
            del self._done[name]
            with store_errors(self._partial, f"removing {name}"):
                (self._partial / name).unlink(missing_ok=True)

    def write_file(self, name: str, data: bytes) -> None:
        """Write a small file: config, tokenizer."""
        with store_errors(self._partial, f"writing {name}"):
            write_atomic(self._partial / name, data)
        self._mark({name: FileEntry(len(data), zlib.crc32(data))})

    def copy_extras(self, source: Path) -> None:
        """Tokenizer and the like."""
        with store_errors(self._partial, "copying small files"):
            self._mark(copy_extras(source, self._partial, ()))

    def finish(self) -> PackedStore:
        """Write index and manifest, and give the store its name."""
        names = [spec.name for spec in self._dense]
        self.write_file(INDEX_NAME, dense_index(names, sum(spec.nbytes for spec in self._dense)))
        with store_errors(self._partial, "finishing the store"):
            replace(self._plan, files=dict(sorted(self._done.items()))).write(self._partial)
            (self._partial / JOURNAL_NAME).unlink()
            sync_folder(self._partial)
            self._partial.rename(self.folder)
            sync_folder(self.folder.parent)
            (self.folder / LOCK_NAME).unlink()
        return PackedStore.open(self.folder, self._plan.identity, self._plan.stamp)

    def close(self) -> None:
        """Let go of the lock. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, StoreError | DownloadError):  # it would fail again
            self._remove()
        self.close()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            remove_in_place(self._partial)

    def _write_tensors(self, name: str, specs: Sequence[TensorSpec], chunks: Iterable[Bytes]) -> FileEntry:
        header = safetensors_header(specs)

        def parts() -> Iterator[tuple[bytes | memoryview, int]]:
            yield header, 0
            for chunk in chunks:
                yield chunk.data.cast("B") if chunk.nbytes else b"", chunk.nbytes

        entry = self._write(name, parts())
        total = len(header) + sum(spec.nbytes for spec in specs)
        assert entry.nbytes == total, f"{name}: {entry.nbytes} bytes written, not {total}"
        return entry

    def _write_planes(self, layer: int, geometry: LayerGeometry, experts: Iterable[Bytes]) -> None:
        num_frames = frames_per_expert(geometry)
        frame_nbytes = geometry.expert_nbytes // num_frames
        lengths: list[tuple[int, ...]] = []
        checksums: list[int] = []

        def parts() -> Iterator[tuple[bytes, int]]:
            end = 0
            for frame in FrameEncoder(frame_nbytes, geometry.itemsize).encode(experts):
                lengths.append(frame.plane_nbytes)
                checksums.append(frame.checksum)
                end += len(frame.stored)
                yield frame.stored, frame_nbytes
            yield bytes(padded(end) - end), 0

        entry = self._write(planes_name(layer), parts())
        assert len(lengths) == geometry.num_experts * num_frames, f"{len(lengths)} frames written"
        index = index_bytes(geometry, num_frames, lengths, checksums)
        with store_errors(self._partial, f"writing {index_name(layer)}"):
            write_atomic(self._partial / index_name(layer), index)
        self._mark({planes_name(layer): entry, index_name(layer): FileEntry(len(index), zlib.crc32(index))})

    def _write(self, name: str, parts: Iterable[tuple[bytes | memoryview, int]]) -> FileEntry:
        """Write a large file of `parts`, each with the bytes of weights that it is."""
        with store_errors(self._partial, f"writing {name}"), _LargeFile(self._partial / name) as file:
            for part, weights_nbytes in parts:
                file.write(part)
                if weights_nbytes:
                    self._report(weights_nbytes)
            return file.finish()

    def _mark(self, entries: Mapping[str, FileEntry]) -> None:
        """Files that are done, all of them or, after a crash, none."""
        self._done.update(entries)
        with store_errors(self._partial, "recording progress"):
            write_atomic(self._partial / JOURNAL_NAME, json_bytes(self._journal(self._done)))

    def _journal(self, done: Mapping[str, FileEntry]) -> dict[str, Any]:
        dense = [[spec.name, spec.dtype, list(spec.shape)] for spec in self._dense]
        return replace(self._plan, files=done).as_dict() | {"dense": zlib.crc32(json.dumps(dense).encode())}

    def _resume(self) -> None:
        """Keep the files that are done; remove everything else of ours."""
        path = self._partial / JOURNAL_NAME
        raw: dict[str, Any] = {}
        with contextlib.suppress(StoreError):  # none yet, or torn: start over
            raw = read_json_object(path, StoreError)
        if {**raw, "files": {}, "source": self._plan.source} == self._journal({}):
            with contextlib.suppress(StoreError):
                files = Manifest.from_dict(path, raw).files
                self._done = {
                    name: entry
                    for name, entry in files.items()
                    if _size(self._partial / name) == entry.nbytes and not is_extra(name)  # these may have changed
                }
        kept, listed = {LOCK_NAME, JOURNAL_NAME, *self._done}, listed_names(self._partial)
        with store_errors(self._partial, "clearing the folder"):
            remove_files(self._partial, lambda name: name not in kept and (name in listed or is_store_name(name)))
            write_atomic(path, json_bytes(self._journal(self._done)))

    def _report(self, nbytes: int) -> None:
        self._written += nbytes
        if self._progress is not None:
            self._progress(self._written, self._total)


class _LargeFile(contextlib.AbstractContextManager["_LargeFile"]):
    """A file that a thread sums and writes while its caller makes what comes next; past the page cache, as the store is
    read, where the file system can. Raises OSError, also of the thread: in a later call of `write`, or in `finish`.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._fd = create(path, os.O_DIRECT)
        except (OSError, AttributeError) as error:  # EINVAL where unsupported; no O_DIRECT outside Linux
            if isinstance(error, FileExistsError):
                raise
            self._fd = create(path)
        self._free = deque(memoryview(mmap.mmap(-1, _WRITE_NBYTES)) for _ in range(_NUM_WRITES))
        self._used = 0  # of the first of them
        self._writing: deque[Future[None]] = deque()
        self._thread = ThreadPoolExecutor(1, "expertly-pack")
        self._nbytes = self._checksum = 0
        self._fast = xxhash.xxh3_64()

    def write(self, part: bytes | memoryview) -> None:
        part = memoryview(part)
        while len(part):
            taken = part[: _WRITE_NBYTES - self._used]
            self._free[0][self._used : self._used + len(taken)] = taken
            self._used += len(taken)
            part = part[len(taken) :]
            if self._used == _WRITE_NBYTES:
                self._submit()

    def finish(self) -> FileEntry:
        """All of it on the disk."""
        self._submit()
        while self._writing:
            self._writing.popleft().result()
        os.ftruncate(self._fd, self._nbytes)
        os.fsync(self._fd)
        if hasattr(os, "posix_fadvise"):  # where it went through the page cache
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return FileEntry(self._nbytes, self._checksum, self._fast.intdigest())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(cancel_futures=True)
        os.close(self._fd)

    def _submit(self) -> None:
        chunk = self._free.popleft()
        self._writing.append(self._thread.submit(self._put, chunk, self._used))
        self._free.append(chunk)
        self._used = 0
        if len(self._writing) == _NUM_WRITES:  # the next chunk is still in that write
            self._writing.popleft().result()

    def _put(self, chunk: memoryview, nbytes: int) -> None:
        """In the thread. Whole pages are written; `finish` cuts the last one."""
        self._checksum = zlib.crc32(chunk[:nbytes], self._checksum)
        self._fast.update(chunk[:nbytes])
        self._nbytes += nbytes
        left = chunk[: -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES]
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not fcntl.fcntl(self._fd, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0):
                    raise
                fcntl.fcntl(self._fd, fcntl.F_SETFL, 0)  # the device wants larger blocks than pages


def renew_extras(store: PackedStore, source: Path) -> PackedStore:
    """The store with the small files that lie beside the checkpoint's weights now."""
    with store_errors(store.folder, "renewing its small files"):
        entries = copy_extras(source, store.folder, store.manifest.files)
    files = {name: one for name, one in store.manifest.files.items() if not is_extra(name)} | entries
    if files == store.manifest.files:
        return store
    manifest = replace(store.manifest, files=dict(sorted(files.items())))
    with store_errors(store.folder, "writing the manifest"):
        manifest.write(store.folder)
    return replace(store, manifest=manifest)


def copy_extras(source: Path, folder: Path, listed: Iterable[str]) -> dict[str, FileEntry]:
    """Bring the small files beside a checkpoint's weights up to date in its store. What has not changed is not written;
    what the store's manifest has `listed` and the checkpoint has no more is removed. A text that somebody put there
    stays. Returns the entries of the store's own.
    """
    check_folder(folder)
    entries = {}
    for path in sorted(source.iterdir()):
        if not _is_extra(path):
            continue
        data = read_file(path, Bounds(_MAX_EXTRA_NBYTES), CheckpointError)
        with store_errors(folder, f"writing {path.name}"):
            target = folder / path.name
            is_same = _size(target) == len(data) and read_file(target, Bounds(len(data)), StoreError) == data
            is_others = is_text(path.name) and path.name not in listed and about_path(target) is not None
            if not is_same and not is_others:
                write_atomic(target, data)
        if is_same or not is_others:
            entries[path.name] = FileEntry(len(data), zlib.crc32(data))
    gone = {name for name in listed if is_extra(name) and name not in entries}
    with store_errors(folder, "removing what the checkpoint has no more"):
        remove_files(folder, lambda name: name in gone)
    return entries


def _part_name(number: int) -> str:
    return f"dense-{number:05d}{_PART_SUFFIX}"


def _is_extra(path: Path) -> bool:
    return is_extra(path.name) and path.is_file() and path.stat().st_size <= _MAX_EXTRA_NBYTES


def _check_place(folder: Path, partial: Path) -> None:
    """Refuse to write over what is not ours."""
    with store_errors(folder, "looking at it"):
        if not folder.is_symlink() and folder.exists() and not folder.is_dir():
            raise StoreError(f"{folder}: a file is in the way; must be a new or empty folder")
        check_folder(folder)
        if folder.is_dir() and any(folder.iterdir()) and not is_packed_store(folder):
            raise StoreError(f"{folder}: holds other files; must be a new or empty folder, or a packed store")
        check_partial(partial)


def _size(path: Path) -> int:
    """Of a regular file; -1 where there is something else."""
    about = about_path(path)
    return about.st_size if about is not None and stat.S_ISREG(about.st_mode) else -1


def _acquire(partial: Path) -> int:
    """The descriptor of a locked lock file in `partial`, which is made where it is not there."""
    path = partial / LOCK_NAME
    while True:
        check_folder(partial)
        partial.mkdir(parents=True, exist_ok=True)
        try:
            fd = open_lock(path)
        except FileNotFoundError:  # its owner finished and renamed the folder
            continue
        try:
            take_lock(fd, path, lambda: _state(partial))
            if is_at(path, fd):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _state(partial: Path) -> object:
    """Changes as long as another process packs there."""
    with contextlib.suppress(OSError):
        return [(path.name, path.lstat().st_mtime_ns, path.lstat().st_size) for path in partial.iterdir()]
    return None
