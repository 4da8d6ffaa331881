"""The dense part of a loaded model at a few tokens: linear layers, routers, norms and attention by compiled kernels.

A module is changed where it does what the kernel does, which is found by what it computes and not by its name; prompts,
gradients, mixed dtypes, other devices, and what is not on a closed list (closed.py), stay transformers' and torch's.
B sequences of S tokens; H heads, D width of a head, n tokens of a sequence that ask.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.integrations.eager_paged import eager_paged_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import output_capturing

from expertly.model.closed import ARITHMETIC, does_only, stand_in, takes_one, undecorated
from expertly.model.hooks import CACHE, Altered, AsTried, factors_of, look_alike, original_of, places
from expertly.model.kv_codes import decoded
from expertly.model.tiled import TiledLayer
from expertly.native.kernels import NORM_STYLES, STEP_NBYTES, Kernels, Projections, are_plain
from expertly.native.widened import is_widened, linear


def use_kernels(model: nn.Module, kernels: Kernels) -> int:
    """Compute few tokens in the dense part of a loaded model by the compiled kernels; how many modules changed.

    They differ from torch's in the order of summation, and attention rounds once where torch's may round its weights.
    """
    changed = _use_linear(model, kernels) + _use_norms(model, kernels)
    _use_routers(model, kernels)  # which are among those of the first
    return changed + _use_attention(model, kernels)


def _is_taken(tensor: torch.Tensor, kernels: Kernels) -> bool:
    return kernels.most_tokens(tensor.dtype) > 0 and tensor.is_cpu


# -- linear layers -----------------------------------------------------------------------------------------------------


def _use_linear(model: nn.Module, kernels: Kernels) -> int:
    """Modules with a matrix whose forward calls F.linear, as linear layers and routers do: the same code with our F."""
    ours, kinds = Altered(functional, linear=partial(_linear_of, kernels)), dict[Any, Any]()
    modules: list[Any] = [module for module in model.modules() if _calls_linear(module, kernels)]
    for module in modules:
        original: Any = type(module)
        if original not in kinds:
            code, names = original.forward.__code__, {**original.forward.__globals__, "F": ours}
            forward = FunctionType(code, names, "forward", original.forward.__defaults__)
            forward.__kwdefaults__ = original.forward.__kwdefaults__
            kinds[original] = look_alike(original, forward=forward)
        module.__class__ = kinds[original]
    return len(modules)


def _calls_linear(module: Any, kernels: Kernels) -> bool:
    forward, weight = type(module).forward, module._parameters.get("weight")
    return (
        type(forward) is FunctionType
        and forward.__closure__ is None
        and {"F", "linear"} <= set(forward.__code__.co_names)
        and forward.__globals__.get("F") is functional
        and weight is not None
        and weight.dim() == 2
        and _is_taken(weight, kernels)
    )


def _linear_of(
    kernels: Kernels, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As torch's `linear`. One function for all: it runs several times a layer and token."""
    width = input.shape[-1]
    num_tokens = input.numel() // width if width else 0
    if not (
        are_plain(input, weight, bias)
        and num_tokens
        and weight.dim() == 2
        and width == weight.shape[1]
        and weight.stride(1) == 1
        and (bias is None or (bias.shape == weight.shape[:1] and bias.stride(0) == 1))
    ):
        return functional.linear(input, weight, bias)
    if num_tokens > kernels.most_tokens(input.dtype):
        return linear(input, weight, bias)
    out = input.new_empty(*input.shape[:-1], weight.shape[0])
    kernels.dots(weight.data_ptr(), input.contiguous(), out, weight.stride(0) * weight.element_size(), bias)
    return out


# -- what is tried -----------------------------------------------------------------------------------------------------


def _use_tried(model: nn.Module, kind_of: Any, style_of: Any, become: Any, kernels: Kernels) -> int:
    """Change the modules that have a style, which is tried once for each kind of them; how many."""
    styles: dict[Any, Any] = {None: None}
    num_changed = 0
    for module in list(model.modules()):
        kind = kind_of(module)
        if kind not in styles:
            styles[kind] = style_of(module, kernels)
        if styles[kind] is not None:
            become(module, styles[kind], kernels)
            num_changed += 1
    return num_changed


def _is_listed(module: nn.Module, names: Set[str]) -> bool:
    """Whether a module without others in it makes something of one tensor, by its parameters and `names` alone."""
    forward = type(module).forward
    is_whole = next(module.children(), None) is None and next(module.buffers(), None) is None
    return is_whole and does_only(forward, names, type(module)) and takes_one(forward)


def _outcome(module: nn.Module, parameters: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
    """What a module makes of `x` with these parameters; None where it fails."""
    try:
        with torch.no_grad():
            return torch.func.functional_call(module, parameters, (x,))
    except Exception:  # whatever it is, it is not what is looked for
        return None


def _is_near(made: torch.Tensor, expected: torch.Tensor, rtol: float, ulps: int, atol: float = 0.0) -> bool:
    """Whether they differ by no more than another order of summation: `rtol` in float32, in other dtypes few numbers by
    `ulps`.
    """
    is_wide = expected.dtype == torch.float32
    rtol = rtol if is_wide else ulps * torch.finfo(expected.dtype).eps
    is_close = torch.allclose(made.float(), expected.float(), rtol=rtol, atol=atol)
    return is_close and (is_wide or float((made != expected).float().mean()) <= 0.02)


# -- routers -----------------------------------------------------------------------------------------------------------

ROUTER_NAMES = ARITHMETIC | {"hidden_dim", "weight", "bias", "top_k", "norm_topk_prob"}
"""What a router's forward may look up that is no more than what is tried."""


def _use_routers(model: nn.Module, kernels: Kernels) -> int:
    """Logits, weights and ids of the chosen in one call, in modules that were found to compute them so."""

    def kind_of(module: Any) -> Any:
        if not hasattr(module, "top_k") or not _is_listed(module, ROUTER_NAMES):
            return None
        parameters = {name: (tuple(each.shape), each.dtype) for name, each in module.named_parameters(recurse=False)}
        if not {"weight"} <= parameters.keys() <= {"weight", "bias"} or not _is_taken(module.weight, kernels):
            return None
        return type(module), *parameters.values(), module.top_k, vars(module).get("norm_topk_prob")

    return _use_tried(model, kind_of, _router_style_of, _become_router, kernels)


def _router_style_of(module: Any, kernels: Kernels) -> tuple[bool, torch.dtype] | None:
    """Whether the module normalises weights, and their dtype, tried with scores of which some are equal: the same
    experts, and their weights but for what another exp changes. None where it is another router.
    """
    generator = torch.Generator().manual_seed(0)
    (num_experts, width), dtype, top_k = module.weight.shape, module.weight.dtype, module.top_k
    styles, num_tried = {True, False}, 0
    for trial in range(8):
        weight = torch.randn(num_experts, width, generator=generator) * 2 * width**-0.5
        if trial % 2:
            weight[num_experts // 2 :] = weight[: num_experts - num_experts // 2].clone()
        parameters = {"weight": weight.to(dtype)}
        if module._parameters.get("bias") is not None:
            parameters["bias"] = torch.randint(-2, 3, (num_experts,), generator=generator).to(dtype)
        x = torch.randn(kernels.most_tokens(dtype), width, generator=generator).to(dtype)
        routed = _outcome(module, parameters, x)
        if not isinstance(routed, tuple) or [getattr(part, "dim", int)() for part in routed] != [2, 2, 2]:
            return None
        logits, weights, ids = routed
        if weights.dtype not in (dtype, torch.float32) or weights.shape != (len(x), top_k):
            return None
        for is_normalised in tuple(styles):
            arguments = parameters["weight"], parameters.get("bias"), top_k, weights.dtype
            made = kernels.router(x, *arguments, is_normalised=is_normalised)
            if made is None:  # another trial
                continue
            num_tried += 1
            is_same = torch.equal(made[0], logits) and torch.equal(made[2].to(ids.dtype), ids)
            if not (is_same and _is_near(made[1], weights, 1e-5, 1)):
                styles.discard(is_normalised)
    return (max(styles), weights.dtype) if styles and num_tried >= 8 else None


def _become_router(module: Any, style: tuple[bool, torch.dtype], kernels: Kernels) -> None:
    (is_normalised, of_weights), original, top_k = style, type(module), module.top_k

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        if (
            hidden_states.dim() == 2
            and weight is not None
            and are_plain(hidden_states, weight, bias)
            and 1 <= hidden_states.shape[0] <= kernels.most_tokens(hidden_states.dtype)
            and weight.shape[1:] == hidden_states.shape[1:]
            and weight.is_contiguous()
            and (bias is None or (bias.shape == weight.shape[:1] and bias.stride(0) == 1))
        ):
            x = hidden_states.contiguous()
            routed = kernels.router(x, weight, bias, top_k, of_weights, is_normalised=is_normalised)
            if routed is not None:
                return routed
        return original.forward(self, hidden_states)  # type: ignore[attr-defined]

    stand_in(module, forward=forward)


# -- norms -------------------------------------------------------------------------------------------------------------

_NORM_NAMES = ARITHMETIC | {"weight", "_norm", "eps", "variance_epsilon", "normalized_shape"}
_NORM_NAMES |= {"with_scale", "group_size"}
"""What a norm may look up that is no more than what is tried."""


def _use_norms(model: nn.Module, kernels: Kernels) -> int:
    """Modules that compute what `Kernels.norm` does: tried with each style, on numbers that show the epsilon, too."""

    def kind_of(module: Any) -> Any:
        epsilon = _epsilon_of(module)
        is_norm = epsilon is not None and _is_taken(module.weight, kernels)
        return (type(module), module.weight.dtype, epsilon, len(module.weight)) if is_norm else None

    return _use_tried(model, kind_of, _style_of, _become_norm, kernels)


def _epsilon_of(module: Any) -> float | None:
    """Of a module that may be a norm: one vector of weights, and one input."""
    parameters = dict(module.named_parameters(recurse=False))
    if set(parameters) != {"weight"} or parameters["weight"].dim() != 1 or not _is_listed(module, _NORM_NAMES):
        return None
    epsilons = [value for name, value in vars(module).items() if "eps" in name and isinstance(value, float)]
    return epsilons[0] if len(epsilons) == 1 else None


def _style_of(module: Any, kernels: Kernels) -> tuple[float, str] | None:
    """Its epsilon, and as which the module computes. None where it is no norm."""
    epsilon: float = _epsilon_of(module)  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(0)
    dtype, width = module.weight.dtype, module.weight.shape[0]
    weight = (torch.randn(width, generator=generator) + 1).to(dtype)
    x = torch.randn(16, width, generator=generator)
    x[8:] *= epsilon**0.5  # as large as the epsilon beside them
    x[12:] *= 30 / epsilon**0.5
    x = x.to(dtype)
    expected = _outcome(module, {"weight": weight}, x)
    if not isinstance(expected, torch.Tensor) or expected.shape != x.shape or expected.dtype != dtype:
        return None
    for style in NORM_STYLES:
        if _is_near(kernels.norm(x, weight, epsilon, style), expected, 2e-6, 2, atol=1e-7):
            return epsilon, style
    return None


def _become_norm(module: Any, style: tuple[float, str], kernels: Kernels) -> None:
    original, as_tried = type(module), type(module).forward

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self._parameters.get("weight")
        if (
            weight is None
            or original.forward is not as_tried
            or not are_plain(hidden_states, weight)
            or not 1 <= hidden_states.shape[:-1][:2].numel() <= kernels.most_tokens(weight.dtype)
            or hidden_states.shape[-1:] != weight.shape
            or weight.stride(0) != 1
        ):
            return original.forward(self, hidden_states)  # type: ignore[no-any-return]
        return kernels.norm(hidden_states.contiguous(), weight, *style)

    stand_in(module, forward=forward)
    module._expertly_norm = style


# -- attention ---------------------------------------------------------------------------------------------------------

_NAME = "expertly"
"""Of the attention function that attention modules of loaded models ask transformers for."""

IDLE = {"position_ids", "sliding_window", "is_causal", "use_cache", "output_router_logits", "output_hidden_states"}
IDLE |= {"dropout"}  # which is 0
IDLE |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "read_index", "write_index"}
IDLE |= {"logits_indices", "logits_processor_args", "block_table"}  # of continuous batching
"""Arguments that change nothing in `sdpa` and eager attention of a few tokens, whose mask says what they see."""

_EAGER_NAMES = ARITHMETIC | {"repeat_kv", "num_key_value_groups", "head_dim", "sinks", "max", "values"}
_EAGER_NAMES |= {"dropout", "training"}  # with dropout the kernel is not asked
"""What an eager attention may look up that is no more than what is tried."""


def _use_attention(model: nn.Module, kernels: Kernels) -> int:
    """Modules that ask transformers for the attention function that their config names ask for ours. The config is
    the model's own, and so are its masks: set_attn_implementation works as ever.
    """
    ALL_ATTENTION_FUNCTIONS.register(_NAME, _attention)
    num_changed = 0
    modules: list[Any] = list(model.modules())
    for module in modules:
        config: Any = getattr(module, "config", None)
        is_model = isinstance(module, PreTrainedModel) or not isinstance(config, PreTrainedConfig)
        if is_model or not _asks_for_attention(type(module)) or not _computes(module, kernels):
            continue
        is_eager = config._attn_implementation == "eager"
        eager = _eager_as_tried(module, kernels) if is_eager else None
        if eager is not None or config._attn_implementation == "sdpa":
            module._expertly_kernels, module._expertly_eager = kernels, eager
            module.config = NamesAttention(config)
            num_changed += 1
            _join_projections(module, kernels)
    kernels.counts.attention = 0  # they were tried
    return num_changed


def _computes(module: nn.Module, kernels: Kernels) -> bool:
    """Whether the kernels take the dtype that a module computes in: its parameters', or that of its tiles."""
    tiled = next((part for part in module.modules() if isinstance(part, TiledLayer)), None)
    if tiled is not None:
        return tiled._expertly_kernels is kernels
    first = next(module.parameters(), None)
    return first is not None and _is_taken(first, kernels)


@dataclass(frozen=True)
class _Eager:
    """The eager attention of a module's own file, which computes what the kernel does."""

    function: Any
    known: Set[str]  # arguments


def _eager_as_tried(module: Any, kernels: Kernels) -> _Eager | None:
    """Where it computes what the kernel does, with masks, bounds and sinks, of small and of large scores."""
    function, sinks = eager_of(module), module._parameters.get("sinks")
    groups = getattr(module, "num_key_value_groups", None)
    if not isinstance(groups, int) or not does_only(function, _EAGER_NAMES):
        return None
    if not kernels.most_tokens(torch.float32, None) or (sinks is not None and not _is_taken(sinks, kernels)):
        return None
    num_heads = 2 * groups if sinks is None else len(sinks)
    sizes = (num_heads, 3), (num_heads // groups, 5), (num_heads // groups, 5)
    generator = torch.Generator().manual_seed(0)
    mask = torch.zeros(2, 1, 3, 5)
    mask[0, :, :2, 3:] = torch.finfo(mask.dtype).min
    takes_softcap = "softcap" in inspect.signature(function).parameters
    of_sinks = {} if sinks is None else {"s_aux": sinks}
    for scale in (0.3, 30.0):
        q, k, v = (torch.randn(2, heads, num, 16, generator=generator) for heads, num in sizes)
        for softcap in (0.0, 2.0) if takes_softcap else (0.0,):
            more = of_sinks | ({"softcap": softcap} if softcap else {})
            try:
                with torch.no_grad():
                    expected = function(module, q, k, v, mask, scaling=scale, dropout=0.0, **more)[0]
            except Exception:  # whatever it is, it is another attention
                return None
            made = kernels.attention(q, k, v, scale, mask, sinks=sinks, softcap=softcap)
            if expected.shape != made.shape or not torch.allclose(made, expected.float(), rtol=1e-3, atol=1e-3):
                return None
    return _Eager(function, IDLE | ({"softcap"} if takes_softcap else set()) | of_sinks.keys())


def eager_of(module: nn.Module) -> Any:
    """transformers' slowest attention, which a file of a model has for itself; or None."""
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


def _asks_for_attention(kind: type[nn.Module]) -> bool:
    """Does its forward look the function up, and decide nothing else by the name?"""
    forward = undecorated(kind.forward)
    if forward is None or not {"_attn_implementation", "get_interface"} <= set(forward.__code__.co_names):
        return False
    constants = forward.__code__.co_consts
    texts = {text for value in constants for text in (value if isinstance(value, tuple) else (value,))}
    return not texts & {"eager", "sdpa"}


class NamesAttention:
    """A config for an attention module, the model's own but for the name of the attention function."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self._expertly_config = config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_expertly_config":
            raise AttributeError(name)
        return _NAME if name == "_attn_implementation" else getattr(self._expertly_config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_expertly_config":
            object.__setattr__(self, name, value)
        else:
            setattr(self._expertly_config, name, value)


_SCORES = 4 << 20
"""Of queries and keys of a prompt's eager attention, that exist at a time where it is computed in float32."""


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    then: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    are_ours: bool = False,
    positions: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As transformers' attention functions: query [B, H, n, D] over key and value [B, G, S, ...], to [B, n, H, W]; or
    what the linear layer of `then`, weight and bias, makes of it, [B, n, rows], where the kernel computes both.
    `positions`: which keys and values are those of the tokens. `factors`: they are codes (kv_codes.py).
    """
    asked: Callable[..., torch.Tensor] | None = module.__dict__.get("_expertly_asked")
    if asked is not None:
        return asked(query, key, value, {**more, "scaling": scaling}), None
    if not is_native(module, query, key, value, attention_mask, scaling, more, are_ours, positions):
        if positions is not None:
            key, value = key.index_select(2, positions), value.index_select(2, positions)
        if factors is not None:
            key, value = decoded(key, query.dtype, factors[:, None]), decoded(value, query.dtype)
        name = _name_of(module)
        function: Any = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_of(module))
        is_slow = name != "sdpa" and is_widened(query) and key.numel() and "_expertly_eager" in module.__dict__
        if is_slow and query.numel() and _is_known(module, name, scaling, more):
            more["scaling"] = scaling
            return _widened(function, module, query, key, value, attention_mask, more), None
        return function(module, query, key, value, attention_mask, scaling=scaling, **more)  # type: ignore[no-any-return]
    scale, softcap = query.shape[-1] ** -0.5 if scaling is None else scaling, more.get("softcap") or 0.0
    kernels: Kernels = module._expertly_kernels
    sinks = more.get("s_aux")
    called: dict[str, Any] = {"softcap": softcap, "sinks": sinks, "positions": positions, "factors": factors}
    return kernels.attention(query, key, value, scale, attention_mask, then=then, **called), None


def _widened(
    function: Any,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    more: dict[str, Any],
) -> torch.Tensor:
    """The eager attention `function` in float32, for some queries at a time: [B, n, H, W]."""
    key, value, parts = key.float(), value.float(), []
    step = max(query.shape[3], _SCORES // (query.shape[:2].numel() * key.shape[2]))  # scores, or as many as keys
    for begin in range(0, query.shape[2], step):
        rows = slice(begin, begin + step)
        seen = mask if mask is None or mask.shape[2] == 1 else mask[:, :, rows]
        parts.append(function(module, query[:, :, rows].float(), key, value, seen, **more)[0].to(query.dtype))
    return torch.cat(parts, 1)


def keep(
    cache: Any, layer: int, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any], kernels: Kernels
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor | None]]:
    """Have a KV cache keep keys and values [B, heads, n, D] of new tokens. Returns those of all, [B, heads, S, D]; or,
    without copying them, all of the cache, and as further arguments of `_attention` which those are, and how they are
    kept. `kwargs`: of attention, which a paged cache changes.
    """
    kept, factors = paged(cache, layer, key, kwargs), factors_of(cache, layer)
    if factors is not None and key.is_cpu and factors.shape == (key.shape[1], key.shape[3]):
        key, value = kernels.encode(key, factors), kernels.encode(value)
    else:
        factors = None
    if kept is None:
        of_paged = {"kwargs": kwargs} if CACHE == "cache" else {}
        return *cache.update(key, value, layer, **of_paged), {} if factors is None else {"factors": factors}
    keys, values, write, read = kept
    for memory, new in ((keys, key), (values, value)):
        memory[0].index_copy_(1, write, new[0])
    return keys, values, {"positions": read, "factors": factors}


def paged(
    cache: Any, layer: int, new: torch.Tensor, kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """All keys and all values [1, heads, rows, D] of a layer of a paged cache in the host's memory, or their codes, in
    which rows of them the new tokens are to be put, and which then are those of the pass. None: it is another cache, or
    `update` is to return other rows.
    """
    if type(cache) is not PagedAttentionCache or not new.is_cpu or kwargs.get("block_table") is not None:
        return None
    views: dict[int, Any] = vars(cache).setdefault("_expertly_views", {})
    if layer not in views:
        allocator: Any = getattr(cache, "layer_to_allocator", {}).get(layer)
        # not in transformers 5.17; others keep a window
        is_full = type(allocator).__name__ == "FullAttentionCacheAllocator"
        rows = allocator._kv_token_views[layer] if is_full else ()
        views[layer] = (allocator.index, *(part.transpose(0, 1).unsqueeze(0) for part in rows)) if is_full else None
    if views[layer] is None:
        return None
    index, keys, values = views[layer]
    write, read = kwargs["write_index"][index], kwargs["read_index"][index]
    factors = factors_of(cache, layer)
    is_known = keys.dtype == new.dtype if factors is None else factors.shape == (new.shape[1], new.shape[3])
    if not is_known or not read.numel() or read.dtype != torch.int64 or not read.is_contiguous():
        return None
    return keys, values, write, read


def _name_of(module: Any) -> str:
    """Of the attention that the user asks for, past transformers' Python."""
    return object.__getattribute__(module.config._expertly_config, "_attn_implementation")  # type: ignore[no-any-return]


def is_native(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: Any,
    more: dict[str, Any],
    are_ours: bool,
    positions: torch.Tensor | None = None,
) -> bool:
    """Whether the attention that a user asks for is what the kernel computes, with these arguments. `are_ours`: kernels
    have just written query, key and value, so they are plain.
    """
    kernels: Kernels | None = module.__dict__.get("_expertly_kernels")
    if kernels is None:
        return False
    num_tokens, sinks = query.shape[2], more.get("s_aux")
    num_keys = key.shape[2] if positions is None else positions.numel()
    are_codes = key.dtype == torch.uint8
    if (
        not _is_known(module, _name_of(module), scaling, more)
        or not (are_ours or (are_plain(query, *(() if are_codes else (key, value))) and are_plain(key, value)))
        or num_tokens > kernels.most_tokens(query.dtype, None)
        or key.shape[:2] != value.shape[:2]
        or (positions is None and key.shape[2] != value.shape[2])
        or (key.shape[0], key.shape[3] - STEP_NBYTES * are_codes) != query.shape[::3]
        or not query.stride(3) == key.stride(3) == value.stride(3) == 1
        or query.shape[1] % key.shape[1]
        or not query.numel()
        or not num_keys
        or (sinks is not None and not (are_plain(sinks) and sinks.shape == query.shape[1:2] and sinks.is_contiguous()))
        or (sinks is not None and sinks.dtype not in kernels.dtypes)
        or more.get("dropout")
    ):
        return False
    return is_native_mask(kernels, query, mask, num_keys)


def is_native_mask(kernels: Kernels, query: torch.Tensor, mask: torch.Tensor | None, num_keys: int) -> bool:
    """Whether the kernel reads what the tokens of `query` see as this mask says it."""
    batch, heads, num_tokens = query.shape[:3]
    if mask is None:
        return num_tokens == 1
    return (
        (num_tokens == 1 or num_tokens < num_keys)  # else it is a prompt
        and are_plain(mask)
        and mask.dim() == 4
        and mask.shape[2:] == (num_tokens, num_keys)
        and mask.shape[0] in (1, batch)
        and mask.shape[1] in (1, heads)
        and (mask.shape[3] == 1 or mask.stride(3) == 1)
        and (mask.dtype == torch.bool or mask.dtype in kernels.dtypes)
    )


def _is_known(module: Any, name: str, scaling: Any, more: dict[str, Any]) -> bool:
    """Whether the attention of this name is what the kernel computes, with these arguments."""
    if name == "sdpa":
        return ALL_ATTENTION_FUNCTIONS[name] is sdpa_attention_forward and (
            (scaling is None or type(scaling) is float) and (more.keys() <= IDLE or _are_known(more, IDLE))
        )
    if name == "paged|eager":  # which knows no bound
        usual = ALL_ATTENTION_FUNCTIONS[name] is eager_paged_attention_forward
        return usual and not more.get("softcap") and _is_known_eager(module, scaling, more)
    return name == "eager" and _is_known_eager(module, scaling, more)


def _is_known_eager(module: Any, scaling: Any, more: dict[str, Any]) -> bool:
    """Of the eager attention, which alone gives its weights, so that it computes when somebody collects them."""
    eager: _Eager | None = module._expertly_eager
    if (
        eager is None
        or eager_of(module) is not eager.function
        or type(scaling) is not float
        or not _are_known(more, eager.known)
        or more.get("s_aux") is not module._parameters.get("sinks")
    ):
        return False
    collected = output_capturing._active_collector.get()
    return collected is None or not any("attentions" in key for key in collected)


def _are_known(arguments: Mapping[str, Any], known: Set[str]) -> bool:
    """Whether each argument is a known one, or asks for nothing."""
    return all(value is None or value is False or name in known for name, value in arguments.items())


# -- queries, keys and values -----------------------------------------------------------------------------------------
# Linear layers, norms and rotation of a few tokens in one native call. A module is tried with the first few tokens that
# it is given: where one call makes what its own forward asks attention with, to the bit, it does so from then on.

_ARGUMENTS = ("self", "hidden_states", "position_embeddings", "attention_mask", CACHE)

_NAMES = {"shape", "head_dim", "view", "transpose", "reshape", "contiguous", "getattr", "config", "training"}
_NAMES |= {"layer_idx", "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "use_qk_norm"}
_NAMES |= {"apply_rotary_pos_emb", "update", "ALL_ATTENTION_FUNCTIONS", "get_interface", "_attn_implementation"}
_NAMES |= {"eager_attention_forward", "attention_dropout", "scaling", "sliding_window", "sinks"}
"""What a forward may look up that does no more than what is joined: another name may be a step behind attention, which
is not tried, or one that the tokens of the trial do not show.
"""

_ROTATION_NAMES = ARITHMETIC | {"rotate_half", "_apply_rotary_emb", "repeat_interleave"}
"""The same of `apply_rotary_pos_emb`."""

_LINEARS = ("q_proj", "k_proj", "v_proj")
_NORMS = ("q_norm", "k_norm")


@dataclass
class Joined:
    """What a module's own forward was found to do."""

    parts: AsTried
    projections: Projections
    then: tuple[torch.Tensor, torch.Tensor | None] | None  # of the layer behind attention, where it can be joined
    more: dict[str, Any]  # what the module tells attention beside what it is called with


def is_usual_attention(kind: type[nn.Module], more: Set[str] = frozenset()) -> bool:
    """Does its forward look up nothing but what makes queries, keys and values of its input, and `more`, and asks with
    them?
    """
    forward = undecorated(kind.forward)
    if forward is None or forward.__code__.co_varnames[: forward.__code__.co_argcount] != _ARGUMENTS:
        return False
    rotate = forward.__globals__.get("apply_rotary_pos_emb")
    if rotate is not None and not does_only(rotate, _ROTATION_NAMES):
        return False
    calls = {"apply_rotary_pos_emb", "eager_attention_forward"}
    return does_only(forward, _NAMES | more, kind, calls) and _asks_for_attention(kind)


def _join_projections(module: Any, kernels: Kernels) -> None:
    """From the first few tokens on, where it is found to be possible."""
    original, as_tried = type(module), type(module).forward
    if not is_usual_attention(original):
        return
    names = undecorated(as_tried).__globals__  # type: ignore[union-attr]
    rotate = names.get("apply_rotary_pos_emb")
    linears = [getattr(module, name, None) for name in _LINEARS]
    norms = [norm for name in _NORMS if (norm := getattr(module, name, None)) is not None]
    if not all(_is_native_linear(part, kernels) for part in linears) or not all(
        hasattr(norm, "_expertly_norm") for norm in norms
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
        elif "past_key_values" in kwargs:  # the paged cache of transformers 5.17, beside the usual one
            return original.forward(self, hidden_states, position_embeddings, attention_mask, cache=cache, **kwargs)
        joined: Joined | None = self._expertly_joined
        few = (
            original.forward is as_tried
            and names.get("apply_rotary_pos_emb") is rotate
            and isinstance(position_embeddings, tuple)
            and hidden_states.dim() == 3
            and not (self.training or torch.is_grad_enabled())
            and are_plain(hidden_states, *position_embeddings)
            and _takes(self.q_proj, hidden_states)
            and 1 <= hidden_states.shape[:2].numel() <= kernels.most_tokens(hidden_states.dtype)
        )
        if few and joined is None and not self._expertly_is_tried:
            self._expertly_is_tried = True
            joined = self._expertly_joined = _try(self, original, hidden_states, position_embeddings, kernels, kwargs)
        if not few or joined is None or not joined.parts.holds():
            return original.forward(self, hidden_states, position_embeddings, attention_mask, cache, **kwargs)
        (cos, sin), made = position_embeddings, joined.projections
        heads = made.num_rows[1] // made.head_width, made.head_width
        room = None if cache is None else places(cache, self.layer_idx, hidden_states, *heads)
        how = {} if room is None else {"factors": factors_of(cache, self.layer_idx)}
        query, key, value = kernels.projections(hidden_states, made, cos, sin, room, **how)
        if cache is not None and room is None:
            key, value, how = keep(cache, self.layer_idx, key, value, kwargs, kernels)
        more = {"then": joined.then, "are_ours": bool(how), **how, **joined.more, **kwargs}
        out, weights = _attention(self, query, key, value, attention_mask, **more)
        if out.dim() == 4:
            out = self.o_proj(out.reshape(*hidden_states.shape[:-1], -1))
        return out, weights

    stand_in(module, forward=forward)
    module._expertly_joined, module._expertly_is_tried = None, False


def _is_native_linear(part: Any, kernels: Kernels) -> bool:
    if isinstance(part, TiledLayer):
        return isinstance(part, nn.Linear) and part._expertly_kernels is kernels
    return type(part) is not nn.Linear and original_of(type(part)) is nn.Linear


def _takes(linear: Any, x: torch.Tensor) -> bool:
    """Whether the kernels may multiply a layer's weights with `x`."""
    if isinstance(linear, TiledLayer):
        return linear.tiles.is_cpu and x.dtype == linear._expertly_dtype
    return are_plain(x, linear.weight)


def _try(
    module: Any, original: type, hidden: torch.Tensor, angles: Any, kernels: Kernels, kwargs: dict[str, Any]
) -> Joined | None:
    """What its own forward does with these tokens, where one call does the same."""
    linears, last = [getattr(module, name) for name in _LINEARS], module.o_proj
    norms = [getattr(module, name, None) for name in _NORMS]
    is_last_joined = not isinstance(last, TiledLayer) and type(last) is type(linears[0])
    parts = [*linears, *(norm for norm in norms if norm is not None), *([last] if is_last_joined else [])]
    tensors = [tensor for part in parts for tensor in part.parameters(recurse=False)]
    if any(tensor.dtype != hidden.dtype or not tensor.is_contiguous() for tensor in tensors):
        return None
    calls: list[Any] = []

    def asked(*call: Any) -> torch.Tensor:
        calls.append(call)
        return call[0].transpose(1, 2)  # type: ignore[no-any-return]

    module._expertly_asked = asked  # by `_attention`
    try:
        original.forward(module, hidden, angles, None, None, **kwargs)  # type: ignore[attr-defined]
    finally:
        del module._expertly_asked
    if len(calls) != 1:
        return None
    query, key, value, arguments = calls[0]
    more = {name: argument for name, argument in arguments.items() if name not in kwargs}
    parameters = set(map(id, module.parameters(recurse=False)))
    if not all(id(argument) in parameters for argument in more.values() if isinstance(argument, torch.Tensor)):
        return None
    are_tiled = [isinstance(part, TiledLayer) for part in linears]
    weights = [part.tiles if is_tiled else part.weight for part, is_tiled in zip(linears, are_tiled, strict=True)]
    formats = [part._expertly_format.kernel if tiled else None for part, tiled in zip(linears, are_tiled, strict=True)]
    sizes, biases = (hidden.shape[2], [part.out_features for part in linears]), [part.bias for part in linears]
    of_norms = [None if norm is None else (norm.weight, *norm._expertly_norm) for norm in norms]
    num_angles = angles[0].shape[-1]
    for width in (num_angles, 2 * num_angles):  # of numbers that are rotated
        if width % 2 or width > module.head_dim:
            continue
        projections = Projections(*sizes, weights, formats, biases, of_norms, module.head_dim, width)
        if all(map(torch.equal, kernels.projections(hidden, projections, *angles), (query, key, value))):
            then = (last.weight, last.bias) if is_last_joined else None
            return Joined(AsTried(module), projections, then, more)
    return None
