"""The files of what policies learn, read when a model is loaded and written when it goes, and of trained predictors:
beside the packed store unless the user names one.
"""

from __future__ import annotations

import contextlib
import os
import stat
import warnings
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from expertly.core.errors import ConfigError, StoreError
from expertly.data import demo_predictor
from expertly.engine.runtime import Executor
from expertly.policies.learned import LearnedState, read_learned, save_learned
from expertly.policies.promoe import LearnedWeights
from expertly.scheduler.systems import System
from expertly.store.cache import learned_beside
from expertly.store.manifest import Manifest
from expertly.store.packed import PackedStore

AUTO, OFF = "auto", "off"

_NO_PATH = (TypeError, ValueError, RuntimeError, OSError)
"""Exceptions of `pathlib` for a value that is no path, or names a user that does not exist."""

# -- where files are ---------------------------------------------------------------------------------------------------


class LearnedFiles(NamedTuple):
    """The files of what a system learns while it runs; None: it is not saved."""

    of_prediction: Path | None = None
    of_eviction: Path | None = None
    is_auto: bool = False  # the user named no file: a damaged one is a warning, not an error


def find_files(
    asked: str | Path | None, system: System, store: PackedStore, *, has_workers: bool = False
) -> LearnedFiles:
    """The files for the option `learned`: a file, "auto" (beside the packed store), or "off". A named file is the
    predictor's, or the eviction policy's where the predictor learns nothing. With workers, which learn apart, eviction
    has none.

    Raises ConfigError for a file that the system has no use for, or in a folder that does not exist.
    """
    if asked is None or asked == OFF:
        return LearnedFiles()
    of_prediction, of_eviction = system.prediction_learns, system.eviction_learns
    if asked == AUTO:
        beside = [None if kind is None else learned_beside(store.folder, kind) for kind in (of_prediction, of_eviction)]
        return LearnedFiles(beside[0], None if has_workers else beside[1], is_auto=True)
    if system.learns is None or (of_prediction is None and has_workers):
        reason = "workers learn apart" if system.learns else f"system {system.name!r} learns nothing that is kept"
        raise ConfigError(f"learned={str(asked)!r}: {reason}; accepted: {AUTO}, {OFF}")
    path = _writable(asked)
    return LearnedFiles(of_eviction=path) if of_prediction is None else LearnedFiles(path)


def find_weights(predictor: str | Path | None, system: System, store: PackedStore) -> LearnedState | None:
    """The trained weights of the system's predictor; None where there are none. "auto" is the file beside the packed
    store, and for the demo model otherwise the file that ships with expertly; a class from outside needs a path.

    Raises ConfigError for a file that the system has no use for or that does not exist, StoreError for one that cannot
    be read, is damaged or another model's.
    """
    identity, kind = store.manifest.identity, system.weights
    if predictor is None or predictor == OFF or (predictor == AUTO and kind is not LearnedWeights):
        return None
    if kind is None:
        raise ConfigError(
            f"predictor={str(predictor)!r}: system {system.name!r} takes no trained weights; accepted: {AUTO}, {OFF}"
        )
    if predictor == AUTO:
        path = learned_beside(store.folder, kind.kind)
        if not path.exists():
            shipped = demo_predictor()
            file = read_learned(shipped, LearnedWeights) if shipped.is_file() else None
            return None if file is None or file.identity != identity else file.learned
    else:
        is_file = False
        with contextlib.suppress(*_NO_PATH):
            path = Path(predictor).expanduser()
            is_file = path.is_file()
        if not is_file:
            accepted = f"one made by `expertly lab train`, {AUTO}, {OFF}"
            raise ConfigError(f"predictor={str(predictor)!r}: no such file; accepted: {accepted}")
    return read_learned(path, kind, identity=identity).learned


def _writable(asked: str | Path) -> Path:
    """A path where a file can be written. Raises ConfigError."""
    with contextlib.suppress(*_NO_PATH):
        path = Path(asked).expanduser()
        try:
            is_possible = stat.S_ISREG(path.lstat().st_mode)  # nothing is written through a link
        except FileNotFoundError:
            is_possible = path.parent.is_dir()
        if is_possible and not os.access(path.resolve().parent, os.W_OK):
            raise ConfigError(f"learned={str(asked)!r}: its folder is not writable; accepted: another file, or {OFF}")
        if is_possible:
            return path
    raise ConfigError(f"learned={str(asked)!r}: must be a file, in a folder that exists, or {AUTO} or {OFF}")


# -- one file ----------------------------------------------------------------------------------------------------------


class SavedState:
    """What a policy learns, and the file that keeps it; `path` None: no file does."""

    def __init__(self, learned: LearnedState, path: Path | None, manifest: Manifest, *, is_auto: bool) -> None:
        self.path = path
        self.num_read = 0
        """Entries that were read from the file: maps, matrices, or tokens learned from."""
        self.problem: str | None = None
        """Why the file could not be read or written."""
        self._learned = learned
        self._manifest = manifest
        self._is_auto = is_auto
        self._generation_in_file = learned.generation

    def read(self, embedding_size: int | None = None) -> None:
        """Restore the state from the file, if there is one. `embedding_size`: of the model's inputs.

        Raises StoreError where the file does not fit the model or the policy. Where the user did not name it, that is a
        warning, and the file is replaced in the end.
        """
        if self.path is None or not os.path.lexists(self.path):
            return
        sizes = None if embedding_size is None else {"H": (embedding_size, embedding_size)}
        try:
            read_learned(self.path, self._learned, identity=self._manifest.identity, sizes=sizes)
        except StoreError as error:
            if not self._is_auto:
                raise
            self.problem = str(error)
            warnings.warn(f"expertly: starting without {self._learned.unit}: {error}", stacklevel=2)
        self.num_read = self._learned.num_learned
        self._generation_in_file = self._learned.generation

    def close(self) -> None:
        """Write what has changed. The policy runs no more. Raises StoreError where a file that the user named could not
        be written; of another it warns.
        """
        if self.path is None or self._learned.generation == self._generation_in_file:
            return
        about = {"source": self._manifest.source, "created": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        try:
            save_learned(self.path, self._learned, self._manifest.identity, about)
        except StoreError as error:
            self.problem = str(error)
            if not self._is_auto:
                raise StoreError(f"learned={str(self.path)!r}: not saved: {error}") from None
            warnings.warn(f"expertly: what was learned ({self._learned.unit}) was not saved: {error}", stacklevel=2)
        else:
            self._generation_in_file, self.problem = self._learned.generation, None

    def facts(self) -> dict[str, Any]:
        """For results: what the policy began with, and its file."""
        origin = f"what {self.num_read} {self._learned.unit} had taught: {self.path}" if self.num_read else ""
        return {
            "history": "warm" if self.num_read else "cold",
            "says": f"began with {origin or 'nothing learned'}",
            "tokens": self._learned.num_learned,
            "tokens_read": self.num_read,
            "file": None if self.path is None else str(self.path),
            "problem": self.problem,
        }


def save_of_eviction(executor: Executor, store: PackedStore, files: LearnedFiles) -> SavedState | None:
    """What the device's eviction policies learn, which they share, restored from its file; None where they learn
    nothing. Raises as SavedState.read.
    """
    learned = executor.shard.scheduler.cache.partitions[0].policy.learned
    if learned is None:
        return None
    saved = SavedState(learned, files.of_eviction, store.manifest, is_auto=files.is_auto)
    saved.read()
    return saved
