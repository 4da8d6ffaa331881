"""The compiled products of weights in the tiles of each format: what they decode, and multiply."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from expertly.formats import FORMATS, expert_format, tiles
from expertly.formats.gguf import GGUF_FORMATS
from expertly.formats.tiles import ExpertFormat
from expertly.native.kernels import NO_DOWN, TASK_TOKENS, Kernels, libraries
from tests.formats.matrices import MATRICES, SIZES, made
from tests.native.between import down_products, inner_products, with_biases
from tests.tables import IS_FULL, pairs

AVAILABLE = libraries()

KERNEL_TOKENS = {"decoded": (), "few": range(1, 9), "a task": range(9, TASK_TOKENS + 1), "many": (17, 61)}
"""What is computed with the kernels, and of how many tokens: each format and each library has every other number."""


def name_of(value: Any) -> str:
    return getattr(value, "name", str(value))


MIXED = ("q2_k+iq4_nl+q3_k", "q8_0+iq2_s+nvfp4", "nvfp4+tq1_0+q4_0", "q4_0+q6_k")
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
@pytest.mark.parametrize("part", KERNEL_TOKENS)
def test_products(
    form: ExpertFormat, library: Any, sizes: tuple[int, int, int], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoded weights to the bit; products within what sums in float32 may lose. Threads and the other experts of a
    call change nothing.
    """
    monkeypatch.setattr(tiles, "_LEAST_SHARE", 1)  # blocks have padding, although they are small
    kernels = Kernels(library, "for a test")
    step = 2 if len(AVAILABLE) > 1 and not IS_FULL else 1
    first = ([*FORMATS, *MIXED].index(form.name) + AVAILABLE.index(library)) % step
    blocks, weights = made(form, *sizes)
    blocks = torch.cat((blocks, blocks.flip(0)))  # a second expert behind it
    for dtype in (torch.float32,) if form.up in GGUF_FORMATS else kernels.dtypes:  # that GGUF files are computed in
        if form.name.endswith("_f16") and dtype == torch.bfloat16:
            continue  # such experts are converted
        if part == "decoded":
            assert_decoded(kernels, form, blocks, weights.to(dtype))
        for n in KERNEL_TOKENS[part][first::step]:
            assert_products(kernels, form, blocks, weights.to(dtype), n)


def assert_decoded(kernels: Kernels, form: ExpertFormat, blocks: torch.Tensor, weights: torch.Tensor) -> None:
    """Tokens that have one number each find the weights, to the bit; denormal ones may count as 0."""
    (width, num_matrices, hidden), dtype, address = weights.shape, weights.dtype, blocks.data_ptr()
    inner, down = torch.empty(num_matrices - 1, hidden, width, dtype=dtype), torch.empty(width, hidden, dtype=dtype)
    inner_products(
        kernels, (address, 0, hidden, 0), torch.eye(hidden, dtype=dtype), inner, blocks.shape[1], formats=form.kernels
    )
    down_products(
        kernels,
        (address, 0, width, 0),
        torch.eye(width, dtype=dtype),
        down,
        blocks.shape[1],
        num_matrices - 1,
        form.kernels,
    )
    found = torch.cat((inner.permute(2, 0, 1), down[:, None]), dim=1)
    assert bool(((found == weights) | (weights.abs() < torch.finfo(dtype).tiny) & (found == 0)).all())


def assert_products(kernels: Kernels, form: ExpertFormat, blocks: torch.Tensor, weights: torch.Tensor, n: int) -> None:
    """Of n of several prepared tokens: of few another expert has some in the same call, of a prompt's one has all."""
    (width, num_matrices, hidden), dtype = weights.shape, weights.dtype
    dice, exact, address = torch.Generator().manual_seed(n), weights.double(), blocks.data_ptr()
    x, h = (torch.randn(n + 3, size, generator=dice).to(dtype) for size in (hidden, width))
    inner = torch.full((num_matrices - 1, 2 * n + 1, width), 7.0, dtype=dtype)
    down, added = torch.full((2 * n + 1, hidden), 7.0, dtype=dtype), torch.full((n + 1, hidden), 7.0)
    task = (address, 2, n, 1)
    tasks = (*task, address + blocks.nbytes // 2, 0, n, n + 1) if n <= TASK_TOKENS else task
    inner_products(kernels, tasks, x, inner, blocks.shape[1], formats=form.kernels)
    down_products(kernels, tasks, h, down, blocks.shape[1], num_matrices - 1, form.kernels)
    down_products(kernels, task, h, added, blocks.shape[1], num_matrices - 1, form.kernels, adds=True)
    wanted_inner = torch.einsum("nh,imh->mni", x[2 : n + 2].double(), exact[:, :-1])
    wanted_down, most = h[2 : n + 2].double() @ exact[:, -1], float(exact.abs().max())
    for found, wanted, magnitude in (
        (inner, wanted_inner, hidden),
        (down, wanted_down, width),
        (added, 7 + wanted_down, width),
    ):
        before, found = found[..., 0, :], found[..., 1 : n + 1, :]
        bound = torch.finfo(found.dtype).eps * wanted.abs() + 2**-22 * magnitude * most
        assert bool((before == 7).all()) and bool(((found.double() - wanted).abs() <= bound).all())
    other, threads = torch.empty(n, hidden, dtype=dtype), torch.get_num_threads()
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        down_products(kernels, (address, 2, n, 0), h, other, blocks.shape[1], num_matrices - 1, form.kernels)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(other, down[1 : n + 1]), "however many threads"
    assert_one_call(kernels, form, blocks, x[2 : n + 2], (width, hidden, num_matrices))


def assert_one_call(
    kernels: Kernels, form: ExpertFormat, blocks: torch.Tensor, x: torch.Tensor, shape: tuple[int, int, int]
) -> None:
    """An expert in one call is its two products, with biases, and torch between them: to the bit in 16 bits, where the
    activation is a table; in float32 within what silu may differ by.
    """
    (width, hidden, num_matrices), n, address = shape, len(x), blocks.data_ptr()
    layer = with_biases(x.dtype, num_matrices - 1, hidden, width, form.kernels, (blocks.shape[1], 0))
    inner, expected = x.new_empty(num_matrices - 1, n, width), x.new_empty(n, hidden)
    inner_products(kernels, (address, 0, n, 0), x, inner, blocks.shape[1], formats=form.kernels)
    down_products(
        kernels, (address, 0, n, 0), layer.between(inner), expected, blocks.shape[1], num_matrices - 1, form.kernels
    )
    out = torch.full_like(expected, torch.nan)
    kernels.experts(layer.products, (address, n, 1), range(n), range(n), x, out, width, 0, adds=False)
    layer.assert_same(out, expected + layer.down_bias)
    added = torch.ones(n, hidden)
    kernels.experts(layer.products, (address, n, 1), range(n), range(n), x, added, width, 0, adds=True)
    off = (added - 1 - expected).abs() > 2**-6 * (1 + expected.abs())
    assert not bool((off & expected.isfinite()).any()), "no bias, not rounded"


@pytest.mark.parametrize("library", AVAILABLE, ids=lambda library: library.name)
def test_a_matrix_by_itself(form: ExpertFormat, library: Any) -> None:
    """Of a linear layer: decoded to the bit, multiplied with its bias added before the product is rounded."""
    kernels, one = Kernels(library, "for a test"), form.up
    rows, columns = 3 * one.group, 2 * one.group
    matrix, weights = MATRICES[one.name](torch.Generator().manual_seed(1), rows, columns)
    blocks = torch.from_numpy(one.pack(one.parts_of(matrix)))
    assert blocks.shape == (rows // 16, one.block_nbytes_of(rows, columns))
    assert torch.equal(one.decode(blocks), weights)
    formats, dice = (one.kernel, one.kernel, NO_DOWN), torch.Generator().manual_seed(0)
    for dtype in (torch.float32,) if one in GGUF_FORMATS else kernels.dtypes:
        if one.name.endswith("_f16") and dtype == torch.bfloat16:
            continue
        part = torch.full((rows - 16, columns), torch.nan, dtype=dtype)
        kernels.tile_decode(one.kernel, blocks[1:].data_ptr(), part)
        assert torch.equal(part, weights[16:].to(dtype))
        bias, address = torch.randn(rows, generator=dice).to(dtype), blocks.data_ptr()
        cases = (2, (address, 0, 1, 0, address, 1, 1, 1)), (100, (address, 0, 100, 0))
        for added, (num_tokens, tasks) in itertools.product((None, bias), cases):
            x = torch.randn(num_tokens, columns, generator=dice).to(dtype)
            out = torch.full((1, num_tokens, rows), torch.nan, dtype=dtype)
            inner_products(kernels, tasks, x, out, blocks.shape[1], bias=added, formats=formats)
            exact = weights.to(dtype).double()
            wanted = x.double() @ exact.T + (0 if added is None else added.double())
            bound = torch.finfo(dtype).eps / 2 * wanted.abs() + 2**-21 * columns * exact.abs().max()
            assert bool(((out[0].double() - wanted).abs() <= bound).all())
