"""What commands read and write: models, traces, files that systems begin with, and output files."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from expertly.cli.output import message, progress_bar
from expertly.core.errors import ConfigError, TraceError
from expertly.core.geometry import DenseShape, LayerGeometry
from expertly.core.untrusted import read_json_object
from expertly.options import LoadOptions, load_arguments
from expertly.policies.allocation.moepic import SplitPlan, read_plan
from expertly.policies.learned import OF_A_TRACE, LearnedFile, LearnedState, read_learned
from expertly.scheduler.presets import get_system
from expertly.sim.hardware import read_geometry
from expertly.trace.reader import Trace
from expertly.trace.schema import FORMAT, MANIFEST_NAME, TraceLayer


def load_model(model: str | None, options: LoadOptions, **others: Any) -> tuple[Any, Any]:
    """A model and its tokenizer (None where it has none); `others` replace options."""
    from expertly.model.lean import import_lean

    import_lean()
    from expertly import api

    with progress_bar() as progress:
        loaded, tokenizer = api.load(model, progress=progress, **{**load_arguments(options), **others})
    say_system(loaded)
    if options.quantize is not None:
        message(f"expertly: experts are {api.handle(loaded).store.manifest.rounding}")
    return loaded, tokenizer


def say_system(loaded: Any) -> None:
    """Tell the user which system `auto` chose. Where nothing was tuned for the model that is only advice, for
    terminals.
    """
    from expertly import api
    from expertly.engine.choice import choices_path

    reason = api.stats(loaded).system_reason
    if reason is not None and (choices_path(api.handle(loaded).store).exists() or sys.stderr.isatty()):
        message(f"expertly: {reason}")


def is_trace(source: str | None) -> bool:
    """Whether `source` is a folder with a trace's manifest."""
    if source is None:
        return False
    try:
        return read_json_object(Path(source) / MANIFEST_NAME, TraceError).get("format") == FORMAT
    except TraceError:
        return False


def trace_geometry(
    trace: Trace, name: str | None
) -> tuple[tuple[LayerGeometry, ...] | None, DenseShape | None, str | None]:
    """The layers and the dense shape to simulate, and where they come from: the trace, or the description called
    `name`. All None where neither knows the sizes.
    """
    recorded = trace.manifest.layers
    if name is None:
        layers = trace.manifest.geometries
        return (None, None, None) if layers is None else (layers, trace.manifest.dense, "trace")
    given = read_geometry(name)
    if [(one.num_experts, one.top_k) for one in given.layers] != [(one.num_experts, one.top_k) for one in recorded]:
        raise TraceError(f"geometry={name!r}: {_shape(given.layers)}, but {trace.folder} routes {_shape(recorded)}")
    return given.layers, given.dense, given.name


def _shape(layers: Sequence[LayerGeometry | TraceLayer]) -> str:
    return f"{len(layers)} layers of {layers[0].num_experts} experts, top-{layers[0].top_k}"


def identity_of(model: str | None, trace: Trace) -> str:
    """The identity that files made from this trace carry: that of the model it is of, or without `model` one of the
    trace alone. Raises ConfigError where the model cannot have made the trace.
    """
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
    """Raises ConfigError naming the first number in which the layers differ from the trace's; sizes that the trace does
    not know are not compared.
    """
    recorded = trace.manifest.layers
    if len(layers) != len(recorded):
        raise ConfigError(f"{where}: {len(layers)} MoE layers, but {trace.folder} has {len(recorded)}")
    for index, (layer, other) in enumerate(zip(layers, recorded, strict=True)):
        for name in ("num_experts", "top_k", "hidden_size", "intermediate_size", "num_matrices"):
            own, found = getattr(layer, name), getattr(other, name)
            if found not in (None, own):
                raise ConfigError(f"{where}: layer {index} has {name}={own}, but {found} in {trace.folder}")


def predictor_for(systems: Sequence[str], path: Path | None) -> LearnedFile[LearnedState] | None:
    """The trained weights in a file. Raises ConfigError where none of the systems uses any, and what reading raises."""
    if path is None:
        return None
    kinds = [kind for kind in (get_system(name).weights for name in systems) if kind is not None]
    if not kinds:
        raise ConfigError(f"predictor={str(path)!r}: no system of {', '.join(systems)} takes trained weights")
    return read_learned(path, *kinds)


def plan_for(systems: Sequence[str], path: Path | None) -> SplitPlan | None:
    """The plan in a file; see `predictor_for`."""
    if path is None:
        return None
    if not any(get_system(name).takes_plan for name in systems):
        raise ConfigError(f"plan={str(path)!r}: no system of {', '.join(systems)} begins with a plan")
    return read_plan(path)


def check_writable(path: Path | None) -> None:
    """Raises ConfigError before the work begins where its result could not be written."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"out={str(path)!r}: must be a file, in a folder that exists and is writable")
