"""Triton kernels for experts in an accelerator's slots: two launches a layer, for whole experts and segments alike.

`_inner_kernel` makes the activations of every span into a scratch; `_down_kernel` sums an expert's down rows over its
spans. `_combine_kernel` weighs and sums experts' outputs. A plan tells a launch which slots and rows to use: one list
of numbers, copied to the device asynchronously, or made there by `_find_kernel` while the host does not know yet which
experts are chosen. Nothing here makes the host wait.

Memory traffic: each byte of a span is read once, whatever the number of tokens: two thirds of them (gate and up) by the
first kernel, the rest by the second. What else moves is a token's H inputs and I activations for each program, out of
the L2 cache. So a call is to take the bytes of its spans over the card's bandwidth, and two launches. Loads are runs of
512 bytes or more along a row in the first kernel, and of 128 or more, a strip of neighbouring rows, in the second; the
next ones are on their way while one is multiplied. One token multiplies elementwise in float32 and sums at the end;
more go through `tl.dot`, padded to 16 or 32. Block sizes fit the 99 KiB of shared memory of consumer cards.

Weights are rounded to the layer's dtype where it computes, sums are float32, and what is rounded is rounded as torch
does it: gate and up, with their biases; the activation; an expert's output, before and after its bias.

Shapes: T tokens, K top-k, H hidden, I intermediate, M matrices of an expert, n tokens of one expert, r neurons of one
span; G inputs and 16 outputs a tile of a format (formats/tiles.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from subprocess import SubprocessError
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn.functional import silu

from expertly.core.geometry import LayerGeometry
from expertly.core.messages import Span
from expertly.formats import expert_format
from expertly.formats.tiles import TILE_OUTPUTS
from expertly.native.activations import Activation, recognise
from expertly.native.kernels import Kernels, Work

MAX_TOKENS = 32
"""Most tokens of a pass: with more, an expert's weights are worth decoding once for torch's products."""

_NUM_FIELDS = 8
"""Numbers of a span, and of an expert, in a plan."""

_STRIP = 64
"""Outputs of a program that sums down rows."""

_PROGRAMS = 512
"""At least as many sum a token's down rows, where these are enough: several for each of a card's processors."""

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_TILE, _FIELDS = tl.constexpr(TILE_OUTPUTS), tl.constexpr(_NUM_FIELDS)
_CONTINUES, _ENDS = tl.constexpr(1), tl.constexpr(2)  # of an expert: other spans of it came before; no others come
_E2M1, _E4M3 = tl.constexpr(2.0**126), tl.constexpr(2.0**120)  # from the least exponents of float32 to those of a code

# -- numbers -----------------------------------------------------------------------------------------------------------


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """Float32 numbers as they are in `dtype`, to nearest even. Triton's interpreter cuts bfloat16 off instead."""
    if dtype == tl.bfloat16 and _INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        rounded = tl.where(x == x, even, 0x7FC00000).to(tl.float32, bitcast=True)
    else:
        rounded = x.to(dtype).to(tl.float32)
    return rounded


@triton.jit
def _places(x, dtype: tl.constexpr):
    """Where rounded numbers are in a table by their 16 bits."""
    if dtype == tl.bfloat16:
        places = x.to(tl.uint32, bitcast=True) >> 16
    else:
        places = x.to(tl.float16).to(tl.uint16, bitcast=True)
    return places.to(tl.int32)


@triton.jit
def _product(x, weights, total, BT: tl.constexpr, dtype: tl.constexpr):
    """`total` [BT, N] + x [BT, K] @ weights [K, N] of `dtype`. One token is x [K]; `total` [K, N] is to be summed."""
    if BT == 1:
        total += weights.to(tl.float32) * x.to(tl.float32)[:, None]
    elif dtype == tl.float32 or _INTERPRETED:  # whose product of bfloat16 is wrong
        total = tl.dot(x.to(tl.float32), weights.to(tl.float32), total, input_precision="ieee")
    else:
        total = tl.dot(x, weights.to(dtype), total)
    return total


# -- weights of formats ------------------------------------------------------------------------------------------------
# Of tiles at addresses [KT, N], or [KT, 1] where all outputs are of one, each with the output [N] of its 16 that is
# wanted: float32 [KT * G, N]. Of tiles of 256 inputs one `part` [KT] of 64: float32 products of more inputs at a time
# need more registers than there are.


@triton.jit
def _words(tiles, place):
    """Four bytes each at addresses [KT, N] plus words [words, N]: [KT, words, N]. Addresses are added to as those of
    words, or the compiler does not see that some lie side by side, and loads each by itself.
    """
    return tl.load(tiles.to(tl.pointer_type(tl.uint32))[:, None, :] + place[None, :, :])


@triton.jit
def _dwords(tiles, of, NUM: tl.constexpr):
    """Those that lie 16 outputs after the other."""
    return _words(tiles, (tl.arange(0, NUM) * 16)[:, None] + of[None, :])


@triton.jit
def _nibbles(words):
    """Codes of 4 bits [..., words, 8, N], the first in the lowest bits, of [..., words, N]."""
    return (words[:, :, None, :] >> (tl.arange(0, 8) * 4)[None, None, :, None]) & 15


@triton.jit
def _bytes(tiles, AT: tl.constexpr, of):
    """A tile's bytes [N] behind the first AT, a number each: of words, as less than one is not loaded in advance."""
    words = tl.load(tiles.to(tl.pointer_type(tl.uint32)) + (AT // 4 + of // 4)[None, :])
    return (words >> (of % 4 * 8)[None, :]) & 255


@triton.jit
def _halves(tiles, AT: tl.constexpr, of, SCALES: tl.constexpr):
    words = tl.load(tiles.to(tl.pointer_type(tl.uint32)) + (AT // 4 + of // 2)[None, :])
    bits = (words >> (of % 2 * 16)[None, :]) & 0xFFFF
    return bits.to(tl.uint16).to(SCALES, bitcast=True).to(tl.float32)


@triton.jit
def _numbers(codes, LESS: tl.constexpr):
    """Codes minus LESS as float32: in two cheap steps, where a conversion takes longer than both."""
    return (codes | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + LESS)


@triton.jit
def _flat(values):
    return tl.reshape(values, (values.shape[0] * values.shape[1] * values.shape[2], values.shape[3]))


@triton.jit
def _mxfp4(tiles, part, of, FORM: tl.constexpr):
    codes = _nibbles(_dwords(tiles, of, 4))
    values = (((codes & 7) << 22) | ((codes & 8) << 28)).to(tl.float32, bitcast=True) * _E2M1
    powers = _bytes(tiles, 256, of)
    scales = tl.where(powers == 0, 0x00400000, powers << 23).to(tl.float32, bitcast=True)
    return _flat(values * scales[:, None, None, :])


@triton.jit
def _fp8(tiles, part, of, FORM: tl.constexpr):
    words = _dwords(tiles, of, 32)
    moved = words[:, :, None, :] >> (tl.arange(0, 4) * 8)[None, None, :, None]
    bits = ((moved & 0xF0) << 19) | ((moved & 7) << 20) | ((moved & 8) << 28)
    values = bits.to(tl.float32, bitcast=True) * _E4M3
    scales = tl.load((tiles + 2048).to(tl.pointer_type(tl.float32)))
    return _flat(values * scales[:, None, None, :])


@triton.jit
def _int4(tiles, part, of, FORM: tl.constexpr):
    """FORM: G, the scales' dtype, and whether there are zero points."""
    G: tl.constexpr = FORM[0]
    number = tl.arange(0, G // 8)
    place = ((number // 4) * 64 + number % 4)[:, None] + (of * 4)[None, :]
    codes = _numbers(_nibbles(_words(tiles, place)), 0 if FORM[2] else 8)
    scales = _halves(tiles, G * 8, of, FORM[1])
    if FORM[2]:
        zeros = ((_bytes(tiles, G * 8 + 32, of // 2) >> (of % 2 * 4)[None, :]) & 15).to(tl.float32)
        codes = codes - zeros[:, None, None, :]
    return _flat(_rounded(codes * scales[:, None, None, :], FORM[1]))


@triton.jit
def _q4_0(tiles, part, of, FORM: tl.constexpr):
    scales = _halves(tiles, 256, of, tl.float16)
    return _flat(_numbers(_nibbles(_dwords(tiles, of, 4)), 8) * scales[:, None, None, :])


@triton.jit
def _q8_0(tiles, part, of, FORM: tl.constexpr):
    moved = _dwords(tiles, of, 8)[:, :, None, :] << (24 - tl.arange(0, 4) * 8)[None, None, :, None]
    scales = _halves(tiles, 512, of, tl.float16)
    codes = (moved.to(tl.int32, bitcast=True) >> 24).to(tl.float32) * scales[:, None, None, :]
    # Of every 8 inputs those at even places are one word, those at odd ones the next.
    codes = tl.permute(tl.reshape(codes, (tiles.shape[0], 4, 2, 4, of.shape[0])), (0, 1, 3, 2, 4))
    return tl.reshape(codes, (tiles.shape[0] * 32, of.shape[0]))


@triton.jit
def _k_codes(tiles, part, of, BITS: tl.constexpr, NUM: tl.constexpr):
    """Of parts, codes [KT, NUM, 64 / NUM, N] of 4 bits and `BITS` more. These are a word for inputs with the same
    scale: in its first byte of inputs 0, 1, 8, 9, 16, ..., then of 2, 3, 10, ...
    """
    WIDTH: tl.constexpr = 64 // NUM
    codes = _nibbles(_dwords(tiles + (part * 512)[:, None], of, 8))
    codes = tl.reshape(codes, (tiles.shape[0], NUM, WIDTH, of.shape[0]))
    if BITS:
        number = tl.arange(0, WIDTH)
        shift = number % 8 // 2 * 8 + (number // 8 * 2 + number % 2) * BITS
        words = _dwords(tiles + (2048 + part * (NUM * 64))[:, None], of, NUM)
        codes |= ((words[:, :, None, :] >> shift[None, None, :, None]) & ((1 << BITS) - 1)) << 4
    return _numbers(codes, 0)


@triton.jit
def _q4_k(tiles, part, of, BITS: tl.constexpr):
    """Q4_K, and Q5_K with BITS = 1. A scale and a minimum are 6 bits each of three words of a tile."""
    AT: tl.constexpr = 2048 + 512 * BITS
    number = ((part * 2)[:, None] + tl.arange(0, 2)[None, :])[:, :, None]
    words = tiles.to(tl.pointer_type(tl.uint32)) + (AT // 4 + of)[None, :]
    moved = number % 4 * 8
    low, high = (tl.load(words)[:, None, :] >> moved) & 255, (tl.load(words + 16)[:, None, :] >> moved) & 255
    both, is_low = (tl.load(words + 32)[:, None, :] >> moved) & 255, number < 4
    scales = tl.where(is_low, low & 63, (both & 15) | (low >> 6 << 4)).to(tl.float32)
    minima = tl.where(is_low, high & 63, (both >> 4) | (high >> 6 << 4)).to(tl.float32)
    scales = scales * _halves(tiles, AT + 192, of, tl.float16)[:, None, :]
    minima = minima * _halves(tiles, AT + 224, of, tl.float16)[:, None, :]
    return _flat(_k_codes(tiles, part, of, BITS, 2) * scales[:, :, None, :] - minima[:, :, None, :])


@triton.jit
def _q6_k(tiles, part, of, FORM: tl.constexpr):
    number = (part * 4)[:, None] + tl.arange(0, 4)[None, :]
    places = (768 + number * 4)[:, :, None] + (of // 4)[None, None, :]
    words = tl.load(tiles.to(tl.pointer_type(tl.uint32))[:, None, :] + places) << (24 - of % 4 * 8)[None, None, :]
    scales = (words.to(tl.int32, bitcast=True) >> 24).to(tl.float32)
    scales = scales * _halves(tiles, 3328, of, tl.float16)[:, None, :]
    return _flat((_k_codes(tiles, part, of, 2, 4) - 32.0) * scales[:, :, None, :])


# -- the kernels -------------------------------------------------------------------------------------------------------


@triton.jit
def _inner_weights(
    slot, MATRIX: tl.constexpr, begin, num, k, H: tl.constexpr, M: tl.constexpr, DECODE: tl.constexpr,
    FORM: tl.constexpr, ROUNDS: tl.constexpr, G: tl.constexpr, PART: tl.constexpr, TILE_NBYTES: tl.constexpr,
    B: tl.constexpr, BLOCK_NBYTES: tl.constexpr, dtype: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """[BK, BN] of inputs from `k` on and neurons from `begin` on, of `num` in a slot."""
    of = tl.arange(0, BN)
    if DECODE is None:
        inputs, neurons = k + tl.arange(0, BK), begin + of
        is_there = (inputs < H)[:, None] & (neurons < num)[None, :]
        place = (neurons * (M * H) + MATRIX * H)[None, :] + inputs[:, None]
        weights = tl.load(slot + place, mask=is_there, other=0.0, eviction_policy="evict_first")
    else:
        parts = tl.minimum(k // PART + tl.arange(0, BK // PART), H // PART - 1)  # what is beyond is multiplied with 0
        first = (MATRIX * (B // _TILE) + begin % B // _TILE) * (H // G)
        place = begin // B * BLOCK_NBYTES + (first + parts // (G // PART)) * TILE_NBYTES
        weights = DECODE(slot + place[:, None], parts % (G // PART), of, FORM)
        if ROUNDS:
            weights = _rounded(weights, dtype)
    return weights


@triton.jit(do_not_specialize=["tokens_at", "rows_at"])
def _inner_kernel(
    slots, x, h, plan, f, g, gate_bias, up_bias, tokens_at, rows_at,
    H: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, SLOT: tl.constexpr, DECODE: tl.constexpr, FORM: tl.constexpr,
    ROUNDS: tl.constexpr, G: tl.constexpr, PART: tl.constexpr, TILE_NBYTES: tl.constexpr, B: tl.constexpr,
    BLOCK_NBYTES: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Activations of BN neurons of a span for all its tokens, into `h` [rows, I]. `SLOT`: numbers, or bytes, a slot."""
    dtype: tl.constexpr = x.dtype.element_ty
    span = plan + tl.program_id(0) * _FIELDS
    num, begin = tl.load(span + 3), tl.program_id(1) * BN
    if begin >= num:
        return
    slot = slots + tl.load(span).to(tl.int64) * SLOT
    row, numbers = tl.load(span + 4), tl.arange(0, BT)
    is_token = numbers < tl.load(span + 5)
    tokens = tl.load(plan + tokens_at + row + numbers, mask=is_token, other=0)
    gate = tl.zeros((BK if BT == 1 else BT, BN), tl.float32)
    up = gate
    for k in tl.range(0, H, BK, num_stages=STAGES):
        inputs = k + tl.arange(0, BK)
        if BT == 1:
            values = tl.load(x + tokens * H + inputs, mask=inputs < H, other=0.0)
        else:
            place = (tokens * H)[:, None] + inputs[None, :]
            values = tl.load(x + place, mask=is_token[:, None] & (inputs < H)[None, :], other=0.0)
        weights = _inner_weights(
            slot, 0, begin, num, k, H, M, DECODE, FORM, ROUNDS, G, PART, TILE_NBYTES, B, BLOCK_NBYTES, dtype, BN, BK
        )
        gate = _product(values, weights, gate, BT, dtype)
        if M == 3:
            weights = _inner_weights(
                slot, 1, begin, num, k, H, M, DECODE, FORM, ROUNDS, G, PART, TILE_NBYTES, B, BLOCK_NBYTES, dtype, BN, BK
            )
            up = _product(values, weights, up, BT, dtype)
    neurons = begin + tl.arange(0, BN)
    is_neuron = neurons < num
    neurons += tl.load(span + 2)
    biases = tl.load(span + 1) * WIDTH + neurons
    active = _activation_input(gate, gate_bias, biases, is_neuron, BT, dtype)
    active = active / (1.0 + tl.exp(-active)) if f is None else tl.load(f + _places(active, dtype)).to(tl.float32)
    if M == 3:
        factor = _activation_input(up, up_bias, biases, is_neuron, BT, dtype)
        if g is not None:
            factor = tl.load(g + _places(factor, dtype)).to(tl.float32)
        active = active * factor
    rows = tl.load(plan + rows_at + row + numbers, mask=is_token, other=0)
    place = (rows * WIDTH)[:, None] + neurons[None, :]
    active = _rounded(active, dtype).to(h.dtype.element_ty)
    tl.store(h + place, active, mask=is_token[:, None] & is_neuron[None, :])


@triton.jit
def _activation_input(total, bias, biases, is_neuron, BT: tl.constexpr, dtype: tl.constexpr):
    """[BT, BN] from the sums of a matrix, rounded, and with its bias rounded again."""
    if BT == 1:
        total = tl.sum(total, axis=0)[None, :]
    total = _rounded(total, dtype)
    if bias is not None:
        total = _rounded(total + tl.load(bias + biases, mask=is_neuron, other=0.0).to(tl.float32)[None, :], dtype)
    return total


@triton.jit(do_not_specialize=["experts_at", "rows_at"])
def _down_kernel(
    slots, h, out, sums, partial, turns, plan, down_bias, experts_at, rows_at,
    H: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, SLOT: tl.constexpr, DECODE: tl.constexpr, FORM: tl.constexpr,
    ROUNDS: tl.constexpr, PART: tl.constexpr, TILE_NBYTES: tl.constexpr, B: tl.constexpr, BLOCK_NBYTES: tl.constexpr,
    INNER_NBYTES: tl.constexpr, PARTS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """BN outputs of an expert for all its tokens: into `out` [rows, H] with its last spans, until then into `sums`.
    Of several programs with the same outputs, one for every PARTS-th block of neurons, whichever ends last sums their
    `partial` sums, always in the same order. `turns` counts who has ended; it is zeros before and afterwards.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    expert = plan + experts_at + tl.program_id(0) * _FIELDS
    row, numbers, flags = tl.load(expert + 3), tl.arange(0, BT), tl.load(expert + 5)
    is_token = numbers < tl.load(expert + 4)
    rows = tl.load(plan + rows_at + row + numbers, mask=is_token, other=0)
    outputs = tl.program_id(1) * BN + tl.arange(0, BN)
    is_output = outputs < H
    total = tl.zeros((BK if BT == 1 else BT, BN), tl.float32)
    for number in range(tl.load(expert + 1), tl.load(expert + 2)):
        span = plan + number * _FIELDS
        slot, num = slots + tl.load(span).to(tl.int64) * SLOT, tl.load(span + 3)
        first = tl.load(span + 2)
        for k in tl.range(tl.program_id(2) * BK, num, BK * PARTS, num_stages=STAGES):
            neurons = k + tl.arange(0, BK)
            is_neuron = neurons < num
            if BT == 1:
                values = tl.load(h + rows * WIDTH + first + neurons, mask=is_neuron, other=0.0)
            else:
                place = (rows * WIDTH + first)[:, None] + neurons[None, :]
                values = tl.load(h + place, mask=is_token[:, None] & is_neuron[None, :], other=0.0)
            if DECODE is None:
                place = (neurons * (M * H) + (M - 1) * H)[:, None] + outputs[None, :]
                is_there = is_neuron[:, None] & is_output[None, :]
                weights = tl.load(slot + place, mask=is_there, other=0.0, eviction_policy="evict_first")
            else:
                parts = tl.minimum(k // PART + tl.arange(0, BK // PART), num // PART - 1)
                place = parts // (B // PART) * BLOCK_NBYTES + INNER_NBYTES
                tile = tl.max_constancy(tl.minimum(outputs // _TILE, H // _TILE - 1), _TILE)
                tiles = slot + place[:, None] + (tile * TILE_NBYTES)[None, :]
                weights = DECODE(tiles, parts % (B // PART), tl.arange(0, BN) % _TILE, FORM)
                if ROUNDS:
                    weights = _rounded(weights, dtype)
            total = _product(values, weights, total, BT, dtype)
    if BT == 1:
        total = tl.sum(total, axis=0)[None, :]
    if PARTS > 1:
        strip = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        mine = partial + strip * (PARTS * BT * BN) + (numbers * BN)[:, None] + tl.arange(0, BN)[None, :]
        tl.store(mine + tl.program_id(2) * (BT * BN), total)
        tl.debug_barrier()
        if tl.atomic_add(turns + strip, 1) < PARTS - 1:
            return
        tl.store(turns + strip, 0)
        total = tl.zeros((BT, BN), tl.float32)
        for part in range(PARTS):
            total += tl.load(mine + part * (BT * BN), cache_modifier=".cg")
    is_there = is_token[:, None] & is_output[None, :]
    place = (rows * H)[:, None] + outputs[None, :]
    if sums is not None:
        if flags & _CONTINUES:
            total += tl.load(sums + place, mask=is_there, other=0.0)
        if flags & _ENDS == 0:
            tl.store(sums + place, total, mask=is_there)
            return
    total = _rounded(total, dtype)
    if down_bias is not None:
        bias = tl.load(down_bias + tl.load(expert) * H + outputs, mask=is_output, other=0.0)
        total = _rounded(total + bias.to(tl.float32)[None, :], dtype)
    tl.store(out + place, total.to(dtype), mask=is_there)


@triton.jit(do_not_specialize=["num_experts"])
def _find_kernel(
    ids, slots, plan, out, num_experts, H: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A plan for each choice of `ids` [T * K] apart: of the whole expert where `slots` [E] has its first slot, of
    nothing where that is -1. The output of what is no expert is zero.
    """
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    expert = tl.load(ids + row).to(tl.int32)
    is_expert = (expert >= 0) & (expert < num_experts)
    expert = tl.where(is_expert, expert, 0)
    slot = tl.where(is_expert, tl.load(slots + expert), -1)
    is_there = (slot >= 0).to(tl.int32)
    span, of_expert = plan + row * _FIELDS, plan + (num_rows + row) * _FIELDS
    tl.store(span, slot)
    tl.store(span + 1, expert)
    tl.store(span + 2, 0)
    tl.store(span + 3, is_there * WIDTH)
    tl.store(span + 4, row)
    tl.store(span + 5, is_there)
    tl.store(of_expert, expert)
    tl.store(of_expert + 1, row)
    tl.store(of_expert + 2, row + 1)
    tl.store(of_expert + 3, row)
    tl.store(of_expert + 4, is_there)
    tl.store(of_expert + 5, _ENDS)
    tl.store(plan + num_rows * 2 * _FIELDS + row, row // K)
    tl.store(plan + num_rows * (2 * _FIELDS + 1) + row, row)
    num_zeros = tl.where(is_expert, 0, H)
    for begin in range(0, H, BN):
        outputs = begin + tl.arange(0, BN)
        tl.store(out + row * H + outputs, tl.zeros((BN,), out.dtype.element_ty), mask=outputs < num_zeros)


@triton.jit
def _combine_kernel(rows, weights, out, H: tl.constexpr, K: tl.constexpr, BN: tl.constexpr):
    """A token's BN outputs from the rows [K, H] of its experts: products in the wider type, as torch promotes them."""
    dtype: tl.constexpr = rows.dtype.element_ty
    token, outputs = tl.program_id(0), tl.program_id(1) * BN + tl.arange(0, BN)
    is_output = outputs < H
    total = tl.zeros((BN,), tl.float32)
    for k in range(K):
        weight = tl.load(weights + token * K + k).to(tl.float32)
        values = tl.load(rows + (token * K + k) * H + outputs, mask=is_output, other=0.0).to(tl.float32)
        total += _rounded(values * weight, weights.dtype.element_ty)
    tl.store(out + token * H + outputs, _rounded(total, dtype).to(dtype), mask=is_output)


# -- what calls them ---------------------------------------------------------------------------------------------------

_WIDE, _BRAIN = (torch.float32,), (torch.bfloat16, torch.float32)

_DECODERS: dict[str, tuple[Any, Any, tuple[torch.dtype, ...]]] = {
    "mxfp4": (_mxfp4, None, _BRAIN),
    "fp8": (_fp8, None, _WIDE),
    "q4_0": (_q4_0, None, _WIDE),
    "q8_0": (_q8_0, None, _WIDE),
    "q4_k": (_q4_k, 0, _WIDE),
    "q5_k": (_q4_k, 1, _WIDE),
    "q6_k": (_q6_k, None, _WIDE),
    **{
        f"int4_g{group}{zeros}{half}": (
            _int4,
            (group, tl.float16 if half else tl.bfloat16, bool(zeros)),
            (torch.float16, torch.float32) if half else _BRAIN,
        )
        for group in (32, 128)
        for zeros in ("", "_zeros")
        for half in ("", "_f16")
    },
}
"""Of a format by its name: its function, what that is told, and in which dtypes its numbers are without rounding."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class SlotProducts:
    """What calls for the experts of one layer have in common: `rows`, the slots as engine/compute.py has them, of
    `num_segments` an expert; biases of each inner matrix [E, I] and of down [E, H], contiguous, of the layer's dtype.
    """

    def __init__(
        self,
        geometry: LayerGeometry,
        dtype: torch.dtype,
        num_segments: int,
        rows: torch.Tensor,
        kernels: Kernels,
        activation: Activation,
        inner_bias: Sequence[torch.Tensor],
        down_bias: torch.Tensor | None,
    ) -> None:
        self.kernels = kernels
        self.num_segments, self.width = num_segments, geometry.intermediate_size
        self._rows, self._hidden, self._down_bias = rows, geometry.hidden_size, down_bias
        tables = (None, None) if dtype == torch.float32 else (activation.f, activation.g)
        self._between = (*tables, *(*inner_bias, None, None)[:2])
        self._table: tuple[Sequence[Span | None], torch.Tensor] | None = None
        form = expert_format(geometry.format) if geometry.format else None
        self._most = 512 // dtype.itemsize  # weights of a row that a program has at a time
        item = 1 if form is not None else dtype.itemsize
        strips = geometry.top_k * triton.cdiv(geometry.hidden_size, _STRIP)
        self._num_parts = max(1, min(triton.cdiv(_PROGRAMS, strips), geometry.intermediate_size // self._most))
        self._turns: torch.Tensor | None = None
        self._programs: dict[tuple[int, int], tuple[Program, Program]] = {}  # see `_of`
        self._finding: dict[int, Program] = {}  # by top-k
        shape: dict[str, Any] = {
            "H": geometry.hidden_size,
            "WIDTH": geometry.intermediate_size,
            "M": geometry.num_matrices,
            "SLOT": geometry.expert_nbytes // num_segments // item,
            "B": geometry.block_size,
            "BLOCK_NBYTES": geometry.block_nbytes,
            "STAGES": 3 if form is None else 5,
        }
        of_none = {"DECODE": None, "FORM": None, "ROUNDS": False, "PART": 1, "TILE_NBYTES": 0}
        self._inner, self._down = shape | of_none | {"G": 1}, shape | of_none | {"INNER_NBYTES": 0}
        if form is not None:
            for kernel, tiled in ((self._inner, form.gate), (self._down, form.down)):
                kernel["DECODE"], kernel["FORM"], exact_in = _DECODERS[tiled.name]
                kernel["ROUNDS"] = dtype not in exact_in
                kernel["TILE_NBYTES"], kernel["PART"] = tiled.tile_nbytes, 64 if tiled.group == 256 else tiled.group
            self._inner["G"] = form.gate.group
            self._down["INNER_NBYTES"] = form.inner_nbytes(geometry.num_matrices, geometry.hidden_size)

    def finding(self, top_k: int) -> Program:
        """The kernel that makes a plan of choices [T, K]."""
        sizes = {"H": self._hidden, "K": top_k, "WIDTH": self.width, "BN": _power_of_two(self._hidden, 1024)}
        return self._finding.setdefault(top_k, Program(_find_kernel, sizes, 1))

    def begin(self, hidden: torch.Tensor, out: torch.Tensor) -> SlotCall | None:
        """A call of the layer, of hidden states [T, H] and for outputs [rows, H]; None: it has too many tokens."""
        return SlotCall(self, hidden, out) if len(hidden) <= MAX_TOKENS else None

    def table(self, spans: Sequence[Span | None]) -> torch.Tensor:
        """The first slot of each expert [E], -1 where there is no span, for kernels that are queued from now on."""
        if self._table is None or spans != self._table[0]:
            slots = [-1 if span is None else span.slot for span in spans]
            self._table = spans, _to_device(slots, self._rows.device)
        return self._table[1]

    def run(
        self,
        x: torch.Tensor,
        h: torch.Tensor,
        out: torch.Tensor,
        sums: torch.Tensor | None,
        plan: torch.Tensor,
        lengths: tuple[int, int, int],
        num_neurons: int,
        num_tokens: int,
    ) -> None:
        """Queue both kernels. `plan`: four lists of such lengths, the last twice: spans, experts, rows of `x` [*, H]
        and of `h` [*, I], `out` and `sums` [*, H]. `num_neurons` and `num_tokens` are the most of a span and of an
        expert.
        """
        experts_at, x_at, rows_at = lengths[0], sum(lengths[:2]), sum(lengths)
        padded = 1 if num_tokens == 1 else 16 if num_tokens <= 16 else 32
        inner, down = self._of(padded, num_neurons)
        grid = experts_at // _NUM_FIELDS, triton.cdiv(num_neurons, TILE_OUTPUTS), 1
        _launch(inner, grid, (self._rows, x, h, plan, *self._between, x_at, rows_at))
        grid = lengths[1] // _NUM_FIELDS, triton.cdiv(self._hidden, _STRIP), self._num_parts
        partial = turns = None
        if self._num_parts > 1:
            num_strips = grid[0] * grid[1]
            partial = h.new_empty(num_strips * self._num_parts * padded * _STRIP, dtype=torch.float32)
            if self._turns is None or len(self._turns) < num_strips:
                self._turns = h.new_zeros(num_strips, dtype=torch.int32)
            turns = self._turns
        _launch(down, grid, (self._rows, h, out, sums, partial, turns, plan, self._down_bias, experts_at, rows_at))

    def _of(self, padded: int, num_neurons: int) -> tuple[Program, Program]:
        """Both kernels for so many tokens of an expert, and neurons of a span."""
        programs = self._programs.get((padded, num_neurons))
        if programs is None:
            halved = padded > 1 or self._inner["DECODE"] is not None
            blocks = {"BT": padded, "BN": TILE_OUTPUTS}
            blocks["BK"] = max(_power_of_two(self._hidden, self._most // (2 if halved else 1)), self._inner["PART"])
            inner = Program(_inner_kernel, self._inner | blocks, 2 if halved and padded == 1 else 4)
            blocks = {"BT": padded, "BN": _STRIP, "PARTS": self._num_parts}
            blocks["BK"] = max(_power_of_two(num_neurons, self._most // 2), self._down["PART"])
            programs = inner, Program(_down_kernel, self._down | blocks, 4)
            self._programs[padded, num_neurons] = programs
        return programs


class SlotCall:
    """One call of a layer, whose outputs come as its experts do. `hidden` [T, H] and `out` [rows, H], contiguous, are
    of the layer's dtype.
    """

    def __init__(self, layer: SlotProducts, hidden: torch.Tensor, out: torch.Tensor) -> None:
        self._layer, self._out = layer, out
        self._hidden = hidden.contiguous()
        is_single = len(hidden) == 1  # its activations are loaded one by one, and in advance if each is four bytes
        self._scratch = out.new_empty(len(out), layer.width, dtype=torch.float32 if is_single else None)
        self._sums: torch.Tensor | None = None  # [rows, H], of experts that came in part
        self._num_left: dict[int, int] = {}  # of these, segments that have not come

    def add(self, works: Sequence[Work]) -> None:
        """Queue what uses these spans' slots. An expert's output is there when all its segments have come, in this call
        or in several.
        """
        together: dict[int, list[Work]] = {}
        for work in works:
            together.setdefault(work[0].expert, []).append(work)
        layer = self._layer
        layer.kernels.counts.native += len(works)
        lists: tuple[list[int], ...] = ([], [], [], [])
        spans, experts, of_x, of_out = lists
        per_segment = layer.width // layer.num_segments
        most_neurons = most_tokens = 1
        for expert, some in together.items():
            at, n = len(of_x), len(some[0][1])
            of_x += some[0][1]
            of_out += some[0][2]
            first, num_come = len(spans) // _NUM_FIELDS, 0
            for span, *_ in some:
                num_come += span.num_segments
                num = span.num_segments * per_segment
                spans += (span.slot, expert, span.segment * per_segment, num, at, n, 0, 0)
                most_neurons = max(most_neurons, num)
            before = self._num_left.pop(expert, layer.num_segments)
            flags = _CONTINUES.value * (before < layer.num_segments) + _ENDS.value * (before == num_come)
            if before > num_come:
                self._num_left[expert] = before - num_come
            experts += (expert, first, first + len(some), at, n, flags, 0, 0)
            most_tokens = max(most_tokens, n)
        if self._num_left and self._sums is None:
            self._sums = self._out.new_empty(self._out.shape, dtype=torch.float32)
        plan = _to_device([number for numbers in lists for number in numbers], self._out.device)
        lengths = len(spans), len(experts), len(of_x)
        layer.run(self._hidden, self._scratch, self._out, self._sums, plan, lengths, most_neurons, most_tokens)

    def find(self, ids: torch.Tensor, spans: Sequence[Span | None]) -> None:
        """Queue what uses the slots of those of the chosen experts `ids` [T, K] that have one of `spans`, which are by
        expert and whole. Their outputs, row by row, and zeros of ids that are no expert, come by this call. The host
        learns nothing: the caller counts.
        """
        layer, num_rows, (_, top_k) = self._layer, ids.numel(), ids.shape
        lengths = num_rows * _NUM_FIELDS, num_rows * _NUM_FIELDS, num_rows
        plan = torch.empty(sum(lengths) + num_rows, dtype=torch.int32, device=ids.device)
        args = ids.contiguous(), layer.table(spans), plan, self._out, len(spans)
        _launch(layer.finding(top_k), (num_rows, 1, 1), args)
        layer.run(self._hidden, self._scratch, self._out, None, plan, lengths, layer.width, 1)


class TritonKernels(Kernels):
    """Those of an accelerator: of experts in slots, and of their weighted sum. torch has the rest."""

    def __init__(self, reason: str) -> None:
        super().__init__(None, reason)
        self.name = "triton"
        self._combining: dict[tuple[int, int], Program] = {}  # by H and K

    def slots(  # type: ignore[override]
        self,
        geometry: LayerGeometry,
        dtype: torch.dtype,
        num_segments: int,
        rows: torch.Tensor,
        activate: Callable[..., torch.Tensor],
        inner_bias: Sequence[torch.Tensor],
        down_bias: torch.Tensor | None,
    ) -> SlotProducts | None:
        form = expert_format(geometry.format) if geometry.format else None
        dtypes = {bias.dtype for bias in (*inner_bias, down_bias) if bias is not None}
        if dtype not in _DTYPES or not dtypes <= {dtype}:
            return None
        if form is not None and (form.gate is not form.up or not {form.gate.name, form.down.name} <= _DECODERS.keys()):
            return None
        activation = recognise(activate, dtype, rows.device, is_gated=geometry.num_matrices == 3)
        if activation is None or (dtype == torch.float32 and not activation.is_silu):
            return None
        down_bias = None if down_bias is None else down_bias.contiguous()
        return SlotProducts(geometry, dtype, num_segments, rows, self, activation, inner_bias, down_bias)

    def combine(self, rows: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        (num_tokens, top_k), width = weights.shape, rows.shape[1]
        is_like_rows = rows.dtype == dtype and weights.dtype in (torch.float32, dtype) and weights.is_contiguous()
        if num_tokens > MAX_TOKENS or rows.dtype not in _DTYPES or not is_like_rows:
            return super().combine(rows, weights, dtype)
        program = self._combining.get((width, top_k))
        if program is None:
            sizes = {"H": width, "K": top_k, "BN": _power_of_two(width, 1024)}
            program = self._combining[width, top_k] = Program(_combine_kernel, sizes, 4)
        out = rows.new_empty(num_tokens, width)
        _launch(program, (num_tokens, triton.cdiv(width, program.constants["BN"]), 1), (rows, weights, out))
        return out


@cache
def why_not() -> str:
    """Why these cannot be used on this machine's accelerator; "" where they can. Computes an expert of two tokens."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if _INTERPRETED.value:
        device = torch.device("cpu")
    if device is None:
        return "there is no accelerator"
    weights = torch.linspace(-1, 1, 16 * 3 * 32).view(16, 3, 32).to(device, torch.bfloat16)
    x, out = weights[:2, 0] / 2, torch.empty(2, 32, dtype=torch.bfloat16, device=device)
    gate, up = (x.float() @ weights[:, number].float().T for number in range(2))
    expected = (silu(gate) * up) @ weights[:, 2].float()
    layer = LayerGeometry(1, 1, 32, 16, 3, 2)
    try:
        slots = TritonKernels("").slots(layer, weights.dtype, 1, weights, lambda gate, up: silu(gate) * up, (), None)
        assert slots is not None
        SlotCall(slots, x, out).add([(Span(0, 0, 0, 1, 0), range(2), range(2))])
        error = float((out.float() - expected).norm() / expected.norm())
    except (triton.TritonError, RuntimeError, OSError, SubprocessError) as failed:
        return f"Triton cannot compile for this device: {failed}"
    return "" if error < 2e-2 else f"what Triton computes on this device is wrong by {error:.2g}"


def _power_of_two(size: int, most: int) -> int:
    """The next one, of 16 on."""
    return max(16, min(most, triton.next_power_of_2(size)))


def _to_device(numbers: list[int], device: torch.device) -> torch.Tensor:
    """Copied without waiting; the allocator keeps the pinned memory until the copy has ended. The interpreter's device
    has no index, and needs none.
    """
    in_host = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.index is not None)
    return in_host.to(device, non_blocking=True)


class Program:
    """A kernel with its constants, on one device."""

    def __init__(self, kernel: Any, constants: dict[str, Any], warps: int) -> None:
        self.kernel, self.constants, self.warps = kernel, constants, warps
        self.compiled: dict[tuple[Any, ...], Any] = {}  # by what its tensors are
        self.ordered = [constants[name] for name in kernel.arg_names if name in constants]


def _launch(program: Program, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
    """On the device and the stream of the first argument. Triton's own look-up of a compiled kernel takes several times
    as long as its launch: it is done once for what tensors a program is given, which are aligned or not.
    """
    kinds = tuple([(arg.dtype, arg.data_ptr() % 16) if isinstance(arg, torch.Tensor) else arg is None for arg in args])
    compiled, index = program.compiled.get(kinds), args[0].device.index
    if index is not None and index != torch.accelerator.current_device_index():
        with torch.accelerator.device_index(index):
            _launch(program, grid, args)
    elif compiled is not None:
        compiled[grid](*args, *program.ordered)
    else:  # the interpreter returns None
        program.compiled[kinds] = program.kernel[grid](*args, **program.constants, num_warps=program.warps)
