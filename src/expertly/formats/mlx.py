"""The layout of MLX (mlx-lm's `convert`): a weight is a number of 2 to 8 bits * its group's scale + its group's bias.

Words of 32 bits hold numbers one after the other, the lowest bits first. Sums and products are in float32, as in
transformers' `MetalDequantize`. In mode "mxfp4" numbers are of E2M1, scales bytes as in mxfp4.py, without biases.
Experts are stacked, [E, rows, words], under the name `switch_mlp`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.formats.layouts import FLOATS, Accepted, Header, Layout, check_field
from expertly.formats.matrix import Matrix, torch
from expertly.formats.mxfp4 import MXFP4
from expertly.formats.tiles import TiledFormat

_WEIGHT, _SCALES, _BIASES = ".weight", ".scales", ".biases"

_WHERE = "quantization"

_BITS = (2, 3, 4, 5, 6, 8)


class MlxLayout(Layout):
    suffixes = (_WEIGHT, _SCALES, _BIASES)
    stacked: Mapping[str, Sequence[str]] = {
        ".experts.gate_up_proj": (".switch_mlp.gate_proj", ".switch_mlp.up_proj"),
        ".experts.down_proj": (".switch_mlp.down_proj",),
    }

    def __init__(self, quantization: Mapping[str, Any], dtype: str) -> None:
        size = quantization.get("group_size", 64)
        check_field({"mode": "affine", **quantization}, "mode", ("affine", "mxfp4"), _WHERE)
        if type(size) is not int or not 0 < size < 1 << 31:
            raise UnsupportedModelError(f"{_WHERE}.group_size={size!r:.80}: must be a whole number above 0")
        self._size = size
        of_layers = {name: fields for name, fields in quantization.items() if isinstance(fields, dict)}
        for name, fields in ((_WHERE, quantization), *of_layers.items()):
            check_field({"bits": 4, **fields}, "bits", _BITS, name)
            check_field({"group_size": size, **fields}, "group_size", (size,), name)

    def endings(self, stem: str, tensors: Mapping[str, Header]) -> Sequence[str]:
        is_mxfp4 = tensors.get(_SCALES, ("", ()))[0] == "U8"
        return () if _WEIGHT not in tensors else self.suffixes[:2] if is_mxfp4 else self.suffixes

    def size(self, stem: str, tensors: Mapping[str, Header]) -> list[int]:
        _, (*lead, num_words) = tensors[_WEIGHT]
        num_groups = (0, *tensors[_SCALES][1])[-1]
        self._bits_of(num_words, num_groups)
        return [*lead, num_groups * self._size]

    def accepted(self, stem: str, tensors: Mapping[str, Header], size: list[int]) -> Accepted:
        scales = [*size[:-1], size[-1] // self._size]
        of_scales = ("U8", *FLOATS) if _BIASES not in tensors else FLOATS
        accepted: Accepted = {_WEIGHT: (("U32",), [tensors[_WEIGHT][1]]), _SCALES: (of_scales, [scales])}
        return {**accepted, _BIASES: (FLOATS, [scales])} if _BIASES in tensors else accepted

    def _bits_of(self, num_words: int, num_groups: int) -> int:
        bits = 32 * num_words // max(1, num_groups * self._size)
        if bits not in _BITS or bits * num_groups * self._size != 32 * num_words:
            raise CheckpointError(
                f"{_SCALES}: {num_groups} groups of {self._size} ({_WHERE}.group_size) in {num_words} words: numbers "
                f"must have {', '.join(map(str, _BITS))} bits"
            )
        return bits

    def form_of(self, stem: str, tensors: Mapping[str, Header]) -> TiledFormat | None:
        return MXFP4 if tuple(tensors) == (_WEIGHT, _SCALES) and tensors[_SCALES][0] == "U8" else None

    def read(self, tensors: Mapping[str, torch.Tensor]) -> Matrix:
        words, scales, *biases = tensors.values()
        words, columns = words.view(torch.uint8), scales.shape[-1] * self._size
        if not biases:
            return Matrix(words, scales, 4, columns, is_e2m1=True)
        bits = self._bits_of(words.shape[-1] // 4, scales.shape[-1])
        return Matrix(words, scales.float(), bits, columns, biases=biases[0].float())
