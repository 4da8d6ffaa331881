"""The two rates of a roofline, of any device: weights streamed by matrix-vector products, and a large product."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn.functional import linear

_MATRIX_SHAPE = (2048, 2816)
_SQUARE = 1024
_LEAST_NBYTES = 1 << 30  # more than any device's cache


def measure_weights_rate(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """Bytes of weights a second used by products with one vector, over a gigabyte of them."""
    count = -(-_LEAST_NBYTES // (_MATRIX_SHAPE[0] * _MATRIX_SHAPE[1] * dtype.itemsize))
    matrices = [torch.full(_MATRIX_SHAPE, 0.01, dtype=dtype, device=device) for _ in range(count)]
    x = torch.ones(1, _MATRIX_SHAPE[1], dtype=dtype, device=device)
    with torch.inference_mode():
        num_rounds, elapsed = _timed(device, seconds, lambda: [linear(x, matrix) for matrix in matrices])
    return num_rounds * sum(matrix.nbytes for matrix in matrices) / elapsed


def measure_flops(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """Operations a second of products of square matrices: a multiplication and an addition are two."""
    a = torch.full((_SQUARE, _SQUARE), 0.01, dtype=dtype, device=device)
    with torch.inference_mode():
        num_products, elapsed = _timed(device, seconds, lambda: a @ a)
    return num_products * 2 * _SQUARE**3 / elapsed


def _timed(device: torch.device, seconds: float, run: Callable[[], object]) -> tuple[int, float]:
    """How often it ran, once to warm up left out, and in how many seconds."""

    def now() -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    run()
    start, count = now(), 0
    while (elapsed := now() - start) < seconds or not count:
        run()
        count += 1
    return count, elapsed
