"""The same that tests of expertly count on, and commands that have the lab imported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.commands import PRELOADED, importing, start
from tests.conftest import (
    cache_folder,
    keep_collections_short,
    keep_the_code_of_libraries,
    pytest_collection_modifyitems,
    pytest_runtest_makereport,
    read_certificates_once,
)
from tests.engine.conftest import cases, copied, peers

__all__ = [
    "cache_folder",
    "cases",
    "copied",
    "keep_collections_short",
    "keep_the_code_of_libraries",
    "peers",
    "pytest_collection_modifyitems",
    "pytest_runtest_makereport",
    "read_certificates_once",
    "start",
]


@pytest.fixture(scope="session")
def imported() -> Iterator[Any]:
    """A context whose processes are forked from one that has imported what they need."""
    yield from importing(
        [*PRELOADED, "expertly_lab.cli.commands", "expertly_lab.compare.comparison", "expertly_lab.recording"]
    )
