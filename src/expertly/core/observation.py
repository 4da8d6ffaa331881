"""What a predictor may see of forward passes: NumPy arrays over their real (not pad) rows.

T rows, L layers, E experts, K top-k, H hidden, D distances looked ahead. Scores are a layer's routing scores, which sum
to 1 over its experts; where only the weights of the chosen experts are known, those, and 0 for the rest. What nobody
knows, or the predictor does not want, is None. All arrays are read-only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from expertly.core.messages import RouterRan

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[Any]
"""Of experts, in any integer type; what is not in 0..E-1 is no choice."""

Want = Literal["token_ids", "embedding", "experts", "scores", "inputs", "lookahead"]


@dataclass(frozen=True, slots=True)
class Began:
    """A forward pass begins."""

    requests: npt.NDArray[np.int64]  # [T] the request of each row: numbers that no two requests share
    is_prefill: npt.NDArray[np.bool_]  # [T]
    embedding: Floats | None = None  # [T, H] what the model's input embedding makes of the row
    layers: range | None = None  # of the stack that runs: an encoder and a decoder are two; None: all
    token_ids: npt.NDArray[np.int32] | None = None  # [T] below 0: unknown


@dataclass(frozen=True, slots=True)
class Routed:
    """The router of a layer has spoken."""

    demand: RouterRan
    experts: Ids | None = None  # [T, K]
    scores: Floats | None = None  # [T, E]
    lookahead: Floats | None = None  # [T, D, E]: of the layers 1 to D after this one, asked about this one's input
    # past the last layer of a stack that decodes, of its first ones for the next token; 0 where nothing is known
    inputs: Floats | None = None  # [T, H] what the router was asked about

    @property
    def layer(self) -> int:
        return self.demand.layer


@dataclass(frozen=True, slots=True)
class History:
    """Rows of passes that have long ended, to learn from."""

    requests: npt.NDArray[np.int64]  # [T]
    is_prefill: npt.NDArray[np.bool_]  # [T]
    experts: Ids  # [T, L, K]
    scores: Floats  # [T, L, E]
    embedding: Floats | None = None  # [T, H]
    token_ids: npt.NDArray[np.int32] | None = None  # [T] below 0: unknown
