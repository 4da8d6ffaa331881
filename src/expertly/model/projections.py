"""Attention's queries, keys and values of a few tokens in one native call: linear layers, norms and rotation.

A module is tried with the first few tokens that it is given: where one call makes what the module's own forward asks
attention with, to the bit, it does so from then on. B sequences of S tokens, n = B S, H hidden, D width of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook  # type: ignore[attr-defined]

from expertly.model.hooks import CACHE, look_alike
from expertly.native.kernels import Kernels, Projections

_ARGUMENTS = ("self", "hidden_states", "position_embeddings", "attention_mask", CACHE)

_NAMES = {
    "shape",
    "head_dim",
    "view",
    "transpose",
    "reshape",
    "contiguous",
    "getattr",
    "config",
    "training",
    "layer_idx",
}
_NAMES |= {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "use_qk_norm", "apply_rotary_pos_emb", "update"}
_NAMES |= {"ALL_ATTENTION_FUNCTIONS", "get_interface", "_attn_implementation", "eager_attention_forward"}
_NAMES |= {"attention_dropout", "scaling", "sliding_window", "sinks"}
"""What a forward may look up that does no more than what is joined: another name may be a step that the tokens of the
trial do not show.
"""

_LINEARS = ("q_proj", "k_proj", "v_proj")
_NORMS = ("q_norm", "k_norm")

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


@dataclass
class Joined:
    """What a module's own forward was found to do."""

    parts: list[tuple[str, Any, list[tuple[str, int]]]]  # name, module and where its parameters are, as they were tried
    projections: Projections
    then: tuple[torch.Tensor, torch.Tensor | None] | None  # of the layer behind attention, where it can be joined
    own: dict[str, Any]  # what the module tells attention beside what it is given
    named: dict[str, str]  # the same of its tensors, by its names for them

    def is_as_tried(self, module: Any) -> bool:
        """Nobody replaced, moved or watches its parts since."""
        modules = module._modules
        for name, part, addresses in self.parts:
            if modules.get(name) is not part or part._forward_hooks or part._forward_pre_hooks:
                return False
            parameters = part._parameters
            for name, address in addresses:
                parameter = parameters.get(name)
                if address != (0 if parameter is None else parameter.data_ptr()):
                    return False
        return not _has_any_global_hook()


def _address_of(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def join_projections(module: Any, kernels: Kernels, attention: Attention, linear: type[nn.Linear]) -> None:
    """From the first few tokens on, where it is found to be possible. `attention` is what the module asks, which notes
    in the module's `_expertly_tried` what it was asked with; `linear` is the class of linear layers of few tokens.
    """
    original = type(module)
    code = inspect.unwrap(original.forward).__code__
    if not set(code.co_names) <= _NAMES or code.co_varnames[: code.co_argcount] != _ARGUMENTS:
        return
    if not all(type(getattr(module, name, None)) is linear for name in _LINEARS):
        return
    if not all(
        getattr(module, name, None) is None or hasattr(getattr(module, name), "_expertly_norm") for name in _NORMS
    ):
        return

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> Any:
        if cache is None:
            cache = kwargs.pop("past_key_values", None)
        joined: Joined | None = self._expertly_joined
        few = isinstance(position_embeddings, tuple) and _are_few(self, hidden_states, position_embeddings, kernels)
        if few and joined is None and not self._expertly_is_tried:
            self._expertly_is_tried = True
            joined = self._expertly_joined = _try(self, original, hidden_states, position_embeddings, kernels, kwargs)
        if not few or joined is None or not joined.is_as_tried(self):
            return original.forward(self, hidden_states, position_embeddings, attention_mask, cache, **kwargs)
        query, key, value = _project(joined.projections, hidden_states, position_embeddings, kernels)
        if cache is not None:
            told = {"kwargs": kwargs} if CACHE == "cache" else {}  # which a paged cache fills
            key, value = cache.update(key, value, self.layer_idx, **told)
        own = joined.own
        if joined.named:
            own = {**own, **{argument: getattr(self, name) for argument, name in joined.named.items()}}
        out, weights = attention(self, query, key, value, attention_mask, then=joined.then, **own, **kwargs)
        if out.dim() == 4:
            out = self.o_proj(out.reshape(*hidden_states.shape[:-1], -1))
        return out, weights

    module.__class__ = look_alike(original, forward=forward)
    module._expertly_joined, module._expertly_is_tried = None, False


def _are_few(module: Any, hidden: torch.Tensor, angles: Any, kernels: Kernels) -> bool:
    cos, sin = angles
    weight = module.q_proj.weight
    return (
        hidden.dim() == 3
        and 1 <= hidden.shape[0] * hidden.shape[1] <= kernels.max_tokens
        and hidden.dtype == weight.dtype == cos.dtype == sin.dtype
        and hidden.is_cpu
        and not module.training
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def _project(projections: Projections, hidden: torch.Tensor, angles: Any, kernels: Kernels) -> list[torch.Tensor]:
    """Queries [B, heads, S, D], keys and values, as transformers has them."""
    x = hidden.view(-1, hidden.shape[2]) if hidden.is_contiguous() else hidden.reshape(-1, hidden.shape[2]).contiguous()
    cos, sin = angles
    return kernels.projections(x, projections, cos.contiguous(), sin.contiguous(), hidden.shape[0])


def _try(
    module: Any, original: type, hidden: torch.Tensor, angles: Any, kernels: Kernels, kwargs: dict[str, Any]
) -> Joined | None:
    """What its own forward does with these tokens, where one call does the same."""
    named = {name: one for name in (*_LINEARS, *_NORMS, "o_proj") if (one := getattr(module, name, None)) is not None}
    linears, last = [named[name] for name in _LINEARS], named["o_proj"]
    if type(last) is not type(linears[0]):
        del named["o_proj"]
    for one in named.values():
        if any(it.dtype != hidden.dtype or not it.is_contiguous() for it in one.parameters(recurse=False)):
            return None
    norms = [(named[name].weight, *named[name]._expertly_norm) if name in named else None for name in _NORMS]
    tried: list[Any] = []
    module._expertly_tried = tried
    try:
        original.forward(module, hidden, angles, None, None, **kwargs)  # type: ignore[attr-defined]
    finally:
        del module._expertly_tried
    if len(tried) != 1:
        return None
    query, key, value, more = tried[0]
    own = {argument: given for argument, given in more.items() if argument not in kwargs}
    names = {id(one): name for name, one in module.named_parameters(recurse=False)}
    tensors = {argument: given for argument, given in own.items() if isinstance(given, torch.Tensor)}
    if not all(id(given) in names for given in tensors.values()):
        return None
    of_tensors = {argument: names[id(given)] for argument, given in tensors.items()}
    others = {argument: given for argument, given in own.items() if argument not in tensors}
    parts = [
        (name, one, [(which, _address_of(parameter)) for which, parameter in one._parameters.items()])
        for name, one in named.items()
    ]
    then = (last.weight, last.bias) if "o_proj" in named else None
    num_angles = angles[0].shape[-1]
    for width in (num_angles, 2 * num_angles):  # of numbers that are rotated
        if width % 2 or width > module.head_dim:
            continue
        weights, biases = [one.weight for one in linears], [one.bias for one in linears]
        projections = Projections(weights, biases, norms, module.head_dim, width)
        if all(map(torch.equal, _project(projections, hidden, angles, kernels), (query, key, value))):
            return Joined(parts, projections, then, others, of_tensors)
    return None
