"""The routers of a loaded model: found by one forward pass, then hooked, or called with any hidden states.

Routers return different things in different families and versions, so nothing is looked up by name.
T tokens, H hidden, E experts, K top-k.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from expertly.core.geometry import LayerGeometry
from expertly.model import hooks

Scoring = Literal["softmax", "sigmoid"]
Ran = Callable[[int, torch.Tensor, torch.Tensor], None]

_NUM_PROBED = 64  # tokens of the pass that finds the routers
_NUM_COMPARED = 3  # rows with which a router is called again, to see whether it gives the same logits
_TOLERANCE = 0.02  # of logits and sums in bfloat16

_CANNOT = (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError)


@dataclass
class _RouterCall:
    """A call of a module beside the experts."""

    module: nn.Module
    inputs: torch.Tensor
    args: tuple[Any, ...]  # those after the first
    kwargs: dict[str, Any]
    parts: list[Any]  # of its output


class HookedRouter:
    """One layer's router: hook it, or call it with other hidden states."""

    def __init__(self, layer: int, call: _RouterCall, position: int, block: _Block) -> None:
        self.layer, self.hidden_size, self._num_experts = layer, int(call.inputs.shape[-1]), block.num_experts
        self._module, self._position, self._num_dims = call.module, position, call.inputs.dim()
        self._args, self._kwargs = call.args, call.kwargs
        self._handle: Any = None
        logits = _rows(call.parts[position]).float()
        self._is_normalised = bool((logits >= 0).all()) and bool(((logits.sum(-1) - 1).abs() < _TOLERANCE).all())
        self.scoring = "softmax" if self._is_normalised else _scoring(logits, block.index, block.weights)
        self.of_tokens = block.of_tokens()
        """The experts [V, K] of each token of the vocabulary, in host memory, where tokens alone choose; or None."""
        gives = self._gives(_rows(call.inputs)[:_NUM_COMPARED], logits[:_NUM_COMPARED])
        self.can_look_ahead = self.of_tokens is None and gives
        """Whether it can be called with hidden states alone. Some routers need more."""

    def attach(self, ran: Ran) -> None:
        """Call `ran(layer, inputs [T, H], logits [T, E])` whenever the model runs this router, until `detach`."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            inputs, self._args, self._kwargs = _split_arguments(args, kwargs)
            ran(self.layer, _rows(inputs), _rows(_parts_of(output)[self._position]))

        self.detach()
        self._handle = self._module.register_forward_hook(hook, with_kwargs=True)

    def detach(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def logits(self, router_input: torch.Tensor) -> torch.Tensor:
        """Logits [T, E] for hidden states [T, H], with its other arguments as in the last pass.
        Hooks are not called.
        """
        if self._num_dims == 3:  # as the model calls it
            router_input = router_input.unsqueeze(0)
        with torch.no_grad():
            output = self._module.forward(router_input, *self._args, **self._kwargs)
        return _rows(_parts_of(output)[self._position])

    def _gives(self, inputs: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether it gives these logits again for some of its rows."""
        try:
            logits = self.logits(inputs).float()
        except _CANNOT:
            return False
        return logits.shape == expected.shape and torch.allclose(logits, expected, rtol=_TOLERANCE, atol=_TOLERANCE)

    def normalised(self, logits: torch.Tensor) -> torch.Tensor:
        """Routing scores [..., E] in float32: softmax, or sigmoids over the sum of all columns."""
        if self._is_normalised:
            scores = logits.float()
        elif self.scoring == "softmax":
            scores = logits.softmax(dim=-1, dtype=torch.float32)
        else:
            scores = logits.float().sigmoid()
            scores = scores / scores.sum(dim=-1, keepdim=True)
        return scores[..., : self._num_experts]

    def scores(self, router_input: torch.Tensor) -> torch.Tensor:
        """Normalised routing scores [T, E] of hidden states [T, H]."""
        return self.normalised(self.logits(router_input))


def find_routers(model: PreTrainedModel, layers: Sequence[LayerGeometry]) -> list[HookedRouter | None]:
    """The router of each MoE layer of a loaded model; None where no module beside the experts is one.

    A router is the module whose output contains the choice of experts, or scores whose K best are that choice;
    its logits are the [T, E] in the same output. Otherwise it is the outermost module with the experts' input
    whose output is [T, E]. The runtime does not see the forward pass that finds them.
    """
    blocks = _watch_blocks(model)
    return [_find(number, blocks[number], layer.num_experts) for number, layer in enumerate(layers)]


def _find(layer: int, block: _Block, num_experts: int) -> HookedRouter | None:
    if block.choice is None:  # it has not run
        return None
    block.num_experts = num_experts
    calls = [call for call in block.calls.values() if any(_is_same(part, block.choice) for part in call.parts)]
    outermost_first = [block.calls[name] for name in sorted(block.calls, key=lambda name: name.count("."))]
    calls += [call for call in outermost_first if len(call.parts) > 1 and block.has_best(call.parts)]
    calls += [call for call in outermost_first if len(call.parts) == 1 and _is_same(call.inputs, block.hidden)]
    for call in calls:
        position = _logits_position(call.parts, block)
        if position is not None:
            return HookedRouter(layer, call, position, block)
    return None


def _logits_position(parts: list[Any], block: _Block) -> int | None:
    """The position of the logits [T, E] in a router's output, or of more columns where a choice may be no expert. Where
    K = E the experts' weights have that shape, too, and are taken last.
    """
    num_experts = block.num_experts
    may_be_none = bool((block.index >= num_experts).any())
    positions = [
        i
        for i, part in enumerate(parts)
        if isinstance(part, torch.Tensor)
        and part.is_floating_point()
        and part.dim() > 1
        and (part.shape[-1] == num_experts or (may_be_none and part.shape[-1] > num_experts))
        and part.numel() == block.hidden.shape[0] * part.shape[-1]
    ]
    return min(positions, key=lambda i: _is_same(parts[i], block.weights), default=None)


def _scoring(logits: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Scoring:
    """The scoring that explains the experts' weights; softmax where neither does."""
    tolerance = 1e-3 if weights.dtype == torch.float32 else 1e-2
    is_chosen = index < logits.shape[-1]
    index, weights = index.clamp(max=logits.shape[-1] - 1), weights.float()

    def error(scores: torch.Tensor) -> float:
        expected, actual = scores.gather(-1, index), weights
        if index.shape[-1] > 1:  # they may have been scaled
            expected, actual = (part / part.sum(-1, keepdim=True).clamp(min=1e-9) for part in (expected, actual))
        return float(((expected - actual).abs() * is_chosen).max())

    of_sigmoid = error(logits.sigmoid())
    return "sigmoid" if of_sigmoid < tolerance and of_sigmoid < error(logits.softmax(-1)) else "softmax"


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _is_same(part: Any, other: Any) -> bool:
    """Whether both have the same values in the same order, in any shapes."""
    if not isinstance(part, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return part.numel() == other.numel() and torch.equal(part.reshape(-1).to(other.dtype), other.reshape(-1))


class _Block:
    """Notes the modules beside the experts of one layer that ran in a pass, and the experts' arguments. It is these
    experts' runtime meanwhile, and returns zeros.
    """

    choice: Any = None  # as the block passes it: ids, or a mask
    hidden: torch.Tensor  # [T, H]
    index: torch.Tensor  # [T, K]
    weights: torch.Tensor  # [T, K]
    num_experts: int

    def __init__(self, parent: nn.Module) -> None:
        self.calls: dict[str, _RouterCall] = {}
        self._parent = parent
        self.token_ids: torch.Tensor  # [T]

    def forward_experts(
        self, module: nn.Module, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        self.hidden, self.index, self.weights = hidden, index, weights
        self.choice = index if self.choice is None else self.choice
        return torch.zeros_like(hidden)

    def of_tokens(self) -> torch.Tensor | None:
        """The table [V, K] whose rows at the tokens' ids are what the experts received."""
        for table in (*self._parent.buffers(), *self._parent.parameters()):
            is_whole = not table.is_floating_point() and table.shape[1:] == self.index.shape[1:]
            if is_whole and len(table) > int(self.token_ids.max()) and _is_same(table[self.token_ids], self.index):
                return table.detach().cpu()
        return None

    def has_best(self, parts: list[Any]) -> bool:
        """Whether the choice is the K best of the scores in `parts`."""
        position = _logits_position(parts, self)
        best = None if position is None else _rows(parts[position]).topk(self.index.shape[-1]).indices
        return best is not None and _is_same(best.sort().values, self.index.sort().values)

    def note_choice(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        self.choice = args[1] if len(args) > 1 else None

    def note_call(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        inputs, args, kwargs = _split_arguments(args, kwargs)
        if isinstance(inputs, torch.Tensor):
            self.calls[name] = _RouterCall(module, inputs, args, kwargs, _parts_of(output))


def _watch_blocks(model: PreTrainedModel) -> list[_Block]:
    """Run one forward pass of a loaded model over a few tokens of its vocabulary. One _Block for each MoE layer."""
    paths = {module: path for path, module in model.named_modules()}
    blocks = []
    with torch.no_grad(), hooks.unannounced(model), contextlib.ExitStack() as undone:
        for layer, module in enumerate(hooks.experts_modules(model)):
            untyped: Any = module
            parent = model.get_submodule(paths[module].rpartition(".")[0])
            block: Any = _Block(parent)
            blocks.append(block)
            undone.callback(hooks.bind, module, layer, untyped._expertly_runtime)
            hooks.bind(module, layer, block)
            undone.callback(module.register_forward_pre_hook(block.note_choice).remove)
            within = {*module.modules(), parent}
            for name, beside in parent.named_modules():
                if beside not in within:
                    note = functools.partial(block.note_call, name)
                    undone.callback(beside.register_forward_hook(note, with_kwargs=True).remove)
        embedding: Any = model.get_input_embeddings()
        token_ids = torch.linspace(0, embedding.num_embeddings - 1, _NUM_PROBED).long().unsqueeze(0).to(model.device)
        for block in blocks:
            block.token_ids = token_ids[0]
        model.forward(input_ids=token_ids, use_cache=False)  # not the call, which would check logits for NaN
    return blocks


def _split_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if args:
        return args[0], args[1:], kwargs
    rest = dict(kwargs)
    return rest.pop(next(iter(rest)), None) if rest else None, (), rest


def _parts_of(output: Any) -> list[Any]:
    if isinstance(output, Mapping):
        return list(output.values())
    return list(output) if isinstance(output, tuple | list) else [output]
