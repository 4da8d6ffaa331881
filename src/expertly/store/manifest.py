"""`manifest.json`, which describes a packed store. It is written last and read as hostile input."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, MinLen

from expertly.core.errors import ConfigError, StoreError
from expertly.core.files import json_bytes, write_atomic
from expertly.core.geometry import LayerGeometry, stored_as
from expertly.core.headers import BITS
from expertly.core.untrusted import OWN_FILE, is_plain_name, read_as
from expertly.formats import FORMATS, check_format

FORMAT_VERSION: Literal[5] = 5
"""Stores of before it lack checksums of blocks, have wrong weights, or other tiles of a format."""

PACK_AGAIN = "; remove the store and pack again with `expertly pack`"

MANIFEST_NAME = "manifest.json"
JOURNAL_NAME = "progress.json"
"""While a store is made: which further files in its folder are its own."""

STORE_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""Dtypes of stored experts: torch's name to safetensors' name."""

ITEMSIZE = {name: BITS[code] // 8 for name, code in STORE_DTYPES.items()}

IS_FLOAT = frozenset({"F16", "BF16", "F32", "F64"})
"""Dtypes that loading casts to the model's dtype."""


def check_store_dtype(name: object, field: str = "dtype") -> str:
    """`name`, if experts can be stored in this dtype. Raises ConfigError naming what is accepted."""
    if not isinstance(name, str) or name not in STORE_DTYPES:
        accepted = ", ".join(STORE_DTYPES)
        raise ConfigError(f"{field}={name!r:.80}: not a dtype that experts can have; accepted: {accepted}")
    return name


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and checksum (xxh3_64) of a file of the store."""

    nbytes: Annotated[int, Ge(0)]
    checksum: Annotated[int, Ge(0)]


@dataclass(frozen=True, slots=True)
class Rounding:
    """expertly rounded the experts: generated tokens may differ from the checkpoint's."""

    to: str  # the weight format, as --quantize calls it

    def __str__(self) -> str:
        return f"rounded to {self.to}: the model writes other tokens than the checkpoint"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of `manifest.json`. `layers` and `sites` run over the MoE layers in model order."""

    __pydantic_config__: ClassVar[Any] = OWN_FILE

    identity: str  # of the source checkpoint
    source: str  # its path
    model_type: str
    dtype: str  # of computing with experts, and of storing them without a weight format: bfloat16, float16 or float32
    layers: Annotated[tuple[LayerGeometry, ...], MinLen(1)]
    sites: tuple[str, ...]  # module path of each layer's experts
    files: Mapping[str, FileEntry]
    rounding: Rounding | None = None
    stamp: str = ""  # of the source checkpoint
    dense_formats: Mapping[str, str] = field(default_factory=dict)  # weight formats of linear layers, by module path
    format_version: Literal[5] = FORMAT_VERSION

    @property
    def stored_as(self) -> str:
        """The weight format of quantised experts, else their dtype."""
        return stored_as(self.layers, self.dtype)

    def write(self, folder: Path) -> None:
        write_atomic(folder / MANIFEST_NAME, json_bytes(dataclasses.asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises StoreError naming the file, the field and what is accepted."""
        path = folder / MANIFEST_NAME
        manifest = read_as(cls, path, StoreError, PACK_AGAIN)
        try:
            manifest._check()
        except ConfigError as error:
            raise StoreError(f"{path}: {error}{PACK_AGAIN}") from None
        return manifest

    def _check(self) -> None:
        check_store_dtype(self.dtype)
        if len(self.sites) != len(self.layers):
            raise ConfigError(f"sites={self.sites!r:.80}: must be {len(self.layers)}, one a layer")
        for name in self.files:
            if not is_plain_name(name):
                raise ConfigError(f"files[{name!r:.80}]: must be a file name in the same folder")
        for form in self.dense_formats.values():
            if form not in FORMATS:
                raise ConfigError(f"dense_formats={form!r:.80}: accepted: {', '.join(FORMATS)}")
        for number, layer in enumerate(self.layers):
            size = ITEMSIZE[self.dtype]
            if layer.itemsize != size:
                field = f"layers[{number}].itemsize={layer.itemsize}"
                raise ConfigError(f"{field}: must be {size}, the size of {self.dtype}")
            try:
                check_format(layer)
            except ConfigError as error:
                raise ConfigError(f"layers[{number}]: {error}") from None
