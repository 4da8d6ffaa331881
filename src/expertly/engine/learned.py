"""The files of what a model's policies learn, and of trained predictors, beside the packed store: found and read here,
written as they change, and exchanged with replicas of the model.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
import warnings
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from expertly.core.errors import ConfigError, StoreError
from expertly.core.files import check_replaceable
from expertly.data import demo_predictor
from expertly.engine.runtime import Executor
from expertly.policies.base import Policy
from expertly.policies.eviction import EvictionPolicy
from expertly.policies.learned import (
    MARK,
    Array,
    Arrays,
    LearnedState,
    LearnedStore,
    Snapshot,
    read_learned,
    save_learned,
)
from expertly.policies.predictor.learned import LearnedWeights
from expertly.scheduler.system import System
from expertly.store.cache import learned_beside
from expertly.store.manifest import Manifest
from expertly.store.packed import PackedStore

AUTO, OFF = "auto", "off"

SAVE_EVERY_S = 60.0
"""How often a file is written whose contents have changed, about."""

MAX_TAKEN = 256
"""Entries that a full store takes from one replica in one exchange. Each is compared with all entries, and predictions
wait meanwhile.
"""

_REMEMBERED = 16
"""Digests of so many times a store's capacity are kept: an entry that was evicted is not taken from a replica again."""

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
    asked: str | Path | None, system: System, store: PackedStore, *, num_devices: int = 1, is_replayed: bool = False
) -> LearnedFiles:
    """The files for the option `learned`: a file, "auto" (beside the packed store), or "off". A named file is the
    predictor's, or the eviction policy's where the predictor learns nothing.

    Raises ConfigError for a file that the system has no use for, or in a folder that does not exist.
    """
    if asked is None or asked == OFF:
        return LearnedFiles(None, None, f"learned={OFF}", False)
    why = ""
    if num_devices > 1:
        why = f"{num_devices} devices learn apart"
    elif is_replayed:
        why = "decisions are written down, and a replay begins with nothing learned"
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
            return None if found is None or found.header.identity != identity else found.learned
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
    """The file of what `policy` learns; `path` None: it is not saved. The
    thread that runs the policy calls `save` or `pass_ended`; `close` comes after it.
    """

    def __init__(self, policy: Policy, path: Path | None, manifest: Manifest, *, is_auto: bool = False) -> None:
        self.path = path
        self.num_read = 0
        """Entries that were read from the file: maps, matrices, or tokens learned from."""
        self.num_failed_writes = 0
        self.problem: str | None = None
        """Why the file could not be read, until it is replaced, or why the last write failed."""
        self.why_nothing = ""
        """Why the policy began with nothing learned."""
        self._policy = policy
        self._manifest = manifest
        self._is_auto = is_auto
        self._unit = self._learned.unit
        self._saved = self._learned.generation
        self._is_kept = False  # the file is none of ours, or holds more than the policy can, and is not overwritten
        self._has_failed = False  # the last write failed
        self._exchange: LearnedExchange | None = None
        self._due_s = time.monotonic() + SAVE_EVERY_S
        self._waiting: Snapshot | None = None  # to be written by `_writer`
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None  # that ended the writer

    def read(self, embedding_size: int | None = None) -> None:
        """Load the file, if there is one, into the policy. `embedding_size`: of the model's inputs.

        Raises StoreError where the file is damaged or another model's. Where the user did not name it, this is a
        warning, and the file is replaced later.
        """
        if self.path is None:
            return
        if not os.path.lexists(self.path):
            self.why_nothing = f"there was no {self.path}"
            return
        mine = self._learned
        try:
            theirs = read_learned(self.path, type(mine), identity=self._manifest.identity, shape=mine.shape).learned
            if embedding_size is not None:
                theirs.check_model(self.path, embedding_size)
        except StoreError as error:
            if not self._is_auto:
                raise
            self.problem = self.why_nothing = str(error)
            then = "the file will be replaced"
            try:
                check_replaceable(self.path, MARK)
            except OSError:
                self._is_kept, then = True, "and what is learned is not saved, since this is no file of expertly's"
            warnings.warn(f"expertly: starting without {self._unit}, {then}: {error}", stacklevel=2)
            return
        self.num_read = theirs.num_learned
        self._policy.adopt(theirs)
        if isinstance(theirs, LearnedStore) and isinstance(mine, LearnedStore) and theirs.num_needed > mine.capacity:
            self._is_kept = True
            has = f"has {theirs.num_needed} {self._unit}, capacity={mine.capacity}"
            self.problem = f"{self.path} {has}: what is learned is not saved"
            warnings.warn(f"expertly: {self.problem}", stacklevel=2)
        self._saved = self._learned.generation

    def share(self) -> LearnedExchange:
        """Exchange with replicas of the model at each `save`."""
        self._exchange = LearnedExchange(self._policy)
        return self._exchange

    def save(self) -> bool:
        """Write the file if something has changed; False, with a warning, where that failed. The policy must not run
        meanwhile.
        """
        if self._exchange is not None:
            self._exchange.exchange()
        shot = self._changed(copy=False)
        return shot is None or self._write(shot)

    def pass_ended(self) -> None:
        """About once a minute, copy what has changed, for another thread to write."""
        now_s = time.monotonic()
        if now_s < self._due_s or self.path is None:
            return
        self._due_s = now_s + SAVE_EVERY_S
        if (self._writer is None or not self._writer.is_alive()) and (shot := self._changed(copy=True)) is not None:
            self._waiting = shot
            self._writer = threading.Thread(target=self._serve, name="expertly-learned", daemon=True)
            with contextlib.suppress(RuntimeError):  # the system gives no thread: written later
                self._writer.start()

    def close(self) -> None:
        """Write what has changed. The policy runs no more. Raises StoreError where a file that the user named could not
        be written.
        """
        if self.path is None:
            return
        if self._writer is threading.current_thread():  # a garbage collection in the writer, which writes it next
            self._waiting = self._changed(copy=True) or self._waiting
            return
        if self._writer is not None and self._writer.is_alive():
            self._writer.join()
        self._write_waiting()
        self.save()
        if self._failure is not None:
            raise self._failure
        if self._has_failed and not self._is_auto:
            raise StoreError(f"learned={str(self.path)!r}: not saved: {self.problem}")

    def facts(self) -> dict[str, Any]:
        """For results: what the policy began with and why, and its file."""
        origin = f"what {self.num_read} {self._unit} had taught" if self.num_read else "nothing learned"
        why = str(self.path) if self.num_read else self.why_nothing
        return {
            "history": "warm" if self.num_read else "cold",
            "says": f"began with {origin}: {why}",
            "tokens": self._learned.num_learned,
            "tokens_read": self.num_read,
            "file": None if self.path is None else str(self.path),
            "failed_writes": self.num_failed_writes,
            "problem": self.problem,
        }

    @property
    def _learned(self) -> LearnedState:
        assert self._policy.learned is not None, "only what learns is saved"
        return self._policy.learned

    def _changed(self, *, copy: bool) -> Snapshot | None:
        """What is to be written; None where the file has it, or an interrupt left the policy's state half updated."""
        if self._is_kept or self._learned.generation == self._saved:
            return None
        shot = Snapshot.of(self._learned, copy=copy)
        if shot is None and self.problem != _INTERRUPTED:
            self.problem = _INTERRUPTED
            warnings.warn(f"expertly: {self.path}: {_INTERRUPTED}", stacklevel=2)
        return shot

    def _write(self, shot: Snapshot) -> bool:
        assert self.path is not None
        about = {"source": self._manifest.source, "created": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        try:
            save_learned(self.path, shot, self._manifest.identity, about)
        except StoreError as error:
            self._has_failed = True
            self.num_failed_writes += 1
            self.problem = str(error)
            warnings.warn(f"expertly: what was learned ({self._unit}) was not saved: {error}", stacklevel=2)
            return False
        self._saved, self._has_failed = shot.generation, False
        if self.problem != _INTERRUPTED:
            self.problem = None
        return True

    def _serve(self) -> None:
        try:
            while self._waiting is not None:
                self._write_waiting()
        except BaseException as error:  # a thread's entry: `close` raises it
            self._failure = error

    def _write_waiting(self) -> None:
        shot, self._waiting = self._waiting, None
        if shot is not None:
            self._write(shot)


def save_of_eviction(executor: Executor, store: PackedStore, files: LearnedFiles) -> SavedState | None:
    """The file of what the first device's eviction policy learns, loaded into it; None where it learns nothing. Raises
    as SavedState.read, and ConfigError where the user named a file for a policy whose state is not saved.
    """
    policy = eviction_policies(executor)[0]
    if policy.learned is None:
        if files.of_eviction is not None and not files.is_auto:
            raise ConfigError(
                f"learned={str(files.of_eviction)!r}: the system's eviction is not kept in files; accepted: "
                f"{AUTO}, {OFF}"
            )
        return None
    saved = SavedState(policy, files.of_eviction, store.manifest, is_auto=files.is_auto)
    saved.why_nothing = files.why_nowhere
    saved.read()
    return saved


def eviction_policies(executor: Executor) -> Sequence[EvictionPolicy]:
    """One of each device; what a device's policies learn they share."""
    return [device.scheduler.cache.partitions[0].policy for device in executor.shards]


# -- replicas ----------------------------------------------------------------------------------------------------------


class LearnedExchange:
    """Exchanges what a policy has learned with replicas of the model. The server carries it between machines; nothing
    here waits for that.

    The thread that runs the policy calls `exchange`; any thread may call `give` and `take`.
    """

    def __init__(self, policy: Policy) -> None:
        self.num_taken = 0
        """Entries taken from replicas."""
        self._policy = policy
        self._lock = threading.Lock()
        self._given: dict[str, LearnedStore] = {}
        self._told: dict[str, Array] | None = None
        self._told_generation: int | None = None
        self._seen: dict[bytes, None] = {}  # digests of entries of this replica and of others; the newest are last

    def give(self, other: str, arrays: Arrays) -> None:
        """The `state` of another replica, for the next `exchange`. Raises StoreError where it is another model's, or of
        another kind.
        """
        made = self._store().of_another(arrays)
        with self._lock:
            self._given[other] = made

    def take(self) -> dict[str, Array] | None:
        """What this replica has learned; None where nothing has changed since the last call."""
        with self._lock:
            told, self._told = self._told, None
        return told

    def exchange(self) -> None:
        """Add the entries of other replicas, and publish those of this one. An entry that replicas have from here is
        not taken back.

        If entries are added, the policy does not learn from the running pass: what it found was of the old store.
        """
        store = self._store()
        with self._lock:
            given, self._given = self._given, {}
        if given and (num_taken := self._absorb(store, given)):
            self.num_taken += num_taken
            self._policy.adopt(store)
        if store.generation != self._told_generation and (known := store.digests()):
            self._told_generation = store.generation
            self._remember(known, store.capacity)
            shot = Snapshot.of(store, copy=True)
            with self._lock:
                self._told = None if shot is None else shot.arrays

    def _store(self) -> LearnedStore:
        learned = self._policy.learned
        assert isinstance(learned, LearnedStore), "only a store of entries is exchanged"
        return learned

    def _absorb(self, store: LearnedStore, given: dict[str, LearnedStore]) -> int:
        self._remember(store.digests(), store.capacity)
        num_taken = 0
        for theirs in given.values():
            num_taken += store.absorb(theirs, self._seen, MAX_TAKEN)
            self._remember(theirs.digests(), store.capacity)
        return num_taken

    def _remember(self, digests: set[bytes], capacity: int) -> None:
        for digest in digests:
            self._seen.pop(digest, None)
        self._seen.update(dict.fromkeys(sorted(digests)))
        for digest in list(self._seen)[: -_REMEMBERED * capacity]:
            del self._seen[digest]
