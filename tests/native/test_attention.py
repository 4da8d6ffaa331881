"""The compiled attention against the formula in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from expertly.model.kv_codes import decoded, encoded
from expertly.native.kernels import Kernels, Library, choose_kernels, libraries

AVAILABLE = libraries()

SHAPES = [  # sequences, heads, key heads, tokens, keys, widths of keys and of values
    (1, 8, 2, 1, 1, 32, 32),
    (1, 8, 2, 1, 300, 64, 64),
    (2, 4, 4, 3, 257, 80, 48),
    (1, 6, 2, 16, 600, 192, 128),
    (1, 8, 2, 64, 300, 32, 32),
    (3, 5, 5, 1, 13, 20, 7),
]
CLOSE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-6}


def attention_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As it is written down, in float64."""
    groups, num_keys = q.shape[1] // k.shape[1], k.shape[2]
    k, v = (one.double().repeat_interleave(groups, 1) for one in (k, v))
    scores = q.double() @ k.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    return (scores.softmax(dim=-1)[..., :num_keys] @ v).transpose(1, 2)


@pytest.mark.parametrize("library", AVAILABLE, ids=lambda library: library.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(library: Library, shape: tuple[int, ...]) -> None:
    batch, heads, key_heads, tokens, keys, key_width, value_width = shape
    dice = torch.Generator().manual_seed(0)
    kernels = Kernels(library, "")
    for dtype in CLOSE.keys() & library.dtypes.keys():
        q = torch.randn(batch, tokens, heads, key_width, generator=dice).to(dtype).transpose(1, 2)
        k = torch.randn(batch, keys, key_heads, key_width, generator=dice).to(dtype).transpose(1, 2)
        v = torch.randn(batch, key_heads, keys, value_width, generator=dice).to(dtype)
        seen = torch.rand(batch, 1, tokens, keys, generator=dice) > 0.3
        seen[..., 0] = True
        added = torch.randn(1, heads, tokens, keys, generator=dice).to(dtype)
        ways: list[dict[str, Any]] = [
            {},
            {"softcap": 3.0},
            {"sinks": torch.randn(heads, generator=dice).to(dtype)},
            {"mask": seen},
            {"mask": added},
        ]
        for way in ways:
            got = kernels.attention(q, k, v, key_width**-0.5, **way)
            expected = attention_of(q, k, v, key_width**-0.5, **way)
            assert got.shape == expected.shape and got.is_contiguous()
            assert (got.double() - expected).abs().max() < CLOSE[dtype] * expected.abs().max(), (dtype, way.keys())


@pytest.mark.parametrize("library", AVAILABLE, ids=lambda library: library.name)
@pytest.mark.parametrize("heads", [4, 6, 16])
def test_keys_of_other_sequences_are_left_out(library: Library, heads: int) -> None:
    """Sixteen sequences side by side, as continuous batching has them: each is as alone, and most do not even read the
    keys of the first, which are NaN.
    """
    num, lengths, kernels = 16, [60, 1, 300, *range(40, 53)], Kernels(library, "")
    dice = torch.Generator().manual_seed(0)
    ends = [sum(lengths[: i + 1]) for i in range(num)]
    for dtype in CLOSE.keys() & library.dtypes.keys():
        q = torch.randn(1, heads, num, 32, generator=dice).to(dtype)
        k, v = (torch.randn(1, 2, ends[-1], 32, generator=dice).to(dtype) for _ in range(2))
        mask = torch.full((1, 1, num, ends[-1]), torch.finfo(dtype).min, dtype=dtype)
        for i, (end, length) in enumerate(zip(ends, lengths, strict=True)):
            mask[..., i, end - length : end] = 0
        k[..., : lengths[0], :] = torch.nan
        for given in (mask, mask == 0):
            together = kernels.attention(q, k, v, 0.2, given)
            for i in range(4, num):
                own = slice(ends[i] - lengths[i], ends[i])
                alone = attention_of(q[:, :, i : i + 1], k[:, :, own], v[:, :, own], 0.2)
                error = (together[:, i : i + 1].double() - alone).abs().max()
                assert error < CLOSE[dtype] * alone.abs().max(), (dtype, i)


def test_threads_change_nothing_and_nan_is_passed_on() -> None:
    kernels = choose_kernels()
    q, k, v = (torch.randn(1, heads, num, 128).bfloat16() for heads, num in ((8, 1), (4, 2000), (4, 2000)))
    before = torch.get_num_threads()
    try:
        results = []
        for num in (1, 2):
            torch.set_num_threads(num)
            results.append(kernels.attention(q, k, v, 0.1))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)
    k[0, 0, 1234, 5] = torch.nan
    out = kernels.attention(q, k, v, 0.1)
    assert out[0, 0, :2].isnan().all() and not out[0, 0, 2:].isnan().any(), "the heads of that key head"
    q, mask = torch.randn(1, 8, 3, 128).bfloat16(), torch.zeros(1, 1, 3, 2000, dtype=torch.bool)
    mask[..., 1:, :20] = True
    for given in (mask, torch.zeros(mask.shape).bfloat16().masked_fill(~mask, torch.finfo(torch.bfloat16).min)):
        assert not kernels.attention(q, v, v, 0.1, given)[:, 0].any(), "who sees nothing is zero"


@pytest.mark.parametrize("library", AVAILABLE, ids=lambda library: library.name)
def test_keys_and_values_are_read_where_they_lie(library: Library) -> None:
    """In the pages of a cache, of several sequences: the same bits as of a copy. None outside it is read."""
    kernels, generator = Kernels(library, ""), torch.Generator().manual_seed(0)
    q = torch.randn(1, 6, 3, 32, generator=generator)
    keys, values = torch.randn(2, 900, 2, 32, generator=generator).transpose(1, 2).unsqueeze(1)
    positions = torch.randperm(900, generator=generator)[:700]
    mask = torch.zeros(1, 1, 3, 700, dtype=torch.bool)
    for token, seen in enumerate((slice(0, 300), slice(300, 310), slice(310, 700))):
        mask[..., token, seen] = True
    copies = keys.index_select(2, positions), values.index_select(2, positions)
    expected = kernels.attention(q, *copies, 0.2, mask)
    assert torch.equal(kernels.attention(q, keys, values, 0.2, mask, positions=positions), expected)
    for outside in (-1, 900):
        positions[5] = outside
        with pytest.raises(MemoryError):
            kernels.attention(q, keys, values, 0.2, mask, positions=positions)


@pytest.mark.parametrize("library", AVAILABLE, ids=lambda library: library.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_keys_and_values_in_8_bits(library: Library, shape: tuple[int, ...]) -> None:
    """Codes are torch's to the bit, and attention is that over what they say, also at places of a cache."""
    batch, heads, key_heads, tokens, keys, key_width, value_width = shape
    dice, kernels = torch.Generator().manual_seed(0), Kernels(library, "")
    for dtype in CLOSE.keys() & library.dtypes.keys():
        q = torch.randn(batch, heads, tokens, key_width, generator=dice).to(dtype)
        k = torch.randn(batch, key_heads, keys, key_width, generator=dice)
        k = (k * torch.randn(key_heads, 1, key_width, generator=dice).exp()).to(dtype)
        v = torch.randn(batch, key_heads, keys, value_width, generator=dice).to(dtype)
        k[0, 0, 0] = 0
        factors = k.float().abs().amax((0, 2)).clamp_min(1e-3)
        codes = kernels.encode(k, factors), kernels.encode(v)
        assert torch.equal(codes[0], encoded(k, factors[:, None])) and torch.equal(codes[1], encoded(v))
        numbers = decoded(codes[0], torch.float32, factors[:, None]), decoded(codes[1], torch.float32)
        seen = torch.rand(batch, 1, tokens, keys, generator=dice) > 0.3
        seen[..., 0] = True
        expected = attention_of(q, *numbers, key_width**-0.5, seen)
        made = kernels.attention(q, *codes, key_width**-0.5, seen, factors=factors)
        assert (made.double() - expected).abs().max() < CLOSE[dtype] * expected.abs().max()
        if batch == 1:
            places = torch.randperm(2 * keys, generator=dice)[:keys]
            memory = [rows.new_zeros(1, key_heads, 2 * keys, rows.shape[3]) for rows in codes]
            for place, rows in zip(memory, codes, strict=True):
                place[:, :, places] = rows
            arguments = {"positions": places, "factors": factors}
            assert torch.equal(kernels.attention(q, *memory, key_width**-0.5, seen, **arguments), made)
        v[0, 0, 0, 0] = torch.nan
        made = kernels.attention(q, codes[0], kernels.encode(v), key_width**-0.5, seen, factors=factors)
        assert made[0, :, : heads // key_heads].isnan().any(), "what is no number is passed on"
