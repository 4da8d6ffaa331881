"""What a trace holds: layers, fields with their dtypes and shapes, shards; and which values a field may have.

Shapes: T rows, L layers, K the largest top-k of a layer, E the largest number of experts, H hidden, D distances looked
ahead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Le

from expertly.core.errors import GeometryError, TraceError
from expertly.core.geometry import DenseShape, LayerGeometry

Array = npt.NDArray[Any]
_Count = Annotated[int, Ge(0), Le(1 << 48)]

MANIFEST_NAME = "manifest.json"
REQUESTS_NAME = "requests.jsonl"

NO_EXPERT = 0xFFFF
"""In `experts`: the layer did not run for the row, or chose fewer than K."""

MAX_LAYERS = 4096
MAX_EXPERTS = NO_EXPERT

REQUIRED = {
    "request": "int32",
    "iteration": "int64",
    "token": "int32",
    "is_prefill": "bool",
    "experts": "uint16",
    "weights": "float16",
}
"""Fields of every trace, with their dtypes."""

OPTIONAL = {"probs": "float16", "embedding": "float16", "router_inputs": "float16", "lookahead": "float16"}
"""Fields of full recordings: [L, E], [H], [L, H], [L, D, E] a row."""

DTYPES = {**REQUIRED, **OPTIONAL}
"""The dtype of every field that a trace can have."""

TOKEN_VECTORS = "token-vectors"
"""Generator of an `embedding` that is not stored: a fixed random vector for each token id."""


@dataclass(frozen=True, slots=True)
class TraceLayer:
    """One MoE layer, with its experts' sizes where known. Raises GeometryError where a number is impossible."""

    num_experts: int
    top_k: int
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_matrices: int | None = None
    itemsize: int | None = None
    format: str = ""
    block_size: int = 1
    block_nbytes: int = 0

    def __post_init__(self) -> None:
        for name, most in (("num_experts", MAX_EXPERTS), ("top_k", self.num_experts)):
            if not 1 <= getattr(self, name) <= most:
                raise GeometryError(f"{name}={getattr(self, name)}: must be from 1 to {most}")
        self.geometry()

    @classmethod
    def of(cls, layer: LayerGeometry) -> TraceLayer:
        return cls(**dataclasses.asdict(layer))

    def geometry(self) -> LayerGeometry | None:
        """Its geometry; None where the trace does not know the sizes."""
        known = dataclasses.asdict(self)
        return None if None in known.values() else LayerGeometry(**known)


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """One field. `shape` is a row's. A field that is not real was made up in place of the real one; `note` says how."""

    name: str
    dtype: str  # NumPy's name
    shape: tuple[int, ...]
    is_real: bool = True
    note: str = ""
    generator: str | None = None  # not stored: the reader makes it in this way

    @property
    def is_stored(self) -> bool:
        return self.generator is None


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One file of rows. It holds whole iterations."""

    file: str
    num_rows: _Count
    nbytes: _Count
    first_row: _Count
    first_iteration: _Count
    num_iterations: _Count


@dataclass(frozen=True, slots=True)
class TraceManifest:
    """Everything but the rows and the requests."""

    model: str
    layers: tuple[TraceLayer, ...]
    fields: Mapping[str, FieldInfo]
    dense: DenseShape | None = None
    created: str = ""
    command: str = ""
    is_complete: bool = False
    shards: tuple[ShardInfo, ...] = ()

    @property
    def geometries(self) -> tuple[LayerGeometry, ...] | None:
        """The geometry of all layers; None where the trace does not know all their sizes."""
        known = [shape for layer in self.layers if (shape := layer.geometry()) is not None]
        return tuple(known) if len(known) == len(self.layers) else None

    @property
    def num_rows(self) -> int:
        return self.shards[-1].first_row + self.shards[-1].num_rows if self.shards else 0

    @property
    def num_iterations(self) -> int:
        return self.shards[-1].first_iteration + self.shards[-1].num_iterations if self.shards else 0

    @property
    def stored_fields(self) -> tuple[FieldInfo, ...]:
        """The fields in the shards, the widest numbers first, so that all are aligned."""
        stored = [field for field in self.fields.values() if field.is_stored]
        return tuple(sorted(stored, key=lambda field: -np.dtype(field.dtype).itemsize))


def max_top_k(layers: Sequence[TraceLayer]) -> int:
    return max(layer.top_k for layer in layers)


def max_experts(layers: Sequence[TraceLayer]) -> int:
    return max(layer.num_experts for layer in layers)


def trace_field(
    name: str,
    layers: Sequence[TraceLayer],
    *,
    hidden_size: int = 0,
    max_distance: int = 8,
    is_real: bool = True,
    note: str = "",
    generator: str | None = None,
) -> FieldInfo:
    """The field `name` of a trace of `layers`.

    `hidden_size` is needed by `embedding` and `router_inputs`, `max_distance` is how far `lookahead` looks.
    Raises TraceError for an unknown name, or a number of layers that cannot be.
    """
    num_layers = len(layers)
    if not 1 <= num_layers <= MAX_LAYERS:
        raise TraceError(f"geometry.layers: {num_layers} layers; must be from 1 to {MAX_LAYERS}")
    shapes: dict[str, tuple[int, ...]] = {
        "experts": (num_layers, max_top_k(layers)),
        "weights": (num_layers, max_top_k(layers)),
        "probs": (num_layers, max_experts(layers)),
        "embedding": (hidden_size,),
        "router_inputs": (num_layers, hidden_size),
        "lookahead": (num_layers, max_distance, max_experts(layers)),
    }
    if name not in DTYPES:
        raise TraceError(f"field {name!r:.80}: unknown; accepted: {', '.join(DTYPES)}")
    if min(shapes.get(name, ()), default=1) < 1:
        raise TraceError(f"field {name!r}: shape {list(shapes[name])}: every size must be at least 1")
    return FieldInfo(name, DTYPES[name], shapes.get(name, ()), is_real, note, generator)


class ValueChecks:
    """Which values each field may have. Every block of rows is checked when it is written and when it is read."""

    def __init__(self, layers: Sequence[TraceLayer]) -> None:
        self._layers = tuple(layers)
        self._num_experts = np.array([layer.num_experts for layer in layers], np.uint16)[:, None]  # [L, 1]
        top_k = np.array([layer.top_k for layer in layers])[:, None]
        self._beyond_top_k = np.arange(int(top_k.max())) >= top_k  # [L, K]

    def problem(self, name: str, values: Array, num_requests: int) -> tuple[int, str] | None:
        """The first row of `values` [T, ...] of a field that is impossible, and what is wrong with it."""
        if name == "experts":
            return self._experts_problem(values)
        if values.dtype == np.float16:
            is_wrong = (values.view(np.uint16) & 0x7C00) == 0x7C00
            accepted = "must be finite"
        elif values.dtype == np.bool_:
            values = values.view(np.uint8)
            is_wrong = values > 1
            accepted = "must be 0 or 1"
        elif name == "token":
            is_wrong = values < -1
            accepted = "must be a token id, or -1 where it is unknown"
        elif name == "request":
            is_wrong = (values < 0) | (values >= num_requests)
            accepted = f"must be one of the {num_requests} requests, from 0"
        else:
            return None
        if not is_wrong.any():
            return None
        place = _first(is_wrong)
        return place[0], f"{values[place]}: {accepted}"

    def _experts_problem(self, experts: npt.NDArray[np.uint16]) -> tuple[int, str] | None:
        is_chosen = experts != NO_EXPERT
        is_wrong = (experts >= self._num_experts) & is_chosen
        if is_wrong.any():
            row, layer, place = _first(is_wrong)
            accepted = f"below the {self._layers[layer].num_experts} of layer {layer}"
            return row, f"expert {experts[row, layer, place]} of layer {layer}: must be {accepted}"
        in_order = np.sort(experts, axis=-1)
        is_wrong = (in_order[..., 1:] == in_order[..., :-1]) & (in_order[..., 1:] != NO_EXPERT)
        if is_wrong.any():
            row, layer, place = _first(is_wrong)
            return row, f"expert {in_order[row, layer, place]} of layer {layer} is chosen twice"
        if self._beyond_top_k.any() and (is_wrong := is_chosen & self._beyond_top_k).any():
            row, layer, place = _first(is_wrong)
            return row, f"layer {layer} chooses more than its {self._layers[layer].top_k} experts"
        return None


def _first(is_wrong: Array) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(is_wrong)), is_wrong.shape))
