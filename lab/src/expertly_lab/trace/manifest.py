"""`manifest.json` of a trace: written anew at every shard, read as hostile input."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from expertly.core.errors import TraceError
from expertly.core.files import json_bytes, write_atomic
from expertly.core.geometry import DenseShape
from expertly.core.untrusted import is_plain_name, read_as
from expertly_lab.trace.schema import (
    DTYPES,
    MANIFEST_NAME,
    REQUIRED,
    FieldInfo,
    ShardInfo,
    TraceLayer,
    TraceManifest,
    trace_field,
)


@dataclass(frozen=True)
class _FieldEntry:
    dtype: str
    shape: tuple[Annotated[int, Ge(1), Le(1 << 20)], ...]
    real: bool
    note: str
    generator: Literal["token-vectors"] | None = None


@dataclass(frozen=True)
class _GeometryEntry:
    layers: tuple[TraceLayer, ...]


@dataclass(frozen=True)
class _TraceFile:
    """The file as it is written."""

    format: Literal["expertly-trace"]
    version: Literal[1]
    model: str
    created: str
    command: str
    complete: bool
    geometry: _GeometryEntry
    dense: DenseShape | None
    fields: dict[Literal[tuple(DTYPES)], _FieldEntry]  # type: ignore[valid-type]
    shards: tuple[ShardInfo, ...]
    requests: Literal["requests.jsonl"]


def write_manifest(folder: Path, manifest: TraceManifest) -> None:
    fields: Any = {
        name: _FieldEntry(field.dtype, field.shape, field.is_real, field.note, field.generator)  # type: ignore[arg-type]
        for name, field in manifest.fields.items()
    }
    about = manifest.model, manifest.created, manifest.command, manifest.is_complete
    sizes = _GeometryEntry(manifest.layers), manifest.dense
    file = _TraceFile("expertly-trace", 1, *about, *sizes, fields, manifest.shards, "requests.jsonl")
    write_atomic(folder / MANIFEST_NAME, json_bytes(dataclasses.asdict(file)))


def read_manifest(folder: Path) -> TraceManifest:
    """Raises TraceError naming the file, the field and what is accepted."""
    if not folder.is_dir():
        raise TraceError(f"{folder}: no such folder; a trace is a folder with a {MANIFEST_NAME}")
    path = folder / MANIFEST_NAME
    file = read_as(_TraceFile, path, TraceError)
    try:
        _check_shards(file.shards)
        return TraceManifest(
            file.model,
            file.geometry.layers,
            _fields(file.fields, file.geometry.layers),
            file.dense,
            file.created,
            file.command,
            file.complete,
            file.shards,
        )
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def _fields(entries: Mapping[str, _FieldEntry], layers: tuple[TraceLayer, ...]) -> dict[str, FieldInfo]:
    for name in REQUIRED:
        if name not in entries:
            raise TraceError(f"fields: {name!r} is missing; every trace has {', '.join(REQUIRED)}")
    fields = {}
    for name in filter(entries.__contains__, DTYPES):
        field, beginning = entries[name], f"fields.{name}"
        can_be = field.generator is None or name == "embedding"
        _check(can_be, f"{beginning}.generator", field.generator, "only embedding can have one")
        expected = fields[name] = trace_field(
            name,
            layers,
            hidden_size=field.shape[-1] if field.shape else 1,
            max_distance=field.shape[1] if len(field.shape) == 3 else 1,
            is_real=field.real,
            note=field.note,
            generator=field.generator,
        )
        for key in ("dtype", "shape"):
            needed, value = getattr(expected, key), getattr(field, key)
            _check(value == needed, f"{beginning}.{key}", value, f"must be {needed} in a trace of these layers")
    return fields


def _check_shards(shards: tuple[ShardInfo, ...]) -> None:
    row = iteration = 0
    for index, shard in enumerate(shards):
        beginning = f"shards[{index}]"
        _check(is_plain_name(shard.file), f"{beginning}.file", shard.file, "must be a name in the same folder")
        for name, needed in (("first_row", row), ("first_iteration", iteration)):
            accepted = f"must be {needed}, as many as the shards before it hold"
            _check(getattr(shard, name) == needed, f"{beginning}.{name}", getattr(shard, name), accepted)
        can_be = 1 <= shard.num_iterations <= shard.num_rows
        _check(can_be, f"{beginning}.num_iterations", shard.num_iterations, "must be from 1 to its number of rows")
        row, iteration = row + shard.num_rows, iteration + shard.num_iterations


def _check(is_accepted: bool, name: str, value: object, accepted: str) -> None:
    if not is_accepted:
        raise TraceError(f"{name}={value!r:.80}: {accepted}")
