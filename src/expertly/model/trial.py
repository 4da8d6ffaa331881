"""What experts outside transformers' interface compute, found by running their own class with a few small numbers.

E experts, T tokens, H hidden, I intermediate.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_NUM_TOKENS = 3
_UNEQUAL = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError)


@dataclass(frozen=True, slots=True)
class Calls:
    """How a module of two weights, `gate_up_proj` and `down_proj`, is called, and how the weights lie."""

    is_transposed: bool
    is_concatenated: bool
    takes_rows: bool  # forward(rows [E * T, H]): each expert has all tokens, and zeros where it was not chosen
    passes_on: bool  # an id of E or more gives its token


def try_experts(module: nn.Module) -> Calls | None:
    """How the module is called; None where it computes something else, or takes more than tokens, ids and weights."""
    weights: dict[str, Any] = dict(module.named_parameters())
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
        tried.__dict__ = {k: sizes.get(v, v) if type(v) is int else v for k, v in vars(module).items()}
        tried._parameters = {
            name: torch.randn([sizes[size] for size in weight.shape], generator=generator)
            for name, weight in weights.items()
        }
        small_experts, x = sizes[num_experts], torch.randn(_NUM_TOKENS, sizes[hidden], generator=generator)
        for is_concatenated in (True, False):
            every = torch.stack([_expert(tried, e, x, is_transposed, is_concatenated) for e in range(small_experts)])
            try:
                passes_on = _passes_on(tried, x, every, takes_rows=num_arguments == 1)
            except _UNEQUAL:
                return None
            if passes_on is not None:
                return Calls(is_transposed, is_concatenated, num_arguments == 1, passes_on)
    return None


def _expert(tried: Any, expert: int, x: torch.Tensor, is_transposed: bool, is_concatenated: bool) -> torch.Tensor:
    """[T, H]"""
    up, down = (tried._parameters[name][expert] for name in ("gate_up_proj", "down_proj"))
    inner = x @ (up if is_transposed else up.T)
    if hasattr(tried, "_apply_gate"):
        activated = tried._apply_gate(inner)
    else:
        gate, up = inner.chunk(2, dim=-1) if is_concatenated else (inner[:, ::2], inner[:, 1::2])
        activated = tried.act_fn(gate) * up
    return activated @ (down if is_transposed else down.T)  # type: ignore[no-any-return]


def _passes_on(tried: Any, x: torch.Tensor, every: torch.Tensor, *, takes_rows: bool) -> bool | None:
    """Whether an id beyond the experts gives its token, or nothing; None where the module's outputs are not those of
    `every` [E, T, H].
    """
    num_experts, num_tokens, _ = every.shape
    if takes_rows:
        is_it = torch.allclose(tried.forward(x.repeat(num_experts, 1)), every.flatten(0, 1), atol=1e-4)
        return False if is_it else None
    ids = torch.arange(2 * num_tokens).reshape(num_tokens, 2) % num_experts
    weights = (ids + 1.0) / num_experts
    expected = torch.zeros_like(x)
    for choice in range(2):
        expected += every[ids[:, choice], torch.arange(num_tokens)] * weights[:, choice, None]
    if not torch.allclose(tried.forward(x, ids, weights), expected, atol=1e-4):
        return None
    beyond = tried.forward(x, torch.full_like(ids, num_experts), weights)
    return (
        True if torch.allclose(beyond, x * weights.sum(1, keepdim=True), atol=1e-4) else None if beyond.any() else False
    )
