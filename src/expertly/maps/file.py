"""The file of a map store: a safetensors file that is replaced whole, and read as hostile input.

Its header names the model that the maps are of and holds a checksum (CRC-32 of zlib) of the whole file. A file that was
cut, altered, or made for another model is never taken for one that was not.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import StoreError
from expertly.core.files import disk_errors, replacing
from expertly.core.headers import TensorInfo, TensorSpec, header_bytes_of, parse_safetensors_header, safetensors_header
from expertly.maps.checks import check_state
from expertly.maps.header import NO_CHECKSUM, MapsHeader, without_checksum
from expertly.policies.maps.store import MapShape, MapStore

DTYPES = {"born": "I64", "requests": "I64", "chosen": "U16", "maps": "F16", "embeddings": "F16"}
"""The tensors, in file order: [C], [C], [C, L, K], [L, C, E], [C, H], of C maps. `embeddings` may be missing."""

MAX_EMBEDDING = 1 << 20

_NUMPY = {"I64": "<i8", "U16": "<u2", "F16": "<f2"}
_CHUNK_NBYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class MapsFile:
    """A maps file that has been read whole."""

    path: Path
    header: MapsHeader
    nbytes: int  # of the file
    store: MapStore

    @classmethod
    def read(cls, path: Path, identity: str | None = None, shape: MapShape | None = None) -> MapsFile:
        """Read and check everything. `identity` and `shape` are what the maps must be of; None: whatever they are.

        Requests are numbered down from -1, so that none of them is one that a running model counts up from 0.
        Raises StoreError naming the file and the field: a file that is missing, truncated, altered, of another format
        or version, of another model, or holds numbers that no map can.
        """
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for who writes it
                raise StoreError(f"{path}: cannot be read (not a file)")
            with FileIO(path) as file:
                nbytes = os.fstat(file.fileno()).st_size
                header, arrays = _read(file, path, nbytes, identity, shape)
        except OSError as error:
            raise StoreError(f"{path}: cannot be read ({error.strerror or error})") from None
        check_state(path, header.shape, arrays)
        arrays["requests"] = _numbered_down(arrays["requests"])
        try:
            store = MapStore.from_state(
                header.shape,
                arrays,
                header.capacity,
                semantic_weight=header.semantic_weight,
                quota=header.quota,
            )
        except MemoryError:
            raise StoreError(f"{path}: capacity={header.capacity}: not enough memory for so many maps") from None
        return cls(path, header, nbytes, store)


def load_maps(path: str | Path, identity: str | None = None, shape: MapShape | None = None) -> MapStore:
    """The store in a maps file; see `MapsFile.read`."""
    return MapsFile.read(Path(path), identity, shape).store


def save_maps(
    path: str | Path, store: MapStore, identity: str, about: Mapping[str, str | int | float | None] | None = None
) -> None:
    """Replace the file at `path` by one of all maps of `store`, which must not change meanwhile.

    `identity` is the model's (the packed store's manifest has it), `about` whatever else the file shall say of itself.
    After a crash the file is what it was before. Raises StoreError where it cannot be written, or holds numbers that
    no map can.
    """
    path = Path(path)
    check_state(path, store.shape, store.state())
    arrays = _file_arrays(store.state())
    header = MapsHeader(identity, store.shape, store.capacity, store.semantic_weight, store.quota, dict(about or {}))
    specs = [TensorSpec(name, DTYPES[name], array.shape) for name, array in arrays.items()]
    raw = safetensors_header(specs, header.metadata(NO_CHECKSUM))
    crc = zlib.crc32(raw)
    for array in arrays.values():
        crc = zlib.crc32(_bytes_of(array), crc)
    sealed = safetensors_header(specs, header.metadata(f"{crc:08x}"))
    assert without_checksum(sealed) == (raw, f"{crc:08x}")
    with disk_errors(path.parent, f"writing {path.name}", StoreError, ""), replacing(path) as file:
        file.write(sealed)
        for array in arrays.values():
            data = _bytes_of(array)
            for start in range(0, len(data), _CHUNK_NBYTES):
                file.write(data[start : start + _CHUNK_NBYTES])


def _file_arrays(state: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    return {
        name: np.ascontiguousarray(state[name], _NUMPY[dtype])
        for name, dtype in DTYPES.items()
        if state.get(name) is not None
    }


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _read(
    file: FileIO, path: Path, nbytes: int, identity: str | None, shape: MapShape | None
) -> tuple[MapsHeader, dict[str, npt.NDArray[Any]]]:
    raw = header_bytes_of(file, path, StoreError)
    infos = parse_safetensors_header(path, raw, StoreError, nbytes)
    header = MapsHeader.parse(path, raw)
    header.check(path, identity, shape)
    num_layers, width, top_k = len(header.shape.num_experts), max(header.shape.num_experts), max(header.shape.top_k)
    num_maps = _count_of(path, infos)
    if num_maps > header.capacity:
        raise StoreError(f"{path}: tensor 'born': {num_maps} maps, more than the capacity={header.capacity}")
    hidden_size = infos["embeddings"].shape[-1:] if "embeddings" in infos else ()
    if hidden_size and not 1 <= hidden_size[0] <= MAX_EMBEDDING:
        raise StoreError(f"{path}: tensor 'embeddings': {hidden_size[0]} numbers each; must be 1 to {MAX_EMBEDDING}")
    expected = {
        "born": (num_maps,),
        "requests": (num_maps,),
        "chosen": (num_maps, num_layers, top_k),
        "maps": (num_layers, num_maps, width),
        "embeddings": (num_maps, *hidden_size),
    }
    for name, info in infos.items():
        if name not in DTYPES:
            raise StoreError(f"{path}: tensor {name!r:.80}: unknown; accepted: {', '.join(DTYPES)}")
        if (info.dtype, info.shape) != (DTYPES[name], expected[name]):
            needs = f"{DTYPES[name]} {list(expected[name])}"
            raise StoreError(f"{path}: tensor {name!r}: {info.dtype} {list(info.shape)!s:.80}; must be {needs}")
    for name in DTYPES:
        if name not in infos and name != "embeddings":
            raise StoreError(f"{path}: tensor {name!r}: missing")
    blank, checksum = without_checksum(len(raw).to_bytes(8, "little") + raw)
    crc = zlib.crc32(blank)
    arrays = {}
    for name, info in infos.items():  # in file order, which leaves nothing between them
        arrays[name], crc = _read_tensor(file, path, name, info, crc)
    if f"{crc:08x}" != checksum:
        raise StoreError(f"{path}: checksum={checksum!r:.20}: the file was damaged or altered (it sums to {crc:08x})")
    return header, arrays


def _count_of(path: Path, infos: Mapping[str, TensorInfo]) -> int:
    if "born" not in infos or len(infos["born"].shape) != 1:
        raise StoreError(f"{path}: tensor 'born': missing, or not one number a map")
    return infos["born"].shape[0]


def _read_tensor(file: FileIO, path: Path, name: str, info: TensorInfo, crc: int) -> tuple[npt.NDArray[Any], int]:
    array = np.empty(info.shape, _NUMPY[info.dtype])
    left = _bytes_of(array)
    while left:
        num = file.readinto(left[:_CHUNK_NBYTES])
        if not num:
            raise StoreError(f"{path}: truncated inside tensor {name!r}")
        crc = zlib.crc32(left[:num], crc)
        left = left[num:]
    return array, crc


def _numbered_down(requests: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The same groups, numbered -1, -2, ..."""
    _, ranks = np.unique(requests, return_inverse=True)
    return -1 - ranks.reshape(-1).astype(np.int64)
