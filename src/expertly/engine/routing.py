"""From the router's tensors to what the control plane and the arithmetic need: who goes to which expert."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from expertly.core.messages import RouterRan, group_by_expert
from expertly.core.observation import IterationInfo
from expertly.core.placement import Share


@dataclass(slots=True)
class Dispatch:
    """The rows of each expert. A row is a (token, choice) pair, token * K + choice, as the reference numbers them."""

    router: RouterRan
    top_k: int
    num_rows: int  # of the outputs
    covers_all_rows: bool  # False where a choice is no expert: its row is zero
    rows: dict[int, torch.Tensor] | None  # expert -> rows [n]; None for a single token
    positions: dict[int, int] | None  # expert -> row, for a single token
    places: dict[int, slice] | None = None  # expert -> where its rows are in the outputs; None: at their numbers


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
            return Dispatch(router, top_k, top_k, True, None, positions)
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
    router, grouped = group_by_expert(layer, top_k_index.cpu().numpy(), num_experts, is_prefill, is_real)
    order, bounds = torch.from_numpy(grouped.order).to(top_k_index.device), grouped.bounds
    rows = {e: order[bounds[e] : bounds[e + 1]] for e in router.experts}
    num_rows = num_tokens * top_k
    return Dispatch(router, top_k, num_rows, int(bounds[-1] - bounds[0]) == num_rows, rows, None)


@dataclass(slots=True)
class Part:
    """What one device has to do of a layer: its outputs have only its own rows, side by side."""

    work: Dispatch
    rows: torch.Tensor  # [n] where they go in the outputs of the layer

    def to(self, device: torch.device) -> Dispatch:
        """With its rows on the device that reads them; the host does not wait."""
        if self.work.places is None:
            return self.work
        rows = self.rows.to(device, non_blocking=True)
        return replace(self.work, rows={expert: rows[place] for expert, place in self.work.places.items()})


def part_of(work: Dispatch, share: Share, device: torch.device) -> Part:
    """The part of the experts of `share`, with their numbers there; `device` is where the outputs are gathered."""
    router = share.router(work.router)
    held = share.experts[router.layer]
    if work.positions is not None:
        where = [work.positions[held[number]] for number in router.experts]
        positions = {number: i for i, number in enumerate(router.experts)}
        part = Dispatch(router, work.top_k, len(where), True, None, positions)
        return Part(part, torch.tensor(where, dtype=torch.int64, device=device))
    assert work.rows is not None
    rows = [work.rows[held[number]] for number in router.experts]
    places, end = {}, 0
    for number, some in zip(router.experts, rows, strict=True):
        places[number] = slice(end, end + len(some))
        end += len(some)
    every = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64, device=device)
    return Part(Dispatch(router, work.top_k, end, True, {}, None, places), every)
