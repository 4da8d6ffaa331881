"""`expertly.load`, `expertly.stats` and `expertly.unload`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from expertly.control.budget import Budget, split_budget
from expertly.control.controller import Controller
from expertly.core.amounts import parse_memory
from expertly.core.errors import BudgetError, ConfigError, ModelUseError
from expertly.core.geometry import Geometry
from expertly.decisions import DecisionsFile, header_of
from expertly.engine.backends import available_nbytes, make_backend
from expertly.engine.engine import Engine
from expertly.engine.instructions import keep_off_trapped_instructions
from expertly.engine.memory import choose_budget, kv_cache_nbytes
from expertly.engine.prediction import MATCHERS, Matcher
from expertly.engine.prediction_loading import make_prefetching
from expertly.engine.saved_maps import AUTO, maps_path
from expertly.engine.stats import Stats
from expertly.models.loading import experts_modules, load_dense, load_tokenizer
from expertly.models.packing import pack_cached
from expertly.parts import System
from expertly.store.packed import PackedStore
from expertly.systems import DEFAULT_SYSTEM, get_system, runnable_systems

DEFAULT_CONTEXT = 4096
"""Tokens of KV cache that `memory="auto"` leaves room for."""


@dataclass(frozen=True)
class Handle:
    """A loaded model's store, engine and statistics; `finalizer` closes the engine, once."""

    store: PackedStore
    engine: Engine
    stats: Stats
    finalizer: Callable[[], object]


Progress = Callable[[str, int, int], None]
"""`progress(what, done_nbytes, total_nbytes)`: what is "packing" or "loading"."""


def load(
    model: str | None = None,
    *,
    memory: str | int | None = None,
    system: str = DEFAULT_SYSTEM,
    segments: int = 1,
    device: str | None = None,
    dtype: str | None = None,
    ring: int | None = None,
    order: str = "resident",
    context: int | None = None,
    host_memory: str | int = "auto",
    decisions: str | Path | None = None,
    maps: str | Path | None = AUTO,
    matcher: Matcher = "thread",
    progress: Progress | None = None,
) -> tuple[Any, Any]:
    """An ordinary transformers model whose experts live in `memory`, and its tokenizer (None where it has none).

    `model`: a folder, a packed store or a hub id; None is the demo model. `memory`: all expert slots on the device, a
    share of the expert bytes ("25%"), an amount ("1.5GiB", bytes) or "auto": what is free after the dense part and
    the KV cache of `context` tokens. `segments`: P, the parts an expert is cut into. `ring`: slots of it through
    which a layer streams what it does not keep (default: one token's experts). `order`: "resident" computes what is
    here first, "id" one expert at a time. `host_memory`: pinned RAM for experts behind an accelerator. `decisions`: a
    file that takes every observation and decision of the control plane, for `expertly trace replay`. `maps`: the file
    that the expert maps of a system with maps are read from, where it is there, and written to about every minute and
    at unload; "auto" is beside the packed store, "off" or None is nowhere. `matcher`: "thread" predicts beside the
    forward pass, "inline" within it, so that a run can be repeated exactly.
    Raises ExpertlyError subclasses that name the argument and what is accepted.
    """
    parts = get_system(system)
    if "future" in parts.needs:
        accepted = ", ".join(runnable_systems())
        raise ConfigError(
            f"system={system!r}: needs to know the demands to come (see `simulate`); accepted: {accepted}"
        )
    if order not in ("resident", "id"):
        raise ConfigError(f"order={order!r}: unknown; accepted: resident, id")
    if matcher not in MATCHERS:
        raise ConfigError(f"matcher={matcher!r}: unknown; accepted: {', '.join(MATCHERS)}")
    if matcher != MATCHERS[0] and parts.prediction == "none":
        raise ConfigError(f"matcher={matcher!r}: system {system!r} predicts nothing; accepted: a system that does")
    target = _device(device)
    if target.type == "cpu":
        keep_off_trapped_instructions()
    store = pack_cached(model, dtype, progress=_labelled(progress, "packing"))
    path = maps_path(maps, parts, store)
    geometry = store.geometry(segments)
    budget, reason = _budget(store, geometry, parts, memory, ring, target, context)
    torch_dtype = getattr(torch, store.manifest.dtype)
    controller, journal = _controller(parts, geometry, budget, order, decisions)
    backend = make_backend(target, store, geometry, budget.pool_slots(), torch_dtype, host_memory)
    engine = Engine(controller, backend)

    def close() -> None:
        try:
            engine.close()
        finally:
            if journal is not None:
                journal.close()

    try:
        loaded = load_dense(store.folder, store.manifest, torch_dtype, target, engine)
        engine.bind(experts_modules(loaded))
        engine.prefetching = make_prefetching(parts, loaded, store, engine, matcher, path, path_is_auto=maps == AUTO)
        tokenizer = load_tokenizer(store.folder)
        if parts.keeps_everything:
            engine.preload(_labelled(progress, "loading"))
    except BaseException:
        close()
        raise
    finalizer = weakref.finalize(loaded, close)
    loaded._expertly_handle = Handle(store, engine, Stats(engine, parts.name, reason), finalizer)
    return loaded, tokenizer


def stats(model: Any) -> Stats:
    """Counters of a loaded model, by layer and phase. Raises ModelUseError for any other model."""
    return handle(model).stats


def unload(model: Any) -> None:
    """Free the threads, files and memory behind a loaded model; it cannot run any more. Idempotent."""
    handle(model).finalizer()


def handle(model: Any) -> Handle:
    """What stands behind a loaded model. Raises ModelUseError for any other model."""
    found = getattr(model, "_expertly_handle", None)
    if not isinstance(found, Handle):
        raise ModelUseError(f"{type(model).__name__} was not loaded by expertly.load: there is nothing behind it")
    return found


def _controller(
    system: System, geometry: Geometry, budget: Budget, order: str, decisions: str | Path | None
) -> tuple[Controller, DecisionsFile | None]:
    """The system's control plane; with `decisions`, one that writes them to the file."""
    if decisions is None:
        return system.controller(geometry, budget, order=order), None
    controller = system.journaled_controller(geometry, budget, order=order)
    file = DecisionsFile(Path(decisions))
    controller.start_journal(header_of(system, geometry, budget, order), file.write)
    return controller, file


def _device(device: str | None) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    name = device or (accelerator.type if accelerator is not None else "cpu")
    try:
        target = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name!r}: unknown; accepted: cpu, cuda, cuda:N") from None
    if target.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r}: no backend for it; accepted: cpu, cuda, cuda:N")
    if target.type == "cuda" and (accelerator is None or accelerator.type != "cuda"):
        raise ConfigError(f"device={name!r}: this machine (or this torch) has no CUDA device; accepted: cpu")
    return target


def _budget(
    store: PackedStore,
    geometry: Geometry,
    system: System,
    memory: str | int | None,
    ring: int | None,
    device: torch.device,
    context: int | None,
) -> tuple[Budget, str]:
    """The slots and why so many. `resident` takes everything and accepts no less."""
    if context is not None and context < 1:
        raise ConfigError(f"context={context}: must be at least 1 token")
    if context is not None and (system.keeps_everything or memory not in (None, "auto")):
        raise ConfigError(f"context={context}: only memory='auto' leaves room for it, not memory={memory!r}")
    if system.keeps_everything:
        nbytes = parse_memory("100%" if memory in (None, "auto") else memory, geometry.nbytes)
        if nbytes is not None and nbytes < geometry.nbytes:
            raise ConfigError(
                f"memory={memory!r}: system {system.name!r} keeps all experts and needs {geometry.nbytes} bytes (100%)"
            )
        return split_budget(geometry, geometry.nbytes), f"system {system.name}: all experts"
    nbytes = parse_memory("auto" if memory is None else memory, geometry.nbytes)
    if nbytes is None:
        tokens = context or DEFAULT_CONTEXT
        cache = kv_cache_nbytes(store.config, tokens, geometry.layers[0].itemsize)
        chosen = choose_budget(available_nbytes(device), geometry.nbytes, store.dense_nbytes, cache, tokens)
        try:
            return split_budget(geometry, chosen.nbytes, ring), chosen.reason
        except BudgetError as error:
            raise BudgetError(f"{error}; {chosen.reason}") from None
    return split_budget(geometry, nbytes, ring), f"memory {memory}"


def _labelled(progress: Progress | None, what: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(what, done, total)
