"""A recording that stops anywhere opens, holds whole iterations, and nothing twice."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from expertly_lab.trace.reader import Trace
from lab.tests.trace.builders import FULL, assert_holds, iterations, open_writer, random_rows, write_partial

ROOT = Path(__file__).resolve().parents[3]

RECORD = """
import itertools, sys
from pathlib import Path
from lab.tests.trace.builders import open_writer, random_rows

writer = open_writer(Path(sys.argv[1]), 64)
for number in itertools.count():
    if number % 50 == 0:
        writer.begin_request(prompt="x" * 100)
    writer.append(random_rows(1 + number % 5, number))
"""


def test_a_killed_recording_ends_with_its_last_shard(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    child = subprocess.Popen([sys.executable, "-c", RECORD, str(folder)], cwd=ROOT)
    try:
        while not (folder / "rows-00003.safetensors").exists():
            assert child.poll() is None
            time.sleep(0.01)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    trace = Trace.open(folder)
    assert not trace.is_complete and trace.num_rows >= 3 * 64
    assert_holds(trace, [random_rows(1 + number % 5, number) for number in range(trace.num_iterations)])
    request, iteration = (trace.rows(name, 0, trace.num_rows) for name in ("request", "iteration"))
    np.testing.assert_array_equal(request, iteration // 50)
    assert sum(request.num_rows for request in trace.requests) == trace.num_rows


@pytest.mark.parametrize("fields", [(), FULL], ids=["small", "full"])
def test_an_interrupted_recording_holds_all_that_was_appended(tmp_path: Path, fields) -> None:
    rows = iterations([3, 5, 2, 4, 1], fields)
    trace = Trace.open(write_partial(tmp_path / "trace", rows, 8, fields))
    assert not trace.is_complete and [request.category for request in trace.requests] == ["code"]
    assert_holds(trace, rows)


def test_every_step_of_a_shard_leaves_whole_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is copied before and after every change of a name, and after every flush to the disk."""
    folder = tmp_path / "trace"
    rows = iterations([3, 1, 4, 8, 2, 20, 1, 1])
    copies: list[Path] = []

    def copying(function):
        def wrapped(*args, **kwargs):
            for step in (lambda: None, lambda: function(*args, **kwargs)):
                step()
                copies.append(tmp_path / f"copy-{len(copies)}")
                shutil.copytree(folder, copies[-1])

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", copying(Path.replace))
        patch.setattr(os, "fsync", copying(os.fsync))
        with open_writer(folder, 8) as writer:
            writer.begin_request()
            for row in rows:
                writer.append(row)
    held = []
    for path in copies:
        if (path / "manifest.json").exists():
            trace = Trace.open(path)
            assert_holds(trace, rows[: trace.num_iterations])
            held.append(trace.num_iterations)
    assert len(copies) > 30 and held == sorted(held) and set(held) == {0, 3, 4, 6, 8}
