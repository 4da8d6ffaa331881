"""How fast this machine decodes compressed experts, and which codec is the faster one on it."""

from __future__ import annotations

import statistics

import numpy as np
import torch
from numpy.typing import NDArray

from expertly.core.costs import CodecCosts, Link
from expertly.core.geometry import LayerGeometry
from expertly.core.resources import allowed_cpus, computing_threads, decoding_threads, granted_cpus
from expertly.engine.transfer import NUM_READERS
from expertly.hardware.profile import DecodeProfile, DecodeRate, MachineProfile
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

READ_NBYTES = 1 << 20
"""A reader's share of an expert."""

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
    """The disk under a compressed store, and what its frames cost, as they are at this moment; takes a second."""
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
    """Of those that decode, while a pass computes."""
    num_cpus = granted_cpus()
    num_computing = min(torch.get_num_threads(), computing_threads(num_cpus, NUM_READERS))
    return max(0, min(num_decoding, num_cpus - num_computing))


def _trained_like(count: int) -> NDArray[np.uint8]:
    """bfloat16 weights of a normal distribution, which is what those of trained models are nearly."""
    values = np.random.default_rng(0).standard_normal(count, np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
