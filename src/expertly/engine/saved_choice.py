"""System `auto`: what `expertly tune` chose for a model, found for the memory and the machine that it loads on."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from expertly.core.errors import ConfigError, ExpertlyError, StoreError
from expertly.engine.choices import Choice, Machine, read_choices
from expertly.engine.device import kind_of
from expertly.engine.division import Request, divide
from expertly.engine.learned import AUTO, find_weights
from expertly.hardware.machine import cpu_name
from expertly.policies.allocation.moepic import SplitPlan
from expertly.scheduler.presets import BASE_SYSTEM, default_system, get_system
from expertly.store.cache import entry_folder, learned_beside
from expertly.store.packed import PackedStore, is_packed_store


class Settings(NamedTuple):
    """Arguments of `expertly.load` that a choice may settle, where they were not given."""

    segments: int | None
    memory: str | int | None
    codec: str
    plan: str | Path | SplitPlan | None
    predictor: str | Path | None


class Found(NamedTuple):
    """What system `auto` is; `why` is a sentence."""

    system: str
    settings: Settings
    why: str


def this_machine(device: torch.device) -> Machine:
    """The one that a model runs on."""
    cpu = cpu_name() or "unknown"
    name = kind_of(device).name(device) or cpu
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(device.type, name, cpu, num_cpus, torch.get_num_threads())


def choices_path(store: PackedStore) -> Path:
    """Where the choices for a model go: beside its stores, one file for all codecs."""
    return learned_beside(store.folder, "choices")


def find_choice(store: PackedStore, asked: Settings, request: Request, targets: Sequence[torch.device]) -> Found:
    """The choice for the memory nearest to what is asked for, in which it can run; the default system, and why, where
    there is none, or none that is of this kind of device. `asked` stands where it says something. Raises what dividing
    the memory raises.
    """

    def default(why: str) -> Found:
        name, mib = default_system(store.manifest.layers)
        return Found(name, asked, f"system auto: {name}, the default for experts of {mib:.3g} MiB: {why}")

    path = choices_path(store)
    try:
        choices = read_choices(path, store.manifest.identity, store.manifest.dtype)
    except StoreError as error:
        return default(f"the saved choice cannot be used: {error}")
    if not choices:
        return default("nothing has been tuned for this model and dtype: run `expertly tune`")
    here = this_machine(targets[0])
    of_kind = [one for one in choices if one.machine.kind == here.kind]
    if not of_kind or len(targets) > 1:
        what = f"{len(targets)} devices" if of_kind else f"a device of kind {here.kind}"
        return default(f"what was tuned was tuned on {choices[-1].machine.kind}, alone, and this is {what}")
    nbytes = _memory_nbytes(store, request, targets)
    possible = [one for one in of_kind if _is_possible(one, store, nbytes, asked.predictor)]
    if not possible:
        return default(f"what was tuned ({of_kind[-1].system}) cannot run in {nbytes} bytes with what is there")
    nearest = min(reversed(possible), key=lambda one: abs(math.log(nbytes / one.memory_nbytes)))
    return _found(nearest, store, asked, request, nbytes, here)


def _memory_nbytes(store: PackedStore, request: Request, targets: Sequence[torch.device]) -> int:
    """All that is asked for, or that is free."""
    division = divide(store, [store.geometry()], get_system(BASE_SYSTEM), request, targets)
    return division.budgets[0].memory_nbytes


def _is_possible(choice: Choice, store: PackedStore, nbytes: int, predictor: str | Path | None) -> bool:
    """Whether its system can run: resident in memory for all, a trained one with its weights."""
    parts = choice.parts
    if parts.keeps_everything and nbytes < store.experts_nbytes:
        return False
    if not parts.takes_weights:
        return True
    try:
        return find_weights(_predictor(choice, predictor), parts, store) is not None
    except ExpertlyError:
        return False


def _predictor(choice: Choice, asked: str | Path | None) -> str | Path | None:
    return choice.predictor if asked == AUTO and choice.predictor is not None else asked


def _found(choice: Choice, store: PackedStore, asked: Settings, request: Request, nbytes: int, here: Machine) -> Found:
    said = [f"system auto: {choice.system}, P = {choice.segments}, tuned for {_mib(choice.memory_nbytes, store)}"]
    if choice.memory_nbytes != nbytes:
        said.append(f"the nearest to {_mib(nbytes, store)}")
    said += [f"there {gain.ratio:.2f}x the time of {gain.over}" for gain in choice.gains]
    if differences := choice.machine.differences(here):
        said.append(f"on another machine: {', '.join(differences)}")
    memory = asked.memory
    if choice.budget_nbytes < choice.memory_nbytes and memory in (None, "auto"):
        memory = min(nbytes, choice.budget_nbytes)
        said.append(f"of which {_mib(memory, store)} are used, as more brought nothing")
    segments, plan = choice.segments if asked.segments is None else asked.segments, asked.plan
    if plan is None and choice.plan is not None:
        if segments == choice.segments and _fits(
            choice.plan, choice, store, min(nbytes, choice.budget_nbytes), request
        ):
            plan = choice.plan
        else:
            said.append("its plan does not fit here and is left out")
    codec = choice.codec if asked.codec == AUTO and _is_packed(store, choice.codec) else asked.codec
    settings = Settings(segments, memory, codec, plan, _predictor(choice, asked.predictor))
    return Found(choice.system, settings, "; ".join(said))


def _fits(plan: SplitPlan, choice: Choice, store: PackedStore, nbytes: int, request: Request) -> bool:
    """Whether the system can begin with the plan in so much memory."""
    try:
        geometry = store.geometry(plan.geometry.segments_per_expert)
        slots = Request(nbytes, request.ring)
        choice.parts.check_plan(plan, geometry, divide(store, [geometry], choice.parts, slots, [_CPU]).budgets[0])
    except ConfigError:
        return False
    return True


_CPU = torch.device("cpu")


def _is_packed(store: PackedStore, codec: str) -> bool:
    """Where the store is one of the cache's."""
    return store.folder == in_codec(store, store.codec) and is_packed_store(in_codec(store, codec))


def in_codec(store: PackedStore, codec: str) -> Path:
    """Where the cache has, or would have, the model of a store in another codec."""
    manifest, cache = store.manifest, store.folder.parent.parent
    return entry_folder(manifest.model_type, manifest.identity, manifest.dtype, cache, codec)


def _mib(nbytes: int, store: PackedStore) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB ({nbytes / store.experts_nbytes:.1%} of the experts)"
