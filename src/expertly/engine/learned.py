"""The files of what a model's policies learn, and of trained predictors, beside the packed store: found and read here,
and written as they change.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
import warnings
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from expertly.core.errors import ConfigError, StoreError
from expertly.core.files import has_mark
from expertly.data import demo_predictor
from expertly.engine.runtime import Executor
from expertly.policies.eviction import EvictionPolicy
from expertly.policies.learned import MARK, LearnedState, read_learned, save_learned
from expertly.policies.promoe import LearnedWeights
from expertly.scheduler.systems import System
from expertly.store.cache import aside, learned_beside
from expertly.store.manifest import Manifest
from expertly.store.packed import PackedStore

AUTO, OFF = "auto", "off"

SAVE_EVERY_S = 60.0
"""How often a file is written whose contents have changed, about."""

_NO_PATH = (TypeError, ValueError, RuntimeError, OSError)
"""Exceptions of `pathlib` for a value that is no path, or names a user that does not exist."""

_INTERRUPTED = "a pass was interrupted while it learned: what it has learned since is not saved"


# -- where files are ---------------------------------------------------------------------------------------------------


class LearnedFiles(NamedTuple):
    """The files of what a system learns while it runs; None: it is not saved."""

    of_prediction: Path | None
    of_eviction: Path | None
    why_nowhere: str  # why `of_eviction` is None
    is_auto: bool  # the user named no file: a damaged one is a warning, not an error


def find_files(
    asked: str | Path | None, system: System, store: PackedStore, *, has_workers: bool = False
) -> LearnedFiles:
    """The files for the option `learned`: a file, "auto" (beside the packed store), or "off". A named file is the
    predictor's, or the eviction policy's where the predictor learns nothing.

    Raises ConfigError for a file that the system has no use for, or in a folder that does not exist.
    """
    if asked is None or asked == OFF:
        return LearnedFiles(None, None, f"learned={OFF}", False)
    why = "workers learn apart" if has_workers else ""
    of_prediction, of_eviction = system.prediction_learns, system.eviction_learns
    if asked == AUTO:
        beside = [None if kind is None else learned_beside(store.folder, kind) for kind in (of_prediction, of_eviction)]
        return LearnedFiles(beside[0], None if why else beside[1], why, True)
    if system.learns is None:
        raise ConfigError(
            f"learned={str(asked)!r}: system {system.name!r} learns nothing that is kept; accepted: {AUTO}, {OFF}"
        )
    path = _writable(asked)
    if of_prediction is not None:
        return LearnedFiles(path, None, f"{path} is of what it predicts by", False)
    if why:
        raise ConfigError(f"learned={str(asked)!r}: {why}; accepted: {AUTO}, {OFF}")
    return LearnedFiles(None, path, "", False)


def find_weights(predictor: str | Path | None, system: System, store: PackedStore) -> LearnedState | None:
    """The trained weights of the system's predictor; None where there are none. "auto" is the file beside the packed
    store, and for the demo model otherwise the file that ships with expertly; a class from outside needs a path.

    Raises ConfigError for a file that the system has no use for or that does not exist, StoreError for one that cannot
    be read, is damaged or another model's.
    """
    if predictor is None or predictor == OFF:
        return None
    identity, kind = store.manifest.identity, system.weights
    if kind is None:
        if predictor == AUTO:
            return None
        raise ConfigError(
            f"predictor={str(predictor)!r}: system {system.name!r} takes no trained weights; accepted: {AUTO}, {OFF}"
        )
    if predictor == AUTO:
        if kind is not LearnedWeights:
            return None
        path = learned_beside(store.folder, kind.kind)
        if not path.exists():
            shipped = demo_predictor()
            found = read_learned(shipped, LearnedWeights) if shipped.is_file() else None
            return None if found is None or found.identity != identity else found.learned
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
    """The file of what a policy learns; `path` None: it is not saved, and `why` it is not."""

    def __init__(
        self, learned: LearnedState, path: Path | None, manifest: Manifest, *, is_auto: bool = False, why: str = ""
    ) -> None:
        self.path = path
        self.num_read = 0
        """Entries that were read from the file: maps, matrices, or tokens learned from."""
        self.num_failed_writes = 0
        self.problem: str | None = None
        """Why the file could not be read, until it is replaced, or why the last write failed."""
        self._learned = learned
        self._manifest = manifest
        self._is_auto = is_auto
        self._why = why  # the policy began with nothing learned
        self._saved = learned.generation
        self._is_kept = False  # the file could not be set aside, and is not replaced
        self._has_failed = False  # the last write
        self._due_s = time.monotonic() + SAVE_EVERY_S

    def read(self, embedding_size: int | None = None) -> None:
        """Restore the state from the file, if there is one. `embedding_size`: of the model's inputs.

        Raises StoreError where the file does not fit the model or the policy. Where the user did not name it, it is set
        aside with a warning.
        """
        if self.path is None:
            return
        if not os.path.lexists(self.path):
            self._why = f"there was no {self.path}"
            return
        sizes = None if embedding_size is None else {"H": (embedding_size, embedding_size)}
        try:
            read_learned(self.path, self._learned, identity=self._manifest.identity, sizes=sizes)
        except StoreError as error:
            if not self._is_auto:
                raise
            self.problem = self._why = str(error)
            self._is_kept, then = True, "and what is learned is not saved, since this is no file of expertly's"
            with contextlib.suppress(OSError):
                if has_mark(self.path, MARK):
                    self.path.replace(aside(self.path))
                    self._is_kept, then = False, f"the file is {aside(self.path).name} now"
            warnings.warn(f"expertly: starting without {self._learned.unit}, {then}: {error}", stacklevel=2)
        self.num_read = self._learned.num_learned
        self._saved = self._learned.generation

    def pass_ended(self) -> None:
        """Write the file about once a minute, if something has changed; a warning where that fails."""
        if time.monotonic() >= self._due_s:
            self._save()
            self._due_s = time.monotonic() + SAVE_EVERY_S

    def close(self) -> None:
        """Write what has changed. The policy runs no more. Raises StoreError where a file that the user named could not
        be written.
        """
        self._save()
        if self._has_failed and not self._is_auto:
            raise StoreError(f"learned={str(self.path)!r}: not saved: {self.problem}")

    def facts(self) -> dict[str, Any]:
        """For results: what the policy began with and why, and its file."""
        origin = f"what {self.num_read} {self._learned.unit} had taught" if self.num_read else "nothing learned"
        why = str(self.path) if self.num_read else self._why
        return {
            "history": "warm" if self.num_read else "cold",
            "says": f"began with {origin}: {why}",
            "tokens": self._learned.num_learned,
            "tokens_read": self.num_read,
            "file": None if self.path is None else str(self.path),
            "failed_writes": self.num_failed_writes,
            "problem": self.problem,
        }

    def _save(self) -> None:
        generation = self._learned.generation
        if self.path is None or self._is_kept or generation == self._saved:
            return
        if self._learned.state() is None:
            if self.problem != _INTERRUPTED:
                self.problem = _INTERRUPTED
                warnings.warn(f"expertly: {self.path}: {_INTERRUPTED}", stacklevel=2)
            return
        about = {"source": self._manifest.source, "created": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        try:
            save_learned(self.path, self._learned, self._manifest.identity, about)
        except StoreError as error:
            self._has_failed = True
            self.num_failed_writes += 1
            self.problem = str(error)
            warnings.warn(f"expertly: what was learned ({self._learned.unit}) was not saved: {error}", stacklevel=2)
        else:
            self._saved, self._has_failed, self.problem = generation, False, None


def save_of_eviction(executor: Executor, store: PackedStore, files: LearnedFiles) -> SavedState | None:
    """The file of what the device's eviction policy learns, loaded into it; None where it learns nothing. Raises as
    SavedState.read.
    """
    learned = eviction_policy(executor).learned
    if learned is None:
        return None
    saved = SavedState(learned, files.of_eviction, store.manifest, is_auto=files.is_auto, why=files.why_nowhere)
    saved.read()
    return saved


def eviction_policy(executor: Executor) -> EvictionPolicy:
    """One of the device's: what they learn they share."""
    return executor.shard.scheduler.cache.partitions[0].policy
