"""The file of what `expertly tune` chose for a model, one choice a memory, which system `auto` goes by. Read as hostile
input: nothing that it says is imported, and nothing of it is used before all of it has been checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from expertly.core.costs import CODECS
from expertly.core.errors import ConfigError, StoreError
from expertly.core.files import disk_errors, json_bytes, read_json_object, write_atomic
from expertly.policies.allocation.moepic import SplitPlan
from expertly.scheduler.presets import get_system, paths_in
from expertly.scheduler.system import System

FORMAT = "expertly-choices"
FORMAT_VERSION = 1
MAX_CHOICES = 64
"""Of one model; the oldest goes."""

MAX_FILE_NBYTES = 16 << 20

_MAX_TEXT = 4096


@dataclass(frozen=True, slots=True)
class Machine:
    """What a choice was made on. `kind` is cpu or cuda."""

    kind: str
    device: str  # the accelerator's name; without one, the processor's
    cpu: str
    num_cpus: int  # that the process may use
    num_threads: int  # that compute

    def differences(self, other: Machine) -> list[str]:
        """In words, what is not the same there."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{name} {mine[name]} there, {theirs[name]} here" for name in mine if mine[name] != theirs[name]]


@dataclass(frozen=True, slots=True)
class Gain:
    """What was measured over another system, of the same requests in turn: time with the choice / time with it."""

    over: str
    ratio: float  # of a request, prompt and answer
    low: float  # of the median of the turns' ratios, each end at 95 %
    high: float
    tpot_ratio: float
    num_turns: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A system for one model on one machine at one memory, and what it gained there."""

    system: str  # as `get_system` takes it
    segments: int  # P
    memory_nbytes: int  # that it was chosen for
    budget_nbytes: int  # of that, what is used: less where memory was `auto` and more brought nothing
    codec: str
    machine: Machine
    plan: SplitPlan | None = None  # that it begins with
    predictor: str | None = None  # the file of trained weights; None: as `auto` finds them
    gains: tuple[Gain, ...] = ()
    about: Mapping[str, str | int | float | None] = field(default_factory=dict)  # for people

    @property
    def parts(self) -> System:
        return get_system(self.system)

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        every = {one.name: getattr(self, one.name) for one in fields(self)}
        return every | {
            "machine": asdict(self.machine),
            "plan": None if self.plan is None else self.plan.to_dict(),
            "gains": [asdict(gain) for gain in self.gains],
            "about": dict(self.about),
        }


def read_choices(path: Path, identity: str, dtype: str) -> list[Choice]:
    """The choices for a model, the oldest first; none where there is no file.

    Raises StoreError naming the file, the field, its value and what is accepted: a file that is damaged, of another
    version, or of another model or dtype.
    """
    try:
        nbytes = path.stat().st_size
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror})") from None
    if nbytes > MAX_FILE_NBYTES:
        raise StoreError(f"{path}: {nbytes} bytes; must be at most {MAX_FILE_NBYTES}")
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


def save_choice(path: Path, identity: str, dtype: str, choice: Choice) -> None:
    """Add a choice to the file at `path`; it takes the place of one for the same memory on the same kind of device. A
    file that cannot be read is replaced. After a crash it is what it was before. Raises StoreError where it cannot be
    written.
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
        write_atomic(path, json_bytes({**head, "choices": [one.as_dict() for one in every]}))


def _choice(where: str, raw: object) -> Choice:
    if isinstance(raw, dict) and "compressed" in raw:  # of the first edition
        if raw["compressed"] not in (None, 0):
            raise StoreError(
                f"{where}: compressed={raw['compressed']!r:.80}: experts do not stay compressed in memory any more; "
                "accepted: null and 0; run `expertly tune` again"
            )
        raw = {name: value for name, value in raw.items() if name != "compressed"}
    values = _object(where, raw, [one.name for one in fields(Choice)])
    system = _text(where, values, "system")
    if paths := paths_in(system):
        raise StoreError(f"{where}: system={system!r:.80}: names code by its path, {paths[0]!r:.80}: not imported")
    try:
        name = get_system(system).name
        if "future" in get_system(system).needs:
            raise ConfigError(f"system={system!r:.80}: needs the demands to come")
        plan = None if values["plan"] is None else SplitPlan.from_dict(_mapping(where, values, "plan"))
    except ConfigError as error:
        raise StoreError(f"{where}: {error}") from None
    gains = values["gains"]
    if not isinstance(gains, list) or len(gains) > 16:
        raise StoreError(f"{where}: gains={gains!r:.80}: must be a list of at most 16")
    memory_nbytes = _whole(where, values, "memory_nbytes", 1)
    codec = _text(where, values, "codec")
    if codec not in CODECS:
        raise StoreError(f"{where}: codec={codec!r:.80}: accepted: {', '.join(CODECS)}")
    return Choice(
        system=name,
        segments=_whole(where, values, "segments", 1),
        memory_nbytes=memory_nbytes,
        budget_nbytes=_whole(where, values, "budget_nbytes", 1, memory_nbytes),
        codec=codec,
        machine=_machine(f"{where}.machine", values["machine"]),
        plan=plan,
        predictor=None if values["predictor"] is None else _text(where, values, "predictor"),
        gains=tuple(_gain(f"{where}.gains[{number}]", gain) for number, gain in enumerate(gains)),
        about=_about(where, values),
    )


def _machine(where: str, raw: object) -> Machine:
    values = _object(where, raw, [one.name for one in fields(Machine)])
    kind = _text(where, values, "kind")
    if kind not in ("cpu", "cuda"):
        raise StoreError(f"{where}: kind={kind!r:.80}: accepted: cpu, cuda")
    num_cpus, num_threads = (_whole(where, values, name, 1) for name in ("num_cpus", "num_threads"))
    return Machine(kind, _text(where, values, "device"), _text(where, values, "cpu"), num_cpus, num_threads)


def _gain(where: str, raw: object) -> Gain:
    values = _object(where, raw, [one.name for one in fields(Gain)])
    ratio, low, high, tpot = (_number(where, values, name, 0, 1e6) for name in ("ratio", "low", "high", "tpot_ratio"))
    return Gain(_text(where, values, "over"), ratio, low, high, tpot, _whole(where, values, "num_turns", 0))


def _about(where: str, values: Mapping[str, Any]) -> dict[str, str | int | float | None]:
    about = _mapping(where, values, "about")
    for name, value in about.items():
        is_plain = (
            value is None or isinstance(value, int | float) or (isinstance(value, str) and len(value) < _MAX_TEXT)
        )
        if not is_plain or len(name) > 80:
            raise StoreError(f"{where}.about: {name[:80]}={value!r:.80}: must be a short text, a number or null")
    return about


def _object(where: str, raw: object, names: list[str]) -> dict[str, Any]:
    if not isinstance(raw, dict) or set(raw) != set(names):
        raise StoreError(f"{where}={raw!r:.80}: must be an object of {', '.join(names)}")
    return raw


def _mapping(where: str, values: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = values[name]
    if not isinstance(value, dict):
        raise StoreError(f"{where}: {name}={value!r:.80}: must be an object")
    return value


def _text(where: str, values: Mapping[str, Any], name: str) -> str:
    value = values[name]
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_TEXT:
        raise StoreError(f"{where}: {name}={value!r:.80}: must be a string of 1 to {_MAX_TEXT} characters")
    return value


def _whole(where: str, values: Mapping[str, Any], name: str, least: int, most: int = 1 << 60) -> int:
    value = values[name]
    if type(value) is not int or not least <= value <= most:
        raise StoreError(f"{where}: {name}={value!r:.80}: must be a whole number from {least} to {most}")
    return value


def _number(where: str, values: Mapping[str, Any], name: str, least: float, most: float) -> float:
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise StoreError(f"{where}: {name}={value!r:.80}: must be a number")
    if not least <= value <= most:
        raise StoreError(f"{where}: {name}={value!r:.80}: must be from {least} to {most}")
    return float(value)
