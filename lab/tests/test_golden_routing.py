"""The same of real routing of gpt-oss-20b, which is no part of the repository; its folder is EXPERTLY_TEST_DATA/routing
(default: ../shared/data/routing beside the repository). A file of its own, so that it may run beside the others.

Half of the memories and P are left to EXPERTLY_TEST_GOLDEN=all.
"""

from __future__ import annotations

import os

import pytest

from lab.tests.golden import simulator
from lab.tests.test_golden import assert_unchanged
from tests.golden.cases import MEMORIES, SEGMENTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not simulator.ROUTING.is_file(), reason="no routing data; EXPERTLY_TEST_DATA names its folder"),
]

ALL = os.environ.get("EXPERTLY_TEST_GOLDEN") == "all"


@pytest.fixture(scope="module")
def routing(tmp_path_factory: pytest.TempPathFactory) -> simulator.Replay:
    return simulator.routing_replay(tmp_path_factory.mktemp("routing"))


@pytest.mark.parametrize(("segments", "memories"), zip(SEGMENTS, (("25%",), ("10%", "50%")), strict=True))
def test_every_system_on_real_routing(segments: int, memories: tuple[str, ...], routing: simulator.Replay) -> None:
    assert_unchanged(routing, segments, MEMORIES if ALL else memories)
