"""The folder of a comparison: report.html, results.json, command.txt and the trace that was recorded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expertly.core.errors import ConfigError
from expertly.core.files import disk_errors, finite, write_atomic

FORMAT = "expertly-compare"
FORMAT_VERSION = 1

REPORT, RESULTS, COMMAND, TRACE = "report.html", "results.json", "command.txt", "trace"


def prepare(folder: Path, force: bool) -> None:
    """Make the folder, or clear an earlier comparison away, for which `force` is needed where it has results.

    Raises ConfigError where it is there and holds anything else, or cannot be written.
    """
    with disk_errors(folder, "writing the comparison", ConfigError, "--out DIR"):
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"out={str(folder)!r}: not a folder")
        if folder.is_dir() and any(folder.iterdir()):
            if not _holds_comparison(folder):
                raise ConfigError(
                    f"out={str(folder)!r}: not empty, and no earlier comparison; accepted: a new or an empty folder"
                )
            if not force and any((folder / name).exists() for name in (REPORT, RESULTS)):
                raise ConfigError(f"out={str(folder)!r}: holds an earlier comparison; --force replaces it")
            for name in (REPORT, RESULTS, COMMAND):
                (folder / name).unlink(missing_ok=True)
            if (folder / TRACE).is_dir() and not (folder / TRACE).is_symlink():
                shutil.rmtree(folder / TRACE)
        folder.mkdir(parents=True, exist_ok=True)


def write_all(folder: Path, results: Mapping[str, Any], page: str) -> None:
    """Each file is there whole or not at all. Raises ConfigError where it cannot be written."""
    with disk_errors(folder, "writing the comparison", ConfigError, "--out DIR"):
        write_atomic(folder / COMMAND, (results["command"] + "\n").encode())
        text = json.dumps(finite(results), ensure_ascii=False, indent=1, allow_nan=False)
        write_atomic(folder / RESULTS, (text + "\n").encode("utf-8", "replace"))
        write_atomic(folder / REPORT, page.encode("utf-8", "replace"))


def begin(folder: Path, command: str) -> None:
    """Mark the folder as a comparison under way, so that one which was interrupted can be replaced."""
    with disk_errors(folder, "writing the comparison", ConfigError, "--out DIR"):
        write_atomic(folder / COMMAND, (command + "\n").encode())


def _holds_comparison(folder: Path) -> bool:
    """All of it is what a comparison leaves, whole or interrupted."""
    names = {path.name for path in folder.iterdir()}
    known = {REPORT, RESULTS, COMMAND, TRACE}
    return COMMAND in names and all(name in known or name.startswith(".") for name in names)
