"""The base of layouts: how checkpoints of a `quant_method` store quantised matrices.

A layout names a matrix's tensors by their endings, decodes them, and says which weight format keeps their bytes.
`LAYOUTS` of `expertly.formats` lists them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import regex

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.formats.tiles import Bytes, TiledFormat, torch

Header = tuple[str, tuple[int, ...]]
"""A stored tensor's dtype (safetensors' name) and shape."""

Item = TypeVar("Item")

WHERE = "quantization_config"

PATTERN_S = 5.0
"""Seconds for which a pattern may look at names, all together."""

ACTIVATIONS = (
    *(f".{of}_{scale}" for of in ("input", "output") for scale in ("scale", "global_scale", "zero_point")),
    *(f".{of}_scale" for of in ("q", "k", "v", "kv", "prob")),
    *(f".{of}_zero_point" for of in ("k", "v")),
)
"""Endings of tensors by which others round activations and caches, which no weight depends on."""

_FLOATS = ("BF16", "F16", "F32", "F64")


class Layout:
    """A `quant_method`. Its instances say what a config, and a model that computes in `dtype`, make of matrices."""

    suffixes: tuple[str, ...]
    """Endings of all tensors that matrices may have, in the order in which `weight` gets them."""
    fused: tuple[str, ...] = ()
    """The same of stacked experts, [E, ...], whose names lack ".weight"."""
    stacked: Mapping[str, Sequence[str]] = {}
    """Endings of parameters of experts, [E, rows, columns], and of the stacked matrices whose rows they have."""
    renamed: Mapping[str, str] = {}
    """Other endings that checkpoints have for `suffixes`."""
    ignored: tuple[str, ...] = ACTIVATIONS

    def __init__(self, quantization: Mapping[str, Any], dtype: str) -> None:
        """Raises UnsupportedModelError naming the field of the config that is not supported."""

    def check(self, stem: str, tensors: Mapping[str, Header]) -> None:
        """Raises CheckpointError where the matrix with this name, without endings, lacks a tensor, or has some that do
        not fit together.
        """
        raise NotImplementedError

    def form_of(self, stem: str, tensors: Mapping[str, Header]) -> TiledFormat | None:
        """The format that keeps the matrix, in the variant that reads these tensors."""
        return None

    def usual_form(self) -> TiledFormat | None:
        """`form_of` most matrices, from the config alone."""
        return None

    def weight(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A decoded matrix, or several [..., rows, columns]. Raises CheckpointError where a tensor does not fit."""
        raise NotImplementedError

    # -- the same for all ------------------------------------------------------------------------------------

    def split(self, name: str) -> tuple[str, str] | None:
        """A tensor's name without its ending, and that ending, as in `suffixes`; None of what no matrix has."""
        for ending in sorted({*self.suffixes, *self.fused, *self.renamed}, key=len, reverse=True):
            if name.endswith(ending):
                return name.removesuffix(ending), self.renamed.get(ending, ending)
        return None

    def matrices(self, tensors: Mapping[str, Item]) -> dict[str, dict[str, Item]]:
        """The tensors of each matrix by ending, in the order of `suffixes`, by its name without ending. Raises
        CheckpointError where two mean the same.
        """
        made: dict[str, dict[str, Item]] = {}
        for name, tensor in tensors.items():
            parts = self.split(name)
            if parts is None or name.endswith(self.ignored):
                continue
            matrix = made.setdefault(parts[0], {})
            if parts[1] in matrix:
                raise CheckpointError(f"tensor {name!r}: there is also a {parts[0]}{parts[1]}, which means the same")
            matrix[parts[1]] = tensor
        order = (*self.suffixes, *self.fused)
        return {stem: {end: matrix[end] for end in order if end in matrix} for stem, matrix in made.items()}

    def check_beside(self, stem: str, tensors: Mapping[str, Header], needed: Sequence[str]) -> None:
        """Raises CheckpointError where there is no tensor with one of these endings, or a further one."""
        absent = next((ending for ending in needed if ending not in tensors), None)
        if absent is not None:
            raise CheckpointError(f"tensor '{stem}{next(iter(tensors))}': there is no {stem}{absent} beside it")
        if further := [ending for ending in tensors if ending not in needed]:
            raise CheckpointError(f"tensor '{stem}{further[0]}': {WHERE} has none such; accepted: {', '.join(needed)}")


class NamePattern:
    """A checkpoint's pattern of modules' names. All that it is asked may take PATTERN_S: a few letters of a pattern can
    take for ever.
    """

    def __init__(self, pattern: str, where: str) -> None:
        """`where`: the field. Raises UnsupportedModelError where it is no pattern."""
        self._where, self._left_s = where, PATTERN_S
        try:
            self._compiled = regex.compile(pattern)
        except regex.error as error:
            raise UnsupportedModelError(f"{where}={pattern!r:.80}: must be a pattern of names: {error}") from None

    def matches(self, name: str) -> bool:
        """Whether it matches from the name's beginning. Raises UnsupportedModelError where that takes too long."""
        begin = time.monotonic()
        try:
            return self._compiled.match(name, timeout=max(self._left_s, 1e-3)) is not None
        except TimeoutError:
            problem = f"takes more than {PATTERN_S:g} s on the names of this model; must be a simpler one"
            raise UnsupportedModelError(f"{self._where}={self._compiled.pattern!r:.80}: {problem}") from None
        finally:
            self._left_s -= time.monotonic() - begin


def is_plain(tensors: Mapping[str, Header]) -> bool:
    """Whether a matrix is not quantised."""
    return len(tensors) == 1 and next(iter(tensors.values()))[0] in _FLOATS


def check_field(fields: Mapping[str, Any], field: str, accepted: Sequence[object], where: str) -> None:
    """Raises UnsupportedModelError where a field has another value. A missing field counts as None."""
    value = fields.get(field)
    if not any(type(value) is type(one) and value == one for one in accepted):
        listed = " or ".join(map(repr, accepted))
        raise UnsupportedModelError(f"{where}.{field}={value!r:.80}: must be {listed}")


def block_of(shape: Sequence[int], scales: Sequence[int], block: Sequence[int] | None) -> tuple[int, int] | None:
    """The rows and columns of weights [..., rows, columns] that share one of `scales`: those of `block`, where the last
    of a row or column may be cut, else of a group, a row or the whole matrix. None: no such block has so many scales.
    """
    *lead, rows, columns = shape
    if block is not None and list(scales) == [*lead, -(-rows // block[0]), -(-columns // block[1])]:
        return block[0], block[1]
    if all(size == 1 for size in scales[len(lead) :]) and list(scales[: len(lead)]) == lead:
        return rows, columns
    if list(scales[:-1]) != [*lead, rows]:
        return (1, columns) if lead == [] and list(scales) == [rows] else None
    return (1, columns // scales[-1]) if scales[-1] and columns % scales[-1] == 0 else None


def spread(scales: torch.Tensor, shape: Sequence[int], block: tuple[int, int]) -> torch.Tensor:
    """`scales` as [..., rows or 1, columns or 1], for `block` of `block_of`."""
    *lead, rows, columns = shape
    factors = scales.reshape(*lead, -(-rows // block[0]), -(-columns // block[1]))
    for dim, size in ((-2, rows), (-1, columns)):
        if block[dim] < size:
            factors = factors.repeat_interleave(block[dim], dim).narrow(dim, 0, size)
    return factors


def order_of(order: torch.Tensor, num_groups: int, columns: int) -> torch.Tensor:
    """The group of each input. Raises CheckpointError where there is none."""
    if tuple(order.shape) != (columns,):
        raise CheckpointError(f"g_idx: {list(order.shape)}: must be {[columns]}")
    if columns and not 0 <= int(order.min()) <= int(order.max()) < num_groups:
        raise CheckpointError(f"g_idx: from {order.min()} to {order.max()}: must be from 0 to {num_groups - 1}")
    return order.long()


def unpacked(words: npt.NDArray[Any], bits: int, num: int) -> Bytes:
    """Numbers [..., num] of `bits` bits each from words [..., n], the lowest bits first; they may straddle words."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return packed[..., :num]
    if bits == 4:
        return np.stack((packed & 15, packed >> 4), axis=-1).reshape(*packed.shape[:-1], -1)[..., :num]
    places = np.unpackbits(packed, axis=-1, count=num * bits, bitorder="little").reshape(*packed.shape[:-1], num, bits)
    return np.packbits(places, axis=-1, bitorder="little")[..., 0]
