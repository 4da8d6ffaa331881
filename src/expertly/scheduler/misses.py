"""How many of a layer's missing experts the host computes from its own memory while the others are copied."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from expertly.core.costs import HostCompute, Link
from expertly.core.geometry import Geometry


class MissSplit:
    """Divides a layer's misses so that the later of the last copy and the host's last output is as early as can be.
    `link` is measured alone, `host` while copies run.
    """

    def __init__(self, geometry: Geometry, link: Link, host: HostCompute) -> None:
        self.link = link
        self.host = host
        self._segments = geometry.segments_per_expert
        self._nbytes = [layer.expert_nbytes for layer in geometry.layers]
        self._copy_ns = [link.occupies_ns(geometry.segment_nbytes(layer)) for layer in range(geometry.num_layers)]
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
