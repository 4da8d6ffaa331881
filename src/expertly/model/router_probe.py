"""What a router of a model looks like from outside: the calls of the modules beside its experts in one pass.

T tokens, H hidden, E experts, K top-k.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from expertly.model import experts
from expertly.model.context import unannounced
from expertly.model.loading import experts_modules

_NUM_TOKENS = 64


@dataclass
class Call:
    """A call of a module beside the experts."""

    module: nn.Module
    inputs: torch.Tensor
    args: tuple[Any, ...]  # those after the first
    kwargs: dict[str, Any]
    parts: list[Any]  # of its output


@dataclass
class LayerCalls:
    """What the experts of a layer were called with, and what ran beside them."""

    calls: dict[str, Call] = field(default_factory=dict)
    choice: Any = None  # as the block passes it: ids, or a mask
    hidden: torch.Tensor | None = None  # [T, H]
    index: torch.Tensor | None = None  # [T, K]
    weights: torch.Tensor | None = None  # [T, K]


def watch_blocks(model: PreTrainedModel) -> dict[int, LayerCalls]:
    """One forward pass of a loaded model over a few tokens of its vocabulary, by layer. Its runtime is not told."""
    probe = _Probe()
    with torch.no_grad(), unannounced(model), probe.watching(model, experts_modules(model)):
        embedding: Any = model.get_input_embeddings()
        token_ids = torch.linspace(0, embedding.weight.shape[0] - 1, _NUM_TOKENS).long().unsqueeze(0).to(model.device)
        decoder: dict[str, Any] = {"decoder_input_ids": token_ids} if model.config.is_encoder_decoder else {}
        model(input_ids=token_ids, use_cache=False, **decoder)
    return probe.seen


class _Probe:
    """A runtime without experts: every expert's output is zero. Notes what each layer and what is beside it saw."""

    wants_token_ids = False

    def __init__(self) -> None:
        self.seen: dict[int, LayerCalls] = {}

    def begin_iteration(self, info: Any) -> None:
        """Not told."""

    def end_iteration(self, ok: bool) -> None:
        """Not told."""

    def forward_experts(
        self,
        module: nn.Module,
        layer: int,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        seen = self.seen.setdefault(layer, LayerCalls())
        seen.hidden, seen.index, seen.weights = hidden_states, top_k_index, top_k_weights
        return torch.zeros_like(hidden_states)

    @contextlib.contextmanager
    def watching(self, model: PreTrainedModel, modules: Sequence[nn.Module]) -> Iterator[None]:
        paths = {id(module): path for path, module in model.named_modules()}
        runtimes = [module._expertly_runtime for module in modules]
        handles: list[Any] = []
        try:
            for layer, module in enumerate(modules):
                experts.bind(module, layer, self)
                parent = model.get_submodule(paths[id(module)].rpartition(".")[0])
                handles.append(module.register_forward_pre_hook(self._note_choice(layer)))
                within = set(module.modules()) | {parent}
                for name, beside in parent.named_modules():
                    if beside not in within:
                        handles.append(beside.register_forward_hook(self._note_call(layer, name), with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
            for layer, (module, runtime) in enumerate(zip(modules, runtimes, strict=True)):
                experts.bind(module, layer, runtime)  # type: ignore[arg-type]

    def _note_choice(self, layer: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            self.seen.setdefault(layer, LayerCalls()).choice = args[1]

        return hook

    def _note_call(self, layer: int, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            inputs, args, kwargs = split_arguments(args, kwargs)
            if isinstance(inputs, torch.Tensor):
                call = Call(module, inputs, args, kwargs, parts_of(output))
                self.seen.setdefault(layer, LayerCalls()).calls[name] = call

        return hook


def split_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The first argument of a call and the others."""
    if args:
        return args[0], args[1:], kwargs
    others = dict(kwargs)
    return others.pop(next(iter(others)), None) if others else None, (), others


def parts_of(output: Any) -> list[Any]:
    if isinstance(output, Mapping):
        return list(output.values())
    return list(output) if isinstance(output, tuple | list) else [output]
