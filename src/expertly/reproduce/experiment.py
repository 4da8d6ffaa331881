"""An experiment: what the paper shows, what a trace must have for it, and how it is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from expertly.reproduce.finding import Finding
from expertly.reproduce.lab import Lab

PAPERS = {
    "fmoe": "fMoE: Taming Latency-Memory Trade-Off in MoE-Based LLM Serving",
    "moe-infinity": "MoE-Infinity: Efficient MoE Inference on Personal Machines with Sparsity-Aware Expert Cache",
    "promoe": "ProMoE: Fast MoE-based LLM Serving using Proactive Caching",
    "moepic": "MoEpic: Accelerating Mixture-of-Expert Inference with Adaptive Expert Split Mechanism",
}


class RunExperiment(Protocol):
    """Runs an experiment on the trace of a lab."""

    def __call__(self, lab: Lab) -> Finding: ...


@dataclass(frozen=True, slots=True)
class Experiment:
    """A member of the family: one figure or table, or a group that shares its runs."""

    paper: str  # of PAPERS
    figures: tuple[str, ...]  # "4", "table-3", "B.1"; the first names it
    title: str
    shows: str  # what the paper shows, with its numbers as printed
    run: RunExperiment
    needs: tuple[str, ...] = ()  # fields that the trace must really have; "prompts": phases were recorded
    most: int = 2  # traces that it runs on
    stand_in: bool = False  # also runs on routing made up for the paper's model
    is_timed: bool = False  # reads a real clock

    @property
    def name(self) -> str:
        return f"{self.paper}:{self.figures[0]}"

    @property
    def where(self) -> str:
        """The figures, as the paper calls them; the first and its parts, or its whole, count once."""
        first, *others = self.figures
        own = [first, *(one for one in others if not (one.startswith(first) or first.startswith(one)))]
        numbers = [one for one in own if one[0].isdigit()]
        label = f"figure{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}" if numbers else ""
        named = [one.replace("table-", "table ") for one in own if one.startswith("table-")]
        named += [f"section {one}" for one in own if one[0].isupper()]
        return ", ".join(filter(None, [label, *named]))
