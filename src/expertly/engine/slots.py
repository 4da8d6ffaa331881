"""Slots in RAM, which experts are read into."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from expertly.core.geometry import Geometry


class HostPool:
    """Slots in RAM, one region for each size class, as bytes (to read into) and as tensors (to compute with).

    The process takes pages when they are first written, so a pool costs only what has been loaded. Memory is freed when
    nothing refers to it.
    """

    def __init__(
        self, geometry: Geometry, slots_per_class: Sequence[int], segment_nbytes: Sequence[int], dtype: torch.dtype
    ) -> None:
        """Raises OSError where the system does not give so much."""
        sizes = [num * nbytes for num, nbytes in zip(slots_per_class, segment_nbytes, strict=True)]
        self.regions = [_mapped(max(size, mmap.PAGESIZE)) for size in sizes]
        """The memory as bytes, one region a size class."""
        self._size_classes = geometry.size_classes
        flats = [region[:size] for region, size in zip(self.regions, sizes, strict=True)]
        self._rows = [layer_rows(flats[c], geometry, layer, dtype) for layer, c in enumerate(geometry.size_classes)]

    def rows(self, layer: int) -> torch.Tensor:
        """The slots as rows of this layer's shape, [S * I/P, M, H]: slot s is rows [s * I/P, (s+1) * I/P). In a weight
        format, blocks as bytes, [S * I/P/block_size, block_nbytes].
        """
        return self._rows[layer]

    def memory(self, layer: int) -> memoryview:
        """The same as bytes, for readers."""
        return self.regions[self._size_classes[layer]].numpy().data

    def close(self) -> None:
        """Drop the memory. Idempotent."""
        self.regions, self._rows = [], []


def _mapped(nbytes: int) -> torch.Tensor:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def layer_rows(flat: torch.Tensor, geometry: Geometry, layer: int, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of a size class as `HostPool.rows` of a layer."""
    shape = geometry.layers[layer]
    if shape.format:
        return flat.view(-1, shape.block_nbytes)
    return flat.view(dtype).view(-1, shape.num_matrices, shape.hidden_size)
