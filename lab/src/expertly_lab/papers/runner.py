"""Runs experiments on traces, and judges what they find."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import expertly
from expertly.core.errors import ConfigError, ExpertlyError
from expertly.core.resources import granted_cpus
from expertly.policies.registry import PREDICTORS, Registry
from expertly_lab.papers import fmoe, moe_infinity, moepic, ours, promoe, recorded
from expertly_lab.papers.experiment import Experiment, Paper
from expertly_lab.papers.judge import HOLDS, Cell, Cells, Claim, Verdict, verdict_of
from expertly_lab.papers.runs import Lab, Subject
from expertly_lab.papers.settings import ReproduceOptions
from expertly_lab.sim.processes import as_finished
from expertly_lab.sim.schedule import read_arrivals

PAPERS: Registry[Paper] = Registry(
    "paper",
    "expertly.papers",
    {paper.name: paper for paper in (fmoe.PAPER, moe_infinity.PAPER, promoe.PAPER, moepic.PAPER, ours.PAPER)},
    lambda paper: isinstance(paper, Paper),
    "a Paper",
    adopt=Paper.called,
)
ALL = "all"
HOW = {
    "prompts": "`expertly lab trace record` records them; imported routing has none",
    "weights": "`expertly lab train TRACE --out FILE` makes them, --predictor FILE takes them",
}
RECORD = "`expertly lab trace record --full` records it"


@dataclass(frozen=True)
class Finding:
    """What one experiment found on one trace; `left_out`: why it found nothing."""

    trace: str
    cells: Cells = field(default_factory=dict)
    verdicts: Sequence[tuple[Claim, Verdict]] = ()
    num_shuffled: int = 0  # claims that hold, judged again with shuffled names
    num_withstood: int = 0  # of these, that still hold
    has_made_up_arrivals: bool = False
    left_out: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Result:
    """Of one experiment: a finding a trace."""

    experiment: Experiment
    findings: Sequence[Finding]


Part = tuple[str, str]
"""An experiment's name and a trace's."""


def experiments() -> list[Experiment]:
    """Those that ship, then those of installed packages."""
    return [experiment for paper in PAPERS.values() for experiment in paper.experiments]


def find_experiment(name: str) -> Experiment:
    """By the name that it has itself."""
    paper = name.rpartition(":")[0]
    return next(experiment for experiment in PAPERS[paper].experiments if experiment.name == name)


def select(names: str) -> list[Experiment]:
    """Those of `all`, `PAPER` or `PAPER:FIGURE`, several with commas between them, in the order of the papers. A paper
    is one of PAPERS, or the dotted path of one. Raises ConfigError naming what is accepted.
    """
    chosen: dict[str, Experiment] = {}
    for name in map(str.strip, names.split(",")):
        paper, _, figure = name.partition(":")
        if name != ALL and paper not in PAPERS:
            accepted = ", ".join((ALL, *PAPERS, *(f"{paper}:FIGURE" for paper in PAPERS)))
            raise ConfigError(f"paper={name!r:.80}: unknown; accepted: {accepted}, or the dotted path of a Paper")
        known = experiments() if name == ALL else list(PAPERS[paper].experiments)
        matching = [experiment for experiment in known if figure in ("", experiment.figure)]
        if not matching or name.endswith(":"):
            accepted = ", ".join(experiment.figure for experiment in known)
            raise ConfigError(f"figure={figure!r:.80}: none of {paper}'s; accepted: {accepted}")
        chosen |= {experiment.name: experiment for experiment in matching}
    order = [experiment.name for experiment in experiments()]
    return sorted(chosen.values(), key=lambda each: order.index(each.name) if each.name in order else len(order))


def judged(claims: Sequence[Claim], cells: Cells) -> list[tuple[Claim, Verdict]]:
    """Of the claims that these cells tell something of."""
    verdicts = []
    for claim in claims:
        effects = claim.effects(cells)
        if effects:
            verdicts.append((claim, verdict_of(effects)))
    return verdicts


def shuffled(cells: Cells, dice: Random) -> dict[tuple[str, str], Cell]:
    """Each system with the numbers of another one; of a single system, each point with those of another one."""
    axis = 1 if len({system for _, system in cells}) > 1 else 0
    names = list(dict.fromkeys(key[axis] for key in cells))
    order = dice.sample(names, len(names))
    other = {name: order[(order.index(name) + 1) % len(order)] for name in names}  # one cycle: none keeps its own
    swapped = {key: (key[0], other[key[1]]) if axis else (other[key[0]], key[1]) for key in cells}
    return {key: cells[source] for key, source in swapped.items() if source in cells}


class Session:
    """Experiments on the same traces with the same settings. Without a trace the demo model answers some prompts,
    recorded at the first call. Raises ConfigError and what `Subject.open` does.
    """

    def __init__(
        self,
        options: ReproduceOptions,
        progress: Callable[[str, int, int], None] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._options = options
        arrivals = None if options.arrivals is None else read_arrivals(options.arrivals)
        kinds = [predictor.weights for predictor in PREDICTORS.values() if predictor.weights is not None]
        for experiment in select(options.paper) if options.paper else ():
            kinds += experiment.weights
        paths = [
            recorded.demo_trace(options.quick, say) if str(path) == recorded.DEMO else path
            for path in options.trace or [Path(recorded.DEMO)]
        ]
        self.subjects = [Subject.open(path, options.predictor or (), kinds) for path in paths]
        names = [subject.name for subject in self.subjects]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ConfigError(f"trace: two of the name {twice[0]!r}; rename a folder, results are told apart by it")
        self._labs = {subject.name: Lab(subject, options, arrivals, progress) for subject in self.subjects}

    @property
    def settings(self) -> dict[str, Any]:
        """What results depend on, beside the code."""
        options = self._options
        return {
            "version": expertly.__version__,
            "traces": {subject.name: subject.trace.fingerprint for subject in self.subjects},
            "quick": options.quick,
            "seed": options.seed,
            "tokens": options.num_tokens,
            "arrivals": options.arrivals is not None,
        }

    def results(self, chosen: Sequence[Experiment], jobs: int | None = 1) -> Iterator[Result]:
        """In their order; so many processes at once, None: as many as there are processors. What runs on one trace and
        one machine runs in one process, where that leaves enough for each: such experiments share runs.
        """
        parts = [(experiment.name, trace) for experiment in chosen for trace in self._labs]
        jobs, waiting, findings = jobs or granted_cpus(), list(chosen), dict[Part, Finding]()
        groups: dict[tuple[str, ...], list[Part]] = {}
        for name, trace in parts:
            groups.setdefault((trace, find_experiment(name).machine), []).append((name, trace))
        if len(groups) < jobs:
            groups = {part: [part] for part in parts}
        if min(jobs, len(parts)) < 2:
            made = (_findings(self, [part]) for part in parts)
        else:
            groups_done = as_finished(jobs, partial(Session, self._options), _findings, [*groups.values()])
            made = (of_group for _, of_group in groups_done)
        for of_group in made:
            findings |= of_group
            while waiting and all((waiting[0].name, trace) in findings for trace in self._labs):
                experiment = waiting.pop(0)
                yield Result(experiment, [findings[experiment.name, trace] for trace in self._labs])

    def finding(self, experiment: Experiment, trace: str) -> Finding:
        """Of one experiment on one trace; why there is none, where there is none."""
        start = time.monotonic()
        lab = self.lab(trace)
        if missing := lab.subject.lacks(experiment.needs):
            how = "; ".join(dict.fromkeys(HOW.get(name, RECORD) for name in missing))
            return Finding(trace, left_out=f"needs {', '.join(missing)}, which it lacks ({how})")
        try:
            cells = experiment.measure(lab) if experiment.measure else lab.cells(experiment)
        except ExpertlyError as error:
            return Finding(trace, left_out=str(error), seconds=time.monotonic() - start)
        verdicts = judged(experiment.claims, cells)
        held = [claim for claim, verdict in verdicts if verdict.kind == HOLDS]
        again = judged(held, shuffled(cells, Random(self._options.seed)))
        withstood = sum(verdict.kind == HOLDS for _, verdict in again)
        seconds = time.monotonic() - start
        is_made_up = experiment.is_online and lab.arrivals is None
        return Finding(trace, cells, verdicts, len(held), withstood, is_made_up, "", seconds)

    def lab(self, name: str) -> Lab:
        return self._labs[name]

    def about(self) -> Mapping[str, str]:
        """The traces, in words."""
        lines = {}
        for subject in self.subjects:
            manifest = subject.trace.manifest
            first = manifest.layers[0]
            shape = f"{len(manifest.layers)} layers of {first.num_experts} experts, top-{first.top_k}"
            num = sum(1 for request in subject.trace.requests if request.num_rows)
            words = [f"{manifest.model}, {shape}; {num} requests, {subject.trace.num_rows} tokens", subject.sizes]
            lines[subject.name] = "; ".join(filter(None, [*words, subject.weights_note]))
        return lines


def _findings(session: Session, parts: Sequence[Part]) -> dict[Part, Finding]:
    return {(name, trace): session.finding(find_experiment(name), trace) for name, trace in parts}
