"""What a loaded model has learned of reuse in a file: read when it is loaded, written back as it changes."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy.typing as npt

from expertly.core.errors import ConfigError, StoreError
from expertly.engine.executor import Executor
from expertly.engine.saved_maps import AUTO, OFF
from expertly.policies.eviction.reuse import Reuse
from expertly.policies.maps.store import MapShape
from expertly.policies.reuse.model import ReuseModel
from expertly.policies.state.reuse_file import ReuseFile, save_reuse
from expertly.scheduler.system import System
from expertly.store.cache import learned_beside
from expertly.store.packed import PackedStore

SAVE_EVERY_S = 60.0
"""What changes is written about so often, behind the first pass that ends then."""

_INTERRUPTED = "a pass was interrupted while it learned: what it has learned since is not saved"

State = Mapping[str, npt.NDArray[Any]]


def reuse_path(
    maps: str | Path | None,
    path: Path | None,
    system: System,
    store: PackedStore,
    num_devices: int,
    *,
    is_replayed: bool,
) -> tuple[Path | None, str]:
    """Where what a model learns of reuse goes; or None, and why it is kept nowhere. `path` is that of `maps_path`.

    A file that is named is that of what the system's predictor learns, where it has one that does. Raises ConfigError
    for one that is named and cannot be of use.
    """
    is_named = path is not None and maps != AUTO
    if path is None or not system.learns_reuse:
        return None, f"maps={OFF}"
    if system.learns != "reuse":
        if is_named:
            return None, f"{path} is of what it predicts by"
        path = learned_beside(store.folder, "reuse")
    why = ""
    if num_devices > 1:
        why = f"{num_devices} devices learn apart"
    elif is_replayed:
        why = "decisions are written down, and a replay begins with nothing learned"
    if is_named and why:
        raise ConfigError(f"maps={str(maps)!r}: {why}; accepted: {AUTO}, {OFF}")
    return (None, why) if why else (path, "")


def reuse_models(executor: Executor) -> list[ReuseModel]:
    """What each device's control plane learns by; none where its eviction is another."""
    policies = (device.scheduler.cache.partitions[0].policy for device in executor.devices)
    return [policy.model for policy in policies if isinstance(policy, Reuse)]


def open_reuse(
    executor: Executor, store: PackedStore, path: Path | None, why_none: str, *, is_auto: bool
) -> SavedReuse | None:
    """What a model begins with, and where it goes; None where it learns nothing of reuse. Raises as SavedReuse.read,
    and ConfigError for a file that was named for an eviction of others, which shows nobody what it learns.
    """
    models = reuse_models(executor)
    if not models:
        if path is not None and not is_auto:
            raise ConfigError(
                f"maps={str(path)!r}: the system's eviction is not kept in files; accepted: {AUTO}, {OFF}"
            )
        return None
    saved = SavedReuse(models[0], store.manifest.identity, MapShape.of(executor.geometry), path, is_auto=is_auto)
    saved.why_nothing = why_none
    saved.about["source"] = store.manifest.source
    saved.read()
    return saved


class SavedReuse:
    """The file of what `model` learns, which forward passes change. `path` None: there is none. `is_auto`: nobody named
    it, so that it must not fail what was asked for.
    """

    def __init__(
        self, model: ReuseModel, identity: str, shape: MapShape, path: Path | None, *, is_auto: bool = False
    ) -> None:
        self.path = path
        self.num_read = 0
        """Tokens from which what the file had was learned."""
        self.why_nothing = ""
        """Why it began with nothing learned, where it did."""
        self.num_failed_writes = 0
        self.problem: str | None = None
        """Why the file was not read, until it is replaced, or was not written the last time."""
        self.about: dict[str, str | int | float | None] = {}
        self._model = model
        self._identity = identity
        self._shape = shape
        self._is_auto = is_auto
        self._saved = model.num_tokens
        self._due_s = time.monotonic() + SAVE_EVERY_S
        self._waiting: State | None = None  # to be written
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None  # what ended it
        self._has_failed = False  # the last write

    def read(self) -> None:
        """Let the model go on from what the file has, if there is one.

        Raises StoreError where it is damaged, or another model's; a file that nobody named is then left to be replaced,
        with a warning.
        """
        if self.path is None:
            return
        if not self.path.exists():
            self.why_nothing = f"there was no {self.path}"
            return
        try:
            file = ReuseFile.read(self.path, self._identity, self._shape)
        except StoreError as error:
            if not self._is_auto:
                raise
            self.problem = self.why_nothing = str(error)
            warnings.warn(
                f"expertly: starting with nothing learned of reuse, the file will be replaced: {error}", stacklevel=2
            )
            return
        self._model.restore(file.state)
        self.num_read = self._saved = file.num_tokens

    def pass_ended(self) -> None:
        """Told by the thread that runs the model: about once a minute it copies what has changed, which another thread
        then writes.
        """
        now_s = time.monotonic()
        if now_s < self._due_s or self.path is None:
            return
        self._due_s = now_s + SAVE_EVERY_S
        if (self._writer is None or not self._writer.is_alive()) and (state := self._changed()) is not None:
            self._waiting = state
            self._writer = threading.Thread(target=self._serve, name="expertly-learned", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can be had: it is written later
                self._writer.start()

    def close(self) -> None:
        """Write what has changed. Nothing runs any more. Raises StoreError where a file that somebody named could not
        be written.
        """
        if self.path is None:
            return
        if (state := self._changed()) is not None:
            self._waiting = state
        if self._writer is threading.current_thread():  # a garbage collection in it: it goes on with what waits
            return
        if self._writer is not None and self._writer.is_alive():
            self._writer.join()
        self._write_waiting()
        if self._failure is not None:
            raise self._failure
        if self._has_failed and not self._is_auto:
            raise StoreError(f"maps={str(self.path)!r}: not saved: {self.problem}")

    def facts(self) -> dict[str, Any]:
        """For results: what it began with and why, and where that is kept."""
        origin = f"what {self.num_read} tokens had taught" if self.num_read else "nothing learned"
        why = str(self.path) if self.num_read else self.why_nothing
        return {
            "history": "warm" if self.num_read else "cold",
            "says": f"began with {origin}: {why}",
            "tokens": self._model.num_tokens,
            "tokens_read": self.num_read,
            "file": None if self.path is None else str(self.path),
            "failed_writes": self.num_failed_writes,
            "problem": self.problem,
        }

    def _changed(self) -> State | None:
        """A copy of what the model has learned; None where that is in the file, or half done."""
        if self._model.num_tokens == self._saved:
            return None
        state = self._model.state()
        if state is None and self.problem != _INTERRUPTED:
            self.problem = _INTERRUPTED
            warnings.warn(f"expertly: {self.path}: {_INTERRUPTED}", stacklevel=2)
        return state

    def _serve(self) -> None:
        try:
            while self._waiting is not None:
                self._write_waiting()
        except BaseException as error:  # handed to who closes
            self._failure = error

    def _write_waiting(self) -> None:
        state, self._waiting = self._waiting, None
        if state is None:
            return
        assert self.path is not None
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        try:
            save_reuse(self.path, state, self._identity, self._shape, {**self.about, "created": created})
        except StoreError as error:
            self._has_failed = True
            self.num_failed_writes += 1
            self.problem = str(error)
            warnings.warn(f"expertly: what was learned of reuse was not saved: {error}", stacklevel=2)
            return
        self._saved, self._has_failed = int(state["tokens"].max()), False
        if self.problem != _INTERRUPTED:
            self.problem = None
