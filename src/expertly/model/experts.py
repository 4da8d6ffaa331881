"""The experts function: transformers' dispatch ends here and goes on to the module's own runtime."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from expertly.model.runtime import Runtime

IMPLEMENTATION = "expertly"
"""`experts_implementation` of a loaded model."""

_DEFAULT = "grouped_mm"


def register() -> None:
    """Make `experts_implementation="expertly"` known to transformers. Idempotent."""
    if IMPLEMENTATION not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


def bind(module: nn.Module, layer: int, runtime: Runtime) -> None:
    """Give an experts module its runtime: two models of one family may have two."""
    untyped: Any = module
    untyped._expertly_layer = layer
    untyped._expertly_runtime = runtime


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """[T, H] from hidden states [T, H], ids [T, K] and weights [T, K], by position as transformers calls it.

    A module without a runtime (a model made from a loaded model's config) has its weights and runs as usual.
    """
    runtime: Runtime | None = getattr(self, "_expertly_runtime", None)
    if runtime is None:
        default = ALL_EXPERTS_FUNCTIONS[_DEFAULT]
        return default(self, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
    return runtime.forward_experts(self, self._expertly_layer, hidden_states, top_k_index, top_k_weights)
