"""Runs experiments on traces: which runs on which, and what is said of those that cannot."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from expertly.core.errors import ExpertlyError
from expertly.reproduce.experiment import Experiment
from expertly.reproduce.finding import Finding, Result
from expertly.reproduce.lab import Lab
from expertly.reproduce.moepic.stand_in import mixtral
from expertly.reproduce.subject import Subject
from expertly.sim.schedule import Arrivals

COMMANDS = {
    "prompts": "`expertly lab trace record` records them; imported routing has none",
    "weights": "`expertly lab train TRACE --out FILE` makes them, --predictor FILE takes them",
}
RECORD = "`expertly lab trace record --full` records it"


@dataclass
class Session:
    """Several experiments on several traces. Runs that experiments share are made once."""

    subjects: Sequence[Subject]
    scratch: Path
    quick: bool = False
    seed: int = 0
    arrivals: Arrivals | None = None
    progress: Callable[[str, int, int], None] | None = None
    earlier: Mapping[str, Result] = field(default_factory=dict)
    """Results by experiment that were found before, with the same traces and settings: they are not run again."""
    _labs: dict[str, Lab] = field(default_factory=dict)
    _stand_in: Subject | None = None

    def results(self, experiments: Sequence[Experiment]) -> Iterator[Result]:
        """One an experiment, in order, when it is there."""
        for experiment in experiments:
            yield self.earlier.get(experiment.name) or self._result(experiment)

    def _result(self, experiment: Experiment) -> Result:
        start = time.monotonic()
        findings: list[Finding] = []
        left_out: list[str] = []
        able = [subject for subject in self.subjects if not subject.lacks(experiment.needs)]
        for subject in self.subjects:
            if subject not in able:
                missing = subject.lacks(experiment.needs)
                how = "; ".join(COMMANDS.get(name, RECORD) for name in dict.fromkeys(missing))
                left_out.append(f"{subject.name}: needs {', '.join(missing)}, which it lacks ({how})")
        for subject in [*able[: experiment.most], *([self._made_up()] if experiment.stand_in else [])]:
            try:
                findings.append(experiment.run(self._lab(subject)))
            except ExpertlyError as error:
                left_out.append(f"{subject.name}: {error}")
        return Result(experiment.name, tuple(findings), tuple(left_out), time.monotonic() - start)

    def _made_up(self) -> Subject:
        if self._stand_in is None:
            self.scratch.mkdir(parents=True, exist_ok=True)
            self._stand_in = mixtral(self.scratch / "mixtral", self.seed)
        return self._stand_in

    def _lab(self, subject: Subject) -> Lab:
        if subject.name not in self._labs:
            scratch = self.scratch / str(len(self._labs))
            scratch.mkdir(parents=True)
            self._labs[subject.name] = Lab(subject, scratch, self.quick, self.seed, self.arrivals, self.progress)
        return self._labs[subject.name]
