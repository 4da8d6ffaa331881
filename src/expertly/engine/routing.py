"""From the router's tensors to what the control plane and the arithmetic need: who goes to which expert."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from expertly.core.iteration import IterationInfo
from expertly.core.messages import RouterRan


@dataclass(slots=True)
class Dispatch:
    """The rows of each expert. A row is a (token, choice) pair, token * K + choice, as the reference numbers them."""

    router: RouterRan
    top_k: int
    covers_all_rows: bool  # False where a choice is no expert: its row is zero
    rows: dict[int, torch.Tensor] | None  # expert -> rows [n]; None for a single token
    positions: dict[int, int] | None  # expert -> row, for a single token


def dispatch(layer: int, top_k_index: torch.Tensor, num_experts: int, info: IterationInfo | None) -> Dispatch:
    """Group the choices [T, K] by expert. Ids outside 0..E-1 are dropped: their rows stay zero."""
    num_tokens, top_k = top_k_index.shape
    if num_tokens == 1:
        ids = top_k_index[0].tolist()
        positions = {expert: k for k, expert in enumerate(ids) if 0 <= expert < num_experts}
        if len(positions) == top_k:
            experts = list(positions)
            decode, real = _single(info)
            router = RouterRan(layer, experts, [real] * top_k, [decode] * top_k, real)
            return Dispatch(router, top_k, True, None, positions)
    return _dispatch_many(layer, top_k_index, num_experts, info)


def _single(info: IterationInfo | None) -> tuple[bool, int]:
    """Whether the one row is decoding, and 1 unless it is a pad."""
    if info is None or len(info.is_prefill) != 1:
        return True, 1
    return not info.is_prefill[0], int(info.is_pad is None or not info.is_pad[0])


def _dispatch_many(layer: int, top_k_index: torch.Tensor, num_experts: int, info: IterationInfo | None) -> Dispatch:
    num_tokens, top_k = top_k_index.shape
    flat = top_k_index.reshape(-1).cpu().numpy()
    order = np.argsort(flat, kind="stable")
    bounds = np.searchsorted(flat[order], np.arange(num_experts + 1))
    here = np.flatnonzero(np.diff(bounds))
    here = here[np.argsort(order[bounds[here]], kind="stable")]  # router order: by first row
    if info is None or len(info.is_prefill) != num_tokens:
        is_prefill = np.full(num_tokens, num_tokens > 1)
        real = None
    else:
        is_prefill, real = info.is_prefill, None if info.is_pad is None else ~info.is_pad
    counts = np.diff(bounds)
    batch_tokens = num_tokens
    if real is not None:
        counts = np.bincount(flat[np.repeat(real, top_k)].clip(0, num_experts), minlength=num_experts + 1)
        batch_tokens = int(real.sum())
    experts: list[int] = here.tolist()
    if is_prefill.all():
        decode = [False] * len(experts)
    elif not is_prefill.any():
        decode = [True] * len(experts)
    else:
        chosen = np.zeros(num_experts + 1, dtype=bool)
        decoding = ~is_prefill if real is None else ~is_prefill & real
        chosen[flat[np.repeat(decoding, top_k)].clip(0, num_experts)] = True
        decode = chosen[here].tolist()
    order_on_device = torch.from_numpy(order).to(top_k_index.device)
    rows = {e: order_on_device[bounds[e] : bounds[e + 1]] for e in experts}
    router = RouterRan(layer, experts, counts[here].tolist(), decode, batch_tokens)
    return Dispatch(router, top_k, int(bounds[-1] - bounds[0]) == len(flat), rows, None)
