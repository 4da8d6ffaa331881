"""The measurements of `expertly doctor`, by the paths that the engine takes: disk, memory, products of matrices, and
decoding of compressed experts.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import linear

from expertly.core.costs import CodecCosts, Link
from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Span
from expertly.core.resources import allowed_cpus, computing_threads, decoding_threads, granted_cpus
from expertly.engine.device import kind_of
from expertly.engine.reading import MIN_READ_NBYTES
from expertly.engine.transfer import NUM_READERS, Readers
from expertly.hardware.profile import CopyRate, DecodeProfile, DecodeRate, DiskRate, MachineProfile, MatvecRate
from expertly.native.kernels import choose_kernels
from expertly.store.codec_choice import (
    CodecChoice,
    CodecRates,
    Sample,
    choose_codec,
    disk_latency_ns_of,
    disk_rate_of,
    read_sample,
)
from expertly.store.packed import PackedStore

READ_SIZES = tuple(k << 10 for k in (64, 256, 1024, 4096, 16384))
DEPTHS = (1, 2, 4, 8)
DTYPES = ("bfloat16", "float16", "float32")

_CHUNK_NBYTES = 16 << 20
_ROW_NBYTES = 2048  # of the made-up experts that are read
_MATRIX_SHAPE = (2048, 2816)
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ScratchFile:
    path: Path
    nbytes: int
    write_nbytes_per_s: float


@contextmanager
def scratch_file(folder: Path, nbytes: int, seconds: float) -> Iterator[ScratchFile]:
    """A file of incompressible bytes that are on the disk and not in the page cache; removed afterwards.

    It is shorter than `nbytes` where writing it would take longer than `seconds`. Raises ConfigError where the folder
    takes no such file.
    """
    path = folder / f".doctor-{os.getpid()}.scratch"
    try:
        try:
            _remove_abandoned(folder)
            file = _write(path, nbytes, seconds)
        except OSError as error:
            raise ConfigError(f"folder {folder}: a test file cannot be written there ({error.strerror})") from error
        yield file
    finally:
        path.unlink(missing_ok=True)


def _remove_abandoned(folder: Path) -> None:
    for path in folder.glob(".doctor-*.scratch"):
        if not Path("/proc", path.name.split("-")[1].split(".")[0]).exists():
            path.unlink(missing_ok=True)


def _write(path: Path, nbytes: int, seconds: float) -> ScratchFile:
    block = np.random.default_rng(0).integers(0, 256, _CHUNK_NBYTES, dtype=np.uint8)
    written, start = 0, time.perf_counter()
    with path.open("wb", buffering=0) as file:
        while written < nbytes and (not written or time.perf_counter() - start < seconds):
            block[::4096] += 1  # no two blocks alike
            view = block.data
            while view:
                view = view[file.write(view) :]
            os.fdatasync(file.fileno())
            written += _CHUNK_NBYTES
        elapsed = time.perf_counter() - start
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return ScratchFile(path, written, written / elapsed)


@dataclass(frozen=True, slots=True)
class _OneExtent:
    """The part of a PackedStore that readers use: one layer, which is the whole file."""

    path: Path

    def layer_extent(self, layer: int) -> tuple[Path, int]:
        return self.path, 0

    def expert_in_file(self, layer: int, expert: int) -> int:
        return expert

    def block_sums(self, layer: int) -> None:
        return None

    def frame_index(self, layer: int) -> None:
        return None


def measure_disk(path: Path, read_nbytes: int, depth: int, seconds: float) -> DiskRate:
    """The sustained rate of reads of `read_nbytes` (a multiple of 4096) at random places of `path`.

    It uses the engine's reader threads, `depth` of them, with enough spans queued that none is idle; as in the engine,
    they cut large spans among themselves. No place is read twice before all have been read.
    """
    num_places = path.stat().st_size // read_nbytes
    if read_nbytes % 4096 or num_places < 1:
        raise ConfigError(f"read_nbytes={read_nbytes}: must be a multiple of 4096, and at most the file's size")
    in_flight = max(2, 2 * depth * MIN_READ_NBYTES // max(read_nbytes, MIN_READ_NBYTES))
    geometry = Geometry((LayerGeometry(num_places, 1, _ROW_NBYTES // 2, read_nbytes // _ROW_NBYTES, 2, 1),))
    memory = memoryview(mmap.mmap(-1, in_flight * read_nbytes))
    memory[:: mmap.PAGESIZE] = bytes(len(memory[:: mmap.PAGESIZE]))  # take the pages before the clock runs

    def buffer_of(span: Span) -> memoryview:
        return memory[span.slot * read_nbytes : (span.slot + 1) * read_nbytes]

    places = np.random.default_rng(read_nbytes + depth).permutation(num_places).tolist()
    num_reads = 0
    readers = Readers(_OneExtent(path), geometry, buffer_of, num_readers=depth)
    try:
        for slot in range(in_flight):
            readers.submit([Span(0, places[slot % num_places], 0, 1, slot)])
        readers.wait()  # threads are up, the queue is full
        start = now = time.perf_counter()
        while now - start < seconds or not num_reads:
            slot = readers.wait().slot
            now = time.perf_counter()
            num_reads += 1
            readers.submit([Span(0, places[(in_flight + num_reads) % num_places], 0, 1, slot)])
        readers.drain()
        is_direct = readers.buffered_nbytes == 0
    finally:
        readers.close()
    return DiskRate(read_nbytes, depth, num_reads * read_nbytes / (now - start), is_direct)


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_copy(num_threads: int, nbytes: int, seconds: float) -> CopyRate:
    """RAM to RAM, `nbytes` at a time."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    with _threads(num_threads):
        num_copies, elapsed = _timed(_CPU, seconds, lambda: target.copy_(source))
    return CopyRate(num_threads, num_copies * nbytes / elapsed)


def kernels_here() -> dict[str, str]:
    """What multiplies experts on this processor, and why. Raises ConfigError as `choose_kernels`."""
    chosen = choose_kernels()
    return {"name": chosen.name, "why": chosen.why}


def measure_matvec(dtype: str, num_threads: int, nbytes: int, seconds: float) -> MatvecRate:
    """Products with one vector over `nbytes` of matrices, on the processor."""
    with _threads(num_threads):
        return MatvecRate(dtype, num_threads, measure_weights_rate(_CPU, getattr(torch, dtype), seconds, nbytes))


# -- the two rates of a roofline, of any device ------------------------------------------------------------------------


_SQUARE = 1024
_LEAST_NBYTES = 1 << 30  # more than any device's cache


def measure_weights_rate(
    device: torch.device, dtype: torch.dtype, seconds: float, nbytes: int = _LEAST_NBYTES
) -> float:
    """Bytes of weights a second in products of 2048 x 2816 matrices, `nbytes` of them one after the other, with one
    vector, by the code that multiplies a model's experts.
    """
    count = -(-nbytes // (_MATRIX_SHAPE[0] * _MATRIX_SHAPE[1] * dtype.itemsize))
    matrices = [torch.full(_MATRIX_SHAPE, 0.01, dtype=dtype, device=device) for _ in range(count)]
    x = torch.ones(1, _MATRIX_SHAPE[1], dtype=dtype, device=device)
    product = _product_of(x)
    with torch.inference_mode():
        num_rounds, elapsed = _timed(device, seconds, lambda: [product(matrix) for matrix in matrices])
    return num_rounds * sum(matrix.nbytes for matrix in matrices) / elapsed


def _product_of(x: torch.Tensor) -> Callable[[torch.Tensor], object]:
    """A function that multiplies a matrix [r, H] with x [1, H]."""
    kernels = choose_kernels(runs_on_host=kind_of(x.device).runs_on_host)
    if not kernels.takes(x.dtype):
        return partial(linear, x)
    out = x.new_empty(1, 1, _MATRIX_SHAPE[0])
    return lambda matrix: kernels.dots((matrix.data_ptr(), 0, 1, 0), x, out, matrix.stride(0) * matrix.element_size())


def measure_flops(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """Operations a second of products of square matrices: a multiplication and an addition are two."""
    a = torch.full((_SQUARE, _SQUARE), 0.01, dtype=dtype, device=device)
    with torch.inference_mode():
        num_products, elapsed = _timed(device, seconds, lambda: a @ a)
    return num_products * 2 * _SQUARE**3 / elapsed


def _timed(device: torch.device, seconds: float, run: Callable[[], object]) -> tuple[int, float]:
    """How often it ran, without one warm-up, and in how many seconds."""

    def now() -> float:
        if not kind_of(device).runs_on_host:
            torch.accelerator.synchronize()
        return time.perf_counter()

    run()
    start, count = now(), 0
    while (elapsed := now() - start) < seconds or not count:
        run()
        count += 1
    return count, elapsed


# -- decoding ----------------------------------------------------------------------------------------------------------


READ_NBYTES = 1 << 20
"""The part of an expert that one reader decodes."""

_LAYER = LayerGeometry(1, 1, hidden_size=1024, intermediate_size=1408, num_matrices=3, itemsize=2)


def measure_decoding(seconds: float) -> DecodeProfile:
    """With one thread, with as many as decode while a forward pass waits, and with all readers; `seconds` each."""
    sample = Sample(_LAYER, [[_trained_like(_LAYER.expert_nbytes // 2)]])
    threads = sorted({1, decoding_threads(allowed_cpus(), NUM_READERS), NUM_READERS})
    rates = tuple(DecodeRate(n, sample.decode_nbytes_per_s(n, seconds) * n) for n in threads)
    return DecodeProfile(sample.ratio, rates)


def machine_costs(profile: MachineProfile) -> CodecCosts:
    """The codec's costs for weights as they were measured."""
    threads = decoding_threads(profile.num_cpus, NUM_READERS)
    rates = {rate.num_threads: rate.nbytes_per_s for rate in profile.decoding.rates}
    return CodecCosts(profile.decoding.ratio, rates[threads] / threads, threads, _threads_beside(threads))


def machine_choice(profile: MachineProfile) -> CodecChoice:
    """What `codec=auto` chooses for such weights on the disk of the profile. Raises ConfigError where it has none."""
    costs = machine_costs(profile)
    disk_rate = profile.disk_nbytes_per_s(READ_NBYTES)
    return choose_codec(CodecRates(costs.ratio, disk_rate, costs.decode_nbytes_per_s, costs.threads))


def store_costs(store: PackedStore) -> tuple[Link, CodecCosts]:
    """The disk under a compressed store, and what decoding its frames costs, measured now; takes a second."""
    paths = [path for path, _ in store.extents]
    sample = read_sample(store.manifest.layers, store.frames)
    threads = decoding_threads(allowed_cpus(), NUM_READERS)
    costs = CodecCosts(
        store.ratio,
        sample.decode_nbytes_per_s(threads, pick=statistics.median),
        threads,
        _threads_beside(threads),
        sample.read_processors(threads, paths),
    )
    return Link(disk_rate_of(paths), disk_latency_ns_of(paths), 0), costs


def _threads_beside(num_decoding: int) -> int:
    """The decoding threads that run while a pass computes."""
    num_cpus = granted_cpus()
    num_computing = min(torch.get_num_threads(), computing_threads(num_cpus, NUM_READERS))
    return max(0, min(num_decoding, num_cpus - num_computing))


def _trained_like(count: int) -> NDArray[np.uint8]:
    """bfloat16 weights of a normal distribution, which is close to that of trained models."""
    values = np.random.default_rng(0).standard_normal(count, np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
