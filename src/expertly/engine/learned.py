"""What policies learn, in files beside the packed store that are read when a model is loaded and written when it goes;
and the weights of trained predictors.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from expertly.core.errors import ConfigError, StoreError
from expertly.data import demo_predictor
from expertly.policies.learned import LearnedState, read_learned, save_learned
from expertly.policies.promoe import LearnedWeights
from expertly.scheduler.systems import System
from expertly.store.cache import learned_beside
from expertly.store.packed import PackedStore

AUTO, OFF = "auto", "off"


def find_weights(predictor: str | Path | None, system: System, store: PackedStore) -> LearnedState | None:
    """The trained weights of the system's predictor; None where there are none. "auto" is the file beside the packed
    store, and for the demo model otherwise the file that ships with expertly; a class from outside needs a path.

    Raises ConfigError for a file that the system has no use for or that does not exist, StoreError for one that cannot
    be read, is damaged or another model's.
    """
    identity, kind = store.manifest.identity, system.weights
    if predictor in (None, OFF) or (predictor == AUTO and kind is not LearnedWeights):
        return None
    if kind is None:
        raise ConfigError(
            f"predictor={str(predictor)!r}: system {system.name!r} takes no trained weights; accepted: {AUTO}, {OFF}"
        )
    if predictor == AUTO and not (path := learned_beside(store.folder, kind.kind)).exists():
        shipped = demo_predictor()
        file = read_learned(shipped, LearnedWeights) if shipped.is_file() else None
        return None if file is None or file.identity != identity else file.learned
    if predictor != AUTO:
        is_file = False
        with contextlib.suppress(TypeError, ValueError, RuntimeError, OSError):  # no path, or no such user
            path = Path(predictor).expanduser()
            is_file = path.is_file()
        if not is_file:
            accepted = f"one made by `expertly lab train`, {AUTO}, {OFF}"
            raise ConfigError(f"predictor={str(predictor)!r}: no such file; accepted: {accepted}")
    return read_learned(path, kind, identity=identity).learned


class SavedState:
    """What a policy learns, restored from its file beside the store, which is replaced in the end.

    A file that does not fit the model or the policy, or cannot be written, is a warning, and `problem` says why.
    """

    def __init__(
        self, learned: LearnedState, store: PackedStore, *, is_kept: bool, embedding_size: int | None = None
    ) -> None:
        """`is_kept`: whether there is a file. `embedding_size`: of the model's inputs, where the state has any."""
        self.path = learned_beside(store.folder, learned.kind) if is_kept else None
        self.num_read = 0  # maps, matrices, or tokens learned from
        self.problem: str | None = None
        self._learned, self._manifest = learned, store.manifest
        if self.path is not None and os.path.lexists(self.path):
            sizes = None if embedding_size is None else {"H": (embedding_size, embedding_size)}
            try:
                read_learned(self.path, learned, identity=store.manifest.identity, sizes=sizes)
            except StoreError as error:
                self._warn(f"starting without {learned.unit}", error)
            self.num_read = learned.num_learned
        self._generation_in_file = learned.generation

    def close(self) -> None:
        """Write what has changed. The policy runs no more."""
        if self.path is None or self._learned.generation == self._generation_in_file:
            return
        source = self._manifest.source
        about = {"created": datetime.now(timezone.utc).isoformat(timespec="seconds"), "source": source}
        try:
            save_learned(self.path, self._learned, self._manifest.identity, about)
        except StoreError as error:
            self._warn(f"what was learned ({self._learned.unit}) was not saved", error)
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

    def _warn(self, said: str, error: StoreError) -> None:
        self.problem = str(error)
        warnings.warn(f"expertly: {said}: {error}", stacklevel=3)
