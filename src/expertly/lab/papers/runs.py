"""Where experiments run: traces, machines and budgets; runs that several experiments share are made once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ExpertlyError
from expertly.core.geometry import DenseShape, Geometry, LayerGeometry
from expertly.core.messages import Span
from expertly.core.units import counted, format_nbytes
from expertly.data import demo_predictor
from expertly.lab.papers.findings import Check, Finding, FindingTable
from expertly.lab.papers.measured import Estimate, Floats
from expertly.lab.papers.settings import ReproduceOptions
from expertly.policies.learned import LearnedState, ModelShape, read_learned
from expertly.policies.predictor.learned import LearnedWeights
from expertly.scheduler.presets import get_system
from expertly.scheduler.system import names_of_options
from expertly.sim.hardware import Hardware
from expertly.sim.schedule import Arrivals, Schedule, Selection, decode_passes, first_rows, make_schedule, with_answer
from expertly.sim.study import RATES, Memory, Study
from expertly.sim.training import TrainingPart
from expertly.sim.workload import RowRange, TraceWorkload
from expertly.trace.reader import Trace
from expertly.trace.writer import TraceWriter

MEMORY = "25%"
"""Where an experiment has no budget of its own."""
SMALL_NBYTES, SCALED_NBYTES = 1 << 20, 8 << 20
"""Experts smaller than the first are taken for experts of the second: they would be loaded in no time."""
SPLIT = (7, 3)
QUICK = 5
"""With `--quick`: times fewer requests to learn from."""
LEARNED_TOKENS = 8000
"""Of the training part, at most, whose requests may be hundreds of thousands of tokens."""
COLLECTED = 120
"""Of its requests as many, at least: MoE-Infinity's collection holds one matrix each (its section 5.2)."""
SHORT = 64
"""Tokens of an answer at most, where more requests are needed than whole answers leave."""
FULL = 12
"""Batches of 1 to 4 are full with so many requests, or a multiple of them."""
FASTER_LINK = 4
"""Times: a reason that blames the link is tried on one so fast."""

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
    weights: Mapping[type[LearnedState], LearnedState] = field(default_factory=dict)  # of trained predictors
    weights_note: str = ""  # what they learned from
    learned_from: Selection | None = None  # of this trace, by the weights

    @classmethod
    def open(
        cls, path: Path, predictors: Sequence[Path] = (), kinds: Sequence[type[LearnedState]] = (LearnedWeights,)
    ) -> Subject:
        """`predictors`: files of trained weights, of these `kinds`. Raises TraceError or StoreError where a file is not
        what it must be, and ExpertlyError for a trace that does not know the sizes of its experts.
        """
        trace = Trace.open(path)
        layers = trace.manifest.geometries
        if layers is None:
            raise ExpertlyError(
                f"trace={str(path)!r}: does not know its experts' sizes; `expertly lab trace import --geometry` gives "
                "them"
            )
        sizes = "its own sizes"
        if layers[0].expert_nbytes < SMALL_NBYTES:
            factor = math.ceil(SCALED_NBYTES / layers[0].expert_nbytes)
            layers = tuple(replace(one, intermediate_size=one.intermediate_size * factor) for one in layers)
            sizes = f"experts taken for {factor} times theirs, {format_nbytes(layers[0].expert_nbytes)}"
        name, dense = path.resolve().name, trace.manifest.dense
        return cls(name, trace, layers, dense, sizes, *_weights(trace, predictors, kinds))

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
        there = {"prompts": self.has_prompts, "weights": LearnedWeights in self.weights}
        return [name for name in needs if not (there[name] if name in there else self.trace.is_real(name))]

    def fitted(self, system: str) -> tuple[str, bool]:
        """The system as it can run on this trace, and whether its prediction is modelled instead of its own: right as
        often as ProMoE (section 4) found skip prediction to be, by the distance.
        """
        parts = get_system(system)
        lacking = (parts.prediction in ("lookahead", "speculative") and not self.trace.has("lookahead")) or (
            parts.prediction == "learned"
            and (LearnedWeights not in self.weights or not self.trace.has("router_inputs"))
        )
        if not lacking:
            return system, False
        name, *settings = system.split(":")
        of_predictor = {"prediction", *names_of_options("prediction", parts.prediction)}
        own = [one for one in settings if one.partition("=")[0] not in of_predictor]
        distance = [] if any(one.startswith("distance=") for one in own) else [f"distance={parts.distance}"]
        return ":".join([name, "prediction=modelled", *own, *distance]), True


def _weights(
    trace: Trace, files: Sequence[Path], kinds: Sequence[type[LearnedState]]
) -> tuple[dict[type[LearnedState], LearnedState], str, Selection | None]:
    """Given ones of the trace's model, and those that ship, for a trace of the demo model; what they learned from, and
    how this trace was parted, if that is it.
    """
    found: dict[type[LearnedState], LearnedState] = {}
    notes, parted = [], None
    shape = ModelShape(*zip(*((layer.num_experts, layer.top_k) for layer in trace.manifest.layers), strict=True))
    shipped = [demo_predictor()] if trace.manifest.model == "demo" and demo_predictor().is_file() else []
    for path in (*files, *shipped):
        file = read_learned(path, *kinds)
        kind, about = type(file.learned), file.header.about
        if file.header.shape != shape or kind in found:
            continue
        found[kind], source = file.learned, "requests that are not of this trace"
        if "trace" not in about:
            source = "what its file does not say"
        elif about["trace"] == trace.fingerprint:
            first, rest = map(int, str(about.get("split", "7:3")).split(":"))
            parted, source = (
                parted or Selection(split=(first, rest), seed=int(about.get("seed", 0))),
                "its training part",
            )
        whose = "`promoe`" if kind is LearnedWeights else path.name
        notes.append(f"trained {kind.unit} ({whose}) learned from {source}")
    return found, "; ".join(notes), parted


class Watch:
    """Sees one run of the simulator, as its timeline. Times in nanoseconds."""

    def __init__(self) -> None:
        self.ends: list[int] = []  # of each pass
        self.computing: list[int] = []  # of each pass: not waiting for loads or predictions
        self.asking: list[int] = []  # the computing thread asked for pieces and took them; this counts as computing
        self.loading: list[int] = []  # the link was busy, until the pass ended
        self.layers: list[list[int]] = []  # of each pass: when its layers began, and when the last had been computed
        self.predicting: dict[str, int] = {}  # the predictor's thread, by what it read: "begin", "router", "update"
        self._computing = self._asking = self._loading = 0
        self._begins: list[int] = []

    def begin_run(self, name: str) -> Watch:
        return self

    def computed(self, what: str, layer: int, begin_ns: int, end_ns: int) -> None:
        self._computing += end_ns - begin_ns
        if what == "dense":
            self._begins.append(begin_ns)
        elif what == "head":
            self.ends.append(end_ns)
            self.computing.append(self._computing)
            self.asking.append(self._asking)
            self.loading.append(self._loading)
            self.layers.append([*self._begins, begin_ns])
            self._begins, self._computing, self._asking, self._loading = [], 0, 0, 0

    def moved(self, where: str, piece: Span, begin_ns: int, end_ns: int) -> None:
        if where == "link":
            self._loading += end_ns - begin_ns

    def spent(self, what: str, begin_ns: int, end_ns: int) -> None:
        self._asking += end_ns - begin_ns
        self._computing += end_ns - begin_ns

    def predicted(self, what: str, begin_ns: int, end_ns: int) -> None:
        self.predicting[what] = self.predicting.get(what, 0) + end_ns - begin_ns


SUMS = {
    *("bytes_loaded", "prefetched_bytes", "wasted_bytes", "bytes_read", "requests", "tokens"),
    *("predictions_late", "contexts_dropped", "decode_iterations"),
}
"""Of a row's facts, what adds up over seeds; other numbers are means."""


def pooled(key: str, values: Sequence[Any]) -> Any:
    """One fact of several seeds. Rates know how far apart the seeds are."""
    known = [one for one in values if one is not None]
    if not known or key in ("hit_rate_by_request", "times_by_request"):
        return [one for each in known for one in each] or None
    if isinstance(known[0], dict):
        return {name: pooled(name, [one.get(name) for one in known]) for name in known[0]}
    if isinstance(known[0], list):
        return [pooled(key, one) for one in zip(*known, strict=False)]
    if key in SUMS:
        return sum(known)
    if isinstance(known[0], str | bool) or all(one == known[0] for one in known):
        return known[0]
    return Estimate.of_seeds(known) if key in RATES or key.endswith("_score") else float(np.mean(known))


@dataclass(frozen=True, slots=True)
class Row:
    """One system on one budget: the row of `expertly lab simulate`, and the times of its passes; of one seed or of
    several together.
    """

    system: str  # as asked for
    is_modelled: bool
    facts: Mapping[str, Any]
    passes_s: Floats
    waiting_s: Floats
    asking_s: Floats
    loading_s: Floats  # the link was busy
    layers_s: Floats  # [decode passes, L]
    is_decode: Bools
    unit_of: npt.NDArray[np.int64]  # of each pass: what is drawn anew, a request or a batch; [] where passes mix them
    units: npt.NDArray[np.int64]  # the requests in the order in which they began, or the batches
    decode_passes: Floats  # of each of `units`
    predicting_s: Mapping[str, float]
    by_seed: Sequence[Row] = ()  # of several
    label: str = ""  # as tables call it
    as_right_as: Callable[[float], Row] | None = None  # the same with such an accuracy, where prediction is modelled
    on_faster_link: Callable[[], Row] | None = None  # the same run over a link FASTER_LINK times as fast

    @classmethod
    def of_seeds(cls, rows: Sequence[Row]) -> Row:
        """What was measured with several seeds. A request that several of them have is one, of more tokens."""
        first, *others = rows
        if not others:
            return first
        arrays = [one.name for one in fields(cls) if isinstance(getattr(first, one.name), np.ndarray)]
        joined: dict[str, Any] = {name: np.concatenate([getattr(row, name) for row in rows]) for name in arrays}
        facts = {key: pooled(key, [row.facts[key] for row in rows]) for key in first.facts}
        predicting = {what: sum(row.predicting_s.get(what, 0.0) for row in rows) for what in first.predicting_s}
        return replace(first, facts=facts, predicting_s=predicting, **joined)

    def __getitem__(self, key: str) -> Any:
        return self.facts[key]

    @property
    def name(self) -> str:
        """In sentences: the system, where a table calls it by a number."""
        return self.label if self.label[:1].isalpha() else self.system

    def mean(self, each: Floats, where: Bools | None = None, weights: Floats | None = None) -> float:
        """Of passes, or what they add up to in units of what `weights` do."""
        chosen = np.ones(len(each), bool) if where is None else where
        weights = np.ones(len(each)) if weights is None else weights
        if not len(self.unit_of):
            return float(each[chosen].sum() / weights[chosen].sum())
        return Estimate.mean(*(self._sums(np.where(chosen, one, 0.0)) for one in (each, weights)))

    @property
    def tpot_s(self) -> float:
        return self.mean(self.passes_s, self.is_decode)

    @property
    def ttft_s(self) -> Any:
        """None without prompts."""
        if self.facts["ttft_s"] is None or not len(self.unit_of):
            return self.facts["ttft_s"]
        sums = self._sums(np.where(self.is_decode, 0.0, self.passes_s))
        return Estimate.mean(sums, self._sums(~self.is_decode) > 0)

    @property
    def hit_rate(self) -> float:
        """Of decode."""
        by_request = self.facts["hit_rate_by_request"] or []
        if not len(self.unit_of) or len(by_request) != len(self.units):
            return float(self.facts["hit_rate"])
        hits = self.decode_passes * [rate or 0.0 for rate in by_request]
        return Estimate.mean(*(self._by_unit(self.units, one) for one in (hits, self.decode_passes)))

    @property
    def kept(self) -> float:
        """Hits, and partial ones, as MoEpic counts."""
        return float(self.facts["hit_rate"]) + float(self.facts["partial_hit_rate"])

    def waiting(self, decode: bool) -> float | None:
        """Share of the time of one phase; None where it has no passes."""
        rows = self.is_decode == decode
        return self.mean(self.waiting_s, rows, self.passes_s) if rows.any() else None

    @property
    def loaded(self) -> float:
        """Bytes a pass, over the link: shared out by its time."""
        busy = self.loading_s.sum()
        return self.mean(self.loading_s * (self.facts["bytes_loaded"] / busy if busy else 0.0))

    def tail_s(self, percent: int) -> float:
        """Of decode passes."""
        return Estimate.percentile(self.passes_s[self.is_decode], percent, self._places(self.unit_of[self.is_decode]))

    def latency_s(self, percent: int | None) -> float:
        """Of requests, from their arrival: a percentile; None: the mean."""
        times = np.array([one["latency_s"] for one in self.facts["times_by_request"]])
        if percent is None:
            return Estimate.mean(*(self._by_unit(self.units, one) for one in (times, np.ones(len(times)))))
        return Estimate.percentile(times, percent, self._places(self.units))

    @property
    def link_share(self) -> float:
        """Of all time, the link moved something."""
        return float(self.loading_s.sum() / self.passes_s.sum())

    def by_unit(self, each: Floats, where: Bools) -> Floats:
        """The mean of such passes of each of `units`, of one seed; NaN where it has none."""
        with np.errstate(invalid="ignore"):
            found: Floats = self._sums(np.where(where, each, 0.0)) / self._sums(where)
        return found[self._places(self.units)]

    def layer_s(self, layer: int) -> float:
        """What a layer takes in decode."""
        each = np.zeros(len(self.passes_s))
        each[self.is_decode] = self.layers_s[:, layer]
        return self.mean(each, self.is_decode)

    def _sums(self, each: npt.NDArray[Any]) -> Floats:
        return self._by_unit(self.unit_of, each)

    def _by_unit(self, units: npt.NDArray[np.int64], each: npt.NDArray[Any]) -> Floats:
        sums: Floats = np.bincount(self._places(units), weights=each).astype(np.float64)
        return sums

    @staticmethod
    def _places(units: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = np.unique(units, return_inverse=True)[1]
        return found


def with_link(machine: Hardware, times: float) -> Hardware:
    """The same machine with a link so many times as fast."""
    return replace(machine, link=replace(machine.link, nbytes_per_s=machine.link.nbytes_per_s * times))


@dataclass
class Runs:
    """One schedule a seed, of one trace, on one machine; rows are made once. `memory`: where a row says no other."""

    studies: Sequence[Study]
    subject: Subject
    hardware: str
    memory: str = MEMORY
    added: Sequence[str] = ()  # systems that a user wants to see beside those of the experiment
    notes: dict[str, None] = field(default_factory=dict)  # for the finding: which of them cannot run, in order
    shared: dict[tuple[str, str], Row] = field(default_factory=dict)
    _on_faster_link: Runs | None = None

    @property
    def study(self) -> Study:
        """Of the first seed."""
        return self.studies[0]

    def row(self, system: str, memory: str | Memory | None = None) -> Row:
        """Raises ConfigError for what cannot run; what a trace lacks is modelled, and the row says so."""
        memory = memory if isinstance(memory, Memory) else Memory(memory or self.memory)
        key = (system, memory.label)
        if key not in self.shared:
            rows = [self._run(number, system, memory) for number in range(len(self.studies))]
            again = partial(self._row_on_faster_link, system, memory)
            other = partial(self._row_as_right_as, system, memory) if rows[0].is_modelled else None
            self.shared[key] = replace(Row.of_seeds(rows), by_seed=rows, on_faster_link=again, as_right_as=other)
        return self.shared[key]

    def _row_on_faster_link(self, system: str, memory: Memory) -> Row:
        if self._on_faster_link is None:
            studies = [replace(one, hardware=with_link(one.hardware, FASTER_LINK)) for one in self.studies]
            self._on_faster_link = Runs(studies, self.subject, self.hardware, self.memory)
        return self._on_faster_link.row(system, memory)

    def _row_as_right_as(self, system: str, memory: Memory, accuracy: float) -> Row:
        return self.row(f"{self.subject.fitted(system)[0]}:accuracy={accuracy:.4f}", memory)

    def rows(self, systems: Mapping[Any, str] | Sequence[str], memory: str | Memory | None = None) -> dict[str, Row]:
        """By label, or by the name of the system."""
        named = systems if isinstance(systems, Mapping) else {name: name for name in systems}
        return {str(label): replace(self.row(name, memory), label=str(label)) for label, name in named.items()}

    def beside(self, memory: str | Memory | None = None) -> dict[str, Row]:
        """Rows of the systems that a user added: for tables, never for claims. What cannot run is left out, with a
        note.
        """
        found = {}
        for name in self.added:
            try:
                found[f"{name} (added)"] = self.row(name, memory)
            except ExpertlyError as error:
                self.notes[f"{name} (added) is left out: {error}"] = None
        return found

    def _run(self, number: int, system: str, memory: Memory) -> Row:
        study = self.studies[number]
        name, is_modelled = self.subject.fitted(system)
        parts, watch = get_system(name), Watch()
        study.chrome, study.learned = watch, None if parts.weights is None else self.subject.weights.get(parts.weights)
        facts = study.row(parts, memory)
        if facts["skipped"] is not None:
            raise CannotRun(facts["skipped"])
        if not watch.ends:  # with all experts here it has run before, in another budget
            before = next(row for (name, _), row in self.shared.items() if name == system)
            return replace(before.by_seed[number], facts=facts)
        begins = [one[0] for one in watch.layers] if study.is_queued else [0, *watch.ends[:-1]]  # or it was idle
        passes = (np.array(watch.ends) - np.array(begins)) / 1e9
        spans = study.schedule.test
        phases = [decode_passes(study.trace, span) for span in spans]
        # a batch has a number of its own: its requests are in no other; a request is the same with every seed
        units = [1000 * number + at if span.request is None else span.request for at, span in enumerate(spans)]
        each = np.repeat(units, [len(one) for one in phases])
        is_decode, known = np.concatenate(phases), np.array(list(dict.fromkeys(units)), np.int64)
        return Row(
            system,
            is_modelled,
            facts,
            passes,
            np.maximum(passes - np.array(watch.computing) / 1e9, 0),
            np.array(watch.asking) / 1e9,
            np.array(watch.loading) / 1e9,
            np.array([np.diff(one) for one, decode in zip(watch.layers, is_decode, strict=True) if decode]) / 1e9,
            is_decode,
            each[:0] if study.is_queued else each,
            known,
            np.array([is_decode[each == unit].sum() for unit in known.tolist()], np.float64),
            {what: ns / 1e9 for what, ns in watch.predicting.items()},
        )


@dataclass
class Lab:
    """What an experiment is given: one trace, and what a user asks for."""

    subject: Subject
    scratch: Path  # an empty folder, for this trace
    options: ReproduceOptions
    arrivals: Arrivals | None = None  # of requests, recorded; None: they are made up
    progress: Callable[[str, int, int], None] | None = None
    _made: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    _notes: dict[str, None] = field(default_factory=dict)  # of runs, for the next finding

    def once(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """What `make` makes, made at the first call."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    @property
    def seeds(self) -> range:
        first = self.options.seed
        return range(first, first + self.options.num_seeds)

    @property
    def trace(self) -> Trace:
        return self.subject.trace

    def machine(self, name: str) -> Hardware:
        """The one that was asked for, else the paper's."""
        return Hardware.read(self.options.hardware or name)

    def machines(self, names: Sequence[str]) -> Sequence[str]:
        return names if self.options.hardware is None else [self.options.hardware]

    def memory(self, label: str = MEMORY) -> str:
        """The budget that was asked for, else the paper's."""
        return self.options.memory or label

    def share(self, label: str = MEMORY) -> float:
        """The same in percent of the experts."""
        geometry = Geometry(self.subject.layers)
        return 100 * Memory(self.memory(label)).budget(geometry).memory_nbytes / geometry.nbytes

    @property
    def tokens_of_seed(self) -> int:
        """Of decode."""
        return -(-self.options.num_tokens // len(self.seeds))

    @property
    def top_k(self) -> int:
        return self.subject.layers[0].top_k

    @property
    def num_experts(self) -> int:
        return self.subject.layers[0].num_experts

    def schedules(self, times: float = 1.0, answer: int | None = None) -> list[Schedule]:
        """By seed: 70 % of the requests to learn from, as far as it takes, and so many decoded tokens of the rest, of
        which each has an answer of at most `answer` tokens.
        """

        def make(seed: int) -> Schedule:
            made = self.parted(seed)
            whole = made.test if answer is None else [with_answer(self.trace, span, answer) for span in made.test]
            cut = QUICK if self.options.quick else 1
            least = sum(span.num_rows for span in made.training[: COLLECTED // cut])
            tests = first_decoded(self.trace, whole, round(self.tokens_of_seed * times))
            return Schedule(first_rows(made.training, max(LEARNED_TOKENS // cut, least)), tests)

        return self.once(("schedules", times, answer), lambda: [make(seed) for seed in self.seeds])

    def requests_apart(self) -> list[list[RowRange]]:
        """By seed: whole requests of the part that is not learned from, each with one seed alone."""
        queues = [iter(self.parted(seed).test) for seed in self.seeds]
        taken: set[int | None] = set()
        parts: list[list[RowRange]] = [[] for _ in queues]
        for number in cycle(range(len(queues))):
            one = next((span for span in queues[number] if span.request not in taken), None)
            if one is None:
                return parts
            taken.add(one.request)
            parts[number].append(one)
        return parts

    def selection(self, seed: int) -> Selection:
        """How the requests are parted with a seed: as they were for the weights, where these learned from them."""
        return self.subject.learned_from or Selection(split=SPLIT, seed=seed)

    def parted(self, seed: int) -> Schedule:
        """In another order with each seed."""
        made = make_schedule(self.trace, self.selection(seed))
        dice = Random(seed)
        dice.shuffle(made.training)
        dice.shuffle(made.test)
        return made

    def runs(self, hardware: str, *, times: float = 1.0) -> Runs:
        """Of `schedules`."""
        return self.once(("runs", hardware, times), lambda: self.runs_of(self.schedules(times), hardware))

    def runs_of(
        self,
        schedules: Sequence[Schedule],
        hardware: str | Hardware,
        *,
        traces: Sequence[Trace] | None = None,
        is_queued: bool = False,
        predicting: str = "virtual",
    ) -> Runs:
        """Of other schedules, or other traces of the same model, one a seed."""
        subject = self.subject
        machine = self.machine(hardware) if isinstance(hardware, str) else hardware

        def training(number: int, trace: Trace, spans: Sequence[RowRange]) -> TrainingPart:
            """What is learned from it is learned once for all machines."""
            return self.once(("training", number, trace.folder, *spans), lambda: TrainingPart(trace, spans))

        studies = [
            Study(
                trace := traces[number] if traces else subject.trace,
                schedule,
                machine,
                subject.layers,
                subject.dense,
                seed=self.options.seed + number,
                is_queued=is_queued,
                predicting=predicting,
                progress=self.progress,
                training=training(number, trace, schedule.training),
            )
            for number, schedule in enumerate(schedules)
        ]
        return Runs(studies, subject, machine.name, self.memory(), self.options.systems, self._notes)

    def finding(
        self,
        setting: str,
        tables: Sequence[FindingTable],
        checks: Sequence[Check | None],
        notes: Sequence[str] = (),
    ) -> Finding:
        """What was found here. A check that is None is of prompts, and there are none."""
        made = tuple(check for check in checks if check is not None)
        every = (*notes, *self._notes)
        self._notes.clear()
        return Finding(self.subject.name, setting, tuple(tables), made, every)

    def setting(self, runs: Runs, memory: str | None = None) -> str:
        """In words: machine, sizes, memory ("": several), tokens, requests and seeds."""
        memory = runs.memory if memory is None else memory
        tests = [span for study in runs.studies for span in study.schedule.test]
        num = sum(int(decode_passes(study.trace, span).sum()) for study in runs.studies for span in study.schedule.test)
        learned = min(len({span.request for span in study.schedule.training}) for study in runs.studies)
        parts = [runs.hardware, runs.subject.sizes, *([f"memory {memory}"] if memory else [])]
        requests = len({span.request for span in tests})
        parts.append(
            f"{sum(span.num_rows for span in tests)} tokens"
            + f", {num} passes of decode"
            + (f", of {requests} requests" if requests > 1 else "")
            + f", {counted(len(runs.studies), 'seed')} from {self.options.seed}"
        )
        parts.append(f"{counted(learned, 'other request')} learned from" if learned else "nothing learned")
        return "; ".join(parts)


def first_decoded(trace: Trace, spans: Sequence[RowRange], num_tokens: int) -> list[RowRange]:
    """Of these requests so many that they decode `num_tokens`; the last is cut behind them."""
    kept: list[RowRange] = []
    for span in spans:
        if num_tokens <= 0:
            break
        is_decode = ~trace.rows("is_prefill", span.first_row, span.first_row + span.num_rows)
        num_rows = int(np.searchsorted(is_decode.cumsum(), num_tokens)) + 1
        kept.append(replace(span, num_rows=min(span.num_rows, num_rows)))
        num_tokens -= int(is_decode.sum())
    return kept


# -- batches -----------------------------------------------------------------------------------------------------


def batched(lab: Lab, hardware: str | Hardware, size: int) -> Runs:
    """The same requests for every size, of which `size` run together: their prompts in one pass, then a token of each
    a pass, until all have ended. Routing does not depend on who else runs. What is drawn anew is a batch, so that no
    request may be in two.
    """

    def make() -> list[tuple[Trace, Schedule]]:
        made = []
        for number, tests in enumerate(lab.requests_apart()):
            answers = [with_answer(lab.trace, span, SHORT) for span in tests]
            chosen = first_decoded(lab.trace, answers, lab.tokens_of_seed)
            chosen = chosen[: len(chosen) // FULL * FULL or len(chosen) // 4 * 4 or None]
            training = first_rows(lab.schedules()[number].training, 2 * lab.tokens_of_seed)
            made.append(write_batches(lab.trace, training, chosen, size, lab.scratch / f"batch-{size}-{number}"))
        return made

    traces, schedules = zip(*lab.once(("batches", size), make), strict=True)
    return lab.once(("batched", hardware, size), lambda: lab.runs_of(schedules, hardware, traces=traces))


def experts_needed(lab: Lab, hardware: str | Hardware, size: int, *, decode: bool) -> float:
    """Of a layer's experts, the share that a pass of decode, or of prompts, needs in batches of `size`; the mean over
    passes and layers.
    """
    shares = [
        len(router.experts) / lab.num_experts
        for study in batched(lab, hardware, size).studies
        for iteration in TraceWorkload(study.trace, study.schedule.test).iterations()
        if iteration.is_prefill != decode
        for router in iteration.layers
    ]
    return float(np.mean(shares))


def write_batches(
    trace: Trace, training: Sequence[RowRange], test: Sequence[RowRange], size: int, folder: Path
) -> tuple[Trace, Schedule]:
    """A trace of `training` one request after the other, then of `test` in batches of `size`, each a span of no
    request.
    """
    manifest = trace.manifest
    fields = [field for name, field in manifest.fields.items() if name != "iteration"]
    stored = [field.name for field in manifest.stored_fields if field.name not in ("iteration", "request")]
    about = {"model": manifest.model, "layers": manifest.layers, "dense": manifest.dense, "scoring": manifest.scoring}
    made = Schedule([], [])
    with TraceWriter(folder, fields=fields, **about) as writer:  # type: ignore[arg-type]
        for span in training:
            number = writer.begin_request()
            made.training.append(RowRange(number, writer.num_rows, span.num_rows))
            for block in trace.blocks(["iteration", *stored], span.first_row, span.first_row + span.num_rows):
                sizes = np.unique(block.columns["iteration"], return_counts=True)[1]
                writer.extend({name: block.columns[name] for name in stored}, sizes)
        for start in range(0, len(test), size):
            first = writer.num_rows
            _write_batch(trace, writer, stored, test[start : start + size])
            made.test.append(RowRange(None, first, writer.num_rows - first))
    return Trace.open(folder), made


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
