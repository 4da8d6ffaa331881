"""A disk of a few pages, where mounting is permitted."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def tiny_disk(folder: Path, nbytes: int = 72 << 10, read_only: bool = False) -> Iterator[Path]:
    """A tmpfs at `folder`/disk. Skips the test where this process may not mount."""
    disk = folder / "disk"
    disk.mkdir()
    options = f"size={nbytes}{',ro' if read_only else ''}"
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)
