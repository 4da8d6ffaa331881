"""Which device or worker holds which expert: they are dealt out in the order of a hash of their ids (MoE-Infinity,
appendix B.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import RouterRan


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
        self._numbers = [{expert: number for number, expert in enumerate(held)} for held in experts]  # the inverse

    def router(self, router: RouterRan) -> RouterRan:
        """The part of a router's choice that is held here, in its order. The pass still counts all its tokens."""
        numbers = self._numbers[router.layer]
        places = [i for i, expert in enumerate(router.experts) if expert in numbers]
        return RouterRan(
            router.layer,
            [numbers[router.experts[i]] for i in places],
            [router.num_tokens[i] for i in places],
            [router.is_decode[i] for i in places],
            router.batch_tokens,
            router.serves_decode,
        )


class Placement:
    """The experts of each device, the same on every machine. The first device is this machine's, the others are the
    workers'.

    The experts of a layer are dealt out in the order of a hash of their dense ids, so neighbours in a layer are not
    together more often than others. A device gets experts in proportion to its weight, at least one in each layer; with
    equal weights two devices differ by at most one expert, in a layer and in all.
    """

    def __init__(self, geometry: Geometry, weights: Sequence[int]) -> None:
        """`weights`: of each device, 0 or more. Raises ConfigError where a layer has fewer experts than devices."""
        fewest, total, devices = min(layer.num_experts for layer in geometry.layers), sum(weights), range(len(weights))
        if len(weights) > fewest:
            raise ConfigError(
                f"workers: {len(weights) - 1}, but a layer has {fewest} experts; accepted: at most {fewest - 1}"
            )
        self.geometry = geometry
        held: list[list[list[int]]] = [[[] for _ in geometry.layers] for _ in weights]  # [device][layer]
        owed = [0 for _ in weights]  # experts that a device lacks, times `total`
        for layer, shape in enumerate(geometry.layers):
            first = geometry.first_ids[layer]
            for num_dealt, eid in enumerate(sorted(range(first, first + shape.num_experts), key=_hash)):
                owed = [lack + weight for lack, weight in zip(owed, weights, strict=True)]
                without = [device for device in devices if not held[device][layer]]
                is_last_chance = len(without) == shape.num_experts - num_dealt
                device = max(without if is_last_chance else devices, key=owed.__getitem__)
                owed[device] -= total
                held[device][layer].append(eid - first)
        self.shares = [Share(geometry, [sorted(experts) for experts in layers]) for layers in held]

    @classmethod
    def by_memory(cls, geometry: Geometry, memories: Sequence[int]) -> Placement:
        """For devices with so many bytes for experts. Those that together have room for all get an equal share, since
        they compute equally long then, or what they can hold.
        """
        expert_nbytes = max(layer.expert_nbytes for layer in geometry.layers)
        room = [nbytes // expert_nbytes for nbytes in memories]
        if sum(room) < geometry.num_experts:
            return cls(geometry, memories)
        nums, left = [0 for _ in room], geometry.num_experts
        for num_done, device in enumerate(sorted(range(len(room)), key=room.__getitem__)):
            nums[device] = min(room[device], left // (len(room) - num_done))
            left -= nums[device]
        return cls(geometry, nums)


def _hash(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little")).digest()
