"""Arrays of an npz file, read a block of rows at a time and as hostile input: nothing is unpickled or believed."""

from __future__ import annotations

import contextlib
import math
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import TraceError

Array = npt.NDArray[Any]

_MAX_WHOLE_NBYTES = 1 << 28
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    OSError,
    ValueError,
    NotImplementedError,
    RuntimeError,
    OverflowError,
)
"""What zipfile and NumPy raise for a file that is not what it should be (a lock, a method, a header)."""


class ArrayStream:
    """One array, read from its first row to its last, once."""

    def __init__(self, where: str, file: IO[bytes], nbytes: int) -> None:
        self.where = where
        self._file = file
        with damage(where):
            version = np.lib.format.read_magic(file)
            if version not in ((1, 0), (2, 0)):
                raise TraceError(f"{where}: npy version {version}; accepted: 1.0, 2.0")
            read_header = (
                np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            )
            self.shape, is_fortran, self.dtype = read_header(file)
            self.num_rows = self.shape[0] if self.shape else 0
            header_nbytes = file.tell()
        if self.dtype.kind not in "biuf":
            raise TraceError(f"{where}: dtype {self.dtype}; must be numbers")
        if is_fortran and len(self.shape) > 1:
            raise TraceError(f"{where}: stored column by column (Fortran order); store it in C order")
        needed = math.prod(self.shape) * self.dtype.itemsize
        if min(self.shape, default=0) < 0 or header_nbytes + needed != nbytes:
            raise TraceError(
                f"{where}: {nbytes - header_nbytes} bytes, but {list(self.shape)} of {self.dtype} needs {needed}"
            )
        self._row_nbytes = math.prod(self.shape[1:]) * self.dtype.itemsize

    def read(self, num_rows: int) -> Array:
        """The next rows, fewer at the end."""
        nbytes = num_rows * self._row_nbytes
        with damage(self.where):
            data = self._file.read(nbytes)
        if self._row_nbytes == 0 or len(data) % self._row_nbytes:
            raise TraceError(f"{self.where}: truncated")
        return np.frombuffer(data, self.dtype).reshape(-1, *self.shape[1:])

    def read_all(self) -> Array:
        if self.num_rows * self._row_nbytes > _MAX_WHOLE_NBYTES:
            raise TraceError(
                f"{self.where}: {self.num_rows * self._row_nbytes} bytes; at most {_MAX_WHOLE_NBYTES} are accepted"
            )
        values = self.read(self.num_rows) if self.num_rows else np.empty(self.shape, self.dtype)
        if len(values) != self.num_rows:
            raise TraceError(f"{self.where}: truncated")
        return values


class ArrayFile(contextlib.AbstractContextManager["ArrayFile"]):
    """An npz file. Raises TraceError naming the file, and the array where it is about one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = contextlib.ExitStack()
        with damage(str(path), "must be an npz file"):
            self._zip = self._stack.enter_context(zipfile.ZipFile(path))
        self.names = [name.removesuffix(".npy") for name in self._zip.namelist()]

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def open(self, name: str, num_dimensions: int, kinds: str) -> ArrayStream:
        """An array that must have that many dimensions and a dtype of one of `kinds` (NumPy's letters)."""
        where = f"{self.path}: array {name!r}"
        if name not in self.names:
            raise TraceError(f"{where}: missing; the file has {', '.join(map(repr, self.names)) or 'no arrays'}")
        with damage(where):
            info = self._zip.getinfo(f"{name}.npy")
            stream = ArrayStream(where, self._stack.enter_context(self._zip.open(info)), info.file_size)
        if len(stream.shape) != num_dimensions:
            raise TraceError(f"{where}: shape {list(stream.shape)}; must have {num_dimensions} dimensions")
        if stream.dtype.kind not in kinds:
            accepted = " or ".join({"u": "unsigned", "i": "whole", "f": "floating-point"}[kind] for kind in kinds)
            raise TraceError(f"{where}: dtype {stream.dtype}; must be {accepted} numbers")
        return stream

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


@contextlib.contextmanager
def damage(where: str, accepted: str = "damaged, or pickled objects, which are never loaded") -> Iterator[None]:
    """Turn what a damaged file makes zipfile and NumPy raise into a TraceError."""
    try:
        yield
    except KeyError:
        raise TraceError(f"{where}: {accepted}") from None
    except _DAMAGE as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TraceError(f"{where}: {accepted} ({reason:.200})") from None
