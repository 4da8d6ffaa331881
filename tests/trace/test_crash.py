"""A recording that stops anywhere opens up to its last complete iteration, and holds nothing twice."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from expertly.trace.reader import Trace
from tests.trace.builders import FULL, assert_holds, iterations, open_writer, random_rows, write_partial

ROOT = Path(__file__).resolve().parents[2]

RECORD = """
import itertools, sys
from pathlib import Path
from tests.trace.builders import open_writer, random_rows

writer = open_writer(Path(sys.argv[1]), 64)
for number in itertools.count():
    if number % 50 == 0:
        writer.begin_request(prompt="x" * 100)
    writer.append(random_rows(1 + number % 5, number))
"""


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_recording_opens_up_to_its_last_iteration(tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "trace"
    child = subprocess.Popen([sys.executable, "-c", RECORD, str(folder)], cwd=ROOT)
    try:
        while not (folder / "rows-00000.safetensors").exists():
            assert child.poll() is None
            time.sleep(0.01)
        time.sleep(random.Random(seed).uniform(0, 0.3))
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    trace = Trace.open(folder)
    assert not trace.is_complete and trace.num_iterations > 10
    assert_holds(trace, [random_rows(1 + number % 5, number) for number in range(trace.num_iterations)])
    request = trace.rows("request", 0, trace.num_rows)
    iteration = trace.rows("iteration", 0, trace.num_rows)
    np.testing.assert_array_equal(request, iteration // 50)
    assert sum(one.num_rows for one in trace.requests) == trace.num_rows


def test_every_step_of_a_shard_leaves_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is copied before and after every change of a name, and after every flush to the disk."""
    folder = tmp_path / "trace"
    rows = iterations([3, 1, 4, 8, 2, 20, 1, 1])
    copies: list[tuple[Path, int]] = []
    writer = None

    def copy() -> None:
        if writer is not None:
            copies.append((tmp_path / f"copy-{len(copies)}", writer.num_iterations))
            shutil.copytree(folder, copies[-1][0])

    def copying(function):
        def wrapped(*args, **kwargs):
            copy()
            result = function(*args, **kwargs)
            copy()
            return result

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", copying(Path.replace))
        patch.setattr(Path, "unlink", copying(Path.unlink))
        patch.setattr(os, "fsync", copying(os.fsync))
        writer = open_writer(folder, 8)
        writer.begin_request()
        for one in rows:
            writer.append(one)
        writer.close()
        writer = None
    assert len(copies) > 30 and {number for _, number in copies} >= {3, 4, 6, 8}
    for path, number in copies:
        if (path / "manifest.json").exists():
            assert_holds(Trace.open(path), rows[:number])
    assert Trace.open(copies[-1][0]).is_complete


@pytest.mark.parametrize("fields", [(), FULL], ids=["small", "full"])
def test_a_tail_cut_anywhere_holds_whole_iterations(tmp_path: Path, fields) -> None:
    rows = iterations([3, 5, 2, 4, 1], fields)
    folder = write_partial(tmp_path / "trace", rows, 8, fields)
    tail = (folder / "tail.bin").read_bytes()
    record_nbytes = len(tail) // 7
    for cut in (*range(0, len(tail), record_nbytes), 1, record_nbytes - 1, 3 * record_nbytes + 5, len(tail) - 1):
        (folder / "tail.bin").write_bytes(tail[:cut])
        complete = sum(cut // record_nbytes >= needed for needed in (2, 6, 7))
        trace = Trace.open(folder)
        assert not trace.is_complete
        assert_holds(trace, rows[: 2 + complete])
    (folder / "tail.bin").unlink()
    assert_holds(Trace.open(folder), rows[:2])


def test_remains_of_a_lost_block_in_the_tail_are_ignored(tmp_path: Path) -> None:
    """After a power failure a file may end in zeros, or hold zeros where data was not written yet."""
    rows = iterations([8, 2, 2, 2])
    folder = write_partial(tmp_path / "trace", rows)
    tail = (folder / "tail.bin").read_bytes()
    record_nbytes = len(tail) // 6
    (folder / "tail.bin").write_bytes(tail + bytes(3 * record_nbytes))
    assert_holds(Trace.open(folder), rows)
    (folder / "tail.bin").write_bytes(tail[: 2 * record_nbytes] + bytes(2 * record_nbytes) + tail[4 * record_nbytes :])
    assert_holds(Trace.open(folder), rows[:2])
    (folder / "tail.bin").write_bytes(bytes(len(tail)))
    assert_holds(Trace.open(folder), rows[:1])


def test_half_a_request_is_left_out(tmp_path: Path) -> None:
    rows = iterations([3, 5])
    folder = write_partial(tmp_path / "trace", rows)
    with (folder / "requests.jsonl").open("ab") as file:
        file.write(b'{"request": 1, "category": "b", "pro')
    trace = Trace.open(folder)
    assert [one.category for one in trace.requests] == ["code"]
    assert_holds(trace, rows)


def test_a_reader_keeps_its_rows_while_the_recording_goes_on(tmp_path: Path) -> None:
    rows = iterations([1] * 30)
    with open_writer(tmp_path / "trace", 8) as writer:
        writer.begin_request()
        opened: list[tuple[Trace, int]] = []
        for number, one in enumerate(rows):
            writer.append(one)
            opened.append((Trace.open(tmp_path / "trace"), number + 1))
    for trace, number in opened:
        assert not trace.is_complete
        assert_holds(trace, rows[:number])
