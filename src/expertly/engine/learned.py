"""What a loaded model has learned, or was trained to know, kept in files beside its packed store: the one place of an
engine that finds and reads them, writes them back as they change, and exchanges them with replicas of the model.
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
from expertly.data import demo_predictor
from expertly.engine.runtime import Executor
from expertly.policies.base import Policy
from expertly.policies.eviction import EvictionPolicy
from expertly.policies.eviction.reuse import Reuse, ReuseModel
from expertly.policies.learned import Array, Arrays, LearnedState, LearnedStore, Snapshot, read_learned, save_learned
from expertly.policies.predictor.learned import LearnedWeights
from expertly.scheduler.system import System
from expertly.store.cache import learned_beside
from expertly.store.packed import PackedStore

AUTO, OFF = "auto", "off"

SAVE_EVERY_S = 60.0
"""What changes is written about so often."""

MAX_TAKEN = 256
"""Of one replica at a time, where the store is full: each thing is compared with all that is there, and predictions
wait for it.
"""

_REMEMBERED = 16
"""Times the capacity of a store: so many things of it are not taken again when they have gone from it."""

_NO_PATH = (TypeError, ValueError, RuntimeError, OSError)
"""What `pathlib` raises of what is no path, or of a user that is not there."""

_INTERRUPTED = "a pass was interrupted while it learned: what it has learned since is not saved"


# -- where files are ---------------------------------------------------------------------------------------------------


class LearnedFiles(NamedTuple):
    """Where a system keeps what it learns while it runs; None: nowhere."""

    of_prediction: Path | None
    of_eviction: Path | None
    why_nowhere: str  # of eviction, where that is so
    is_auto: bool  # nobody named a file, so that it must not fail what was asked for


def find_files(
    maps: str | Path | None, system: System, store: PackedStore, *, num_devices: int = 1, is_replayed: bool = False
) -> LearnedFiles:
    """`maps`: a file, "auto" (beside the packed store), or "off". A file that is named is that of what the system's
    predictor learns, where it learns, else of what its eviction policy does.

    Raises ConfigError for a file that the system has no use for, or in a folder that is not there.
    """
    if maps is None or maps == OFF:
        return LearnedFiles(None, None, f"learned={OFF}", False)
    why = ""
    if num_devices > 1:
        why = f"{num_devices} devices learn apart"
    elif is_replayed:
        why = "decisions are written down, and a replay begins with nothing learned"
    of_prediction, of_eviction = system.prediction_learns, system.eviction_learns
    if maps == AUTO:
        beside = [None if kind is None else learned_beside(store.folder, kind) for kind in (of_prediction, of_eviction)]
        return LearnedFiles(beside[0], None if why else beside[1], why, True)
    if system.learns is None:
        raise ConfigError(
            f"learned={str(maps)!r}: system {system.name!r} learns nothing that is kept; accepted: {AUTO}, {OFF}"
        )
    path = _possible(maps)
    if of_prediction is not None:
        return LearnedFiles(path, None, f"{path} is of what it predicts by", False)
    if why:
        raise ConfigError(f"learned={str(maps)!r}: {why}; accepted: {AUTO}, {OFF}")
    return LearnedFiles(None, path, "", False)


def find_weights(predictor: str | Path | None, system: System, store: PackedStore) -> LearnedState | None:
    """The trained weights that the system's predictor takes; None where there are none. "auto" is the file beside the
    packed store, or else, for the demo model, the one that ships with it; weights of a class from outside have a name.

    Raises ConfigError for a file that the system has no use for or that is not there, StoreError for one that cannot be
    read, is damaged or of another model.
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


def _possible(maps: str | Path) -> Path:
    """Where a file can be written. Raises ConfigError."""
    with contextlib.suppress(*_NO_PATH):
        path = Path(maps).expanduser()
        try:
            is_possible = stat.S_ISREG(path.stat().st_mode)
        except FileNotFoundError:
            is_possible = path.parent.is_dir()
        if is_possible and not os.access(path.resolve().parent, os.W_OK):  # now, not when all else is done
            raise ConfigError(f"learned={str(maps)!r}: its folder is not writable; accepted: another file, or {OFF}")
        if is_possible:
            return path
    raise ConfigError(f"learned={str(maps)!r}: must be a file, in a folder that exists, or {AUTO} or {OFF}")


# -- one file ----------------------------------------------------------------------------------------------------------


class SavedState:
    """The file of what `policy` learns; `path` None: there is none. `identity` and `source` are the model's. A thread
    that runs the policy calls `save` or `pass_ended`, whoever ends it `close`.
    """

    def __init__(
        self, policy: Policy, path: Path | None, identity: str, source: str = "", *, is_auto: bool = False
    ) -> None:
        self.path = path
        self.num_read = 0
        """Of what the file had: maps, matrices, or tokens that taught it."""
        self.num_failed_writes = 0
        self.problem: str | None = None
        """Why the file was not read, until it is replaced, or was not written the last time."""
        self.why_nothing = ""
        """Why it began with nothing learned, where it did."""
        self._policy = policy
        self._identity = identity
        self._source = source
        self._is_auto = is_auto
        self._unit = self._learned.unit
        self._saved = self._learned.generation
        self._is_kept = False  # the file has more than the policy can hold, and stays as it is
        self._has_failed = False  # the last write
        self._exchange: LearnedExchange | None = None
        self._due_s = time.monotonic() + SAVE_EVERY_S
        self._waiting: Snapshot | None = None  # to be written by `_writer`
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None  # what ended it

    def read(self, embedding_size: int | None = None) -> None:
        """Let the policy go on from what the file has, if there is one. `embedding_size`: of the model's inputs.

        Raises StoreError where it is damaged or another model's; a file that nobody named is then left to be replaced,
        with a warning.
        """
        if self.path is None:
            return
        if not self.path.exists():
            self.why_nothing = f"there was no {self.path}"
            return
        mine = self._learned
        try:
            theirs = read_learned(self.path, type(mine), identity=self._identity, shape=mine.shape).learned
            if embedding_size is not None:
                theirs.check_model(self.path, embedding_size)
        except StoreError as error:
            if not self._is_auto:
                raise
            self.problem = self.why_nothing = str(error)
            warnings.warn(f"expertly: starting without {self._unit}, the file will be replaced: {error}", stacklevel=2)
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
        """Whenever the file may be written, replicas of the model are told what is in it, and theirs is added."""
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
        """About once a minute, copy what has changed, which another thread then writes."""
        now_s = time.monotonic()
        if now_s < self._due_s or self.path is None:
            return
        self._due_s = now_s + SAVE_EVERY_S
        if (self._writer is None or not self._writer.is_alive()) and (shot := self._changed(copy=True)) is not None:
            self._waiting = shot
            self._writer = threading.Thread(target=self._serve, name="expertly-learned", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can be had: it is written later
                self._writer.start()

    def close(self) -> None:
        """Write what has changed. Nothing runs any more. Raises StoreError where a file that somebody named could not
        be written.
        """
        if self.path is None:
            return
        if self._writer is threading.current_thread():  # a garbage collection in it: it goes on with what waits
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
        """For results: what it began with and why, and where that is kept."""
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
        """What is to be written; None where that is in the file, or half done."""
        if self._is_kept or self._learned.generation == self._saved:
            return None
        shot = Snapshot.of(self._learned, copy=copy)
        if shot is None and self.problem != _INTERRUPTED:
            self.problem = _INTERRUPTED
            warnings.warn(f"expertly: {self.path}: {_INTERRUPTED}", stacklevel=2)
        return shot

    def _write(self, shot: Snapshot) -> bool:
        assert self.path is not None
        about = {"source": self._source, "created": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        try:
            save_learned(self.path, shot, self._identity, about)
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
        except BaseException as error:  # handed to who closes
            self._failure = error

    def _write_waiting(self) -> None:
        shot, self._waiting = self._waiting, None
        if shot is not None:
            self._write(shot)


def reuse_models(executor: Executor) -> list[ReuseModel]:
    """What each device's eviction learns by; none where it is another policy."""
    return [policy.model for policy in _evictions(executor) if isinstance(policy, Reuse)]


def save_of_eviction(executor: Executor, store: PackedStore, files: LearnedFiles) -> SavedState | None:
    """The file of what the first device's eviction learns, which it goes on from; None where it learns nothing. Raises
    as SavedState.read, and ConfigError for a file that was named for an eviction that shows nobody what it learns.
    """
    policy = _evictions(executor)[0]
    if policy.learned is None:
        if files.of_eviction is not None and not files.is_auto:
            raise ConfigError(
                f"learned={str(files.of_eviction)!r}: the system's eviction is not kept in files; accepted: "
                f"{AUTO}, {OFF}"
            )
        return None
    manifest = store.manifest
    saved = SavedState(policy, files.of_eviction, manifest.identity, manifest.source, is_auto=files.is_auto)
    saved.why_nothing = files.why_nowhere
    saved.read()
    return saved


def _evictions(executor: Executor) -> Sequence[EvictionPolicy]:
    """A policy of each device; those of one device learn together."""
    return [device.scheduler.cache.partitions[0].policy for device in executor.shards]


# -- replicas ----------------------------------------------------------------------------------------------------------


class LearnedExchange:
    """Between a policy that learns and replicas of the model: what it has learned goes out, theirs comes in. Whoever
    carries it between machines is not known here, and never waited for.

    `exchange` is called where the policy runs, the rest by any thread.
    """

    def __init__(self, policy: Policy) -> None:
        self.num_taken = 0
        """Maps or matrices of others."""
        self._policy = policy
        self._lock = threading.Lock()
        self._given: dict[str, LearnedStore] = {}
        self._told: dict[str, Array] | None = None
        self._told_generation: int | None = None
        self._seen: dict[bytes, None] = {}  # ever here, or told by others; the newest are last

    def give(self, other: str, arrays: Arrays) -> None:
        """What another has learned, its `state`, to be taken by the next `exchange`. Raises StoreError where it is of
        another model, or kind.
        """
        made = self._store().of_another(arrays)
        with self._lock:
            self._given[other] = made

    def take(self) -> dict[str, Array] | None:
        """What this one has learned, where that has changed since it was taken last."""
        with self._lock:
            told, self._told = self._told, None
        return told

    def exchange(self) -> None:
        """Take what was given, tell what is known. What others have had from here does not come back.

        A pass that runs is not learned from: what was found for it is of the store as it was.
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
        assert isinstance(learned, LearnedStore), "only what collects is exchanged"
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
