"""The seam between a model and what computes its experts."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from expertly.core.observation import IterationInfo


class Runtime(Protocol):
    """Computes the experts of one model. Calls never overlap: the model serialises its forward passes."""

    @property
    def wants_token_ids(self) -> bool:
        """Is each `IterationInfo` to say what is fed to each row, of which sequence it is, and which layers run?"""
        ...

    def begin_iteration(self, info: IterationInfo) -> None:
        """A forward pass begins. What it raises is raised by the forward pass."""

    def end_iteration(self, ok: bool) -> None:
        """It ended; `ok` is False when it raised. Called once for each `begin_iteration` that returned."""

    def forward_experts(
        self,
        module: nn.Module,
        layer: int,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Weighted sum of the chosen experts' outputs, [T, H] in the dtype of `hidden_states` [T, H].

        `module` is the layer's experts module without its weights (biases, activation and flags are there).
        An id in `top_k_index` [T, K] that is `num_experts` or more chooses no expert: its share is zero.
        `top_k_weights` [T, K] may have another dtype than `hidden_states`.
        """
        ...
