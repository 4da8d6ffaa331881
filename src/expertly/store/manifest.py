"""`manifest.json`, which describes a packed store. It is written last and read as hostile input."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from expertly.core.costs import CODECS
from expertly.core.errors import ConfigError, StoreError
from expertly.core.files import from_json, json_bytes, write_atomic
from expertly.core.geometry import LayerGeometry, stored_as
from expertly.core.headers import BITS
from expertly.core.units import format_share
from expertly.core.untrusted import Bounds, is_plain_name, read_file, read_json_object
from expertly.formats import FORMATS, check_format

FORMAT_VERSION = 3
"""Of 2 are stores with wrong weights, made of FP8 checkpoints whose rows are not whole blocks."""

MANIFEST_NAME = "manifest.json"
JOURNAL_NAME = "progress.json"
"""The same while a store is made: it has the files that are done."""

STORE_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""Dtypes of stored experts: torch's name to safetensors' name."""

ITEMSIZE = {name: BITS[code] // 8 for name, code in STORE_DTYPES.items()}

IS_FLOAT = frozenset({"F16", "BF16", "F32", "F64"})
"""Dtypes that loading casts to the model's dtype."""


def check_store_dtype(name: object, field: str = "dtype") -> str:
    """`name`, if experts can be stored in this dtype. Raises ConfigError naming what is accepted."""
    if not isinstance(name, str) or name not in STORE_DTYPES:
        raise ConfigError(
            f"{field}={name!r:.80}: not a dtype that experts can have; accepted: {', '.join(STORE_DTYPES)}"
        )
    return name


_OPTIONAL: Mapping[str, Any] = {"rounding": None, "stamp": "", "dense_formats": {}}
"""Fields that are written only if they are not this."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and checksum (zlib's CRC-32) of a file of the store; of a large one also xxh3_64, which is ten times as
    fast.
    """

    nbytes: int
    checksum: int
    xxh3: int | None = None  # None in older stores

    def read(self, path: Path, most_nbytes: int) -> bytes:
        """The contents of the file at `path`. Raises StoreError where it is too long, cannot be read or is damaged."""
        again = "remove the store and pack again"
        if self.nbytes > most_nbytes:
            raise StoreError(f"{path}: {self.nbytes} bytes, more than the {most_nbytes} accepted: {again}")
        try:
            raw = read_file(path, Bounds(most_nbytes), StoreError)
        except StoreError as error:
            raise StoreError(f"{error}: {again}") from None
        if len(raw) != self.nbytes or zlib.crc32(raw) != self.checksum:
            found = f"checksum {zlib.crc32(raw):08x}, but {MANIFEST_NAME} says {self.checksum:08x}"
            raise StoreError(f"{path}: {found}: {again}")
        return raw


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
        return dataclasses.asdict(self)

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
    stamp: str = ""  # of the source checkpoint; "" in older stores, and of one that was streamed from the hub
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
        fields = dataclasses.asdict(self)
        fields |= {"layers": [layer.as_dict() for layer in self.layers], "sites": list(self.sites)}
        return {name: value for name, value in fields.items() if value or name not in _OPTIONAL}

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
        version = raw.get("format_version")
        if type(version) is not int or version != FORMAT_VERSION:
            raise StoreError(
                f"{path}: format_version={version!r:.80}: this version of expertly reads {FORMAT_VERSION}; remove the "
                "store and pack again with `expertly pack`"
            )
        found = {"codec": "none", **_OPTIONAL, **raw}  # older stores lack some of these
        layers, files = found.get("layers"), found.get("files")
        if not isinstance(layers, list) or not layers:
            raise StoreError(f"{path}: layers={layers!r:.80}: must be a list of at least one layer")
        if isinstance(files, dict):  # and these lack xxh3
            found["files"] = {
                name: {"xxh3": None, **one} if isinstance(one, dict) else one for name, one in files.items()
            }
        kinds = get_type_hints(cls) | {"files": dict[str, FileEntry], "dense_formats": dict[str, str]}
        del kinds["layers"]
        read = {name: from_json(kind, found.get(name), f"{path}: {name}", StoreError) for name, kind in kinds.items()}
        for field, accepted in (("dtype", tuple(STORE_DTYPES)), ("codec", CODECS)):
            if read[field] not in accepted:
                raise StoreError(f"{path}: {field}={read[field]!r:.80}: accepted: {', '.join(accepted)}; pack again")
        if not set(read["dense_formats"].values()) <= set(FORMATS):
            only = f"must be an object of formats; accepted: {', '.join(FORMATS)}"
            raise StoreError(f"{path}: dense_formats={read['dense_formats']!r:.80}: {only}")
        if len(read["sites"]) != len(layers):
            raise StoreError(f"{path}: sites={read['sites']!r:.80}: must be {len(layers)} strings, one a layer")
        for name, entry in read["files"].items():
            if not is_plain_name(name):
                raise StoreError(f"{path}: files[{name!r}]: must be a file name in the same folder")
            if min(entry.nbytes, entry.checksum, entry.xxh3 or 0) < 0:
                raise StoreError(f"{path}: files[{name!r}]={entry}: must hold whole numbers from 0")
        itemsize = ITEMSIZE[read["dtype"]]
        return cls(**read, layers=tuple(_layer(path, i, layer, itemsize) for i, layer in enumerate(layers)))


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
