"""The maps of a loaded model in a file: read when it is loaded, written back as they change."""

from __future__ import annotations

import contextlib
import os
import stat
import warnings
from pathlib import Path

from expertly.core.errors import ConfigError, StoreError
from expertly.core.geometry import Geometry
from expertly.maps.file import load_maps, save_maps
from expertly.parts import System
from expertly.policies.maps.store import MapShape
from expertly.policies.predictor.fmoe import FMoE
from expertly.store.cache import maps_beside
from expertly.store.packed import PackedStore

AUTO, OFF = "auto", "off"


def maps_path(maps: str | Path | None, system: System, store: PackedStore) -> Path | None:
    """Where the maps of a model go, None where they are not saved; "auto" is beside the packed store.

    Raises ConfigError for a file that the system has no use for, or in a folder that is not there.
    """
    if maps is None or maps == OFF:
        return None
    if maps == AUTO:
        return maps_beside(store.folder) if system.uses_maps else None
    if not system.uses_maps:
        raise ConfigError(f"maps={str(maps)!r}: system {system.name!r} has no maps; accepted: {AUTO}, {OFF}")
    with contextlib.suppress(TypeError, ValueError, RuntimeError, OSError):  # no path, or of a user that is not there
        path = Path(maps).expanduser()
        try:
            is_possible = stat.S_ISREG(path.stat().st_mode)
        except FileNotFoundError:
            is_possible = path.parent.is_dir()
        if is_possible and not os.access(path.resolve().parent, os.W_OK):  # now, not when all else is done
            raise ConfigError(f"maps={str(maps)!r}: its folder is not writable; accepted: another file, or {OFF}")
        if is_possible:
            return path
    raise ConfigError(f"maps={str(maps)!r}: must be a file, in a folder that exists, or {AUTO} or {OFF}")


class SavedMaps:
    """The file of a predictor's maps. `is_auto`: nobody named it, so that it must not fail what was asked for."""

    def __init__(self, path: Path, is_auto: bool, identity: str, source: str, predictor: FMoE) -> None:
        self.path = path
        self.num_read = 0
        """Maps that the file had."""
        self.num_failed_writes = 0
        self.problem: str | None = None
        """Why the file was not read, or was not written the last time."""
        self._is_auto = is_auto
        self._identity = identity
        self._about = {"source": source}
        self._predictor = predictor
        self._saved = predictor.store.generation
        self._is_kept = False  # the file has more maps than the predictor can hold

    def read(self, geometry: Geometry, hidden_size: int) -> None:
        """Give the predictor what the file has, if there is one; `hidden_size` is that of the input embedding.

        Raises StoreError where it is damaged or another model's; a file that nobody named is then left to be replaced,
        with a warning.
        """
        if not self.path.exists():
            return
        try:
            store = load_maps(self.path, self._identity, MapShape.of(geometry))
            width = hidden_size if store.embeddings is None else store.embeddings.shape[1]
            if width != hidden_size:
                raise StoreError(
                    f"{self.path}: tensor 'embeddings': {width} numbers each; this model's input embedding has "
                    f"{hidden_size}"
                )
        except StoreError as error:
            if not self._is_auto:
                raise
            self.problem = str(error)
            warnings.warn(f"expertly: starting without maps, the file will be replaced: {error}", stacklevel=2)
            return
        self.num_read = store.num_maps
        self._predictor.store = store
        capacity = self._predictor.store.capacity
        if store.num_maps > capacity:
            self._is_kept = True
            self.problem = f"{self.path} has {store.num_maps} maps, capacity={capacity}: what is learned is not saved"
            warnings.warn(f"expertly: {self.problem}", stacklevel=2)
        self._saved = self._predictor.store.generation

    def write(self) -> bool:
        """Write the file if the maps have changed; False, with a warning, where that failed. The predictor must not run
        meanwhile. A file of more maps than the predictor can hold stays as it is.
        """
        store = self._predictor.store
        if self._is_kept or store.generation == self._saved:
            return True
        try:
            save_maps(self.path, store, self._identity, self._about)
        except StoreError as error:
            self.num_failed_writes += 1
            self.problem = str(error)
            warnings.warn(f"expertly: the maps were not saved: {error}", stacklevel=2)
            return False
        self._saved = store.generation
        return True

    def write_last(self) -> None:
        """The same at the end. Raises StoreError where a file that somebody named could not be written."""
        if not self.write() and not self._is_auto:
            raise StoreError(f"maps={str(self.path)!r}: not saved: {self.problem}")
