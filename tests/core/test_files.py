"""A file that is being replaced is the old one or the new one, to everybody."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from expertly.core.files import replacing


def test_replaces_when_the_block_ends(tmp_path: Path) -> None:
    """Also where a killed writer left a file, of which nothing is kept; with the permissions of any new one."""
    path = tmp_path / "a"
    path.write_bytes(b"old")
    (tmp_path / ".a.tmp").write_bytes(b"a long rest of something else")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a"]
    with replacing(tmp_path / "b"):
        pass
    (tmp_path / "c").touch()
    assert (tmp_path / "b").stat().st_mode == (tmp_path / "c").stat().st_mode


def test_the_target_of_a_symbolic_link_is_replaced(tmp_path: Path) -> None:
    path, link = tmp_path / "a", tmp_path / "links" / "b"
    link.parent.mkdir()
    link.symlink_to("../a")
    for content in (b"new where nothing was", b"new"):
        with replacing(link) as file:
            file.write(content)
        assert link.is_symlink() and path.read_bytes() == content
    assert os.listdir(link.parent) == ["b"]


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_writers_wait_for_each_other(tmp_path: Path) -> None:
    path = tmp_path / "a"
    begun = threading.Event()

    def second() -> None:
        begun.set()
        with replacing(path) as file:
            file.write(b"second")

    with replacing(path) as file:
        thread = threading.Thread(target=second)
        thread.start()
        assert begun.wait(5)
        time.sleep(0.05)
        file.write(b"the first")
    thread.join(5)
    assert not thread.is_alive()
    assert path.read_bytes() == b"second"
    assert os.listdir(tmp_path) == ["a"]
