"""The differences between a loaded model and transformers' own:

- Experts: the function registered in ALL_EXPERTS_FUNCTIONS passes the router's choice to the module's `Runtime`.
- Passes: a stack of layers tells the runtime when a forward pass begins, what its rows are, and when it has ended.
- KV cache: a cache that grows has room for more tokens, so that each new one does not copy all others.

A module is changed by giving it a subclass of its class with the same name, so a user's hooks stay. Nothing global
changes: other models in the process run as before.
B sequences of S tokens are T rows; H hidden, E experts, K top-k.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook  # type: ignore[attr-defined]
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import output_capturing

from expertly.core.errors import ModelUseError
from expertly.core.observation import IterationInfo
from expertly.native.kernels import STEP_NBYTES, ChosenExperts

CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""What models and their outputs call the KV cache: `past_key_values` before transformers 5.24, which takes both."""


RanStep = tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, Sequence[int], "npt.NDArray[np.float32] | None"]
"""What the step of a layer computed: the layer, hidden states, ids, the result, numbers of which the last two are when
it began and ended, by the clock of `time.perf_counter_ns`, and what the next router said early, if it did. They keep
their values until the pass ends.
"""


class Runtime(Protocol):
    """Computes the experts of one model. Calls never overlap: the model serialises its forward passes."""

    @property
    def wants_token_ids(self) -> bool:
        """Whether each `IterationInfo` is to have the token and the sequence of each row."""
        ...

    def begin_iteration(self, info: IterationInfo) -> None:
        """A forward pass begins, which raises the exceptions of this method."""

    def check_output(self, hidden_states: torch.Tensor) -> None:
        """Check what the stack gave, [B, S, H], before `end_iteration`. The pass raises its exceptions."""

    def check_logits(self, logits: torch.Tensor) -> None:
        """Check what the head gave, [B, S, V]. The model's call raises its exceptions."""

    def end_iteration(self, ok: bool) -> None:
        """The pass ended; `ok` is False when it raised. Called once for each `begin_iteration` that returned."""

    def forward_experts(
        self,
        module: nn.Module,
        layer: int,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Weighted sum of the chosen experts' outputs, [T, H] in the dtype of `hidden_states` [T, H].

        `module` is the layer's experts module without its weights (biases, activation and flags are there).
        An id in `top_k_index` [T, K] that is `num_experts` or more chooses no expert: its share is zero.
        `top_k_weights` [T, K] may have another dtype than `hidden_states`.
        """
        ...

    def chosen_experts(self, layer: int, *tensors: torch.Tensor) -> ChosenExperts | None:
        """The step of a layer's program for hidden states [1, H], ids [1, K] and weights [1, K], to [1, H], which is
        what `forward_experts` gives where all experts are resident. None: a program asks that instead.
        """
        ...

    def may_run(self) -> bool:
        """Whether such a step may run now: nobody is to be told of the layer before."""
        ...

    def lookahead_table(self, layer: int) -> tuple[int, int, int] | None:
        """For ChosenExperts.look_ahead: table, experts and number of what is predicted from a layer (0: nothing), where
        the predictor may be told of the layer after its step. None: it must be told before.
        """
        ...

    def note_lookahead(self, layer: int, scores: npt.NDArray[np.float32] | None) -> bool:
        """The next router's scores [T, E] for a layer's input, before its `forward_experts`. Returns whether nobody
        needs to see the layer's own router.
        """
        ...

    def is_quiet(self) -> bool:
        """Whether such a step, which looks ahead, may run now."""
        ...

    def ran(self, layers: Iterable[RanStep]) -> None:
        """These layers' steps ran, in this order."""


def look_alike(original: type[nn.Module], *mixins: type, **changed: Any) -> Any:
    """A subclass of `original` with `mixins` and `changed` attributes, under the same name."""
    namespace = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(original.__name__, (*mixins, original), namespace | changed | {"_expertly_original": original})


def original_of(kind: Any) -> Any:
    """The class that look-alikes stand for."""
    while "_expertly_original" in vars(kind):
        kind = vars(kind)["_expertly_original"]
    return kind


class Altered:
    """Stands for an object of another library, with other values of some attributes."""

    def __init__(self, original: Any, **changed: Any) -> None:
        vars(self).update(changed, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def watchers(module: Any) -> list[Any]:
    """Its forward hooks that do something."""
    return active(module._forward_hooks)


def active(hooks: Mapping[Any, Any]) -> list[Any]:
    """Those that do something. Those by which transformers collects what modules give stay on them for ever, and do
    nothing where nobody asks for that.
    """
    if hooks and not output_capturing._active_collector.get():
        return [hook for hook in hooks.values() if hook.__module__ != output_capturing.__name__]
    return list(hooks.values())


class AsTried:
    """A module and those within it, as they were when they were tried. Every token compares them, by functions of C
    over lists, which take half as long as a loop.
    """

    def __init__(self, root: Any, observed: Sequence[Any] = ()) -> None:
        """`observed`: may have forward hooks, which the caller calls."""
        modules = list(root.modules())
        self._kinds = list({original_of(type(module)) for module in modules})
        self._forwards = list(map(_FORWARD, self._kinds))
        children = [
            (parent._modules, name, child)
            for parent in modules
            for name, child in parent._modules.items()
            if child is not None
        ]
        self._siblings, self._names, self._children = _columns(children)
        self._types = list(map(type, self._children))
        self._states: list[dict[str, Any]] = list(map(vars, self._children))
        self._silent = [vars(child) for child in self._children if child not in observed]
        tensors = [
            (tensors, name, tensor)
            for module in modules
            for tensors in (module._parameters, module._buffers)
            for name, tensor in tensors.items()
        ]
        self._without, self._absent, _ = _columns([each for each in tensors if each[2] is None])
        there = [each for each in tensors if each[2] is not None]
        self._tensors, self._tensor_names, values = _columns(there)
        self._places = _places(values)

    def holds(self) -> bool:
        """Whether nobody replaced a child, a tensor or a class's forward since, and nobody is to be called. Hooks of
        the root are its caller's.
        """
        children = self._children
        try:
            return (
                all(map(is_, map(_FORWARD, self._kinds), self._forwards))
                and all(map(is_, map(dict.get, self._siblings, self._names), children))
                and all(map(is_, map(type, children), self._types))
                and all(map(is_, map(object.__getattribute__, children, repeat("__dict__")), self._states))
                and not any(map(dict.__contains__, self._states, repeat("forward")))
                and not any(map(dict.get, self._states, repeat("_forward_pre_hooks")))
                and not any(map(active, filter(None, map(dict.get, self._silent, repeat("_forward_hooks")))))
                and all(map(is_, map(dict.get, self._without, self._absent), repeat(None)))
                and _places(list(map(dict.get, self._tensors, self._tensor_names))) == self._places
                and not _has_any_global_hook()
            )
        except TypeError:  # a tensor is gone
            return False


_FORWARD = attrgetter("forward")


def _columns(rows: Sequence[tuple[Any, str, Any]]) -> tuple[list[Any], list[str], list[Any]]:
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


def _places(tensors: Sequence[Any]) -> tuple[list[int], list[bool]]:
    """Where their numbers are, and whether side by side: one may be transposed."""
    return list(map(torch.Tensor.data_ptr, tensors)), list(map(torch.Tensor.is_contiguous, tensors))


# -- experts -----------------------------------------------------------------------------------------------------------

IMPLEMENTATION = "expertly"
"""`experts_implementation` of a loaded model."""


def bind(module: Any, layer: int, runtime: Runtime) -> None:
    """Give an experts module its runtime: two models of one family may have two."""
    module._expertly_layer = layer
    module._expertly_runtime = runtime
    if original_of(type(module)) is type(module):  # else it has a forward of these; without asking the config each time
        module.__class__ = look_alike(type(module), forward=experts_forward)


def experts_modules(model: nn.Module) -> list[nn.Module]:
    """The experts modules of a loaded model, in layer order."""
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "_expertly_layer")]
    return sorted(modules, key=lambda module: module._expertly_layer)


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """[T, H] from hidden states [T, H], ids [T, K] and weights [T, K], by position as transformers calls it.

    A module without a runtime (a model made from a loaded model's config) has its weights and runs as usual.
    """
    runtime: Runtime | None = getattr(self, "_expertly_runtime", None)
    if runtime is None:
        default = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
        return default(self, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
    return runtime.forward_experts(self, self._expertly_layer, hidden_states, top_k_index, top_k_weights)


def mix(at: Any, router: Any, experts: Any) -> None:
    """Of a layer that is recorded (graphs.py), whose tensors are `at` their places: tell those who look at the router
    what it chose, and have the experts computed.
    """
    ids, weights = at.chosen[1].clone(), at.chosen[2].clone()
    if router._forward_hooks and (looks := watchers(router)):
        same = {id(at.chosen[1]): ids, id(at.chosen[2]): weights}
        routed = tuple([same[id(part)] if id(part) in same else part.clone() for part in at.routed[2]])
        for look in looks:
            look(router, at.routed[0], at.routed[1], routed)
    at.mixed.copy_(experts(at.chosen[0], ids, weights))


def strip(model: Any, site: Any) -> Any:
    """Delete the weights of an experts module, which a structure.ExpertsSite describes, and return it."""
    module = model.get_submodule(site.name)
    for name in site.weight_names:
        delattr(module, name)
    if (calls := site.calls) is not None:
        module.is_concatenated, module.num_experts = site.is_concatenated, site.geometry.num_experts
        forward = _rows_forward if calls.takes_rows else _passing_forward if calls.passes_on else experts_forward
        gate = getattr(type(module), "_apply_gate", _default_apply_gate)
        module.__class__ = look_alike(type(module), forward=forward, _apply_gate=gate)
    return module


def _rows_forward(self: Any, rows: torch.Tensor) -> torch.Tensor:
    """[E * T, H] from all tokens for each expert, [E * T, H], scaled by its weight: zeros where it was not chosen."""
    outputs = torch.zeros_like(rows)
    of_expert = rows.unflatten(0, (self.num_experts, -1))
    token, expert = of_expert.any(-1).T.nonzero().unbind(1)
    chosen = experts_forward(self, of_expert[expert, token], expert[:, None], rows.new_ones(len(token), 1))
    outputs.unflatten(0, (self.num_experts, -1))[expert, token] = chosen
    return outputs


def _passing_forward(self: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`experts_forward`, where an id of E or more passes its token on."""
    passed = (weights * (ids >= self.num_experts)).sum(-1, keepdim=True)
    return experts_forward(self, hidden, ids, weights) + (hidden * passed).to(hidden.dtype)


# -- forward passes ----------------------------------------------------------------------------------------------------


@dataclass
class Passes:
    """What the stacks of a model share: one forward pass runs at a time, which holds the lock. A pass raises the
    exceptions of what it calls.
    """

    runtime: Runtime
    lock: contextlib.AbstractContextManager[bool] = field(default_factory=threading.RLock)
    is_running: bool = False  # a pass runs that the runtime knows of
    check: Callable[[int, int], None] = lambda num_cached, num_read: None  # before each, of tokens of all sequences
    give_room: Callable[[Any], None] = field(default_factory=lambda: give_room)  # to the KV cache, before each
    around: Callable[[Any, Any], contextlib.AbstractContextManager[None]] = lambda ids, cache: contextlib.nullcontext()


def attach(model: PreTrainedModel, sites: Sequence[str], runtime: Runtime) -> None:
    """Tell `runtime` of the passes of every stack: the innermost transformers model around an experts module.

    `sites`: the paths of the experts modules, in layer order. torch.compile around the model does not compile the
    stacks (with fullgraph=True it refuses).
    """
    passes = Passes(runtime)
    for name in dict.fromkeys(_stack_of(model, site) for site in sites):
        stack: Any = model.get_submodule(name)
        stack._expertly_passes = passes
        stack.__class__ = _announcing(type(stack))


@contextlib.contextmanager
def unannounced(model: nn.Module) -> Iterator[None]:
    """Forward passes of a loaded model within the block are not told to the runtime."""
    passes = passes_of(model)
    with passes.lock:
        was_running, passes.is_running = passes.is_running, True
        try:
            yield
        finally:
            passes.is_running = was_running


def passes_of(model: nn.Module) -> Passes:
    """Those of a loaded model."""
    stack: Any = next(module for module in model.modules() if hasattr(module, "_expertly_passes"))
    return stack._expertly_passes  # type: ignore[no-any-return]


def _stack_of(model: PreTrainedModel, site: str) -> str:
    path = site
    while not isinstance(model.get_submodule(path), PreTrainedModel):
        path = path.rpartition(".")[0]
    return path


def _announcing(original: Any) -> Any:
    names = tuple(inspect.signature(original.forward).parameters)[1:]

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            raise ModelUseError("experts whose weights come and go cannot be traced; call the model as it is")
        passes: Passes = self._expertly_passes
        with passes.lock:
            info = None
            if not passes.is_running:  # else this is a stack within a stack, and the outer one has begun the pass
                inputs = dict(zip(names, args, strict=False)) | kwargs if args else kwargs
                info = describe_pass(inputs, passes.runtime.wants_token_ids)
            if info is None:
                return original.forward(self, *args, **kwargs)
            cache = _cache_in(inputs)
            passes.give_room(cache)
            passes.check(_length(cache) * info.num_requests, len(info.is_prefill))
            passes.runtime.begin_iteration(info)
            passes.is_running, is_ok = True, False
            try:
                with passes.around(inputs.get("input_ids"), cache):
                    result = original.forward(self, *args, **kwargs)
                passes.runtime.check_output(result[0])
                is_ok = True
                return result
            finally:
                passes.is_running = False
                passes.runtime.end_iteration(is_ok)

    return look_alike(original, forward=torch.compiler.disable(forward, reason="experts come and go"))


# -- keys and values ---------------------------------------------------------------------------------------------------

ROOM_TOKENS = 64
"""Tokens for which a cache layer's memory has room whenever it grows."""


def give_room(cache: Any) -> None:
    """Make every plain layer of a KV cache a RoomyLayer; other kinds of layer stay.

    transformers concatenates keys and values again for each token: at 4 096 tokens that copies more than attention
    reads. Memory that was handed out is never overwritten: a layer that was copied or cropped gets new memory.
    """
    for layer in getattr(cache, "layers", ()):
        if type(layer) is DynamicLayer:
            become(layer, RoomyLayer)


def become(layer: Any, kind: type[DynamicLayer]) -> None:
    """Have a layer of a KV cache be of a kind with room for more tokens."""
    layer.__class__ = kind
    vars(layer)["_expertly_rooms"] = _Room(), _Room()


class _Room:
    """Keys or values: memory [B, heads, more than n, width], of which the first n tokens are in use."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self.handed_out: torch.Tensor | None = None

    def append(self, past: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        """`past` [B, heads, n, width], or nothing, and then `more` [B, heads, m, width]."""
        num_past = past.shape[2] if past.dim() == 4 else 0
        num_tokens = num_past + more.shape[2]
        if num_past and (past.dtype != more.dtype or past.shape[:2] != more.shape[:2]):
            return torch.cat((past, more), dim=2)  # torch's rules: promote, or raise
        memory = self.memory
        if memory is None or past is not self.handed_out or num_tokens > memory.shape[2]:
            sizes = (*more.shape[:2], num_tokens + ROOM_TOKENS, more.shape[3])
            memory = self.memory = more.new_empty(sizes)
            if num_past:
                memory[:, :, :num_past] = past
        memory[:, :, num_past:num_tokens] = more
        self.handed_out = memory.as_strided((*more.shape[:2], num_tokens, more.shape[3]), memory.stride())
        return self.handed_out


class RoomyLayer(DynamicLayer):
    """A layer of a KV cache whose memory has room for more tokens."""

    _expertly_rooms: tuple[_Room, _Room]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self._expertly_rooms
        assert self.keys is not None and self.values is not None
        self.keys, self.values = keys.append(self.keys, key_states), values.append(self.values, value_states)
        return self.keys, self.values


def places(cache: Any, layer: int, new: torch.Tensor, num_heads: int, head_width: int) -> Sequence[torch.Tensor] | None:
    """Keys and values of a plain layer of a KV cache, in which those of the tokens `new` [B, S, H] are last, to be
    filled by the caller. None where `update` is to give them new memory, or to do something else, as for the cache of
    another model.
    """
    if type(cache) is not DynamicCache or cache.offloading or layer >= len(cache.layers):
        return None
    kept = cache.layers[layer]
    if not isinstance(kept, RoomyLayer) or kept.keys is None or kept.values is None:
        return None
    dtype, factors = new.dtype, vars(kept).get("_expertly_factors")
    if factors is not None:
        if factors.shape != (num_heads, head_width):
            return None
        dtype, head_width = torch.uint8, head_width + STEP_NBYTES
    views = []
    for room, past in zip(kept._expertly_rooms, (kept.keys, kept.values), strict=True):
        memory = room.memory
        if memory is None or past is not room.handed_out or memory.dtype != dtype:
            return None
        batch, heads, most, width = memory.shape
        num_tokens = past.shape[2] + new.shape[1]
        if num_tokens > most or (batch, heads, width) != (new.shape[0], num_heads, head_width):
            return None
        views.append(memory.as_strided((batch, heads, num_tokens, width), memory.stride()))
    kept.keys, kept.values = views
    for room, view in zip(kept._expertly_rooms, views, strict=True):
        room.handed_out = view
    return views


def factors_of(cache: Any, layer: int) -> torch.Tensor | None:
    """Of a layer's keys in a cache of either kind, in which they are codes (kv_codes.py); None: numbers."""
    allocator = getattr(cache, "layer_to_allocator", {}).get(layer)
    if allocator is not None:
        return vars(allocator).get("_expertly_factors", {}).get(layer)  # type: ignore[no-any-return]
    layers = getattr(cache, "layers", ())
    return getattr(layers[layer], "_expertly_factors", None) if layer < len(layers) else None


# -- the rows of a pass ------------------------------------------------------------------------------------------------

_MAX_VERIFIED = 32
"""Most tokens of a sequence that assisted decoding verifies in one pass; transformers starts at 20 and adapts."""


def describe_pass(inputs: Mapping[str, Any], wants_tokens: bool) -> IterationInfo | None:
    """The rows of a pass, from the keyword arguments of its stack; None where it has no inputs [B, S].

    `wants_tokens`: whether the runtime wants the tokens, too.
    """
    rows = inputs.get("input_ids")  # [B, S]
    if rows is None:
        rows = inputs.get("inputs_embeds")  # [B, S, H]
    if rows is None or rows.dim() < 2:
        return None
    batch, length = rows.shape[0], rows.shape[1]
    if inputs.get("cu_seq_lens_q") is not None:
        info = _describe_packed(batch * length, inputs)
    else:
        # With a filled cache, a few tokens are decode (assisted decoding verifies that many at once), more are prefill
        # (the next turn of a chat, a chunk of a prompt).
        is_prefill = length > _MAX_VERIFIED or not _is_filled(_cache_in(inputs))
        info = _describe_alike(batch, length, is_prefill)
        if length > 1 or is_prefill:
            is_pad = _pads(inputs.get("attention_mask"), batch, length)
            info = info if is_pad is None else replace(info, is_pad=is_pad)
    return replace(info, **_tokens(rows, inputs)) if wants_tokens else info


@functools.lru_cache(maxsize=64)
def _describe_alike(batch: int, length: int, is_prefill: bool) -> IterationInfo:
    """Rows all of one phase, without pads. Cached: a decode step makes no new object."""
    is_prefills = _frozen(np.full(batch * length, is_prefill))
    return IterationInfo(is_prefills, None, batch, "prefill" if is_prefill else "decode")


def _describe_packed(num_rows: int, inputs: Mapping[str, Any]) -> IterationInfo:
    """Continuous batching: sequences side by side in one row [1, T], then pads. A sequence of one token that is not at
    position 0 is in decode, any other in prefill.
    """
    bounds, positions = _integers(inputs["cu_seq_lens_q"]), inputs.get("position_ids")
    lengths = np.diff(bounds)
    is_prefill = np.arange(num_rows) < bounds[-1]
    is_pad = None if is_prefill.all() else _frozen(~is_prefill)
    if positions is not None:
        singles = bounds[:-1][lengths == 1]
        is_prefill[singles[_integers(positions)[singles] > 0]] = False
    phase: Literal["prefill", "decode"] = "prefill" if is_prefill.any() else "decode"
    return IterationInfo(_frozen(is_prefill), is_pad, int(np.count_nonzero(lengths)), phase)


def _cache_in(inputs: Mapping[str, Any]) -> Any:
    return inputs.get(CACHE, inputs.get("past_key_values"))


def _length(cache: Any) -> int:
    """Tokens of each sequence in the cache; 0 where there is none, or no attention layer to count them."""
    with contextlib.suppress(AttributeError, ValueError):
        return int(cache.get_seq_length())
    return 0


def _is_filled(cache: Any) -> bool:
    try:  # of what has no such method, as None and tuples, whether there is anything
        return bool(getattr(cache, "get_seq_length", lambda: bool(cache))() > 0)
    except ValueError:  # no attention layer counts tokens
        return bool(cache.has_previous_state())


def _pads(attention_mask: Any, batch: int, length: int) -> npt.NDArray[np.bool_] | None:
    """Which rows are pads, [T]; None where none is.

    From a mask [B, at least S], whose last S columns are this pass's tokens, or from a prepared attention mask
    [B, 1, S, columns] (a static cache's first pass), in which a pad does not see itself. There may be one for each kind
    of layer.
    """
    if isinstance(attention_mask, Mapping):
        attention_mask = attention_mask.get("full_attention", next(iter(attention_mask.values()), None))
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape[0] != batch:
        return None
    if attention_mask.dim() == 2 and attention_mask.shape[1] >= length:
        sees = attention_mask[:, -length:] != 0
    elif attention_mask.dim() == 4 and attention_mask.shape[2] == length <= attention_mask.shape[3]:
        itself = attention_mask[:, 0].diagonal(dim1=-2, dim2=-1)
        sees = itself if itself.dtype == torch.bool else itself == 0
    else:
        return None
    is_pad = (~sees).reshape(-1).cpu().numpy()
    return _frozen(is_pad) if is_pad.any() else None


def _tokens(rows: torch.Tensor, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The token and the sequence of each row, from ids [B, S] or embeddings [B, S, H]."""
    batch, length = rows.shape[0], rows.shape[1]
    starts = None
    if inputs.get("cu_seq_lens_q") is None:
        sequences = np.repeat(np.arange(batch, dtype=np.int32), length)
    else:  # an empty sequence has no row; pads count as the last sequence's
        bounds = _integers(inputs["cu_seq_lens_q"])
        sequences = np.searchsorted(bounds[1:], np.arange(batch * length), side="right").astype(np.int32)
        sequences = np.minimum(sequences, np.int32(len(bounds) - 2))
        positions = inputs.get("position_ids")
        if isinstance(positions, torch.Tensor) and positions.numel() == batch * length:
            starts = _frozen(_integers(positions)[np.minimum(bounds[:-1], batch * length - 1)])
    token_ids = embeddings = None
    if rows.dim() == 2:
        token_ids = _frozen(rows.reshape(-1).cpu().numpy().astype(np.int32))
    else:
        embeddings = _frozen(saturated_half(rows.detach().reshape(-1, rows.shape[-1])))
    return {"token_ids": token_ids, "embeddings": embeddings, "sequences": _frozen(sequences), "starts": starts}


def saturated_half(values: torch.Tensor) -> npt.NDArray[np.float16]:
    """A copy in float16 in which finite values stay finite."""
    largest = torch.finfo(torch.float16).max
    half: npt.NDArray[np.float16] = values.float().clamp(-largest, largest).half().cpu().numpy()
    return half


def _integers(tensor: torch.Tensor) -> npt.NDArray[np.int64]:
    return np.asarray(tensor.reshape(-1).tolist(), dtype=np.int64)


def _frozen(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    values.setflags(write=False)
    return values
