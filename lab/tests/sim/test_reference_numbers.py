"""Hit rates of real routing: those of a loop that is nothing like the simulator, and some computed elsewhere.

The data is not part of the repository; its folder is EXPERTLY_TEST_DATA (default: ../shared/data beside it).
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from expertly.cli.main import main
from expertly.scheduler.counters import PhaseCounters
from expertly.scheduler.systems import SYSTEMS
from expertly_lab.sim.hardware import Hardware
from expertly_lab.sim.schedule import Selection
from expertly_lab.sim.study import Memory, Study
from expertly_lab.trace.reader import Trace
from lab.tests.sim.drive import make_study
from tests.tables import IS_FULL

REPOSITORY = Path(__file__).resolve().parents[3]
DATA = Path(os.environ.get("EXPERTLY_TEST_DATA", REPOSITORY.parent / "shared" / "data")) / "routing"

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="no routing data; EXPERTLY_TEST_DATA names its folder")

Experts = npt.NDArray[np.uint16]


def imported(folder: Path, name: str) -> Trace:
    source = DATA / "deepseek_v2_lite_esft" / f"{name}.npz"
    assert main(["lab", "trace", "import", str(source), str(folder), "--geometry", "deepseek-v2-lite"]) == 0
    return Trace.open(folder)


def hit_rate(study: Study, system: str, capacity: int) -> float:
    """In decode, of one system with so many experts kept a layer."""
    counters = PhaseCounters()
    budget = Memory(f"{capacity}/layer", capacity).budget(study.geometry)
    for layer in study.simulate(SYSTEMS[system], budget).scheduler.counters:
        counters.add(layer.decode)
    result = counters.rates()["hit_rate"]
    assert result is not None
    return result


def naive_hit_rate(experts: Experts, capacity: int, policy: str) -> float:
    """Mean over layers; experts [T, L, K]. One cache a layer that holds `capacity` experts, everything scanned anew.

    Belady keeps, of what was kept and what was needed, what is needed again soonest.
    """
    num_tokens, num_layers, top_k = experts.shape
    hits = 0
    for layer in range(num_layers):
        rows: list[list[int]] = experts[:, layer].tolist()
        uses: dict[int, list[int]] = {}
        for token, row in enumerate(rows):
            for expert in row:
                uses.setdefault(expert, []).append(token)
        place = dict.fromkeys(uses, 0)
        cache: list[int] = []  # LRU: the most recently used last
        count: dict[int, int] = {}
        for row in rows:
            hits += sum(expert in cache for expert in row)
            for expert in row:
                place[expert] += 1
            if policy == "belady":
                next_use = {e: uses[e][place[e]] if place[e] < len(uses[e]) else num_tokens + e for e in {*cache, *row}}
                cache = sorted(next_use, key=lambda expert: next_use[expert])[:capacity]
                continue
            for expert in row:
                if expert not in cache:
                    if len(cache) == capacity:
                        rest = [each for each in cache if each not in row]
                        victim = min(rest, key=lambda value: (count[value], value)) if policy == "lfu" else rest[0]
                        cache.remove(victim)
                    cache.append(expert)
            for expert in sorted(row):
                count[expert] = count.get(expert, 0) + 1
                cache.remove(expert)
                cache.append(expert)
    return hits / (num_tokens * num_layers * top_k)


@pytest.mark.parametrize("capacity", [16, 32])
def test_real_routing_hits_as_a_naive_loop_says(capacity: int, tmp_path: Path) -> None:
    trace, num_tokens = imported(tmp_path / "trace", "law"), 250
    study = make_study(trace, Hardware.read("rtx3090"), selection=Selection(num_tokens=num_tokens))
    experts = trace.rows("experts", 0, num_tokens)
    for policy in ("lru", "lfu", "belady"):
        result = hit_rate(study, policy, capacity)
        assert result == pytest.approx(naive_hit_rate(experts, capacity, policy), abs=1e-3), policy


@pytest.mark.slow
@pytest.mark.skipif(not IS_FULL, reason="a minute, with EXPERTLY_TEST_FULL=1")
def test_translation_in_full(tmp_path: Path) -> None:
    """8 000 tokens at a quarter of each layer's experts: the loop and a simulation say what was computed elsewhere."""
    trace, num_tokens = imported(tmp_path / "trace", "translation"), 8000
    study = make_study(trace, Hardware.read("rtx3090"), selection=Selection(num_tokens=num_tokens))
    for system, expected in {"lru": 0.619, "lfu": 0.666, "belady": 0.790}.items():
        actual = naive_hit_rate(trace.rows("experts", 0, num_tokens), 16, system)
        assert actual == pytest.approx(expected, abs=0.005), system
        assert hit_rate(study, system, 16) == pytest.approx(actual, abs=0.005), system
