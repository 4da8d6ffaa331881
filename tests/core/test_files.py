"""A file that is being replaced is the old one or the new one, to everybody."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from expertly.core.files import replacing, write_atomic


def test_replaces_when_the_block_ends(tmp_path: Path) -> None:
    """Also where a killed writer left a file, of which nothing is kept; with the permissions of any new one."""
    path = tmp_path / "a"
    path.write_bytes(b"old")
    (tmp_path / ".a.tmp").write_bytes(b"a long rest of something else")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"half of")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a"]
    with replacing(tmp_path / "b"):
        pass
    (tmp_path / "c").touch()
    assert (tmp_path / "b").stat().st_mode == (tmp_path / "c").stat().st_mode


@pytest.mark.parametrize("name", ["b", ".b.tmp"])
@pytest.mark.parametrize("kind", ["a link", "a dangling link", "a pipe", "a folder", "a second name of a file"])
def test_nothing_is_written_through_a_link_or_onto_no_file(tmp_path: Path, kind: str, name: str) -> None:
    """Neither where the file goes nor where it is made."""
    precious, path = tmp_path / "precious", tmp_path / "folder" / name
    path.parent.mkdir()
    precious.write_bytes(b"mine")
    {
        "a link": lambda: path.symlink_to(precious),
        "a dangling link": lambda: path.symlink_to(tmp_path / "nowhere"),
        "a pipe": lambda: os.mkfifo(path),
        "a folder": path.mkdir,
        "a second name of a file": lambda: path.hardlink_to(precious),
    }[kind]()
    before = path.lstat()
    if kind == "a second name of a file" and name == "b":  # which is replaced, not written
        write_atomic(path, b"new")
        assert path.read_bytes() == b"new"
    else:
        with pytest.raises(FileExistsError, match=r"is in the way \('\.?b"):
            write_atomic(path.with_name("b"), b"new")
        assert path.lstat() == before and os.listdir(path.parent) == [name]
    assert precious.read_bytes() == b"mine" and not (tmp_path / "nowhere").exists()


def test_only_a_file_with_the_mark_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for content in (None, b"", b"with a mark, older"):
        if content is not None:
            path.write_bytes(content)
        write_atomic(path, b"with a mark", b"mark")
        assert path.read_bytes() == b"with a mark"
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="not expertly's"):
        write_atomic(path, b"with a mark", b"mark")
    assert path.read_bytes() == b"mine" and os.listdir(tmp_path) == ["a"]


def test_writers_wait_for_each_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And say for whom, as far as the system does."""

    def second() -> None:
        with replacing(tmp_path / "a") as file:
            file.write(b"second")

    with replacing(tmp_path / "a") as file:
        thread = threading.Thread(target=second)
        thread.start()
        while "waiting for" not in caplog.text:
            time.sleep(0.01)
        file.write(b"the first")
    thread.join(60)
    assert f"waiting for process {os.getpid()}, which has locked" in caplog.text
    assert (tmp_path / "a").read_bytes() == b"second"
    assert os.listdir(tmp_path) == ["a"]
