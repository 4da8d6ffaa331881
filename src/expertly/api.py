"""`expertly.load`, `expertly.stats` and `expertly.unload`."""

from __future__ import annotations

import inspect
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch

from expertly.core.errors import ConfigError, ModelUseError, StoreError
from expertly.core.geometry import Geometry, ModelShape, fitting_segments
from expertly.core.placement import Placement
from expertly.core.resources import parse_size
from expertly.core.units import format_share
from expertly.engine import process, transfer
from expertly.engine.cluster import Cluster, memory_of_workers, open_workers, start_workers
from expertly.engine.device import choose_device, kind_of
from expertly.engine.executor import Executor
from expertly.engine.fitting import with_quantisation
from expertly.engine.memory import Division, MemoryRequest, SharedCache, divide
from expertly.engine.observe import CannotLookAheadError, make_prefetching
from expertly.engine.peer import Peer
from expertly.engine.remembered import auto_system
from expertly.engine.runtime import Engine
from expertly.engine.shard import Shard
from expertly.engine.stats import Stats
from expertly.engine.weights import find_weights
from expertly.engine.worker import StoreOfShare
from expertly.model.dense import use_kernels
from expertly.model.graphs import use_graphs
from expertly.model.hooks import experts_modules, passes_of
from expertly.model.kv_codes import NUM_TOKENS, KeyFactors, use_kv_codes
from expertly.model.loading import load_dense, load_tokenizer
from expertly.model.packing import pack_cached
from expertly.model.programs import use_programs
from expertly.model.stacks import use_stacks
from expertly.model.tables import Table, Tables, tables_of
from expertly.model.tiled import use_tiles
from expertly.native.kernels import choose_kernels, end_team
from expertly.options import AUTO, LOAD_OPTIONS, LoadOptions, described
from expertly.policies.known import Known
from expertly.policies.learned import LearnedState, read_learned, save_learned
from expertly.policies.reuse import compiled_reuse
from expertly.scheduler.systems import AUTO_SYSTEM, BASE_SYSTEM, HOST_EVICTION, System, get_runnable, without_prediction
from expertly.store.cache import learned_beside
from expertly.store.packed import ExtentSource, PackedStore


@dataclass(frozen=True)
class Handle:
    """A loaded model's store, engine, statistics and memory; `finalizer` closes the engine, once."""

    store: PackedStore
    engine: Engine
    stats: Stats
    division: Division
    finalizer: Callable[[], object]


Progress = Callable[[str, int, int], None]
"""`progress(what, done_nbytes, total_nbytes)`: what is "packing" or "loading"."""


def load(model: str | None = None, *, progress: Progress | None = None, **options: Any) -> tuple[Any, Any]:
    """An ordinary transformers model whose experts live in a stated amount of memory, and its tokenizer (None where it
    has none). `model`: a folder, a GGUF file, a packed store or a hub id; None is the demo model. `progress`: see
    Progress.

    Raises ExpertlyError subclasses that name the option and what is accepted; TypeError for an unknown option.
    """
    if unknown := [name for name in options if name not in LOAD_OPTIONS]:
        raise TypeError(f"load() takes no option {unknown[0]!r}; accepted: {', '.join(LOAD_OPTIONS)}")
    return open_model(model, LoadOptions(**options), progress)


def open_model(
    model: str | None,
    asked: LoadOptions,
    progress: Progress | None = None,
    cache: Callable[[PackedStore], SharedCache] | None = None,
) -> tuple[Any, Any]:
    """`load` with options that are checked. `cache`: the bounds of a server's KV cache; the handle's `division` says
    what it gets.
    """
    target = choose_device(asked.device)
    on_host = kind_of(target).runs_on_host
    with ExitStack() as opened:  # closed again if a later step raises
        if on_host:
            process.give_back_code()  # that only imports ran, before anything else takes the memory
        chosen = _choose(model, asked, target, progress, cache, opened)
        engine = _open_engine(chosen, target, opened)
        loaded = _open_dense(chosen, engine, opened)
        system, why_system = _begin_prediction(chosen, loaded, engine)
        tokenizer = load_tokenizer(chosen.store.extras)
        chosen.store.check_since()
        if on_host:
            process.give_back_heap()
            process.give_back_code()
        if system.keeps_everything:
            engine.preload(_labelled(progress, "loading"))
        factors = None if asked.kv is None else _code_cache(chosen, loaded, tokenizer)
        finalizer = weakref.finalize(loaded, opened.pop_all().close)
    loaded._expertly_tokenizer = tokenizer
    kv = None if factors is None else factors.facts()
    view = Stats(engine, system, chosen.store, chosen.division.reason, why_system, kv)
    loaded._expertly_handle = Handle(chosen.store, engine, view, chosen.division, finalizer)
    end_team()  # others may run the model
    return loaded, tokenizer


@dataclass(frozen=True)
class _Chosen:
    """What the options of `load` come to for a model."""

    options: LoadOptions
    system: System
    why_system: str | None  # None: the user named it
    store: PackedStore
    tables: Sequence[Table]  # that stay in it
    weights: LearnedState | None
    placement: Placement
    division: Division
    peers: Sequence[Peer]
    worker_nbytes: Sequence[int]  # memory for experts in each


def _choose(
    model: str | None,
    asked: LoadOptions,
    target: torch.device,
    progress: Progress | None,
    cache: Callable[[PackedStore], SharedCache] | None,
    opened: ExitStack,
) -> _Chosen:
    """Check everything that can be refused before anything is opened, but for workers, whose memory decides what they
    hold: `opened` ends them. Packs the model at its first use.
    """
    on_host = kind_of(target).runs_on_host
    for is_there in (partial(choose_kernels, runs_on_host=on_host), transfer.library, compiled_reuse):
        is_there()  # else refused before the model is packed
    why_system = packed = None
    name = asked.system
    if name == AUTO_SYSTEM:
        packed = tables, store = _packed(model, asked, progress)
        request = _memory_request(asked, tables, store, cache)
        name, why_system = auto_system(store, request, target, is_alone=asked.workers is None)
    system = get_runnable(name)
    if asked.workers is not None and system.prediction != "none":
        if why_system is None:
            raise ConfigError(f"system={name!r}: it predicts; accepted with workers: one that does not, as 'expertly'")
        system = without_prediction(system)
        why_system = f"{why_system}; workers are there: it runs as {system.name}"
    if on_host:
        process.keep_few_primitives()
        process.give_back_large_blocks()
        process.keep_off_trapped_instructions()
    tables, store = packed or _packed(model, asked, progress)
    weights = find_weights(asked.predictor, system, store)
    fitting = fitting_segments(store.manifest.layers, system.segments)
    geometry = store.geometry(fitting)
    request = _memory_request(asked, tables, store, cache)
    peers: Sequence[Peer] = ()
    if asked.workers is not None:
        of_each = AUTO if asked.memory is None or asked.total_memory is not None else asked.memory
        peers = start_workers(asked.workers, of_each, opened)
    process.give_back_heap()  # before free memory is counted
    placement, division, memories = _place(store, geometry, system, request, target, peers)
    return _Chosen(asked, system, why_system, store, tables, weights, placement, division, peers, memories)


def _place(
    store: PackedStore,
    geometry: Geometry,
    system: System,
    request: MemoryRequest,
    target: torch.device,
    peers: Sequence[Peer],
) -> tuple[Placement, Division, list[int]]:
    """Which experts the device and each worker have, and the memory for them there."""
    if not peers:
        return Placement(geometry, [1]), divide(store, geometry, system, request, target), []
    alone = divide(store, geometry, get_runnable(BASE_SYSTEM), request, target)  # whose experts need not all fit here
    near, memories = alone.budget.memory_nbytes, memory_of_workers(peers, geometry.nbytes)
    placement = Placement.by_memory(geometry, [near, *memories])
    if system.keeps_everything:
        request = replace(request, memory=None)
    elif request.is_stated:
        request = replace(request, memory=near)
    home, *away = (share.geometry for share in placement.shares)
    division = divide(store, home, system, request, target)
    held = format_share(sum(share.nbytes for share in away) / geometry.nbytes)
    workers = "1 worker computes" if len(peers) == 1 else f"{len(peers)} workers compute"
    reason = f"{(alone if request.is_stated else division).reason}; {workers} {held} of the experts"
    return placement, replace(division, reason=reason), memories


def _packed(model: str | None, asked: LoadOptions, progress: Progress | None) -> tuple[Sequence[Table], PackedStore]:
    """The model's store, checked as the option `verify` says, and the tables that stay in it, which it is without. Made
    at the first use. Raises StoreError where the dense part is damaged, or the config claims more than there is.
    """
    model = with_quantisation(model, asked.device, asked.total_memory)
    packing = _labelled(progress, "packing")
    store = pack_cached(model, asked.dtype, progress=packing, quantize=asked.quantize)
    store = replace(store, sums=()) if asked.verify == "never" else replace(store, checked=store.check_dense())
    store.check_claims()
    return tables_of(replace(store, check_every=1) if asked.verify == "always" else store)


def _memory_request(
    asked: LoadOptions,
    tables: Sequence[Table],
    store: PackedStore,
    cache: Callable[[PackedStore], SharedCache] | None,
) -> MemoryRequest:
    context = asked.context
    if callable(context):
        context = context(load_tokenizer(store.extras))
        context = min(context, store.positions or context)  # no text is longer
    if asked.kv is not None and context is not None:
        context = max(context, NUM_TOKENS)  # which are measured
    shared = cache(store) if cache else None
    rows_nbytes = _table_nbytes(asked, tables)
    return MemoryRequest(asked.memory, context, asked.total_memory, shared, rows_nbytes, asked.kv is not None)


def _table_nbytes(asked: LoadOptions, tables: Sequence[Table]) -> int:
    """Memory for rows of tables that stay in the store."""
    if asked.table_memory is None:
        return 0
    if not tables:
        raise ConfigError(f"table_memory={asked.table_memory!r}: this model has no table that is read by row")
    return parse_size(asked.table_memory, sum(table.nbytes for table in tables), "table_memory", "the tables")


def _open_engine(chosen: _Chosen, target: torch.device, opened: ExitStack) -> Engine:
    """The engine with its device, slots, readers and scheduler, and workers; `opened` closes them."""
    system, store, known, options = chosen.system, chosen.store, Known(), chosen.options
    dtype, kind = getattr(torch, store.manifest.dtype), kind_of(target)
    home, *away = chosen.placement.shares
    geometry, budget = home.geometry, system.budget(home.geometry, chosen.division.budget, known)
    scheduler = system.scheduler(geometry, budget, known)
    remotes = open_workers(chosen.peers, away, memories=chosen.worker_nbytes, store=store, system=system)
    host_nbytes = kind.host_nbytes(target, options.host_memory, geometry.nbytes)
    source: ExtentSource = StoreOfShare(store, home) if remotes else store
    tier = None
    if not kind.runs_on_host:
        tier = system.tier(geometry, host_nbytes, known)
    elif system.host != HOST_EVICTION:
        accepted = f"there is no host tier behind {target}; accepted: no host"
        raise ConfigError(f"system={system.name!r}: host={system.host}: {accepted}")
    device = kind.make(target, source, geometry, scheduler.budget.pool_slots(), dtype, tier)
    opened.callback(device.close)
    shard = Shard(str(target), scheduler, device)
    executor: Executor = Cluster(chosen.placement, shard, remotes) if remotes else shard
    opened.callback(executor.close)
    engine = Engine(executor, partial(_damage, store))
    opened.callback(engine.close)
    return engine


def _damage(store: PackedStore, layer: int | None) -> str | None:
    """What is wrong with the store's experts of a layer, or (None) with its dense part, in a sentence."""
    try:
        if layer is None:
            store.check_dense()
        else:
            store.check_layer(layer)
    except StoreError as error:
        return str(error)
    return None


def _open_dense(chosen: _Chosen, engine: Engine, opened: ExitStack) -> Any:
    """The model with its dense part, whose experts `engine` computes."""
    store, home = chosen.store, engine.executor.shard
    dtype, device = getattr(torch, store.manifest.dtype), home.device.torch_device
    paths = [table.path for table in chosen.tables]
    loaded = load_dense(store.folder, store.manifest, dtype, device, engine, store.extras, paths)
    if chosen.tables:
        kept_nbytes = _table_nbytes(chosen.options, chosen.tables)
        check = None if chosen.options.verify == "never" else store.check_dense
        tables = Tables(store.folder, chosen.tables, transfer.Readers, check, kept_nbytes)
        opened.callback(tables.close)
        tables.bind(loaded, device)
        passes_of(loaded).around = tables.reading_ahead
    engine.executor.bind(experts_modules(loaded))
    use_tiles(loaded, home.kernels)
    use_kernels(loaded, home.kernels)
    recorder = kind_of(home.device.torch_device).recorder(home.device.torch_device)
    if recorder is not None and engine.executor is home:
        use_graphs(loaded, home.kernels, recorder)
    if not home.device.queues_uses:
        use_programs(loaded, home.kernels)
        use_stacks(loaded)
    if chosen.division.room is not None:
        passes_of(loaded).check = chosen.division.room.check
    return loaded


def _begin_prediction(chosen: _Chosen, loaded: Any, engine: Engine) -> tuple[System, str | None]:
    """Connect the system's predictor, if it has one. The system that runs, and the reason where the user did not name
    it: it runs without prediction then if the model's routers cannot look ahead.
    """
    system, reason = chosen.system, chosen.why_system
    try:
        engine.prefetching = make_prefetching(system, loaded, engine.executor, chosen.weights)
    except CannotLookAheadError as error:
        if reason is None:
            raise
        without = without_prediction(system)
        return without, f"{reason}; system {system.name} runs as {without.name}: {error}"
    return system, reason


def _code_cache(chosen: _Chosen, loaded: Any, tokenizer: Any) -> KeyFactors:
    """Have the KV cache keep codes, as it did when the model was last loaded so: pages on disk are of that time."""
    store, factors = chosen.store, KeyFactors(ModelShape.of(chosen.store.geometry(1)))
    path, identity = learned_beside(store.folder, KeyFactors.kind), store.manifest.identity
    if os.path.lexists(path):
        try:
            factors = read_learned(path, KeyFactors, identity=identity).learned
        except StoreError as error:
            warnings.warn(f"expertly: kv='8bit': measured again: {error}", stacklevel=2)
    is_new, most_tokens = not factors.of_layers, chosen.division.context
    use_kv_codes(loaded, factors, tokenizer, min(most_tokens, store.positions or most_tokens))
    if is_new:
        try:
            save_learned(path, factors, identity)
        except StoreError as error:
            warnings.warn(f"expertly: kv='8bit': what was measured is not kept: {error}", stacklevel=2)
    return factors


def stats(model: Any) -> Stats:
    """Counters of a loaded model, by layer and phase. Raises ModelUseError for any other model."""
    return handle(model).stats


def unload(model: Any) -> None:
    """Free the threads, files and memory behind a loaded model; it cannot run any more. Idempotent. A forward pass that
    another thread runs raises EngineClosedError.
    """
    loaded = handle(model)
    loaded.engine.stop()
    with passes_of(model).lock:
        loaded.finalizer()


def handle(model: Any) -> Handle:
    """The store, engine and statistics of a loaded model. Raises ModelUseError for any other model."""
    loaded = getattr(model, "_expertly_handle", None)
    if not isinstance(loaded, Handle):
        raise ModelUseError(f"{type(model).__name__} was not loaded by expertly.load: there is nothing behind it")
    return loaded


def _labelled(progress: Progress | None, label: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(label, done, total)


def _show_options() -> None:
    """Add the options to `load`'s signature and docstring, for `help(expertly.load)` and editors."""
    signature = inspect.signature(load)
    *named, _ = signature.parameters.values()
    each = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in fields(LoadOptions)
    ]
    load.__signature__ = signature.replace(parameters=[*named, *each])  # type: ignore[attr-defined]
    load.__doc__ = f"{load.__doc__}\n    Options:\n\n{described()}\n    "


_show_options()
