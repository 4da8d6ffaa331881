"""What `expertly doctor` measures, with the engine's own code: reading from disk, copies in memory and to CUDA devices,
matrix products, and decoding of compressed experts.
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
from torch.nn.functional import linear, silu

from expertly.core.costs import CodecCosts, Link
from expertly.core.errors import ConfigError
from expertly.core.files import remove_files
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Span
from expertly.core.resources import NUM_READERS, allowed_cpus, computing_threads, decoding_threads, granted_cpus
from expertly.engine.device import kind_of
from expertly.engine.reading import MIN_READ_NBYTES
from expertly.engine.transfer import Readers
from expertly.formats import expert_format
from expertly.hardware.profile import (
    DecodeProfile,
    DeviceProfile,
    DiskRate,
    LinkRate,
    MachineProfile,
    MatvecRate,
    ThreadsRate,
)
from expertly.native.activations import recognise
from expertly.native.kernels import ExpertProducts, choose_kernels
from expertly.store.codec_choice import (
    CodecChoice,
    Sample,
    choose_codec,
    disk_latency_ns_of,
    disk_rate_of,
    read_sample,
    write_scratch,
)
from expertly.store.packed import LayerFile, PackedStore

READ_SIZES = tuple(k << 10 for k in (64, 256, 1024, 4096, 16384))
DEPTHS = (1, 2, 4, 8)
DTYPES = ("bfloat16", "float16", "float32")

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
    """A file of `write_scratch`, removed afterwards. Raises ConfigError where it cannot be written."""
    path = folder / f".doctor-{os.getpid()}.scratch"
    try:
        for other in folder.glob(".doctor-*.scratch"):  # of processes that were killed
            pid = other.name.removeprefix(".doctor-").removesuffix(".scratch")
            if pid.isdecimal() and Path("/proc/self").exists() and not Path("/proc", pid).exists():
                remove_files(folder, other.name.__eq__)
        written = write_scratch(path, nbytes, seconds)
    except OSError as error:
        raise ConfigError(f"folder {folder}: a test file cannot be written there ({error.strerror})") from error
    try:
        yield ScratchFile(path, *written)
    finally:
        path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _OneExtent:
    """An ExtentSource of one layer, which is the whole file."""

    path: Path
    num_experts: int

    def layer_file(self, layer: int) -> LayerFile:
        return LayerFile(self.path, 0, None, None, range(self.num_experts))


def measure_disk(path: Path, read_nbytes: int, depth: int, seconds: float) -> DiskRate:
    """The sustained rate of reads of `read_nbytes` (a multiple of 4096) at random places of `path`.

    `depth` of the engine's reader threads read, with enough spans queued that none is idle. Like in the engine they
    split large spans among themselves, and as many small ones need none. No place is read twice before all have been.
    """
    num_places = path.stat().st_size // read_nbytes
    if read_nbytes % 4096 or num_places < 1:
        raise ConfigError(f"read_nbytes={read_nbytes}: must be a multiple of 4096, and at most the file's size")
    in_flight = max(1, depth * MIN_READ_NBYTES // max(read_nbytes, MIN_READ_NBYTES))
    geometry = Geometry((LayerGeometry(num_places, 1, _ROW_NBYTES // 2, read_nbytes // _ROW_NBYTES, 2, 1),))
    memory = memoryview(mmap.mmap(-1, in_flight * read_nbytes))
    memory[:: mmap.PAGESIZE] = bytes(len(memory[:: mmap.PAGESIZE]))  # take the pages before the clock runs

    def buffer_of(span: Span) -> memoryview:
        return memory[span.slot * read_nbytes : (span.slot + 1) * read_nbytes]

    places = np.random.default_rng(read_nbytes + depth).permutation(num_places).tolist()
    num_reads = 0
    readers = Readers(_OneExtent(path, num_places), geometry, buffer_of, num_readers=depth)
    try:
        for slot in range(in_flight):
            readers.submit([Span(0, places[slot % num_places], 0, 1, slot)])
        slot = readers.wait().slot  # threads are up
        start = now = time.perf_counter()
        while now - start < seconds or not num_reads:
            readers.submit([Span(0, places[(in_flight + num_reads) % num_places], 0, 1, slot)])
            slot = readers.wait().slot
            now = time.perf_counter()
            num_reads += 1
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


def measure_copy(num_threads: int, nbytes: int, seconds: float) -> ThreadsRate:
    """Rate of copies from RAM to RAM, `nbytes` at a time."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    with _threads(num_threads):
        num_copies, elapsed = _timed(_CPU, seconds, lambda: target.copy_(source))
    return ThreadsRate(num_threads, num_copies * nbytes / elapsed)


def measure_matvec(dtype: str, num_threads: int, nbytes: int, seconds: float) -> MatvecRate:
    """Rate of products of `nbytes` of matrices with one vector, on the processor."""
    with _threads(num_threads):
        return MatvecRate(dtype, num_threads, measure_weights_rate(_CPU, getattr(torch, dtype), seconds, nbytes))


# -- the two rates of a roofline, of any device ------------------------------------------------------------------------


_SQUARE = 1024
_LEAST_NBYTES = 1 << 30  # more than any device's cache
_EXPERTS_NBYTES = 256 << 20  # more than a processor's


def measure_weights_rate(
    device: torch.device, dtype: torch.dtype, seconds: float, nbytes: int = _LEAST_NBYTES
) -> float:
    """Bytes of weights a second in products of 2048 x 2816 matrices, `nbytes` of them in turn, with one vector, by the
    kernels that compute experts on the device.
    """
    count = -(-nbytes // (_MATRIX_SHAPE[0] * _MATRIX_SHAPE[1] * dtype.itemsize))
    matrices = [torch.full(_MATRIX_SHAPE, 0.01, dtype=dtype, device=device) for _ in range(count)]
    x = torch.ones(1, _MATRIX_SHAPE[1], dtype=dtype, device=device)
    product = _product_of(x)
    with torch.inference_mode():
        num_rounds, elapsed = _timed(device, seconds, lambda: [product(matrix) for matrix in matrices])
    return num_rounds * sum(matrix.nbytes for matrix in matrices) / elapsed


def _product_of(x: torch.Tensor) -> Callable[[torch.Tensor], object]:
    """A function of a matrix [r, H]: its product with x [1, H]."""
    kernels = choose_kernels(runs_on_host=kind_of(x.device).runs_on_host)
    if not kernels.most_tokens(x.dtype):
        return partial(linear, x)
    out = x.new_empty(1, 1, _MATRIX_SHAPE[0])
    return lambda matrix: kernels.dots((matrix.data_ptr(), 0, 1, 0), x, out, matrix.stride(0) * matrix.element_size())


def measure_experts_rate(layer: LayerGeometry, dtype: torch.dtype, seconds: float) -> float | None:
    """Bytes a second of experts, as many together as a token needs, in products with it in `dtype`, by the processor's
    kernels that decode them. None where the layer has no weight format, or there are no such kernels.
    """
    kernels, top_k, size, num_inner = choose_kernels(), layer.top_k, layer.expert_nbytes, layer.num_matrices - 1
    if not layer.format or dtype not in kernels.dtypes:
        return None
    activation = recognise(_activated, dtype, is_gated=num_inner == 2)
    assert activation is not None, "silu is known"
    shape, formats = (num_inner, layer.hidden_size), expert_format(layer.format).kernels
    products = ExpertProducts(formats, shape, layer.block_nbytes, 0, activation, (), None)
    num_tokens = max(1, _EXPERTS_NBYTES // (top_k * size))
    stored = torch.full((num_tokens * top_k * size,), 0x38, dtype=torch.uint8)  # in no format a special number
    x, out = torch.ones(1, layer.hidden_size, dtype=dtype), torch.empty(top_k, layer.hidden_size, dtype=dtype)
    first, row = top_k * [0], range(top_k)

    def compute() -> None:
        for begin in range(stored.data_ptr(), stored.data_ptr() + stored.nbytes, top_k * size):
            tasks = [number for expert in row for number in (begin + expert * size, 1, expert)]
            kernels.experts(products, tasks, first, row, x, out, layer.intermediate_size, 0, adds=False)

    num_rounds, elapsed = _timed(_CPU, seconds, compute)
    return num_rounds * stored.nbytes / elapsed


def _activated(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    return silu(gate) if up is None else silu(gate) * up


def measure_flops(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """Operations a second in products of square matrices. A multiplication and an addition count as two."""
    a = torch.full((_SQUARE, _SQUARE), 0.01, dtype=dtype, device=device)
    with torch.inference_mode():
        num_products, elapsed = _timed(device, seconds, lambda: a @ a)
    return num_products * 2 * _SQUARE**3 / elapsed


def _timed(device: torch.device, seconds: float, run: Callable[[], object]) -> tuple[int, float]:
    """How often `run` ran, without the one to warm up, and in how many seconds."""

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


# -- CUDA devices, and the link between pinned host memory and them ----------------------------------------------------

COPY_SIZES = tuple(k << 10 for k in (64, 256, 1024, 4096, 16384, 65536))
_NUM_LATENCIES = 20


def measure_devices(seconds: float) -> tuple[DeviceProfile, ...]:
    """Every CUDA device this process sees, spending about `seconds` on each; empty where there is none."""
    if not torch.cuda.is_available():
        return ()
    return tuple(_measure_device(torch.device("cuda", i), seconds) for i in range(torch.cuda.device_count()))


def _measure_device(device: torch.device, seconds: float) -> DeviceProfile:
    each = seconds / (2 * len(COPY_SIZES))
    host = torch.ones(COPY_SIZES[-1], dtype=torch.uint8, pin_memory=True)
    there = torch.ones(COPY_SIZES[-1], dtype=torch.uint8, device=device)
    links = []
    with torch.cuda.stream(torch.cuda.Stream(device)):
        for nbytes in COPY_SIZES:
            near, far = host[:nbytes], there[:nbytes]
            up = _bandwidth(far, near, each)
            links.append(LinkRate(nbytes, up, _bandwidth(near, far, each), _latency_ns(far, near)))
    properties = torch.cuda.get_device_properties(device)
    _, beside = kind_of(device).miss_costs(device, torch.bfloat16) or (None, None)
    return DeviceProfile(str(device), properties.name, properties.total_memory, tuple(links), beside)


def _bandwidth(target: torch.Tensor, source: torch.Tensor, seconds: float) -> float:
    """Bytes a second of copies queued back to back on the current stream."""
    stream = torch.cuda.current_stream(target.device if target.is_cuda else source.device)
    num_copies = 8
    while True:
        stream.synchronize()
        start = time.perf_counter()
        for _ in range(num_copies):
            target.copy_(source, non_blocking=True)
        stream.synchronize()
        elapsed = time.perf_counter() - start
        if elapsed >= seconds / 2:
            return num_copies * target.numel() / elapsed
        num_copies *= 2


def _latency_ns(target: torch.Tensor, source: torch.Tensor) -> int:
    """Median time of one copy, from the call until the host knows that it is done."""
    stream = torch.cuda.current_stream(target.device)
    times = []
    for _ in range(_NUM_LATENCIES):
        start = time.perf_counter_ns()
        target.copy_(source, non_blocking=True)
        stream.synchronize()
        times.append(time.perf_counter_ns() - start)
    return int(statistics.median(times))


# -- decoding ----------------------------------------------------------------------------------------------------------


READ_NBYTES = 1 << 20
"""The part of an expert that one reader decodes."""

_LAYER = LayerGeometry(1, 1, hidden_size=1024, intermediate_size=1408, num_matrices=3, itemsize=2)


def measure_decoding(seconds: float) -> DecodeProfile:
    """Decoding by one thread, by as many as decode while a forward pass waits, and by all readers; `seconds` each."""
    sample = Sample(_LAYER, [[_trained_like(_LAYER.expert_nbytes // 2)]])
    threads = sorted({1, decoding_threads(allowed_cpus(), NUM_READERS), NUM_READERS})
    rates = tuple(ThreadsRate(n, sample.decode_nbytes_per_s(n, seconds) * n) for n in threads)
    return DecodeProfile(sample.ratio, rates)


def machine_costs(profile: MachineProfile) -> CodecCosts:
    """The costs of `planes` for weights like those of the measurement."""
    threads = decoding_threads(profile.num_cpus, NUM_READERS)
    rates = {rate.num_threads: rate.nbytes_per_s for rate in profile.decoding.rates}
    return CodecCosts(profile.decoding.ratio, rates[threads] / threads, threads, _threads_beside(threads))


def machine_choice(profile: MachineProfile) -> CodecChoice:
    """What `codec=auto` chooses for such weights on the profile's disk. Raises ConfigError where it has no disk."""
    return choose_codec(machine_costs(profile), profile.disk_nbytes_per_s(READ_NBYTES))


def store_costs(store: PackedStore) -> tuple[Link, CodecCosts]:
    """Measures, in a second, the disk of a compressed store and what decoding its frames costs."""
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
    """Threads that decode while a pass computes."""
    num_cpus = granted_cpus()
    num_computing = min(torch.get_num_threads(), computing_threads(num_cpus, NUM_READERS))
    return max(0, min(num_decoding, num_cpus - num_computing))


def _trained_like(count: int) -> NDArray[np.uint8]:
    """bfloat16 weights of a normal distribution, like those of trained models."""
    values = np.random.default_rng(0).standard_normal(count, np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
