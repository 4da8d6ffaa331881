"""Reads go straight to the disk, exactly as many bytes as asked for, and leave no trace in the page cache."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from expertly.core.errors import StoreError, TransferError
from expertly.store.reader import ExpertFile

PAGE = 4096
NUM_PAGES = 256


def aligned(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes))[:nbytes]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of NUM_PAGES pages and 100 bytes, on disk and not in the page cache."""
    path = tmp_path / "experts"
    with path.open("wb") as file:
        file.write(np.random.default_rng(0).integers(0, 256, NUM_PAGES * PAGE + 100, np.uint8).tobytes())
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


@pytest.fixture
def file(path: Path) -> Iterator[ExpertFile]:
    file = ExpertFile(path)
    yield file
    file.close()


@pytest.fixture
def direct(file: ExpertFile) -> ExpertFile:
    if file.direct_fd < 0:
        pytest.skip("this file system has no O_DIRECT")
    return file


def cached_pages(path: Path) -> int:
    """Pages of a file in the page cache, by mincore(2)."""
    nbytes = path.stat().st_size
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as handle, mmap.mmap(handle.fileno(), nbytes, access=mmap.ACCESS_COPY) as view:
        residency = (ctypes.c_ubyte * -(-nbytes // PAGE))()
        holder = ctypes.c_char.from_buffer(view)
        result = libc.mincore(ctypes.c_void_p(ctypes.addressof(holder)), ctypes.c_size_t(nbytes), residency)
        del holder
        if result:
            pytest.skip("mincore is not available")
        return sum(byte & 1 for byte in residency)


def disk_reads() -> int:
    """Bytes this process has caused to be read from block devices."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        pytest.skip("/proc/self/io is not available")
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def test_reads_the_right_bytes(file: ExpertFile, path: Path) -> None:
    content = path.read_bytes()
    for offset, nbytes in ((0, PAGE), (PAGE, 5 * PAGE), (7, 100), (PAGE, 50), (NUM_PAGES * PAGE, 100), (PAGE, 0)):
        buffer = aligned(max(nbytes, 1))[:nbytes]
        file.read_into(offset, buffer)
        assert bytes(buffer) == content[offset : offset + nbytes]


Preadv = Callable[[int, list[memoryview], int], int]
preadv: Preadv = os.preadv  # type: ignore[assignment]


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Callable[[Preadv], None]:
    """Reads by another function from then on."""
    return lambda other: monkeypatch.setattr(os, "preadv", other)


def failing(code: int) -> Preadv:
    def fail(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(code, os.strerror(code))

    return fail


def test_sectors_are_read_past_the_page_cache_where_the_disk_takes_them(
    direct: ExpertFile, path: Path, replaced: Callable[[Preadv], None]
) -> None:
    memory, content, sector = aligned(3 * PAGE), path.read_bytes(), 512
    has_sectors = direct.alignment == sector
    assert has_sectors or direct.alignment == PAGE
    assert direct.read_into(5 * sector, memory[sector : sector + PAGE]) == has_sectors
    assert bytes(memory[sector : sector + PAGE]) == content[5 * sector : 5 * sector + PAGE]
    replaced(failing(errno.EINVAL))
    with contextlib.closing(ExpertFile(path)) as file:  # a disk of larger blocks
        replaced(preadv)
        assert file.alignment == PAGE and file.read_into(PAGE, memory)


def test_aligned_reads_are_direct_and_nothing_stays_in_the_page_cache(direct: ExpertFile, path: Path) -> None:
    memory = aligned(16 * PAGE)
    assert cached_pages(path) == 0, "the test's own writing is still cached"
    before = disk_reads()
    for offset in range(0, NUM_PAGES * PAGE, 32 * PAGE):
        assert direct.read_into(offset, memory)
    assert disk_reads() - before == NUM_PAGES // 32 * len(memory)
    assert not direct.read_into(PAGE + 1, memory[:PAGE])  # offset
    assert not direct.read_into(PAGE, memory[: PAGE - 1])  # length
    assert not direct.read_into(PAGE, memory[64 : 64 + PAGE])  # address
    assert cached_pages(path) == 0


def test_a_short_file_is_named_with_its_offset(file: ExpertFile, path: Path) -> None:
    for buffer in (aligned(PAGE), aligned(2 * PAGE)[:5000]):
        with pytest.raises(TransferError, match=rf"{path}: ends at offset {NUM_PAGES * PAGE + 100}.*truncated"):
            file.read_into(NUM_PAGES * PAGE, buffer)
    with pytest.raises(TransferError, match="truncated"):
        file.read_into(10 * NUM_PAGES * PAGE, aligned(PAGE))
    os.truncate(path, 4 * PAGE)
    file.read_into(3 * PAGE, aligned(PAGE))
    with pytest.raises(TransferError, match="truncated"):
        file.read_into(3 * PAGE, aligned(2 * PAGE))


def test_a_read_error_is_named(file: ExpertFile, path: Path, replaced: Callable[[Preadv], None]) -> None:
    replaced(failing(errno.EIO))
    with pytest.raises(
        TransferError, match=rf"{path}: reading 4096 bytes at offset 8192 failed \(Input/output error\)"
    ):
        file.read_into(2 * PAGE, aligned(PAGE))


@pytest.mark.parametrize(("refused_from", "shortfall"), [(0, PAGE), (PAGE, PAGE), (1 << 30, PAGE), (1 << 30, 100)])
def test_short_reads_are_continued_and_what_the_device_refuses_comes_through_the_page_cache(
    refused_from: int, shortfall: int, direct: ExpertFile, path: Path, replaced: Callable[[Preadv], None]
) -> None:
    def odd(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fd == direct.direct_fd and offset >= refused_from:
            raise OSError(errno.EINVAL, "refused")
        return max(1, preadv(fd, buffers[:1], offset) - shortfall)

    replaced(odd)
    buffer = aligned(4 * PAGE)
    is_direct = direct.read_into(0, buffer)
    assert cached_pages(path) == 0
    assert bytes(buffer) == path.read_bytes()[: 4 * PAGE]
    assert is_direct <= (refused_from > PAGE)


def test_close_is_idempotent_and_frees_the_descriptors(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StoreError, match=r"absent: cannot be opened \(no such file\)"):
        ExpertFile(path.with_name("absent"))
    file = ExpertFile(path)
    file.close()
    file.close()
    assert len(os.listdir("/proc/self/fd")) == before
