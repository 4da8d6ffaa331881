"""The contract of an allocation, which says how many slots each layer keeps; equal quotas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from expertly.core.errors import BudgetError
from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction, RouterRan
from expertly.policies.base import NO_OPTIONS, Policy, PolicyOptions
from expertly.policies.known import NOTHING, Known


class Allocation(Policy, ABC):
    """Divides the slots of one model among its layers. Quotas are in segments, from 0 to all segments of a layer's
    experts; in each size class together at most what is kept. What no layer keeps is staging slots. None reads a clock;
    ties are as docs/conventions.md says.
    """

    family = "allocation"
    keeps: ClassVar[bool] = True  # whether layers keep anything
    needs_layers: ClassVar[bool] = False  # whether it works with one cache a layer only
    splits: ClassVar[bool] = False  # whether it may keep parts of experts
    is_configured: ClassVar[bool] = False  # whether it goes by the times of a decode step: then `is_due` at times
    is_online = False  # whether `ran` and `predicted` are called

    def __init__(self, geometry: Geometry, options: Any = PolicyOptions(), known: Known = NOTHING) -> None:
        self.geometry = geometry

    @classmethod
    def make(cls, geometry: Geometry, known: Known = NOTHING, texts: Mapping[str, str] = NO_OPTIONS) -> Allocation:
        """One with these options, as the user wrote them. Raises ConfigError."""
        return cls(geometry, cls.parse(texts), known)

    @abstractmethod
    def quotas(self, kept_slots: Sequence[int]) -> list[int]:
        """The quota of each layer before anything has run, given the kept slots of each size class."""
        ...

    def begin(self, quotas: Sequence[int]) -> None:
        """The caches have these quotas now. Called once, before `ran`."""

    def tops(self, quotas: Sequence[int]) -> list[int] | None:
        """For each layer with these quotas, how many segments of an expert it keeps, from its top, 1 to P; None: whole
        experts. The rest of a quota that holds no whole top is staging slots.
        """
        return None

    def predicted(self, prediction: Prediction) -> None:
        """A layer whose router has not run was predicted."""

    @property
    def is_due(self) -> bool:
        """Whether it waits for `configure`."""
        return False

    def configure(self, timing: Any) -> None:
        """Between passes: what layers keep is to be worked out with these times (a moepic.Timing), while layers
        run.
        """
        raise NotImplementedError

    def ran(self, router: RouterRan, recall: Callable[[int], float]) -> list[int] | None:
        """A layer has run. Returns quotas to take from now on, with their `tops`, or None. Without tops they have the
        same sum in each size class.

        `recall(layer)`: the share of what the layer's decode needed so far that predictions named in time.
        """
        return None

    def best_of(self, layer: int) -> Sequence[int]:
        """After new quotas: experts that the layer should keep, the best first; loaded behind everything else as far as
        the layer has room. Others come when they are needed.
        """
        return ()

    def facts(self) -> dict[str, object]:
        """Facts for results: plain data by names that its documentation explains."""
        return {}


class Uniform(Allocation):
    """Equal quotas of whole experts, the remainder to the lowest layers."""

    name = "uniform"

    def quotas(self, kept_slots: Sequence[int]) -> list[int]:
        return uniform_quotas(self.geometry, kept_slots)


def equal_quotas(geometry: Geometry, totals: Sequence[int], segments_per_expert: int | None = None) -> list[int]:
    """For each layer an equal quota of the segments of its size class, the remainder to the lowest layers, and none
    more than its experts fill. `segments_per_expert`: 1 counts whole experts; None: as the model is cut.

    Raises BudgetError where `totals` is not a number at least 0 for each class.
    """
    if len(totals) != geometry.num_size_classes or min(totals) < 0:
        accepted = f"a number at least 0 for each of {geometry.num_size_classes} size classes"
        raise BudgetError(f"kept_segments={list(totals)}: must be {accepted}")
    per_expert = segments_per_expert or geometry.segments_per_expert
    quotas = [0] * geometry.num_layers
    for size_class, total in enumerate(totals):
        most = {
            layer: geometry.layers[layer].num_experts * per_expert for layer in geometry.layers_of_class(size_class)
        }
        left = min(total, sum(most.values()))
        waiting = sorted(most, key=most.__getitem__)  # those that an equal quota more than fills come first
        while waiting and most[waiting[0]] * len(waiting) <= left:
            layer = waiting.pop(0)
            quotas[layer] = most[layer]
            left -= most[layer]
        for number, layer in enumerate(sorted(waiting)):
            quotas[layer] = left // len(waiting) + (number < left % len(waiting))
    return quotas


def uniform_quotas(geometry: Geometry, kept_slots: Sequence[int], top: int | None = None) -> list[int]:
    """Equal quotas of whole experts, or of tops of `top` segments; then the remainder.

    A layer whose quota ends within an expert leaves a hole in a block of slots. One such layer a class is harmless; one
    in every layer left no whole block (3.5 spans an expert instead of 1, at P = 4).
    """
    top = top or geometry.segments_per_expert
    experts = equal_quotas(geometry, [slots // top for slots in kept_slots], 1)
    return with_rests(geometry, kept_slots, [num * top for num in experts])


def with_rests(geometry: Geometry, kept_slots: Sequence[int], quotas: list[int]) -> list[int]:
    """Quotas to which what remains in a size class is added, in its lowest layers that are not full."""
    for size_class, slots in enumerate(kept_slots):
        layers = geometry.layers_of_class(size_class)
        rest = slots - sum(quotas[layer] for layer in layers)
        for layer in layers:
            more = min(rest, geometry.layers[layer].num_experts * geometry.segments_per_expert - quotas[layer])
            quotas[layer] += more
            rest -= more
    return quotas


def whole_tops(quota: int, top: int, num_experts: int) -> int:
    """The segments of a layer's quota that hold whole tops, of `top` segments each."""
    return min(quota // top, num_experts) * top
