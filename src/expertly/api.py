"""`expertly.load`, `expertly.stats` and `expertly.unload`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from expertly.core.costs import refuse_compressed
from expertly.core.errors import ConfigError, ModelUseError
from expertly.core.geometry import Geometry, fitting_segments
from expertly.core.placement import Placement
from expertly.engine.backends import make_backend
from expertly.engine.compute_threads import ComputeThreads
from expertly.engine.device_choice import choose_devices
from expertly.engine.device_loading import make_group
from expertly.engine.division import Request, divide
from expertly.engine.footprint import give_back_unused, keep_few_primitives
from expertly.engine.instructions import keep_off_trapped_instructions
from expertly.engine.learned import AUTO, find_files, find_weights, save_of_eviction
from expertly.engine.prediction import Matcher, choose_matcher
from expertly.engine.prediction_loading import make_prefetching
from expertly.engine.runtime import Engine, Executor
from expertly.engine.saved_choice import Settings, find_choice
from expertly.engine.shard import Shard
from expertly.engine.stats import Stats
from expertly.model.hooks import between_passes, experts_modules, use_kernels
from expertly.model.loading import load_dense, load_tokenizer
from expertly.model.packing import pack_cached
from expertly.native.kernels import choose_kernels
from expertly.policies.allocation.moepic import SplitPlan, read_plan
from expertly.policies.known import Known
from expertly.scheduler.budget import Budget
from expertly.scheduler.decisions import DecisionsFile, header_of, record
from expertly.scheduler.presets import AUTO_SYSTEM, get_runnable
from expertly.scheduler.scheduler import Scheduler
from expertly.scheduler.system import System
from expertly.store.packed import PackedStore


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
    system: str = AUTO_SYSTEM,
    segments: int | None = None,
    device: str | None = None,
    devices: str | Sequence[str] | None = None,
    dtype: str | None = None,
    ring: int | None = None,
    order: str | None = None,
    context: int | None = None,
    host_memory: str | int = "auto",
    codec: str = "auto",
    compressed: object = None,
    decisions: str | Path | None = None,
    maps: str | Path | None = AUTO,
    predictor: str | Path | None = AUTO,
    plan: str | Path | SplitPlan | None = None,
    matcher: Matcher = "auto",
    progress: Progress | None = None,
) -> tuple[Any, Any]:
    """An ordinary transformers model whose experts live in `memory`, and its tokenizer (None where it has none).

    `model`: a folder, a packed store or a hub id; None is the demo model. `memory`: all expert slots on the device, a
    share of the expert bytes ("25%"), an amount ("1.5GiB", bytes) or "auto": what is free after the dense part and the
    KV cache of `context` tokens. `system`: a preset or one with other parts; "auto" is what `expertly tune` chose for
    this model at the nearest memory, else `expertly`, or `lru` for tiny experts (`stats` say which, and why).
    `segments`: P, the parts an expert is cut into (default: the system's). `ring`: slots of it through which a layer
    streams what it does not keep (default: one token's experts, and all where the system keeps none). `order`: instead
    of the system's; "resident" computes what is here first, "id" by rising id. `device`: where the model runs (default:
    the accelerator, where there is one); `devices`: several, over which experts are spread, "cuda:0,cuda:1" or logical
    ones, "cpu:0,cpu:1"; `memory` is their sum then, `ring` that of each. `host_memory`: RAM for experts behind an
    accelerator. `codec`: how experts are stored on disk, "none" (as they are computed with), "planes" (compressed, bit
    for bit the same) or "auto": as they are stored already, else what is faster by measuring. `compressed`
    has gone: any value of it is refused. `decisions`: a file that takes every observation and decision
    of the control plane, for `expertly trace replay`. `maps`: the file that what a system learns while it runs (expert
    maps, activation matrices, or what `expertly` learns of reuse) is read from, where it is there, and written to about
    every minute and at unload; "auto" is beside the packed store, "off" or None is nowhere. Reuse is kept of one
    device, and not with `decisions`: they begin with nothing learned. `predictor`: the file of trained weights that a
    system with a learned predictor takes (`expertly train-predictor`); "auto" is beside the packed store, or what ships
    with the demo model, "off" or None is none. `plan`: the file of a split plan (`expertly configure`) that a system
    with split caching begins with; it is of this model, this P and no more memory than this. `matcher`: "auto" is
    "thread", or "inline" where the system waits for its predictions; "thread" predicts beside the forward pass,
    "inline" within it, so that a run can be repeated exactly.
    Raises ExpertlyError subclasses that name the argument and what is accepted.
    """
    refuse_compressed(compressed)
    targets = choose_devices(device, devices)
    why_system = packed = None
    if system == AUTO_SYSTEM:
        packed = pack_cached(model, dtype, progress=_labelled(progress, "packing"), codec=codec)
        asked = Settings(segments, memory, codec, plan, predictor)
        system, settings, why_system = find_choice(packed, asked, Request(memory, ring, context), targets)
        if settings.codec != codec:
            packed = None
        segments, memory, codec, plan, predictor = settings
    parts = get_runnable(system)
    order = parts.ordered(order)
    matcher = choose_matcher(parts, matcher)
    target = targets[0]
    if len(targets) > 1 and decisions is not None:
        raise ConfigError(f"decisions={str(decisions)!r}: {len(targets)} devices decide apart; accepted: one device")
    if target.type == "cpu":
        keep_few_primitives()
        keep_off_trapped_instructions()
    choose_kernels(target)  # before anything is made that would have to be ended where it raises
    store = packed or pack_cached(model, dtype, progress=_labelled(progress, "packing"), codec=codec)
    files = find_files(maps, parts, store, num_devices=len(targets), is_replayed=decisions is not None)
    weights = find_weights(predictor, parts, store)
    geometry = store.geometry(fitting_segments(store.manifest.layers, parts.segments) if segments is None else segments)
    placement = Placement(geometry, len(targets))
    geometries = [share.geometry for share in placement.shares]
    division = divide(store, geometries, parts, Request(memory, ring, context), targets)
    known = Known() if plan is None else _known_of(plan, parts, geometries, division.budgets)
    budgets = [parts.budget(one, budget, known) for one, budget in zip(geometries, division.budgets, strict=True)]
    torch_dtype = getattr(torch, store.manifest.dtype)
    executor: Executor
    journal: DecisionsFile | None = None
    with ExitStack() as opened:  # closed again where what comes next raises
        if len(targets) == 1:
            scheduler, journal = _scheduler(parts, geometry, budgets[0], known, order, decisions)
            if journal is not None:
                opened.callback(journal.close)
            backend = make_backend(target, store, geometry, budgets[0].pool_slots(), torch_dtype, host_memory)
            opened.callback(backend.close)
            executor = Shard(str(target), scheduler, backend)
        else:
            schedulers = [parts.scheduler(*one, order=order) for one in zip(geometries, budgets, strict=True)]
            executor = make_group(placement, targets, schedulers, store, torch_dtype, host_memory, make_backend)
            opened.callback(executor.close)
        decodes_here = store.codec != "none" and len(targets) == 1 and target.type == "cpu"
        engine = Engine(executor, ComputeThreads(geometry, budgets[0].memory_nbytes) if decodes_here else None)
        opened.pop_all()

    def close() -> None:
        try:
            engine.close()
        finally:
            if journal is not None:
                journal.close()

    try:
        engine.reuse = save_of_eviction(executor, store, files)
        home = executor.shards[0].device.torch_device
        loaded = load_dense(store.folder, store.manifest, torch_dtype, home, engine)
        executor.bind(experts_modules(loaded))
        use_kernels(loaded, executor.shards[0].kernels)
        engine.prefetching = make_prefetching(parts, loaded, store, engine, matcher, files, weights=weights)
        tokenizer = load_tokenizer(store.folder)
        if target.type == "cpu":
            give_back_unused()
        if parts.keeps_everything:
            engine.preload(_labelled(progress, "loading"))
    except BaseException:
        close()
        raise
    finalizer = weakref.finalize(loaded, close)
    loaded._expertly_handle = Handle(store, engine, Stats(engine, parts, store, division.reason, why_system), finalizer)
    return loaded, tokenizer


def stats(model: Any) -> Stats:
    """Counters of a loaded model, by layer and phase. Raises ModelUseError for any other model."""
    return handle(model).stats


def unload(model: Any) -> None:
    """Free the threads, files and memory behind a loaded model; it cannot run any more. Idempotent. A forward pass that
    another thread runs raises EngineClosedError.
    """
    found = handle(model)
    found.engine.stop()
    with between_passes(model):
        found.finalizer()


def handle(model: Any) -> Handle:
    """What stands behind a loaded model. Raises ModelUseError for any other model."""
    found = getattr(model, "_expertly_handle", None)
    if not isinstance(found, Handle):
        raise ModelUseError(f"{type(model).__name__} was not loaded by expertly.load: there is nothing behind it")
    return found


def _known_of(
    plan: str | Path | SplitPlan, system: System, geometries: Sequence[Geometry], budgets: Sequence[Budget]
) -> Known:
    """With the plan in the file. Raises ConfigError where it cannot be read, or kept."""
    if len(geometries) > 1:
        raise ConfigError(f"plan={str(plan)!r}: {len(geometries)} devices share experts out; accepted: one device")
    read = plan if isinstance(plan, SplitPlan) else read_plan(plan)
    system.check_plan(read, geometries[0], budgets[0])
    return Known(plan=read)


def _scheduler(
    system: System, geometry: Geometry, budget: Budget, known: Known, order: str, decisions: str | Path | None
) -> tuple[Scheduler, DecisionsFile | None]:
    """The system's control plane; with `decisions`, one that writes them to the file."""
    if decisions is None:
        return system.scheduler(geometry, budget, known, order), None
    scheduler = system.scheduler(geometry, budget, known, order)
    file = DecisionsFile(Path(decisions), header_of(system, geometry, budget, order, known.plan))
    return record(scheduler, file.write), file


def _labelled(progress: Progress | None, what: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(what, done, total)
