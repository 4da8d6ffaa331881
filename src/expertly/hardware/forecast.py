"""What to expect of a model on a machine before it is downloaded: what fits, and tokens per second under several
budgets.

A roofline: a token's weights at the rate at which they are read, what a layer takes beside, and the experts that are
not in memory at the rate of the link or the disk. How often experts are in memory is read off recorded routing of a few
models (data/hit_curves.json, made by tools/hit_curves.py): nobody knows it of others before they run.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from statistics import mode
from typing import Any

import numpy as np
import torch

from expertly import api
from expertly.core.files import existing_parent
from expertly.core.geometry import Geometry
from expertly.core.resources import parse_memory
from expertly.engine.fitting import left_for_experts
from expertly.hardware.measure import measure_experts_rate
from expertly.hardware.profile import MachineProfile
from expertly.model.needs import ModelNeeds, kv_cache_nbytes
from expertly.scheduler.budget import least_nbytes
from expertly.store.cache import stores_folder
from expertly.store.manifest import ITEMSIZE

CONTEXTS = (4096, 32768, 131072)
SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
"""The budgets that are looked at, as shares of the experts."""

MACHINE_ERROR = 1.25
"""A machine is measured for only half a minute and without the model: times may be longer or shorter by this factor."""

_CALIBRATION_TOKENS = 24
_FORMAT_S = 0.5


@dataclass(frozen=True, slots=True)
class Speed:
    """What decides a token's time, of one machine and the model's weight format."""

    dense_nbytes_per_s: float
    experts_nbytes_per_s: float
    layer_ns: int  # beside weights
    link_nbytes_per_s: float  # to an accelerator; without one, of the disk
    link_latency_ns: int
    disk_nbytes_per_s: float | None  # behind an accelerator
    host_nbytes: int | None  # for experts behind it


@dataclass(frozen=True, slots=True)
class ExpectedSpeed:
    """Decode with so much memory for experts; each pair is a lower and an upper end."""

    memory_nbytes: int
    share: float
    fits: bool
    tokens_per_s: tuple[float, float]
    hit_rate: tuple[float, float]
    waiting: tuple[float, float]  # share of the time, for experts that are not there


@dataclass(frozen=True, slots=True)
class ModelForecast:
    """What a model needs, and how fast it would be on one machine. `memory_name`: the device that computes."""

    needs: ModelNeeds
    experts_nbytes: int
    cache_nbytes: dict[int, int]  # of the KV cache, by tokens
    least_nbytes: int  # of experts
    disk_nbytes: int  # of the packed store
    download_nbytes: int  # 0 where it is here
    disk_free_nbytes: int
    memory_name: str
    memory_nbytes: int  # free, or as much of it as was stated for everything
    fitting_share: float  # of the experts, beside the rest and 4096 tokens
    routing: tuple[str, ...]  # whose recorded routing the hit rates are of
    speeds: tuple[ExpectedSpeed, ...]
    command: str


def measured_speed(profile: MachineProfile, needs: ModelNeeds, loading: api.Progress | None = None) -> Speed:
    """The machine of `profile`, with what a layer takes beside its weights measured on the demo model in a few seconds,
    and the rate at which a processor decodes the experts' weight format. `loading` is told of the bytes of that model,
    as by `expertly.load`. Raises ConfigError where the profile lacks the disk.
    """
    disk, device = profile.storage, profile.devices[0] if profile.devices else None
    model, tokenizer = api.load(system="resident", device=device.device if device else "cpu", progress=loading)
    try:
        inputs = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False).to(model.device)
        times_ns = []
        for num_tokens in (_CALIBRATION_TOKENS, 1, 1 + _CALIBRATION_TOKENS, 1, 1 + _CALIBRATION_TOKENS):
            start_ns = time.perf_counter_ns()
            model.generate(**inputs, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
            times_ns.append(time.perf_counter_ns() - start_ns)
        store = api.handle(model).store
    finally:
        api.unload(model)
    rate = profile.weights_nbytes_per_s if device is None else device.weights_nbytes_per_s
    token_ns = min(times_ns[2] - times_ns[1], times_ns[4] - times_ns[3]) / _CALIBRATION_TOKENS
    layers = store.manifest.layers
    read_ns = (store.dense_nbytes + _token_nbytes(layers)) / rate * 1e9
    layer_ns = max(0, round((token_ns - read_ns) / len(layers)))
    if device is not None:
        link = device.link_nbytes_per_s, device.link_latency_ns
        return Speed(rate, rate, layer_ns, *link, disk.nbytes_per_s, profile.available_nbytes)
    of_format = measure_experts_rate(mode(needs.layers), getattr(torch, needs.dtype), _FORMAT_S)
    return Speed(rate, of_format or rate, layer_ns, disk.nbytes_per_s, disk.latency_ns, None, None)


def forecast(
    needs: ModelNeeds, profile: MachineProfile, speed: Speed, available_nbytes: int, total_memory: str | None = None
) -> ModelForecast:
    """The forecast for the machine of `profile`, with so much free memory. `total_memory`: see `expertly.load`."""
    device = profile.devices[0] if profile.devices else None
    geometry, itemsize = Geometry(needs.layers), ITEMSIZE[needs.dtype]
    cache = kv_cache_nbytes(needs.config, 1, itemsize)
    memory_name, memory = ("RAM", available_nbytes) if device is None else (device.name, device.memory_nbytes)
    if total_memory is not None:
        memory = parse_memory(total_memory, memory, "total_memory") or memory
    left = left_for_experts(needs, memory, runs_on_host=device is None)
    least = least_nbytes(geometry)
    positions = needs.config.get("max_position_embeddings") or CONTEXTS[-1]
    contexts = [context for context in CONTEXTS if context <= positions] or [positions]
    budgets = [(round(share * geometry.nbytes), share) for share in SHARES]
    if least < left < geometry.nbytes:
        budgets.append((left, left / geometry.nbytes))
    curves = hit_curves(needs.model_type)
    speeds = [_expected(needs, speed, curves, *budget, left) for budget in sorted(budgets) if budget[0] >= least]
    stored = needs.stored
    return ModelForecast(
        needs=needs,
        experts_nbytes=geometry.nbytes,
        cache_nbytes={context: context * cache for context in contexts},
        least_nbytes=least,
        disk_nbytes=0 if needs.is_packed else needs.dense_nbytes + needs.tables_nbytes + geometry.nbytes,
        download_nbytes=stored.nbytes if stored is not None and not stored.is_here else 0,
        disk_free_nbytes=shutil.disk_usage(existing_parent(stores_folder())).free,
        memory_name=memory_name,
        memory_nbytes=memory,
        fitting_share=max(0.0, min(1.0, left / geometry.nbytes)) if left >= least else 0.0,
        routing=tuple(curve["name"] for curve in curves),
        speeds=tuple(speeds),
        command=_command(needs, left >= least, total_memory),
    )


def hit_curves(model_type: str) -> list[dict[str, Any]]:
    """The curves of the model's family, or of all where none was recorded. `hit_rate` belongs to `shares`."""
    read = json.loads(files("expertly.data").joinpath("hit_curves.json").read_text(encoding="utf-8"))
    curves = [{**curve, "shares": read["shares"]} for curve in read["curves"]]
    return [curve for curve in curves if curve["family"] == model_type] or curves


def hit_rate(curve: dict[str, Any], share: float) -> float:
    """Of an LRU cache with `share` of the experts, between recorded shares interpolated."""
    return float(np.interp(share, [0.0, *curve["shares"]], [0.0, *curve["hit_rate"]]))


def _token_nbytes(layers: Sequence[Any]) -> int:
    return sum(layer.top_k * layer.expert_nbytes for layer in layers)


def _expected(
    needs: ModelNeeds, speed: Speed, curves: Sequence[dict[str, Any]], nbytes: int, share: float, left: int
) -> ExpectedSpeed:
    """A token's time: what it computes, and then what it loads. `left`: the memory for experts that there is."""
    layers, experts_nbytes = needs.layers, _token_nbytes(needs.layers)
    dense_nbytes = needs.dense.layer_nbytes * len(layers) + needs.dense.head_nbytes
    compute_s = dense_nbytes / speed.dense_nbytes_per_s + experts_nbytes / speed.experts_nbytes_per_s
    compute_s += len(layers) * speed.layer_ns / 1e9
    ends = []
    for curve in curves:
        hits = hit_rate(curve, share)
        waits = sum(min(1.0, layer.top_k * (1 - hits)) for layer in layers) * speed.link_latency_ns / 1e9
        load_s = (1 - hits) * experts_nbytes / speed.link_nbytes_per_s + waits
        if speed.disk_nbytes_per_s is not None and speed.host_nbytes is not None:
            in_host = hit_rate(curve, max(share, speed.host_nbytes / needs.experts_nbytes))
            load_s += (1 - in_host) * experts_nbytes / speed.disk_nbytes_per_s
        ends.append((1 / (compute_s + load_s), hits, load_s / (compute_s + load_s)))
    rates, hit_rates, waiting = ((min(values), max(values)) for values in zip(*ends, strict=True))
    tokens_per_s = rates[0] / MACHINE_ERROR, rates[1] * MACHINE_ERROR
    return ExpectedSpeed(nbytes, share, nbytes <= left, tokens_per_s, hit_rates, waiting)


def _command(needs: ModelNeeds, fits: bool, total_memory: str | None) -> str:
    if needs.stored is None:
        return f"expertly doctor with a folder of weights or a hub id: {needs.name} is a config alone"
    command = f"expertly run {needs.name}" + ("" if total_memory is None else f" --total-memory {total_memory}")
    return command if fits else "none here: the least of experts does not fit beside the rest"
