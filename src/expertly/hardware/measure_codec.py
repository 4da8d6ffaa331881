"""How fast this machine decodes compressed experts, and which codec is the faster one on it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray

from expertly.core.codecs import (
    CodecChoice,
    CodecRates,
    DecodingRates,
    choose_codec,
    computing_threads,
    decoding_threads,
)
from expertly.core.costs import CodecCosts, Link
from expertly.core.cpus import allowed_cpus, granted_cpus
from expertly.core.errors import TransferError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.engine.device_decode import Unpacker
from expertly.engine.device_streams import Streams
from expertly.engine.frame_extents import SegmentFrames
from expertly.engine.reads import ExtentSource
from expertly.engine.transfer import NUM_READERS
from expertly.hardware.profile import DecodeProfile, DecodeRate, MachineProfile
from expertly.store.codec_rates import Sample, disk_latency_ns_of, disk_rate_of, measure_rates, read_sample
from expertly.store.frames import FrameDecoder
from expertly.store.packed import PackedStore
from expertly.store.reader import ExpertFile

READ_NBYTES = 1 << 20
"""A reader's share of an expert."""

_COPIES = 8
"""Queued together where a device is measured."""

_LAYER = LayerGeometry(1, 1, hidden_size=1024, intermediate_size=1408, num_matrices=3, itemsize=2)


def measure_decoding(seconds: float) -> DecodeProfile:
    """By one thread, by as many as decode while a forward pass waits, and by all readers; `seconds` each."""
    sample = Sample(_LAYER, [[_trained_like(_LAYER.expert_nbytes // 2)]])
    threads = sorted({1, decoding_threads(allowed_cpus(), NUM_READERS), NUM_READERS})
    rates = tuple(DecodeRate(n, sample.decode_nbytes_per_s(n, seconds) * n) for n in threads)
    return DecodeProfile(sample.ratio, rates)


def machine_costs(profile: MachineProfile) -> CodecCosts:
    """Of weights as they were measured."""
    threads = decoding_threads(profile.num_cpus, NUM_READERS)
    rates = {rate.num_threads: rate.nbytes_per_s for rate in profile.decoding.rates}
    return CodecCosts(profile.decoding.ratio, rates[threads] / threads, threads, _threads_beside(threads))


def machine_choice(profile: MachineProfile) -> CodecChoice:
    """What `codec=auto` would be for such weights on the disk of the profile. Raises ConfigError where it has none."""
    costs = machine_costs(profile)
    disk_rate = profile.disk_nbytes_per_s(READ_NBYTES)
    return choose_codec(CodecRates(costs.ratio, disk_rate, costs.decode_nbytes_per_s, costs.threads))


def store_costs(store: PackedStore) -> tuple[Link, CodecCosts]:
    """The disk under a compressed store, and what its frames cost, as they are at this moment (`best_costs` are those
    that count for later); takes a second.
    """
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


def best_costs(store: PackedStore) -> tuple[float, CodecCosts]:
    """The rate of the disk under a compressed store, and what its frames cost where nothing else runs; takes half a
    second.
    """
    sample = read_sample(store.manifest.layers, store.frames)
    rates = measure_rates(sample, disk_rate_of(path for path, _ in store.extents))
    return rates.disk_nbytes_per_s, CodecCosts(store.ratio, rates.decode_nbytes_per_s, rates.num_threads)


def _threads_beside(num_decoding: int) -> int:
    """Of those that decode, while a pass computes."""
    num_cpus = granted_cpus()
    num_computing = min(torch.get_num_threads(), computing_threads(num_cpus, NUM_READERS))
    return max(0, min(num_decoding, num_cpus - num_computing))


def decoding_rates(store: PackedStore, device: torch.device) -> DecodingRates:
    """Of a compressed store's frames, on a CUDA device and on the host; takes a second. Raises ConfigError where the
    device cannot decode, TransferError where it does not make the bits that the host makes.
    """
    from expertly.engine.backend_cuda import CudaStreams
    from expertly.engine.nvcomp_decoder import NvcompDecoder

    streams = CudaStreams(device)
    decoder = NvcompDecoder(device, streams.copy_handle, streams.mark_copy, streams.is_past)
    geometry = store.geometry()
    frames = SegmentFrames(store, geometry)
    on_device = OnDevice(streams, Unpacker(frames, geometry, decoder, device), frames, geometry, device)
    link, unpacking = on_device.measure(store)
    _, costs = best_costs(store)
    decoding = max(1e-12, 1 / unpacking - costs.ratio / link)  # of unpacking, what is not copying
    return DecodingRates(costs.ratio, link, costs.all_nbytes_per_s, 1 / decoding)


class OnDevice:
    """An expert of the first layer, as it is stored, in pinned memory, and a place for it on the device."""

    def __init__(
        self, streams: Streams, unpacker: Unpacker, frames: SegmentFrames, geometry: Geometry, device: torch.device
    ) -> None:
        self._streams, self._unpacker = streams, unpacker
        self._frames = frames.of(0, 0, 0, geometry.segments_per_expert)
        self._cover = torch.empty(self._frames.cover_nbytes, dtype=torch.uint8)
        self._there = torch.empty(self._frames.num_bytes, dtype=torch.uint8, device=device)

    def measure(self, store: ExtentSource, seconds: float = 0.2) -> tuple[float, float]:
        """Bytes a second that copies reach, and bytes of weights a second of copying and decoding one after the other;
        `seconds` each. Raises TransferError where the store cannot be read, or the device makes other bits of it than
        the host.
        """
        file = ExpertFile(store.layer_extent(0)[0])
        try:
            file.read_into(self._frames.cover_begin, [self._cover.numpy().data])
        finally:
            file.close()
        nbytes = min(len(self._cover), len(self._there))
        unpin = self._streams.register(self._cover)
        try:
            copying = self._rate(lambda: self._copy(nbytes), nbytes, seconds)
            unpacking = self._rate(self._unpack, len(self._there), seconds)
            self._check()
            return copying, unpacking
        finally:
            unpin()

    def _check(self) -> None:
        expected = torch.empty(self._frames.num_bytes, dtype=torch.uint8)
        self._frames.decode(FrameDecoder(), self._cover.numpy().data, expected.numpy().data)
        if not torch.equal(self._there.cpu(), expected):
            raise TransferError(f"{self._frames.index.path}: the device decodes an expert to other bits than the host")

    def _copy(self, nbytes: int) -> None:
        self._there[:nbytes].copy_(self._cover[:nbytes], non_blocking=True)

    def _unpack(self) -> None:
        self._unpacker.unpack(0, 0, 0, self._cover, self._there)

    def _rate(self, work: Callable[[], None], nbytes: int, seconds: float) -> float:
        """The best of some batches; the first one, which may wait for sizes, does not count."""
        best, begin = 0.0, time.perf_counter()
        for number in count():
            start = time.perf_counter()
            for _ in range(_COPIES):
                self._streams.run(work, [])
            self._streams.synchronize()
            end = time.perf_counter()
            if number:
                best = max(best, _COPIES * nbytes / (end - start))
                if end - begin >= seconds:
                    break
        return best


def _trained_like(count: int) -> NDArray[np.uint8]:
    """bfloat16 weights of a normal distribution, which is what those of trained models are nearly."""
    values = np.random.default_rng(0).standard_normal(count, np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
