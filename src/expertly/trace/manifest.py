"""`manifest.json` of a trace: written anew at every shard, read as hostile input."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expertly.core.errors import TraceError
from expertly.core.files import from_json, json_bytes, write_atomic
from expertly.core.geometry import DenseShape
from expertly.core.untrusted import is_plain_name, read_json_object
from expertly.trace.schema import (
    DTYPES,
    FORMAT,
    MANIFEST_NAME,
    OF_FORMAT,
    REQUESTS_NAME,
    REQUIRED,
    SCORINGS,
    TOKEN_VECTORS,
    VERSION,
    FieldInfo,
    ShardInfo,
    TraceLayer,
    TraceManifest,
    check_layers,
    trace_field,
)

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(TraceLayer)}
_MAX_WIDTH = 1 << 20  # of a hidden state, and of how far is looked ahead
_MAX_COUNT = 1 << 48


def write_manifest(folder: Path, manifest: TraceManifest) -> None:
    write_atomic(folder / MANIFEST_NAME, json_bytes(_as_dict(manifest)))


def read_manifest(folder: Path) -> TraceManifest:
    """Raises TraceError naming the file, the field and what is accepted."""
    if not folder.is_dir():
        raise TraceError(f"{folder}: no such folder; a trace is a folder with a {MANIFEST_NAME}")
    path = folder / MANIFEST_NAME
    raw = read_json_object(path, TraceError)
    try:
        return _parse(raw)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def _as_dict(manifest: TraceManifest) -> dict[str, Any]:
    fields = {}
    for name, field in manifest.fields.items():
        fields[name] = {"dtype": field.dtype, "shape": list(field.shape), "real": field.is_real, "note": field.note}
        if field.generator is not None:
            fields[name]["generator"] = field.generator
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": manifest.model,
        "created": manifest.created,
        "command": manifest.command,
        "complete": manifest.is_complete,
        "geometry": {"layers": [layer.as_dict() for layer in manifest.layers]},
        "dense": None if manifest.dense is None else dataclasses.asdict(manifest.dense),
        "scoring": manifest.scoring,
        "fields": fields,
        "shards": [dataclasses.asdict(shard) for shard in manifest.shards],
        "requests": REQUESTS_NAME,
    }


def _parse(raw: Mapping[str, Any]) -> TraceManifest:
    for name, accepted in (("format", (FORMAT,)), ("requests", (REQUESTS_NAME,)), ("scoring", SCORINGS)):
        _check(raw.get(name) in accepted, name, raw.get(name), f"accepted: {', '.join(accepted)}")
    version, geometry = raw.get("version"), raw.get("geometry")
    is_known = type(version) is int and version == VERSION
    _check(is_known, "version", version, f"this version of expertly reads {VERSION}; record or import again")
    _check(type(raw.get("complete")) is bool, "complete", raw.get("complete"), "must be true or false")
    layers = geometry.get("layers") if isinstance(geometry, dict) else None
    if not isinstance(layers, list):
        raise TraceError(f"geometry={geometry!r:.80}: must be an object that holds a list of layers")
    found = tuple(_layer(f"geometry.layers[{i}]", layer) for i, layer in enumerate(layers))
    check_layers(found)
    return TraceManifest(
        model=_text(raw, "model"),
        layers=found,
        fields=_fields(raw.get("fields"), found),
        dense=_dense(raw.get("dense")),
        scoring=raw["scoring"],
        created=_text(raw, "created"),
        command=_text(raw, "command"),
        is_complete=raw["complete"],
        shards=_shards(raw.get("shards")),
    )


def _layer(where: str, raw: object) -> TraceLayer:
    of_format = {name: _DEFAULTS[name] for name in OF_FORMAT}
    layer: TraceLayer = from_json(TraceLayer, of_format | raw if isinstance(raw, dict) else raw, where, TraceError)
    for name, size in dataclasses.asdict(layer).items():
        least = 0 if name == "block_nbytes" else 1
        _check(not isinstance(size, int) or _is_count(size, least), f"{where}.{name}", size, f"must be from {least}")
    return layer


def _dense(raw: object) -> DenseShape | None:
    dense: DenseShape | None = from_json(DenseShape | None, raw, "dense", TraceError)
    are_counts = dense is None or all(map(_is_count, dataclasses.astuple(dense)))
    _check(are_counts, "dense", raw, "must be null or an object of whole numbers from 0")
    return dense


def _fields(raw: object, layers: tuple[TraceLayer, ...]) -> dict[str, FieldInfo]:
    if not isinstance(raw, dict):
        raise TraceError(f"fields={raw!r:.80}: must be an object")
    for name in raw:
        if name not in DTYPES:
            raise TraceError(f"fields: {name!r:.80} is unknown; accepted: {', '.join(DTYPES)}")
    for name in REQUIRED:
        if name not in raw:
            raise TraceError(f"fields: {name!r} is missing; every trace has {', '.join(REQUIRED)}")
    return {name: _field(name, raw[name], layers) for name in DTYPES if name in raw}


def _field(name: str, raw: object, layers: tuple[TraceLayer, ...]) -> FieldInfo:
    where = f"fields.{name}"
    if not isinstance(raw, dict):
        raise TraceError(f"{where}={raw!r:.80}: must be an object")
    shape, is_real, generator = raw.get("shape"), raw.get("real"), raw.get("generator")
    if not isinstance(shape, list) or not all(_is_count(size, 1, _MAX_WIDTH) for size in shape):
        raise TraceError(f"{where}.shape={shape!r:.80}: must be a list of whole numbers from 1 to {_MAX_WIDTH}")
    _check(type(is_real) is bool, f"{where}.real", is_real, "must be true or false")
    can_be = generator is None or (name == "embedding" and generator == TOKEN_VECTORS)
    _check(can_be, f"{where}.generator", generator, f"only embedding can have one, {TOKEN_VECTORS!r}")
    expected = trace_field(
        name,
        layers,
        hidden_size=shape[-1] if shape else 1,
        max_distance=shape[1] if len(shape) == 3 else 1,
        is_real=bool(is_real),
        note=_text(raw, "note", f"{where}."),
        generator=generator,
    )
    for key, needed in (("dtype", expected.dtype), ("shape", list(expected.shape))):
        _check(raw.get(key) == needed, f"{where}.{key}", raw.get(key), f"must be {needed} in a trace of these layers")
    return expected


def _shards(raw: object) -> tuple[ShardInfo, ...]:
    shards: tuple[ShardInfo, ...] = from_json(tuple[ShardInfo, ...], raw, "shards", TraceError)
    row, iteration = 0, 0
    for index, shard in enumerate(shards):
        where = f"shards[{index}]"
        _check(is_plain_name(shard.file), f"{where}.file", shard.file, "must be a name in the same folder")
        for name in ("num_rows", "nbytes"):
            _check(_is_count(getattr(shard, name)), f"{where}.{name}", getattr(shard, name), "must be from 0")
        for name, needed in (("first_row", row), ("first_iteration", iteration)):
            accepted = f"must be {needed}, as many as the shards before it hold"
            _check(getattr(shard, name) == needed, f"{where}.{name}", getattr(shard, name), accepted)
        can_be = 1 <= shard.num_iterations <= shard.num_rows
        _check(can_be, f"{where}.num_iterations", shard.num_iterations, "must be from 1 to its number of rows")
        row, iteration = row + shard.num_rows, iteration + shard.num_iterations
    return shards


def _check(is_accepted: bool, name: str, value: object, accepted: str) -> None:
    if not is_accepted:
        raise TraceError(f"{name}={value!r:.80}: {accepted}")


def _is_count(value: object, least: int = 0, most: int = _MAX_COUNT) -> bool:
    return type(value) is int and least <= value <= most


def _text(raw: Mapping[str, Any], name: str, where: str = "") -> str:
    value = raw.get(name)
    if not isinstance(value, str):
        raise TraceError(f"{where}{name}={value!r:.80}: must be a string")
    return value
