"""Which device holds which expert: experts are dealt out in the order of a hash of their ids (MoE-Infinity, appendix
B.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction, RouterRan

_MASK = (1 << 64) - 1


class Share:
    """The experts of one device, numbered anew in each layer by rising id. `geometry` has all layers with only these
    experts, and a top-k of at most their number.
    """

    def __init__(self, geometry: Geometry, experts: list[list[int]]) -> None:
        layers = [
            replace(layer, num_experts=len(held), top_k=min(layer.top_k, len(held)))
            for layer, held in zip(geometry.layers, experts, strict=True)
        ]
        self.geometry = Geometry(tuple(layers), geometry.segments_per_expert)
        self.experts = experts  # of each layer: number on the device -> number in the model
        self._ids = [geometry.expert_id(layer, expert) for layer, held in enumerate(experts) for expert in held]
        self._numbers = [{expert: number for number, expert in enumerate(held)} for held in experts]  # the inverse

    def router(self, router: RouterRan) -> RouterRan:
        """The router's choice among these experts, in router order. The pass still counts all its tokens."""
        numbers = self._numbers[router.layer]
        here = [i for i, expert in enumerate(router.experts) if expert in numbers]
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
        numbers = self._numbers[layer]
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
        )


class Placement:
    """A bijection between (layer, expert) and (device, layer, number on the device), the same on every machine.

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
        self.shares = [Share(geometry, [sorted(experts) for experts in layers]) for layers in held]


def weights_by_memory(nbytes: int, memories: Sequence[int]) -> list[int]:
    """The bytes of `nbytes` of experts that each device is to get. Devices that can hold an equal share get one, since
    then they compute equally long; others get what they can hold. Where memory does not hold everything, each gets
    experts in proportion to it.
    """
    if sum(memories) <= nbytes:
        return list(memories)
    weights, left = [0] * len(memories), nbytes
    by_size = sorted(range(len(memories)), key=memories.__getitem__)
    for num_done, device in enumerate(by_size):
        weights[device] = min(memories[device], left // (len(memories) - num_done))
        left -= weights[device]
    return weights


def _hash(number: int) -> int:
    """The output function of splitmix64: a bijection of 64 bits, so that no two ids have the same."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _MASK
    return number ^ number >> 31
