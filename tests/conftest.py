"""What every test may count on: no network, a cache folder of its own, few threads; gpu tests skip without a device."""

from __future__ import annotations

import gc
import os
import re
import signal
import ssl
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from expertly.engine import process
from tests import commands
from tests.commands import imported, start

__all__ = ["imported", "start"]

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start
torch.set_num_threads(1)  # it is imported: threads of two workers would spin on processors that neither has
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background job: tests would wait for interrupts
    signal.signal(signal.SIGINT, signal.default_int_handler)
re._MAXCACHE = 1 << 16  # type: ignore[attr-defined]  # each loading asks for hundreds of patterns, more than it keeps
process.keep_off_trapped_instructions()  # before any reference model multiplies


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this run's packed stores go."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["EXPERTLY_CACHE"] = str(folder)
    return folder


@pytest.fixture(autouse=True, scope="session")
def keep_the_code_of_libraries() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        commands.keep_the_code_of_libraries(patch.setattr)
        yield


@pytest.fixture(autouse=True, scope="session")
def keep_stores_in_the_page_cache() -> Iterator[None]:
    """Nothing here has to outlive a power cut, and waiting for the disk was most of what packing a tiny model took."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def read_certificates_once() -> Iterator[None]:
    """Each client does, which took longer than what it asks for, and none here asks over TLS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture(autouse=True, scope="module")
def keep_collections_short() -> None:
    """Leave what is there by now out of later collections of garbage: `expertly.load` collects, and looking through all
    that libraries and the tests themselves have made took most of its time.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that is skipped fails where the reason has a word of EXPERTLY_TEST_REQUIRES."""
    report = yield
    required = [word for word in os.environ.get("EXPERTLY_TEST_REQUIRES", "").split(",") if word]
    if report.skipped and isinstance(report.longrepr, tuple) and any(word in report.longrepr[2] for word in required):
        report.outcome, report.longrepr = "failed", f"{item.nodeid}: not to be skipped here: {report.longrepr[2]}"
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
