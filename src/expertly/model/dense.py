"""The dense part of a loaded model at a few tokens: linear layers, norms and attention by the compiled kernels.

A module is changed where it does what the kernel does, which is found by what it computes and not by its name; prompts,
gradients, other dtypes and devices, and whatever is not recognised, stay transformers' and torch's.
B sequences of S tokens; H heads, D width of a head, n tokens of a sequence that ask.
"""

from __future__ import annotations

import copy
import inspect
import sys
from array import array
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from expertly.model.hooks import look_alike
from expertly.native.kernels import NORM_STYLES, Kernels

GAINING = (torch.bfloat16, torch.float16)
"""Whose products torch makes at half the speed of the memory, or less."""

_PLAIN = (nn.Parameter, torch.Tensor)
"""Other kinds of tensor, as quantizing makes them, have no memory of their own, or other bytes in it."""


def use_kernels(model: nn.Module, kernels: Kernels) -> int:
    """Compute few tokens in the dense part of a loaded model by the compiled kernels; how many modules changed.

    They differ from torch's in the order of summation, and attention rounds once where torch's may round its weights.
    """
    if not kernels.dtypes:
        return 0
    return _use_products(model, kernels) + _use_norms(model, kernels) + _use_attention(model, kernels)


# -- linear layers -----------------------------------------------------------------------------------------------------


def _use_products(model: nn.Module, kernels: Kernels) -> int:
    modules: list[Any] = [
        module
        for module in model.modules()
        if type(module) is nn.Linear and module.weight.dtype in GAINING and kernels.takes(module.weight.dtype)
    ]
    for module in modules:
        module.__class__ = FewTokensLinear
        module._expertly_kernels = kernels
    return len(modules)


class FewTokensLinear(nn.Linear):
    """An nn.Linear whose product is the compiled one for a few tokens."""

    _expertly_kernels: Kernels

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As nn.Linear's. Parameters are looked at each time: whoever has the model may have replaced, cast, moved or
        quantized them, or train them. One call for all: it runs several times a layer and token.
        """
        weight, bias, kernels, width = self.weight, self.bias, self._expertly_kernels, input.shape[-1]
        num_tokens = input.numel() // width if width else 0
        can_train = torch.is_grad_enabled()
        if (
            not 1 <= num_tokens <= kernels.max_tokens
            or input.dtype not in kernels.dtypes
            or not input.is_cpu
            or width != weight.shape[1]
            or (can_train and input.requires_grad)
            or torch.is_autocast_enabled("cpu")
            or torch.compiler.is_compiling()
        ):
            return linear(input, weight, bias)
        for one in (weight,) if bias is None else (weight, bias):
            if (
                type(one) not in _PLAIN
                or one.dtype != input.dtype
                or not one.is_cpu
                or one.stride(-1) != 1
                or (can_train and one.requires_grad)
            ):
                return linear(input, weight, bias)
        x = input.reshape(num_tokens, width)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = x.new_empty(1, num_tokens, weight.shape[0])
        task = (weight.data_ptr(), 0, num_tokens, 0)
        kernels.dots(task, x, out, weight.stride(0) * weight.element_size(), bias=bias)
        return out.view(*input.shape[:-1], weight.shape[0])


FewTokensLinear.__name__ = FewTokensLinear.__qualname__ = "Linear"
