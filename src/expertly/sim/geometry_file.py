"""The experts' shapes of published models, each a TOML file: for traces that say who was chosen, not how large."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from expertly.core.errors import ConfigError, HardwareError
from expertly.core.geometry import DenseShape, LayerGeometry
from expertly.sim.toml_file import Table

GEOMETRY_NAMES = ("gpt-oss-20b", "deepseek-v2-lite", "qwen1.5-moe", "mixtral-8x7b", "phi-3.5-moe")
"""The shipped geometries."""

MAX_LAYERS = 10_000

_FOLDER = Path(__file__).resolve().parent.parent / "data" / "geometry"
_LAYER_FIELDS = ("num_experts", "top_k", "hidden_size", "intermediate_size", "num_matrices", "itemsize")


@dataclass(frozen=True, slots=True)
class GeometryFile:
    """What a simulation needs to know of a model besides its routing."""

    name: str
    layers: tuple[LayerGeometry, ...]
    dense: DenseShape | None


def read_geometry(name_or_file: str) -> GeometryFile:
    """A shipped geometry by its name, else a TOML file by its path.

    Raises HardwareError naming the file, the key, its value and what is accepted.
    """
    if name_or_file in GEOMETRY_NAMES:
        return _parse(Table.read(_FOLDER / f"{name_or_file}.toml"))
    if not os.path.exists(name_or_file):
        accepted = f"{', '.join(GEOMETRY_NAMES)}, or a TOML file"
        raise HardwareError(f"geometry={name_or_file!r}: no such geometry and no such file; accepted: {accepted}")
    return _parse(Table.read(Path(name_or_file)))


def read_layer(table: Table) -> LayerGeometry:
    """One layer's experts. `itemsize` is whole bytes a weight: of weights of fewer bits state the type computed in."""
    values = {name: table.whole(name, 1) for name in _LAYER_FIELDS}
    table.end()
    try:
        return LayerGeometry(**values)
    except ConfigError as error:
        raise HardwareError(f"{table.where}: {error}") from None


def _parse(table: Table) -> GeometryFile:
    name = table.text("name")
    num_layers = table.whole("num_layers", 1)
    if num_layers > MAX_LAYERS:
        raise table.fail("num_layers", f"must be at most {MAX_LAYERS}")
    layer = read_layer(table.table("layer"))
    dense = _dense(table.table("dense")) if table.has("dense") else None
    table.end()
    return GeometryFile(name, (layer,) * num_layers, dense)


def _dense(table: Table) -> DenseShape:
    dense = DenseShape(layer_nbytes=table.whole("layer_nbytes"), head_nbytes=table.whole("head_nbytes"))
    table.end()
    return dense
