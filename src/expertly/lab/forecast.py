"""What to expect of a model on a machine before it is downloaded: what fits, and tokens per second under several
budgets.

Nobody knows the model's routing before it runs. Two made-up routings stand for it, one below and one above what was
measured on real models (docs/simulator.md): how often a token needs the previous token's experts, and how unevenly
experts are used.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mode
from typing import Any, NamedTuple

import torch

from expertly import api
from expertly.core.errors import ConfigError
from expertly.core.files import existing_parent
from expertly.core.geometry import Geometry
from expertly.core.placement import Placement, Together
from expertly.core.resources import parse_memory
from expertly.core.units import format_nbytes, format_rate, format_seconds
from expertly.engine.compute import expert_nbytes_at_once
from expertly.engine.memory import (
    BESIDE_NBYTES,
    WORKING_NBYTES,
    BesideExperts,
    kv_cache_nbytes,
    pass_nbytes,
)
from expertly.engine.process import rss_nbytes
from expertly.hardware.measure import measure_experts_rate
from expertly.hardware.profile import MachineProfile
from expertly.hardware.simulated import machine_hardware
from expertly.lab.synth import write_workload, zipf
from expertly.model.needs import ModelNeeds
from expertly.model.structure import dense_shape
from expertly.scheduler.budget import least_nbytes
from expertly.scheduler.presets import BASE_SYSTEM, SYSTEMS
from expertly.sim.compute import compute_model
from expertly.sim.hardware import ClusterNetwork, Hardware
from expertly.sim.schedule import Selection, make_schedule, with_answer
from expertly.sim.study import Memory, Study
from expertly.store.cache import stores_folder
from expertly.store.manifest import ITEMSIZE
from expertly.trace.reader import Trace

CONTEXTS = (4096, 32768, 131072)
SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
"""The budgets that are looked at, as shares of the experts."""


EVEN: dict[str, Any] = {"exponent": 0.5, "keep": 0.2}
"""As `lab.synth.zipf` takes it. A quarter of 32 or 64 experts hits 43 to 45 % and half of them 66 %. Measured: 45 to 50
and 72 to 73 % on the demo model and DeepSeek-V2-Lite with legal texts.
"""
UNEVEN: dict[str, Any] = {"exponent": 0.9, "keep": 0.4}
"""A quarter hits 63 to 67 %. Measured: 65 and 62 % on gpt-oss-20b and DeepSeek-V2-Lite with translations."""

NO_NETWORK = ClusterNetwork("none", math.inf, 0, 0)

MACHINE_ERROR = 1.25
"""A machine is measured for only half a minute and without the model: times may be longer or shorter by this factor."""

_CALIBRATION_TOKENS = 24
_FORMAT_S = 0.5
_REQUEST_TOKENS = 64
_WARM_REQUESTS = 2


class Machines(NamedTuple):
    """One machine that keeps so much of experts in memory, and workers."""

    memory_nbytes: int
    share: float  # of the experts, in memory on any of them
    num_workers: int = 0
    worker_nbytes: int = 0  # of experts, the most on one
    room: tuple[int, ...] = ()  # for experts on each, by which they are placed
    network: ClusterNetwork = NO_NETWORK
    is_measured: bool = False  # experts are placed by recorded routing, not by hash


@dataclass(frozen=True, slots=True)
class ExpectedSpeed:
    """Decode on such machines, see Machines; each pair is a lower and an upper end."""

    memory_nbytes: int
    num_workers: int
    worker_nbytes: int
    network: str
    is_measured: bool
    share: float
    fits: bool
    tokens_per_s: tuple[float, float]
    hit_rate: tuple[float, float]
    waiting: tuple[float, float]  # share of the time, for experts that are not there
    network_time: tuple[float, float]  # share of the time that an infinitely fast network would save


@dataclass(frozen=True, slots=True)
class ModelForecast:
    """What a model needs, and how fast it would be on one machine. `memory_name`: the device that computes."""

    needs: ModelNeeds
    own_nbytes: int | None  # as the checkpoint stores it
    dense_nbytes: int
    experts_nbytes: int
    expert_nbytes: int
    cache_nbytes: dict[int, int]  # of the KV cache, by tokens
    least_nbytes: int  # of experts
    disk_nbytes: int  # of the packed store
    download_nbytes: int  # 0 where it is here
    disk_stream_nbytes: int  # at most, with `pack --stream`
    disk_free_nbytes: int
    memory_name: str
    memory_nbytes: int  # free, or as much of it as was stated for everything
    fitting_share: float  # of the experts, beside the rest and 4096 tokens
    speeds: tuple[ExpectedSpeed, ...]
    with_workers: tuple[ExpectedSpeed, ...]
    decided_by: str
    command: str


def measured_hardware(
    profile: MachineProfile, loading: api.Progress | None = None, needs: ModelNeeds | None = None
) -> Hardware:
    """The machine of `profile`, with all that a layer takes beside its weights, measured on the demo model in a few
    seconds, instead of what `machine_hardware` assumes of calls and steps. `loading` is told of the bytes of that
    model, as by `expertly.load`. `needs`: of a model whose experts' weight format is measured, on a processor.
    """
    hardware = replace(machine_hardware(profile), launch_ns=0, layer_ns=0, iteration_ns=0)
    device = profile.devices[0].device if profile.devices else "cpu"
    how: dict[str, Any] = {"learned": "off", "codec": "none", "device": device, "progress": loading}
    model, tokenizer = api.load(system="resident", **how)
    try:
        inputs = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False).to(model.device)
        times_ns = []
        for num_tokens in (_CALIBRATION_TOKENS, 1, 1 + _CALIBRATION_TOKENS, 1, 1 + _CALIBRATION_TOKENS):
            start_ns = time.perf_counter_ns()
            model.generate(**inputs, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
            times_ns.append(time.perf_counter_ns() - start_ns)
        store, shape = api.handle(model).store, dense_shape(model)
    finally:
        api.unload(model)
    token_ns = min(times_ns[2] - times_ns[1], times_ns[4] - times_ns[3]) / _CALIBRATION_TOKENS
    geometry = store.geometry(1)
    compute = compute_model(hardware, geometry, shape)
    layers = range(geometry.num_layers)
    spans_ns = sum(geometry.layers[layer].top_k * compute.span_ns(layer, 1, 1) for layer in layers)
    weights_ns = spans_ns + sum(compute.dense_ns(layer, 1) for layer in layers) + compute.head_ns(1)
    rate = None
    if needs is not None and not profile.devices:
        rate = measure_experts_rate(mode(needs.layers), getattr(torch, needs.dtype), _FORMAT_S)
    layer_ns = max(0, round((token_ns - weights_ns) / geometry.num_layers))
    return replace(hardware, layer_ns=layer_ns, format_nbytes_per_s=rate)


def forecast(
    needs: ModelNeeds,
    profile: MachineProfile,
    hardware: Hardware,
    available_nbytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    total_memory: str | None = None,
    workers: Sequence[tuple[int, ClusterNetwork]] = (),
    trace: Trace | None = None,
) -> ModelForecast:
    """The forecast for the machine of `profile`, which `hardware` describes to the simulator. `available_nbytes`: its
    free memory now (default: as the profile says). `total_memory`: see `expertly.load`. `progress(runs done, in all)`.
    `workers`: so many other machines like it, with as much memory each, behind a network. `trace`: recorded routing of
    the model in place of made-up routing; half of its requests place experts on workers, too, the others are simulated.
    Raises ConfigError where the machine computes on an accelerator, and workers do not.
    """
    device = profile.devices[0] if profile.devices else None
    if workers and device is not None:
        raise ConfigError(f"workers: they compute on CPUs, and this machine on {device.device}; that is not simulated")
    free = profile.available_nbytes if available_nbytes is None else available_nbytes
    geometry = Geometry(needs.layers)
    itemsize = ITEMSIZE[needs.dtype]
    cache = kv_cache_nbytes(needs.config, 1, itemsize)
    if device is None:
        memory_name, memory, dense = "RAM", free, needs.dense_nbytes
        fixed = BESIDE_NBYTES + rss_nbytes() + max(map(expert_nbytes_at_once, needs.layers))
        per_token = pass_nbytes(needs.config, itemsize)
    else:
        memory_name, memory, fixed, per_token = device.name, device.memory_nbytes, WORKING_NBYTES, 0
        dense = needs.decoded_dense_nbytes
    if total_memory is not None:
        memory = parse_memory(total_memory, memory, "total_memory") or memory
    beside = BesideExperts(dense, fixed, cache, per_token)
    left = memory - beside.dense_nbytes - beside.fixed_nbytes - beside.of_tokens(0, CONTEXTS[0])
    least = least_nbytes(geometry)
    positions = needs.config.get("max_position_embeddings") or CONTEXTS[-1]
    contexts = [context for context in CONTEXTS if context <= positions] or [positions]
    machines = [Machines(round(share * geometry.nbytes), share) for share in SHARES]
    if least < left < geometry.nbytes:
        machines.append(Machines(left, left / geometry.nbytes))
    machines = sorted(one for one in machines if one.memory_nbytes >= least)
    num_alone = len(machines)
    for num, network in workers if left >= least else ():
        room = left, *[memory - beside.fixed_nbytes] * num
        shares = Placement.by_memory(geometry, room).shares
        held = [min(nbytes, share.geometry.nbytes) for nbytes, share in zip(room, shares, strict=True)]
        one = Machines(held[0], sum(held) / geometry.nbytes, num, max(held[1:]), room, network)
        machines += [one] if trace is None else [one, one._replace(is_measured=True)]
    speeds = _speeds(needs, hardware, machines, left, progress, trace)
    stored = needs.stored
    download = stored.nbytes if stored is not None and not stored.is_here else 0
    store = 0 if needs.is_packed else needs.dense_nbytes + geometry.nbytes
    folder = existing_parent(stores_folder())
    return ModelForecast(
        needs=needs,
        own_nbytes=None if stored is None else stored.nbytes,
        dense_nbytes=needs.dense_nbytes,
        experts_nbytes=geometry.nbytes,
        expert_nbytes=geometry.nbytes // geometry.num_experts,
        cache_nbytes={context: context * cache for context in contexts},
        least_nbytes=least,
        disk_nbytes=store,
        download_nbytes=download,
        disk_stream_nbytes=store + (stored.largest_file_nbytes if download and stored is not None else 0),
        disk_free_nbytes=shutil.disk_usage(folder).free,
        memory_name=memory_name,
        memory_nbytes=memory,
        fitting_share=max(0.0, min(1.0, left / geometry.nbytes)) if left >= least else 0.0,
        speeds=tuple(speeds[:num_alone]),
        with_workers=tuple(speeds[num_alone:]),
        decided_by=_decided_by(speeds[:num_alone], hardware),
        command=_command(needs, store, download, shutil.disk_usage(folder).free, left >= least, total_memory),
    )


def _speeds(
    needs: ModelNeeds,
    hardware: Hardware,
    machines: list[Machines],
    left: int,
    progress: Callable[[int, int], None] | None,
    trace: Trace | None,
) -> list[ExpectedSpeed]:
    """Simulated with the base system, which keeps what was used last: how much other systems gain depends on the
    model's routing.
    """
    of_routing: list[list[tuple[float, ...]]] = []
    for routing in (EVEN, UNEVEN) if trace is None else (trace,):
        with tempfile.TemporaryDirectory(prefix="expertly-") as folder:
            together, made = None, routing if isinstance(routing, Trace) else _made_up(needs, routing, Path(folder))
            selection = Selection(num_requests=_WARM_REQUESTS + 1, split=None if trace is None else (1, 1))
            schedule = make_schedule(made, selection)
            if trace is not None:
                spans = [(span.first_row, span.first_row + span.num_rows) for span in schedule.training]
                together = trace.chosen_together(Geometry(needs.layers), spans)
                test = [with_answer(trace, span, _REQUEST_TOKENS) for span in schedule.test]
                schedule = replace(schedule, training=[], test=test)
            study = Study(made, schedule, hardware, needs.layers, needs.dense)
            found: list[tuple[float, ...]] = []
            for one in machines:
                if progress is not None:
                    progress(len(of_routing) * len(machines) + len(found), (2 - bool(trace)) * len(machines))
                found.append(_simulated(study, one, together if one.is_measured else None))
            of_routing.append(found)
    speeds = []
    for one, *runs in zip(machines, *of_routing, strict=True):
        rates, *others = ((min(ends), max(ends)) for ends in zip(*runs, strict=True))
        ends = (rates[0] / MACHINE_ERROR, rates[1] * MACHINE_ERROR), *others
        held = one.memory_nbytes, one.num_workers, one.worker_nbytes, one.network.name, one.is_measured, one.share
        speeds.append(ExpectedSpeed(*held, one.memory_nbytes <= left, *ends))
    return speeds


def _simulated(study: Study, machines: Machines, together: Together | None) -> tuple[float, float, float, float]:
    """Tokens per second and hit rate of the last request, the share of the time that experts are waited for, and that
    the network takes.
    """
    system = SYSTEMS[BASE_SYSTEM]
    geometry, room = study.geometry_of(system), machines.room or (machines.memory_nbytes,)
    shares = Placement.by_memory(geometry, room, together).shares
    memories = [Memory(str(min(nbytes, share.geometry.nbytes))) for nbytes, share in zip(room, shares, strict=True)]
    local, workers = study.simulate_group(system, shares, memories, machines.network)
    metrics = local.metrics
    step_s = metrics.times_by_request(False)[-1]["tpot_s"]
    (hits, demands), network_s = metrics.hits_by_request()[-1], workers.network_ns / metrics.num_decode_iterations / 1e9
    return 1 / step_s, hits / demands, metrics.stall_share or 0.0, network_s / step_s


def _made_up(needs: ModelNeeds, routing: dict[str, Any], folder: Path) -> Trace:
    """Requests of one routing; all but the last fill the cache."""
    shapes = {(layer.num_experts, layer.top_k) for layer in needs.layers}
    if len(shapes) > 1:
        raise ConfigError(
            f"model={needs.name!r}: its layers have {len(shapes)} numbers of experts: no routing for that"
        )
    num_requests = _WARM_REQUESTS + 1
    workload = zipf(len(needs.layers), *shapes.pop(), num_requests * _REQUEST_TOKENS, **routing)
    write_workload(folder / "trace", workload, model=needs.name, num_requests=num_requests)
    return Trace.open(folder / "trace")


def _decided_by(speeds: list[ExpectedSpeed], hardware: Hardware) -> str:
    fitting = [one for one in speeds if one.fits]
    if not fitting:
        return "nothing fits: not even the experts of one token beside the rest"
    best = fitting[-1]
    link = hardware.link if hardware.disk is None else hardware.disk
    if best.waiting[1] < 0.2:
        rates = format_rate(hardware.memory_nbytes_per_s)
        if hardware.format_nbytes_per_s is not None:
            rates += f", experts in their format {format_rate(hardware.format_nbytes_per_s)},"
        return (
            f"how fast weights are read from memory ({rates} measured), and what "
            f"a layer takes beside ({format_seconds(hardware.layer_ns / 1e9)}, by the demo model)"
        )
    return (
        f"how often a token's experts are in memory, which nobody knows before the model runs, and reading the others "
        f"from the disk ({format_rate(link.nbytes_per_s)} measured)"
    )


def _command(
    needs: ModelNeeds,
    store_nbytes: int,
    download_nbytes: int,
    free_nbytes: int,
    fits: bool,
    total_memory: str | None = None,
) -> str:
    if needs.refused is not None:
        return f"none: {needs.refused}"
    if needs.stored is None:
        return f"expertly doctor with a folder of weights or a hub id: {needs.name} is a config alone"
    if not fits:
        return "none here: the least of experts does not fit beside the rest"
    if store_nbytes + download_nbytes > free_nbytes:
        if not download_nbytes or store_nbytes + needs.stored.largest_file_nbytes > free_nbytes:
            return f"make room on the disk ({format_nbytes(free_nbytes)} are free), or set EXPERTLY_CACHE to another"
        return f"expertly pack {needs.name} --stream"
    return f"expertly run {needs.name}" + ("" if total_memory is None else f" --total-memory {total_memory}")
