"""`expertly.load`, `expertly.stats` and `expertly.unload`."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from expertly.core.errors import ConfigError, ModelUseError
from expertly.core.geometry import Geometry, fitting_segments
from expertly.core.placement import Placement
from expertly.engine.choice import LoadSettings, find_choice
from expertly.engine.device import choose_devices, kind_of
from expertly.engine.group import make_executor
from expertly.engine.learned import LearnedFiles, find_files, find_weights, save_of_eviction
from expertly.engine.memory import Division, MemoryRequest, SharedCache, divide
from expertly.engine.observe import CannotLookAheadError, Matcher, choose_matcher, make_prefetching
from expertly.engine.process import (
    give_back_code,
    give_back_heap,
    give_back_large_blocks,
    keep_few_primitives,
    keep_off_trapped_instructions,
)
from expertly.engine.rounding import measured
from expertly.engine.runtime import ComputeThreads, Engine, Executor
from expertly.engine.stats import Stats
from expertly.model.dense import use_kernels
from expertly.model.hooks import between_passes, check_passes, experts_modules
from expertly.model.loading import load_dense, load_tokenizer
from expertly.model.packing import pack_cached
from expertly.model.tiled import use_tiles
from expertly.native.kernels import choose_kernels
from expertly.options import LoadOptions, described, names_of_today
from expertly.policies.allocation.moepic import SplitPlan, read_plan
from expertly.policies.known import Known
from expertly.policies.predictor.learned import LearnedWeights
from expertly.scheduler.budget import Budget
from expertly.scheduler.decisions import DecisionsFile, header_of, record
from expertly.scheduler.presets import AUTO_SYSTEM, get_runnable, without_prediction
from expertly.scheduler.system import System
from expertly.store.packed import PackedStore


@dataclass(frozen=True)
class Handle:
    """A loaded model's store, engine, statistics and memory; `finalizer` closes the engine, once."""

    store: PackedStore
    engine: Engine
    stats: Stats
    division: Division
    finalizer: Callable[[], object]


Progress = Callable[[str, int, int], None]
"""`progress(what, done_nbytes, total_nbytes)`: what is "packing", "measuring" (what rounding costs) or "loading"."""


def load(model: str | None = None, *, progress: Progress | None = None, **options: Any) -> tuple[Any, Any]:
    """An ordinary transformers model whose experts live in a stated amount of memory, and its tokenizer (None where it
    has none). `model`: a folder, a GGUF file, a packed store or a hub id; None is the demo model. `progress`: see
    Progress.

    Raises ExpertlyError subclasses that name the option and what is accepted; TypeError for one that there is not.
    """
    return open_model(model, LoadOptions(**names_of_today(options)), progress)


def open_model(
    model: str | None,
    asked: LoadOptions,
    progress: Progress | None = None,
    cache: Callable[[PackedStore], SharedCache] | None = None,
) -> tuple[Any, Any]:
    """See `load`. `cache`: for a server, what the KV cache of its requests may be; its division of the memory is in the
    model's handle.
    """
    targets = choose_devices(asked.device, asked.devices)
    with ExitStack() as opened:  # closed again where what comes next raises
        chosen = _choose(model, asked, targets, progress, cache)
        parts, store = chosen.parts, chosen.store
        if kind_of(targets[0]).runs_on_host:
            give_back_code()  # of imports, before weights come
        executor = _open_executor(chosen, targets, opened)
        engine = Engine(executor, _threads_beside_decoders(store, executor))
        opened.callback(engine.close)
        engine.reuse = save_of_eviction(executor, store, chosen.files)
        home = executor.shards[0]
        dtype = getattr(torch, store.manifest.dtype)
        loaded = load_dense(store.folder, store.manifest, dtype, home.device.torch_device, engine)
        executor.bind(experts_modules(loaded))
        use_tiles(loaded, home.kernels)
        use_kernels(loaded, home.kernels)
        if chosen.division.room is not None:
            check_passes(loaded, chosen.division.room.check)
        why_system = chosen.why_system
        try:
            engine.prefetching = make_prefetching(
                parts, loaded, store, engine, chosen.matcher, chosen.files, weights=chosen.weights
            )
        except CannotLookAheadError as error:
            if parts.gate == "none":
                raise
            parts = without_prediction(parts)  # as if the gate never opened
            fallback = f"system {chosen.parts.name} runs as {parts.name}: {error}"
            why_system = fallback if why_system is None else f"{why_system}; {fallback}"
        tokenizer = load_tokenizer(store.folder)
        if kind_of(targets[0]).runs_on_host:
            give_back_heap()
            give_back_code()
        if parts.keeps_everything:
            engine.preload(_labelled(progress, "loading"))
        close = opened.pop_all().close
    finalizer = weakref.finalize(loaded, close)
    view = Stats(engine, parts, store, chosen.division.reason, why_system)
    loaded._expertly_handle = Handle(store, engine, view, chosen.division, finalizer)
    return loaded, tokenizer


@dataclass(frozen=True)
class _Chosen:
    """What the options of `load` come to for a model."""

    options: LoadOptions
    parts: System
    why_system: str | None  # where it was chosen
    store: PackedStore
    matcher: Matcher
    order: str
    files: LearnedFiles
    weights: LearnedWeights | None
    placement: Placement
    division: Division
    budgets: list[Budget]
    known: Known


def _choose(
    model: str | None,
    asked: LoadOptions,
    targets: Sequence[torch.device],
    progress: Progress | None,
    cache: Callable[[PackedStore], SharedCache] | None,
) -> _Chosen:
    """Look at everything that can be refused before anything is opened; packs the model at its first use."""

    def pack(codec: str) -> PackedStore:
        packing = _labelled(progress, "packing")
        store = pack_cached(model, asked.dtype, progress=packing, codec=codec, quantize=asked.quantize)
        store = _checked(store, asked.verify)
        return store if asked.quantize is None else measured(store, progress=_labelled(progress, "measuring"))

    why_system = store = request = None
    if asked.system == AUTO_SYSTEM:
        store = pack(asked.codec)
        request = _memory_request(asked, store, cache)
        settled = LoadSettings(asked.segments, asked.memory, asked.codec, asked.plan, asked.predictor)
        system, settled, why_system = find_choice(store, settled, request, targets)
        if settled.codec != asked.codec:
            store = None
        if settled.memory != asked.memory:
            assert isinstance(settled.memory, int)
            request = replace(request, at_most=settled.memory)
        asked = replace(asked, system=system, **{**settled._asdict(), "memory": asked.memory})
    parts = get_runnable(asked.system)
    order, matcher = parts.ordered(asked.order), choose_matcher(parts, asked.predict)
    if len(targets) > 1 and asked.decisions is not None:
        raise ConfigError(
            f"decisions={str(asked.decisions)!r}: {len(targets)} devices decide apart; accepted: one device"
        )
    if kind_of(targets[0]).runs_on_host:
        keep_few_primitives()
        give_back_large_blocks()
        keep_off_trapped_instructions()
    choose_kernels(runs_on_host=kind_of(targets[0]).runs_on_host)  # refused before the model is packed
    store = store or pack(asked.codec)
    is_replayed = asked.decisions is not None
    files = find_files(asked.learned, parts, store, num_devices=len(targets), is_replayed=is_replayed)
    weights = find_weights(asked.predictor, parts, store)
    fitting = fitting_segments(store.manifest.layers, parts.segments)
    placement = Placement(store.geometry(asked.segments or fitting), len(targets))
    geometries = [share.geometry for share in placement.shares]
    request = request or _memory_request(asked, store, cache)
    give_back_heap()  # before what is left is counted
    division = divide(store, geometries, parts, request, targets)
    known = Known() if asked.plan is None else _known_of(asked.plan, parts, geometries, division.budgets)
    budgets = [parts.budget(one, budget, known) for one, budget in zip(geometries, division.budgets, strict=True)]
    return _Chosen(asked, parts, why_system, store, matcher, order, files, weights, placement, division, budgets, known)


def _memory_request(
    asked: LoadOptions, store: PackedStore, cache: Callable[[PackedStore], SharedCache] | None
) -> MemoryRequest:
    context = asked.context
    if callable(context):
        context = context(load_tokenizer(store.folder))
        context = min(context, store.positions or context)  # no text is longer
    shared = None if cache is None else cache(store)
    return MemoryRequest(asked.memory, asked.staging_slots, context, asked.total_memory, cache=shared)


def _open_executor(chosen: _Chosen, targets: Sequence[torch.device], opened: ExitStack) -> Executor:
    """The devices with their slots, readers and schedulers; `opened` closes what `Engine.close` does not."""
    parts, store, host_memory = chosen.parts, chosen.store, chosen.options.host_memory
    dtype = getattr(torch, store.manifest.dtype)
    schedulers = [
        parts.scheduler(share.geometry, budget, chosen.known, chosen.order)
        for share, budget in zip(chosen.placement.shares, chosen.budgets, strict=True)
    ]
    if chosen.options.decisions is not None:
        (scheduler,), (budget,) = schedulers, chosen.budgets
        header = header_of(parts, chosen.placement.geometry, budget, chosen.order, chosen.known.get(SplitPlan))
        file = DecisionsFile(Path(chosen.options.decisions), header)
        opened.callback(file.close)
        schedulers = [record(scheduler, file.write)]
    executor = make_executor(chosen.placement, targets, schedulers, store, dtype, host_memory)
    opened.callback(executor.close)
    return executor


def _threads_beside_decoders(store: PackedStore, executor: Executor) -> ComputeThreads | None:
    """Where readers decode on the processors that compute."""
    (shard, *others) = executor.shards
    if store.codec == "none" or others or not kind_of(shard.device.torch_device).runs_on_host:
        return None
    return ComputeThreads(shard.geometry, shard.scheduler.budget.memory_nbytes)


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


def _checked(store: PackedStore, verify: str) -> PackedStore:
    """What `verify` says of it. Raises StoreError where the dense part is damaged, or the config claims too much."""
    if verify == "never":
        store.check_claims()
        return store.unchecked()
    store.check_dense()
    store.check_claims()
    if store.codec == "none" and not store.sums:
        logging.getLogger("expertly").warning(
            "%s was packed before experts had checksums: a damaged one is not noticed; `expertly pack --verify` of it "
            "reads it once and adds them (verify=never: this is not said)",
            store.folder,
        )
    return store


def _known_of(
    plan: str | Path | SplitPlan, system: System, geometries: Sequence[Geometry], budgets: Sequence[Budget]
) -> Known:
    """With the plan in the file. Raises ConfigError where it cannot be read, or kept."""
    if len(geometries) > 1:
        raise ConfigError(f"plan={str(plan)!r}: {len(geometries)} devices share experts out; accepted: one device")
    read = plan if isinstance(plan, SplitPlan) else read_plan(plan)
    system.check_plan(read, geometries[0], budgets[0])
    return Known(given=(read,))


def _labelled(progress: Progress | None, what: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(what, done, total)


def _show_options() -> None:
    """`help(expertly.load)` and editors show the options as if they stood in its signature."""
    signature = inspect.signature(load)
    *named, _ = signature.parameters.values()
    each = [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type)
        for one in fields(LoadOptions)
    ]
    load.__signature__ = signature.replace(parameters=[*named, *each])  # type: ignore[attr-defined]
    load.__doc__ = f"{load.__doc__}\n    Options:\n\n{described()}\n    "


_show_options()
