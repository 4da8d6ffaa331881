"""What the scheduler and its drivers (engine, simulator) tell each other: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Phase(str, Enum):
    """The phase of a request. One forward pass may serve requests of both."""

    PREFILL = "prefill"
    DECODE = "decode"


class Span(NamedTuple):
    """Adjacent segments of one expert in adjacent slots: the unit of a transfer and of a computation."""

    layer: int
    expert: int
    segment: int  # first segment
    num_segments: int
    slot: int  # first slot, in the pool of the layer's size class


# These three are made for every layer. They are not frozen, which would make them 1.6 times as slow to make. Drivers
# only read them.


@dataclass(slots=True)
class RouterRan:
    """The router of `layer` has chosen. Lists run over the distinct experts, in router order.

    `num_tokens` counts the real (not pad) tokens of each expert. An expert that only pads chose has 0: it is computed,
    but is no hit and no miss. `is_decode` is whether a decoding request is among those that chose it.
    """

    layer: int
    experts: list[int]
    num_tokens: list[int]
    is_decode: list[bool]
    batch_tokens: int  # real tokens of the forward pass
    is_part_of_decode: bool = False  # with workers: whether the layer serves decode on any of them

    @property
    def serves_decode(self) -> bool:
        """Whether the layer counts as decode, so that what it loads is kept and may evict."""
        return self.is_part_of_decode or True in self.is_decode


@dataclass(slots=True)
class Prediction:
    """What a predictor expects `layer` to need when it runs next. Lists run from the surest expert down.

    A layer's newest prediction replaces the one before. It ends when the layer's router runs.
    """

    layer: int
    experts: list[int]
    scores: list[float]  # the higher, the sooner it is loaded; comparable over the layers of one predictor
    distance: int  # layers ahead of what the predictor has seen
    # For eviction:
    probabilities: list[float] | None = None  # that each expert of the layer is needed when it runs next
    outlook: tuple[float, ...] | None = None  # how likely each expert of the model (by dense id) is used again;
    # None: unchanged since the last prediction that had one


@dataclass(slots=True)
class Plan:
    """What the driver does for a layer. Spans that are `in_flight` were prefetched."""

    ready: list[Span] = field(default_factory=list)  # compute now
    loads: list[Span] = field(default_factory=list)  # load, and compute as they arrive
    in_flight: list[Span] = field(default_factory=list)  # compute as they arrive


Ints = npt.NDArray[np.intp]


def group_by_expert(
    layer: int,
    ids: npt.NDArray[np.integer],
    num_experts: int,
    is_prefill: npt.NDArray[np.bool_],
    is_real: npt.NDArray[np.bool_] | None = None,
) -> tuple[RouterRan, tuple[Ints, Ints]]:
    """What the chosen `ids` [T, K] demand of a layer, and (order, bounds) of the rows: expert e computes
    `order[bounds[e] : bounds[e + 1]]`. A row is a (token, choice) pair: token * K + choice.

    Ids outside 0..E-1 choose nothing; `is_real` [T] is False for pads. Router order: by the first row that chose an
    expert.
    """
    num_tokens, top_k = ids.shape
    flat = ids.reshape(-1)
    order = np.argsort(flat, kind="stable")
    bounds = np.searchsorted(flat[order], np.arange(num_experts + 1))
    chosen = np.flatnonzero(np.diff(bounds))
    chosen = chosen[np.argsort(order[bounds[chosen]], kind="stable")]
    counts = np.diff(bounds)
    batch_tokens = num_tokens
    if is_real is not None:
        counts = np.bincount(flat[np.repeat(is_real, top_k)].clip(0, num_experts), minlength=num_experts + 1)
        batch_tokens = int(is_real.sum())
    experts: list[int] = chosen.tolist()
    if is_prefill.all():
        is_decode = [False] * len(experts)
    elif not is_prefill.any():
        is_decode = [True] * len(experts)
    else:
        is_decoding_row = ~is_prefill if is_real is None else ~is_prefill & is_real
        of_expert = np.zeros(num_experts + 1, dtype=bool)
        of_expert[flat[np.repeat(is_decoding_row, top_k)].clip(0, num_experts)] = True
        is_decode = of_expert[chosen].tolist()
    return RouterRan(layer, experts, counts[chosen].tolist(), is_decode, batch_tokens), (order, bounds)
