"""A store of compressed experts of any shape, and readers over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Span
from expertly.engine.transfer import Readers
from expertly.store.manifest import Manifest
from expertly.store.packed import PackedStore
from expertly.store.writer import StoreWriter
from tests.store.builders import DENSE, dense_chunks, weights

LAYER = LayerGeometry(4, 2, hidden_size=64, intermediate_size=176, num_matrices=3, itemsize=2)
"""Four frames of 44 neurons: segments of P = 8 are half a frame, those of P = 11 begin in one and end in the next."""
LAYERS = (LAYER, replace(LAYER, num_experts=3), replace(LAYER, hidden_size=32))  # the last one has two frames


def content(layer: int, expert: int, layers: Sequence[LayerGeometry] = LAYERS) -> NDArray[np.uint8]:
    """The bytes of an expert."""
    return weights("normal", "bfloat16", layers[layer].expert_nbytes // 2, seed=100 * layer + expert)


def write_store(folder: Path, layers: tuple[LayerGeometry, ...] = LAYERS, codec: str = "planes") -> PackedStore:
    """A store of such experts."""
    sites = tuple(f"site.{number}" for number in range(len(layers)))
    plan = Manifest("0" * 64, "/somewhere", "toy", "bfloat16", layers, sites, {}, codec=codec)
    with StoreWriter(folder, plan, DENSE, None) as writer:
        for number, layer in enumerate(layers):
            writer.write_layer(number, [content(number, expert, layers) for expert in range(layer.num_experts)])
        writer.write_dense(dense_chunks)
        writer.write_file("config.json", b'{"model_type": "toy"}')
        return writer.finish()


class FrameBench:
    """Readers over such a store, and a slot a span to look at."""

    def __init__(self, store: PackedStore, segments: int = 1) -> None:
        self.store = store
        self.geometry = Geometry(store.manifest.layers, segments)
        self.slots: dict[Span, bytearray] = {}
        self.readers = Readers(store, self.geometry, self._buffer)

    def spans(self, num_segments: int = 1) -> list[Span]:
        """All there are of so many neighbouring segments."""
        count = self.geometry.segments_per_expert
        return [
            Span(layer, expert, segment, num_segments, 0)
            for layer, shape in enumerate(self.geometry.layers)
            for expert in range(shape.num_experts)
            for segment in range(0, count - num_segments + 1, num_segments)
        ]

    def load(self, spans: Sequence[Span]) -> None:
        """One after the other, and each is right."""
        for span in spans:
            self.readers.submit([span])
            self.check(self.readers.wait())

    def check(self, span: Span) -> None:
        """Its slot holds what it must."""
        nbytes = self.geometry.segment_nbytes(span.layer)
        whole = content(span.layer, span.expert, self.geometry.layers).tobytes()
        begin = span.segment * nbytes
        assert self.slots.pop(span) == whole[begin : begin + span.num_segments * nbytes]

    def _buffer(self, span: Span) -> memoryview:
        assert span not in self.slots
        self.slots[span] = bytearray(span.num_segments * self.geometry.segment_nbytes(span.layer))
        return memoryview(self.slots[span])
