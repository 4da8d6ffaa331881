"""The simulator counts what it counted when the golden files were written (lab/tests/golden/record.py).

Of the memories and P two run here, others on real routing (test_golden_routing.py); all of them, on both
traces, with EXPERTLY_TEST_GOLDEN=all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from lab.tests.golden import simulator
from tests.golden.cases import MEMORIES, SEGMENTS, case_name, differences, read_cases, system_of


def assert_unchanged(replay: simulator.Replay, segments: int, memories: Sequence[str] = MEMORIES) -> None:
    endings = tuple(case_name("", memory, segments) for memory in memories)
    cases = read_cases(replay.file, simulator.FOLDER)
    recorded = {name: case for name, case in cases.items() if name.endswith(endings)}
    systems = list(dict.fromkeys(system_of(name) for name in recorded))
    assert len(recorded) >= 20 * len(memories), "some twenty systems"
    different = differences(recorded, simulator.simulate(replay, systems, segments, memories))
    assert not different, "\n".join(["", *different])


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> simulator.Replay:
    return simulator.demo_replay(tmp_path_factory.mktemp("demo"))


ALL = os.environ.get("EXPERTLY_TEST_GOLDEN") == "all"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("segments", "memory"), zip(SEGMENTS, ("50%", "10%"), strict=True))
def test_every_system_on_the_demo_model(segments: int, memory: str, demo: simulator.Replay) -> None:
    assert_unchanged(demo, segments, MEMORIES if ALL else [memory])


def test_what_differs_is_named() -> None:
    """A file that was recorded, and the same with one number changed and one case left out."""
    recorded = read_cases("simulator-demo.json", simulator.FOLDER)
    result = {name: dict(case) for name, case in recorded.items()}
    result["lru 25% P=1"]["hits"] += 1
    del result["lfu 50% P=4"]
    hits = recorded["lru 25% P=1"]["hits"]
    assert differences(recorded, result) == [
        f"lru 25% P=1: hits: recorded {hits}, now {hits + 1}",
        "lfu 50% P=4: did not run",
    ]
    assert differences(recorded, recorded) == []


def test_every_system_could_run() -> None:
    assert not [name for name, case in read_cases("simulator-demo.json", simulator.FOLDER).items() if "error" in case]
