"""A scratch file of a few numbers a row, for what a simulation must know of a whole trace without holding it."""

from __future__ import annotations

import tempfile

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError

_BLOCK_ROWS = 512


class RowsFile:
    """[num_rows, *shape] of int32 in the folder for temporary files. It has no name and goes with the object.

    Read and written, not mapped: a disk that is full is an error then, and what was read is no memory of the process.
    """

    def __init__(self, num_rows: int, shape: tuple[int, ...]) -> None:
        self._num_rows = num_rows
        self._shape = shape
        self._row_nbytes = 4 * int(np.prod(shape))
        try:
            self._file = tempfile.TemporaryFile(prefix="expertly-", buffering=0)  # noqa: SIM115 - lives with the object
        except OSError as error:
            raise self._problem(error) from None
        self._block: npt.NDArray[np.int32] = np.empty((0, *shape), np.int32)
        self._block_row = 0

    def write(self, first_row: int, rows: npt.NDArray[np.int32]) -> None:
        """Rows from `first_row` on. Raises ConfigError where there is no room for them."""
        assert rows.shape[1:] == self._shape and rows.dtype == np.int32
        try:
            self._file.seek(first_row * self._row_nbytes)
            view = np.ascontiguousarray(rows).data.cast("B")
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            raise self._problem(error) from None

    def read(self, first_row: int, num_rows: int) -> npt.NDArray[np.int32]:
        """[num_rows, *shape]. Meant for reading from the first row to the last."""
        begin = first_row - self._block_row
        if begin < 0 or begin + num_rows > len(self._block):
            num_block = min(max(num_rows, _BLOCK_ROWS), self._num_rows - first_row)
            self._block = np.empty((num_block, *self._shape), np.int32)
            self._file.seek(first_row * self._row_nbytes)
            num_read = self._file.readinto(self._block.data.cast("B"))
            assert num_read == self._block.nbytes, "only what was written is read"
            self._block_row, begin = first_row, 0
        return self._block[begin : begin + num_rows]

    def _problem(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"temporary files: {error.strerror}; belady and oracle need {self._num_rows * self._row_nbytes} bytes in "
            f"{tempfile.gettempdir()}; set TMPDIR to a folder that has them"
        )
