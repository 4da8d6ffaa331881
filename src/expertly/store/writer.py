"""Writing a packed store, which is visible under its name only when it is complete."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import xxhash

from expertly.core.errors import CheckpointError, StoreError
from expertly.core.files import check_folder, create, json_bytes, lock_file, remove_folder, sync_folder, write_atomic
from expertly.core.geometry import PAGE_NBYTES
from expertly.core.headers import TensorSpec, safetensors_header
from expertly.core.untrusted import Bounds, read_file
from expertly.store.cache import check_space, store_errors
from expertly.store.checkpoint import INDEX_NAME, Bytes
from expertly.store.manifest import FORMAT_VERSION, JOURNAL_NAME, FileEntry, Manifest
from expertly.store.packed import DENSE_NAME, PackedStore, experts_name, experts_spec, is_extra, is_packed_store
from expertly.store.removal import LOCK_NAME, check_partial, is_store_name, listed_names, remove_in_place
from expertly.store.sums import BlockSummer, sums_name

Progress = Callable[[int, int], None]
"""`progress(done_nbytes, total_nbytes)`."""

_WRITE_NBYTES, _NUM_WRITES = 1 << 20, 3
"""Size and number of a large file's buffers: one is being written, the others are filled or wait."""

_MAX_EXTRA_NBYTES = 64 << 20


def partial_folder(folder: Path) -> Path:
    """Where a store is while it is made."""
    whole = Path(os.path.abspath(folder))
    if not whole.name:
        raise StoreError(f"{folder}: the root of the file system; must be a new or empty folder")
    return whole.with_name(f"{whole.name}.partial")


class StoreWriter(contextlib.AbstractContextManager["StoreWriter"]):
    """Makes, at `folder`, the store that `plan` (a manifest without files) and `dense` describe.

    Works in `<folder>.partial`, under a lock: another process that packs to the same place is waited for, and what one
    that was killed left there is removed. `finish` renames it to `folder`; a writer that fails leaves nothing. Raises
    StoreError where the disk is full or not writable, or something else is in the way.
    """

    def __init__(self, folder: Path, plan: Manifest, dense: tuple[TensorSpec, ...], progress: Progress | None) -> None:
        self.folder = Path(os.path.abspath(folder))  # "." cannot be replaced
        self._partial = partial_folder(folder)
        self._plan, self._dense, self._progress = plan, dense, progress
        self._files: dict[str, FileEntry] = {}
        sizes = [layer.nbytes for layer in plan.layers] + [spec.nbytes for spec in dense]
        self._written, self._total = 0, sum(sizes)
        _check_place(folder, self._partial)
        with store_errors(self._partial, "making the folder"):
            self._lock = _acquire(self._partial)
        try:
            kept, listed = (LOCK_NAME, JOURNAL_NAME), listed_names(self._partial)
            with store_errors(self._partial, "clearing the folder"):
                remove_folder(self._partial, lambda name: name not in kept and (name in listed or is_store_name(name)))
            self._list(())
            check_space(self._partial, self._total)
            self._report(0)
        except BaseException:
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

    def write_layer(self, layer: int, experts: Iterable[Bytes]) -> None:
        """Write a layer's experts, given in order, in chunks that add up to `num_experts * expert_nbytes`."""
        geometry = self._plan.layers[layer]
        summer = BlockSummer(geometry)

        def summed() -> Iterator[Bytes]:
            for chunk in experts:
                summer.add(chunk.data.cast("B") if chunk.nbytes else memoryview(b""))
                yield chunk

        self._write(experts_name(layer), [experts_spec(geometry, self._plan.dtype)], summed())
        self.write_file(sums_name(layer), summer.file_bytes())

    def write_dense(self, chunks: Iterable[Bytes]) -> None:
        """Write the dense tensors, given in order, in chunks that add up to them."""
        self._write(DENSE_NAME, self._dense, chunks)

    def write_file(self, name: str, data: bytes) -> None:
        """Write a small file: config, tokenizer."""
        with store_errors(self._partial, f"writing {name}"):
            write_atomic(self._partial / name, data)
        self._files[name] = FileEntry(len(data), xxhash.xxh3_64_intdigest(data))

    def copy_extras(self, source: Path) -> None:
        """The small files beside a checkpoint's weights: tokenizer and the like."""
        files = [path for path in sorted(source.iterdir()) if is_extra(path.name) and path.is_file()]
        small = [path for path in files if path.stat().st_size <= _MAX_EXTRA_NBYTES]
        self._list(path.name for path in small)
        for path in small:
            self.write_file(path.name, read_file(path, Bounds(_MAX_EXTRA_NBYTES), CheckpointError))

    def finish(self) -> PackedStore:
        """Write index and manifest, and give the store its name."""
        index = {  # by which transformers finds the dense tensors
            "metadata": {"total_size": sum(spec.nbytes for spec in self._dense)},
            "weight_map": {spec.name: DENSE_NAME for spec in self._dense},
        }
        self.write_file(INDEX_NAME, json_bytes(index))
        with store_errors(self._partial, "finishing the store"):
            replace(self._plan, files=dict(sorted(self._files.items()))).write(self._partial)
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
        if error is not None:
            self._remove()
        self.close()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            remove_in_place(self._partial)

    def _list(self, names: Iterable[str]) -> None:
        """Say in the journal that files of these names are ours, too, before they are written."""
        journal = {"format_version": FORMAT_VERSION, "files": dict.fromkeys(names)}
        with store_errors(self._partial, "beginning the store"):
            write_atomic(self._partial / JOURNAL_NAME, json_bytes(journal))

    def _write(self, name: str, specs: Sequence[TensorSpec], chunks: Iterable[Bytes]) -> None:
        """Write a large file of tensors."""
        header = safetensors_header(specs)
        with (
            store_errors(self._partial, f"writing {name}"),
            contextlib.closing(_LargeFile(self._partial / name)) as file,
        ):
            file.write(header)
            for chunk in chunks:
                if chunk.nbytes:
                    file.write(chunk.data.cast("B"))
                    self._report(chunk.nbytes)
            self._files[name] = entry = file.finish()
        total = len(header) + sum(spec.nbytes for spec in specs)
        assert entry.nbytes == total, f"{name}: {entry.nbytes} bytes written, not {total}"

    def _report(self, nbytes: int) -> None:
        self._written += nbytes
        if self._progress is not None:
            self._progress(self._written, self._total)


class _LargeFile:
    """A file that a thread sums and writes while its caller makes what comes next; past the page cache, as the store is
    read, where the file system can. Raises OSError, also of the thread: in a later call of `write`, or in `finish`.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._fd = create(path, os.O_DIRECT)
        except FileExistsError:
            raise
        except OSError:  # EINVAL where the file system has no such writes
            self._fd = create(path)
        self._free = deque(memoryview(mmap.mmap(-1, _WRITE_NBYTES)) for _ in range(_NUM_WRITES))
        self._used = 0  # of the first of them
        self._writing: deque[Future[None]] = deque()
        self._thread = ThreadPoolExecutor(1, "expertly-pack")
        self._nbytes, self._digest = 0, xxhash.xxh3_64()

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
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)  # where it went through the page cache
        return FileEntry(self._nbytes, self._digest.intdigest())

    def close(self) -> None:
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
        self._digest.update(chunk[:nbytes])
        self._nbytes += nbytes
        left = chunk[: -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES]
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_DIRECT:
                    raise
                fcntl.fcntl(self._fd, fcntl.F_SETFL, 0)  # the device wants larger blocks than pages


def _check_place(folder: Path, partial: Path) -> None:
    """Refuse to write over what is not ours."""
    with store_errors(folder, "looking at it"):
        if not folder.is_symlink() and folder.exists() and not folder.is_dir():
            raise StoreError(f"{folder}: a file is in the way; must be a new or empty folder")
        check_folder(folder)
        if folder.is_dir() and any(folder.iterdir()) and not is_packed_store(folder):
            raise StoreError(f"{folder}: holds other files; must be a new or empty folder, or a packed store")
        check_partial(partial)


def _acquire(partial: Path) -> int:
    """The descriptor of a locked lock file in `partial`, which is made where it is not there."""
    while True:
        check_folder(partial)
        partial.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # the owner finished and renamed the folder
            return lock_file(partial / LOCK_NAME)
