"""The memory of the slots: one region a size class, page aligned, given back when nothing refers to it."""

from __future__ import annotations

import mmap

import torch

from expertly.core.geometry import Geometry
from expertly.engine.numa import MemoryNode


def layer_view(flat: torch.Tensor, geometry: Geometry, layer: int, dtype: torch.dtype) -> torch.Tensor:
    """A size class's bytes seen as rows of `layer`, [S * I/P, M, H]."""
    shape = geometry.layers[layer]
    return flat.view(dtype).view(-1, shape.num_matrices, shape.hidden_size)


class HostPool:
    """Slots in RAM, readable and writable as bytes (for reads from disk) and as tensors (for computing).

    Pages are taken by the process when they are first written, so a pool costs what has been loaded; from `node`, where
    one is given.
    """

    def __init__(
        self,
        geometry: Geometry,
        slots_per_class: list[int],
        segment_nbytes: list[int],
        dtype: torch.dtype,
        node: MemoryNode | None = None,
    ) -> None:
        self._geometry = geometry
        self._segment_nbytes = segment_nbytes
        self._buffers: list[memoryview] = []
        self._views: list[torch.Tensor] = []
        self._flats: list[torch.Tensor] = []
        for num_slots, nbytes in zip(slots_per_class, segment_nbytes, strict=True):
            region = mmap.mmap(-1, max(num_slots * nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                region.madvise(mmap.MADV_HUGEPAGE)
            flat = torch.frombuffer(region, dtype=torch.uint8, count=num_slots * nbytes or mmap.PAGESIZE)
            if node is not None:
                node.bind(flat.data_ptr(), len(region))
            self._buffers.append(memoryview(region))
            self._flats.append(flat)
        for layer, size_class in enumerate(geometry.size_classes):
            used = slots_per_class[size_class] * segment_nbytes[size_class]
            self._views.append(layer_view(self._flats[size_class][:used], geometry, layer, dtype))

    def rows(self, layer: int) -> torch.Tensor:
        """The slots as rows of this layer's shape, [S * I/P, M, H]: slot s is rows [s * I/P, (s+1) * I/P)."""
        return self._views[layer]

    def buffer(self, layer: int, slot: int, num_slots: int) -> memoryview:
        """The bytes of `num_slots` neighbouring slots."""
        size_class = self._geometry.size_classes[layer]
        nbytes = self._segment_nbytes[size_class]
        return self._buffers[size_class][slot * nbytes : (slot + num_slots) * nbytes]

    def memory(self) -> list[torch.Tensor]:
        """The regions as bytes, one a size class."""
        return self._flats
