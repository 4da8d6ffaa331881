"""What experts outside transformers' interface compute, found by running their class with small random weights.

E experts, T tokens, H hidden, I intermediate.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_SCALES = (0.1, 1.0, 100.0)  # of the tokens: a limit of activations shows
_OTHERWISE = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError)


@dataclass(frozen=True, slots=True)
class Calls:
    """How a module with the weights `gate_up_proj` and `down_proj` is called, and how they lie (see ExpertsSite)."""

    is_transposed: bool
    is_concatenated: bool
    takes_rows: bool  # forward(rows [E * T, H]): each expert has all tokens, and zeros where it was not chosen
    passes_on: bool  # an id of E or more gives its token


def try_experts(module: nn.Module) -> Calls | None:
    """None where the module computes something else, or of more than tokens, ids and weights."""
    weights = dict(module.named_parameters())
    if weights.keys() != {"gate_up_proj", "down_proj"} or any(weight.dim() != 3 for weight in weights.values()):
        return None
    (num_ids, *inner), (num_experts, *outer) = (weights[name].shape for name in ("gate_up_proj", "down_proj"))
    is_transposed = [outer[0] * 2, outer[1]] == inner[::-1]
    width, hidden = outer if is_transposed else outer[::-1]
    num_arguments = len(inspect.signature(type(module).forward).parameters) - 1
    if sorted(inner) != sorted((2 * width, hidden)) or num_arguments not in (1, 3) or num_ids < num_experts:
        return None
    sizes = {num_experts: 3}
    for size, small in ((2 * width, 8), (width, 4), (hidden, 6), (num_ids, 5)):
        sizes.setdefault(size, small)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.device("cpu"):
        tried: Any = object.__new__(type(module))
        vars(tried).update({k: sizes.get(v, v) if type(v) is int else v for k, v in vars(module).items()})
        shapes = {name: [sizes[size] for size in weight.shape] for name, weight in weights.items()}
        tried._parameters = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        x = torch.randn(len(_SCALES), sizes[hidden], generator=generator) * torch.tensor(_SCALES)[:, None]
        with suppress(*_OTHERWISE):
            for is_concatenated in (True, False):
                every = _every_expert(tried, x, is_transposed, is_concatenated)
                if num_arguments == 1:
                    made, passes_on = tried.forward(x.repeat(len(every), 1)), False
                    is_it = _is_same(made, every.flatten(0, 1))
                else:
                    is_it, passes_on = _tried_by_ids(tried, x, every)
                if is_it:
                    return Calls(is_transposed, is_concatenated, num_arguments == 1, passes_on)
    return None


def _every_expert(module: Any, x: torch.Tensor, is_transposed: bool, is_concatenated: bool) -> torch.Tensor:
    """[E, T, H]"""
    ups, downs = (module._parameters[name] for name in ("gate_up_proj", "down_proj"))
    ups, downs = (ups, downs) if is_transposed else (ups.mT, downs.mT)
    inner = x @ ups[: len(downs)]
    gate, up = inner.chunk(2, dim=-1) if is_concatenated else (inner[..., ::2], inner[..., 1::2])
    own_gate = getattr(module, "_apply_gate", None)
    return (module.act_fn(gate) * up if own_gate is None else own_gate(inner)) @ downs  # type: ignore[no-any-return]


def _tried_by_ids(module: Any, x: torch.Tensor, every: torch.Tensor) -> tuple[bool, bool]:
    """Whether the module gives the weighted sums of `every` expert, and whether ids behind them give their token."""
    num_experts, num_tokens, _ = every.shape
    ids = torch.arange(2 * num_tokens).reshape(num_tokens, 2) % num_experts
    weights = (ids + 1.0) / num_experts
    chosen = every.transpose(0, 1)[torch.arange(num_tokens)[:, None], ids]  # [T, K, H]
    is_sum = _is_same(module.forward(x, ids, weights), (chosen * weights[..., None]).sum(1))
    beyond = module.forward(x, torch.full_like(ids, num_experts), weights)
    passes_on = _is_same(beyond, x * weights.sum(1, keepdim=True))
    return is_sum and (passes_on or not beyond.any()), passes_on


def _is_same(made: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(((made - expected).abs() <= 1e-5 * expected.abs().amax(-1, keepdim=True)).all())
