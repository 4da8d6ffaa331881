"""The dense part of MoE layers as graphs of an accelerator's kernels, which the host launches at once, for a single
token: what a layer does before attention, between attention and experts, and behind the experts. Attention, whose keys
and values grow, and experts, which come and go, run between them as ever. programs.py does it on a CPU.

A layer's own forward is recorded once for each kind of call, with both replaced, so that no family is named here. The
first tokens are computed twice: a layer whose graphs do not give its own forward's numbers, to the bit, stays as it is.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from expertly.model import routers
from expertly.model.closed import stand_in
from expertly.model.dense import ROUTER_NAMES, NamesAttention, eager_of, is_usual_attention, keep
from expertly.model.hooks import CACHE, AsTried, active, experts_modules, mix, original_of
from expertly.native.kernels import Kernels, UnsureError

NUM_COMPARED = 3
"""Tokens for which the graphs must give what the layer's own forward gives."""

_TRIES = 8
"""Tokens for which a layer is recorded again, where its router could not tell."""

_NAMES = ROUTER_NAMES | {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp", "block_sparse_moe"}
_NAMES |= {"residual_multiplier", "gate", "router", "experts", "input_size"}
_NAMES |= {"training", "jitter_noise", "empty_like", "uniform_"}  # of mixtral: not in evaluation
_NAMES |= {"shared_expert", "shared_expert_gate", "shared_experts", "shared_mlp", "wg", "masked_fill", "zeros_like"}
_NAMES |= {"scatter_", "num_group", "topk_group", "num_experts", "routed_scaling_factor", "e_score_correction_bias"}
"""What the forward of a layer, of its block of experts and of its router may look up: another name may be a step that
the first tokens do not show.
"""

_RECORDED = int, float
"""A layer stays as it is once somebody sets an attribute of these kinds, in it or in a part."""

_ATTENTION_NAMES = {"clip_qkv", "clamp_", "query_layernorm", "key_layernorm"}
"""The same of attention, beside what is joined on a CPU."""


class Recorder(Protocol):
    """Makes the graphs of one model, which share memory: they run in the order in which they were recorded."""

    def begin(self) -> None:
        """What this thread queues is recorded from now on, and does not run. Raises RuntimeError."""

    def end(self) -> Callable[[], None]:
        """What runs the recorded kernels, on the same memory. Raises RuntimeError where they cannot be recorded."""

    def abandon(self) -> None:
        """Forget what is being recorded, if anything is."""


def use_graphs(
    model: PreTrainedModel, kernels: Kernels, recorder: Recorder, make: type[LayerGraphs] | None = None
) -> None:
    """From the first token that is decoded on, in those MoE layers of a loaded model where it is found to be possible.
    `kernels` counts the layers that ran so, and those that stay as they are by what stopped them, as it is found out.
    `make`: in place of LayerGraphs.
    """
    shared = _Shared(recorder, kernels)
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
            and looks_up(layer) | looks_up(block) | looks_up(router) <= _NAMES
            and is_usual_attention(original_of(type(attention)), _ATTENTION_NAMES)
        ):
            layer._expertly_graphs = Forms(make or LayerGraphs, type(layer), module, router, shared)
            stand_in(layer, _RECORDED, forward=_forward_of(type(layer)))
            for part in (block, router, attention):  # whose classes are seen to change
                stand_in(part, _RECORDED)
        else:
            kernels.stopped["code that is not on a list"] += 1


def looks_up(module: nn.Module) -> set[str]:
    code = getattr(inspect.unwrap(original_of(type(module)).forward), "__code__", None)
    return {"?"} if code is None else set(code.co_names)


def _forward_of(original: Any) -> Callable[..., Any]:
    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        forms: Forms | None = self._expertly_graphs
        graphs = forms.of(self, hidden_states, kwargs) if forms is not None and not args else None
        if forms is not None and graphs is not None and graphs.takes(self, hidden_states, kwargs):
            if graphs.num_compared == NUM_COMPARED:
                return graphs.run(hidden_states, kwargs)
            if not graphs.prove(self, hidden_states, kwargs):
                forms.give_up(graphs)
        return original.forward(self, hidden_states, *args, **kwargs)

    return forward


class _Shared:
    """What the layers of a model have in common: the angles of a token are those of all."""

    def __init__(self, recorder: Recorder, kernels: Kernels) -> None:
        self.recorder, self.kernels = recorder, kernels
        self.fixed: tuple[torch.Tensor, ...] = ()  # where graphs read the angles
        self._angles: Any = None  # which were copied there last
        self._of_kind: dict[Any, tuple[torch.Tensor, ...]] = {}
        self.rows: Any = None  # of a paged cache, in this pass: see programs.py

    def keep(self, angles: Any) -> bool:
        """Have graphs of their kind read these angles."""
        if angles is self._angles:
            return True
        if not isinstance(angles, tuple):
            return False
        kind = tuple([(part.shape, part.dtype) for part in angles])
        if kind not in self._of_kind:
            with torch.inference_mode(False):
                self._of_kind[kind] = tuple(map(torch.empty_like, angles))
        self.fixed, self._angles = self._of_kind[kind], angles
        for place, part in zip(self.fixed, angles, strict=True):
            place.copy_(part)
        return True


def are_ours(hooks: Mapping[Any, Any]) -> bool:
    """Whether nobody but predictors looks at a router."""
    return all(look.__module__ == routers.__name__ for look in active(hooks))


_MOST_FORMS = 12
"""Kinds of calls of one layer that are recorded: one takes some memory for each token."""


class Forms:
    """The graphs of one layer, one for each kind of call: how many tokens of one sequence, or of several side by side,
    and the names of the arguments.
    """

    def __init__(self, make: type[LayerGraphs], original: Any, *parts: Any) -> None:
        self.make, self._original, self._parts = make, original, parts
        self._of_kind: dict[Any, LayerGraphs | None] = {}

    def of(self, layer: Any, hidden: torch.Tensor, kwargs: dict[str, Any]) -> LayerGraphs | None:
        """None: the layer stays as it is."""
        num_sequences, num_tokens = hidden.shape[:2]
        if num_sequences != 1 or num_tokens > self.make.most_tokens or type(layer) is self._original:
            return None
        kind = num_tokens, *kwargs
        if kind not in self._of_kind:
            is_new = len(self._of_kind) < _MOST_FORMS
            self._of_kind[kind] = self.make(layer, self._original, *self._parts) if is_new else None
        return self._of_kind[kind]

    def give_up(self, graphs: LayerGraphs) -> None:
        for kind, existing in self._of_kind.items():
            if existing is graphs:
                self._of_kind[kind] = None


class LayerGraphs:
    """The graphs of one layer, and the tensors that they read and write, which stay where they are. The layer has
    them, and is passed to each method: so it is freed with its model.
    """

    most_tokens = 1
    caches: frozenset[Any] = frozenset((type(None), DynamicCache))
    """Kinds of KV cache. Continuous batching captures an accelerator's passes itself: nothing may be replayed there."""

    def __init__(self, layer: Any, original: Any, experts: Any, router: Any, shared: _Shared) -> None:
        self._original, self._experts, self.router, self._shared = original, experts, router, shared
        self._attention = layer.self_attn
        self._tried = AsTried(layer, observed=[router])
        self.num_compared = self._num_unsure = 0
        self._replays: list[Any] = []
        self._fixed: tuple[torch.Tensor, ...] = ()  # angles as it was recorded
        self._at = SimpleNamespace()  # tensors by their names
        self._scaling: Any = None  # of attention
        self._more: dict[str, Any] = {}  # what attention is called with beside what the layer is called with
        self._passed: frozenset[str] = frozenset()  # of what the layer is called with, what attention is called with

    def takes(self, layer: Any, hidden: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether this is a call of a loaded model as it was recorded, which nobody watches, trains or changed."""
        return (
            not layer.training
            and vars(self._attention).get("_expertly_is_tried", True)  # its first tokens join its projections
            and are_ours(self.router._forward_hooks)
            and self._tried.holds()
            and self.takes_call(hidden, kwargs)
        )

    def takes_call(self, hidden: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether a call is as it was recorded, whatever became of the layer."""
        shared, like = self._shared, getattr(self._at, "hidden", hidden)
        return (
            type(hidden) is type(like)
            and (hidden.dtype, hidden.device) == (like.dtype, like.device)
            and type(kwargs.get(CACHE)) in self.caches
            and (CACHE == "cache" or "cache" not in kwargs)  # transformers 5.17 has its paged cache beside the other
            and not (torch.is_grad_enabled() or torch.is_autocast_enabled(hidden.device.type))
            and kwargs.keys() >= self._passed
            and shared.keep(kwargs.get("position_embeddings"))
            and (not self._fixed or self._fixed is shared.fixed)
        )

    def prove(self, layer: Any, hidden: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Record what is not recorded, and compare; False where this layer is to stay as it is."""
        reason = "other numbers than the layer's own"
        with torch.inference_mode(False), torch.no_grad():
            try:
                if not self._replays:
                    self._record(layer, hidden, kwargs)
                if self._is_same(layer, hidden, kwargs):
                    self.num_compared += 1
                    return True
            except UnsureError:  # another token may do
                reason = "a router that cannot tell its choice"
                self._num_unsure += 1
                if self._num_unsure < _TRIES:
                    return True
            except RuntimeError as error:  # of a kernel that cannot be recorded, or of memory
                reason = str(error)
        self._shared.kernels.stopped[reason] += 1
        return False

    def run(self, hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """The layer. What leaves it is copied: the next token is computed in the same memory."""
        at, (before, between, behind) = self._at, self._replays
        at.hidden.copy_(hidden)
        before()
        self._attend(kwargs)
        between()
        mix(at, self.router, self._experts)
        behind()
        self._shared.kernels.counts.graphs += 1
        return at.out.clone()  # type: ignore[no-any-return]

    def _attend(self, kwargs: dict[str, Any]) -> None:
        """As the layer's own forward does between its projections and the layer behind attention."""
        at, attention, cache = self._at, self._attention, kwargs.get(CACHE)
        key, value = at.key, at.value
        passed = {name: kwargs[name] for name in self._passed}
        how: dict[str, Any] = {}
        if cache is not None:
            key, value, how = keep(cache, attention.layer_idx, key, value, passed, self._shared.kernels)
        ask = ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, eager_of(attention))
        more = {**self._more, **passed, **how, "scaling": self._scaling}
        at.attended.copy_(ask(attention, at.query, key, value, kwargs.get("attention_mask"), **more)[0])

    # -- recording -----------------------------------------------------------------------------------------------------

    def _record(self, layer: Any, hidden: torch.Tensor, kwargs: dict[str, Any]) -> None:
        at, recorder, self._fixed = self._at, self._shared.recorder, self._shared.fixed
        replays: list[Callable[[], None]] = []

        def attended(*call: Any) -> torch.Tensor:
            replays.append(recorder.end())
            at.query, at.key, at.value, more = call
            self._scaling = more.pop("scaling")
            self._passed = frozenset(name for name in more if name in kwargs and more[name] is kwargs[name])
            self._more = {name: argument for name, argument in more.items() if name not in self._passed}
            at.attended = torch.zeros_like(at.query.transpose(1, 2), memory_format=torch.contiguous_format)
            recorder.begin()
            return at.attended  # type: ignore[no-any-return]

        def mixed(*chosen: torch.Tensor) -> torch.Tensor:
            replays.append(recorder.end())
            at.chosen, at.mixed = chosen, torch.zeros_like(chosen[0])
            recorder.begin()
            return at.mixed  # type: ignore[no-any-return]

        at.hidden = hidden.clone()
        try:
            recorder.begin()
            at.out, at.routed = self._forward(layer, at.hidden, self._fixed, kwargs, attended, mixed)
            replays.append(recorder.end())
        except BaseException:
            recorder.abandon()
            raise
        parameters = set(map(id, self._attention.parameters(recurse=False)))
        tensors = [part for part in (self._scaling, *self._more.values()) if isinstance(part, torch.Tensor)]
        if (
            len(replays) != 3
            or not isinstance(at.out, torch.Tensor)
            or at.query.shape[-1] != at.value.shape[-1]
            or not parameters >= set(map(id, tensors))
        ):
            raise RuntimeError("another order than attention, experts")
        self._replays = replays

    def _is_same(self, layer: Any, hidden: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Of this token, and of something else in place of what attention and experts give."""
        at, expected = self._at, list[torch.Tensor]()
        before, between, behind = self._replays
        at.hidden.copy_(hidden)
        before()
        at.attended.copy_(at.query.transpose(1, 2))
        between()
        at.mixed.copy_(at.chosen[0])
        behind()

        def attended(*call: Any) -> torch.Tensor:
            expected.extend(call[:3])
            return at.attended.clone()  # type: ignore[no-any-return]

        def mixed(*chosen: torch.Tensor) -> torch.Tensor:
            expected.extend(chosen)
            return at.mixed.clone()  # type: ignore[no-any-return]

        out, routed = self._forward(layer, hidden, kwargs["position_embeddings"], kwargs, attended, mixed)
        expected += [*routed[2], out]
        made = [at.query, at.key, at.value, *at.chosen, *at.routed[2], at.out]
        if [part.shape for part in made] != [part.shape for part in expected]:
            return False
        return bool(torch.stack([(a == b).all() for a, b in zip(made, expected, strict=True)]).all())  # waits once

    def _forward(
        self, layer: Any, hidden: torch.Tensor, angles: Any, kwargs: dict[str, Any], attended: Any, mixed: Any
    ) -> tuple[Any, Any]:
        """The layer's own forward, which asks these for what attention and experts give; and the router's call."""
        calls: list[Any] = []
        with self._replaced(attended, mixed, lambda _, *call: calls.append(call)):
            out = self._original.forward(layer, hidden, **{**kwargs, "position_embeddings": angles, CACHE: None})
        if len(calls) != 1:
            raise RuntimeError("the router is not asked once")
        return out, calls[0]

    @contextlib.contextmanager
    def _replaced(self, attended: Any, mixed: Any, routed: Any) -> Iterator[None]:
        attention, experts, router = self._attention, self._experts, self.router
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
