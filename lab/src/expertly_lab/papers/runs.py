"""Where experiments run: a trace, and the systems that are simulated on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from expertly.core.errors import ExpertlyError
from expertly.core.geometry import DenseShape, LayerGeometry, ModelShape
from expertly.core.messages import Span
from expertly.core.units import format_nbytes
from expertly.data import demo_predictor
from expertly.policies.known import Known
from expertly.policies.learned import LearnedState, read_learned
from expertly.policies.prediction import Predictor
from expertly.policies.promoe import LearnedWeights
from expertly.scheduler.systems import get_system, names_of_options
from expertly_lab.papers.experiment import Experiment, Spec
from expertly_lab.papers.judge import HITS, LATENCY, LOADED, RIGHT, TPOT, TTFT, WAITING, Cell, Floats, Sample
from expertly_lab.papers.settings import ReproduceOptions
from expertly_lab.sim.hardware import Hardware
from expertly_lab.sim.schedule import (
    Arrivals,
    Schedule,
    Selection,
    arriving,
    decode_passes,
    first_rows,
    make_schedule,
    with_answer,
)
from expertly_lab.sim.study import Memory, Study
from expertly_lab.sim.training import TrainingPart
from expertly_lab.sim.workload import RowRange
from expertly_lab.trace.reader import Trace

SMALL_NBYTES, SCALED_NBYTES = 1 << 20, 8 << 20
"""Experts smaller than the first are taken for experts of the second: they would be loaded in no time."""
LEARNED_TOKENS, LEARNED_REQUESTS = 8000, 120
"""Of the training part, about; of so many requests, where it has them: MoE-Infinity's collection holds one matrix each
(its section 5.2). Answers are cut for it.
"""
REQUESTS = 20
"""That are simulated, at least, where there are so many: answers are cut for it, as intervals need requests."""
ONLINE_REQUESTS, MEAN_GAP_S = 64, 4.0
"""That arrive: as many as fMoE's section 6.4 has; and the mean gap, exponential, where no arrivals were given."""


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
            layers = tuple(replace(layer, intermediate_size=layer.intermediate_size * factor) for layer in layers)
            sizes = f"experts taken for {factor} times theirs, {format_nbytes(layers[0].expert_nbytes)}"
        return cls(path.resolve().name, trace, layers, trace.manifest.dense, sizes, *_weights(trace, predictors, kinds))

    @property
    def num_experts(self) -> int:
        return self.layers[0].num_experts

    @property
    def top_k(self) -> int:
        return self.layers[0].top_k

    @property
    def has_prompts(self) -> bool:
        """Whether it has prompts, so that there is a time to first token; imported routing has none."""
        return bool(self.trace.rows("is_prefill", 0, min(4096, self.trace.num_rows)).any())

    def lacks(self, needs: Sequence[str]) -> list[str]:
        """Of what an experiment needs, what the trace does not have."""
        there = {"prompts": self.has_prompts, "weights": LearnedWeights in self.weights}
        return [name for name in needs if not (there[name] if name in there else self.trace.is_real(name))]

    def fitted(self, system: str) -> tuple[str, bool]:
        """The system as it can run on this trace, and whether its prediction is modelled instead of its own: right as
        often as ProMoE (section 4) found skip prediction to be, by the distance.
        """
        parts = get_system(system)
        lacking = (parts.prediction in ("lookahead", "speculative", "stride") and not self.trace.has("lookahead")) or (
            parts.prediction == "learned"
            and (LearnedWeights not in self.weights or not self.trace.has("router_inputs"))
        )
        if not lacking:
            return system, False
        name, *settings = system.split(":")
        of_predictor = {"prediction", *names_of_options("prediction", parts.prediction)}
        kept = [setting for setting in settings if setting.partition("=")[0] not in of_predictor]
        if not any(setting.startswith("distance=") for setting in kept):
            kept.append(f"distance={parts.distance}")
        if parts.prediction == "stride":
            kept.append("stride=2")
        return ":".join([name, "prediction=modelled", *kept]), True


def _weights(
    trace: Trace, files: Sequence[Path], kinds: Sequence[type[LearnedState]]
) -> tuple[dict[type[LearnedState], LearnedState], str, Selection | None]:
    """Given ones of the trace's model, and those that ship, for a trace of the demo model; what they learned from, and
    how this trace was parted, if that is it.
    """
    weights: dict[type[LearnedState], LearnedState] = {}
    notes, parted = [], None
    shape = ModelShape(*zip(*((layer.num_experts, layer.top_k) for layer in trace.manifest.layers), strict=True))
    shipped = [demo_predictor()] if trace.manifest.model == "demo" and demo_predictor().is_file() else []
    for path in (*files, *shipped):
        file = read_learned(path, *kinds)
        kind, about = type(file.learned), file.about
        if file.learned.shape != shape or kind in weights:
            continue
        weights[kind], source = file.learned, "requests that are not of this trace"
        if "trace" not in about:
            source = "what its file does not say"
        elif about["trace"] == trace.fingerprint:
            first, rest = map(int, str(about.get("split", "7:3")).split(":"))
            parted = parted or Selection(split=(first, rest), seed=int(about.get("seed", 0)))
            source = "its training part"
        notes.append(f"trained {kind.unit} learned from {source}")
    return weights, "; ".join(notes), parted


class _Watch:
    """Sees one run of the simulator: of each pass its end, its waiting and the bytes that were moved meanwhile."""

    def __init__(self) -> None:
        self.ends_ns: list[int] = []
        self.computing_ns: list[int] = []  # of each pass
        self.moved_ns: list[int] = []  # of each pass: the link was busy
        self._computing = self._moved = 0
        self._until_ns = 0  # some device has computed until then

    def begin_run(self, name: str) -> _Watch:
        return self

    def computed(self, label: str, layer: int, begin_ns: int, end_ns: int) -> None:
        self.took(begin_ns, end_ns)
        if label == "head":
            self.ends_ns.append(end_ns)
            self.computing_ns.append(self._computing)
            self.moved_ns.append(self._moved)
            self._computing = self._moved = 0

    def moved(self, span: Span, begin_ns: int, end_ns: int) -> None:
        self._moved += end_ns - begin_ns

    def took(self, begin_ns: int, end_ns: int) -> None:
        self._computing += max(0, end_ns - max(begin_ns, self._until_ns))
        self._until_ns = max(self._until_ns, end_ns)


@dataclass
class Lab:
    """What an experiment is given: one trace, and what a user asks for. Runs are made once."""

    subject: Subject
    options: ReproduceOptions
    arrivals: Arrivals | None = None  # of requests, recorded; None: they are made up
    progress: Callable[[str, int, int], None] | None = None
    _studies: dict[tuple[Any, ...], Study] = field(default_factory=dict)
    _cells: dict[tuple[Any, ...], Cell] = field(default_factory=dict)

    @property
    def trace(self) -> Trace:
        return self.subject.trace

    def parted(self) -> Schedule:
        """70 % of the requests to learn from, and the rest; as they were for the weights, where those learned from
        this trace.
        """
        selection = self.subject.learned_from or Selection(split=(7, 3), seed=self.options.seed)
        schedule = make_schedule(self.trace, selection)
        dice = Random(self.options.seed)
        dice.shuffle(schedule.training)
        dice.shuffle(schedule.test)
        return schedule

    def schedule(self, *, is_online: bool = False) -> Schedule:
        """Requests to learn from, as far as it takes, and `options.num_tokens` decoded tokens of the rest, each with an
        answer that leaves tokens for REQUESTS. Online, requests arrive with their whole answers, and nothing was
        learned.
        """
        parted = self.parted()
        if is_online:
            return Schedule([], *arriving(self.trace, parted.test, self._sampled_arrivals()))
        most = LEARNED_TOKENS // min(LEARNED_REQUESTS, len(parted.training))
        learned = [with_answer(self.trace, span, most) for span in parted.training]
        least = sum(span.num_rows for span in learned[:LEARNED_REQUESTS])
        num_learned = max(LEARNED_TOKENS, least) // (5 if self.options.quick else 1)
        num_tokens = self.options.num_tokens
        tests = [with_answer(self.trace, span, -(-num_tokens // REQUESTS)) for span in parted.test]
        return Schedule(first_rows(learned, num_learned), first_decoded(self.trace, tests, num_tokens))

    def _sampled_arrivals(self) -> Arrivals:
        dice = np.random.default_rng(self.options.seed)
        num = ONLINE_REQUESTS // (6 if self.options.quick else 1)
        if self.arrivals is None:
            times = np.cumsum(dice.exponential(MEAN_GAP_S * 1e9, num)).astype(np.int64)
            most = np.full(num, 1 << 30, np.int64)
            return Arrivals(times - times[0], most, most)
        chosen = np.sort(dice.choice(len(self.arrivals), min(num, len(self.arrivals)), replace=False))
        times = self.arrivals.times_ns[chosen]
        return Arrivals(times - times[0], self.arrivals.prompt_tokens[chosen], self.arrivals.output_tokens[chosen])

    def cells(self, experiment: Experiment) -> dict[tuple[str, str], Cell]:
        """Each system of an experiment at each point of its sweep."""
        sweep = experiment.sweep
        cells = {}
        for point in ("",) if sweep is None else sweep.points:
            changed = {sweep.name: point} if sweep and sweep.name in ("memory", "machine", "links") else {}
            for label, spec in experiment.systems.items():
                cells[str(point), label] = self.run(
                    self.named(spec, point),
                    memory=str(changed.get("memory", experiment.memory)),
                    machine=str(changed.get("machine", experiment.machine)),
                    links=float(changed.get("links", experiment.links)),
                    num_devices=experiment.num_devices,
                    is_online=experiment.is_online,
                )
        return cells

    def named(self, spec: Spec, point: object = "") -> str:
        return (spec if isinstance(spec, str) else spec(self)).replace("{at}", str(point))

    def run(
        self,
        system: str,
        *,
        memory: str = "25%",
        machine: str = "rtx3090",
        links: float = 1.0,
        num_devices: int = 1,
        is_online: bool = False,
    ) -> Cell:
        """What a system gives. Raises CannotRun for what the trace lacks and cannot be modelled."""
        parts = replace(get_system(system), name="", summary="")
        key = (parts, memory, machine, links, num_devices, is_online)
        if key not in self._cells:
            self._cells[key] = self._run(system, memory, self._study(machine, links, num_devices, is_online))
        return self._cells[key]

    def taught(self, system: str) -> Predictor | None:
        """The predictor of a system as it is after the training part."""
        study, parts = self._study("rtx3090", 1.0, 1, False), get_system(system)
        assert study.training is not None
        return study.training.predictor(parts, study.geometry_of(parts), Known())

    def _study(self, machine: str, links: float, num_devices: int, is_online: bool) -> Study:
        key = (machine, links, num_devices, is_online)
        if key not in self._studies:
            hardware = Hardware.read(machine)
            same = next((study for study in self._studies.values() if study.is_queued == is_online), None)
            schedule = same.schedule if same else self.schedule(is_online=is_online)
            self._studies[key] = Study(
                self.trace,
                schedule,
                replace(hardware, link=replace(hardware.link, nbytes_per_s=hardware.link.nbytes_per_s * links)),
                self.subject.layers,
                self.subject.dense,
                seed=self.options.seed,
                is_queued=is_online,
                num_devices=num_devices,
                progress=self.progress,
                training=same.training if same else TrainingPart(self.trace, schedule.training),
            )
        return self._studies[key]

    def _run(self, system: str, memory: str, study: Study) -> Cell:
        name, is_modelled = self.subject.fitted(system)
        parts, watch = get_system(name), _Watch()
        study.chrome = watch
        study.learned = None if parts.weights is None else self.subject.weights.get(parts.weights)
        if parts.keeps_everything:
            study = replace(study)  # it would not run again in another budget, and nothing would be seen
        facts = study.row(parts, Memory(memory))
        if facts["skipped"] is not None:
            raise CannotRun(facts["skipped"])
        return Cell(self._samples(study, facts, watch), facts, is_modelled)

    def _samples(self, study: Study, facts: Mapping[str, Any], watch: _Watch) -> dict[str, Sample]:
        """By request, in the order in which they begin."""
        if study.is_queued:
            latencies = [times["latency_s"] for times in facts["times_by_request"]]
            return {LATENCY.name: Sample.of(latencies), f"{LATENCY.name} p90": Sample.of(latencies, 90)}
        phases = [decode_passes(study.trace, span) for span in study.schedule.test]
        request_of = np.repeat(np.arange(len(phases)), [len(phase) for phase in phases])
        is_decode = np.concatenate(phases)

        def by_request(values: Any, counted: Any = None) -> Floats:
            weights = np.asarray(values, np.float64) if counted is None else np.where(counted, values, 0.0)
            sums: Floats = np.bincount(request_of, weights, minlength=len(phases)).astype(np.float64)
            return sums

        passes_s = np.diff([0, *watch.ends_ns]) / 1e9
        waiting_s = np.maximum(passes_s - np.array(watch.computing_ns) / 1e9, 0)
        num_decoded = by_request(is_decode)
        decode_s = by_request(passes_s, is_decode)
        busy_s = np.array(watch.moved_ns) / 1e9
        nbytes = busy_s * (facts["bytes_loaded"] / busy_s.sum() if busy_s.any() else 0.0)  # shared out by the time
        rates = np.array([rate or 0.0 for rate in facts["hit_rate_by_request"]])
        samples = {
            TPOT.name: Sample(decode_s, num_decoded),
            f"{TPOT.name} p90": Sample(decode_s, np.maximum(num_decoded, 1), 90),
            HITS.name: Sample(rates * num_decoded, num_decoded),
            WAITING.name: Sample(by_request(waiting_s, is_decode), decode_s),
            LOADED.name: Sample(by_request(nbytes), by_request(np.ones(len(passes_s)))),
        }
        if self.subject.has_prompts:
            samples[TTFT.name] = Sample(by_request(passes_s, ~is_decode), np.minimum(by_request(~is_decode), 1))
        if facts["prediction_accuracy"] is not None:
            samples[RIGHT.name] = Sample.of([facts["prediction_accuracy"]])
        return samples

    def assumed_share(self) -> float:
        """Of a token's time with LRU at a quarter of the memory: computing, which the machine's profile assumes."""
        return 1 - self.run("lru").samples[WAITING.name].value


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
