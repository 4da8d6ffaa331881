"""The layouts of GPTQ and AWQ checkpoints (AutoGPTQ, GPTQModel; AutoAWQ), for the INT4 tiles of int4.py.

A word of 8 numbers from 0 to 15 covers 8 inputs (GPTQ) or 8 outputs (AWQ, in another order). Both have tensors
[inputs / G, ...] of float16 scales and of zero points from 0 to 15. A weight is (number - zero point) * scale in
float16. So GPTQModel computes it (`TorchLinear.dequantize_weight`, `AwqTorchLinear`), which transformers uses for both;
in a bfloat16 model its `load` rounds the scales to bfloat16 first, and then the product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import CheckpointError
from expertly.formats.int4 import GROUPS, Int4Format, check_field, shape2
from expertly.formats.tiles import Bytes, torch

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of 8 outputs."""

_WHERE = "quantization_config"


class _InHalf(Int4Format):
    """`scales`: the dtype to which the checkpoint's scales are rounded."""

    usual_scales = "F16"

    @property
    def stored_scales(self) -> tuple[str, ...]:
        return "F16", "BF16"  # GPTQModel stores AWQ's scales in the dtype of the model

    def scales_of(self, scales: torch.Tensor, rows: int) -> Bytes:
        return super().scales_of((scales.bfloat16() if self.scales == "BF16" else scales.half()).T, rows)


class GptqFormat(_InHalf):
    """Zero points of symmetric checkpoints are all 8, and are not kept."""

    quant_method = "gptq"
    suffixes: tuple[str, ...] = (".qweight", ".scales", ".qzeros", ".g_idx")

    def __init__(self, group: int, scales: str, has_zeros: bool, is_less_one: bool, is_carried: bool) -> None:
        """`is_less_one`: zero points are stored less one; `is_carried`: by subtraction from the whole word, so that a
        zero point of 0 borrows from the next one.
        """
        super().__init__(group, scales, has_zeros)
        self._is_less_one, self._is_carried = is_less_one, is_carried

    def size_of(self, tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
        return shape2(tensors[0], self.suffixes[0])[1], tensors[3].numel()

    def shapes(self, rows: int, columns: int) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
        groups = columns // self.group
        return (
            (("I32",), (columns // 8, rows)),
            (self.stored_scales, (groups, rows)),
            (("I32",), (groups, rows // 8)),
            (("I32", "I64"), (columns,)),
        )

    def parts_of(self, tensors: Sequence[torch.Tensor], rows: int, columns: int) -> tuple[Bytes, ...]:
        words, scales, zeros, order = tensors
        if not np.array_equal(order.numpy(), np.arange(columns) // self.group):
            raise CheckpointError(
                f"g_idx: inputs in another order than their groups of {self.group} (desc_act): their bytes cannot be "
                "kept; name a dtype to convert them"
            )
        numbers = np.ascontiguousarray(words.numpy().T).view(np.uint8)
        parts = numbers.reshape(rows, columns // self.group, -1), self.scales_of(scales, rows)
        points = self._zeros_of(zeros.numpy().view(np.uint32))
        return (*parts, points) if self.has_zeros else parts

    def _zeros_of(self, words: npt.NDArray[np.uint32], bits: int = 4) -> Bytes:
        """Zero points [rows, groups, 1] from 0 on, from words [groups, rows * bits / 32]."""
        if self._is_less_one:
            most = (1 << bits) - 1
            if not self._is_carried and (_numbers(words, bits) == most).any():
                raise CheckpointError(
                    f"a zero point of {most + 1}, stored as {most}: must be 1 to {most} (or 0, stored so by gptqmodel, "
                    f"which {_WHERE}.meta.quantizer does not name)"
                )
            words = words + np.uint32(0xFFFFFFFF // most)  # one more in each number
        points, middle = _numbers(words, bits).T[..., None], 1 << (bits - 1)
        if not self.has_zeros and (wrong := points[points != middle]).size:
            raise CheckpointError(f"a zero point of {wrong[0]}: must be {middle}, as {_WHERE}.sym is true")
        return points

    def dequantised(self, tensors: Sequence[torch.Tensor], rows: int, columns: int) -> torch.Tensor:
        """Also of inputs in another order than their groups, and of 8 bits, which GPTQModel gives lm_head."""
        words, scales, zeros, order = tensors
        bits, num = 8 if 4 * len(words) == columns else 4, shape2(zeros, self.suffixes[2])[0]
        shapes = (columns * bits // 32, rows), (num, rows), (num, rows * bits // 32), (columns,)
        for suffix, tensor, shape in zip(self.suffixes, tensors, shapes, strict=True):
            if tuple(tensor.shape) != shape:
                raise CheckpointError(f"{suffix}: {list(tensor.shape)}: must be {list(shape)}")
        if columns and not 0 <= int(order.min()) <= int(order.max()) < num:
            raise CheckpointError(f"g_idx: from {order.min()} to {order.max()}: must be from 0 to {num - 1}")
        dtype = torch.bfloat16 if self.scales == "BF16" else torch.float16
        numbers = torch.from_numpy(_numbers(words.numpy().view(np.uint32).T, bits))
        points = torch.from_numpy(self._zeros_of(zeros.numpy().view(np.uint32), bits))[:, order.long(), 0]
        of_groups = torch.from_numpy(self.scales_of(scales, rows)).view(dtype)[:, order.long(), 0]
        return numbers.to(dtype).sub_(points).mul_(of_groups)  # the difference is exact


class AwqFormat(_InHalf):
    """AWQ's version "gemm", always with zero points."""

    quant_method = "awq"
    suffixes: tuple[str, ...] = (".qweight", ".scales", ".qzeros")

    def __init__(self, group: int, scales: str) -> None:
        super().__init__(group, scales, has_zeros=True)

    def size_of(self, tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
        columns, width = shape2(tensors[0], self.suffixes[0])
        return width * 8, columns

    def shapes(self, rows: int, columns: int) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
        groups = columns // self.group
        return (("I32",), (columns, rows // 8)), (self.stored_scales, (groups, rows)), (("I32",), (groups, rows // 8))

    def parts_of(self, tensors: Sequence[torch.Tensor], rows: int, columns: int) -> tuple[Bytes, ...]:
        words, scales, zeros = tensors
        numbers, points = _in_order(words).T, _in_order(zeros).T[..., None]
        packed = numbers[:, 0::2] | numbers[:, 1::2] << 4
        return packed.reshape(rows, columns // self.group, -1), self.scales_of(scales, rows), points


AWQ = tuple(AwqFormat(group, scales) for scales in ("BF16", "F16") for group in GROUPS)


def _numbers(words: npt.NDArray[np.uint32], bits: int = 4) -> Bytes:
    """Numbers [..., 32 / bits * n] of 4 or 8 bits from words [..., n], the lowest bits first."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    halves = (packed,) if bits == 8 else (packed & 15, packed >> 4)
    return np.stack(halves, axis=-1).reshape(*packed.shape[:-1], -1)


def _in_order(words: torch.Tensor) -> Bytes:
    """Numbers [..., 8 n] from AWQ's words [..., n], in the order of outputs."""
    numbers = _numbers(words.numpy().view(np.uint32))
    return numbers.reshape(*numbers.shape[:-1], -1, 8)[..., _AWQ_PLACES].reshape(numbers.shape)


# -- what a config must say --------------------------------------------------------------------------------------------


def gptq(quantization: Mapping[str, Any], dtype: str) -> Sequence[Int4Format]:
    version = quantization.get("checkpoint_format") or quantization.get("format") or "gptq"
    fields = {**quantization, "checkpoint_format": version}
    for field, accepted in {
        "bits": (4,),
        "group_size": GROUPS,
        "checkpoint_format": ("gptq", "gptq_v2"),
        "sym": (True, False, None),
        "desc_act": (False, True, None),  # `parts_of` checks g_idx for inputs that it moved
        "is_marlin_format": (False, None),
        "pack_dtype": ("int32", None),
        "rotation": (None,),
        "adapter": (None,),
    }.items():
        check_field(fields, field, accepted, _WHERE)
    meta = quantization.get("meta")
    maker = str(meta.get("quantizer")) if isinstance(meta, dict) else ""
    kind = quantization["group_size"], "BF16" if dtype == "bfloat16" else "F16", quantization.get("sym") is False
    return [GptqFormat(*kind, is_less_one=version == "gptq", is_carried="gptqmodel" in maker)]


def awq(quantization: Mapping[str, Any], dtype: str) -> Sequence[Int4Format]:
    named = (quantization.get(field) for field in ("checkpoint_format", "version", "format"))
    version = next((str(one).lower() for one in named if one is not None), "gemm")
    if quantization.get("backend") == "llm-awq":
        version = "llm-awq"  # transformers also ignores the named version then
    fields = {"bits": 4, "group_size": 128, **quantization, "version": version}
    for field, accepted in {"bits": (4,), "group_size": GROUPS, "version": ("gemm",)}.items():
        check_field(fields, field, accepted, _WHERE)
    scales = "BF16" if dtype == "bfloat16" else "F16"
    return [one for one in AWQ if (one.group, one.scales) == (fields["group_size"], scales)]
