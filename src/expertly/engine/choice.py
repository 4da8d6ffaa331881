"""System `auto`: the file of choices that `expertly tune` made for a model, one for each amount of memory, and how a
load finds its choice there.

The file is read as hostile input: all of it is checked before any of it is used, and no code that it names is imported.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from expertly.core.costs import CODECS
from expertly.core.errors import ConfigError, ExpertlyError, StoreError
from expertly.core.files import disk_errors, from_json, json_bytes, write_atomic
from expertly.core.resources import allowed_cpus, cpu_name
from expertly.core.units import format_nbytes, format_share
from expertly.core.untrusted import read_json_object
from expertly.engine.device import kind_of
from expertly.engine.learned import AUTO, find_weights
from expertly.engine.memory import MemoryRequest, divide
from expertly.policies.allocation.moepic import SplitPlan
from expertly.scheduler.presets import BASE_SYSTEM, default_system, get_system, paths_in
from expertly.scheduler.system import System
from expertly.store.cache import entry_folder, learned_beside, mark_of
from expertly.store.packed import PackedStore, is_packed_store

FORMAT = "expertly-choices"
FORMAT_VERSION = 1
MAX_CHOICES = 64
"""For one model. The oldest is dropped."""

MAX_GAINS = 16

_MOST = 1 << 60
"""The largest whole number that is accepted."""


@dataclass(frozen=True, slots=True)
class TunedOn:
    """The machine of a choice. `kind` is cpu or cuda."""

    kind: str
    device: str  # the accelerator's name; without one, the processor's
    cpu: str
    num_cpus: int  # that the process may use
    num_threads: int  # that compute

    def differences(self, other: TunedOn) -> list[str]:
        """Sentences for the fields that differ."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{name} {mine[name]} there, {theirs[name]} here" for name in mine if mine[name] != theirs[name]]


@dataclass(frozen=True, slots=True)
class Gain:
    """Time with the choice / time with another system, measured on the same requests in turn."""

    over: str  # the other system
    ratio: float  # of whole requests, prompt and answer
    low: float  # 95 % interval of the median ratio
    high: float
    tpot_ratio: float
    num_turns: int


@dataclass(frozen=True, slots=True)
class TunedChoice:
    """The system chosen for one model on one machine and memory, and its gains."""

    system: str  # as `get_system` takes it
    segments: int  # P
    memory_nbytes: int  # the memory it was chosen for
    codec: str
    machine: TunedOn
    plan: SplitPlan | None = None  # of split caching, to begin with
    predictor: str | None = None  # the file of trained weights; None: the option's `auto`
    gains: tuple[Gain, ...] = ()
    about: dict[str, str | int | float | None] = field(default_factory=dict)  # for people

    @property
    def parts(self) -> System:
        return get_system(self.system)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"plan": None if self.plan is None else self.plan.to_dict()}


def read_choices(path: Path, identity: str, dtype: str) -> list[TunedChoice]:
    """The choices for a model, the oldest first; none where there is no file.

    Raises StoreError naming the file, the field, its value and what is accepted where the file is damaged, or of
    another version, model or dtype.
    """
    if not os.path.lexists(path):
        return []
    raw = read_json_object(path, StoreError)
    expected = {"format": FORMAT, "format_version": FORMAT_VERSION, "identity": identity, "dtype": dtype}
    for name, accepted in expected.items():
        found = raw.get(name)
        if type(found) is not type(accepted) or found != accepted:
            raise StoreError(f"{path}: {name}={found!r:.80}: accepted: {accepted!r}; run `expertly tune` again")
    choices = raw.get("choices")
    if not isinstance(choices, list) or len(choices) > MAX_CHOICES:
        raise StoreError(f"{path}: choices={choices!r:.80}: must be a list of at most {MAX_CHOICES}")
    return [_choice(f"{path}: choices[{number}]", one) for number, one in enumerate(choices)]


def save_choice(path: Path, identity: str, dtype: str, choice: TunedChoice) -> None:
    """Add a choice to the file at `path`, instead of one for the same memory and kind of device. A file that cannot be
    read is replaced. A crash leaves the old file. Raises StoreError where it cannot be written.
    """
    try:
        others = read_choices(path, identity, dtype)
    except StoreError:
        others = []
    key = (choice.memory_nbytes, choice.machine.kind)
    kept = [one for one in others if (one.memory_nbytes, one.machine.kind) != key]
    every = [*kept, choice][-MAX_CHOICES:]
    head = {"format": FORMAT, "format_version": FORMAT_VERSION, "identity": identity, "dtype": dtype}
    with disk_errors(path, "saving the choice", StoreError, ""):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json_bytes({**head, "choices": [one.as_dict() for one in every]}), mark_of("choices"))


def _choice(where: str, raw: Any) -> TunedChoice:
    compressed = raw.get("compressed") if isinstance(raw, dict) else None  # of the first edition
    if compressed not in (None, 0):
        raise StoreError(
            f"{where}: compressed={compressed!r:.80}: experts do not stay compressed in memory any more; "
            "accepted: null and 0; run `expertly tune` again"
        )
    try:
        choice: TunedChoice = from_json(TunedChoice, raw, where, StoreError)
        if paths := paths_in(choice.system):
            raise ConfigError(f"system={choice.system!r:.80}: names code by its path, {paths[0]!r:.80}: not imported")
        parts = get_system(choice.system)
        if "future" in parts.needs:
            raise ConfigError(f"system={choice.system!r:.80}: needs the demands to come")
    except ConfigError as error:
        raise StoreError(f"{where}: {error}") from None
    if choice.codec not in CODECS:
        raise StoreError(f"{where}: codec={choice.codec!r:.80}: accepted: {', '.join(CODECS)}")
    machine = choice.machine
    if machine.kind not in ("cpu", "cuda"):
        raise StoreError(f"{where}: machine: kind={machine.kind!r:.80}: accepted: cpu, cuda")
    if len(choice.gains) > MAX_GAINS:
        raise StoreError(f"{where}: gains: {len(choice.gains)} of them; accepted: at most {MAX_GAINS}")
    for owner, name, least, most in (
        (choice, "segments", 1, _MOST),
        (choice, "memory_nbytes", 1, _MOST),
        (machine, "num_cpus", 1, _MOST),
        (machine, "num_threads", 1, _MOST),
        *((gain, name, 0, 10**6) for gain in choice.gains for name in ("ratio", "low", "high", "tpot_ratio")),
        *((gain, "num_turns", 0, _MOST) for gain in choice.gains),
    ):
        value = getattr(owner, name)
        if not least <= value <= most:
            kind = "whole number" if isinstance(value, int) else "number"
            raise StoreError(f"{where}: {name}={value!r:.80}: must be a {kind} from {least} to {most}")
    return replace(choice, system=parts.name)


# -- finding the choice for a load -------------------------------------------------------------------------------------


class LoadSettings(NamedTuple):
    """Options of `expertly.load` that a choice fills in where the user gave none."""

    segments: int | None
    codec: str
    plan: str | Path | SplitPlan | None
    predictor: str | Path | None


class FoundChoice(NamedTuple):
    """The system that `auto` stands for; `why` is a sentence."""

    system: str
    settings: LoadSettings
    why: str


def this_machine(device: torch.device) -> TunedOn:
    """This machine, with the device that a model runs on."""
    cpu = cpu_name() or "unknown"
    name = kind_of(device).name(device) or cpu
    return TunedOn(device.type, name, cpu, allowed_cpus(), torch.get_num_threads())


def choices_path(store: PackedStore) -> Path:
    """The file of choices for a model: beside its stores, one for all codecs."""
    return learned_beside(store.folder, "choices")


def find_choice(
    store: PackedStore,
    asked: LoadSettings,
    request: MemoryRequest,
    targets: Sequence[torch.device],
    *,
    is_alone: bool = True,
) -> FoundChoice:
    """The choice whose memory is nearest to the available memory, among those that can run here; the default system,
    with the reason, where there is none. Options in `asked` that the user gave stay. `is_alone`: one device, and no
    workers. Raises as `divide`.
    """

    def default(why: str) -> FoundChoice:
        name, mib = default_system(store.manifest.layers)
        size = format_nbytes(mib * 2**20)
        return FoundChoice(name, asked, f"system auto: {name}, the default for experts of {size}: {why}")

    path = choices_path(store)
    try:
        choices = read_choices(path, store.manifest.identity, store.manifest.stored_as)
    except StoreError as error:
        return default(f"the saved choice cannot be used: {error}")
    if not choices:
        return default("nothing has been tuned for this model; `expertly tune` does")
    here = this_machine(targets[0])
    of_kind = [one for one in choices if one.machine.kind == here.kind]
    if not of_kind or not is_alone:
        what = f"{len(targets)} devices, or has workers" if of_kind else f"a device of kind {here.kind}"
        return default(f"what was tuned was tuned on {choices[-1].machine.kind}, alone, and this is {what}")
    division = divide(store, [store.geometry()], get_system(BASE_SYSTEM), request, targets)
    nbytes = division.budgets[0].memory_nbytes  # the stated amount, or all that is free
    possible = [one for one in of_kind if _is_possible(one, store, nbytes, asked.predictor)]
    if not possible:
        return default(f"what was tuned ({of_kind[-1].system}) cannot run in {nbytes} bytes with what is there")
    nearest = min(reversed(possible), key=lambda one: abs(math.log(nbytes / one.memory_nbytes)))
    return _found(nearest, store, asked, request, nbytes, here)


def _is_possible(choice: TunedChoice, store: PackedStore, nbytes: int, predictor: str | Path | None) -> bool:
    """Whether its system can run here: `resident` needs memory for all experts, a trained one its weights."""
    parts = choice.parts
    if parts.keeps_everything and nbytes < store.experts_nbytes:
        return False
    if not parts.takes_weights:
        return True
    try:
        return find_weights(_predictor(choice, predictor), parts, store) is not None
    except ExpertlyError:
        return False


def _predictor(choice: TunedChoice, asked: str | Path | None) -> str | Path | None:
    return choice.predictor if asked == AUTO and choice.predictor is not None else asked


def _found(
    choice: TunedChoice, store: PackedStore, asked: LoadSettings, request: MemoryRequest, nbytes: int, here: TunedOn
) -> FoundChoice:
    said = [f"system auto: {choice.system}, P = {choice.segments}, tuned for {_amount(choice.memory_nbytes, store)}"]
    if choice.memory_nbytes != nbytes:
        said.append(f"the nearest to {_amount(nbytes, store)}")
    said += [f"there {gain.ratio:.2f}x the time of {gain.over}" for gain in choice.gains]
    if differences := choice.machine.differences(here):
        said.append(f"on another machine: {', '.join(differences)}")
    segments, plan = choice.segments if asked.segments is None else asked.segments, asked.plan
    if plan is None and choice.plan is not None:
        if segments == choice.segments and _fits(choice, store, nbytes, request.staging):
            plan = choice.plan
        else:
            said.append("its plan does not fit here and is left out")
    codec, is_cached = asked.codec, store.folder == in_codec(store, store.codec)
    if codec == AUTO and is_cached and is_packed_store(in_codec(store, choice.codec)):
        codec = choice.codec
    settings = LoadSettings(segments, codec, plan, _predictor(choice, asked.predictor))
    return FoundChoice(choice.system, settings, "; ".join(said))


def _fits(choice: TunedChoice, store: PackedStore, nbytes: int, staging: int | None) -> bool:
    """Whether the choice's plan fits into `nbytes`."""
    assert choice.plan is not None
    try:
        geometry = store.geometry(choice.plan.geometry.segments_per_expert)
        division = divide(store, [geometry], choice.parts, MemoryRequest(nbytes, staging), [torch.device("cpu")])
        choice.parts.check_plan(choice.plan, geometry, division.budgets[0])
    except ConfigError:
        return False
    return True


def in_codec(store: PackedStore, codec: str) -> Path:
    """The cache's folder for the same model in another codec; it may not exist."""
    manifest, cache = store.manifest, store.folder.parent.parent
    return entry_folder(manifest.model_type, manifest.identity, manifest.stored_as, cache, codec)


def _amount(nbytes: int, store: PackedStore) -> str:
    return f"{format_nbytes(nbytes)} ({format_share(nbytes / store.experts_nbytes)} of the experts)"
