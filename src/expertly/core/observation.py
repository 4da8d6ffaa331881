"""What a predictor may see of forward passes: arrays over the real (not pad) token rows.

T rows, L layers, E experts, K top-k, H hidden, D distances looked ahead. Routing scores sum to 1 over the experts of a
layer; where only the weights of the chosen experts are known, the others have 0. A field is None where it is unknown or
the predictor did not ask for it. All arrays are read-only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from expertly.core.messages import RouterRan

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[Any]
"""Expert ids, in any integer type. An id outside 0..E-1 stands for no choice."""

Want = Literal["token_ids", "embedding", "experts", "scores", "inputs", "lookahead"]
"""What a predictor may ask to see."""


@dataclass(frozen=True, slots=True)
class IterationInfo:
    """One forward pass of T token rows, pads included, in the order in which experts see them (batch x sequence).

    The phase belongs to the request, so one pass may hold rows of both. Iterations may share arrays.
    """

    is_prefill: npt.NDArray[np.bool_]  # [T]
    is_pad: npt.NDArray[np.bool_] | None  # [T]; None where no row is a pad
    num_requests: int  # sequences in the batch; a beam is one
    phase: Literal["prefill", "decode"]  # prefill if any row is
    # Only for a runtime with `wants_token_ids`:
    token_ids: npt.NDArray[np.int32] | None = None  # [T] what is fed; None where unknown
    embeddings: npt.NDArray[np.float16] | None = None  # [T, H] what is fed instead of ids
    sequences: npt.NDArray[np.int32] | None = None  # [T] row of the batch
    starts: npt.NDArray[np.int64] | None = None  # [sequences] position of the first row, where rows are adjacent


@dataclass(frozen=True, slots=True)
class Began:
    """A forward pass begins."""

    requests: npt.NDArray[np.int64]  # [T] the request of each row, by a number that no other request has
    is_prefill: npt.NDArray[np.bool_]  # [T]
    embedding: Floats | None = None  # [T, H] the model's input embedding of the row
    token_ids: npt.NDArray[np.int32] | None = None  # [T] below 0: unknown
    choices: Mapping[int, Ids] = field(default_factory=dict)  # [T, K] of layers whose router goes by the token alone


@dataclass(frozen=True, slots=True)
class Routed:
    """The router of a layer has chosen."""

    router: RouterRan
    experts: Ids | None = None  # [T, K]
    scores: Floats | None = None  # [T, E]
    lookahead: Floats | None = None  # [T, D, E] the routers of the next D layers, asked about this layer's input.
    # Past the last layer they are the first ones, for the next token. 0 where unknown.
    inputs: Floats | None = None  # [T, H] what the router was asked about

    @property
    def layer(self) -> int:
        return self.router.layer


@dataclass(frozen=True, slots=True)
class History:
    """Rows of passes that ended long ago, to learn from."""

    requests: npt.NDArray[np.int64]  # [T]
    is_prefill: npt.NDArray[np.bool_]  # [T]
    experts: Ids  # [T, L, K]
    scores: Floats  # [T, L, E]
    embedding: Floats | None = None  # [T, H]
    token_ids: npt.NDArray[np.int32] | None = None  # [T] below 0: unknown


def scores_of_choices(experts: Ids, weights: npt.NDArray[Any], num_experts: int) -> Floats:
    """Scores [..., E] of chosen `experts` and their `weights`, both [..., K]: normalised weights, 0 for the others.

    Where all weights are 0, the chosen experts share equally; where nothing is chosen, all scores are 0.
    """
    is_choice = (experts >= 0) & (experts < num_experts)
    known = np.maximum(weights, 0).astype(np.float32)
    known[~is_choice] = 0
    total = known.sum(-1, keepdims=True)
    if not total.all():
        known = np.where(total > 0, known, is_choice.astype(np.float32))
        total = known.sum(-1, keepdims=True)
        total[total == 0] = 1
    top_k = experts.shape[-1]
    places = np.where(is_choice, experts, num_experts).reshape(-1, top_k).astype(np.intp)
    places += (np.arange(len(places)) * (num_experts + 1))[:, None]  # one more place a row, for what is no choice
    scores = np.zeros(len(places) * (num_experts + 1), np.float32)
    scores[places.reshape(-1)] = (known / total).reshape(-1)
    scores = scores.reshape(*experts.shape[:-1], num_experts + 1)
    scores[..., num_experts] = 0
    return np.ascontiguousarray(scores[..., :num_experts])
