"""Experts through the readers: right bytes at every P, and what is read again to compare it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import pytest

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Span
from expertly.engine.transfer import Readers
from expertly.store.packed import PackedStore
from tests.store.builders import PLAN, expert_bytes, write_store

pytestmark = pytest.mark.timeout(180)

LAYER = LayerGeometry(4, 2, hidden_size=64, intermediate_size=176, num_matrices=3, itemsize=2)
"""Four blocks of 44 neurons: segments of P = 8 are half a block, those of P = 11 begin in one and end in the next."""
LAYERS = (LAYER, replace(LAYER, num_experts=3), replace(LAYER, hidden_size=32))  # the last one has two blocks


class ReadBench:
    """Readers over a store of these layers, and a slot a span to look at."""

    def __init__(self, store: PackedStore, segments: int) -> None:
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
        for submitted in spans:
            self.readers.submit([submitted])
            span = self.readers.wait()
            nbytes = self.geometry.segment_nbytes(span.layer)
            whole = expert_bytes(span.layer, span.expert, self.store.manifest).tobytes()
            begin = span.segment * nbytes
            assert self.slots.pop(span) == whole[begin : begin + span.num_segments * nbytes]

    def _buffer(self, span: Span) -> memoryview:
        assert span not in self.slots
        self.slots[span] = bytearray(span.num_segments * self.geometry.segment_nbytes(span.layer))
        return memoryview(self.slots[span])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> PackedStore:
    plan = replace(PLAN, layers=LAYERS, sites=("a.x", "b.x", "c.x"))
    return write_store(tmp_path_factory.mktemp("reads") / "store", plan)


@pytest.mark.parametrize("segments", [1, 2, 4, 8, 11, 16])
def test_every_span_of_every_expert(segments: int, store: PackedStore) -> None:
    bench = ReadBench(store, segments)
    with contextlib.closing(bench.readers):
        for num_segments in {1, segments, max(1, segments // 2)}:
            for _ in range(2):
                bench.load(bench.spans(num_segments))


def test_blocks_that_are_read_again_for_their_comparison_are_counted(store: PackedStore) -> None:
    """Those that segments cut: each once, when it is first read."""
    bench, total = ReadBench(store, 8), sum(layer.nbytes for layer in LAYERS)
    with contextlib.closing(bench.readers):
        for read_nbytes in (2 * total, 3 * total):
            bench.load(bench.spans())
            assert bench.readers.stats()["disk_nbytes"] == read_nbytes
