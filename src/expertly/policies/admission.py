"""Which of the experts that a layer needs enter the cache. `ADMISSIONS` has the policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from expertly.policies.base import NO_OPTIONS, Policy, PolicyOptions
from expertly.policies.registry import PolicyRegistry

Worth = Callable[[Sequence[float], Sequence[int], Mapping[int, int]], Sequence[float]]
"""`Admission.worth`."""


class Admission(Policy):
    """Made with its options. Where it weighs scores, `worth` is what each needed expert is compared by."""

    family = "admission"
    weighs_scores: ClassVar[bool] = False
    """Whether needed and kept experts are compared by eviction scores, and the best are kept. Otherwise every needed
    expert is kept, and the eviction policy makes room for it.
    """

    def __init__(self, options: Any = PolicyOptions()) -> None: ...

    @classmethod
    def make(cls, given: Mapping[str, str] = NO_OPTIONS) -> Admission:
        """One with these options, as the user wrote them. Raises ConfigError."""
        return cls(cls.parse(given))

    @property
    def has_worth(self) -> bool:
        """Whether `worth` differs from the scores."""
        return type(self).worth is not Admission.worth

    def worth(self, scores: Sequence[float], experts: Sequence[int], kept: Mapping[int, int]) -> Sequence[float]:
        """The value of keeping each needed expert, given its eviction score. `kept`: the experts that the cache holds
        already. Kept experts that the layer does not need are worth their scores.
        """
        return scores


class AdmitAlways(Admission):
    """Every needed expert is kept; the eviction policy makes room for it."""

    name = "always"


class AdmitBest(Admission):
    """The experts of highest score are kept, of those kept and those needed; the others use staging slots."""

    name = "best"
    weighs_scores = True


ADMISSIONS: PolicyRegistry[Admission] = PolicyRegistry(Admission, "expertly.admissions", (AdmitAlways, AdmitBest))
