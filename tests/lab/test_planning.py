"""What deciding about prefetches takes is what the engine's own scheduler takes for it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.lab.planning import Planning
from expertly.scheduler.budget import split_budget
from expertly.scheduler.prefetch import PrefetchQueue


@pytest.mark.parametrize("segments", [1, 4])
def test_only_deciding_about_prefetches_counts_and_all_of_them(segments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers of eight experts, of which a half is kept. Each prefetched expert is made to take 2 ms."""
    load = PrefetchQueue.load

    def slow(self: PrefetchQueue, layer: int, eid: int, mask: int) -> Any:
        slept.append(layer)
        time.sleep(0.002)
        return load(self, layer, eid, mask)

    slept: list[int] = []
    monkeypatch.setattr(PrefetchQueue, "load", slow)
    shape = Geometry((LayerGeometry(8, 2, 4, 16, 3, 2),) * 3, segments)
    planning, most = Planning(shape, split_budget(shape, shape.nbytes // 2)), 0
    for _ in range(12):
        for layer in range(3):
            slept.clear()
            num, took_ns = planning.ran(layer, 2)
            assert segments * len(slept) >= num >= len(slept), "of the first pass some come in parts"
            assert took_ns > 2_000_000 * len(slept) - 500_000
            most = max(most, len(slept))
    assert most == 2, "all that was predicted"
