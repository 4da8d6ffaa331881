"""The errors of a disk that a packed store is written to, in words."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from expertly.core import files
from expertly.core.errors import StoreError


def disk_errors(folder: Path, doing: str) -> AbstractContextManager[None]:
    """Turn an OSError while writing below `folder` into a StoreError that says what the user can do."""
    return files.disk_errors(folder, doing, StoreError, " with --out or EXPERTLY_CACHE")
