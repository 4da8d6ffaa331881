"""Matrices of checkpoints in every weight format, and an expert of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import gguf
import numpy as np
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from expertly.formats.gguf import GGUF_FORMATS
from expertly.formats.matrix import E2M1, Matrix
from expertly.formats.tiles import ExpertFormat
from tests.formats.gguf_files import gguf_blocks

SIZES = [(1, 1, 3), (2, 3, 3), (4, 5, 2), (1, 90, 3)]  # groups of I, groups of H, M
MOST_HIDDEN = 2880

Made = tuple[Matrix, torch.Tensor]
"""A matrix, and its weights [rows, columns] as transformers has them."""


def mxfp4_matrix(dice: torch.Generator, rows: int, columns: int) -> Made:
    codes = torch.randint(0, 256, (rows, columns // 32, 16), generator=dice, dtype=torch.uint8)
    scales = torch.randint(110, 130, (rows, columns // 32), generator=dice, dtype=torch.uint8)
    scales[0, 0] = 0  # 2^-127 is no normal number
    weights = convert_moe_packed_tensors(codes[None], scales[None], dtype=torch.float32)[0].T
    return Matrix(codes.flatten(1), scales, 4, columns, is_e2m1=True), weights


def fp8_matrix(dice: torch.Generator, rows: int, columns: int) -> Made:
    codes = torch.randint(0, 256, (rows, columns), generator=dice, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0x80  # no number; -0
    scales = 2.0 ** (torch.rand(rows // 128, columns // 128, generator=dice) * 8 - 12)
    if scales.numel() > 3:  # zero, beyond normal numbers, negative
        scales.view(-1)[-3:] = torch.tensor([0.0, 1e-39, -0.011])
    weights = codes.view(torch.float8_e4m3fn)
    return Matrix(weights, scales), Fp8Dequantize(None)._dequantize_one(weights, scales, torch.float32)


def fp8_rows_matrix(dice: torch.Generator, rows: int, columns: int) -> Made:
    """Every number; scales of 0, beyond normal numbers, negative, and such as make what bfloat16 rounds to even."""
    codes = torch.arange(rows * columns).reshape(rows, columns).to(torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0x80
    scales = 2.0 ** (torch.rand(rows, 1, generator=dice) * 8 - 12)
    scales[:4, 0] = torch.tensor([0.0, 1e-39, -0.011, 1 + 2.0**-7])
    weights = codes.view(torch.float8_e4m3fn)
    return Matrix(weights, scales), weights.float() * scales


def nvfp4_matrix(dice: torch.Generator, rows: int, columns: int) -> Made:
    codes = torch.randint(0, 256, (rows, columns // 2), generator=dice, dtype=torch.uint8)
    scales = torch.randint(0, 256, (rows, columns // 16), generator=dice, dtype=torch.uint8)
    scales[scales & 0x7F == 0x7F] = 0x00
    scales, whole = scales.view(torch.float8_e4m3fn), torch.tensor(0.00123)
    numbers = torch.tensor(E2M1)[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1).int()]
    matrix = Matrix(codes, scales, 4, columns, is_e2m1=True, factor=float(whole))
    return matrix, numbers * (scales.float() * whole).repeat_interleave(16, 1)


def int4_matrix(dice: torch.Generator, rows: int, columns: int, group: int, dtype: torch.dtype) -> Made:
    """Every number with many scales: as compressed-tensors' formula has it, codes from 8 below."""
    codes = torch.randint(0, 256, (rows, columns // 2), generator=dice, dtype=torch.uint8)
    scales = torch.randn(rows, columns // group, generator=dice).to(dtype) * 0.02
    scales[0, 0] = 2**-24  # no normal number in float16
    numbers = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1).to(dtype) - 8
    weights = numbers * scales.repeat_interleave(group, 1)
    return Matrix(codes.view(torch.int32), scales, 4, columns), weights.float()


def zeros_matrix(dice: torch.Generator, rows: int, columns: int, group: int, dtype: torch.dtype) -> Made:
    """Every number with every zero point."""
    codes, zeros = (torch.randint(0, 16, (rows, size), generator=dice) for size in (columns, columns // group))
    scales = (torch.randn(rows, columns // group, generator=dice) * 0.02).half()
    scales[0, 0] = 2**-24  # no normal number
    scales = scales.to(dtype)
    weights = (codes - zeros.repeat_interleave(group, 1)) * scales.repeat_interleave(group, 1)
    pairs = codes.byte()
    return Matrix(pairs[:, 0::2] | pairs[:, 1::2] << 4, scales, 4, columns, zeros=zeros.byte()), weights.float()


def gguf_matrix(dice: torch.Generator, rows: int, columns: int, kind: str) -> Made:
    blocks = gguf_blocks(kind, (rows, columns), np.random.default_rng(dice.initial_seed()), std=0.01)
    weights = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    return Matrix(torch.from_numpy(blocks), torch.empty(0)), torch.from_numpy(weights)


def halves_matrix(dice: torch.Generator, rows: int, columns: int, dtype: torch.dtype) -> Made:
    weights = (torch.randn(rows, columns, generator=dice) * 0.01).to(dtype)
    weights[0, :3] = torch.tensor([0.0, -0.0, 2.0**-24])  # the last is no normal number in float16
    return Matrix(weights, torch.empty(0)), weights.float()


MATRICES: dict[str, Callable[[torch.Generator, int, int], Made]] = {
    "mxfp4": mxfp4_matrix,
    "fp8": fp8_matrix,
    "fp8_rows": fp8_rows_matrix,
    "nvfp4_global": nvfp4_matrix,
    "int4_g32": partial(int4_matrix, group=32, dtype=torch.bfloat16),
    "int4_g128": partial(int4_matrix, group=128, dtype=torch.bfloat16),
    "int4_g32_f16": partial(int4_matrix, group=32, dtype=torch.float16),
    "int4_g128_f16": partial(int4_matrix, group=128, dtype=torch.float16),
    "int4_g32_zeros": partial(zeros_matrix, group=32, dtype=torch.bfloat16),
    "int4_g128_zeros": partial(zeros_matrix, group=128, dtype=torch.bfloat16),
    "int4_g32_zeros_f16": partial(zeros_matrix, group=32, dtype=torch.float16),
    "int4_g128_zeros_f16": partial(zeros_matrix, group=128, dtype=torch.float16),
    "bf16": partial(halves_matrix, dtype=torch.bfloat16),
    "f16": partial(halves_matrix, dtype=torch.float16),
    **{one.name: partial(gguf_matrix, kind=one.type) for one in GGUF_FORMATS},
}


@lru_cache(maxsize=4)  # what several tests ask one after the other
def made(form: ExpertFormat, width: int, hidden: int, num_matrices: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An expert's blocks, and its weights [I, M, H]; sizes are in groups."""
    forms = [*form.inner(num_matrices), form.down]
    group = max(one.group for one in forms[:-1])
    width, hidden = width * form.down.group, min(hidden, MOST_HIDDEN // group) * group
    dice = torch.Generator().manual_seed(width)
    shapes = [(width, hidden)] * (num_matrices - 1) + [(hidden, width)]
    matrices = [MATRICES[one.name](dice, *shape) for one, shape in zip(forms, shapes, strict=True)]
    *inner, down = (one.parts_of(matrix) for one, (matrix, _) in zip(forms, matrices, strict=True))
    *weights, last = (weight for _, weight in matrices)
    return torch.from_numpy(np.concatenate(list(form.pack(inner, down)))), torch.stack([*weights, last.T], dim=1)
