"""Experts through the readers: right bytes at every P, and what is read again to compare it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Span
from expertly.engine.transfer import Readers
from expertly.store.packed import PackedStore
from tests.store.builders import PLAN, expert_bytes, write_store

LAYER = LayerGeometry(4, 2, hidden_size=64, intermediate_size=176, num_matrices=3, itemsize=2)
"""Four blocks of 44 neurons: segments of P = 8 are half a block, those of P = 11 begin in one and end in the next."""
LAYERS = (LAYER, replace(LAYER, num_experts=3), replace(LAYER, hidden_size=32))  # the last one has two blocks


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> PackedStore:
    plan = replace(PLAN, layers=LAYERS, sites=("a.x", "b.x", "c.x"))
    return write_store(tmp_path_factory.mktemp("reads") / "store", plan)


def load_all(store: PackedStore, segments: int, *lengths: int) -> Iterator[Readers]:
    """Load all there are of so many neighbouring segments, one after the other, each of which is right."""
    geometry, slots = Geometry(LAYERS, segments), dict[Span, bytearray]()

    def slot(span: Span) -> memoryview:
        slots[span] = bytearray(span.num_segments * geometry.segment_nbytes(span.layer))
        return memoryview(slots[span])

    with contextlib.closing(Readers(store.layer_file, geometry, slot)) as readers:
        for length in lengths:
            for layer, shape in enumerate(LAYERS):
                nbytes = geometry.segment_nbytes(layer)
                for expert in range(shape.num_experts):
                    whole = expert_bytes(layer, expert, store.manifest).tobytes()
                    for segment in range(0, segments - length + 1, length):
                        span = Span(layer, expert, segment, length, 0)
                        readers.submit([span])
                        assert readers.wait() == span
                        assert slots[span] == whole[segment * nbytes : (segment + length) * nbytes]
            yield readers


@pytest.mark.parametrize("segments", [1, 2, 4, 8, 11, 16])
def test_every_span_of_every_expert(segments: int, store: PackedStore) -> None:
    for _ in load_all(store, segments, 1, 1, segments, max(1, segments // 2)):
        pass


def test_blocks_that_are_read_again_for_their_comparison_are_counted(store: PackedStore) -> None:
    """Those that segments cut: each once, when it is first read."""
    total = sum(layer.nbytes for layer in LAYERS)
    assert [readers.stats()["disk_nbytes"] for readers in load_all(store, 8, 1, 1)] == [2 * total, 3 * total]
