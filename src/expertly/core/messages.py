"""What the control plane and its drivers say to each other: plain data, no behaviour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Phase(str, Enum):
    """What a demand was for. It belongs to the request: one forward pass may serve both."""

    PREFILL = "prefill"
    DECODE = "decode"


class Span(NamedTuple):
    """Adjacent segments of one expert in adjacent slots: the unit of a transfer and of a computation."""

    layer: int
    expert: int
    segment: int  # first segment
    num_segments: int
    slot: int  # first slot, in the pool of the layer's size class


@dataclass(frozen=True, slots=True)
class RouterRan:
    """The router of `layer` has chosen. Lists run over the distinct experts, in router order.

    `num_tokens` counts the real (not pad) tokens of each expert; 0 where only pad tokens chose it: such an
    expert is computed but is no hit and no miss. `is_decode` says whether a decoding request is among them.
    """

    layer: int
    experts: list[int]
    num_tokens: list[int]
    is_decode: list[bool]
    batch_tokens: int  # real tokens of the forward pass
    is_part_of_decode: bool = False  # one device's part of a layer that serves decode, here or elsewhere

    @property
    def serves_decode(self) -> bool:
        """Whether the layer is decode's: what it needs is kept, and evicts."""
        return self.is_part_of_decode or True in self.is_decode


@dataclass(frozen=True, slots=True)
class Prediction:
    """What `layer` will need when it runs next, as a predictor sees it. Lists run from the surest expert down.

    The newest prediction of a layer replaces the one before; when the layer's router has spoken it is void.
    """

    layer: int
    experts: list[int]
    scores: list[float]  # the higher, the sooner it is fetched; comparable over the layers of one predictor
    distance: int  # layers ahead of what the predictor has seen
    confidence: float | None = None  # the predictor's own, from -1 to 1, where it has one
    probabilities: list[float] | None = None  # of every expert of the layer, for eviction
    outlook: tuple[float, ...] | None = None  # how likely each expert of the model (by dense id) is used again, for
    # eviction; None: as it was said last


@dataclass(frozen=True, slots=True)
class Plan:
    """What can be done now: spans to compute, spans to load (compute them when they have arrived), and spans that
    are being loaded already because they were predicted or asked for (compute them when they have arrived, too).
    `requested` is to be loaded behind `loads`, and not to be waited for: a later Plan says that it is ready or joined.
    """

    ready: list[Span] = field(default_factory=list)
    loads: list[Span] = field(default_factory=list)
    joined: list[Span] = field(default_factory=list)
    requested: list[Span] = field(default_factory=list)
