"""The small files beside the weights: tokenizer, generation config, chat template, licence."""

from __future__ import annotations

from pathlib import Path

from expertly.core.errors import CheckpointError
from expertly.core.files import write_atomic
from expertly.store.files import disk_errors

_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".md")
_NAMES = ("LICENSE", "NOTICE")
_OURS = ("config.json", "manifest.json", "progress.json")
_MAX_NBYTES = 64 << 20


def find_extras(folder: Path) -> list[Path]:
    """Files of a checkpoint folder that belong into its store as they are."""
    return [
        path
        for path in sorted(folder.iterdir())
        if (path.suffix in _SUFFIXES or path.name in _NAMES)
        and path.name not in _OURS
        and not path.name.startswith(".")
        and not path.name.endswith(".index.json")
        and path.is_file()
        and path.stat().st_size <= _MAX_NBYTES
    ]


def copy_extras(source: Path, folder: Path) -> None:
    """Bring those of `folder` up to date; what has not changed is not written."""
    for path in find_extras(source):
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
        with disk_errors(folder, f"writing {path.name}"):
            target = folder / path.name
            if not target.is_file() or target.read_bytes() != data:
                write_atomic(target, data)
