"""All decoder layers of a stack as one program, for a token or a few: one native call until there is a decision.

The stack's forward calls a stand-in for each layer. A stand-in notes its arguments; the last one runs all layers, so no
model family is named here. This is done where the forward looks up only names of a closed list, and was seen to pass on
each layer's output.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from expertly.model.graphs import NUM_COMPARED, Forms, are_ours, looks_up
from expertly.model.hooks import CACHE, AsTried, look_alike, original_of, watchers
from expertly.model.programs import LayerProgram, run_programs

_NAMES = {"config", "num_hidden_layers", "layer_types", "sliding_window", "embedding_multiplier"}
_NAMES |= {"embed_tokens", "rotary_emb", "layers", "norm", "enumerate", "isinstance", "dict", "set", "ValueError"}
_NAMES |= {"DynamicCache", "get_seq_length", "torch", "arange", "shape", "device", "unsqueeze"}
_NAMES |= {"create_causal_mask", "create_sliding_window_causal_mask", "MoeModelOutputWithPast"}
"""Names that the forward of a stack may look up if it only passes on what layers give."""


def use_stacks(model: PreTrainedModel) -> None:
    """Run those stacks of a loaded model as one program whose layers all have programs."""
    for stack in model.modules():
        layers = getattr(stack, "layers", None)
        if (
            type(layers) is nn.ModuleList
            and len(layers)
            and all(hasattr(layer, "_expertly_graphs") for layer in layers)
            and looks_up(stack) <= _NAMES
        ):
            forward: Any = inspect.unwrap(original_of(type(stack)).forward)
            vars(layers)["_expertly_stack"] = Stack(forward.__code__)
            layers.__class__ = look_alike(nn.ModuleList, __iter__=_iterate, __getitem__=_get)


def _iterate(self: Any) -> Iterator[Any]:
    """Stand-ins for the stack's own forward, known by its code object; the layers for everybody else."""
    stack: Stack = self._expertly_stack
    layers = self._modules.values()
    return stack.stand_ins(list(layers)) if sys._getframe(1).f_code is stack.code else iter(layers)


def _get(self: Any, index: Any) -> Any:
    if not isinstance(index, slice):
        return nn.ModuleList.__getitem__(self, index)
    if sys._getframe(1).f_code is self._expertly_stack.code and index.indices(len(self)) == (0, len(self), 1):
        return self  # no copy
    return nn.ModuleList(list(self._modules.values())[index])


class Stack:
    """Runs the layers of one stack. Callers pass the layers in, so that they are freed with their model."""

    def __init__(self, code: Any) -> None:
        """`code`: of the stack's forward, which alone gets stand-ins."""
        self.code = code
        self._num_seen = 0  # passes in which every layer got the output of the one before
        self._passes_on = True  # so far every pass was one of these
        self._known: dict[Any, _KnownStack] = {}  # by the kind of call
        self._linked: dict[LayerProgram, LayerProgram] = {}  # program -> the program that reads its output

    def stand_ins(self, layers: list[nn.Module]) -> Iterator[Callable[..., Any]]:
        """What the forward calls in place of its layers."""
        if not self._passes_on:
            return iter(layers)
        call: Any = self._call if self._num_seen == NUM_COMPARED else self._watch
        shared: list[Any] = []  # of _watch: the last output; of _call: the arguments of the layers before
        return iter([partial(call, layers, shared, number) for number in range(len(layers))])

    def _watch(
        self, layers: list[nn.Module], outputs: list[Any], number: int, hidden: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """`outputs`: what the layer before gave, if there is one."""
        self._passes_on &= not args and (not number or hidden is outputs.pop())
        outputs.append(layers[number](hidden, *args, **kwargs))
        if number == len(layers) - 1:
            self._num_seen += hidden.shape[0] == 1 and hidden.shape[1] <= LayerProgram.most_tokens
        return outputs[0]

    def _call(
        self, layers: list[nn.Module], calls: list[dict[str, Any]], number: int, hidden: torch.Tensor, **kwargs: Any
    ) -> Any:
        """`calls`: what the layers before were called with."""
        if hidden.shape[0] != 1 or hidden.shape[1] > LayerProgram.most_tokens:
            return layers[number](hidden, **kwargs)
        calls.append(kwargs)
        if number < len(layers) - 1:
            return hidden
        programs = self._programs(layers, hidden, calls)
        if programs is not None:
            return run_programs(programs, hidden, calls)
        for layer, call in zip(layers, calls, strict=True):
            hidden = layer(hidden, **call)
        return hidden

    def _programs(
        self, layers: list[nn.Module], hidden: torch.Tensor, calls: list[dict[str, Any]]
    ) -> list[LayerProgram] | None:
        """The programs of all layers, each linked to the next; None where a layer has to be called itself."""
        kind = hidden.shape[1], *calls[0]
        known = self._known.get(kind)
        if known is None or not known.takes(layers, hidden, calls):
            self._known.pop(kind, None)
            programs = _programs_of_all(layers, hidden, calls)
            if programs is None:
                return None
            self._known[kind] = known = _KnownStack(layers, programs, calls)
        for program, following in pairwise(known.programs):
            if self._linked.get(program) is not following:
                if not program.goes_on_with(following):
                    return None
                self._linked[program] = following
        return known.programs


class _KnownStack:
    """The proven programs of all layers for one kind of call, and the state of the layers at that time."""

    def __init__(self, layers: list[nn.Module], programs: list[LayerProgram], calls: list[dict[str, Any]]) -> None:
        self.programs = programs
        self._layers, self._names = layers, list(map(set, calls))
        self._routers = [vars(program.router) for program in programs]
        self._tried = AsTried(nn.ModuleList(layers), observed=[program.router for program in programs])

    def takes(self, layers: list[nn.Module], hidden: torch.Tensor, calls: list[dict[str, Any]]) -> bool:
        """Whether the call is of this kind and the layers are unchanged."""
        first, cache, angles = calls[0], calls[0].get(CACHE), calls[0].get("position_embeddings")
        return (
            len(layers) == len(self._layers)
            and all(map(is_, layers, self._layers))
            and self.programs[0].takes_call(hidden, first)
            and list(map(dict.keys, calls)) == self._names
            and all(map(is_, map(dict.get, calls, repeat(CACHE)), repeat(cache)))
            and all(map(is_, map(dict.get, calls, repeat("position_embeddings")), repeat(angles)))
            and not any(map(_IS_TRAINING, layers))
            and all(map(are_ours, filter(None, map(dict.get, self._routers, repeat("_forward_hooks")))))
            and self._tried.holds()
        )


_IS_TRAINING = attrgetter("training")


def _programs_of_all(
    layers: list[nn.Module], hidden: torch.Tensor, calls: list[dict[str, Any]]
) -> list[LayerProgram] | None:
    """The programs of all layers; None where a layer has to be called itself, occurs twice, or has other rotary angles
    than the first.
    """
    programs: list[LayerProgram] = []
    for layer, kwargs in zip(layers, calls, strict=True):
        state = vars(layer)
        forms: Forms | None = state.get("_expertly_graphs")
        program: Any = None if forms is None else forms.of(layer, hidden, kwargs)
        if (
            program is None
            or kwargs.get("position_embeddings") is not calls[0].get("position_embeddings")
            or program.num_compared < NUM_COMPARED
            or (state["_forward_hooks"] and watchers(layer))
            or state["_forward_pre_hooks"]
            or "forward" in state
            or not program.takes(layer, hidden, kwargs)
        ):
            return None
        programs.append(program)
    return programs if len(set(programs)) == len(programs) else None
