"""Systems x budgets on one trace and one machine: what `expertly lab simulate` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Protocol

from expertly.core.errors import BudgetError, ConfigError
from expertly.core.geometry import DenseShape, Geometry, LayerGeometry, fitting_segments
from expertly.core.observation import Want
from expertly.core.resources import granted_cpus, parse_memory
from expertly.policies.known import Known
from expertly.policies.learned import LearnedState
from expertly.scheduler.budget import Budget, class_segment_nbytes, default_staging, split_budget
from expertly.scheduler.counters import PhaseCounters
from expertly.scheduler.systems import HOST_EVICTION, SYSTEMS, System, get_system
from expertly.scheduler.tier import Tier
from expertly_lab.baselines.systems import BOUNDS
from expertly_lab.sim.compute import ComputeModel, step_times
from expertly_lab.sim.future import Int32s, TraceFuture, next_uses
from expertly_lab.sim.hardware import Hardware
from expertly_lab.sim.link import Clock, SimulationWatcher, VirtualLink, VirtualLinks
from expertly_lab.sim.metrics import percentile
from expertly_lab.sim.processes import as_finished
from expertly_lab.sim.schedule import Schedule
from expertly_lab.sim.simulator import Simulator
from expertly_lab.sim.tiered import TieredLink
from expertly_lab.sim.training import TrainingPart, popularity
from expertly_lab.sim.workload import TraceWorkload
from expertly_lab.trace.reader import Trace

RATES = (
    *("hit_rate", "partial_hit_rate", "byte_hit_rate", "prediction_accuracy", "fetch_rate", "goodpred"),
    *("coverage", "accuracy", "timeliness", "recall"),
)

FIELDS = (
    *("system", "scope", "memory", "memory_bytes", "segments", *RATES),
    *("stall_share", "ttft_s", "tpot_s", "floor_tpot_s", "bytes_loaded"),
    *("prefetched_bytes", "wasted_bytes", "disk_bytes"),
    *("history", "predictor", "allocation", "skipped"),
    *("latency_s", "layers", "requests", "tokens", "hit_rate_by_request"),
    *("decode_iterations", "decode_stall_s", "times_by_request", "phases"),
)
"""The fields of a row; None where nothing was simulated, or the trace does not tell."""

WORTH_PROCESSES = 300_000
"""Layers to simulate, of all runs, from which on these share processes: a few seconds. Starting two takes 0.3 s."""

Progress = Callable[[str, int, int], None]
"""`progress(what, rows done, rows in all)`."""


class Timelines(Protocol):
    """Takes the events of runs."""

    def begin_run(self, name: str) -> SimulationWatcher | None:
        """The watcher of the run of this name, "SYSTEM, BUDGET"; None: nobody watches it."""


@dataclass(frozen=True, slots=True)
class Memory:
    """One budget as it was asked for: an amount, or a number of experts that every layer keeps."""

    label: str
    experts_per_layer: int | None = None

    def budget(self, geometry: Geometry, has_sizes: bool = True) -> Budget:
        """Raises BudgetError or ConfigError naming what does not fit. Where experts have no known sizes, only a share
        ("25%") is accepted.
        """
        num_experts = self.experts_per_layer
        if num_experts is None:
            if not has_sizes and not self.label.strip().endswith("%"):
                raise ConfigError(
                    f"memory={self.label!r}: the trace does not know its experts' sizes; accepted without them: a "
                    'share ("25%")'
                )
            nbytes = parse_memory(self.label, geometry.nbytes)
            if nbytes is None:
                raise ConfigError("memory='auto': there is no machine to ask; accepted: a share (\"25%\") or an amount")
            self._check_staging(geometry, nbytes, has_sizes)
            return split_budget(geometry, nbytes)
        most = min(layer.num_experts for layer in geometry.layers)
        if not 0 <= num_experts <= most:
            raise BudgetError(f"experts_per_layer={num_experts}: must be from 0 to the {most} experts of a layer")
        quota = num_experts * geometry.segments_per_expert
        kept = tuple(quota * geometry.size_classes.count(number) for number in range(geometry.num_size_classes))
        budget = Budget(0, tuple(default_staging(geometry)), kept, (quota,) * geometry.num_layers)
        return replace(budget, memory_nbytes=budget.kept_nbytes(geometry) + budget.staging_nbytes(geometry))

    def _check_staging(self, geometry: Geometry, nbytes: int, has_sizes: bool) -> None:
        """Raises BudgetError in the words of the user: bytes mean nothing where sizes are made up."""
        staging = zip(default_staging(geometry), class_segment_nbytes(geometry), strict=True)
        least = sum(slots * size for slots, size in staging)
        if nbytes < min(least, geometry.nbytes):
            percent = -(-10_000 * least // geometry.nbytes) / 100
            raise BudgetError(
                f"memory={self.label!r}: below the staging slots through which experts are streamed; the least is "
                f"{percent:.2f}% of the experts" + (f" ({least} bytes)" if has_sizes else "")
            )


_Ask = tuple[System, Memory, int, str]
"""The system of a row, its budget, P, and what to call the budget."""


@dataclass(slots=True)
class Study:
    """What all runs share. Without `layers` experts have no size: there are rates, but no bytes or times."""

    trace: Trace
    schedule: Schedule
    hardware: Hardware
    layers: tuple[LayerGeometry, ...] | None
    dense: DenseShape | None
    segments: int | None = None  # P; None: each system's own
    seed: int = 0
    is_queued: bool = False
    num_devices: int = 1  # over which experts are spread, each on a link of its own
    host_memory: str | None = None  # behind the device, filled from disk; None: it holds all experts
    learned: LearnedState | None = None  # of a predictor that was trained before
    taught: LearnedState | None = None  # to evictions, in place of what they find in the training part
    chrome: Timelines | None = None
    progress: Progress | None = None
    training: TrainingPart | None = None  # the schedule's, where studies share what is learned; None: one of its own
    wants: set[Want] = field(init=False, default_factory=set)
    """What the predictors of the systems that ran so far want to see."""
    _workload: TraceWorkload = field(init=False)
    _geometries: dict[int, Geometry] = field(init=False, default_factory=dict)  # by P
    _training: TrainingPart = field(init=False)
    _popularity: dict[int, int] = field(init=False)
    _next_uses: Int32s | None = field(init=False, default=None)
    _resident: dict[int, dict[str, Any]] = field(init=False, default_factory=dict)  # by P

    def __post_init__(self) -> None:
        self._workload = TraceWorkload(self.trace, self.schedule.test)
        self._training = self.training or TrainingPart(self.trace, self.schedule.training)
        self._popularity = popularity(self.trace, self.schedule.training, self.geometry)
        if self.layers is None and self.chrome is not None:
            raise ConfigError(
                "chrome_trace: the trace does not know its experts' sizes: no times; give a geometry, too"
            )

    @property
    def geometry(self) -> Geometry:
        """Cut into the segments that were asked for, otherwise in whole experts."""
        return self._cut(self.segments or 1)

    def geometry_of(self, system: System) -> Geometry:
        """Cut into the segments that were asked for, otherwise into the system's own."""
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

    def _budget(self, memory: Memory, num_segments: int) -> Budget:
        return memory.budget(self._cut(num_segments), self.layers is not None)

    def results(
        self, systems: Sequence[str], memories: Sequence[Memory], jobs: int | None = 1
    ) -> Iterator[list[dict[str, Any]]]:
        """For each budget the rows of the systems and, after them, of BOUNDS, for each P that the systems have. So many
        `jobs` run at once, each in its own process; None: as many as there are processors, where that saves time.

        Raises ConfigError for a system that does not exist or a budget that cannot be, before anything runs.
        """
        asked = {(system.name, self._num_segments(system)): system for system in map(get_system, systems)}
        runs = asked | self._bounds(asked)
        cuts = dict.fromkeys(num_segments for _, num_segments in runs)
        for memory in memories:
            for num_segments in cuts:
                self._budget(memory, num_segments)
        for (_, num_segments), system in runs.items():
            self._tier(system, self._cut(num_segments), Known(self._popularity, self.seed))
        asks = [
            (system, memory, num, memory.label if len(cuts) == 1 else f"{memory.label}, P = {num}")
            for memory in memories
            for (_, num), system in runs.items()
        ]
        made = self._rows(asks, jobs)
        for _ in memories:
            rows = {key: next(made) for key in runs}
            for (name, num_segments), row in rows.items():
                if name == "resident":
                    row["floor_tpot_s"] = row["tpot_s"]
                elif row["skipped"] is None:
                    resident, belady = (rows[bound, num_segments] for bound in ("resident", "belady-global"))
                    row["floor_tpot_s"] = self._floor_tpot_s(resident, belady)
            yield [*rows.values()]

    def _rows(self, asks: Sequence[_Ask], jobs: int | None) -> Iterator[dict[str, Any]]:
        if jobs is None:
            num_layers = self._workload.num_rows * self._workload.num_layers * len(asks)
            jobs = granted_cpus() if num_layers >= WORTH_PROCESSES else 1
        if min(jobs, len(asks)) == 1 or self.chrome is not None:  # who watches does so here
            for ask in asks:
                yield self._row(*ask)
            return
        settings = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.init}
        make = partial(Study, **(settings | {"progress": None}))
        label, num_rows = f"{min(jobs, len(asks))} processes", self._workload.num_rows
        if self.progress is not None:
            self.progress(label, 0, num_rows * len(asks))
        waiting: dict[int, dict[str, Any]] = {}  # by the number of what was asked
        num_given = 0
        for num_done, (number, (row, wants)) in enumerate(as_finished(jobs, make, _row_elsewhere, asks), 1):
            waiting[number] = row
            self.wants |= wants
            if self.progress is not None:
                self.progress(label, num_done * num_rows, num_rows * len(asks))
            while num_given in waiting:
                yield waiting.pop(num_given)
                num_given += 1

    def _bounds(self, asked: Mapping[tuple[str, int], System]) -> dict[tuple[str, int], System]:
        """For each P. Where no system has a cache a layer, belady is global, too."""
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
        """The row of one system and budget alone, without its distance from the bounds. Raises as `results`."""
        return self._row(system, memory, self._num_segments(system), memory.label)

    def _row(self, system: System, memory: Memory, num_segments: int, label: str) -> dict[str, Any]:
        geometry = self._cut(num_segments)
        if not system.keeps_everything:
            return self._simulated(system, memory, geometry, self._budget(memory, num_segments), label)
        if num_segments not in self._resident:  # whatever memory is asked for
            budget = split_budget(geometry, geometry.nbytes)
            self._resident[num_segments] = self._simulated(system, memory, geometry, budget, label)
        return self._resident[num_segments] | {"memory": memory.label}

    def _simulated(
        self, system: System, memory: Memory, geometry: Geometry, budget: Budget, label: str
    ) -> dict[str, Any]:
        row: dict[str, Any] = dict.fromkeys(FIELDS)
        row |= {"system": system.name, "scope": system.scope, "memory": memory.label}
        row |= {"segments": geometry.segments_per_expert, "skipped": self._missing(system)}
        if row["skipped"] is not None:
            return row
        simulator = self.simulate(system, budget, label, geometry)
        scheduler, metrics = simulator.scheduler, simulator.metrics
        prefill, decode = PhaseCounters(), PhaseCounters()
        for counters in scheduler.counters:
            prefill.add(counters.prefill)
            decode.add(counters.decode)
        row |= decode.rates()
        row |= {
            "requests": metrics.num_requests,
            "tokens": metrics.num_tokens,
            "hit_rate_by_request": [hits / num if num else None for hits, num in metrics.hits_by_request()],
            "allocation": system.allocation_facts(scheduler),
            "phases": {
                "prefill": _phase(prefill, has_sizes=self.layers is not None),
                "decode": _phase(decode, has_sizes=self.layers is not None),
            },
        }
        if simulator.predictor is not None:
            row |= {
                "history": self._training.history_of(simulator.predictor),
                "predictor": simulator.predictor.facts(),
                "layers": [
                    {"layer": layer, "goodpred": counters.decode.rates()["goodpred"]}
                    for layer, counters in enumerate(scheduler.counters)
                ],
            }
        if self.layers is not None:
            times = metrics.times_by_request(self.is_queued)
            row |= {
                "memory_bytes": budget.kept_nbytes(geometry) + budget.staging_nbytes(geometry),
                "bytes_loaded": prefill.loaded_nbytes + decode.loaded_nbytes,
                "prefetched_bytes": prefill.prefetched_nbytes + decode.prefetched_nbytes,
                "wasted_bytes": prefill.wasted_nbytes + decode.wasted_nbytes,
                "disk_bytes": simulator.link.disk_nbytes if isinstance(simulator.link, TieredLink) else None,
                "stall_share": metrics.stall_share,
                "ttft_s": metrics.ttft_s(self.is_queued),
                "tpot_s": metrics.tpot_s,
                "decode_iterations": metrics.num_decode_iterations,
                "decode_stall_s": metrics.decode_stall_ns / 1e9,
                "times_by_request": times,
                "latency_s": _distribution(sorted(time["latency_s"] for time in times)) if self.is_queued else None,
            }
        return row

    def notes(self) -> Iterator[str]:
        """What a reader must know about these numbers."""
        trace = self.trace
        if self.layers is None:
            yield "the trace does not know its experts' sizes: rates only; give --geometry for bytes and times"
            yield "rates of systems that load ahead (oracle, too) are those of a link that takes no time"
        elif self.dense is None:
            yield "the weights outside the experts are unknown: their time is only the profile's fixed part"
        if not trace.is_complete:
            yield "the recording was cut off; what there is of it is simulated"
        if "scores" in self.wants and not trace.has("probs"):
            yield "routing scores: the trace has the chosen experts' weights only; those of the others count as 0"
        if "embedding" in self.wants and not trace.has("embedding"):
            yield "the trace has no embeddings: predictors that search by them do without"
        elif "embedding" in self.wants and not trace.is_real("embedding"):
            yield f"embeddings: {trace.manifest.fields['embedding'].note or 'made up'}"

    def _missing(self, system: System) -> str | None:
        fields = self.trace.manifest.fields
        lacking = [name for name in system.needs if name != "future" and name not in fields]
        there = [fields[name] for name in system.needs if name in fields]
        made_up = [f"{info.name} ({info.note or 'made up'})" for info in there if not info.is_real]
        if lacking:
            has = ", ".join(fields)
            return f"system {system.name!r} needs {', '.join(lacking)}, which this trace lacks (it has {has})"
        if made_up:
            return f"system {system.name!r} needs what this trace does not really have: {', '.join(made_up)}"
        if system.weights is not None and not isinstance(self.learned, system.weights):
            return f"system {system.name!r} needs --predictor FILE{_made_by(system.weights)}"
        return None

    def simulate(self, system: System, budget: Budget, label: str = "", geometry: Geometry | None = None) -> Simulator:
        """Run one system from an empty cache. `label` names the budget, which is for `geometry`, in timelines."""
        geometry, future = geometry or self.geometry_of(system), None
        hardware = Hardware.read("infinite") if self.layers is None else self.hardware
        if "future" in system.needs:
            if self._next_uses is None:
                self._next_uses = next_uses(self._workload)
            future = TraceFuture(self._workload, geometry, self._next_uses)
        known = Known(self._popularity, self.seed, future, (self.learned, self.taught))
        known = self._training.known(system, geometry, known)
        scheduler = system.scheduler(geometry, system.budget(geometry, budget, known), known)
        name = system.name if system.keeps_everything else f"{system.name}, {label}"
        watcher = None if self.chrome is None else self.chrome.begin_run(name)
        clock, compute = Clock(), ComputeModel(hardware, geometry, self.dense)
        tier = self._tier(system, geometry, known)
        if tier is None:
            links = [VirtualLink(clock, hardware, geometry, watcher) for _ in range(self.num_devices)]
        else:
            links = [TieredLink(clock, hardware, geometry, tier, watcher)]
        tell = self.progress
        learning = None if tell is None else partial(tell, f"learning, {system.name}")
        predictor = self._training.predictor(system, geometry, known, learning)
        if predictor is not None:
            self.wants |= predictor.wants
        simulator = Simulator(
            scheduler,
            compute,
            clock,
            links[0] if len(links) == 1 else VirtualLinks(geometry, links),
            predictor=predictor,
            future=future,
            watcher=watcher,
            times=step_times(hardware, geometry, compute),
            loop=system.loop,
        )
        if system.keeps_everything:
            simulator.preload()
        iterations = self._workload.iterations() if future is None else future.iterations()
        total = self._workload.num_rows
        simulator.run(iterations, None if tell is None else lambda done: tell(name, done, total))
        return simulator

    def _tier(self, system: System, geometry: Geometry, known: Known) -> Tier | None:
        """The host memory that does not hold all experts. Raises ConfigError where it cannot be."""
        if self.host_memory is None:
            if system.host != HOST_EVICTION:
                raise ConfigError(f"system={system.name!r}: host={system.host}: of no use without host_memory")
            return None
        stated = f"host_memory={self.host_memory!r}"
        if self.layers is None:
            raise ConfigError(f"{stated}: the trace does not know its experts' sizes; give a geometry, too")
        if self.num_devices > 1:
            raise ConfigError(f"{stated}: it lies behind one device; accepted with {self.num_devices} devices: none")
        if self.hardware.disk is None:
            raise ConfigError(f"{stated}: hardware {self.hardware.name!r} has no [disk]; accepted: one that has")
        nbytes = parse_memory(self.host_memory, geometry.nbytes, "host_memory")
        if nbytes is None:
            raise ConfigError(f'{stated}: there is no machine to ask; accepted: a share ("50%") or an amount')
        return system.tier(geometry, nbytes, known)

    def _floor_tpot_s(self, resident: Mapping[str, Any], belady: Mapping[str, Any]) -> float | None:
        """The larger of computing alone and moving the bytes that the best replacement loads, in decode."""
        tpot_s, num_iterations = resident["tpot_s"], belady["decode_iterations"]
        if tpot_s is None or not num_iterations:
            return None
        nbytes = belady["phases"]["decode"]["bytes_loaded"]
        seconds = nbytes / (self.hardware.link.nbytes_per_s * self.num_devices)
        return float(max(tpot_s, seconds / num_iterations))


def _row_elsewhere(study: Study, ask: _Ask) -> tuple[dict[str, Any], set[Want]]:
    """A row in this process, and what its predictor wanted to see."""
    return study._row(*ask), study.wants


def _made_by(weights: type[LearnedState]) -> str:
    return f", which `expertly {weights.made_by}` makes" if weights.made_by else f" of {weights.unit}"


def _phase(counters: PhaseCounters, *, has_sizes: bool) -> dict[str, int | None]:
    """The counters of one phase, named as in `expertly.stats`; bytes are None where experts have no size."""
    nbytes = {
        "bytes_loaded": counters.loaded_nbytes,
        "prefetched_bytes": counters.prefetched_nbytes,
        "evicted_bytes": counters.evicted_nbytes,
    }
    return {
        "hits": counters.hits,
        "partial_hits": counters.partial_hits,
        "misses": counters.misses,
        **(nbytes if has_sizes else dict.fromkeys(nbytes)),
    }


def _distribution(rising: list[float]) -> dict[str, Any]:
    return {
        "mean": sum(rising) / len(rising) if rising else None,
        **{f"p{percent}": percentile(rising, percent) for percent in (50, 90, 95, 99)},
        "max": rising[-1] if rising else None,
        "sorted": rising,
    }
