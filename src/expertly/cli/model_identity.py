"""Which model a trace is of, as the files that are made of it say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from expertly.core.errors import ConfigError

if TYPE_CHECKING:
    from expertly.core.geometry import LayerGeometry
    from expertly.trace.reader import Trace


def identity_of(model: str | None, trace: Trace) -> str:
    """Of the model, or of nothing but a trace. Raises ConfigError where the model cannot have made the trace."""
    from expertly.policies.learned import OF_A_TRACE

    if model is None:
        return f"{OF_A_TRACE}{trace.manifest.model}"
    from expertly.model.packing import source_folder
    from expertly.store.cache import entry_folder
    from expertly.store.checkpoint import Checkpoint
    from expertly.store.manifest import STORE_DTYPES, Manifest
    from expertly.store.packed import is_packed_store

    folder = source_folder(model)
    if is_packed_store(folder):
        identity, packed = Manifest.read(folder).identity, [folder]
    else:
        checkpoint = Checkpoint.open(folder)
        identity = checkpoint.identity
        packed = [entry_folder(str(checkpoint.config.get("model_type")), identity, dtype) for dtype in STORE_DTYPES]
    for store in filter(is_packed_store, packed):
        _check_layers(f"model={model!r}", Manifest.read(store).layers, trace)
    return identity


def _check_layers(where: str, layers: Sequence[LayerGeometry], trace: Trace) -> None:
    """Raises ConfigError naming the number that the trace has otherwise; what it does not know is not compared."""
    recorded = trace.manifest.layers
    if len(layers) != len(recorded):
        raise ConfigError(f"{where}: {len(layers)} MoE layers, but {trace.folder} has {len(recorded)}")
    for index, (layer, other) in enumerate(zip(layers, recorded, strict=True)):
        for name in ("num_experts", "top_k", "hidden_size", "intermediate_size", "num_matrices"):
            own, found = getattr(layer, name), getattr(other, name)
            if found not in (None, own):
                raise ConfigError(f"{where}: layer {index} has {name}={own}, but {found} in {trace.folder}")
