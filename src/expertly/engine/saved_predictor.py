"""The trained weights of a predictor, found for a loaded model."""

from __future__ import annotations

import contextlib
from pathlib import Path

from expertly.core.errors import ConfigError
from expertly.data import demo_predictor
from expertly.engine.saved_maps import AUTO, OFF
from expertly.policies.learned_file import PredictorFile
from expertly.policies.predictor.learned import LearnedWeights
from expertly.scheduler.system import System
from expertly.store.cache import learned_beside
from expertly.store.packed import PackedStore


def find_weights(predictor: str | Path | None, system: System, store: PackedStore) -> LearnedWeights | None:
    """Those that the system's predictor takes; None where there are none. "auto" is the file beside the packed store,
    or else, for the demo model, the one that ships with it.

    Raises ConfigError for a file that the system has no use for or that is not there, StoreError for one that cannot be
    read, is damaged or of another model.
    """
    if predictor is None or predictor == OFF:
        return None
    identity = store.manifest.identity
    if predictor == AUTO:
        if not system.takes_weights:
            return None
        beside = learned_beside(store.folder, "predictor")
        if beside.exists():
            return PredictorFile.read(beside, identity).weights
        shipped = demo_predictor()
        found = PredictorFile.read(shipped) if shipped.is_file() else None
        return None if found is None or found.identity != identity else found.weights
    if not system.takes_weights:
        raise ConfigError(
            f"predictor={str(predictor)!r}: system {system.name!r} takes no trained weights; accepted: {AUTO}, {OFF}"
        )
    with contextlib.suppress(TypeError, ValueError, RuntimeError, OSError):  # no path, or of a user that is not there
        path = Path(predictor).expanduser()
        if path.is_file():
            return PredictorFile.read(path, identity).weights
    raise ConfigError(
        f"predictor={str(predictor)!r}: no such file; accepted: one made by `expertly train-predictor`, {AUTO}, {OFF}"
    )
