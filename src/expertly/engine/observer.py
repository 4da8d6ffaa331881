"""Who may watch a model's forward passes: the rows, and what each layer's router chose."""

from __future__ import annotations

from typing import Protocol

import torch

from expertly.core.observation import IterationInfo


class Observer(Protocol):
    """Told of each forward pass by the engine, in order. What it raises is raised by the forward pass."""

    def begin_iteration(self, info: IterationInfo) -> None:
        """A forward pass begins; `info` says the token and the sequence of each row."""

    def router_ran(
        self, layer: int, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> None:
        """The experts' input [T, H], ids [T, K] and weights [T, K] of a layer that is about to run.

        Ids that are `num_experts` or more choose no expert. The tensors are the model's own: read, never written.
        """

    def end_iteration(self, ok: bool) -> None:
        """It ended; `ok` is False when it raised."""
