"""What a loaded model's predictor has learned in a file: read when it is loaded, written back as it changes. Where this
says maps, activation matrices are as good.
"""

from __future__ import annotations

import contextlib
import os
import stat
import warnings
from pathlib import Path

from expertly.core.errors import ConfigError, StoreError
from expertly.core.geometry import Geometry
from expertly.engine.sharing import Sharing
from expertly.policies.learned import ModelShape
from expertly.policies.predictor.eam import EAM
from expertly.policies.predictor.eam.matrices import Matrices
from expertly.policies.predictor.fmoe import FMoE
from expertly.policies.state.file import load_maps, save_maps
from expertly.policies.state.matrices_file import load_matrices, save_matrices
from expertly.scheduler.system import System
from expertly.store.cache import learned_beside
from expertly.store.packed import PackedStore

AUTO, OFF = "auto", "off"


def maps_path(maps: str | Path | None, system: System, store: PackedStore) -> Path | None:
    """Where the maps of a model go, None where they are not saved; "auto" is beside the packed store.

    Raises ConfigError for a file that the system has no use for, or in a folder that is not there.
    """
    if maps is None or maps == OFF:
        return None
    if maps == AUTO:
        return None if system.learns is None else learned_beside(store.folder, system.learns)
    if system.learns is None:
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

    def __init__(self, path: Path, is_auto: bool, identity: str, source: str, predictor: FMoE | EAM) -> None:
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
        self._sharing: Sharing | None = None
        self._is_kept = False  # the file has more maps than the predictor can hold

    def read(self, geometry: Geometry, hidden_size: int) -> None:
        """Give the predictor what the file has, if there is one; `hidden_size` is that of the input embedding.

        Raises StoreError where it is damaged or another model's; a file that nobody named is then left to be replaced,
        with a warning.
        """
        if not self.path.exists():
            return
        try:
            num_needed = self._give(ModelShape.of(geometry), hidden_size)
        except StoreError as error:
            if not self._is_auto:
                raise
            self.problem = str(error)
            what = _what(self._predictor)
            warnings.warn(f"expertly: starting without {what}, the file will be replaced: {error}", stacklevel=2)
            return
        capacity = self._predictor.store.capacity
        if num_needed > capacity:
            self._is_kept = True
            what = _what(self._predictor)
            self.problem = f"{self.path} has {num_needed} {what}, capacity={capacity}: what is learned is not saved"
            warnings.warn(f"expertly: {self.problem}", stacklevel=2)
        self._saved = self._predictor.store.generation

    def share(self) -> Sharing:
        """Whenever the file may be written, others of the same model are told what is in it, and theirs is added."""
        self._sharing = Sharing(self._predictor)
        return self._sharing

    def write(self) -> bool:
        """Write the file if the maps have changed; False, with a warning, where that failed. The predictor must not run
        meanwhile. A file of more maps than the predictor can hold stays as it is.
        """
        if self._sharing is not None:
            self._sharing.exchange()
        store = self._predictor.store
        if self._is_kept or store.generation == self._saved:
            return True
        try:
            if isinstance(store, Matrices):
                save_matrices(self.path, store, self._identity, self._about)
            else:
                save_maps(self.path, store, self._identity, self._about)
        except StoreError as error:
            self.num_failed_writes += 1
            self.problem = str(error)
            warnings.warn(f"expertly: the {_what(self._predictor)} were not saved: {error}", stacklevel=2)
            return False
        self._saved = store.generation
        return True

    def write_last(self) -> None:
        """The same at the end, when nothing runs any more. Raises StoreError where a file that somebody named could not
        be written.
        """
        self._predictor.finish()
        if not self.write() and not self._is_auto:
            raise StoreError(f"maps={str(self.path)!r}: not saved: {self.problem}")

    def _give(self, shape: ModelShape, hidden_size: int) -> int:
        """Give the predictor what the file has; the capacity that would hold it all. Raises as `load_maps`."""
        predictor = self._predictor
        if isinstance(predictor, EAM):
            matrices = load_matrices(self.path, self._identity, shape)
            self.num_read, predictor.store = matrices.num_matrices, matrices
            return matrices.most_of_a_phase
        maps = load_maps(self.path, self._identity, shape)
        width = hidden_size if maps.embeddings is None else maps.embeddings.shape[1]
        if width != hidden_size:
            raise StoreError(
                f"{self.path}: tensor 'embeddings': {width} numbers each; this model's input embedding has "
                f"{hidden_size}"
            )
        self.num_read, predictor.store = maps.num_maps, maps
        return maps.num_maps


def _what(predictor: FMoE | EAM) -> str:
    """What it learns, in messages."""
    return "activation matrices" if isinstance(predictor, EAM) else "maps"
