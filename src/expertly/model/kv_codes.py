"""The KV cache in 8 bits: a token's keys or values of a head are a byte a number, and behind them their step.

As SmoothAttention (QServe, arXiv 2405.04532, 4.2): keys, some of whose channels are much larger than others (KIVI,
arXiv 2402.02750), are divided by a factor of their channel, by which queries are multiplied: the largest key of a
short text. Values have none. Each token has steps of its own, where KIVI's keys have those of a group of tokens: so
what is kept does not depend on how a prompt is read in parts, nor on who gave pages back and reads them again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from expertly.core.errors import ConfigError
from expertly.core.geometry import MAX_LAYERS, ModelShape
from expertly.model.hooks import CACHE, RoomyLayer, become, give_room, passes_of
from expertly.native.kernels import STEP_NBYTES
from expertly.policies.learned import Arrays, LearnedState, Sizes, Tensor

NUM_TOKENS = 128
"""Of the text that factors and divergence are of."""

_NUM_COMPARED = 16
"""Its last tokens, whose logits are compared."""

_LEAST_FACTOR = 1 / 64
"""Of the largest of a head: a channel that outgrows its factor costs the others of a token their precision."""

TEXT = """The keys of a language model's attention have a few channels that are much larger than all others, so a
cache that rounds them must know which. How much does rounding change? Ask: "What is the capital of France?" - Paris;
17 * 23 = 391. def area(width: float, height: float) -> float: return width * height  # in square metres
In the beginning there was a small village by the river, where people grew rice and traded in salt. Im Winter lag dort
viel Schnee. {"name": "search", "arguments": {"query": "weather", "days": 3}}
"""


def encoded(numbers: torch.Tensor, factors: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Keys or values [..., D], keys over `factors`, as codes [..., D + STEP_NBYTES]: the bytes of `Kernels.encode`."""
    numbers = numbers.float() / factors
    step = (numbers.abs().amax(-1, keepdim=True) / 127).bfloat16()
    inverse = torch.where(step >= torch.finfo(torch.float32).tiny, 1 / step.float(), 0)
    codes = torch.where(step < torch.inf, numbers * inverse, 1)
    return torch.cat((codes.round().add(128).byte(), step.view(torch.uint8)), -1)


def decoded(rows: torch.Tensor, dtype: torch.dtype, factors: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Keys or values [..., D] from their codes [..., D + STEP_NBYTES]."""
    steps = rows[..., -STEP_NBYTES:].contiguous().view(torch.bfloat16).float()
    return rows[..., :-STEP_NBYTES].float().sub_(128).mul_(steps).mul_(factors).to(dtype)  # in place: they are many


class KeyFactors(LearnedState):
    """Of each decoder layer's keys, by its number, [heads, D], and what rounding costs: the mean KL divergence of the
    next token, in nats.
    """

    kind = "kv8"
    unit = "factors of keys"
    tensors = {  # noqa: RUF012 - of M layers, one behind the other in N numbers
        "layers": Tensor("I32", "M", 0, MAX_LAYERS),
        "heads": Tensor("I32", "M", 1, 1 << 16),
        "widths": Tensor("I32", "M", 1, 1 << 16),
        "factors": Tensor("F32", "N", 1e-30, 1e30),
        "divergence": Tensor("F32", "D", 0, 1e30),
    }

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.of_layers: dict[int, torch.Tensor] = {}
        self.divergence = 0.0

    def sizes(self) -> Sizes:
        return {"D": (1, 1), "N": (1, 1 << 24)}

    def state(self) -> dict[str, Any]:
        shapes = np.array([factors.shape for factors in self.of_layers.values()], np.int32).reshape(-1, 2)
        flat = [factors.cpu().reshape(-1).numpy() for factors in self.of_layers.values()]
        return {
            "layers": np.array(list(self.of_layers), np.int32),
            "heads": shapes[:, 0],
            "widths": shapes[:, 1],
            "factors": np.concatenate(flat),
            "divergence": np.array([self.divergence], np.float32),
        }

    def restore(self, arrays: Arrays) -> None:
        sizes = arrays["heads"].astype(np.int64) * arrays["widths"]
        if sizes.sum() != len(arrays["factors"]):
            raise ConfigError(f"tensor 'factors': {len(arrays['factors'])} numbers; accepted: {sizes.sum()}")
        flat = torch.from_numpy(arrays["factors"].astype(np.float32)).split(sizes.tolist())
        names = zip(arrays["layers"].tolist(), arrays["widths"].tolist(), flat, strict=True)
        self.of_layers = {layer: factors.view(-1, width) for layer, width, factors in names}
        self.divergence = float(arrays["divergence"][0])

    def facts(self) -> dict[str, Any]:
        return {"bits": 8, "divergence": self.divergence}


# -- the cache of `generate` -------------------------------------------------------------------------------------------


def coded(update: Callable[..., Any], factors_for: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """An `update` of keys and values that keeps their codes, and gives all as numbers; of codes, as codes.
    `factors_for`: of what it is called with, keys' factors.
    """

    def update_codes(
        self: Any, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if key_states.dtype == torch.uint8:
            return update(self, key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]
        factors = factors_for(self, *args)
        keys, values = update(self, encoded(key_states, factors), encoded(value_states), *args, **kwargs)
        return decoded(keys, key_states.dtype, factors), decoded(values, value_states.dtype)

    return update_codes


def _of_heads(layer: Any, *args: Any) -> torch.Tensor:
    factors: torch.Tensor = layer._expertly_factors  # [heads, D]
    return factors[:, None]


class CodedLayer(RoomyLayer):
    """A layer of a KV cache that keeps codes, in memory with room for more tokens."""

    update = coded(RoomyLayer.update, _of_heads)


class CodedSlidingLayer(DynamicSlidingWindowLayer):
    """The same of the last tokens alone, without room."""

    update = coded(DynamicSlidingWindowLayer.update, _of_heads)


_KINDS: dict[type, type] = {DynamicLayer: CodedLayer, DynamicSlidingWindowLayer: CodedSlidingLayer}

_WITHOUT_KEYS = "LinearAttentionLayer"
"""A kind of layer whose state does not grow; not in transformers 5.17."""

ACCEPTED = "accepted: no kv"


def _encode_cache(factors: KeyFactors, cache: Any) -> None:
    """Have the layers of a KV cache keep codes; other kinds of layer stay as they are."""
    layers: list[Any] = getattr(cache, "layers", [])
    for number, layer in enumerate(layers):
        kind, of_layer = _KINDS.get(type(layer)), factors.of_layers.get(number)
        if kind is not None and of_layer is not None:
            if layer.is_initialized and layer.keys.numel():
                layer.keys, layer.values = encoded(layer.keys, of_layer[:, None]), encoded(layer.values)
            layer._expertly_factors = of_layer
            become(layer, kind)


def use_kv_codes(model: Any, factors: KeyFactors, tokenizer: Any, most_tokens: int) -> None:
    """Keep the keys and values of a loaded model in 8 bits. What was not measured before is, in `most_tokens`.
    Raises ConfigError where the model's cache has something else than keys and values of each token.
    """
    plain = DynamicCache(config=model.config)
    kinds = {type(layer).__name__ for layer in plain.layers if type(layer) not in _KINDS} - {_WITHOUT_KEYS}
    if kinds:
        named = ", ".join(sorted(kinds))
        raise ConfigError(f"kv='8bit': the cache of {model.config.model_type} has {named}; {ACCEPTED}")
    if not factors.of_layers:
        vocabulary = int(model.get_input_embeddings().num_embeddings)
        tokens = tokenizer(TEXT)["input_ids"] if tokenizer is not None else range(NUM_TOKENS)
        tokens = [token % vocabulary for token in tokens[: min(NUM_TOKENS, most_tokens)]]
        _measure(model, factors, tokens, plain)
    factors.of_layers = {number: of_layer.to(model.device) for number, of_layer in factors.of_layers.items()}
    model._expertly_kv_codes = factors
    passes_of(model).give_room = partial(_encode_cache, factors)


def _measure(model: Any, factors: KeyFactors, tokens: Sequence[int], plain: Any) -> None:
    coded: Any = DynamicCache(config=model.config)
    expected = _logits(model, tokens, plain)
    for number, layer in enumerate(plain.layers):
        if type(layer) in (RoomyLayer, DynamicSlidingWindowLayer) and layer.is_initialized:
            largest = layer.keys.abs().amax((0, 2)).float()
            least = (largest.amax(-1, keepdim=True) * _LEAST_FACTOR).clamp_min(1e-6)
            factors.of_layers[number] = largest.maximum(least)
    passes_of(model).give_room = partial(_encode_cache, factors)
    try:
        made = _logits(model, tokens, coded)
    finally:
        passes_of(model).give_room = give_room
    if not any(type(layer) in _KINDS.values() and layer.is_initialized for layer in coded.layers):
        raise ConfigError(
            f"kv='8bit': {model.config.model_type} keeps nothing in transformers' DynamicCache; {ACCEPTED}"
        )
    p, q = (part.float().log_softmax(-1) for part in (expected, made))
    factors.divergence = max(0.0, float((p.exp() * (p - q)).sum(-1).mean()))


def _logits(model: Any, tokens: Sequence[int], cache: Any) -> torch.Tensor:
    last = {"logits_to_keep": _NUM_COMPARED} if model._supports_logits_to_keep() else {}
    ids = torch.tensor([list(tokens)], device=model.device)
    with torch.no_grad():
        return model(ids, use_cache=True, **{CACHE: cache}, **last).logits[0, -_NUM_COMPARED:]


def digest_of(model: Any) -> str:
    """What makes the pages of a model's cache others; "" where they hold numbers."""
    factors: KeyFactors | None = getattr(model, "_expertly_kv_codes", None)
    if factors is None:
        return ""
    return hashlib.blake2b(factors.state()["factors"].tobytes(), digest_size=16).hexdigest()
