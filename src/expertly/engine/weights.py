"""Where the weights of a trained predictor are."""

from __future__ import annotations

import contextlib
from pathlib import Path

from expertly.core.errors import ConfigError
from expertly.data import demo_predictor
from expertly.policies.learned import LearnedState, read_learned
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
