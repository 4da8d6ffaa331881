"""Experts over devices: every one on one device, counts even, and what is cut for a device is what is there."""

from __future__ import annotations

import random

import pytest

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import RouterRan
from expertly.core.placement import Placement


def shape(*experts: int, top_k: int = 3, segments: int = 2) -> Geometry:
    return Geometry(tuple(LayerGeometry(num, min(top_k, num), 8, 4, 3, 2) for num in experts), segments)


@pytest.mark.parametrize(
    ("experts", "weights"),
    [
        *(((8,) * 5, [1] * num) for num in (1, 3, 8)),
        *(((9, 16, 8, 11), [2] * num) for num in (2, 5)),
        *(((32,) * 20, weights) for weights in ([3, 1], [1, 0, 5], [7, 2, 2, 1], [100, 1, 1])),
    ],
)
def test_every_expert_is_on_one_device_and_each_has_some_of_a_layer(
    experts: tuple[int, ...], weights: list[int]
) -> None:
    geometry = shape(*experts)
    shares, of_layers = Placement(geometry, weights).shares, range(len(experts))
    every = sorted((layer, expert) for share in shares for layer in of_layers for expert in share.experts[layer])
    assert every == [(layer, e) for layer, num in enumerate(experts) for e in range(num)], "a bijection"
    assert all(held and held == sorted(held) for share in shares for held in share.experts)
    assert sum(share.geometry.nbytes for share in shares) == geometry.nbytes
    for share in shares:
        for held, layer, whole in zip(share.experts, share.geometry.layers, geometry.layers, strict=True):
            assert (layer.num_experts, layer.top_k) == (len(held), min(3, len(held)))
            assert layer.expert_nbytes == whole.expert_nbytes
    totals = [share.geometry.num_experts for share in shares]
    if len(set(weights)) == 1:
        of_devices = [[len(share.experts[layer]) for share in shares] for layer in of_layers]
        assert all(max(counts) - min(counts) <= 1 for counts in (totals, *of_devices))
        return
    for share, total, weight in zip(shares, totals, weights, strict=True):
        assert abs(total - max(20, 640 * weight / sum(weights))) <= 0.05 * 640, "by weight"
        spread = [len(held) for held in share.experts]
        assert max(spread) - min(spread) <= 2, "as many in each layer"


def test_it_is_the_same_everywhere_and_no_stripes() -> None:
    """A hash: neighbours are not always apart, as they are where ids are dealt out in order."""
    shares = Placement(shape(*[64] * 8), [1] * 2).shares
    assert shares[0].experts[0][:8] == [3, 4, 5, 9, 11, 12, 14, 17], "on this machine as on any"
    together = sum((expert in held) == (expert + 1 in held) for held in shares[0].experts for expert in range(63))
    assert 0.35 < together / (8 * 63) < 0.65
    with pytest.raises(ConfigError, match="workers: 8, but a layer has 8 experts; accepted: at most 7"):
        Placement(shape(16, 8), [1] * 9)


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_a_demand_is_cut_in_router_order_and_nothing_is_lost(num_devices: int) -> None:
    dice = random.Random(num_devices)
    shares = Placement(shape(12, 12), [1] * num_devices).shares
    for _ in range(50):
        experts = dice.sample(range(12), dice.randint(0, 12))
        tokens = [dice.randint(0, 5) for _ in experts]
        decode = [dice.random() < 0.3 for _ in experts]
        whole, back = RouterRan(1, experts, tokens, decode, 17), []
        for share in shares:
            part = share.router(whole)
            assert (part.layer, part.batch_tokens) == (1, 17)
            assert part.serves_decode == whole.serves_decode, "also where no expert here is decode's"
            held = [share.experts[1][number] for number in part.experts]
            assert held == [expert for expert in experts if expert in held], "router order"
            back += list(zip(held, part.num_tokens, part.is_decode, strict=True))
        assert sorted(back) == sorted(zip(experts, tokens, decode, strict=True))


@pytest.mark.parametrize(
    ("num_experts", "memories", "expected"),
    [
        (90, [100, 100, 100], [30, 30, 30]),  # all can hold an equal share
        (90, [10, 100, 100], [10, 40, 40]),
        (90, [20, 100, 25], [20, 45, 25]),
        (90, [10, 20, 30], [15, 30, 45]),  # not everything can be held: in proportion
        (90, [0, 500], [1, 89]),  # one at least
        (24, [3.9, 13, 8.9], [3, 13, 8]),  # rounding gives nobody more than it can hold
    ],
)
def test_devices_get_experts_by_memory(num_experts: int, memories: list[float], expected: list[int]) -> None:
    geometry = shape(num_experts)
    nbytes = [int(num * geometry.layers[0].expert_nbytes) for num in memories]
    assert [share.geometry.num_experts for share in Placement.by_memory(geometry, nbytes).shares] == expected
