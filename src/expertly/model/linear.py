"""Dense products of a few tokens by the compiled kernels: the attention's, the router's, the head's.

A loaded model's nn.Linear modules become a subclass of the same name. It differs from theirs in the order of summation
alone; inputs that it does not take (prompts, gradients, other dtypes) go to torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from expertly.native.kernels import Kernels

GAINING = (torch.bfloat16, torch.float16)
"""Whose products torch makes at half the speed of the memory, or less."""

_PLAIN = (nn.Parameter, torch.Tensor)
"""Other kinds of tensor, as quantizing makes them, have no memory of their own, or other bytes in it."""


class FewTokensLinear(nn.Linear):
    """An nn.Linear whose product is the compiled one for a few tokens."""

    _expertly_kernels: Kernels

    @classmethod
    def of(cls, module: nn.Linear, kernels: Kernels) -> nn.Linear:
        """The module itself, changed; or as it was where the kernels are not for it."""
        weight = module.weight
        if type(module) is nn.Linear and weight.dtype in GAINING and kernels.takes(weight.dtype, weight.device):
            module.__class__ = cls
            untyped: Any = module
            untyped._expertly_kernels = kernels
        return module

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As nn.Linear's. Parameters are looked at each time: whoever has the model may have replaced, cast, moved or
        quantized them, or train them.
        """
        weight, bias, width, kernels = self.weight, self.bias, input.shape[-1], self._expertly_kernels
        num_tokens = input.numel() // width if width else 0
        if (
            not 1 <= num_tokens <= kernels.max_tokens
            or not kernels.takes(input.dtype, input.device)
            or not _goes_with(weight, input)
            or (bias is not None and not _goes_with(bias, input))
            or width != weight.shape[1]
            or torch.is_autocast_enabled("cpu")
            or (torch.is_grad_enabled() and _is_trained(input, weight, bias))
            or torch.compiler.is_compiling()
        ):
            return linear(input, weight, bias)
        x = input.reshape(num_tokens, width)
        out = x.new_empty(1, num_tokens, weight.shape[0])
        if x.stride(1) != 1:
            x = x.contiguous()
        task = (weight.data_ptr(), 0, num_tokens, 0)
        kernels.dots(task, x, out, weight.stride(0) * weight.element_size(), bias=bias)
        return out.view(*input.shape[:-1], weight.shape[0])


def _goes_with(parameter: torch.Tensor, input: torch.Tensor) -> bool:
    """Whether it lies in memory as the kernels read it."""
    return (
        type(parameter) in _PLAIN
        and parameter.dtype == input.dtype
        and parameter.device == input.device
        and parameter.stride(-1) == 1
    )


def _is_trained(*tensors: torch.Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def use_kernels(model: nn.Module, kernels: Kernels) -> int:
    """Change a loaded model's dense products; how many."""
    modules = [FewTokensLinear.of(module, kernels) for module in model.modules() if type(module) is nn.Linear]
    return sum(type(module) is FewTokensLinear for module in modules)


FewTokensLinear.__name__ = FewTokensLinear.__qualname__ = "Linear"
