"""Systems x budgets on one trace and one machine: what `expertly simulate` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from expertly.core.errors import ConfigError
from expertly.core.geometry import DenseShape, Geometry, LayerGeometry, fitting_segments
from expertly.core.observation import Want
from expertly.policies.allocation.moepic import SplitPlan
from expertly.policies.known import Known
from expertly.policies.predictor.learned import LearnedWeights
from expertly.scheduler.budget import Budget, split_budget
from expertly.scheduler.counters import PhaseCounters
from expertly.scheduler.presets import SYSTEMS, get_system
from expertly.scheduler.system import System
from expertly.sim.chrome import Timelines
from expertly.sim.compute import compute_model
from expertly.sim.future import NextUses, TraceFuture
from expertly.sim.hardware import Hardware, Link, PredictorCosts
from expertly.sim.link import Clock, VirtualLink
from expertly.sim.memory import Memory
from expertly.sim.metrics import percentile
from expertly.sim.popularity import popularity
from expertly.sim.reuse_learning import ReuseOfTraining
from expertly.sim.schedule import Schedule
from expertly.sim.simulator import Simulator
from expertly.sim.step_times import step_times
from expertly.sim.storage import Storage, has_host_tier
from expertly.sim.training import Training
from expertly.sim.usage import UsageOfTraining
from expertly.sim.workload import Workload
from expertly.trace.reader import Trace

__all__ = ["BOUNDS", "MATCHERS", "RATES", "Memory", "Study"]

BOUNDS = ("belady", "belady-global", "oracle", "resident")
"""Run beside every system asked for."""

RATES = (
    *("hit_rate", "partial_hit_rate", "byte_hit_rate", "prediction_accuracy", "fetch_rate", "goodpred"),
    *("coverage", "accuracy", "timeliness", "recall"),
    *("similarity_correlation_semantic", "similarity_correlation_trajectory"),
)

MATCHERS = ("virtual", "inline")
"""Predictors take the hardware's time, or none."""

_NO_TIME = Hardware(
    name="no time",
    memory_nbytes_per_s=float("inf"),
    flops_per_s=float("inf"),
    efficiency=1.0,
    launch_ns=0,
    layer_ns=0,
    iteration_ns=0,
    link=Link(float("inf"), 0, 0),
    disk=None,
    host_memory_nbytes=None,
    compute=None,
    predictor=PredictorCosts(0, float("inf"), float("inf")),
)
"""What runs where experts have no known size."""

Progress = Callable[[str, int, int], None]
"""`progress(what, rows done, rows in all)`."""


@dataclass(slots=True)
class Study:
    """What all runs share. Where `layers` is None experts have no known size: there are rates, no bytes or times, and
    what is loaded ahead is there at once.
    """

    trace: Trace
    schedule: Schedule
    hardware: Hardware
    layers: tuple[LayerGeometry, ...] | None
    dense: DenseShape | None
    segments: int | None = None  # P; None: each system's own
    seed: int = 0
    is_queued: bool = False
    order: str | None = None  # instead of the systems' own; what is run beside them for comparison keeps its own
    matcher: str = "virtual"  # of MATCHERS; predictors that are told the future take no time in any case
    learned: LearnedWeights | None = None  # of a predictor that was trained before
    plan: SplitPlan | None = None  # of the systems that take one
    chrome: Timelines | None = None
    progress: Progress | None = None
    storage: Storage = field(default_factory=Storage)
    wants: set[Want] = field(init=False, default_factory=set)
    """What the predictors of systems that ran so far looked at."""
    _workload: Workload = field(init=False)
    _geometries: dict[int, Geometry] = field(init=False, default_factory=dict)  # by P
    _usage: UsageOfTraining = field(init=False)
    _learned_reuse: ReuseOfTraining = field(init=False)
    _popularity: dict[int, int] = field(init=False)
    _training: Training = field(init=False)
    _next_uses: NextUses | None = field(init=False, default=None)
    _resident: dict[int, _Outcome] = field(init=False, default_factory=dict)  # by P

    def __post_init__(self) -> None:
        self._workload = Workload(self.trace, self.schedule.test)
        self._training = Training(self.trace, self.schedule.training)
        self._usage = UsageOfTraining(self.trace, self.schedule.training)
        self._learned_reuse = ReuseOfTraining(self.trace, self.schedule.training)
        self._popularity = popularity(self.trace, self.schedule, self.geometry)
        self.storage.check(self.hardware, self.layers is not None)
        if self.layers is not None:
            compute_model(self.hardware, self.geometry, self.dense)  # does it know this geometry?
        elif self.plan is not None:
            raise ConfigError("plan: the trace does not know its experts' sizes, as a plan does; give a geometry, too")
        elif self.chrome is not None:
            raise ConfigError(
                "chrome_trace: the trace does not know its experts' sizes: no times; give a geometry, too"
            )

    @property
    def geometry(self) -> Geometry:
        """In whole experts, or the segments that were asked for."""
        return self._cut(self.segments or 1)

    def geometry_of(self, system: System) -> Geometry:
        """In the segments that were asked for, or the system's own."""
        return self._cut(self._num_segments(system))

    def _num_segments(self, system: System) -> int:
        if self.segments is not None:
            return self.segments
        return system.segments if self.layers is None else fitting_segments(self.layers, system.segments)

    def _cut(self, num_segments: int) -> Geometry:
        """Raises ConfigError where experts cannot be cut so."""
        if num_segments not in self._geometries:
            layers = self.layers
            if layers is None:  # any size will do, if P divides it
                layers = tuple(
                    LayerGeometry(layer.num_experts, layer.top_k, 1, num_segments, 2, 1)
                    for layer in self.trace.manifest.layers
                )
            self._geometries[num_segments] = Geometry(layers, num_segments)
        return self._geometries[num_segments]

    def results(self, systems: Sequence[str], memories: Sequence[Memory]) -> Iterator[dict[str, Any]]:
        """A row for each system and budget, those of BOUNDS behind the systems asked for, for each P that these have.

        Raises ConfigError for a system that does not exist or a budget that cannot be, before anything runs.
        """
        asked = {(system.name, self._num_segments(system)): system for system in map(get_system, systems)}
        for system in asked.values():
            system.ordered(self.order)
        runs = asked | self._bounds(asked)
        cuts = dict.fromkeys(num_segments for _, num_segments in runs)
        for memory in memories:
            for num_segments in cuts:
                memory.budget(self._cut(num_segments), self.layers is not None)
            for system in asked.values():
                self._check_plan(system, memory)
        for memory in memories:
            label = dict.fromkeys(cuts, memory.label)
            if len(cuts) > 1:
                label = {num_segments: f"{memory.label}, P = {num_segments}" for num_segments in cuts}
            outcomes: dict[tuple[str, int], _Outcome] = {}
            for (name, num_segments), system in runs.items():
                outcomes[name, num_segments] = self._outcome(system, memory, num_segments, label[num_segments])
            for (name, num_segments), outcome in outcomes.items():
                if outcome.row["skipped"] is None:
                    floor = outcome.row["tpot_s"]
                    if name != "resident":
                        resident, belady = (outcomes[bound, num_segments] for bound in ("resident", "belady-global"))
                        floor = self._floor_tpot_s(resident, belady)
                    outcome.row["floor_tpot_s"] = floor
                yield outcome.row

    def _check_plan(self, system: System, memory: Memory) -> None:
        if self.plan is not None and system.takes_plan:
            geometry = self.geometry_of(system)
            system.check_plan(self.plan, geometry, memory.budget(geometry, self.layers is not None))

    def _bounds(self, asked: Mapping[tuple[str, int], System]) -> dict[tuple[str, int], System]:
        """Those of BOUNDS, for each P of the systems asked for; per-layer Belady is of no use where none has layers."""
        bounds: dict[tuple[str, int], System] = {}
        for num_segments in dict.fromkeys(num_segments for _, num_segments in asked):
            beside = [system for (_, num), system in asked.items() if num == num_segments]
            scopes = {system.scope for system in beside if not system.keeps_everything}
            for name in BOUNDS:
                if (name, num_segments) not in asked:
                    is_global = name == "belady" and scopes == {"global"}
                    bound = replace(SYSTEMS[name], scope="global") if is_global else SYSTEMS[name]
                    bounds[name, num_segments] = bound
        return bounds

    def row(self, system: System, memory: Memory) -> dict[str, Any]:
        """The row of one system and budget alone: nothing says how far from the best it is. Raises as `results`."""
        self._check_plan(system, memory)
        return self._outcome(system, memory, self._num_segments(system), memory.label).row

    def _outcome(self, system: System, memory: Memory, num_segments: int, label: str) -> _Outcome:
        geometry = self._cut(num_segments)
        if not system.keeps_everything:
            budget = memory.budget(geometry, self.layers is not None)
            return self._simulated(system, memory, geometry, budget, label)
        if num_segments not in self._resident:  # whatever memory is asked for
            budget = split_budget(geometry, geometry.nbytes)
            self._resident[num_segments] = self._simulated(system, memory, geometry, budget, label)
        resident = self._resident[num_segments]
        return replace(resident, row=resident.row | {"memory": memory.label})

    def _simulated(self, system: System, memory: Memory, geometry: Geometry, budget: Budget, label: str) -> _Outcome:
        row: dict[str, Any] = {
            "system": system.name,
            "scope": system.scope,
            "memory": memory.label,
            "memory_bytes": None,
            "segments": geometry.segments_per_expert,
            **dict.fromkeys(RATES),
            **dict.fromkeys(("stall_share", "ttft_s", "tpot_s", "floor_tpot_s", "bytes_loaded")),
            **dict.fromkeys(("prefetched_bytes", "wasted_bytes", "bytes_read")),
            **dict.fromkeys(("history", "predictor", "gate", "predictions_late", "contexts_dropped", "allocation")),
            "skipped": self._missing(system),
            **PhaseCounters().rates_by_distance(),
            **dict.fromkeys(("latency_s", "layers", "requests", "tokens", "hit_rate_by_request")),
            **dict.fromkeys(("decode_iterations", "decode_stall_s", "times_by_request")),
        }
        if row["skipped"] is not None:
            return _Outcome(row)
        simulator = self.simulate(system, budget, label, geometry)
        metrics = simulator.metrics
        prefill, decode = PhaseCounters(), PhaseCounters()
        for counters in simulator.scheduler.counters:
            prefill.add(counters.prefill)
            decode.add(counters.decode)
        row |= decode.rates()
        row["requests"], row["tokens"] = metrics.num_requests, metrics.num_tokens
        row["hit_rate_by_request"] = [hits / num if num else None for hits, num in metrics.hits_by_request()]
        if simulator.predictor is not None:
            row["history"] = self._training.history_of(simulator.predictor)
            row["predictor"] = simulator.predictor.facts()
            gate = simulator.scheduler.filter
            row["gate"] = None if gate is None else gate.facts()
            row["predictions_late"], row["contexts_dropped"] = simulator.num_late, simulator.num_dropped
            by_layer = enumerate(simulator.scheduler.counters)
            row["layers"] = [{"layer": layer, **one.decode.goodpred()} for layer, one in by_layer]
        row |= decode.rates_by_distance()
        row["allocation"] = system.sharing(simulator.scheduler)
        if self.layers is not None:
            row["memory_bytes"] = budget.kept_nbytes(geometry) + budget.ring_nbytes(geometry)
            row["bytes_loaded"] = prefill.loaded_nbytes + decode.loaded_nbytes
            row["prefetched_bytes"] = prefill.prefetched_nbytes + decode.prefetched_nbytes
            row["wasted_bytes"] = prefill.wasted_nbytes + decode.wasted_nbytes
            row["stall_share"] = metrics.stall_share
            row["ttft_s"], row["tpot_s"] = metrics.ttft_s(self.is_queued), metrics.tpot_s
            row["decode_iterations"] = metrics.num_decode_iterations
            row["decode_stall_s"] = metrics.decode_stall_ns / 1e9
            row["times_by_request"] = metrics.times_by_request(self.is_queued)
            if simulator.coded is not None:
                row["bytes_read"] = simulator.coded.read_nbytes
            if self.is_queued:
                row["latency_s"] = _distribution(list(metrics.latencies_s()))
        return _Outcome(row, decode.loaded_nbytes, metrics.num_decode_iterations)

    def _missing(self, system: System) -> str | None:
        fields = self.trace.manifest.fields
        lacking = [name for name in system.needs if name != "future" and name not in fields]
        there = [fields[name] for name in system.needs if name in fields]
        made_up = [f"{one.name} ({one.note or 'made up'})" for one in there if not (one.is_real or one.is_modelled)]
        if lacking:
            has = ", ".join(fields)
            return f"system {system.name!r} needs {', '.join(lacking)}, which this trace lacks (it has {has})"
        if made_up:
            return f"system {system.name!r} needs what this trace does not really have: {', '.join(made_up)}"
        if system.takes_weights and self.learned is None:
            return f"system {system.name!r} needs --predictor FILE, which `expertly train-predictor` makes"
        return None

    def simulate(self, system: System, budget: Budget, label: str = "", geometry: Geometry | None = None) -> Simulator:
        """Run one system from an empty cache to the end. `label` names the budget in progress and timelines. `budget`
        is of `geometry`, by default the system's.
        """
        geometry, future = geometry or self.geometry_of(system), None
        hardware = self.hardware if self.layers is not None else _NO_TIME
        if "future" in system.needs:
            self._next_uses = self._next_uses or NextUses(self._workload)
            future = TraceFuture(self._workload, geometry, self._next_uses)
        known = Known(self._popularity, self.seed, future, self.learned, plan=self.plan)
        order = None if system.name in BOUNDS else self.order
        known = replace(known, usage=self._usage.of(system, geometry, known))
        known = replace(known, reuse=self._learned_reuse.of(system, geometry))
        coding = None if system.keeps_everything else self.storage.coding(hardware)
        scheduler = system.scheduler(geometry, system.budget(geometry, budget, known), known, order)
        compute = compute_model(hardware, geometry, self.dense)
        clock = Clock()
        name = system.name if system.keeps_everything else f"{system.name}, {label}"
        run = None if self.chrome is None else self.chrome.begin_run(name)
        link = VirtualLink(clock, hardware, geometry, compute.load_ns, run, compute.submit_ns, coding)
        tell = self.progress
        learning = None if tell is None else partial(tell, f"learning, {system.name}")
        predictor = self._training.predictor(system, geometry, known, learning)
        if predictor is not None:
            self.wants |= predictor.wants
        costs = hardware.predictor if self.matcher == "virtual" and future is None else None
        simulator = Simulator(
            scheduler,
            compute,
            clock,
            link,
            predictor=predictor,
            costs=costs,
            future=future,
            watcher=run,
            times=step_times(geometry, link.brings, compute),
        )
        if system.keeps_everything:
            simulator.preload()
        total = self._workload.num_rows
        iterations = self._workload.iterations() if future is None else future.iterations()
        simulator.run(iterations, None if tell is None else lambda done: tell(name, done, total))
        return simulator

    def _floor_tpot_s(self, resident: _Outcome, belady: _Outcome) -> float | None:
        """What no system can beat in decode: computing alone, and the bytes of the best replacement over the link;
        where these are decoded, stored bytes are read.
        """
        if resident.row["tpot_s"] is None or not belady.num_decode_iterations:
            return None
        seconds = belady.decode_nbytes / self.hardware.link.nbytes_per_s
        if self.storage.codec != "none" and not has_host_tier(self.hardware, self.geometry):
            costs = self.storage.costs(self.hardware)
            read_nbytes = costs.ratio * belady.decode_nbytes
            decoding = belady.decode_nbytes / costs.all_nbytes_per_s
            seconds = max(read_nbytes / self.hardware.link.nbytes_per_s, decoding)
        return float(max(resident.row["tpot_s"], seconds / belady.num_decode_iterations))


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A row of the results, and what the floor is made of."""

    row: dict[str, Any]
    decode_nbytes: int = 0  # loaded
    num_decode_iterations: int = 0


def _distribution(rising: list[float]) -> dict[str, Any]:
    return {
        "mean": sum(rising) / len(rising) if rising else None,
        **{f"p{share}": percentile(rising, share) for share in (50, 90, 95, 99)},
        "max": rising[-1] if rising else None,
        "sorted": rising,
    }
