"""What `expertly doctor` measures, with the engine's own code: reading from disk, copies to CUDA devices, and
matrix products.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import linear, silu

from expertly.core.errors import ConfigError
from expertly.core.files import create
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Span
from expertly.engine.device import kind_of
from expertly.engine.transfer import Readers
from expertly.formats import expert_format
from expertly.hardware.profile import DeviceProfile
from expertly.native.activations import recognise
from expertly.native.kernels import ExpertProducts, choose_kernels
from expertly.store.packed import LayerFile

SMALL_NBYTES, LARGE_NBYTES = 64 << 10, 4 << 20
"""Reads and copies whose time tells the latency, and the rate."""

_COPY_NBYTES = 64 << 20
_MATRIX_SHAPE = (2048, 2816)
_LEAST_NBYTES = 1 << 30  # of weights: more than any device's cache
_EXPERTS_NBYTES = 256 << 20  # more than a processor's


@contextmanager
def scratch_file(folder: Path, nbytes: int, seconds: float) -> Iterator[tuple[Path, float]]:
    """A file of random bytes that are on the disk and not in the page cache, and the bytes that were written a second.
    It is removed afterwards; one that a killed process left is replaced. Writing it ends early after so many `seconds`.
    Raises ConfigError where it cannot be written.
    """
    path = folder / ".doctor.scratch"
    block = np.random.default_rng(0).integers(0, 256, 16 << 20, np.uint8)
    written, start = 0, time.perf_counter()
    try:
        try:
            with os.fdopen(create(path), "wb") as file:
                while written < nbytes and (not written or time.perf_counter() - start < seconds):
                    block[::4096] += 1  # no two blocks alike
                    file.write(block.data)
                    file.flush()
                    os.fdatasync(file.fileno())
                    written += block.nbytes
                rate = written / (time.perf_counter() - start)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise ConfigError(f"a test file cannot be written there ({error.strerror})") from error
        yield path, rate
    finally:
        with suppress(OSError):
            path.unlink()


class DiskRate(NamedTuple):
    """Sustained random reads."""

    nbytes_per_s: float
    is_direct: bool  # past the page cache


def measure_disk(path: Path, read_nbytes: int, depth: int, seconds: float) -> DiskRate:
    """The sustained rate of reads of `read_nbytes` (a multiple of 4096, at most the file's size) at random places of
    `path`, `depth` at a time, by the engine's readers. No place is read twice before all have been.
    """
    num_places = path.stat().st_size // read_nbytes
    places = cycle(np.random.default_rng(read_nbytes + depth).permutation(num_places).tolist())
    geometry = Geometry((LayerGeometry(num_places, 1, 2048, read_nbytes // 4096, 2, 1),))
    memory = memoryview(mmap.mmap(-1, depth * read_nbytes))

    def read(slot: int) -> None:
        readers.submit([Span(0, next(places), 0, 1, slot)])

    with closing(
        Readers(
            lambda layer: LayerFile(path, 0, None, range(num_places)),
            geometry,
            lambda layer: memory,
            depth,
        )
    ) as readers:
        for slot in range(depth):  # take its pages before the clock runs
            read(slot)
            readers.wait()
        start, num_reads = time.perf_counter(), 0
        for slot in range(depth):
            read(slot)
        while readers.num_in_flight:
            slot, num_reads = readers.wait().slot, num_reads + 1
            if time.perf_counter() - start < seconds:
                read(slot)
        elapsed = time.perf_counter() - start
        return DiskRate(num_reads * read_nbytes / elapsed, not readers.stats()["buffered_nbytes"])


def measure_weights_rate(
    device: torch.device, dtype: torch.dtype, seconds: float, nbytes: int = _LEAST_NBYTES
) -> float:
    """Bytes of weights a second in products of 2048 x 2816 matrices, `nbytes` of them in turn, with one vector, by the
    kernels that compute experts on the device.
    """
    rows, columns = _MATRIX_SHAPE
    count = -(-nbytes // (rows * columns * dtype.itemsize))
    matrices = [torch.full(_MATRIX_SHAPE, 0.01, dtype=dtype, device=device) for _ in range(count)]
    x, out = (torch.ones(1, width, dtype=dtype, device=device) for width in (columns, rows))
    kernels = choose_kernels(runs_on_host=kind_of(device).runs_on_host)
    is_native = kernels.most_tokens(dtype) > 0

    def products() -> None:
        for matrix in matrices:
            if is_native:
                kernels.dots(matrix.data_ptr(), x, out, matrix.stride(0) * matrix.element_size())
            else:
                linear(x, matrix)

    with torch.inference_mode():
        num_rounds, elapsed = _timed(device, seconds, products)
    return num_rounds * sum(matrix.nbytes for matrix in matrices) / elapsed


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
    slots = stored.data_ptr(), size, layer.intermediate_size

    def compute() -> None:
        for first in range(0, num_tokens * top_k, top_k):
            works = [(Span(0, expert, 0, 1, first + expert), (0,), (expert,)) for expert in range(top_k)]
            kernels.experts(products, slots, works, x, out)

    num_rounds, elapsed = _timed(x.device, seconds, compute)
    return num_rounds * stored.nbytes / elapsed


def _activated(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    return silu(gate) if up is None else silu(gate) * up


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


def measure_devices(seconds: float) -> tuple[DeviceProfile, ...]:
    """Every CUDA device this process sees, spending about `seconds` on each; empty where there is none."""
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(_measure_device(torch.device("cuda", number), seconds) for number in range(num_devices))


def _measure_device(device: torch.device, seconds: float) -> DeviceProfile:
    host = torch.ones(_COPY_NBYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.ones(_COPY_NBYTES, dtype=torch.uint8, device=device)
    times = []
    with torch.cuda.stream(torch.cuda.Stream(device)):
        num_copies, elapsed = _timed(device, seconds / 2, lambda: there.copy_(host, non_blocking=True))
        for _ in range(20):
            start = time.perf_counter_ns()
            there[:SMALL_NBYTES].copy_(host[:SMALL_NBYTES], non_blocking=True)
            torch.cuda.current_stream(device).synchronize()
            times.append(time.perf_counter_ns() - start)
    properties = torch.cuda.get_device_properties(device)
    return DeviceProfile(
        *(str(device), properties.name, properties.total_memory),
        *(num_copies * _COPY_NBYTES / elapsed, int(statistics.median(times))),
        measure_weights_rate(device, torch.bfloat16, seconds / 2),
    )
