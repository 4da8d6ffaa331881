"""Missing experts that the host's processors compute from the RAM behind a device, while others are copied to it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from expertly.core.costs import HostCompute, Link
from expertly.core.geometry import Geometry
from expertly.core.messages import RouterRan, Span
from expertly.engine.compute import LayerCall, LayerCompute, Part, part_of
from expertly.native.kernels import choose_kernels

if TYPE_CHECKING:
    from expertly.engine.cuda import CudaDevice

MEASURED_NBYTES = 256 << 20
"""Of weights, and of what is copied: more than caches hold."""

_SHAPE = 2048, 2816
_NUM_WEIGHTS = 2048 * 2816
_NUM_TOKENS = 16

_CALL_NS = 100_000
"""Assumed, once a layer: hidden states come to the host, its threads wake up, outputs go back."""


class HostSide:
    """The loop's Host. One thread calls the kernels, which have threads of their own; only hidden states leave the
    device, and only outputs come back. The forward thread queues both copies and waits for no kernel.
    """

    def __init__(self, device: CudaDevice, layers: Sequence[LayerCompute]) -> None:
        """`layers` compute on the slots of the device's host tier."""
        self.call: LayerCall | None = None
        """The running layer on the device, which takes the outputs."""
        self._device = device
        self._layers = layers
        self._thread = ThreadPoolExecutor(1, "expertly-host")
        self._begun: tuple[Part, Future[torch.Tensor]] | None = None

    def begin(self, router: RouterRan, experts: Sequence[int]) -> None:
        call, device = self.call, self._device
        assert call is not None
        hidden, mark = device.to_host_later(call.hidden)
        spans = device.hold(router.layer, experts)
        nothing = [0] * len(experts), [False] * len(experts)
        chosen = RouterRan(router.layer, list(experts), *nothing, router.batch_tokens)
        part = part_of(call.work, chosen, range(max(experts) + 1), device.torch_device)
        compute = self._layers[router.layer]
        self._begun = part, self._thread.submit(self._compute, compute, part, spans, hidden, mark)

    def end(self) -> None:
        assert self._begun is not None and self.call is not None
        (part, future), device = self._begun, self._device
        begin = None if future.done() else device.stamp()
        outputs = device.to_device(future.result())
        self.call.outputs.index_copy_(0, part.rows, outputs)
        self._begun = None
        if begin is not None:
            device.waits.append((begin, device.stamp()))

    def drain(self) -> None:
        """Wait until nothing is computed, and forget it."""
        if self._begun is not None:
            with contextlib.suppress(Exception):
                self._begun[1].result()
        self._begun = self.call = None

    def close(self) -> None:
        """End the thread. Idempotent."""
        self.drain()
        self._thread.shutdown()
        self._layers = []

    def _compute(
        self, compute: LayerCompute, part: Part, spans: Sequence[Span], hidden: torch.Tensor, mark: Any
    ) -> torch.Tensor:
        """In the thread."""
        with torch.inference_mode():
            self._device.reach(mark)
            call = LayerCall(compute, part.work, hidden)
            call.compute(spans)
            return call.outputs


# -- how many misses it computes ---------------------------------------------------------------------------------------


class MissSplit:
    """Divides a layer's misses so that the later of the last copy and the host's last output is as early as can be.
    `link` is measured alone, `host` while copies run.
    """

    def __init__(self, geometry: Geometry, link: Link, host: HostCompute) -> None:
        self.link = link
        self.host = host
        self._segments = geometry.segments_per_expert
        self._nbytes = [layer.expert_nbytes for layer in geometry.layers]
        nbytes = map(geometry.segment_nbytes, range(geometry.num_layers))
        self._copy_ns = [link.latency_ns + link.occupies_ns(num) for num in nbytes]
        self._row_nbytes = [layer.hidden_size * layer.itemsize for layer in geometry.layers]
        sizes = [(layer.num_matrices, layer.hidden_size, layer.intermediate_size) for layer in geometry.layers]
        self._operations = [2 * matrices * hidden * width for matrices, hidden, width in sizes]  # for a token

    def expert_ns(self, layer: int, num_tokens: int) -> float:
        """How long the host takes for an expert that serves so many tokens."""
        reading = self._nbytes[layer] / self.host.nbytes_per_s
        return max(reading, max(1, num_tokens) * self._operations[layer] / self.host.flops_per_s) * 1e9

    def host_ns(self, layer: int, tokens: Sequence[int], batch_tokens: int) -> int:
        """How long it takes for such experts of a layer that runs `batch_tokens`, with the rows that come and go."""
        return round(self._ends_ns(layer, tokens, batch_tokens)[-1])

    def num_on_host(self, layer: int, tokens: Sequence[int], batch_tokens: int, num_coming: int) -> int:
        """How many of the first of these missing experts, which serve so many tokens each, the host is to compute: the
        fewest with which the layer ends earliest. `num_coming`: segments that are copied beside them in any case.
        """
        copy_ns, host_ns = self._copy_ns[layer], self._ends_ns(layer, tokens, batch_tokens)

        def end_ns(num: int) -> float:
            copied_ns = copy_ns * (num_coming + (len(tokens) - num) * self._segments)
            return max(copied_ns * self.host.link_slowdown, host_ns[num]) if num else copied_ns

        return min(range(len(host_ns)), key=end_ns)

    def _ends_ns(self, layer: int, tokens: Sequence[int], batch_tokens: int) -> list[float]:
        """When the host has computed none of these experts, the first, the first two, ..."""
        row_ns = self._row_nbytes[layer] / self.link.nbytes_per_s * 1e9
        each = [self.expert_ns(layer, num) + num * row_ns for num in tokens]
        return list(accumulate(each, initial=self.host.call_ns + batch_tokens * row_ns))


# -- what both ways cost ---------------------------------------------------------------------------------------------


def measure_misses(
    dtype: torch.dtype, copy: Callable[[], object], copy_nbytes: int, seconds: float = 0.15
) -> tuple[Link, HostCompute]:
    """The link alone, then copies and products on the host at once, of one token and of several, each for so many
    seconds. `copy` copies so many bytes to the device, and returns when they are there.
    """
    weights = torch.full((MEASURED_NBYTES // (_NUM_WEIGHTS * dtype.itemsize), *_SHAPE), 0.01, dtype=dtype)
    kernels, width = choose_kernels(), _SHAPE[1]
    taken = kernels.most_tokens(dtype)
    most = min(_NUM_TOKENS, taken or _NUM_TOKENS)
    x = torch.ones(most, width, dtype=dtype)

    @torch.inference_mode()
    def multiply(matrix: torch.Tensor, num_tokens: int) -> None:
        if taken:
            out = x.new_empty(1, num_tokens, len(matrix))
            kernels.dots((matrix.data_ptr(), 0, num_tokens, 0), x, out, width * dtype.itemsize)
        else:
            torch.nn.functional.linear(x[:num_tokens], matrix)

    def rate(call: Callable[[int], object], is_over: Callable[[], bool]) -> float:
        """Calls a second; at least one is made."""
        num, begin = 0, time.perf_counter()
        while not num or not is_over():
            call(num)
            num += 1
        return num / (time.perf_counter() - begin)

    def copies() -> float:
        """Bytes a second."""
        end = time.perf_counter() + seconds
        return copy_nbytes * rate(lambda _: copy(), lambda: time.perf_counter() >= end)

    def both(num_tokens: int) -> tuple[float, float]:
        """Bytes copied and weights multiplied a second."""
        is_over = threading.Event()
        products = pool.submit(rate, lambda i: multiply(weights[i % len(weights)], num_tokens), is_over.is_set)
        try:
            copied = copies()
        finally:
            is_over.set()
        return copied, products.result() * _NUM_WEIGHTS

    with ThreadPoolExecutor(1) as pool:
        pool.submit(multiply, weights[0], 1).result()  # its threads have begun
        copy()
        alone = copies()
        beside, weights_per_s = both(1)
        _, of_several = both(most)
    slowdown = max(1.0, alone / beside)
    return Link(alone, 0), HostCompute(weights_per_s * dtype.itemsize, 2 * most * of_several, _CALL_NS, slowdown)
