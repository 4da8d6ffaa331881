"""Which products a model runs with, why, and how many of them ran."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence

import torch

from expertly.core.errors import ConfigError
from expertly.core.resources import granted_cpus
from expertly.native.library import Library, libraries

VARIABLE = "EXPERTLY_KERNELS"
"""The environment's choice: "auto", "native", "torch", or an instruction set of the compiled products."""

_SETS = ("avx512", "avx2", "generic")
ACCEPTED = ("auto", "native", "torch", *_SETS)


class Kernels:
    """The products of one device of one model. `library` is None where torch multiplies."""

    def __init__(self, library: Library | None, why: str) -> None:
        self.library = library
        self.why = why
        self.num_native = 0
        """Experts, or parts of one, that were computed by the compiled products."""
        self.num_torch = 0
        """The same by torch: prompts, mostly."""
        self._dtypes = {} if library is None else library.dtypes
        self._max_threads = granted_cpus()

    def __deepcopy__(self, memo: dict[int, object]) -> Kernels:
        return self

    @property
    def name(self) -> str:
        """As it is told: "native avx512" or "torch"."""
        return "torch" if self.library is None else f"native {self.library.name}"

    @property
    def max_tokens(self) -> int:
        """Of one product with matrices that they take."""
        return 0 if self.library is None else self.library.max_tokens

    def takes(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the compiled products are for such matrices, and up to `max_tokens` tokens at a time."""
        return dtype in self._dtypes and device.type == "cpu"

    def facts(self) -> dict[str, str | int]:
        """For `--stats`."""
        return {"name": self.name, "why": self.why, "native": self.num_native, "torch": self.num_torch}

    def dots(
        self,
        tasks: Sequence[int],
        x: torch.Tensor,
        out: torch.Tensor,
        row_nbytes: int,
        matrix_nbytes: int = 0,
        bias: torch.Tensor | None = None,
    ) -> None:
        """out[m, o + t, i] = row (i, m) . x[r + t] for every task (address, r, n, o) of `tasks`, four numbers each, and
        t < n <= max_tokens; neuron i's row of matrix m is at address + i * row_nbytes + m * matrix_nbytes.

        `x` is [*, H], its rows dense; `out` [M, *, r], contiguous. `bias` [r] is added before rounding, where M is 1.
        Raises MemoryError.
        """
        library = self.library
        assert library is not None
        packed = array("q", tasks)
        num_matrices, out_rows, num_neurons = out.shape
        failed = library.dots(
            library.level,
            self._dtypes[x.dtype],
            self._num_threads(),
            packed.buffer_info()[0],
            len(packed) // 4,
            num_matrices,
            num_neurons,
            x.shape[1],
            row_nbytes,
            matrix_nbytes,
            x.data_ptr(),
            x.shape[0],
            x.stride(0) * x.element_size(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out_rows,
        )
        if failed:
            raise MemoryError("a product of an expert")

    def sums(
        self, tasks: Sequence[int], h: torch.Tensor, out: torch.Tensor, row_nbytes: int, *, adds: bool = False
    ) -> None:
        """out[o + t] = the sum over i of h[r + t, i] * row i, for every task (address, r, n, o) and t < n, rounded
        once. `adds`: added to `out`, which is float32, unrounded.

        `h` is [*, r] and `out` [*, H], both contiguous. Raises MemoryError.
        """
        library = self.library
        assert library is not None
        packed = array("q", tasks)
        failed = library.sums(
            library.level,
            self._dtypes[h.dtype],
            self._num_threads(),
            packed.buffer_info()[0],
            len(packed) // 4,
            h.shape[1],
            out.shape[1],
            row_nbytes,
            h.data_ptr(),
            h.shape[0],
            out.data_ptr(),
            adds,
        )
        if failed:
            raise MemoryError("a product of an expert")

    def _num_threads(self) -> int:
        return min(torch.get_num_threads(), self._max_threads)


def choose_kernels(device: torch.device, wanted: str | None = None) -> Kernels:
    """The fastest for a device, or what `wanted`, else the environment, says.

    Raises ConfigError where that is unknown or not to be had here.
    """
    wanted = wanted or os.environ.get(VARIABLE) or "auto"
    if wanted not in ACCEPTED:
        raise ConfigError(f"{VARIABLE}={wanted!r}: unknown; accepted: {', '.join(ACCEPTED)}")
    if wanted == "torch":
        return Kernels(None, f"{VARIABLE}=torch")
    if device.type != "cpu":
        return Kernels(None, f"the compiled ones are for a CPU, the model is on {device}")
    found, why = libraries()
    chosen = [one for one in found if wanted in ("auto", "native", one.name)]
    if not chosen:
        if wanted != "auto":
            here = why or f"this processor runs {', '.join(one.name for one in found)}"
            raise ConfigError(f"{VARIABLE}={wanted!r}: {here}; accepted here: auto, torch")
        return Kernels(None, why)
    library = chosen[0]
    if wanted == "auto" and not library.has_threads and min(torch.get_num_threads(), granted_cpus()) > 2:
        return Kernels(None, "torch's threads cannot be shared: it has no OpenMP that takes other work")
    return Kernels(library, "the fastest of this processor" if wanted in ("auto", "native") else f"{VARIABLE}={wanted}")


def kernels_over(devices: Sequence[Kernels]) -> dict[str, str | int]:
    """What is told of a model: its first device's, with the counts of all."""
    counts = {name: sum(getattr(one, f"num_{name}") for one in devices) for name in ("native", "torch")}
    return {**devices[0].facts(), **counts}
