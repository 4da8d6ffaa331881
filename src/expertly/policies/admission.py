"""What of that which a layer needs may enter the cache. `ADMISSIONS` has the ways by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from expertly.policies.base import NO_OPTIONS, Policy, PolicyOptions
from expertly.policies.registry import PolicyRegistry


class Admission(Policy):
    """A way to admit. Made with its options; the scheduler does the rest."""

    family = "admission"
    weighs_scores: ClassVar[bool]
    """Whether what is needed enters only where its eviction score is above that of something kept."""

    def __init__(self, options: Any = PolicyOptions()) -> None:
        self._options = options

    @classmethod
    def make(cls, given: Mapping[str, str] = NO_OPTIONS) -> Admission:
        """One with these options, as the user wrote them. Raises ConfigError."""
        return cls(cls.parse(given))


class AdmitAlways(Admission):
    """Everything that a layer needs is kept; the eviction policy makes room for it."""

    name = "always"
    weighs_scores = False


class AdmitBest(Admission):
    """Of what is kept and what a layer needs, what is worth most is kept; the rest uses staging slots."""

    name = "best"
    weighs_scores = True


ADMISSIONS: PolicyRegistry[Admission] = PolicyRegistry(Admission, "expertly.admissions", (AdmitAlways, AdmitBest))
