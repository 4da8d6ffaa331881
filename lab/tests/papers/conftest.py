"""Small traces with a session on them."""

from __future__ import annotations

import pytest

from expertly_lab.papers.runner import Session
from expertly_lab.papers.settings import ReproduceOptions
from lab.tests.papers.small import full_trace, imported_trace


@pytest.fixture(scope="package")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """A trace with everything that can be recorded ("full"), and routing as it is imported ("bare")."""
    folder = tmp_path_factory.mktemp("traces")
    traces = [make(folder / name).folder for make, name in ((full_trace, "full"), (imported_trace, "bare"))]
    return Session(ReproduceOptions(trace=traces, quick=True))
