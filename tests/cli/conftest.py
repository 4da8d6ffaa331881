"""The model that commands are tried on."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import pytest

from expertly.compare import worker
from tests.families import make_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("models") / "tiny", tokenizer=True)


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    """Workers of comparisons that this process runs come of one that has imported what they need, which is most of what
    a small comparison takes. Those of the commands that are processes of their own begin as a user's do.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["expertly.compare.player"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "multiprocessing", SimpleNamespace(get_context=lambda _: context))
        yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody says how wide a terminal is, unless a test does: workers of the test runner are told 80 columns."""
    monkeypatch.delenv("COLUMNS", raising=False)
