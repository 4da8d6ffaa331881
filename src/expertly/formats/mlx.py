"""The layout of MLX (mlx-lm's `convert`): a weight is a number of 2 to 8 bits * its group's scale + its group's bias.

Words of 32 bits hold numbers one after the other, the lowest bits first. Sums and products are in float32, as in
transformers' `MetalDequantize`. In mode "mxfp4" numbers are of E2M1, scales bytes as in mxfp4.py, without biases.
Experts are stacked, [E, rows, words], under the name `switch_mlp`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.formats.fp8 import e2m1_values, scales_of
from expertly.formats.layouts import Header, Layout, block_of, check_field, is_plain, spread, unpacked
from expertly.formats.mxfp4 import _Mxfp4
from expertly.formats.tiles import TiledFormat, torch

_WEIGHT, _SCALES, _BIASES = ".weight", ".scales", ".biases"

_WHERE = "quantization"

_BITS = (2, 3, 4, 5, 6, 8)


class _MlxMxfp4(_Mxfp4):
    suffixes: tuple[str, ...] = (_WEIGHT, _SCALES)

    def shapes(self, rows: int, columns: int) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
        return (("U32",), (rows, columns // 8)), (("U8",), (rows, columns // 32))


_MXFP4 = _MlxMxfp4()


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
        self._size, of_layers = size, {name: one for name, one in quantization.items() if isinstance(one, dict)}
        for name, fields in ((_WHERE, {"bits": 4, **quantization}), *of_layers.items()):
            check_field({"bits": 4, **fields}, "bits", _BITS, name)
            check_field({"group_size": size, **fields}, "group_size", (size,), name)

    def check(self, stem: str, tensors: Mapping[str, Header]) -> None:
        dtype, shape = next(iter(tensors.values()))
        if is_plain(tensors) or _WEIGHT not in tensors:
            return
        if dtype != "U32" or len(shape) < 2:
            raise CheckpointError(f"tensor '{stem}{_WEIGHT}': {dtype} {list(shape)}: must be U32 [rows, words]")
        is_mxfp4 = tensors.get(_SCALES, ("", ()))[0] == "U8"
        self.check_beside(stem, tensors, (_WEIGHT, _SCALES) if is_mxfp4 else (_WEIGHT, _SCALES, _BIASES))
        for ending, (_, size) in tensors.items():
            if ending != _WEIGHT and size[:-1] != shape[:-1]:
                raise CheckpointError(f"tensor '{stem}{ending}': {list(size)}: must be {[*shape[:-1], 'n']}")
        self._bits_of(shape[-1], tensors[_SCALES][1][-1])

    def _bits_of(self, num_words: int, num_groups: int) -> int:
        bits = 32 * num_words // max(1, num_groups * self._size)
        if bits not in _BITS or bits * num_groups * self._size != 32 * num_words:
            raise CheckpointError(
                f"{_SCALES}: {num_groups} groups of {self._size} ({_WHERE}.group_size) in {num_words} words: numbers "
                f"must have {', '.join(map(str, _BITS))} bits"
            )
        return bits

    def form_of(self, stem: str, tensors: Mapping[str, Header]) -> TiledFormat | None:
        return _MXFP4 if tuple(tensors) == (_WEIGHT, _SCALES) and tensors[_SCALES][0] == "U8" else None

    def weight(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """In float32; one without scales as it is."""
        if len(tensors) == 1:
            return next(iter(tensors.values()))
        words, scales = tensors[_WEIGHT], tensors[_SCALES]
        if _BIASES not in tensors:
            values, parts = e2m1_values(words.view(torch.uint8)), [scales_of(scales)]
        else:
            bits, columns = self._bits_of(words.shape[-1], scales.shape[-1]), scales.shape[-1] * self._size
            values = torch.from_numpy(unpacked(words.view(torch.int32).numpy(), bits, columns).astype(np.float32))
            parts = [scales.float(), tensors[_BIASES].float()]
        block = block_of(values.shape, scales.shape, None)
        if block is None or not all(bool(part.isfinite().all()) for part in parts):
            raise CheckpointError(
                f"{_SCALES}: {list(scales.shape)}: must be finite, and those of {list(values.shape)} weights"
            )
        values.mul_(spread(parts[0], values.shape, block))
        return values.add_(spread(parts[1], values.shape, block)) if len(parts) > 1 else values
