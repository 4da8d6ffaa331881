"""Choosing a codec by measuring, in a second, the disk that a store is on or goes to and a sample of its experts."""

from __future__ import annotations

import contextlib
import dataclasses
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

from expertly.core.errors import ConfigError, StoreError, TransferError
from expertly.core.files import existing_parent
from expertly.core.geometry import PAGE_NBYTES, LayerGeometry
from expertly.core.resources import allowed_cpus, decoding_threads
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

NUM_READERS = 4
"""As many as an engine has."""

_SECONDS = 0.3  # of each measurement
_ATTEMPTS = 6
_READ_NBYTES = 1 << 20
_SCRATCH_NBYTES = 64 << 20
_PART_NBYTES = 2 << 20
_NUM_PARTS = 4
_NUM_PAGES = 32
_PLACES_NBYTES = 16 << 20

LEAST_GAIN = 1.10
"""How much faster than `none` loads must be for `planes` to be chosen: what is measured in a second is not exact."""

MIN_MEASURED_NBYTES = 64 << 20
"""Of experts. Fewer are not worth measuring for: that takes longer than reading them all."""


@dataclass(frozen=True, slots=True)
class CodecRates:
    """What choosing between codecs takes, on one machine and for one model."""

    ratio: float  # stored bytes / decoded bytes of experts in `planes`
    disk_nbytes_per_s: float
    decode_nbytes_per_s: float  # of weights, by one thread while all threads decode
    num_threads: int  # that decode at a time


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """A codec, and one sentence without a full stop that says why."""

    codec: str
    why: str


def expected_gain(rates: CodecRates) -> float:
    """Time that loading takes with `none` / with `planes`, where reading and decoding overlap: the slower of the two
    counts. One of several threads is left out: on a CPU computing takes its core.
    """
    decode_s = 1 / (rates.decode_nbytes_per_s * max(1, rates.num_threads - 1))
    return (1 / rates.disk_nbytes_per_s) / max(rates.ratio / rates.disk_nbytes_per_s, decode_s)


def choose_codec(rates: CodecRates) -> CodecChoice:
    """`planes` where loads are expected to be at least a tenth faster with it, and decoding takes no more of the
    processors than reading saves: where reads hide behind computing, computing would lose that.
    """
    for name, value in dataclasses.asdict(rates).items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name}={value}: must be a number above 0")
    gain, decode_rate = expected_gain(rates), rates.decode_nbytes_per_s * rates.num_threads
    is_cheap = (1 - rates.ratio) / rates.disk_nbytes_per_s * decode_rate >= 1
    codec, verdict = "planes", ""
    if gain < LEAST_GAIN:
        codec, verdict = "none", f", and must take {1 / LEAST_GAIN:.2f} at the most"
    elif not is_cheap:
        codec, verdict = "none", ", but more of the processors than reading saves"
    threads = "1 thread decodes" if rates.num_threads == 1 else f"{rates.num_threads} threads decode"
    return CodecChoice(
        codec,
        f"weights take {rates.ratio:.2f} of their size in planes, the disk reads "
        f"{format_rate(rates.disk_nbytes_per_s)}, {threads} {format_rate(decode_rate)} of weights: "
        f"loads {'with planes ' * (codec == 'none')}take {1 / gain:.2f} of the time{verdict}",
    )


def choose_for(
    layers: Sequence[LayerGeometry], sample: Callable[[], Sample], disk_nbytes_per_s: Callable[[], float]
) -> CodecChoice:
    """The codec for a model, by measuring, unless it is so small that reading all of it takes less time."""
    nbytes = sum(layer.nbytes for layer in layers)
    if nbytes < MIN_MEASURED_NBYTES:
        return CodecChoice("none", f"{format_nbytes(nbytes)} of experts are too few for measuring to pay")
    found, disk_rate = sample(), disk_nbytes_per_s()
    threads = decoding_threads(allowed_cpus(), NUM_READERS)  # as an engine on this machine would have
    return choose_codec(CodecRates(found.ratio, disk_rate, found.decode_nbytes_per_s(threads), threads))


class Sample:
    """Frames of some experts of a model, encoded: what its weights come to, and how fast they are decoded."""

    def __init__(self, layer: LayerGeometry, experts: Iterable[Iterable[Bytes]]) -> None:
        """`experts`: of `layer` or its like, in chunks. Of each the first 2 MiB are taken, or one frame where more."""
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
        """Decoded bytes, by one thread while `num_threads` decode. Of some attempts the best counts, because what other
        processes take for a moment says nothing of later; or what you `pick`.

        Into memory that no cache holds, as slots are: cached memory is a fifth faster (docs/codec.md).
        """
        decode = self._decoder(num_threads)
        return pick(sum(_rates(decode, num_threads, seconds / _ATTEMPTS)) for _ in range(_ATTEMPTS)) / num_threads

    def read_processors(self, num_threads: int, paths: Iterable[Path], seconds: float = _SECONDS) -> float:
        """How many processors `num_threads` decoding threads lose while these files are read as fast as the disk can:
        the median of some attempts, with and without reads in turn. What a driver or a virtual machine's host takes
        shows in no process's account, but in what decoding loses.
        """
        decode, found = self._decoder(num_threads), []
        with _opened(paths) as files:
            read = _reader(files)

            def both(number: int, until: float) -> int:
                return decode(number, until) if number < num_threads else read(number, until)

            for _ in range(_ATTEMPTS):
                alone = sum(_rates(decode, num_threads, seconds / _ATTEMPTS))
                beside = sum(_rates(both, num_threads + NUM_READERS, seconds / _ATTEMPTS)[:num_threads])
                found.append(num_threads * (1 - beside / alone))
        return min(float(num_threads), max(0.0, statistics.median(found)))

    def _decoder(self, num_threads: int) -> Callable[[int, float], int]:
        """What each of so many threads does; see `_rates`."""
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
    """(layer, expert) of those that a sample is made of, over the whole model, from layers like the first."""
    alike = [number for number, layer in enumerate(layers) if layer == layers[0]]
    num = min(_NUM_PARTS, len(alike) * layers[0].num_experts)
    places = [part * len(alike) * layers[0].num_experts // num for part in range(num)]
    return [(alike[place // layers[0].num_experts], place % layers[0].num_experts) for place in places]


def read_sample(layers: Sequence[LayerGeometry], frames: Sequence[FrameIndex]) -> Sample:
    """Of a store that is there. Raises StoreError where it is damaged."""

    def decoded(layer: int, expert: int) -> Iterator[Bytes]:
        with contextlib.closing(ExpertFile(frames[layer].path)) as file:
            yield from (out for _, out in read_frames(file, frames[layer], [expert]))

    try:
        return Sample(layers[0], (decoded(layer, expert) for layer, expert in sampled(layers)))
    except TransferError as error:
        raise StoreError(str(error)) from None


def disk_rate_at(folder: Path) -> float:
    """Bytes a second that reads come at, of 1 MiB and several in flight, from a new file in `folder`, or in the nearest
    folder above it that exists.

    Raises StoreError where no file can be written there, TransferError where it cannot be read.
    """
    place = existing_parent(folder)
    path = place / f".expertly-{os.getpid()}-{threading.get_ident()}.scratch"
    try:
        with store_errors(place, "writing a file to measure the disk with"):
            _write_scratch(path)
        with _opened([path]) as files:
            path.unlink()  # while it is open: nothing is left of a process that is killed
            return sum(_rates(_reader(files), NUM_READERS, _SECONDS))
    finally:
        path.unlink(missing_ok=True)


def disk_rate_of(paths: Iterable[Path]) -> float:
    """The same from files that are there. Raises StoreError where they cannot be opened, TransferError where they
    cannot be read.
    """
    with _opened(paths) as files:
        return sum(_rates(_reader(files), NUM_READERS, _SECONDS))


def disk_latency_ns_of(paths: Iterable[Path]) -> int:
    """How long the reading of a page takes by itself, from files that are there. Raises as `disk_rate_of`."""
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
    """Files and the bytes of whole pages in them."""
    with contextlib.ExitStack() as stack:
        files = []
        for path in paths:
            file = stack.enter_context(contextlib.closing(ExpertFile(path)))
            files.append((file, path.stat().st_size // PAGE_NBYTES * PAGE_NBYTES))
        yield files


def _reader(files: Sequence[tuple[ExpertFile, int]]) -> Callable[[int, float], int]:
    """What a thread that reads does; see `_rates`. All of them end early when all has been read: what is read twice may
    come from some cache.
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
    """Bytes a second of each thread, over the time that all take. `work(number, until)` returns the bytes it did."""
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
    """For decoded frames, in pages that are there: at least one a thread, and more than caches of a core hold."""
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
    """Of frames that are an expert each."""
    lengths = np.array([frame.plane_nbytes for frame in frames], np.uint32)
    checksums = np.array([frame.checksum for frame in frames], np.uint64)
    return FrameIndex(Path("sample"), len(frames), 1, itemsize, frame_nbytes, frame_ends(lengths), lengths, checksums)


def _write_scratch(path: Path) -> None:
    """Incompressible bytes that are on the disk and not in the page cache."""
    block = np.random.default_rng(0).integers(0, 256, _SCRATCH_NBYTES // 16, np.uint8)
    with path.open("xb") as file:
        for _ in range(16):
            block[::4096] += 1  # no two blocks alike
            file.write(block.data)
        file.flush()
        os.fdatasync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
