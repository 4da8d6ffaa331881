"""What is compared, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from expertly.core.errors import ConfigError
from expertly.core.resources import parse_memory
from expertly.scheduler.presets import BOUNDS, get_system, runnable_systems

BASELINE = "lru"
"""The system that others are compared with, where it is one of them; else the first is."""

USUAL_SYSTEMS = "lru,lfu,lcp,moepic,adapmoe,expertly,expertly-ahead"
DEFAULT_MEMORY = "10%,25%,50%"


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
    """The settings of one comparison; the defaults are those of the command line."""

    systems: tuple[str, ...]
    memories: tuple[str, ...]  # for experts
    requests: int | None = None  # None: 5 with a model, 20 with a trace
    tokens: int | None = None  # of each answer; None: 24 with a model, all with a trace
    rounds: int = 2
    split: tuple[int, int] | None = None
    seed: int = 0
    segments: int | None = None  # P; None: each system's own
    codec: str = "none"
    temperature: float = 0.8
    dtype: str | None = None
    device: str | None = None
    hardware: str | None = None  # None: this machine as it is measured, or with a trace rtx3090
    predictor: Path | None = None
    plan: Path | None = None
    total_memories: tuple[str, ...] = ()  # for everything; `memories` is what they leave, once a model was loaded
    jobs: int | None = None  # simulations at once; None: as many as there are processors
    is_raw: bool = False  # prompts are texts, whatever chat template the model has

    @property
    def baseline(self) -> str:
        return BASELINE if BASELINE in self.systems else self.systems[0]

    @property
    def timeline_memory(self) -> str:
        """The budget under which one token's timeline is shown."""
        return self.memories[len(self.memories) // 2]

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self) | {"baseline": self.baseline, "timeline_memory": self.timeline_memory}
        values |= {name: None if values[name] is None else str(values[name]) for name in ("predictor", "plan")}
        return values | {"split": None if self.split is None else f"{self.split[0]}:{self.split[1]}"}


def check_systems(names: Sequence[str]) -> tuple[str, ...]:
    """The systems' full names, each once.

    Raises ConfigError for a system that does not exist, or a bound, which knows future demands and cannot run.
    """
    found = []
    for name in names:
        system = get_system(name)
        if "future" in system.needs:
            raise ConfigError(
                f"system={name!r}: needs to know the demands to come; bounds ({', '.join(BOUNDS)}) are always shown "
                f"beside the others, accepted: {', '.join(runnable_systems())}"
            )
        found.append(system.name)
    return tuple(dict.fromkeys(found))


def check_memories(labels: Sequence[str], field: str = "memory") -> tuple[str, ...]:
    """The shares or amounts as they were given, each once. Raises ConfigError."""
    for label in labels:
        if parse_memory(label, 1 << 40, field) is None:
            raise ConfigError(
                f'{field}={label!r}: budgets are compared; accepted: shares ("25%") or amounts ("1.5GiB")'
            )
    return tuple(dict.fromkeys(labels))
