"""An observer that turns each forward pass into the rows of a trace.

T tokens, L layers, K top-k, E experts, H hidden, D distances looked ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from expertly.core.errors import TraceError
from expertly.core.observation import IterationInfo
from expertly.lab.score_recorder import Columns, ScoreRecorder
from expertly.trace.schema import NO_EXPERT, Array, TraceLayer, trace_field

Append = Callable[[Mapping[str, Array]], None]


class Recorder:
    """Calls `append` once a forward pass with its real (not pad) rows, in the order in which experts see them.

    A pass that fails, or that runs no MoE layer, is left out. `append` must copy what it keeps.
    """

    def __init__(self, layers: Sequence[TraceLayer], append: Append, scores: ScoreRecorder | None = None) -> None:
        self.requests: npt.NDArray[np.int32] | None = None
        """The request of each sequence of a batch; None where all rows are of the request that began last."""
        self._append = append
        self._scores = scores
        self._num_experts = np.array([layer.num_experts for layer in layers])
        self._top_k = [layer.top_k for layer in layers]
        self._columns = Columns(trace_field(name, layers) for name in ("experts", "weights"))
        self._info: IterationInfo | None = None
        self._ran: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def begin_iteration(self, info: IterationInfo) -> None:
        self._info = info
        self._ran = {}
        if self._scores is not None:
            self._scores.begin()

    def router_ran(
        self, layer: int, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> None:
        # Copied once for all layers at the end: a copy a layer would make an accelerator wait each time.
        if self._info is not None and len(top_k_index) == len(self._info.is_prefill):
            self._ran[layer] = top_k_index, top_k_weights

    def end_iteration(self, ok: bool) -> None:
        info, self._info = self._info, None
        ran, self._ran = self._ran, {}
        if info is None or not ok or not ran:
            return
        rows = self._rows(info, ran)
        if self._scores is not None:
            rows |= self._scores.rows(rows["token"], info)
        if info.is_pad is not None:
            is_real = ~info.is_pad
            rows = {name: column[is_real] for name, column in rows.items()}
        if len(rows["token"]):
            self._append(rows)

    def _rows(self, info: IterationInfo, ran: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Array]:
        num_rows = len(info.is_prefill)
        experts = self._columns.blank("experts", num_rows)
        weights = self._columns.blank("weights", num_rows)
        for top_k in dict.fromkeys(self._top_k[layer] for layer in ran):
            layers = [layer for layer in ran if self._top_k[layer] == top_k]
            index = torch.stack([ran[layer][0] for layer in layers], 1).cpu().numpy()  # [T, layers, K]
            is_none = (index < 0) | (index >= self._num_experts[layers, None])
            experts[:, layers, :top_k] = np.where(is_none, NO_EXPERT, index)
            weights[:, layers, :top_k] = torch.stack([ran[layer][1] for layer in layers], 1).half().cpu().numpy()
        token = np.full(num_rows, -1, np.int32) if info.token_ids is None else info.token_ids
        rows = {"token": token, "is_prefill": info.is_prefill, "experts": experts, "weights": weights}
        return rows if self.requests is None else rows | {"request": self._request_of_rows(info)}

    def _request_of_rows(self, info: IterationInfo) -> Array:
        assert self.requests is not None and info.sequences is not None, "the engine asks for them"
        if info.num_requests != len(self.requests):
            raise TraceError(
                f"a batch of {info.num_requests} sequences, but {len(self.requests)} requests were named for its rows"
            )
        return self.requests[info.sequences]
