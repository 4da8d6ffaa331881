"""What every file of what was learned says of itself: the metadata of its safetensors header, read as hostile input."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from expertly.core.errors import StoreError
from expertly.core.headers import header_metadata
from expertly.policies.learned import ModelShape

VERSION = 1

MAX_LAYERS = 4096
MAX_EXPERTS = 0xFFFE

OF_A_TRACE = "trace:"
"""Begins the identity of what was made of a trace, of a model that nobody named."""


class Kind(NamedTuple):
    """A kind of file."""

    holds: str
    command: str  # that makes it of a trace; "" where none does


KINDS = {
    "expertly-maps": Kind("expert maps, by which fmoe predicts", "maps build"),
    "expertly-matrices": Kind("activation matrices, by which moe-infinity predicts", "maps build"),
    "expertly-reuse": Kind("what was learned of reuse, by which expertly keeps experts", ""),
    "expertly-predictor": Kind("the weights of a predictor, by which promoe predicts", "train-predictor"),
}
"""By the format that a file says it has."""


def metadata_of(
    kind: str, checksum: str, identity: str, shape: Mapping[str, Sequence[int]], about: Mapping[str, Any]
) -> dict[str, str]:
    """What a file of this kind says: whose it is, lists of one number a layer and more, and whatever else, in JSON."""
    return {
        "format": kind,
        "version": str(VERSION),
        "checksum": checksum,
        "identity": identity,
        "shape": json.dumps({name: list(numbers) for name, numbers in shape.items()}, separators=(",", ":")),
        "about": json.dumps(dict(about), separators=(",", ":"), allow_nan=False),
    }


def read_metadata(path: Path, raw: bytes, kind: str) -> dict[str, str]:
    """The metadata in a header's JSON, which must be of this kind. Raises StoreError naming the file, the field and its
    value.
    """
    found = header_metadata(path, raw, StoreError)
    if found.get("format") != kind:
        other = KINDS.get(found.get("format", ""))
        problem = f"holds {other.holds}, not {KINDS[kind].holds}" if other else f"not a file of {KINDS[kind].holds}"
        raise failure(path, found, "format", f"{problem}; those have {kind!r}")
    if found.get("version") != str(VERSION):
        raise failure(path, found, "version", f"this version of expertly reads {VERSION}; make the file again")
    if re.fullmatch("[0-9a-f]{8}", found.get("checksum", "")) is None:
        raise failure(path, found, "checksum", "must be eight hexadecimal digits")
    if not found.get("identity"):
        raise failure(path, found, "identity", "must say which model it is of")
    return found


def check_identity(path: Path, kind: str, own: str, identity: str | None) -> None:
    """Raises StoreError where a file of identity `own` is not of the model that it must be of (None: of any)."""
    if identity is not None and identity != own:
        what = "of another model, or of this one before it changed"
        if own.startswith(OF_A_TRACE) and KINDS[kind].command:
            what = f"of a trace whose model was not named; `expertly {KINDS[kind].command} --model` names it"
        raise StoreError(f"{path}: identity={own!r:.80}: {what}; expected {identity!r:.80}")


def layers_in(path: Path, found: Mapping[str, str]) -> ModelShape:
    """The layers that the shape lists. Raises StoreError where no model has such."""
    num_experts = whole_numbers(path, found, "num_experts", 1, MAX_EXPERTS)
    top_k = whole_numbers(path, found, "top_k", 1, MAX_EXPERTS)
    if not 1 <= len(num_experts) <= MAX_LAYERS or len(num_experts) != len(top_k):
        raise failure(path, found, "shape", f"must list num_experts and top_k of 1 to {MAX_LAYERS} layers")
    if any(chosen > experts for experts, chosen in zip(num_experts, top_k, strict=True)):
        raise failure(path, found, "shape", "top_k must be at most num_experts")
    return ModelShape(num_experts, top_k)


def whole_numbers(path: Path, found: Mapping[str, str], name: str, least: int, most: int) -> tuple[int, ...]:
    """A list in the shape."""
    numbers = json_object(path, found, "shape").get(name)
    if not isinstance(numbers, list) or not all(type(one) is int and least <= one <= most for one in numbers):
        raise failure(path, found, "shape", f"{name} must be whole numbers from {least} to {most}")
    return tuple(numbers)


def json_object(path: Path, found: Mapping[str, str], name: str) -> dict[str, Any]:
    try:
        value = json.loads(found.get(name, ""))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise failure(path, found, name, "must be a JSON object")
    return value


def failure(path: Path, found: Mapping[str, str], name: str, accepted: str) -> StoreError:
    """Names the file, the field and its value."""
    return StoreError(f"{path}: {name}={found.get(name)!r:.80}: {accepted}")
