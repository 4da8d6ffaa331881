"""Makes traces of what others have recorded: one file a format, registered here. Imports core and trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from expertly.core.errors import TraceError
from expertly.trace.importers.base import ImportOptions
from expertly.trace.importers.npz import import_npz

Importer = Callable[[Path, Path, ImportOptions], None]
"""`importer(source, folder, options)` writes the trace of `source` to the new or empty `folder`, all of it or nothing.
Raises TraceError naming what is wrong with the source.
"""

IMPORTERS: dict[str, Importer] = {"npz": import_npz}


def find_importer(name: str) -> Importer:
    """Raises TraceError that lists the formats."""
    if name not in IMPORTERS:
        raise TraceError(f"format={name!r}: unknown; accepted: {', '.join(IMPORTERS)}")
    return IMPORTERS[name]
