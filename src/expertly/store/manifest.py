"""`manifest.json`, which describes a packed store. It is written last and read as hostile input."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertly.core.costs import CODECS
from expertly.core.errors import ConfigError, StoreError
from expertly.core.files import is_plain_name, json_bytes, read_json_object, write_atomic
from expertly.core.geometry import LayerGeometry, stored_as
from expertly.core.headers import BITS
from expertly.core.units import format_share
from expertly.formats import FORMATS, check_format

FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"

STORE_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""Dtypes of stored experts: torch's name to safetensors' name."""

ITEMSIZE = {name: BITS[code] // 8 for name, code in STORE_DTYPES.items()}

IS_FLOAT = frozenset({"F16", "BF16", "F32", "F64"})
"""Dtypes that loading casts to the model's dtype."""


def check_store_dtype(name: object, field: str = "dtype") -> str:
    """`name`, if experts can be stored in this dtype. Raises ConfigError naming what is accepted."""
    if not isinstance(name, str) or name not in STORE_DTYPES:
        raise ConfigError(f"{field}={name!r}: not a dtype that experts can have; accepted: {', '.join(STORE_DTYPES)}")
    return name


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and checksum (zlib's CRC-32) of a file of the store; of a large one also xxh3_64, which is ten times as
    fast.
    """

    nbytes: int
    checksum: int
    xxh3: int | None = None  # None in older stores


@dataclass(frozen=True, slots=True)
class RoundingCost:
    """How next-token predictions on a text differ from those of the model without rounding."""

    kl: float  # mean KL(not rounded || rounded), nats
    top1: float  # share of positions with the same likeliest token
    tokens: int
    text: str  # its name


@dataclass(frozen=True, slots=True)
class Rounding:
    """expertly rounded the experts: generated tokens may differ from the checkpoint's."""

    to: str  # the weight format, as --quantize calls it
    cost: RoundingCost | None = None  # None: not measured

    def as_dict(self) -> dict[str, Any]:
        return {"to": self.to, "cost": None if self.cost is None else dataclasses.asdict(self.cost)}

    def __str__(self) -> str:
        if self.cost is None:
            return f"rounded to {self.to}, at a cost that nobody measured"
        kl, top1, tokens, text = dataclasses.astuple(self.cost)
        return (
            f"rounded to {self.to}, which costs {kl:.3g} nats a token and leaves {format_share(top1)} of the likeliest "
            f"tokens as they were ({tokens} tokens of {text})"
        )


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of `manifest.json`. `layers` and `sites` run over the MoE layers in model order."""

    identity: str  # of the source checkpoint
    source: str  # its path or hub id
    model_type: str
    dtype: str  # of computing with experts, and of storing them without a weight format: bfloat16, float16 or float32
    layers: tuple[LayerGeometry, ...]
    sites: tuple[str, ...]  # module path of each layer's experts
    files: Mapping[str, FileEntry]
    codec: str = "none"  # how the experts are stored
    rounding: Rounding | None = None
    dense_formats: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Weight formats of linear layers, by module path."""
    format_version: int = FORMAT_VERSION

    @property
    def stored_as(self) -> str:
        """The weight format of quantised experts, else their dtype."""
        return stored_as(self.layers, self.dtype)

    @property
    def told_as(self) -> str:
        """`stored_as` for people, with a note if experts were rounded."""
        return self.stored_as if self.rounding is None else f"{self.stored_as}, rounded"

    def write(self, folder: Path) -> None:
        write_atomic(folder / MANIFEST_NAME, json_bytes(self.as_dict()))

    def as_dict(self) -> dict[str, Any]:
        return {
            "format_version": self.format_version,
            "identity": self.identity,
            "source": self.source,
            "model_type": self.model_type,
            "dtype": self.dtype,
            "codec": self.codec,
            **({} if self.rounding is None else {"rounding": self.rounding.as_dict()}),
            "layers": [layer.as_dict() for layer in self.layers],
            "sites": list(self.sites),
            **({"dense_formats": dict(self.dense_formats)} if self.dense_formats else {}),
            "files": {name: dataclasses.asdict(entry) for name, entry in self.files.items()},
        }

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises StoreError naming the file, the field and what is accepted."""
        path = folder / MANIFEST_NAME
        return cls.from_dict(path, read_json_object(path, StoreError))

    @staticmethod
    def is_of_this_version(folder: Path) -> bool:
        """Whether the store has the format version of this expertly. Raises StoreError for an unreadable manifest."""
        return read_json_object(folder / MANIFEST_NAME, StoreError).get("format_version") == FORMAT_VERSION

    @classmethod
    def from_dict(cls, path: Path, raw: Mapping[str, Any]) -> Manifest:
        def fail(field: str, accepted: str) -> StoreError:
            return StoreError(f"{path}: {field}={raw.get(field)!r:.80}: {accepted}")

        version = raw.get("format_version")
        if type(version) is not int or version != FORMAT_VERSION:
            raise fail("format_version", f"this version of expertly reads {FORMAT_VERSION}; pack again")
        for field in ("identity", "source", "model_type"):
            if not isinstance(raw.get(field), str):
                raise fail(field, "must be a string")
        if not isinstance(raw.get("dtype"), str) or raw["dtype"] not in STORE_DTYPES:
            raise fail("dtype", f"accepted: {', '.join(STORE_DTYPES)}")
        codec = raw.get("codec", "none")  # stores made before there were codecs do not say
        if not isinstance(codec, str) or codec not in CODECS:
            raise fail("codec", f"this version of expertly reads {', '.join(CODECS)}; pack again")
        layers, sites, files = raw.get("layers"), raw.get("sites"), raw.get("files")
        if not isinstance(layers, list) or not layers:
            raise fail("layers", "must be a list of at least one layer")
        if not isinstance(sites, list) or len(sites) != len(layers) or not all(isinstance(s, str) for s in sites):
            raise fail("sites", f"must be {len(layers)} strings, one a layer")
        if not isinstance(files, dict):
            raise fail("files", "must be an object")
        dense = raw.get("dense_formats", {})
        if not isinstance(dense, dict) or not all(isinstance(one, str) and one in FORMATS for one in dense.values()):
            raise fail("dense_formats", f"must be an object of formats; accepted: {', '.join(FORMATS)}")
        return cls(
            raw["identity"],
            raw["source"],
            raw["model_type"],
            raw["dtype"],
            tuple(_layer(path, i, layer, ITEMSIZE[raw["dtype"]]) for i, layer in enumerate(layers)),
            tuple(sites),
            {name: _entry(path, name, entry) for name, entry in files.items()},
            codec,
            _rounding(path, raw.get("rounding")),
            dense,
        )


def _rounding(path: Path, raw: object) -> Rounding | None:
    if raw is None:
        return None
    wanted = {"kl": float, "top1": float, "tokens": int, "text": str}
    cost = raw.get("cost") if isinstance(raw, dict) else None
    is_cost = isinstance(cost, dict) and {name: type(value) for name, value in cost.items()} == wanted
    if not isinstance(raw, dict) or not isinstance(raw.get("to"), str) or not (cost is None or is_cost):
        raise StoreError(
            f"{path}: rounding={raw!r:.80}: must hold to, a format's name, and cost: null or {', '.join(wanted)}"
        )
    return Rounding(raw["to"], None if cost is None else RoundingCost(**cost))


def _layer(path: Path, index: int, raw: object, itemsize: int) -> LayerGeometry:
    try:
        layer = LayerGeometry.from_dict(raw)
        check_format(layer)
    except ConfigError as error:
        raise StoreError(f"{path}: layers[{index}]: {error}") from None
    if layer.itemsize != itemsize:
        raise StoreError(
            f"{path}: layers[{index}]={raw!r:.80}: itemsize disagrees with the dtype, whose size is {itemsize}"
        )
    return layer


def _entry(path: Path, name: str, raw: object) -> FileEntry:
    if not is_plain_name(name):
        raise StoreError(f"{path}: files[{name!r}]: must be a file name in the same folder")
    values = [raw.get("nbytes"), raw.get("checksum"), raw.get("xxh3") or 0] if isinstance(raw, dict) else [None]
    if not all(type(value) is int and value >= 0 for value in values):
        raise StoreError(f"{path}: files[{name!r}]={raw!r:.80}: must hold nbytes and checksum, whole numbers from 0")
    return FileEntry(raw["nbytes"], raw["checksum"], raw.get("xxh3"))  # type: ignore[index, attr-defined]
