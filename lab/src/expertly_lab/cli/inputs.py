"""What commands read and write: traces, files that systems begin with, and output files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from expertly.core.errors import ConfigError, TraceError
from expertly.core.geometry import DenseShape, LayerGeometry
from expertly.policies.learned import OF_A_TRACE, LearnedFile, LearnedState, read_learned
from expertly.scheduler.systems import get_system
from expertly_lab.sim.geometries import read_geometry
from expertly_lab.trace.reader import Trace
from expertly_lab.trace.schema import TraceLayer


def trace_geometry(
    trace: Trace, name: str | None
) -> tuple[tuple[LayerGeometry, ...] | None, DenseShape | None, str | None]:
    """Layers, dense shape and where they come from: the trace, or the description called `name`; else None."""
    if name is None:
        layers = trace.manifest.geometries
        return (None, None, None) if layers is None else (layers, trace.manifest.dense, "trace")
    read = read_geometry(name)
    _check_layers(f"geometry={name!r}", read.layers, trace)
    return read.layers, read.dense, read.name


def _shape(layers: Sequence[LayerGeometry | TraceLayer]) -> str:
    return f"{len(layers)} layers of {layers[0].num_experts} experts, top-{layers[0].top_k}"


def identity_of(model: str | None, trace: Trace) -> str:
    """The identity that files made from this trace carry: that of the model it is of, or without `model` one of the
    trace alone. Raises TraceError where the model's packed store cannot have made the trace.
    """
    if model is None:
        return f"{OF_A_TRACE}{trace.manifest.model}"
    from expertly.model.packing import source_folder
    from expertly.store.checkpoint import Checkpoint
    from expertly.store.manifest import Manifest
    from expertly.store.packed import is_packed_store

    folder = source_folder(model)
    if not is_packed_store(folder):
        return Checkpoint.open(folder).identity
    store = Manifest.read(folder)
    _check_layers(f"model={model!r}", store.layers, trace)
    return store.identity


def _check_layers(option: str, layers: Sequence[LayerGeometry], trace: Trace) -> None:
    """Raises TraceError where the layers do not route as the trace's do."""
    recorded = trace.manifest.layers
    if [(layer.num_experts, layer.top_k) for layer in layers] != [
        (layer.num_experts, layer.top_k) for layer in recorded
    ]:
        raise TraceError(f"{option}: {_shape(layers)}, but {trace.folder} routes {_shape(recorded)}")


def predictor_for(systems: Sequence[str], path: Path | None) -> LearnedFile[LearnedState] | None:
    """The trained weights in a file. Raises ConfigError where none of the systems uses any, and what reading raises."""
    if path is None:
        return None
    kinds = [kind for kind in (get_system(name).weights for name in systems) if kind is not None]
    if not kinds:
        raise ConfigError(f"predictor={str(path)!r}: no system of {', '.join(systems)} takes trained weights")
    return read_learned(path, *kinds)


def check_writable(path: Path) -> None:
    """Raises ConfigError before the work begins where its result could not be written."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"out={str(path)!r}: must be a file, in a folder that exists and is writable")
