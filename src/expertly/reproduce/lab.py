"""Where experiments run: a trace, machines, budgets; runs that several experiments share are made once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ExpertlyError
from expertly.reproduce.finding import Check, Finding, FindingTable
from expertly.reproduce.subject import Subject
from expertly.reproduce.watch import LastRun
from expertly.scheduler.presets import get_system
from expertly.sim.hardware import Hardware, read_geometry
from expertly.sim.metrics import percentile
from expertly.sim.schedule import Arrivals, Schedule, Selection, first_rows, make_schedule
from expertly.sim.study import Memory, Study
from expertly.sim.workload import RowRange
from expertly.trace.reader import Trace

SPLIT = (7, 3)
TOKENS = {True: 1000, False: 300}
"""Simulated tokens, by whether the trace has prompts: these count, too."""
QUICK = 5
"""Times fewer with `--quick`."""
TRAINING = 8
"""Times the simulated tokens, at most, of the training part, whose requests may be hundreds of thousands of tokens."""

Bools = npt.NDArray[np.bool_]
T = TypeVar("T")


class CannotRun(ExpertlyError):
    """A system cannot run on a trace; says what is missing."""


@dataclass(frozen=True, slots=True)
class Row:
    """One system on one budget: the row of `expertly lab simulate`, and the times of its passes."""

    system: str  # as asked for
    is_modelled: bool
    facts: Mapping[str, Any]
    passes_s: npt.NDArray[np.float64]
    waiting_s: npt.NDArray[np.float64]
    is_decode: Bools
    layers_s: npt.NDArray[np.float64]  # [L], mean of decode
    predicting_s: Mapping[str, float]
    asking_s: float
    loading_s: float

    def __getitem__(self, key: str) -> Any:
        return self.facts[key]

    @property
    def label(self) -> str:
        return f"{self.system} (modelled)" if self.is_modelled else self.system

    @property
    def tpot_s(self) -> float:
        return float(self.facts["tpot_s"])

    @property
    def hit_rate(self) -> float:
        return float(self.facts["hit_rate"])

    @property
    def kept(self) -> float:
        """Hits, and partial ones, as MoEpic counts."""
        return float(self.facts["hit_rate"]) + float(self.facts["partial_hit_rate"])

    def waiting(self, decode: bool) -> float | None:
        """Share of the time of one phase."""
        rows = self.is_decode == decode
        total = self.passes_s[rows].sum()
        return float(self.waiting_s[rows].sum() / total) if total else None

    def tail_s(self, percent: int) -> float:
        """Of decode passes."""
        return float(percentile(sorted(self.passes_s[self.is_decode].tolist()), percent) or 0.0)

    @property
    def link_share(self) -> float:
        """Of all time, the link moved something."""
        return float(self.loading_s / self.passes_s.sum())


@dataclass
class Runs:
    """One schedule of one trace on one machine; rows are made once."""

    study: Study
    subject: Subject
    hardware: str
    sizes: str
    shared: dict[tuple[str, str], Row] = field(default_factory=dict)

    def row(self, system: str, memory: str | Memory = "25%") -> Row:
        """Raises ConfigError for what cannot run; what a trace lacks is modelled, and the row says so."""
        memory = Memory(memory) if isinstance(memory, str) else memory
        key = (system, memory.label)
        if key not in self.shared:
            self.shared[key] = self._run(system, memory)
        return self.shared[key]

    def _run(self, system: str, memory: Memory) -> Row:
        name, is_modelled = self.subject.fitted(system)
        last = self.study.chrome = LastRun()
        facts = self.study.row(get_system(name), memory)
        watch = last.watch
        if facts["skipped"] is not None:
            raise CannotRun(facts["skipped"])
        if not watch.ends:  # with all experts here it has run before, in another budget
            return replace(next(row for (one, _), row in self.shared.items() if one == system), facts=facts)
        begins = [one[0] for one in watch.layers] if self.study.is_queued else [0, *watch.ends[:-1]]  # or it was idle
        passes = (np.array(watch.ends) - np.array(begins)) / 1e9
        is_decode = np.concatenate([decode_passes(self.study.trace, span) for span in self.study.schedule.test])
        layers = np.array([np.diff(one) for one, decode in zip(watch.layers, is_decode, strict=True) if decode]) / 1e9
        return Row(
            system,
            is_modelled,
            facts,
            passes,
            np.maximum(passes - np.array(watch.computing) / 1e9, 0),
            is_decode,
            layers.mean(axis=0) if len(layers) else np.zeros(0),
            {what: ns / 1e9 for what, ns in watch.predicting.items()},
            watch.asking / 1e9,
            watch.loading / 1e9,
        )


def decode_passes(trace: Trace, span: RowRange) -> Bools:
    """Of each pass of a span, whether it is of decode alone."""
    rows = span.first_row, span.first_row + span.num_rows
    iteration, is_prefill = trace.rows("iteration", *rows), trace.rows("is_prefill", *rows)
    _, firsts = np.unique(iteration, return_index=True)
    found: Bools = ~np.logical_or.reduceat(is_prefill, firsts)
    return found


@dataclass
class Lab:
    """What an experiment is given. `quick`: few tokens."""

    subject: Subject
    scratch: Path  # an empty folder, for this trace
    quick: bool = False
    seed: int = 0
    arrivals: Arrivals | None = None  # of requests, recorded; None: they are made up
    progress: Callable[[str, int, int], None] | None = None
    _made: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def once(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """What `make` makes, made at the first call."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    @property
    def trace(self) -> Trace:
        return self.subject.trace

    @property
    def num_tokens(self) -> int:
        own = self.subject.num_tokens
        return own or TOKENS[self.subject.has_prompts] // (QUICK if self.quick else 1)

    @property
    def share(self) -> float:
        """Of these tokens, for systems that take long to simulate: those that reckon with every piece of an expert."""
        return 0.4 if self.subject.is_full and not self.quick else 1.0

    @property
    def top_k(self) -> int:
        return self.subject.layers[0].top_k

    @property
    def num_experts(self) -> int:
        return self.subject.layers[0].num_experts

    def schedule(self, times: float = 1.0) -> Schedule:
        """The requests of the seed: 70 % to learn from, as far as it takes, and so many tokens of the rest."""
        num = round(self.num_tokens * times)
        made = make_schedule(self.trace, Selection(num_tokens=num, split=SPLIT, seed=self.seed))
        return Schedule(first_rows(made.training, TRAINING * num), made.test)

    def requests_to_test(self) -> list[RowRange]:
        """Whole requests of the part that is not learned from."""
        return make_schedule(self.trace, Selection(split=SPLIT, seed=self.seed)).test

    def runs(
        self,
        hardware: str,
        *,
        times: float = 1.0,
        online: bool = False,
        sizes: str | None = None,
    ) -> Runs:
        """Of the tokens of `schedule`; `online`: nothing was learned beforehand; `sizes`: a shipped description's."""

        def make() -> Runs:
            schedule = self.schedule(times)
            return self.runs_of(Schedule([], schedule.test) if online else schedule, hardware, sizes=sizes)

        return self.once(("runs", hardware, times, online, sizes), make)

    def runs_of(
        self,
        schedule: Schedule,
        hardware: str | Hardware,
        *,
        trace: Trace | None = None,
        sizes: str | None = None,
        is_queued: bool = False,
    ) -> Runs:
        """Of another schedule, or another trace of the same model."""
        subject = self.subject
        machine = Hardware.read(hardware) if isinstance(hardware, str) else hardware
        layers, dense = subject.layers, subject.dense
        if sizes is not None:
            given = read_geometry(sizes)
            layers, dense = given.layers, given.dense
        study = Study(
            trace or subject.trace,
            schedule,
            machine,
            layers,
            dense,
            seed=self.seed,
            is_queued=is_queued,
            learned=subject.weights,
            progress=self.progress,
        )
        return Runs(study, subject, machine.name, sizes or subject.sizes)

    def finding(
        self, setting: str, tables: list[FindingTable], checks: list[Check], notes: list[str] | None = None
    ) -> Finding:
        """What was found here."""
        return Finding(self.subject.name, setting, tuple(tables), tuple(checks), tuple(notes or ()))

    def setting(self, runs: Runs, memory: str = "") -> str:
        """In words: machine, sizes, memory, tokens."""
        schedule = runs.study.schedule
        num = sum(span.num_rows for span in schedule.test)
        learned = len({span.request for span in schedule.training})
        parts = [runs.hardware, runs.sizes, *([f"memory {memory}"] if memory else [])]
        parts.append(f"{num} tokens" + (f", {learned} other requests learned from" if learned else ", nothing learned"))
        return "; ".join(parts)
