"""The compiled products of weights in the tiles of each format: what they decode, and multiply."""

from __future__ import annotations

import itertools
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from expertly.formats import FORMATS, expert_format, tiles
from expertly.formats.gguf import GGUF_FORMATS
from expertly.formats.matrix import Matrix
from expertly.formats.tiles import ExpertFormat
from expertly.native.kernels import TASK_TOKENS, Kernels, libraries
from tests.formats.matrices import MATRICES, SIZES, made
from tests.native.exact import Experts, make_experts
from tests.tables import IS_FULL, pairs

AVAILABLE = libraries()

KERNEL_TOKENS = [*range(1, TASK_TOKENS + 1), 17, 61]
"""Of how many tokens something is computed with the kernels: each format and each library has every other number."""


def name_of(value: Any) -> str:
    return getattr(value, "name", str(value))


MIXED = ("q2_k+iq4_nl+q3_k", "q8_0+iq2_s+nvfp4_global", "nvfp4_global+tq1_0+q4_0", "q4_0+q6_k")
"""Formats of gate, up and down, whose groups differ."""


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> ExpertFormat:
    return expert_format(request.param)


@pytest.mark.parametrize(
    ("form", "library", "sizes"),
    sorted(pairs([*FORMATS, *MIXED], AVAILABLE, SIZES), key=str),
    indirect=["form"],
    ids=name_of,
)
def test_experts(
    form: ExpertFormat, library: Any, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within what rounding and sums in float32 may lose; threads and the other experts of a call change nothing."""
    monkeypatch.setattr(tiles, "_LEAST_SHARE", 1)  # blocks have padding, although they are small
    kernels = Kernels(library, "for a test")
    step = 2 if len(AVAILABLE) > 1 and not IS_FULL else 1
    first = ([*FORMATS, *MIXED].index(form.name) + AVAILABLE.index(library)) % step
    blocks, weights = made(form, *sizes)
    of_blocks = weights.unflatten(0, (len(blocks), -1))
    both = weights, of_blocks.flip(0).flatten(0, 1)
    blocks = torch.cat((blocks, blocks.flip(0)))  # a second expert behind it
    addresses = blocks.data_ptr(), blocks.data_ptr() + blocks.nbytes // 2
    for dtype in (torch.float32,) if form.up in GGUF_FORMATS else kernels.dtypes:  # that GGUF files are computed in
        if form.name.endswith("_f16") and dtype == torch.bfloat16:
            continue  # such experts are converted
        rounded = both[0].to(dtype), both[1].to(dtype)
        experts = make_experts(rounded, addresses, dtype, form.kernels, (blocks.shape[1], 0))
        scale = float(weights.abs().max()) * weights.shape[2] ** 0.5
        for n in KERNEL_TOKENS[first::step]:
            x = torch.randn(n + 3, weights.shape[2], generator=torch.Generator().manual_seed(n)) / scale
            assert_experts(kernels, experts, x.to(dtype), n)


def assert_experts(kernels: Kernels, experts: Experts, x: torch.Tensor, n: int) -> None:
    """Of n tokens: of few another expert has some in the same call, of a prompt's one has all."""
    num_tokens, threads = (n, n) if n <= TASK_TOKENS else (n,), torch.get_num_threads()
    for adds in (False, True):
        found = experts.run(kernels, num_tokens, x, adds=adds)
        try:
            torch.set_num_threads(2 if threads == 1 else 1)
            again = experts.run(kernels, num_tokens, x, adds=adds)
        finally:
            torch.set_num_threads(threads)
        assert all(map(torch.equal, found, again)), "however many threads"
        for expert, out in enumerate(found):
            experts.check(out, expert, x.flip(0)[:n] if expert else x[:n], adds=adds)


@pytest.mark.parametrize("library", AVAILABLE, ids=lambda library: library.name)
def test_a_matrix_by_itself(form: ExpertFormat, library: Any) -> None:
    """Of a linear layer: decoded to the bit, also by tokens that have one number each; multiplied with its bias added
    before the product is rounded.
    """
    kernels, one = Kernels(library, "for a test"), form.up
    rows, columns = 3 * one.group, 2 * one.group
    matrix, weights = MATRICES[one.name](torch.Generator().manual_seed(1), rows, columns)
    blocks = torch.from_numpy(one.pack(one.parts_of(matrix)))
    assert blocks.shape == (rows // 16, one.block_nbytes_of(rows, columns))
    assert torch.equal(one.decode(blocks), weights)
    dice, address = torch.Generator().manual_seed(0), blocks.data_ptr()
    for dtype in (torch.float32,) if one in GGUF_FORMATS else kernels.dtypes:
        if one.name.endswith("_f16") and dtype == torch.bfloat16:
            continue
        part = torch.full((rows - 16, columns), torch.nan, dtype=dtype)
        kernels.tile_decode(one.kernel, blocks[1:].data_ptr(), part)
        assert torch.equal(part, weights[16:].to(dtype))
        bias, exact = torch.randn(rows, generator=dice).to(dtype), weights.to(dtype)
        for added, num_tokens in itertools.product((None, bias), (1, 2, TASK_TOKENS, 100)):
            x = torch.randn(num_tokens, columns, generator=dice).to(dtype)
            out = torch.full((num_tokens, rows), torch.nan, dtype=dtype)
            kernels.dots(address, x, out, blocks.shape[1], added, one.kernel)
            wanted = x.double() @ exact.double().T + (0 if added is None else added.double())
            bound = torch.finfo(dtype).eps / 2 * wanted.abs() + 2**-21 * columns * exact.double().abs().max()
            assert bool(((out.double() - wanted).abs() <= bound).all())
        for x in (torch.eye(columns, dtype=dtype), *torch.eye(columns, dtype=dtype).split(TASK_TOKENS)):
            out = torch.full((len(x), rows), torch.nan, dtype=dtype)
            kernels.dots(address, x, out, blocks.shape[1], None, one.kernel)
            wanted = exact.T[x.argmax(1)]
            assert bool(((out == wanted) | (wanted.abs() < torch.finfo(dtype).tiny) & (out == 0)).all())


gguf.quants.IQ3_XXS.init_grid()
LARGEST = int(np.asarray(gguf.quants.IQ3_XXS.grid).sum(axis=-1).argmax())
"""A row of IQ3_XXS's grid."""


@pytest.mark.parametrize("library", AVAILABLE, ids=lambda library: library.name)
@pytest.mark.parametrize("sign", [1, -1])
def test_codes_and_inputs_as_large_as_can_be(library: Any, sign: int) -> None:
    """Sums of products may have 16 bits, and inputs are multiplied in digits of 8: of -128, with the largest codes."""
    kernels, x = Kernels(library, "for a test"), torch.full((1, 512), sign * (33 * 2**16 - 2**15 - 2**7) / 2**21)
    for one in (*GGUF_FORMATS, *(FORMATS[name] for name in ("int4_g32", "int4_g128_f16", "int4_g128_zeros"))):
        halves = getattr(one, "_halves", None)
        if halves == ():
            continue  # scales in other forms than float16
        if halves is None:
            codes, scales = torch.full((16, 256), 255, dtype=torch.uint8), torch.ones(16, 512 // one.group)
            zeros = torch.zeros(16, 512 // one.group, dtype=torch.uint8) if "zeros" in one.name else None
            scales = scales.to(torch.float16 if one.name.endswith("_f16") else torch.bfloat16)
            matrix = Matrix(codes if zeros is not None else codes.view(torch.int32), scales, 4, 512, zeros=zeros)
        else:
            blocks = np.full((16, 512 // one.group, one.tile_nbytes // 16), 255, np.uint8)
            for place in halves:
                blocks[..., place], blocks[..., place + 1] = 0, 0x3C
            if one.type == "IQ3_XXS":  # the largest of a grid's numbers, above 0, with the largest scale
                blocks[..., 2:66], blocks[..., 66:] = LARGEST, np.array([0, 0, 0, 0xF0] * 8)
            matrix = Matrix(torch.from_numpy(blocks), torch.empty(0))
        packed = torch.from_numpy(one.pack(one.parts_of(matrix)))
        weights, out = one.decode(packed).double(), torch.full((1, 16), torch.nan)
        kernels.dots(packed.data_ptr(), x, out, packed.shape[1], None, one.kernel)
        bound = 2**-19 * (weights.abs() @ x[0].double().abs())
        assert bool(((out[0] - weights @ x[0].double()).abs() <= bound).all()), one.name
