"""Which device holds which expert: experts are dealt out in the order of a hash of their ids (MoE-Infinity, appendix
B.2), or by recorded routing, and then memory that is left holds copies.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction, RouterRan

_MASK = (1 << 64) - 1


class Share:
    """The experts of one device, numbered anew in each layer by rising id. `geometry` has all layers with only these
    experts, and a top-k of at most their number.
    """

    def __init__(self, geometry: Geometry, experts: list[list[int]], copies: Sequence[Collection[int]] = ()) -> None:
        """`copies`: of each layer, those that an earlier device holds, too."""
        layers = [
            replace(layer, num_experts=len(held), top_k=min(layer.top_k, len(held)))
            for layer, held in zip(geometry.layers, experts, strict=True)
        ]
        self.geometry = Geometry(tuple(layers), geometry.segments_per_expert)
        self.experts = experts  # of each layer: number on the device -> number in the model
        self._copies = copies or [()] * len(experts)
        self._ids = [geometry.expert_id(layer, expert) for layer, held in enumerate(experts) for expert in held]
        self._numbers = [{expert: number for number, expert in enumerate(held)} for held in experts]  # the inverse

    def router(self, router: RouterRan, here: Sequence[int]) -> RouterRan:
        """The part of a router's choice that is at these rising places. The pass still counts all its tokens."""
        numbers = self._numbers[router.layer]
        return RouterRan(
            router.layer,
            [numbers[router.experts[i]] for i in here],
            [router.num_tokens[i] for i in here],
            [router.is_decode[i] for i in here],
            router.batch_tokens,
            router.serves_decode,
        )

    def prediction(self, prediction: Prediction) -> Prediction:
        """The part of a prediction that concerns these experts, in its order. Confidence stays with the whole
        prediction.
        """
        layer, probabilities, outlook = prediction.layer, prediction.probabilities, prediction.outlook
        numbers, copies = self._numbers[layer], self._copies[layer]
        here = [
            (number, s)
            for e, s in zip(prediction.experts, prediction.scores, strict=True)
            if (number := numbers.get(e)) is not None
        ]
        return Prediction(
            layer,
            [number for number, _ in here],
            [score for _, score in here],
            prediction.distance,
            None,
            None if probabilities is None else [probabilities[expert] for expert in self.experts[layer]],
            None if outlook is None else tuple([outlook[eid] for eid in self._ids]),
            [numbers[expert] for expert in prediction.experts if expert in copies] if copies else (),
        )


class RouterSplit:
    """Gives each device its part of a router's choice. Of the devices that hold an expert, one computes it: that with
    the fewest so far, an `avoided` one only where no other has it.
    """

    def __init__(self, shares: Sequence[Share]) -> None:
        self._shares = shares
        self._holders: list[dict[int, list[int]]] = [{} for _ in shares[0].experts]  # of each layer: expert -> devices
        for device, share in enumerate(shares):
            for holders, experts in zip(self._holders, share.experts, strict=True):
                for expert in experts:
                    holders.setdefault(expert, []).append(device)

    def __call__(self, router: RouterRan, avoided: Collection[int] = frozenset()) -> list[RouterRan]:
        places: list[list[int]] = [[] for _ in self._shares]
        copied: list[tuple[int, list[int]]] = []
        holders_of = self._holders[router.layer]
        for i, expert in enumerate(router.experts):
            holders = holders_of[expert]
            if len(holders) == 1:
                places[holders[0]].append(i)
            else:
                copied.append((i, [device for device in holders if device not in avoided] or holders))
        for i, holders in copied:
            places[min(holders, key=lambda device: len(places[device]))].append(i)
        return [share.router(router, sorted(here)) for share, here in zip(self._shares, places, strict=True)]


Together = Sequence[npt.NDArray[np.int64]]
"""Of each layer, [E, E]: how many tokens chose both experts; on the diagonal, how many chose the expert."""


class Placement:
    """Which (layer, expert) is which (device, layer, number on the device), the same on every machine.

    The experts of a layer are dealt out in the order of a hash of their dense ids, so neighbours in a layer are not
    together more often than others. A device gets experts in proportion to its weight, at least one in each layer; with
    equal weights two devices differ by at most one expert, in a layer and in all. Raises ConfigError where a layer has
    fewer experts than there are devices.
    """

    def __init__(self, geometry: Geometry, devices: int | Sequence[int]) -> None:
        """`devices`: how many, or the weight of each, 0 or more."""
        weights = [1] * devices if isinstance(devices, int) else list(devices)
        num_devices, fewest = len(weights), min(layer.num_experts for layer in geometry.layers)
        if not 1 <= num_devices <= fewest:
            raise ConfigError(
                f"devices: {num_devices} of them, but a layer has only {fewest} experts; accepted: 1 to {fewest}"
            )
        self.geometry = geometry
        total = sum(weights)
        held: list[list[list[int]]] = [[[] for _ in geometry.layers] for _ in weights]  # [device][layer]
        owed = [0] * num_devices  # experts that a device lacks, times `total`
        for layer, shape in enumerate(geometry.layers):
            first = geometry.first_expert_id(layer)
            for num_dealt, eid in enumerate(sorted(range(first, first + shape.num_experts), key=_hash)):
                owed = [one + weight for one, weight in zip(owed, weights, strict=True)]
                without = [device for device in range(num_devices) if not held[device][layer]]
                is_last_chance = len(without) == shape.num_experts - num_dealt
                device = max(without if is_last_chance else range(num_devices), key=owed.__getitem__)
                owed[device] -= total
                held[device][layer].append(eid - first)
        self._share_out(held)

    @classmethod
    def by_memory(cls, geometry: Geometry, memories: Sequence[int], together: Together | None = None) -> Placement:
        """For devices with so many bytes for experts. `together`: recorded routing, by which a token's experts are on
        different devices as often as can be; then memory that is left holds copies of the experts that are used most.
        """
        expert_nbytes = max(layer.expert_nbytes for layer in geometry.layers)
        room = [nbytes // expert_nbytes for nbytes in memories]
        holds_all = sum(room) >= geometry.num_experts
        placement = cls(geometry, _equal_or_all(geometry.num_experts, room) if holds_all else memories)
        if together is None:
            return placement
        held = [[list(experts) for experts in share.experts] for share in placement.shares]
        spare = [max(0, num - share.geometry.num_experts) for num, share in zip(room, placement.shares, strict=True)]
        for layer, counts in enumerate(together):
            of_layer = _apart([one[layer] for one in held], counts)
            num_layers = geometry.num_layers
            more = [(layer + 1) * num // num_layers - layer * num // num_layers for num in spare]
            _copy(of_layer, more if holds_all else [0] * len(more), counts.diagonal())
            for one, experts in zip(held, of_layer, strict=True):
                one[layer] = experts
        placement._share_out(held)
        return placement

    def _share_out(self, held: list[list[list[int]]]) -> None:
        self.shares: list[Share] = []
        dealt = [set[int]() for _ in self.geometry.layers]
        for layers in held:
            copies = [one.intersection(experts) for one, experts in zip(dealt, layers, strict=True)]
            self.shares.append(Share(self.geometry, [sorted(experts) for experts in layers], copies))
            for one, experts in zip(dealt, layers, strict=True):
                one.update(experts)


def _equal_or_all(num_experts: int, room: Sequence[int]) -> list[int]:
    """The experts of each device, which together have room for all. Devices that can hold an equal share get one, since
    then they compute equally long; others get what they can hold.
    """
    nums, left = [0] * len(room), num_experts
    for num_done, device in enumerate(sorted(range(len(room)), key=room.__getitem__)):
        nums[device] = min(room[device], left // (len(room) - num_done))
        left -= nums[device]
    return nums


def _apart(held: Sequence[Sequence[int]], together: npt.NDArray[np.int64]) -> list[list[int]]:
    """The devices' experts of a layer, swapped in pairs while that lowers how many pairs of experts that tokens chose
    are on one device. Each device keeps its number of experts.
    """
    num_experts, num_devices = len(together), len(held)
    device_of = np.empty(num_experts, np.int64)
    for device, experts in enumerate(held):
        device_of[list(experts)] = device
    every, pairs = np.arange(num_experts), together - np.diag(together.diagonal())
    beside = np.stack([pairs[:, device_of == device].sum(axis=1) for device in range(num_devices)], axis=1)
    has_swapped = True
    while has_swapped:
        has_swapped = False
        for one in range(num_experts):
            mine = device_of[one]
            gained = beside[one, mine] + beside[every, device_of] - beside[one, device_of] - beside[:, mine]
            gained += 2 * pairs[one]
            gained[device_of == mine] = 0
            other = int(gained.argmax())
            if gained[other] > 0:
                theirs = device_of[other]
                moved = pairs[:, other] - pairs[:, one]
                beside[:, mine] += moved
                beside[:, theirs] -= moved
                device_of[one], device_of[other] = theirs, mine
                has_swapped = True
    return [np.flatnonzero(device_of == device).tolist() for device in range(num_devices)]


def _copy(held: Sequence[list[int]], spare: list[int], counts: npt.NDArray[Any]) -> None:
    """Add copies of experts to the devices of a layer, so many to each: always of the expert whose copies are used
    most, to the device with the most room.
    """
    queue = [(-float(count), expert, 1) for expert, count in enumerate(counts)]
    heapq.heapify(queue)
    while queue and any(spare):
        _, expert, copies = heapq.heappop(queue)
        lacking = [device for device, num in enumerate(spare) if num and expert not in held[device]]
        if lacking:
            device = max(lacking, key=spare.__getitem__)
            held[device].append(expert)
            spare[device] -= 1
            heapq.heappush(queue, (-float(counts[expert]) / (copies + 1), expert, copies + 1))


def _hash(number: int) -> int:
    """The output function of splitmix64: a bijection of 64 bits, so that no two ids have the same."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _MASK
    return number ^ number >> 31
