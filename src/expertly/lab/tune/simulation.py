"""What the recorded requests would take with a candidate, by the simulator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from expertly.core.errors import ConfigError, ExpertlyError
from expertly.lab.routing_rates import rates_of_trace
from expertly.lab.tune.candidates import Candidate
from expertly.lab.tune.deadline import Deadline
from expertly.policies.allocation.moepic import SplitPlan, configure
from expertly.policies.predictor.learned import LearnedWeights
from expertly.sim.compute import compute_model, step_times
from expertly.sim.hardware import Hardware
from expertly.sim.schedule import Schedule
from expertly.sim.study import Memory, Study
from expertly.trace.reader import Trace


class _OutOfTimeError(ExpertlyError):
    """Raised within a simulation, to end it."""


@dataclass(slots=True)
class Simulation:
    """Of the requests of `schedule.test`; what learns, learns from its training part."""

    trace: Trace
    schedule: Schedule
    hardware: Hardware
    weights: LearnedWeights | None = None
    seed: int = 0
    _studies: dict[tuple[int, str, SplitPlan | None], Study] = field(init=False, default_factory=dict)
    _plans: dict[tuple[int, int], SplitPlan] = field(init=False, default_factory=dict)
    _rates: Any = field(init=False, default=None)

    def score(self, candidate: Candidate, num_requests: int, deadline: Deadline) -> float | None:
        """Seconds of the first requests, prompts and answers; None where the candidate cannot run in this memory, or
        the time was up before it had.
        """

        def check(what: str, done: int, total: int) -> None:
            if deadline.is_over:
                raise _OutOfTimeError("out of time")

        try:
            row = self.row(candidate, num_requests, check)
        except (ConfigError, _OutOfTimeError):
            return None
        if row["skipped"] is not None:
            return None
        return float((row["ttft_s"] or 0.0) * row["requests"] + (row["tpot_s"] or 0.0) * self.num_steps(num_requests))

    def num_steps(self, num_requests: int) -> int:
        """Decode steps of the first requests."""
        num_rows = sum(span.num_rows for span in self.schedule.test[:num_requests])
        return num_rows - self._num_prompt_rows(num_requests)

    def row(self, candidate: Candidate, num_requests: int, progress: Any = None) -> dict[str, Any]:
        """As `Study.row`, of the first requests."""
        plan = self.plan(candidate)
        study = self._study(num_requests, candidate.codec, plan)
        study.progress = progress
        return study.row(candidate.system, Memory(str(candidate.budget_nbytes)))

    def segments(self, candidate: Candidate) -> int:
        """P, as it fits the model."""
        return self._study(1, "none", None).geometry_of(candidate.system).segments_per_expert

    def plan(self, candidate: Candidate) -> SplitPlan | None:
        """What a planned candidate begins with: as `expertly lab configure` makes it of the training part. Raises
        ConfigError where its memory is too little.
        """
        if not candidate.is_planned:
            return None
        study = self._study(1, "none", None)
        geometry = study.geometry_of(candidate.system)
        key = (geometry.segments_per_expert, candidate.budget_nbytes)
        if key not in self._plans:
            if self._rates is None:
                self._rates = rates_of_trace(self.trace, self.schedule.training or self.schedule.test)
            timing = step_times(geometry, self.hardware.link, compute_model(self.hardware, geometry, study.dense))
            kept = Memory(str(candidate.budget_nbytes)).budget(geometry).kept_slots
            self._plans[key] = configure(geometry, kept, self._rates.layers, timing).plan
        return self._plans[key]

    def _study(self, num_requests: int, codec: str, plan: SplitPlan | None) -> Study:
        """Shared by all candidates that it is the same for: it reads the trace when it is made."""
        key = (num_requests, codec, plan)
        if key not in self._studies:
            schedule = Schedule(self.schedule.training, self.schedule.test[:num_requests])
            layers = tuple(layer.geometry() for layer in self.trace.manifest.layers)
            known = tuple(layer for layer in layers if layer is not None)
            assert len(known) == len(layers)
            self._studies[key] = Study(
                self.trace,
                schedule,
                self.hardware,
                known,
                self.trace.manifest.dense,
                seed=self.seed,
                learned=self.weights,
                plan=plan,
                codec=codec,
            )
        return self._studies[key]

    def _num_prompt_rows(self, num_requests: int) -> int:
        spans = self.schedule.test[:num_requests]
        ranges = [(span.first_row, span.first_row + span.num_rows) for span in spans]
        return sum(int(self.trace.rows("is_prefill", first, end).sum()) for first, end in ranges)
