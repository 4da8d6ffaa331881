"""What a maps file says of itself: the metadata of its safetensors header."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expertly.core.errors import StoreError
from expertly.core.headers import header_metadata
from expertly.policies.maps.store import MAX_CAPACITY, MAX_NBYTES, MapShape

FORMAT = "expertly-maps"
VERSION = 1

MAX_LAYERS = 4096
MAX_EXPERTS = 0xFFFE
OF_A_TRACE = "trace:"
"""Begins the identity of maps that were made of a trace, of a model that nobody named."""

NO_CHECKSUM = "0" * 8
_CHECKSUM = re.compile(rb'"checksum":"([0-9a-f]{8})"')

Facts = Mapping[str, str | int | float | None]


@dataclass(frozen=True, slots=True)
class MapsHeader:
    """Everything but the maps."""

    identity: str  # of the model, as its packed store has it
    shape: MapShape
    capacity: int
    semantic_weight: float
    quota: float
    about: Facts = field(default_factory=dict)  # created, source, ...

    def metadata(self, checksum: str) -> dict[str, str]:
        shape = {"num_experts": list(self.shape.num_experts), "top_k": list(self.shape.top_k)}
        return {
            "format": FORMAT,
            "version": str(VERSION),
            "checksum": checksum,
            "identity": self.identity,
            "shape": json.dumps(shape, separators=(",", ":")),
            "capacity": str(self.capacity),
            "semantic_weight": repr(float(self.semantic_weight)),
            "quota": repr(float(self.quota)),
            "about": json.dumps(dict(self.about), separators=(",", ":"), allow_nan=False),
        }

    @classmethod
    def parse(cls, path: Path, raw: bytes) -> MapsHeader:
        """`raw` is the JSON of a safetensors header. Raises StoreError naming the file, the field and its value."""
        found = header_metadata(path, raw, StoreError)
        if found.get("format") != FORMAT:
            raise _failure(path, found, "format", f"not a maps file; those have {FORMAT!r}")
        if found.get("version") != str(VERSION):
            raise _failure(path, found, "version", f"this version of expertly reads {VERSION}; make the file again")
        if re.fullmatch("[0-9a-f]{8}", found.get("checksum", "")) is None:
            raise _failure(path, found, "checksum", "must be eight hexadecimal digits")
        if not found.get("identity"):
            raise _failure(path, found, "identity", "must say which model the maps are of")
        capacity = found.get("capacity", "")
        if re.fullmatch("[1-9][0-9]{0,6}", capacity) is None or int(capacity) > MAX_CAPACITY:
            raise _failure(path, found, "capacity", f"must be a whole number from 1 to {MAX_CAPACITY}")
        shape = _shape(path, found)
        nbytes = int(capacity) * shape.num_layers * (4 * shape.max_experts + 2 * shape.max_top_k)
        if nbytes > MAX_NBYTES:
            raise _failure(path, found, "capacity", f"a store of {nbytes} bytes; at most {MAX_NBYTES} are accepted")
        quota = _share(path, found, "quota")
        if not quota:
            raise _failure(path, found, "quota", "must be above 0")
        return cls(
            found["identity"],
            shape,
            int(capacity),
            _share(path, found, "semantic_weight"),
            quota,
            _about(path, found),
        )

    def check(self, path: Path, identity: str | None, shape: MapShape | None) -> None:
        """Raises StoreError where the maps are of another model."""
        if identity is not None and identity != self.identity:
            what = "maps of another model, or of this one before it changed"
            if self.identity.startswith(OF_A_TRACE):
                what = "maps of a trace whose model was not named; `expertly maps build --model` names it"
            raise StoreError(f"{path}: identity={self.identity!r:.80}: {what}; expected {identity!r:.80}")
        if shape is not None and shape != self.shape:
            raise StoreError(
                f"{path}: shape: maps of {describe(self.shape)}; expected {describe(shape)}, as the model has"
            )


def without_checksum(header: bytes) -> tuple[bytes, str]:
    """A header as it was when its checksum was computed, and that checksum."""
    match = _CHECKSUM.search(header)
    if match is None:
        return header, ""
    return header[: match.start(1)] + NO_CHECKSUM.encode() + header[match.end(1) :], match[1].decode()


def describe(shape: MapShape) -> str:
    """`26 layers of 64 experts, top-6`."""
    return f"{len(shape.num_experts)} layers of {_span(shape.num_experts)} experts, top-{_span(shape.top_k)}"


def _span(numbers: tuple[int, ...]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _shape(path: Path, found: Mapping[str, str]) -> MapShape:
    raw = _json(path, found, "shape")
    lists = [raw.get(name) for name in ("num_experts", "top_k")]
    for numbers in lists:
        if not isinstance(numbers, list) or not 1 <= len(numbers) <= MAX_LAYERS or len(numbers) != len(lists[0] or ()):
            raise _failure(path, found, "shape", f"must list num_experts and top_k of 1 to {MAX_LAYERS} layers")
        if not all(type(number) is int and 1 <= number <= MAX_EXPERTS for number in numbers):
            raise _failure(path, found, "shape", f"must hold whole numbers from 1 to {MAX_EXPERTS}")
    num_experts, top_k = lists
    assert num_experts is not None and top_k is not None
    if any(chosen > experts for experts, chosen in zip(num_experts, top_k, strict=True)):
        raise _failure(path, found, "shape", "top_k must be at most num_experts")
    return MapShape(tuple(num_experts), tuple(top_k))


def _share(path: Path, found: Mapping[str, str], name: str) -> float:
    try:
        value = float(found.get(name, ""))
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise _failure(path, found, name, "must be a number from 0 to 1")
    return value


def _about(path: Path, found: Mapping[str, str]) -> Facts:
    facts = _json(path, found, "about")
    if not all(value is None or isinstance(value, str | int) or _is_finite(value) for value in facts.values()):
        raise _failure(path, found, "about", "must hold texts and numbers")
    return facts


def _is_finite(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _json(path: Path, found: Mapping[str, str], name: str) -> dict[str, Any]:
    try:
        value = json.loads(found.get(name, ""))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _failure(path, found, name, "must be a JSON object")
    return value


def _failure(path: Path, found: Mapping[str, str], name: str, accepted: str) -> StoreError:
    return StoreError(f"{path}: {name}={found.get(name)!r:.80}: {accepted}")
