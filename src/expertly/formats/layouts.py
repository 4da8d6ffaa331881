"""The base of layouts: how checkpoints of a `quant_method` store quantised matrices.

A layout names a matrix's tensors by their endings, says which dtypes and shapes they may have, reads them as a
`Matrix`, and says which weight format keeps their bytes. `LAYOUTS` of `expertly.formats` lists them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import regex

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.formats.matrix import Matrix, torch
from expertly.formats.tiles import TiledFormat

Header = tuple[str, tuple[int, ...]]
"""A stored tensor's dtype (safetensors' name) and shape."""

Accepted = Mapping[str, tuple[Sequence[str], Sequence[Sequence[int]]]]
"""Of each ending the dtypes and the shapes that its tensor may have."""

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

FLOATS = ("BF16", "F16", "F32")


class Layout:
    """A `quant_method`. Its instances say what a config, and a model that computes in `dtype`, make of matrices."""

    suffixes: tuple[str, ...]
    """Endings of all tensors that matrices may have, in the order in which `read` gets them."""
    fused: tuple[str, ...] = ()
    """The same of stacked experts, [E, ...], whose names lack ".weight"."""
    is_fused_turned = False
    """Whether these are [E, inputs, outputs]."""
    stacked: Mapping[str, Sequence[str]] = {}
    """Endings of parameters of experts, [E, rows, columns], and of the stacked matrices whose rows they have."""
    renamed: Mapping[str, str] = {}
    """Other endings that checkpoints have for `suffixes`."""
    ignored: tuple[str, ...] = ACTIVATIONS
    least_dimensions = 2  # of numbers

    def __init__(self, quantization: Mapping[str, Any], dtype: str) -> None:
        """Raises UnsupportedModelError naming the field of the config that is not supported."""

    def endings(self, stem: str, tensors: Mapping[str, Header]) -> Sequence[str]:
        """Those that the matrix with this name, without endings, needs, its numbers first, and further ones that it has
        and may have. None where it is not quantised.
        """
        raise NotImplementedError

    def size(self, stem: str, tensors: Mapping[str, Header]) -> list[int]:
        """[..., rows, columns] of the matrices. Raises CheckpointError."""
        raise NotImplementedError

    def accepted(self, stem: str, tensors: Mapping[str, Header], size: list[int]) -> Accepted:
        """Of the tensors of a matrix that has all `endings`."""
        raise NotImplementedError

    def form_of(self, stem: str, tensors: Mapping[str, Header]) -> TiledFormat | None:
        """The format that keeps the matrix."""
        return None

    def usual_form(self) -> TiledFormat | None:
        """`form_of` most matrices, from the config alone."""
        return None

    def read(self, tensors: Mapping[str, torch.Tensor]) -> Matrix:
        """Raises CheckpointError where a value is beyond the format."""
        raise NotImplementedError

    # -- the same for all ------------------------------------------------------------------------------------

    def weight(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A decoded matrix, or several [..., rows, columns]; one that is not quantised as it is."""
        return next(iter(tensors.values())) if len(tensors) == 1 else self.read(tensors).weight()

    def check(self, stem: str, tensors: Mapping[str, Header]) -> list[int]:
        """The matrix's size, [..., rows, columns]. Raises CheckpointError where it lacks a tensor, or has some that do
        not fit together.
        """
        needed = () if is_plain(tensors) else self.endings(stem, tensors)
        if not needed:
            return list(next(iter(tensors.values()))[1])
        absent = next((ending for ending in needed if ending not in tensors), None)
        if absent is not None:
            raise CheckpointError(f"tensor '{stem}{next(iter(tensors))}': there is no {stem}{absent} beside it")
        if further := [ending for ending in tensors if ending not in needed]:
            raise CheckpointError(f"tensor '{stem}{further[0]}': {WHERE} has none such; accepted: {', '.join(needed)}")
        dtype, shape = tensors[needed[0]]
        if len(shape) < self.least_dimensions:
            raise CheckpointError(f"tensor '{stem}{needed[0]}': {dtype} {list(shape)}: must have two dimensions")
        size = self.size(stem, tensors)
        for ending, (dtypes, shapes) in self.accepted(stem, tensors, size).items():
            dtype, shape = tensors[ending]
            said = f"tensor '{stem}{ending}': {dtype} {list(shape)}: must be"
            if dtype not in dtypes:
                raise CheckpointError(f"{said} {' or '.join(dtypes)}")
            if list(shape) not in map(list, shapes):
                listed = " or ".join(dict.fromkeys(str(list(each)) for each in shapes))
                raise CheckpointError(f"{said} {listed} for {size} weights, as config.json has them")
        return size

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


class NamePattern:
    """A checkpoint's pattern of modules' names. All that it is asked may take PATTERN_S: a few letters of a pattern can
    take for ever.
    """

    def __init__(self, pattern: str, place: str) -> None:
        """`place`: the field. Raises UnsupportedModelError where it is no pattern."""
        self._place, self._left_s = place, PATTERN_S
        try:
            self._compiled = regex.compile(pattern)
        except regex.error as error:
            raise UnsupportedModelError(f"{place}={pattern!r:.80}: must be a pattern of names: {error}") from None

    def matches(self, name: str) -> bool:
        """Whether it matches from the name's beginning. Raises UnsupportedModelError where that takes too long."""
        begin = time.monotonic()
        try:
            return self._compiled.match(name, timeout=max(self._left_s, 1e-3)) is not None
        except TimeoutError:
            problem = f"takes more than {PATTERN_S:g} s on the names of this model; must be a simpler one"
            raise UnsupportedModelError(f"{self._place}={self._compiled.pattern!r:.80}: {problem}") from None
        finally:
            self._left_s -= time.monotonic() - begin


def is_plain(tensors: Mapping[str, Header]) -> bool:
    """Whether a matrix is not quantised."""
    return len(tensors) == 1 and next(iter(tensors.values()))[0] in (*FLOATS, "F64")


def check_field(fields: Mapping[str, Any], field: str, accepted: Sequence[object], place: str) -> None:
    """Raises UnsupportedModelError where a field has another value. A missing field counts as None."""
    value = fields.get(field)
    if not any(type(value) is type(each) and value == each for each in accepted):
        listed = " or ".join(map(repr, accepted))
        raise UnsupportedModelError(f"{place}.{field}={value!r:.80}: must be {listed}")
