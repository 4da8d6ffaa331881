"""What `expertly doctor` measures of CUDA devices: their memory, the link between pinned host memory and them, and
products on the host while it copies.
"""

from __future__ import annotations

import statistics
import time

import torch

from expertly.engine.device import kind_of
from expertly.hardware.profile import DeviceProfile, LinkRate

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
