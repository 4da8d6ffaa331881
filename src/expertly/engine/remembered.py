"""System `auto`: the file of what `expertly bench --save` found to be fastest for a model, and how a load finds its
system there. The file is read as hostile input: only presets are taken from it, so that it names no code.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Le

from expertly.core.errors import StoreError
from expertly.core.files import disk_errors, json_bytes, write_atomic
from expertly.core.resources import cpu_name
from expertly.core.units import format_nbytes, format_share
from expertly.core.untrusted import OWN_FILE, Bounds, read_as
from expertly.engine.device import kind_of
from expertly.engine.memory import MemoryRequest, divide
from expertly.engine.weights import AUTO, find_weights
from expertly.scheduler.systems import BASE_SYSTEM, SYSTEMS, default_system, get_runnable
from expertly.store.cache import learned_beside, mark_of
from expertly.store.packed import PackedStore

MAX_ENTRIES = 64
NEAR, SAME = 1.25, 1.05
"""Factors between two amounts of memory: up to NEAR an entry counts, below SAME a new one replaces it."""


@dataclass(frozen=True, slots=True)
class FastestSystem:
    """The fastest system for one model, machine and memory."""

    system: str  # a preset
    memory_nbytes: Annotated[int, Ge(1), Le(1 << 60)]  # for experts
    machine: str

    def distance(self, nbytes: int) -> float:
        """The factor between its memory and another amount, at least 1."""
        return max(nbytes, self.memory_nbytes) / max(1, min(nbytes, self.memory_nbytes))


@dataclass(frozen=True, slots=True)
class _File:
    """What is remembered of a model, the oldest first."""

    __pydantic_config__: ClassVar[Any] = OWN_FILE

    format: Literal["expertly-fastest"]  # the mark of such files
    identity: str
    entries: tuple[FastestSystem, ...]


def this_machine(device: torch.device) -> str:
    """This machine, with the device that a model runs on and the threads that compute."""
    return f"{cpu_name() or 'unknown'}, {torch.get_num_threads()} threads, {kind_of(device).name(device)}"


def remembered_path(store: PackedStore) -> Path:
    return learned_beside(store.folder, "fastest")


def remember(store: PackedStore, entry: FastestSystem) -> Path:
    """Add an entry to the model's file, instead of one for this machine and memory. Returns its path. A damaged file is
    replaced. Raises StoreError where it cannot be written, or is somebody else's.
    """
    path = remembered_path(store)
    try:
        entries = read_remembered(store)
    except StoreError:
        entries = []
    kept = [old for old in entries if old.machine != entry.machine or old.distance(entry.memory_nbytes) >= SAME]
    file = _File("expertly-fastest", store.manifest.identity, (*kept, entry)[-MAX_ENTRIES:])
    with disk_errors(path, "saving the fastest system", StoreError, ""):
        write_atomic(path, json_bytes(asdict(file)), mark_of("fastest"))
    return path


def read_remembered(store: PackedStore) -> list[FastestSystem]:
    """The model's entries, the oldest first. Raises StoreError naming file, field, value and what is accepted."""
    path = remembered_path(store)
    if not os.path.lexists(path):
        return []
    file = read_as(_File, path, StoreError, bounds=Bounds(1 << 18))
    if file.identity != store.manifest.identity:
        raise StoreError(f"{path}: identity={file.identity!r:.80}: accepted: {store.manifest.identity!r}")
    for number, entry in enumerate(file.entries):
        if entry.system not in SYSTEMS.built_in:
            accepted = ", ".join(SYSTEMS.built_in)
            raise StoreError(f"{path}: entries[{number}].system={entry.system!r:.80}: accepted: {accepted}")
    return list(file.entries)


def auto_system(store: PackedStore, request: MemoryRequest, target: torch.device, *, is_alone: bool) -> tuple[str, str]:
    """The system that `auto` stands for, and why, in a sentence: the remembered one for this machine and the nearest
    memory, else the default. `is_alone`: there are no workers. Raises as `divide`.
    """
    nbytes = divide(store, store.geometry(), get_runnable(BASE_SYSTEM), request, target).budget.memory_nbytes
    layers = store.manifest.layers
    name = default_system(layers, nbytes, runs_on_host=kind_of(target).runs_on_host)
    each, share = store.experts_nbytes / sum(layer.num_experts for layer in layers), nbytes / store.experts_nbytes
    held = f"{format_share(min(1.0, share))} of experts of {format_nbytes(each)}"
    default = f"system auto: {name}, the default for {held} in memory"
    try:
        entries = read_remembered(store)
    except StoreError as error:
        return name, f"{default}: what was remembered cannot be used: {error}"
    entries = [entry for entry in entries if is_alone and entry.machine == this_machine(target)]
    if not entries:
        return name, f"{default}; `expertly bench --save` finds the fastest"
    near = [entry for entry in reversed(entries) if entry.distance(nbytes) <= NEAR and _can_run(entry, store, nbytes)]
    if not near:
        return name, f"{default}: not measured in {format_nbytes(nbytes)}; `expertly bench --save` does"
    nearest = min(near, key=lambda entry: entry.distance(nbytes))
    return nearest.system, f"system auto: {nearest.system}, the fastest here in {format_nbytes(nearest.memory_nbytes)}"


def _can_run(entry: FastestSystem, store: PackedStore, nbytes: int) -> bool:
    """Whether all experts fit where the system keeps them, and its trained weights are still there."""
    system = get_runnable(entry.system)
    fits = nbytes >= store.experts_nbytes or not system.keeps_everything
    return fits and (system.weights is None or find_weights(AUTO, system, store) is not None)
