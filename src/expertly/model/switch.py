"""switch_transformers: a module per expert and a mask of choices, turned into the call that all others make.

The router drops what exceeds an expert's capacity: such a token's mask row is zero, and so is its output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from expertly.model.runtime import Runtime


def strip(module: nn.Module) -> None:
    """Drop the experts of a SwitchTransformersExperts, keep their activation, and send its calls to the runtime."""
    experts: Any = module
    first = next(iter(experts.values()))
    for name in list(experts):
        del experts[name]
    experts.act_fn = first.act
    experts.has_gate = experts.has_bias = experts.is_transposed = False
    experts.is_concatenated = True
    module.__class__ = _dispatching(type(module))


def _dispatching(original: type[nn.Module]) -> type[nn.Module]:
    namespace = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "forward": _forward,
    }
    return type(original.__name__, (original,), namespace)


def _forward(
    self: Any, hidden_states: torch.Tensor, selected_experts: torch.Tensor, routing_weights: torch.Tensor
) -> torch.Tensor:
    """[T, H] from hidden states [T, H], the mask of choices [T, 1, E] and their weights [T, 1]."""
    is_chosen, index = selected_experts.max(dim=-1)  # [T, 1] each
    index = torch.where(is_chosen > 0, index, self.num_experts)  # no such expert: the output is zero
    runtime: Runtime = self._expertly_runtime
    return runtime.forward_experts(self, self._expertly_layer, hidden_states, index, routing_weights)
