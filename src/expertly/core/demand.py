"""From the ids that routers chose to the demand of a layer: which experts, in which order, for how many tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertly.core.messages import RouterRan


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """The rows of a pass by expert. A row is a (token, choice) pair, token * K + choice."""

    order: npt.NDArray[np.intp]  # rows sorted by expert, then by row
    bounds: npt.NDArray[np.intp]  # [E + 1]: the rows of expert e are order[bounds[e] : bounds[e + 1]]


def demand_of_rows(
    layer: int,
    ids: npt.NDArray[np.integer],
    num_experts: int,
    is_prefill: npt.NDArray[np.bool_],
    is_real: npt.NDArray[np.bool_] | None = None,
) -> tuple[RouterRan, GroupedRows]:
    """The demand of chosen ids [T, K]; ids outside 0..E-1 choose nothing. `is_real` [T] is False for pads.

    Experts are in router order: by the first row that chose them.
    """
    num_tokens, top_k = ids.shape
    flat = ids.reshape(-1)
    order = np.argsort(flat, kind="stable")
    bounds = np.searchsorted(flat[order], np.arange(num_experts + 1))
    here = np.flatnonzero(np.diff(bounds))
    here = here[np.argsort(order[bounds[here]], kind="stable")]
    counts = np.diff(bounds)
    batch_tokens = num_tokens
    if is_real is not None:
        counts = np.bincount(flat[np.repeat(is_real, top_k)].clip(0, num_experts), minlength=num_experts + 1)
        batch_tokens = int(is_real.sum())
    experts: list[int] = here.tolist()
    if is_prefill.all():
        decode = [False] * len(experts)
    elif not is_prefill.any():
        decode = [True] * len(experts)
    else:
        chosen = np.zeros(num_experts + 1, dtype=bool)
        decoding = ~is_prefill if is_real is None else ~is_prefill & is_real
        chosen[flat[np.repeat(decoding, top_k)].clip(0, num_experts)] = True
        decode = chosen[here].tolist()
    return RouterRan(layer, experts, counts[here].tolist(), decode, batch_tokens), GroupedRows(order, bounds)
