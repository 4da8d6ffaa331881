"""The dense part of MoE layers as graphs of an accelerator's kernels, which the host launches at once, for a single
token: what a layer does before attention, between attention and experts, and behind the experts. Attention, whose keys
and values grow, and experts, which come and go, run between them as ever.

A layer's own forward is recorded once, with both replaced, so that no family is named here. The first tokens are
computed twice: a layer whose graphs do not give its own forward's numbers, to the bit, stays as it is.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook  # type: ignore[attr-defined]
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from expertly.model import routers
from expertly.model.dense import ROUTER_NAMES, NamesAttention, eager_of, is_usual_attention
from expertly.model.hooks import CACHE, experts_modules, look_alike, original_of
from expertly.native.kernels import Kernels

_NUM_COMPARED = 3
"""Tokens for which the graphs must give what the layer's own forward gives."""

_NAMES = ROUTER_NAMES | {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp", "block_sparse_moe"}
_NAMES |= {"residual_multiplier", "gate", "router", "experts", "input_size"}
_NAMES |= {"training", "jitter_noise", "empty_like", "uniform_"}  # of mixtral: not in evaluation
_NAMES |= {"shared_expert", "shared_expert_gate", "shared_experts", "shared_mlp", "wg", "masked_fill", "zeros_like"}
_NAMES |= {"scatter_", "num_group", "topk_group", "num_experts", "routed_scaling_factor", "e_score_correction_bias"}
"""What the forward of a layer, of its block of experts and of its router may look up: another name may be a step that
the first tokens do not show.
"""

_ATTENTION_NAMES = {"clip_qkv", "clamp_", "query_layernorm", "key_layernorm"}
"""The same of attention, beside what is joined on a CPU."""


class Recorder(Protocol):
    """Makes the graphs of one model, which share memory: they run in the order in which they were recorded."""

    has_others: bool
    """Whether other layers may be recorded where one cannot be."""

    def begin(self) -> None:
        """What this thread queues is recorded from now on, and does not run. Raises RuntimeError."""

    def end(self) -> Callable[[], None]:
        """What runs the recorded kernels, on the same memory. Raises RuntimeError where they cannot be recorded."""

    def abandon(self) -> None:
        """Forget what is being recorded, if anything is."""


def use_graphs(
    model: PreTrainedModel, kernels: Kernels, recorder: Recorder, make: Callable[..., LayerGraphs] | None = None
) -> int:
    """From the first token that is decoded on, in those MoE layers of a loaded model where it is found to be possible.
    `kernels` counts the layers that ran so. `make`: in place of LayerGraphs. Returns how many layers have code that is
    not on the lists.
    """
    shared, num_unknown = _Shared(recorder, kernels), 0
    paths = {module: path for path, module in model.named_modules()}
    for module in experts_modules(model):
        path = paths[module].rpartition(".")[0]
        block: Any = model.get_submodule(path)
        layer: Any = model.get_submodule(path.rpartition(".")[0])
        router = getattr(block, "gate", getattr(block, "router", None))
        attention = getattr(layer, "self_attn", None)
        if (
            isinstance(router, nn.Module)
            and isinstance(attention, nn.Module)
            and _looks_up(layer) | _looks_up(block) | _looks_up(router) <= _NAMES
            and is_usual_attention(original_of(type(attention)), _ATTENTION_NAMES)
        ):
            original = type(layer)
            layer.__class__ = look_alike(original, forward=_forward_of(original))
            layer._expertly_graphs = (make or LayerGraphs)(layer, original, module, router, shared)
        else:
            num_unknown += 1
    return num_unknown


def _looks_up(module: nn.Module) -> set[str]:
    code = getattr(inspect.unwrap(original_of(type(module)).forward), "__code__", None)
    return {"?"} if code is None else set(code.co_names)


def _forward_of(original: Any) -> Callable[..., Any]:
    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        graphs: LayerGraphs | None = self._expertly_graphs
        if graphs is not None and not args and graphs.takes(self, hidden_states, kwargs):
            if graphs.num_compared == _NUM_COMPARED:
                return graphs.run(hidden_states, kwargs)
            if not graphs.prove(self, hidden_states, kwargs):
                self._expertly_graphs = None
        return original.forward(self, hidden_states, *args, **kwargs)

    return forward


class _Shared:
    """What the layers of a model have in common: the angles of a token are those of all."""

    def __init__(self, recorder: Recorder, kernels: Kernels) -> None:
        self.recorder, self.kernels = recorder, kernels
        self.can_record = True
        self.fixed: tuple[torch.Tensor, ...] = ()  # where graphs read the angles
        self._given: Any = ()  # what was copied there last

    def keep_angles(self, angles: Any) -> None:
        if list(map(id, self._given)) != list(map(id, angles)):
            self.fixed = self.fixed or tuple(map(torch.empty_like, angles))
            for there, here in zip(self.fixed, angles, strict=True):
                there.copy_(here)
            self._given = angles


class LayerGraphs:
    """The graphs of one layer, and the tensors that they read and write, which stay where they are. The layer has
    them, and is told to each method: so it is freed with its model.
    """

    def __init__(self, layer: Any, original: Any, experts: Any, router: Any, shared: _Shared) -> None:
        self._original, self._experts, self._router, self._shared = original, experts, router, shared
        self._attention = layer.self_attn
        self.num_compared = 0
        self._layer = experts._expertly_layer
        self._why = ""  # it cannot be recorded
        self._replays: list[Callable[[], None]] = []
        self._at = SimpleNamespace()  # tensors by their names
        self._own: dict[str, Any] = {}  # what attention is told beside what the layer is given
        self._passed: tuple[str, ...] = ()  # of what the layer is given, what attention is told
        within = set(experts.modules())
        self._modules = [one for one in layer.modules() if one not in within and one is not layer]
        modules = {layer, experts, *self._modules}
        self._places = [
            (parent._modules, name, child, type(child))
            for parent in modules
            for name, child in parent._modules.items()
            if child in modules
        ]
        self._kept = [(of, name) for one in self._modules for of in (one._parameters, one._buffers) for name in of]
        self._addresses = [0 if (it := of.get(name)) is None else it.data_ptr() for of, name in self._kept]

    def takes(self, layer: Any, hidden: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether this is a token of a loaded model as it was recorded, which nobody watches, trains or changed."""
        angles, fixed = kwargs.get("position_embeddings"), self._shared.fixed
        return (
            hidden.shape[:2] == (1, 1)
            and layer.self_attn is self._attention
            and isinstance(angles, tuple)
            and type(kwargs.get(CACHE)) in (type(None), DynamicCache)
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled(hidden.device.type)
            and not layer.training
            and not self._is_watched()
            and (not fixed or [(it.shape, it.dtype) for it in angles] == [(it.shape, it.dtype) for it in fixed])
            and (not self._replays or self._at.hidden.dtype == hidden.dtype)
            and set(self._passed) <= kwargs.keys()
            and self._addresses == [0 if (it := of.get(name)) is None else it.data_ptr() for of, name in self._kept]
        )

    def prove(self, layer: Any, hidden: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Record what is not recorded, and compare; False where this layer is to stay as it is."""
        with torch.inference_mode(False), torch.no_grad():
            if not self._replays and not self._record(layer, hidden, kwargs):
                return False
            self.num_compared += 1
            try:
                return self._is_same(layer, hidden, kwargs)
            except RuntimeError as error:
                self._why = str(error)
                return False

    def run(self, hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """The layer. What leaves it is copied: the next token is computed in the same memory."""
        at, (before, between, behind) = self._at, self._replays
        self._set(hidden, kwargs)
        before()
        self._attend(kwargs)
        between()
        self._mix()
        behind()
        self._shared.kernels.num_graphs += 1
        return at.out.clone()  # type: ignore[no-any-return]

    def _attend(self, kwargs: dict[str, Any]) -> None:
        """As the layer's own forward does between its projections and the layer behind attention."""
        at, attention, cache = self._at, self._attention, kwargs.get(CACHE)
        key, value = at.key, at.value
        told = {name: kwargs[name] for name in self._passed}
        if cache is not None:
            of_paged = {"kwargs": told} if CACHE == "cache" else {}
            key, value = cache.update(key, value, attention.layer_idx, **of_paged)
        ask = ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, eager_of(attention))
        at.attended.copy_(ask(attention, at.query, key, value, kwargs.get("attention_mask"), **self._own, **told)[0])

    def _mix(self) -> None:
        """Tell those who look at the router what it chose, and have the experts computed."""
        at = self._at
        ids, weights = at.chosen[1].clone(), at.chosen[2].clone()
        if looks := self._router._forward_hooks.values():
            same = {id(at.chosen[1]): ids, id(at.chosen[2]): weights}
            routed = tuple([same[id(one)] if id(one) in same else one.clone() for one in at.routed[2]])
            for look in looks:
                look(self._router, at.routed[0], at.routed[1], routed)
        at.mixed.copy_(self._experts(at.chosen[0], ids, weights))

    # -- recording -----------------------------------------------------------------------------------------------------

    def _record(self, layer: Any, hidden: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        shared, at, recorder = self._shared, self._at, self._shared.recorder
        if not shared.can_record:
            return False
        replays: list[Callable[[], None]] = []

        def attended(*asked: Any) -> torch.Tensor:
            replays.append(recorder.end())
            at.query, at.key, at.value, told = asked
            self._passed = tuple(name for name in told if name in kwargs and told[name] is kwargs[name])
            self._own = {name: one for name, one in told.items() if name not in self._passed}
            at.attended = torch.zeros_like(at.query.transpose(1, 2), memory_format=torch.contiguous_format)
            recorder.begin()
            return at.attended  # type: ignore[no-any-return]

        def mixed(*chosen: torch.Tensor) -> torch.Tensor:
            replays.append(recorder.end())
            at.chosen, at.mixed = chosen, torch.zeros_like(chosen[0])
            recorder.begin()
            return at.mixed  # type: ignore[no-any-return]

        at.hidden = hidden.clone()
        shared.keep_angles(kwargs["position_embeddings"])
        try:
            recorder.begin()
            at.out, at.routed = self._forward(layer, at.hidden, shared.fixed, kwargs, attended, mixed)
            replays.append(recorder.end())
        except RuntimeError as error:  # of a kernel that cannot be recorded, or of memory: so it is in other layers
            recorder.abandon()
            self._why = str(error)
            shared.can_record = shared.recorder.has_others
            return False
        except BaseException:
            recorder.abandon()
            raise
        self._replays = replays
        kept = {id(one) for one in self._attention.parameters(recurse=False)}
        return (
            len(replays) == 3
            and isinstance(at.out, torch.Tensor)
            and at.query.shape[-1] == at.value.shape[-1]
            and all(id(one) in kept for one in self._own.values() if isinstance(one, torch.Tensor))
        )

    def _is_same(self, layer: Any, hidden: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Of this token, and of something else in place of what attention and experts give."""
        at, found = self._at, list[torch.Tensor]()
        before, between, behind = self._replays
        self._set(hidden, kwargs)
        before()
        at.attended.copy_(at.query.transpose(1, 2))
        between()
        at.mixed.copy_(at.chosen[0])
        behind()

        def attended(*asked: Any) -> torch.Tensor:
            found.extend(asked[:3])
            return at.attended.clone()  # type: ignore[no-any-return]

        def mixed(*chosen: torch.Tensor) -> torch.Tensor:
            found.extend(chosen)
            return at.mixed.clone()  # type: ignore[no-any-return]

        out, routed = self._forward(layer, hidden, kwargs["position_embeddings"], kwargs, attended, mixed)
        made = [at.query, at.key, at.value, *at.chosen, *at.routed[2], at.out]
        expected = [*found, *routed[2], out]
        if [one.shape for one in made] != [one.shape for one in expected]:
            return False
        return bool(torch.stack([(a == b).all() for a, b in zip(made, expected, strict=True)]).all())  # waits once

    def _forward(
        self, layer: Any, hidden: torch.Tensor, angles: Any, kwargs: dict[str, Any], attended: Any, mixed: Any
    ) -> tuple[Any, Any]:
        """The layer's own forward, which asks these for what attention and experts give; and the router's call."""
        calls: list[Any] = []
        given = {**kwargs, "position_embeddings": angles, CACHE: None}
        with self._replaced(attended, mixed, lambda _, *call: calls.append(call)):
            out = self._original.forward(layer, hidden, **given)
        if len(calls) != 1:
            raise RuntimeError("the router is not asked once")
        return out, calls[0]

    @contextlib.contextmanager
    def _replaced(self, attended: Any, mixed: Any, routed: Any) -> Iterator[None]:
        attention, experts, router = self._attention, self._experts, self._router
        config, runtime, watching = attention.config, experts._expertly_runtime, router._forward_hooks
        vars(attention)["config"] = config if isinstance(config, NamesAttention) else NamesAttention(config)
        attention._expertly_asked = attended
        experts._expertly_runtime = SimpleNamespace(forward_experts=lambda module, layer, *chosen: mixed(*chosen))
        vars(router)["_forward_hooks"] = OrderedDict()  # who watches it is told of the token once
        noting = router.register_forward_hook(routed, with_kwargs=True)
        try:
            yield
        finally:
            noting.remove()
            vars(attention)["config"], vars(router)["_forward_hooks"] = config, watching
            experts._expertly_runtime = runtime
            del attention._expertly_asked

    def _set(self, hidden: torch.Tensor, kwargs: dict[str, Any]) -> None:
        self._at.hidden.copy_(hidden)
        self._shared.keep_angles(kwargs["position_embeddings"])

    def _is_watched(self) -> bool:
        """Whether somebody is to be called, is called instead or changed a module; but for us, who look at routers."""
        for siblings, name, one, kind in self._places:
            if (
                siblings.get(name) is not one
                or type(one) is not kind
                or one._forward_pre_hooks
                or "forward" in one.__dict__
                or (one._forward_hooks and one is not self._router)
            ):
                return True
        looks = self._router._forward_hooks
        strangers = [look for look in looks.values() if look.__module__ != routers.__name__] if looks else ()
        return bool(strangers) or _has_any_global_hook()
