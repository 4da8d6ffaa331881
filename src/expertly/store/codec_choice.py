"""Chooses a codec by measuring, in a second, the disk of a store and how fast a sample of its experts is decoded."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from expertly.core.costs import CodecCosts
from expertly.core.errors import ConfigError, StoreError, TransferError
from expertly.core.files import create, existing_parent
from expertly.core.geometry import PAGE_NBYTES, LayerGeometry
from expertly.core.resources import NUM_READERS, allowed_cpus, decoding_threads
from expertly.core.units import format_nbytes, format_rate
from expertly.store.cache import store_errors
from expertly.store.checkpoint import Bytes
from expertly.store.frames import (
    EncodedFrame,
    FrameDecoder,
    FrameEncoder,
    FrameIndex,
    frame_ends,
    frames_per_expert,
    read_frames,
)
from expertly.store.reader import ExpertFile

_SECONDS = 0.3  # of each measurement
_ATTEMPTS = 6
_READ_NBYTES = 1 << 20
_SCRATCH_NBYTES = 64 << 20
_BLOCK_NBYTES = 16 << 20  # of a scratch file
_PART_NBYTES = 2 << 20
_NUM_PARTS = 4
_NUM_PAGES = 32
_PLACES_NBYTES = 16 << 20

LEAST_GAIN = 1.10
"""How much faster loads must be with `planes` than with `none`: a measurement of one second is not exact."""

MIN_MEASURED_NBYTES = 64 << 20
"""Nothing is measured for a model with fewer bytes of experts: reading them all takes less time."""


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """A codec and the reason, a sentence without a full stop."""

    codec: str
    why: str


def expected_gain(costs: CodecCosts, disk_nbytes_per_s: float) -> float:
    """Loading time with `none` / with `planes`. Reading and decoding overlap, so the slower of the two counts. Of
    several threads one is left out: the model computes on its core.
    """
    decode_s = 1 / (costs.decode_nbytes_per_s * max(1, costs.threads - 1))
    return (1 / disk_nbytes_per_s) / max(costs.ratio / disk_nbytes_per_s, decode_s)


def choose_codec(costs: CodecCosts, disk_nbytes_per_s: float) -> CodecChoice:
    """`planes` where loads are at least a tenth faster with it, and decoding takes no more processor time than shorter
    reads save: where reads overlap computing, decoding would slow that down.
    """
    for value in (costs.ratio, disk_nbytes_per_s, costs.all_nbytes_per_s):
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"disk_nbytes_per_s={disk_nbytes_per_s}, {costs}: must be numbers above 0")
    gain, decode_rate = expected_gain(costs, disk_nbytes_per_s), costs.all_nbytes_per_s
    is_cheap = (1 - costs.ratio) / disk_nbytes_per_s * decode_rate >= 1
    codec, verdict = "planes", ""
    if gain < LEAST_GAIN:
        codec, verdict = "none", f", and must take {1 / LEAST_GAIN:.2f} at the most"
    elif not is_cheap:
        codec, verdict = "none", ", but more of the processors than reading saves"
    threads = "1 thread decodes" if costs.threads == 1 else f"{costs.threads} threads decode"
    return CodecChoice(
        codec,
        f"weights take {costs.ratio:.2f} of their size in planes, the disk reads "
        f"{format_rate(disk_nbytes_per_s)}, {threads} {format_rate(decode_rate)} of weights: "
        f"loads {'with planes ' * (codec == 'none')}take {1 / gain:.2f} of the time{verdict}",
    )


def choose_for(
    layers: Sequence[LayerGeometry], sample: Callable[[], Sample], disk_nbytes_per_s: Callable[[], float]
) -> CodecChoice:
    """The codec for a model, by measuring, unless the model is too small for that."""
    nbytes = sum(layer.nbytes for layer in layers)
    if nbytes < MIN_MEASURED_NBYTES:
        return CodecChoice("none", f"{format_nbytes(nbytes)} of experts are too few for measuring to pay")
    found, disk_rate = sample(), disk_nbytes_per_s()
    threads = decoding_threads(allowed_cpus(), NUM_READERS)  # as an engine on this machine would have
    return choose_codec(CodecCosts(found.ratio, found.decode_nbytes_per_s(threads), threads), disk_rate)


class Sample:
    """Encoded frames of some experts of a model, which tell its compression ratio and decoding speed."""

    def __init__(self, layer: LayerGeometry, experts: Iterable[Iterable[Bytes]]) -> None:
        """`experts`: of `layer` or layers like it, in chunks. Takes the first 2 MiB of each, or one frame if longer."""
        self._frame_nbytes = layer.expert_nbytes // frames_per_expert(layer)
        self._itemsize = layer.itemsize
        encoder = FrameEncoder(self._frame_nbytes, layer.itemsize)
        nbytes = max(1, min(_PART_NBYTES, layer.expert_nbytes) // self._frame_nbytes) * self._frame_nbytes
        self._frames = [frame for expert in experts for frame in encoder.encode(_first(expert, nbytes))]

    @property
    def ratio(self) -> float:
        """Stored bytes / decoded bytes."""
        return sum(len(frame.stored) for frame in self._frames) / (len(self._frames) * self._frame_nbytes)

    def decode_nbytes_per_s(
        self, num_threads: int, seconds: float = _SECONDS, pick: Callable[[Iterable[float]], float] = max
    ) -> float:
        """Decoded bytes a second of one thread while `num_threads` decode. `pick` chooses among several attempts; the
        best one excludes other processes' load.

        It decodes into memory that is in no processor cache, as slots are: cached memory is a fifth faster
        (docs/codec.md).
        """
        decode = self._decoder(num_threads)
        return pick(sum(_rates(decode, num_threads, seconds / _ATTEMPTS)) for _ in range(_ATTEMPTS)) / num_threads

    def read_processors(self, num_threads: int, paths: Iterable[Path]) -> float:
        """How many of `num_threads` decoding threads' processors are lost while these files are read at full speed: the
        median of some attempts, with and without reads in turn. The time that a driver or a virtual machine's host
        takes shows in no process's account, only in slower decoding.
        """
        decode, found = self._decoder(num_threads), []
        with _opened(paths) as files:
            read = _reader(files)

            def both(number: int, until: float) -> int:
                return decode(number, until) if number < num_threads else read(number, until)

            for _ in range(_ATTEMPTS):
                alone = sum(_rates(decode, num_threads, _SECONDS / _ATTEMPTS))
                beside = sum(_rates(both, num_threads + NUM_READERS, _SECONDS / _ATTEMPTS)[:num_threads])
                found.append(num_threads * (1 - beside / alone))
        return min(float(num_threads), max(0.0, statistics.median(found)))

    def _decoder(self, num_threads: int) -> Callable[[int, float], int]:
        """The work of a decoding thread; see `_rates`."""
        index = index_of(self._frames, self._frame_nbytes, self._itemsize)
        stored = [memoryview(frame.stored) for frame in self._frames]
        places = _places(self._frame_nbytes, num_threads)

        def decode(number: int, until: float) -> int:
            decoder, mine = FrameDecoder(), places[number::num_threads]
            done = 0
            while not done or time.perf_counter() < until:
                frame = (number + done) % len(stored)
                decoder.decode(index, frame, 0, stored[frame], mine[done % len(mine)])
                done += 1
            return done * self._frame_nbytes

        return decode


def sampled(layers: Sequence[LayerGeometry]) -> list[tuple[int, int]]:
    """(layer, expert) of a sample's experts: spread over the model's layers that are like the first."""
    alike = [number for number, layer in enumerate(layers) if layer == layers[0]]
    num = min(_NUM_PARTS, len(alike) * layers[0].num_experts)
    places = [part * len(alike) * layers[0].num_experts // num for part in range(num)]
    return [(alike[place // layers[0].num_experts], place % layers[0].num_experts) for place in places]


def read_sample(layers: Sequence[LayerGeometry], frames: Sequence[FrameIndex]) -> Sample:
    """The sample of a compressed store. Raises StoreError where it is damaged."""

    def decoded(layer: int, expert: int) -> Iterator[Bytes]:
        with contextlib.closing(ExpertFile(frames[layer].path)) as file:
            yield from (out for _, out in read_frames(file, frames[layer], [expert]))

    try:
        return Sample(layers[0], (decoded(layer, expert) for layer, expert in sampled(layers)))
    except TransferError as error:
        raise StoreError(str(error)) from None


def disk_rate_at(folder: Path) -> float:
    """Bytes a second of reads of 1 MiB, several in flight, from a new file in `folder` or its nearest parent that
    exists.

    Raises StoreError where no file can be written there, TransferError where it cannot be read.
    """
    place = existing_parent(folder)
    path = place / f".expertly-{os.getpid()}-{threading.get_ident()}.scratch"
    with store_errors(place, "writing a file to measure the disk with"):
        write_scratch(path, _SCRATCH_NBYTES)
    try:
        with _opened([path]) as files:
            path.unlink()  # while it is open: a process that is killed leaves no file
            return sum(_rates(_reader(files), NUM_READERS, _SECONDS))
    finally:
        path.unlink(missing_ok=True)


def disk_rate_of(paths: Iterable[Path]) -> float:
    """Bytes a second of reads of 1 MiB, several in flight, from existing files. Raises StoreError where they cannot be
    opened, TransferError where they cannot be read.
    """
    with _opened(paths) as files:
        return sum(_rates(_reader(files), NUM_READERS, _SECONDS))


def disk_latency_ns_of(paths: Iterable[Path]) -> int:
    """How long one read of a page takes, from existing files. Raises as `disk_rate_of`."""
    with _opened(paths) as files:
        places = [(file, at) for file, nbytes in files for at in range(0, nbytes, _READ_NBYTES)]
        buffer = memoryview(mmap.mmap(-1, PAGE_NBYTES))
        times = []
        for place in np.random.default_rng(1).permutation(len(places))[:_NUM_PAGES].tolist():
            file, at = places[place]
            start = time.perf_counter_ns()
            file.read_into(at, [buffer])
            times.append(time.perf_counter_ns() - start)
    return round(statistics.median(times)) if times else 0


@contextlib.contextmanager
def _opened(paths: Iterable[Path]) -> Iterator[list[tuple[ExpertFile, int]]]:
    """The opened files, each with the bytes of its whole pages."""
    with contextlib.ExitStack() as stack:
        files = []
        for path in paths:
            file = stack.enter_context(contextlib.closing(ExpertFile(path)))
            files.append((file, path.stat().st_size // PAGE_NBYTES * PAGE_NBYTES))
        yield files


def _reader(files: Sequence[tuple[ExpertFile, int]]) -> Callable[[int, float], int]:
    """The work of a reading thread; see `_rates`. All threads end when everything has been read once: a second read may
    come from a cache.
    """
    places = [
        (file, at, min(_READ_NBYTES, nbytes - at)) for file, nbytes in files for at in range(0, nbytes, _READ_NBYTES)
    ]
    order = iter(np.random.default_rng(0).permutation(len(places)).tolist())

    def read(number: int, until: float) -> int:
        buffer = memoryview(mmap.mmap(-1, _READ_NBYTES))
        done = 0
        while time.perf_counter() < until and (place := next(order, None)) is not None:
            file, offset, size = places[place]
            file.read_into(offset, [buffer[:size]])
            done += size
        return done

    return read


def _rates(work: Callable[[int, float], int], num_threads: int, seconds: float) -> list[float]:
    """Bytes a second of each thread, over the time of all. `work(number, until)` returns the bytes it has done."""
    done = [0] * num_threads
    errors: list[Exception] = []

    def run(number: int) -> None:
        try:
            done[number] = work(number, start + seconds)
        except Exception as error:  # a thread's entry: the caller raises it
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(num_threads)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    elapsed = time.perf_counter() - start
    return [one / elapsed for one in done]


def _places(frame_nbytes: int, num_threads: int) -> list[memoryview]:
    """Touched memory for decoded frames: at least one frame a thread, and more than a core's caches hold."""
    num = max(num_threads, _PLACES_NBYTES // frame_nbytes)
    memory = np.ones(num * frame_nbytes, np.uint8).data
    return [memory[i * frame_nbytes : (i + 1) * frame_nbytes] for i in range(num)]


def _first(chunks: Iterable[Bytes], nbytes: int) -> Iterator[Bytes]:
    left = nbytes
    for chunk in chunks:
        part = np.frombuffer(chunk.data.cast("B"), np.uint8)[:left]
        yield part
        left -= len(part)
        if not left:
            return


def index_of(frames: Sequence[EncodedFrame], frame_nbytes: int, itemsize: int) -> FrameIndex:
    """The index of frames that are a whole expert each."""
    lengths = np.array([frame.plane_nbytes for frame in frames], np.uint32)
    checksums = np.array([frame.checksum for frame in frames], np.uint64)
    return FrameIndex(Path("sample"), len(frames), 1, itemsize, frame_nbytes, frame_ends(lengths), lengths, checksums)


def write_scratch(path: Path, nbytes: int, seconds: float = math.inf) -> tuple[int, float]:
    """A new file of incompressible bytes that are on the disk and not in the page cache: its bytes, and how many were
    written a second. It ends early after so many `seconds`.
    """
    block = np.random.default_rng(0).integers(0, 256, _BLOCK_NBYTES, np.uint8)
    written, start = 0, time.perf_counter()
    fd = create(path)
    try:
        with os.fdopen(fd, "wb", buffering=0) as file:
            while written < nbytes and (not written or time.perf_counter() - start < seconds):
                block[::4096] += 1  # no two blocks alike
                view = block.data
                while view:
                    view = view[file.write(view) :]
                os.fdatasync(fd)
                written += _BLOCK_NBYTES
            elapsed = time.perf_counter() - start
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return written, written / elapsed
