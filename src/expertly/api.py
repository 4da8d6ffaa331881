"""`expertly.load`, `expertly.stats` and `expertly.unload`."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from expertly.core.costs import HostCompute, Link
from expertly.core.errors import ConfigError, ModelUseError, StoreError
from expertly.core.geometry import Geometry, fitting_segments
from expertly.core.placement import Placement, Together
from expertly.core.units import format_share
from expertly.engine import process
from expertly.engine.choice import LoadSettings, find_choice
from expertly.engine.cluster import memory_of_workers, open_workers, start_workers
from expertly.engine.device import choose_devices, kind_of
from expertly.engine.group import make_executor
from expertly.engine.learned import LearnedFiles, find_files, find_weights, save_of_eviction
from expertly.engine.memory import Division, MemoryRequest, SharedCache, divide
from expertly.engine.observe import CannotLookAheadError, choose_predict, make_prefetching
from expertly.engine.remote import Peer
from expertly.engine.rounding import measured
from expertly.engine.runtime import ComputeThreads, Engine
from expertly.engine.stats import Stats
from expertly.model.dense import use_kernels
from expertly.model.graphs import use_graphs
from expertly.model.hooks import between_passes, check_passes, experts_modules
from expertly.model.loading import load_dense, load_tokenizer
from expertly.model.packing import pack_cached
from expertly.model.speculation import Speculation
from expertly.model.tiled import use_tiles
from expertly.native.kernels import choose_kernels
from expertly.options import HASH, LOAD_OPTIONS, LoadOptions, described, names_of_today
from expertly.policies.allocation.moepic import SplitPlan, read_plan
from expertly.policies.known import Known
from expertly.policies.learned import LearnedState
from expertly.scheduler.decisions import DecisionsFile, header_of, record
from expertly.scheduler.misses import MissSplit
from expertly.scheduler.presets import AUTO_SYSTEM, BASE_SYSTEM, get_runnable, without_prediction
from expertly.scheduler.system import System
from expertly.store.packed import PackedStore
from expertly.trace.reader import Trace


@dataclass(frozen=True)
class Handle:
    """A loaded model's store, engine, statistics and memory; `finalizer` closes the engine, once."""

    store: PackedStore
    engine: Engine
    stats: Stats
    division: Division
    finalizer: Callable[[], object]


Progress = Callable[[str, int, int], None]
"""`progress(what, done_nbytes, total_nbytes)`: what is "packing", "measuring" (the cost of rounding) or "loading"."""


def load(model: str | None = None, *, progress: Progress | None = None, **options: Any) -> tuple[Any, Any]:
    """An ordinary transformers model whose experts live in a stated amount of memory, and its tokenizer (None where it
    has none). `model`: a folder, a GGUF file, a packed store or a hub id; None is the demo model. `progress`: see
    Progress.

    Raises ExpertlyError subclasses that name the option and what is accepted; TypeError for an unknown option.
    """
    told = names_of_today(options)
    if unknown := [name for name in told if name not in LOAD_OPTIONS]:
        raise TypeError(f"load() takes no option {unknown[0]!r}; accepted: {', '.join(LOAD_OPTIONS)}")
    return open_model(model, LoadOptions(**told), progress)


def open_model(
    model: str | None,
    asked: LoadOptions,
    progress: Progress | None = None,
    cache: Callable[[PackedStore], SharedCache] | None = None,
) -> tuple[Any, Any]:
    """`load` with options that are checked. `cache`: the bounds of a server's KV cache; the handle's `division` says
    what it gets.
    """
    targets = choose_devices(asked.device, asked.devices)
    on_host = kind_of(targets[0]).runs_on_host
    with ExitStack() as opened:  # closed again if a later step raises
        if on_host:
            process.give_back_code()  # that only imports ran, before anything else takes the memory
        chosen = _choose(model, asked, targets, progress, cache, opened)
        engine = _open_engine(chosen, targets, opened)
        loaded = _open_dense(chosen, engine)
        system, why_system = _begin_prediction(chosen, loaded, engine)
        tokenizer = load_tokenizer(chosen.store.extras)
        chosen.store.check_since()
        if on_host:
            process.give_back_heap()
            process.give_back_code()
        if system.keeps_everything:
            engine.preload(_labelled(progress, "loading"))
        finalizer = weakref.finalize(loaded, opened.pop_all().close)
    loaded._expertly_tokenizer = tokenizer
    loaded._expertly_speculation = speculation = Speculation(engine.decode_counts)
    view = Stats(engine, system, chosen.store, chosen.division.reason, why_system, speculation)
    loaded._expertly_handle = Handle(chosen.store, engine, view, chosen.division, finalizer)
    return loaded, tokenizer


@dataclass(frozen=True)
class _Chosen:
    """What the options of `load` come to for a model."""

    options: LoadOptions
    system: System
    why_system: str | None  # None: the user named it
    store: PackedStore
    predict: str  # thread or inline
    order: str
    files: LearnedFiles
    weights: LearnedState | None
    placement: Placement
    division: Division
    known: Known
    peers: Sequence[Peer]
    worker_nbytes: Sequence[int]  # memory for experts in each


def _choose(
    model: str | None,
    asked: LoadOptions,
    targets: Sequence[torch.device],
    progress: Progress | None,
    cache: Callable[[PackedStore], SharedCache] | None,
    opened: ExitStack,
) -> _Chosen:
    """Check everything that can be refused before anything is opened, but for workers, whose memory decides what they
    hold: `opened` ends them. Packs the model at its first use.
    """
    why_system = store = request = None
    is_alone = len(targets) == 1 and asked.workers is None
    if asked.system == AUTO_SYSTEM:
        store = _packed(model, asked, progress)
        request = _memory_request(asked, store, cache)
        settled = LoadSettings(asked.segments, asked.codec, asked.plan, asked.predictor)
        name, settled, why_system = find_choice(store, settled, request, targets, is_alone=is_alone)
        if settled.codec != asked.codec:
            store = None
        asked = replace(asked, system=name, **settled._asdict())
    system = get_runnable(asked.system)
    order, predict = system.ordered(asked.order), choose_predict(system, asked.predict)
    if not is_alone and asked.decisions is not None:
        several = f"{len(targets)} devices" if asked.workers is None else "workers"
        raise ConfigError(f"decisions={str(asked.decisions)!r}: {several} decide apart; accepted: one device")
    on_host = kind_of(targets[0]).runs_on_host
    if on_host:
        process.keep_few_primitives()
        process.give_back_large_blocks()
        process.keep_off_trapped_instructions()
    choose_kernels(runs_on_host=on_host)  # refused before the model is packed
    store = store or _packed(model, asked, progress)
    is_replayed = asked.decisions is not None
    num_members = len(targets) if asked.workers is None else len(targets) + 1
    files = find_files(asked.learned, system, store, num_devices=num_members, is_replayed=is_replayed)
    weights = find_weights(asked.predictor, system, store)
    fitting = fitting_segments(store.manifest.layers, system.segments)
    geometry = store.geometry(asked.segments or fitting)
    request = request or _memory_request(asked, store, cache)
    together = None
    if asked.placement != HASH:
        together = Trace.open(Path(asked.placement).expanduser()).chosen_together(geometry)
    peers: Sequence[Peer] = ()
    if asked.workers is not None:
        peers = start_workers(asked.workers, asked.worker_memory, opened)
    process.give_back_heap()  # before free memory is counted
    placement, division, memories = _place(
        store,
        geometry,
        system,
        request,
        targets=targets,
        peers=peers,
        worker_memory=asked.worker_memory,
        together=together,
    )
    known = Known() if asked.plan is None else Known(given=(_read_plan(asked.plan, system, placement, division),))
    given = asked, system, why_system, store, predict, order, files, weights, placement, division, known
    return _Chosen(*given, peers, memories)


def _place(
    store: PackedStore,
    geometry: Geometry,
    system: System,
    request: MemoryRequest,
    *,
    targets: Sequence[torch.device],
    peers: Sequence[Peer],
    worker_memory: str | int,
    together: Together | None,
) -> tuple[Placement, Division, list[int]]:
    """Which device or worker has which experts, and the memory for them on the devices and in each worker."""
    fewest = min(layer.num_experts for layer in geometry.layers)
    if peers and len(targets) + len(peers) > fewest:
        most = max(0, fewest - len(targets))
        raise ConfigError(f"workers: {len(peers)}, but a layer has {fewest} experts; accepted: at most {most}")
    placement = Placement(geometry, len(targets))
    if not peers:
        return placement, divide(store, [one.geometry for one in placement.shares], system, request, targets), []
    streaming = get_runnable(BASE_SYSTEM)  # whose experts need not all fit on the devices
    alone = divide(store, [one.geometry for one in placement.shares], streaming, request, targets)
    own = [budget.memory_nbytes for budget in alone.budgets]
    memories, is_divided = memory_of_workers(
        peers, geometry.nbytes, worker_memory, sum(own), is_own_stated=request.is_stated
    )
    if is_divided:
        own = [memories[0] // len(own)] * len(own)
        request = replace(request, at_most=sum(own))
    placement = Placement.by_memory(geometry, [*own, *memories], together)
    if system.keeps_everything:
        request = replace(request, memory=None)
    elif request.is_stated:
        request = replace(request, memory=sum(own))
    division = divide(store, [one.geometry for one in placement.shares[: len(targets)]], system, request, targets)
    nbytes = [share.geometry.nbytes for share in placement.shares]
    held, verb = sum(nbytes[len(targets) :]), "compute" if sum(nbytes) == geometry.nbytes else "hold"
    reason = alone.reason if request.is_stated else division.reason
    workers = f"1 worker {verb}s" if len(peers) == 1 else f"{len(peers)} workers {verb}"
    reason = f"{reason}; {workers} {format_share(held / geometry.nbytes)} of the experts"
    return placement, replace(division, reason=reason), memories


def _packed(model: str | None, asked: LoadOptions, progress: Progress | None) -> PackedStore:
    """The model's store, checked as the option `verify` says. Raises StoreError where the dense part is damaged, or the
    config claims more than there is.
    """
    packing = _labelled(progress, "packing")
    store = pack_cached(model, asked.dtype, progress=packing, codec=asked.codec, quantize=asked.quantize)
    if asked.verify != "never":
        store = replace(store, checked=store.check_dense())
        if store.codec == "none" and not store.sums:
            logging.getLogger("expertly").warning(
                "%s was packed before experts had checksums: a damaged one is not noticed; `expertly pack --verify` of "
                "it reads it once and adds them (verify=never: this is not said)",
                store.folder,
            )
    store.check_claims()
    if asked.verify == "never":
        store = store.unchecked()
    elif asked.verify == "always":
        store = replace(store, check_every=1)
    return store if asked.quantize is None else measured(store, progress=_labelled(progress, "measuring"))


def _memory_request(
    asked: LoadOptions, store: PackedStore, cache: Callable[[PackedStore], SharedCache] | None
) -> MemoryRequest:
    context = asked.context
    if callable(context):
        context = context(load_tokenizer(store.extras))
        context = min(context, store.positions or context)  # no text is longer
    shared = None if cache is None else cache(store)
    return MemoryRequest(asked.memory, asked.staging_slots, context, asked.total_memory, cache=shared)


def _read_plan(plan: str | Path | SplitPlan, system: System, placement: Placement, division: Division) -> SplitPlan:
    """The option `plan`. Raises ConfigError where it cannot be read, or does not fit system, model and memory."""
    if len(placement.shares) > 1:
        num = len(placement.shares)
        raise ConfigError(f"plan={str(plan)!r}: {num} devices or workers share experts out; accepted: one device")
    read = plan if isinstance(plan, SplitPlan) else read_plan(plan)
    system.check_plan(read, placement.geometry, division.budgets[0])
    return read


def _open_engine(chosen: _Chosen, targets: Sequence[torch.device], opened: ExitStack) -> Engine:
    """The engine with its devices, slots, readers and schedulers; `opened` closes them."""
    system, store, known, options = chosen.system, chosen.store, chosen.known, chosen.options
    dtype = getattr(torch, store.manifest.dtype)
    here, away = chosen.placement.shares[: len(targets)], chosen.placement.shares[len(targets) :]
    shares = [
        (share.geometry, system.budget(share.geometry, budget, known))
        for share, budget in zip(here, chosen.division.budgets, strict=True)
    ]
    split = _share_misses(chosen, targets, dtype)
    schedulers = [system.scheduler(geometry, budget, known, chosen.order, split) for geometry, budget in shares]
    if options.decisions is not None:
        ((geometry, budget),) = shares
        file = DecisionsFile(
            Path(options.decisions), header_of(system, geometry, budget, chosen.order, known.get(SplitPlan), split)
        )
        opened.callback(file.close)
        schedulers = [record(schedulers[0], file.write)]
    remotes = open_workers(
        chosen.peers,
        away,
        memories=chosen.worker_nbytes,
        store=store,
        system=system,
        staging=options.staging_slots,
        deadline_s=options.worker_deadline,
    )
    host_memory = options.host_memory if split is None else chosen.placement.geometry.nbytes  # what it counts on
    executor = make_executor(chosen.placement, targets, schedulers, store, dtype, host_memory, remotes)
    opened.callback(executor.close)
    threads = None
    if store.codec != "none" and len(targets) == 1 and kind_of(targets[0]).runs_on_host:  # readers decode beside it
        threads = ComputeThreads(shares[0][0], shares[0][1].memory_nbytes)
    engine = Engine(executor, threads, partial(_damage, store))
    opened.callback(engine.close)
    engine.reuse = save_of_eviction(executor, store, chosen.files)
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


def _share_misses(chosen: _Chosen, targets: Sequence[torch.device], dtype: torch.dtype) -> MissSplit | None:
    """How many missing experts the processor computes, as the option `cpu_misses` says; None: it computes none."""
    asked, kind, geometry = chosen.options.cpu_misses, kind_of(targets[0]), chosen.placement.geometry
    if asked == "never":
        return None
    nbytes = kind.host_nbytes(targets[0], chosen.options.host_memory, geometry.nbytes)
    costs = None
    if not nbytes:
        why = f"there is no host tier behind {targets[0]}"
    elif len(targets) > 1 or chosen.options.workers is not None:
        why = "several devices, or workers, have the experts"
    elif not chosen.system.can_share_misses(chosen.order):
        why = f"system {chosen.system.name!r} does not know all of a layer's misses at once, or keeps parts of experts"
    elif nbytes < geometry.nbytes:
        why = "the host tier does not hold all experts (host_memory)"
    else:
        why = "nobody measured copies and products here"
        costs = kind.miss_costs(targets[0], dtype)
    if costs is None:
        if asked == "always":
            raise ConfigError(f"cpu_misses='always': {why}; accepted: auto, never")
        return None
    if asked == "always":  # with copies of 11 days the processor is always sooner
        return MissSplit(geometry, Link(1e18, 0, 10**15), HostCompute(1e18, 1e18, 0, 1.0))
    split = MissSplit(geometry, *costs)
    pays = any(split.num_on_host(layer, [1] * one.top_k, 1, 0) for layer, one in enumerate(geometry.layers))
    return split if pays else None


def _open_dense(chosen: _Chosen, engine: Engine) -> Any:
    """The model with its dense part, whose experts `engine` computes."""
    store, home = chosen.store, engine.executor.shards[0]
    dtype = getattr(torch, store.manifest.dtype)
    loaded = load_dense(store.folder, store.manifest, dtype, home.device.torch_device, engine, store.extras)
    engine.executor.bind(experts_modules(loaded))
    use_tiles(loaded, home.kernels)
    use_kernels(loaded, home.kernels)
    recorder = kind_of(home.device.torch_device).recorder(home.device.torch_device)
    if recorder is not None and chosen.options.graphs != "never" and len(engine.executor.shards) == 1:
        use_graphs(loaded, home.kernels, recorder)
    if chosen.division.room is not None:
        check_passes(loaded, chosen.division.room.check)
    return loaded


def _begin_prediction(chosen: _Chosen, loaded: Any, engine: Engine) -> tuple[System, str | None]:
    """Connect the system's predictor, if it has one. The system that runs, and the reason where the user did not name
    it: a system with a prefetch gate runs without prediction if the model's routers cannot look ahead.
    """
    system, why = chosen.system, chosen.why_system
    try:
        engine.prefetching = make_prefetching(
            system, loaded, chosen.store, engine, chosen.predict, chosen.files, weights=chosen.weights
        )
    except CannotLookAheadError as error:
        if system.gate == "none":
            raise
        without = without_prediction(system)
        fallback = f"system {system.name} runs as {without.name}: {error}"
        return without, fallback if why is None else f"{why}; {fallback}"
    return system, why


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
    """The store, engine and statistics of a loaded model. Raises ModelUseError for any other model."""
    found = getattr(model, "_expertly_handle", None)
    if not isinstance(found, Handle):
        raise ModelUseError(f"{type(model).__name__} was not loaded by expertly.load: there is nothing behind it")
    return found


def _labelled(progress: Progress | None, what: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(what, done, total)


def _show_options() -> None:
    """Add the options to `load`'s signature and docstring, for `help(expertly.load)` and editors."""
    signature = inspect.signature(load)
    *named, _ = signature.parameters.values()
    each = [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type)
        for one in fields(LoadOptions)
    ]
    load.__signature__ = signature.replace(parameters=[*named, *each])  # type: ignore[attr-defined]
    load.__doc__ = f"{load.__doc__}\n    Options:\n\n{described()}\n    "


_show_options()
