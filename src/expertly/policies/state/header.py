"""What files of maps and of activation matrices say of themselves: see `maps.metadata`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from expertly.core.errors import StoreError
from expertly.policies.learned import ModelShape
from expertly.policies.predictor.fmoe.store import MAX_CAPACITY, MAX_NBYTES
from expertly.policies.state.metadata import (
    check_identity,
    failure,
    json_object,
    layers_in,
    metadata_of,
    read_metadata,
)

Facts = Mapping[str, str | int | float | None]


@dataclass(frozen=True, slots=True)
class MapsHeader:
    """Everything but the maps."""

    kind: ClassVar[str] = "expertly-maps"

    identity: str  # of the model, as its packed store has it
    shape: ModelShape
    capacity: int
    semantic_weight: float
    quota: float
    about: Facts = field(default_factory=dict)  # created, source, ...

    def metadata(self, checksum: str) -> dict[str, str]:
        return {
            **_metadata(self.kind, checksum, self.identity, self.shape, self.capacity, self.about),
            "semantic_weight": repr(float(self.semantic_weight)),
            "quota": repr(float(self.quota)),
        }

    @classmethod
    def parse(cls, path: Path, raw: bytes) -> MapsHeader:
        """`raw` is the JSON of a safetensors header. Raises StoreError naming the file, the field and its value."""
        found = read_metadata(path, raw, cls.kind)
        shape = layers_in(path, found)
        each = shape.num_layers * (4 * shape.max_experts + 2 * shape.max_top_k)
        capacity = _capacity(path, found, each)
        quota = _share(path, found, "quota")
        if not quota:
            raise failure(path, found, "quota", "must be above 0")
        weight = _share(path, found, "semantic_weight")
        return cls(found["identity"], shape, capacity, weight, quota, about_in(path, found))


@dataclass(frozen=True, slots=True)
class MatricesHeader:
    """Everything but the matrices."""

    kind: ClassVar[str] = "expertly-matrices"

    identity: str  # of the model, as its packed store has it
    shape: ModelShape
    capacity: int  # of each phase
    about: Facts = field(default_factory=dict)

    def metadata(self, checksum: str) -> dict[str, str]:
        return _metadata(self.kind, checksum, self.identity, self.shape, self.capacity, self.about)

    @classmethod
    def parse(cls, path: Path, raw: bytes) -> MatricesHeader:
        """See MapsHeader."""
        found = read_metadata(path, raw, cls.kind)
        shape = layers_in(path, found)
        capacity = _capacity(path, found, 16 * shape.num_layers * shape.max_experts)
        return cls(found["identity"], shape, capacity, about_in(path, found))


def check_model(
    path: Path, header: MapsHeader | MatricesHeader, identity: str | None, shape: ModelShape | None
) -> None:
    """Raises StoreError where a file is not of the model, or of its layers, that it must be of (None: of any)."""
    check_identity(path, header.kind, header.identity, identity)
    if shape is not None and shape != header.shape:
        raise StoreError(f"{path}: shape: of {describe(header.shape)}; expected {describe(shape)}, as the model has")


def describe(shape: ModelShape) -> str:
    """`26 layers of 64 experts, top-6`."""
    return f"{len(shape.num_experts)} layers of {_span(shape.num_experts)} experts, top-{_span(shape.top_k)}"


def _span(numbers: tuple[int, ...]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _metadata(
    kind: str, checksum: str, identity: str, shape: ModelShape, capacity: int, about: Facts
) -> dict[str, str]:
    sizes = {"num_experts": shape.num_experts, "top_k": shape.top_k}
    return {**metadata_of(kind, checksum, identity, sizes, about), "capacity": str(capacity)}


def _capacity(path: Path, found: Mapping[str, str], nbytes_each: int) -> int:
    """`nbytes_each` is what one takes in memory."""
    capacity = found.get("capacity", "")
    if re.fullmatch("[1-9][0-9]{0,6}", capacity) is None or int(capacity) > MAX_CAPACITY:
        raise failure(path, found, "capacity", f"must be a whole number from 1 to {MAX_CAPACITY}")
    nbytes = int(capacity) * nbytes_each
    if nbytes > MAX_NBYTES:
        raise failure(path, found, "capacity", f"a store of {nbytes} bytes; at most {MAX_NBYTES} are accepted")
    return int(capacity)


def _share(path: Path, found: Mapping[str, str], name: str) -> float:
    try:
        value = float(found.get(name, ""))
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise failure(path, found, name, "must be a number from 0 to 1")
    return value


def about_in(path: Path, found: Mapping[str, str]) -> Facts:
    """Whatever else a file says of itself: texts and numbers."""
    facts = json_object(path, found, "about")
    if not all(value is None or isinstance(value, str | int) or _is_finite(value) for value in facts.values()):
        raise failure(path, found, "about", "must hold texts and numbers")
    return facts


def _is_finite(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)
