"""Room behind a cache's keys and values: tokens are written beside the others, what was handed out never again."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from expertly.model.hooks import ROOM_TOKENS, RoomyLayer, give_room, places

Pair = tuple[DynamicLayer, DynamicLayer]
"""Ours and transformers' own."""


def numbers(num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of two sequences."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 2, 3, num_tokens, 8, generator=generator)
    return keys, values


def layers() -> Pair:
    cache = DynamicCache()
    cache.layers = [DynamicLayer()]
    give_room(cache)
    assert type(cache.layers[0]) is RoomyLayer
    return cache.layers[0], DynamicLayer()


def grow(pair: Pair, num_tokens: int, seed: int) -> None:
    """By `update`, or at odd seeds at their places, where there are any."""
    new, cache = numbers(num_tokens, seed), DynamicCache()
    cache.layers = [pair[0]]
    got = places(cache, 0, new[0][:, 0], *new[0].shape[1::2]) if seed % 2 else None
    if got is None:
        got = pair[0].update(*new)
    else:
        for kept, one in zip(got, new, strict=True):
            kept[:, :, -num_tokens:] = one
    expected = pair[1].update(*new)
    assert all(map(torch.equal, got, expected))
    assert torch.equal(pair[0].keys, pair[1].keys) and torch.equal(pair[0].values, pair[1].values)


def test_tokens_are_written_beside_the_others() -> None:
    pair = layers()
    grow(pair, 5, 0)
    addresses = set()
    for seed in range(1, 2 * ROOM_TOKENS):
        grow(pair, 1, seed)
        addresses.add(pair[0].keys.data_ptr())
    assert len(addresses) == 2, "memory is new once in as many tokens as it has room for"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_and_its_original_go_on_by_themselves(copied: type) -> None:
    pair = layers()
    grow(pair, 5, 0)
    other: Pair = (copied(pair[0]), copied(pair[1]))
    for seed in range(1, 4):
        grow(pair, 1, seed)
        grow(other, 2, 10 + seed)
    assert not torch.equal(pair[0].keys[:, :, 5], other[0].keys[:, :, 5])


def test_what_was_handed_out_stays_as_it_was() -> None:
    pair = layers()
    grow(pair, 5, 0)
    grow(pair, 3, 1)
    handed_out = pair[0].keys
    before = handed_out.clone()
    for layer in pair:
        layer.crop(-2)
    grow(pair, 2, 2)
    assert torch.equal(handed_out, before) and not torch.equal(pair[0].keys, before)


CHANGES: dict[str, Callable[[DynamicLayer], Any]] = {
    "reorder": lambda layer: layer.reorder_cache(torch.tensor([1, 1])),
    "select": lambda layer: layer.batch_select_indices(torch.tensor([1, 0])),
    "repeat": lambda layer: layer.batch_repeat_interleave(2) or layer.batch_select_indices(torch.tensor([0, 3])),
    "reset": lambda layer: layer.reset(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_sequences(change: str) -> None:
    pair = layers()
    grow(pair, 5, 0)
    for layer in pair:
        CHANGES[change](layer)
    for seed in range(1, 4):
        grow(pair, 2, seed)


def test_other_numbers_than_before() -> None:
    pair = layers()
    grow(pair, 5, 0)
    grow(pair, 1, 1)
    keys, values = numbers(1, 2)
    for got, expected in zip(*(layer.update(keys.double(), values.double()) for layer in pair), strict=True):
        assert got.dtype == expected.dtype == torch.float64 and torch.equal(got, expected)
    with pytest.raises(RuntimeError, match="Sizes of tensors"):
        pair[0].update(keys[:1].double(), values[:1].double())


def test_gradients_go_through() -> None:
    (layer, _), (keys, values) = layers(), numbers(2, 0)
    layer.update(*numbers(3, 1))
    found, _ = layer.update(keys.requires_grad_(), values)
    found.sum().backward()
    assert keys.grad is not None and torch.equal(keys.grad, torch.ones_like(keys))


def test_only_plain_layers_that_grow() -> None:
    cache = DynamicCache()
    cache.layers = [DynamicLayer(), DynamicSlidingWindowLayer(4)]
    give_room(cache)
    assert [type(layer) for layer in cache.layers] == [RoomyLayer, DynamicSlidingWindowLayer]
    for nothing in (None, ((torch.zeros(1), torch.zeros(1)),)):
        give_room(nothing)
