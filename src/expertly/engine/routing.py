"""From the router's tensors to what the control plane and the arithmetic need: who goes to which expert."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from expertly.core.demand import demand_of_rows
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
    if info is None or len(info.is_prefill) != num_tokens:
        is_prefill = np.full(num_tokens, num_tokens > 1)
        is_real = None
    else:
        is_prefill, is_real = info.is_prefill, None if info.is_pad is None else ~info.is_pad
    router, grouped = demand_of_rows(layer, top_k_index.cpu().numpy(), num_experts, is_prefill, is_real)
    order, bounds = torch.from_numpy(grouped.order).to(top_k_index.device), grouped.bounds
    rows = {e: order[bounds[e] : bounds[e + 1]] for e in router.experts}
    return Dispatch(router, top_k, int(bounds[-1] - bounds[0]) == num_tokens * top_k, rows, None)
