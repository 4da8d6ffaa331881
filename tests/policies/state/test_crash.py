"""Whenever a process that saves is killed, and however many save at once, the file is one that was saved."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from expertly.policies.state.file import MapsFile, load_maps, save_maps
from tests.policies.state.builders import IDENTITY, SHAPE, assert_same, make_store

ROOT = Path(__file__).resolve().parents[2]

SAVE = """
import sys
from pathlib import Path
from expertly.policies.state.file import save_maps
from tests.policies.state.builders import IDENTITY, make_store

stores = [make_store(200 + 300 * number, 1000, seed=number, hidden_size=64) for number in range(3)]
print("ready", flush=True)
while True:
    for number, store in enumerate(stores):
        save_maps(sys.argv[1], store, IDENTITY, {"number": number})
"""


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_save_leaves_a_whole_file_or_none(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "a.maps"
    stores = [make_store(200 + 300 * number, 1000, seed=number, hidden_size=64) for number in range(3)]
    dice = random.Random(seed)
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", SAVE, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            time.sleep(dice.uniform(0, 0.15))
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
            if child.stdout is not None:
                child.stdout.close()
        if path.exists():
            found = MapsFile.read(path, IDENTITY, SHAPE)
            assert_same(found.store, stores[int(found.header.about["number"] or 0)])
        assert {file.name for file in tmp_path.iterdir()} <= {"a.maps", ".a.maps.tmp"}
    save_maps(path, stores[0], IDENTITY)
    assert_same(load_maps(path, IDENTITY), stores[0])
    assert [file.name for file in tmp_path.iterdir()] == ["a.maps"], "the next save clears up"


def test_threads_that_save_at_once_leave_whole_files_to_readers(tmp_path: Path) -> None:
    path = tmp_path / "a.maps"
    stores = [make_store(20 + number, 100, seed=number) for number in range(4)]
    failures: list[BaseException] = []

    def save(number: int) -> None:
        try:
            for _ in range(15):
                save_maps(path, stores[number], IDENTITY, {"number": number})
        except BaseException as error:
            failures.append(error)

    save_maps(path, stores[0], IDENTITY, {"number": 0})
    threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    num_read = 0
    while any(thread.is_alive() for thread in threads):
        found = MapsFile.read(path, IDENTITY, SHAPE)
        assert_same(found.store, stores[int(found.header.about["number"] or 0)])
        num_read += 1
    for thread in threads:
        thread.join()
    assert failures == [] and num_read > 0
    assert [file.name for file in tmp_path.iterdir()] == ["a.maps"]
