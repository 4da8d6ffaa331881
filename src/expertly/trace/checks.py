"""What the values of a field must be. Every block of rows is checked, when it is written and when it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.trace.schema import NO_EXPERT, TraceLayer

Array = npt.NDArray[Any]


class ExpertLimits:
    """How many experts each layer has and may choose, ready to be compared with blocks of rows."""

    def __init__(self, layers: Sequence[TraceLayer]) -> None:
        self.layers = tuple(layers)
        self.num_experts = np.array([layer.num_experts for layer in layers], np.uint16)[:, None]  # [L, 1]
        top_k = np.array([layer.top_k for layer in layers])[:, None]
        self.beyond_top_k = np.arange(int(top_k.max())) >= top_k  # [L, K]
        self.has_equal_top_k = not self.beyond_top_k.any()

    def problem(self, experts: npt.NDArray[np.uint16]) -> tuple[int, str] | None:
        """The first row of `experts` [T, L, K] that cannot be, and what is wrong with it."""
        is_chosen = experts != NO_EXPERT
        is_wrong = (experts >= self.num_experts) & is_chosen
        if is_wrong.any():
            row, layer, place = _first(is_wrong)
            accepted = f"below the {self.layers[layer].num_experts} of layer {layer}"
            return row, f"expert {experts[row, layer, place]} of layer {layer}: must be {accepted}"
        in_order = np.sort(experts, axis=-1)
        is_wrong = (in_order[..., 1:] == in_order[..., :-1]) & (in_order[..., 1:] != NO_EXPERT)
        if is_wrong.any():
            row, layer, place = _first(is_wrong)
            return row, f"expert {in_order[row, layer, place]} of layer {layer} is chosen twice"
        if not self.has_equal_top_k and (is_wrong := is_chosen & self.beyond_top_k).any():
            row, layer, place = _first(is_wrong)
            return row, f"layer {layer} chooses more than its {self.layers[layer].top_k} experts"
        return None


def value_problem(name: str, values: Array, num_requests: int) -> tuple[int, str] | None:
    """The first row of any other field than `experts` that cannot be, and what is wrong with it."""
    if values.dtype == np.float16:
        is_wrong = (values.view(np.uint16) & 0x7C00) == 0x7C00
        accepted = "must be finite"
    elif values.dtype == np.bool_:
        is_wrong = values.view(np.uint8) > 1
        accepted = "must be 0 or 1"
    elif name == "token":
        is_wrong = values < -1
        accepted = "must be a token id, or -1 where it is unknown"
    elif name == "request":
        is_wrong = (values < 0) | (values >= num_requests)
        accepted = f"must be one of the {num_requests} requests, from 0"
    else:
        return None
    if not is_wrong.any():
        return None
    place = _first(is_wrong)
    shown = values.view(np.uint8)[place] if values.dtype == np.bool_ else values[place]
    return place[0], f"{shown}: {accepted}"


def _first(is_wrong: Array) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(is_wrong)), is_wrong.shape))
