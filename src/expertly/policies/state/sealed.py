"""A file of what was learned: safetensors that is replaced whole, sealed by a checksum and read as hostile input.

The header's metadata holds a checksum (CRC-32 of zlib) of the whole file. A file that was cut or altered is never taken
for one that was not.
"""

from __future__ import annotations

import os
import re
import stat
import zlib
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from expertly.core.errors import StoreError
from expertly.core.files import disk_errors, replacing
from expertly.core.headers import TensorInfo, TensorSpec, header_bytes_of, parse_safetensors_header, safetensors_header

NO_CHECKSUM = "0" * 8
_CHECKSUM = re.compile(rb'"checksum":"([0-9a-f]{8})"')

_NUMPY = {"I64": "<i8", "I32": "<i4", "U16": "<u2", "F32": "<f4", "F16": "<f2"}
_CHUNK_NBYTES = 8 << 20

Shape = tuple[int, ...]
Arrays = dict[str, npt.NDArray[Any]]
Header = TypeVar("Header")
Parse = Callable[[bytes, Mapping[str, TensorInfo]], tuple[Header, Mapping[str, Shape]]]
"""From a header's JSON and its tensors to what it says, and the shapes that they must have."""


def read_sealed(
    path: Path, dtypes: Mapping[str, str], optional: tuple[str, ...], parse: Parse[Header]
) -> tuple[Header, Arrays, int]:
    """The header, the tensors and the size of a file, when all that can be known of it is as it must be.

    `dtypes` are of every tensor that there may be, `optional` those that may be missing. Raises StoreError naming the
    file and the field; so does `parse`, before anything is allocated.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for who writes it
            raise StoreError(f"{path}: cannot be read (not a file)")
        with FileIO(path) as file:
            nbytes = os.fstat(file.fileno()).st_size
            raw = header_bytes_of(file, path, StoreError)
            infos = parse_safetensors_header(path, raw, StoreError, nbytes)
            header, expected = parse(raw, infos)
            for name, info in infos.items():
                if name not in dtypes:
                    raise StoreError(f"{path}: tensor {name!r:.80}: unknown; accepted: {', '.join(dtypes)}")
                if (info.dtype, info.shape) != (dtypes[name], expected[name]):
                    needs = f"{dtypes[name]} {list(expected[name])}"
                    raise StoreError(f"{path}: tensor {name!r}: {info.dtype} {list(info.shape)!s:.80}; must be {needs}")
            for name in dtypes:
                if name not in infos and name not in optional:
                    raise StoreError(f"{path}: tensor {name!r}: missing")
            return header, _read_tensors(file, path, raw, infos), nbytes
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror or error})") from None


def write_sealed(
    path: Path, dtypes: Mapping[str, str], state: Mapping[str, Any], metadata: Callable[[str], dict[str, str]]
) -> None:
    """Replace the file at `path` by one of the arrays that `state` has of `dtypes`, in their order; `metadata` is given
    the checksum. After a crash the file is what it was before. Raises StoreError where it cannot be written.
    """
    arrays = {
        name: np.ascontiguousarray(state[name], _NUMPY[dtype])
        for name, dtype in dtypes.items()
        if state.get(name) is not None
    }
    specs = [TensorSpec(name, dtypes[name], array.shape) for name, array in arrays.items()]
    raw = safetensors_header(specs, metadata(NO_CHECKSUM))
    crc = zlib.crc32(raw)
    for array in arrays.values():
        crc = zlib.crc32(_bytes_of(array), crc)
    sealed = safetensors_header(specs, metadata(f"{crc:08x}"))
    assert without_checksum(sealed) == (raw, f"{crc:08x}")
    with disk_errors(path.parent, f"writing {path.name}", StoreError, ""), replacing(path) as file:
        file.write(sealed)
        for array in arrays.values():
            data = _bytes_of(array)
            for start in range(0, len(data), _CHUNK_NBYTES):
                file.write(data[start : start + _CHUNK_NBYTES])


def without_checksum(header: bytes) -> tuple[bytes, str]:
    """A header as it was when its checksum was computed, and that checksum."""
    match = _CHECKSUM.search(header)
    if match is None:
        return header, ""
    return header[: match.start(1)] + NO_CHECKSUM.encode() + header[match.end(1) :], match[1].decode()


def num_of(path: Path, infos: Mapping[str, TensorInfo], name: str, what: str) -> int:
    """How many there are: the length of a tensor that has one number each."""
    if name not in infos or len(infos[name].shape) != 1:
        raise StoreError(f"{path}: tensor {name!r}: missing, or not one number a {what}")
    return infos[name].shape[0]


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _read_tensors(file: FileIO, path: Path, raw: bytes, infos: Mapping[str, TensorInfo]) -> Arrays:
    blank, checksum = without_checksum(len(raw).to_bytes(8, "little") + raw)
    crc = zlib.crc32(blank)
    arrays: Arrays = {}
    for name, info in infos.items():  # in file order, which leaves nothing between them
        arrays[name] = np.empty(info.shape, _NUMPY[info.dtype])
        left = _bytes_of(arrays[name])
        while left:
            num = file.readinto(left[:_CHUNK_NBYTES])
            if not num:
                raise StoreError(f"{path}: truncated inside tensor {name!r}")
            crc = zlib.crc32(left[:num], crc)
            left = left[num:]
    if f"{crc:08x}" != checksum:
        raise StoreError(f"{path}: checksum={checksum!r:.20}: the file was damaged or altered (it sums to {crc:08x})")
    return arrays
