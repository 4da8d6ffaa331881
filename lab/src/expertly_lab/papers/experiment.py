"""An experiment of a paper, as data: systems, a sweep, what is measured, and what the paper claims of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from expertly_lab.papers.judge import Cells, Claim

if TYPE_CHECKING:
    from expertly.policies.learned import LearnedState
    from expertly_lab.papers.runs import Lab

Spec = str | Callable[["Lab"], str]
"""A system as users name it ("fmoe:distance=3"), in which {at} is the point of the sweep; or what makes one of a trace,
where it depends on the model's shape.
"""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What changes from point to point: "memory", "machine", "links" (times as fast), or, with any other name, what
    stands for {at} in the systems' names.
    """

    name: str
    points: Sequence[str | int | float]


@dataclass(frozen=True, slots=True)
class Experiment:
    """One figure or table of a paper. Where `measure` is given, it makes the cells, in place of the simulator."""

    figure: str  # "4", "table-3", "B.1"
    title: str
    shows: str  # what the paper shows, with its numbers as printed
    claims: Sequence[Claim]
    systems: Mapping[str, Spec] = field(default_factory=dict)  # by label
    sweep: Sweep | None = None
    machine: str = "rtx3090"
    memory: str = "25%"
    links: float = 1.0  # the machine's link, so many times as fast
    num_devices: int = 1  # machines' cards, over which experts are spread, each on such a link
    is_online: bool = False  # requests arrive as recorded (--arrivals), and queue
    needs: Sequence[str] = ()  # fields that the trace must really have; "prompts", "weights"
    measure: Callable[[Lab], Cells] | None = None
    weights: Sequence[type[LearnedState]] = ()  # of its own trained predictors, whose files --predictor gives
    note: str = ""
    paper: str = ""  # its name, which the paper gives it

    @property
    def name(self) -> str:
        return f"{self.paper}:{self.figure}"


@dataclass(frozen=True)
class Paper:
    """A paper's experiments, in its order. `name` is what users call it."""

    name: str
    title: str
    experiments: Sequence[Experiment]

    def __post_init__(self) -> None:
        named = tuple(replace(experiment, paper=self.name) for experiment in self.experiments)
        object.__setattr__(self, "experiments", named)

    def called(self, name: str) -> Paper:
        """The same under another name."""
        return Paper(name, self.title, self.experiments)
