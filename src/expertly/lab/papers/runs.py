"""Where experiments run: traces, machines and budgets; runs that several experiments share are made once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ExpertlyError
from expertly.core.geometry import DenseShape, LayerGeometry
from expertly.core.messages import Span
from expertly.data import demo_predictor
from expertly.lab.papers.findings import Check, Finding, FindingTable, Floats, MeanOfRequests
from expertly.policies.learned import read_learned
from expertly.policies.predictor.learned import LearnedWeights
from expertly.scheduler.presets import get_system
from expertly.scheduler.system import names_of_options
from expertly.sim.hardware import Hardware, read_geometry
from expertly.sim.metrics import percentile
from expertly.sim.schedule import Arrivals, Schedule, Selection, first_rows, make_schedule
from expertly.sim.study import Memory, Study
from expertly.sim.workload import RowRange
from expertly.trace.reader import Trace
from expertly.trace.writer import TraceWriter

SMALL_NBYTES, SCALED_NBYTES = 1 << 20, 8 << 20
"""Experts smaller than the first are taken for experts of the second: they would be loaded in no time."""
SPLIT = (7, 3)
TOKENS = {True: 1000, False: 300}
"""Simulated tokens, by whether the trace has prompts: these count, too."""
QUICK = 5
"""Times fewer with `--quick`."""
TRAINING = 8
"""Times the simulated tokens, at most, of the training part, whose requests may be hundreds of thousands of tokens."""
BATCHED_REQUESTS = 12
"""Run in batches, in all; with `--quick` a third."""

Bools = npt.NDArray[np.bool_]
T = TypeVar("T")


class CannotRun(ExpertlyError):
    """An experiment or a system cannot run on a trace; says what is missing."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A trace to run experiments on. `sizes` says whose experts' sizes it is run with."""

    name: str
    trace: Trace
    layers: tuple[LayerGeometry, ...]
    dense: DenseShape | None
    sizes: str
    weights: LearnedWeights | None  # of a learned predictor
    weights_note: str | None  # what they learned from
    num_tokens: int | None = None  # to simulate, whatever is asked for; None: as many as are

    @classmethod
    def open(cls, path: Path, predictor: Path | None = None) -> Subject:
        """Raises TraceError or StoreError where a file is not what it must be, and ExpertlyError for a trace that does
        not know the sizes of its experts.
        """
        trace = Trace.open(path)
        known = [layer.geometry() for layer in trace.manifest.layers]
        layers = tuple(layer for layer in known if layer is not None)
        if len(layers) != len(known):
            raise ExpertlyError(
                f"trace={str(path)!r}: does not know its experts' sizes; `expertly lab trace import --geometry` gives "
                "them"
            )
        sizes = "its own sizes"
        if layers[0].expert_nbytes < SMALL_NBYTES:
            factor = math.ceil(SCALED_NBYTES / layers[0].expert_nbytes)
            layers = tuple(replace(one, intermediate_size=one.intermediate_size * factor) for one in layers)
            sizes = f"experts taken for {factor} times theirs, {layers[0].expert_nbytes / (1 << 20):.1f} MiB"
        weights, note = _weights(trace, predictor)
        return cls(path.resolve().name, trace, layers, trace.manifest.dense, sizes, weights, note)

    @property
    def is_full(self) -> bool:
        """Recorded whole, with prompts."""
        return self.has_prompts and all(self.trace.is_real(name) for name in ("probs", "embedding", "router_inputs"))

    @property
    def has_prompts(self) -> bool:
        """Whether it has prompts, so that there is a time to first token; imported routing has none."""
        return bool(self.trace.rows("is_prefill", 0, min(4096, self.trace.num_rows)).any())

    def lacks(self, needs: tuple[str, ...]) -> list[str]:
        """Of what an experiment needs, what the trace does not have."""
        there = {"prompts": self.has_prompts, "weights": self.weights is not None}
        return [name for name in needs if not (there[name] if name in there else self.trace.is_real(name))]

    def fitted(self, system: str) -> tuple[str, bool]:
        """The system as it can run on this trace, and whether its prediction is modelled instead of its own: right as
        often as ProMoE (section 4) found skip prediction to be, by the distance.
        """
        parts = get_system(system)
        lacking = (parts.prediction in ("lookahead", "speculative") and not self.trace.has("lookahead")) or (
            parts.prediction == "learned" and (self.weights is None or not self.trace.has("router_inputs"))
        )
        if not lacking:
            return system, False
        name, *settings = system.split(":")
        of_predictor = {"prediction", *names_of_options("prediction", parts.prediction)}
        own = [one for one in settings if one.partition("=")[0] not in of_predictor]
        distance = [] if any(one.startswith("distance=") for one in own) else [f"distance={parts.distance}"]
        return ":".join([name, "prediction=modelled", *own, *distance]), True


def _weights(trace: Trace, predictor: Path | None) -> tuple[LearnedWeights | None, str | None]:
    """Given ones, or those that ship, for a trace of the demo model."""
    if predictor is None:
        if trace.manifest.model != "demo" or not demo_predictor().is_file():
            return None, None
        predictor = demo_predictor()
    file = read_learned(predictor, LearnedWeights)
    is_own = file.header.about.get("trace") == trace.fingerprint
    source = "the training part of this trace" if is_own else "requests that are not of this trace"
    shapes = [(layer.num_experts, layer.top_k) for layer in trace.manifest.layers]
    if shapes != list(zip(file.learned.num_experts, file.learned.top_k, strict=True)):
        return None, None
    return file.learned, f"trained networks (`promoe`) learned from {source}"


class Watch:
    """Sees one run of the simulator. Times in nanoseconds."""

    def __init__(self) -> None:
        self.ends: list[int] = []  # of each pass
        self.computing: list[int] = []  # of each pass: not waiting for loads or predictions
        self.layers: list[list[int]] = []  # of each pass: when its layers began, and when the last had been computed
        self.predicting: dict[str, int] = {}  # the predictor's thread, by what it read: "begin", "router", "update"
        self.asking = 0  # the computing thread asks for pieces and takes them; this counts as computing
        self.loading = 0  # the link was busy
        self._computing = 0
        self._begins: list[int] = []

    def computed(self, what: str, layer: int, begin_ns: int, end_ns: int) -> None:
        self._computing += end_ns - begin_ns
        if what == "dense":
            self._begins.append(begin_ns)
        elif what == "head":
            self.ends.append(end_ns)
            self.computing.append(self._computing)
            self.layers.append([*self._begins, begin_ns])
            self._begins, self._computing = [], 0

    def moved(self, where: str, piece: Span, begin_ns: int, end_ns: int) -> None:
        if where == "link":
            self.loading += end_ns - begin_ns

    def spent(self, what: str, begin_ns: int, end_ns: int) -> None:
        self.asking += end_ns - begin_ns
        self._computing += end_ns - begin_ns

    def predicted(self, what: str, begin_ns: int, end_ns: int) -> None:
        self.predicting[what] = self.predicting.get(what, 0) + end_ns - begin_ns


class LastRun:
    """Stands where timelines would be: what the last run did; of none, nothing."""

    def __init__(self) -> None:
        self.watch = Watch()

    def begin_run(self, name: str) -> Watch:
        self.watch = Watch()
        return self.watch


@dataclass(frozen=True, slots=True)
class Row:
    """One system on one budget: the row of `expertly lab simulate`, and the times of its passes."""

    system: str  # as asked for
    is_modelled: bool
    facts: Mapping[str, Any]
    passes_s: Floats
    waiting_s: Floats
    is_decode: Bools
    request_of: npt.NDArray[np.int64]  # of each pass, counted from 0; [] where passes are of several
    layers_s: Floats  # [L], mean of decode
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
        return self._mean(float(self.facts["tpot_s"]), self.passes_s, self.is_decode)

    @property
    def ttft_s(self) -> Any:
        """None without prompts."""
        value = self.facts["ttft_s"]
        if value is None or not len(self.request_of):
            return value
        sums = self._sums(np.where(self.is_decode, 0.0, self.passes_s))
        return MeanOfRequests.of(value, sums, (sums > 0).astype(np.float64))

    @property
    def hit_rate(self) -> float:
        value, by_request = float(self.facts["hit_rate"]), self.facts["hit_rate_by_request"]
        if not len(self.request_of) or len(by_request) != self.request_of[-1] + 1:
            return value
        passes = self._sums(self.is_decode.astype(np.float64))
        return MeanOfRequests.of(value, passes * [rate or 0.0 for rate in by_request], passes)

    @property
    def kept(self) -> float:
        """Hits, and partial ones, as MoEpic counts."""
        return float(self.facts["hit_rate"]) + float(self.facts["partial_hit_rate"])

    def waiting(self, decode: bool) -> float | None:
        """Share of the time of one phase; None where it has no passes."""
        rows = self.is_decode == decode
        total = self.passes_s[rows].sum()
        if not total:
            return None
        value = float(self.waiting_s[rows].sum() / total)
        return self._mean(value, np.where(rows, self.waiting_s, 0.0), np.where(rows, self.passes_s, 0.0))

    def tail_s(self, percent: int) -> float:
        """Of decode passes."""
        return float(percentile(sorted(self.passes_s[self.is_decode].tolist()), percent) or 0.0)

    @property
    def link_share(self) -> float:
        """Of all time, the link moved something."""
        return float(self.loading_s / self.passes_s.sum())

    def _mean(self, value: float, each: Floats, weights: npt.NDArray[Any]) -> float:
        """`value` with its parts by request, where passes are of one each."""
        if not len(self.request_of):
            return value
        return MeanOfRequests.of(value, self._sums(np.where(weights > 0, each, 0.0)), self._sums(weights))

    def _sums(self, each: npt.NDArray[Any]) -> Floats:
        sums: Floats = np.bincount(self.request_of, weights=each).astype(np.float64)
        return sums


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

    def rows(self, systems: Mapping[Any, str] | Sequence[str], memory: str = "25%") -> dict[str, Row]:
        """By label, or by the name of the system."""
        named = systems if isinstance(systems, Mapping) else {name: name for name in systems}
        return {str(label): self.row(name, memory) for label, name in named.items()}

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
        spans = self.study.schedule.test
        phases = [decode_passes(self.study.trace, span) for span in spans]
        is_decode = np.concatenate(phases)
        is_split = all(span.request is not None for span in spans) and not self.study.is_queued
        request_of = np.repeat(np.arange(len(spans)), [len(one) for one in phases]) if is_split else np.zeros(0, int)
        layers = np.array([np.diff(one) for one, decode in zip(watch.layers, is_decode, strict=True) if decode]) / 1e9
        return Row(
            system,
            is_modelled,
            facts,
            passes,
            np.maximum(passes - np.array(watch.computing) / 1e9, 0),
            is_decode,
            request_of,
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
    """What an experiment is given: one trace. `quick`: few tokens."""

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

    def runs(self, hardware: str, *, times: float = 1.0, online: bool = False, sizes: str | None = None) -> Runs:
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
        self,
        setting: str,
        tables: Sequence[FindingTable],
        checks: Sequence[Check | None],
        notes: Sequence[str] = (),
        measured_on: str | None = None,
    ) -> Finding:
        """What was found here. A check that is None is of prompts, and there are none."""
        made = tuple(check for check in checks if check is not None)
        return Finding(self.subject.name, setting, tuple(tables), made, tuple(notes), measured_on)

    def setting(self, runs: Runs, memory: str = "") -> str:
        """In words: machine, sizes, memory, tokens, requests and seed."""
        schedule = runs.study.schedule
        num, requests = sum(span.num_rows for span in schedule.test), len(schedule.test)
        learned = len({span.request for span in schedule.training})
        parts = [runs.hardware, runs.sizes, *([f"memory {memory}"] if memory else [])]
        parts.append(f"{num} tokens" + (f" of {requests} requests" if requests > 1 else "") + f", seed {self.seed}")
        parts.append(f"{learned} other requests learned from" if learned else "nothing learned")
        return "; ".join(parts)


# -- batches -----------------------------------------------------------------------------------------------------


def batched(lab: Lab, hardware: str, size: int) -> Runs:
    """The same requests for every size, of which `size` run together: their prompts in one pass, then a token of each
    a pass, until all have ended. Routing does not depend on who else runs.
    """

    def make() -> tuple[Trace, list[RowRange]]:
        num = BATCHED_REQUESTS // (3 if lab.quick else 1)
        longest = 4 * lab.num_tokens // num
        chosen = [first_rows([span], longest)[0] for span in lab.requests_to_test()[:num]]
        training = first_rows(lab.schedule().training, 2 * lab.num_tokens)
        return write_batches(lab.trace, training, chosen, size, lab.scratch / f"batch-{size}")

    trace, spans = lab.once(("batches", size), make)
    schedule = Schedule(spans[:-1], spans[-1:])
    return lab.once(("batched", hardware, size), lambda: lab.runs_of(schedule, hardware, trace=trace))


def prompts_need(lab: Lab, hardware: str, size: int) -> float:
    """Of a layer's experts, the share that the prompts of a batch need together; the mean over batches and layers."""
    study = batched(lab, hardware, size).study
    span = study.schedule.test[-1]
    columns = {
        name: study.trace.rows(name, span.first_row, span.first_row + span.num_rows)
        for name in ("iteration", "is_prefill", "experts")
    }
    shares = [
        np.unique(columns["experts"][columns["iteration"] == prompt, layer]).size / lab.num_experts
        for prompt in np.unique(columns["iteration"][columns["is_prefill"]])
        for layer in range(len(lab.subject.layers))
    ]
    return float(np.mean(shares))


def write_batches(
    trace: Trace, training: Sequence[RowRange], test: Sequence[RowRange], size: int, folder: Path
) -> tuple[Trace, list[RowRange]]:
    """A trace of `training` one request after the other, then of `test` in batches of `size`; and its spans, the last
    of which is all of the batches.
    """
    manifest = trace.manifest
    fields = [field for name, field in manifest.fields.items() if name != "iteration"]
    stored = [field.name for field in manifest.stored_fields if field.name not in ("iteration", "request")]
    about = {"model": manifest.model, "layers": manifest.layers, "dense": manifest.dense, "scoring": manifest.scoring}
    spans: list[RowRange] = []
    with TraceWriter(folder, fields=fields, **about) as writer:  # type: ignore[arg-type]
        for span in training:
            number = writer.begin_request()
            spans.append(RowRange(number, writer.num_rows, span.num_rows))
            for block in trace.blocks(["iteration", *stored], span.first_row, span.first_row + span.num_rows):
                sizes = np.unique(block.columns["iteration"], return_counts=True)[1]
                writer.extend({name: block.columns[name] for name in stored}, sizes)
        first = writer.num_rows
        for start in range(0, len(test), size):
            _write_batch(trace, writer, stored, test[start : start + size])
    return Trace.open(folder), [*spans, RowRange(None, first, writer.num_rows - first)]


def _write_batch(trace: Trace, writer: TraceWriter, names: Sequence[str], spans: Sequence[RowRange]) -> None:
    columns: list[dict[str, npt.NDArray[Any]]] = []
    prompts: list[int] = []
    for span in spans:
        number = writer.begin_request()
        rows = {name: trace.rows(name, span.first_row, span.first_row + span.num_rows) for name in names}
        columns.append(rows | {"request": np.full(span.num_rows, number, np.int32)})
        is_prefill = rows["is_prefill"]
        prompts.append(span.num_rows if is_prefill.all() else int(np.argmin(is_prefill)))
    parts = [[(which, 0, num) for which, num in enumerate(prompts) if num]]
    for step in range(max(span.num_rows - num for span, num in zip(spans, prompts, strict=True))):
        at = [(which, num + step) for which, num in enumerate(prompts)]
        parts.append([(which, row, row + 1) for which, row in at if row < spans[which].num_rows])
    for part in parts:
        if part:
            writer.append(
                {name: np.concatenate([columns[which][name][a:b] for which, a, b in part]) for name in columns[0]}
            )
