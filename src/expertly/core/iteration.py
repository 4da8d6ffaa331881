"""What one forward pass is: whose tokens its rows are, in which phase, through which layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class IterationInfo:
    """One forward pass of T token rows, in the order in which experts see them (batch x sequence, row-major).

    The phase belongs to the request, so one pass may hold rows of both. Arrays are read-only and may be shared
    between iterations.
    """

    is_prefill: npt.NDArray[np.bool_]  # [T]
    is_pad: npt.NDArray[np.bool_] | None  # [T]; None where no row is a pad
    num_requests: int  # sequences in the batch; a beam is one
    phase: Literal["prefill", "decode"]  # prefill if any row is
    # What only a runtime that `wants_token_ids` is told:
    token_ids: npt.NDArray[np.int32] | None = None  # [T] what is fed; None where unknown
    embeddings: npt.NDArray[np.float16] | None = None  # [T, H] what is fed instead, None where ids are
    sequences: npt.NDArray[np.int32] | None = None  # [T] row of the batch
    starts: npt.NDArray[np.int64] | None = None  # [sequences] position of the first row, where they are side by side
    layers: range | None = None  # the MoE layers of the stack that runs: an encoder and a decoder are two
    decodes: bool = True  # whether the last token leads to a pass of the next one; an encoder's does not


def layer_ahead(layer: int, distance: int, stack: range, decodes: bool) -> int | None:
    """The layer that runs `distance` after `layer` of `stack`: past the last layer of one that decodes the first ones,
    which the next token runs. None where there is none; every other layer is reached once, none by itself.
    """
    ahead = layer + distance
    if ahead < stack.stop:
        return ahead
    return ahead - len(stack) if decodes and distance < len(stack) else None
