"""Systems x budgets on one trace and one machine: what `expertly simulate` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from expertly.control.budget import Budget, class_segment_nbytes, default_ring, split_budget
from expertly.control.counters import PhaseCounters
from expertly.core.amounts import parse_memory
from expertly.core.errors import BudgetError, ConfigError
from expertly.core.geometry import DenseShape, Geometry, LayerGeometry
from expertly.core.observation import Want
from expertly.parts import System
from expertly.policies.known import Known
from expertly.sim.chrome import ChromeTrace
from expertly.sim.compute import compute_model
from expertly.sim.future import NextUses, TraceFuture
from expertly.sim.hardware import Hardware, Link, PredictorCosts
from expertly.sim.link import Clock, VirtualLink
from expertly.sim.metrics import percentile
from expertly.sim.schedule import Schedule
from expertly.sim.simulator import Simulator
from expertly.sim.training import Training
from expertly.sim.workload import Workload
from expertly.systems import SYSTEMS, get_system
from expertly.trace.reader import Trace
from expertly.trace.schema import NO_EXPERT, max_experts

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


@dataclass(frozen=True, slots=True)
class Memory:
    """One budget, as it was asked for: an amount, or a number of experts that every layer keeps."""

    label: str
    experts_per_layer: int | None = None

    def budget(self, geometry: Geometry, has_sizes: bool = True) -> Budget:
        """Raises BudgetError or ConfigError naming what does not fit. Without sizes only shares can be cut."""
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
            self._check_ring(geometry, nbytes, has_sizes)
            return split_budget(geometry, nbytes)
        most = min(layer.num_experts for layer in geometry.layers)
        if not 0 <= num_experts <= most:
            raise BudgetError(f"experts_per_layer={num_experts}: must be from 0 to the {most} experts of a layer")
        shares = tuple(num_experts * geometry.segments_per_expert for _ in geometry.layers)
        kept = [0] * geometry.num_size_classes
        for size_class, share in zip(geometry.size_classes, shares, strict=True):
            kept[size_class] += share
        budget = Budget(0, tuple(default_ring(geometry)), tuple(kept), shares)
        return replace(budget, memory_nbytes=budget.kept_nbytes(geometry) + budget.ring_nbytes(geometry))

    def _check_ring(self, geometry: Geometry, nbytes: int, has_sizes: bool) -> None:
        """In the words of who asked: bytes say nothing where sizes are made up."""
        rings = zip(default_ring(geometry), class_segment_nbytes(geometry), strict=True)
        least = sum(slots * size for slots, size in rings)
        if nbytes < min(least, geometry.nbytes):
            percent = -(-10_000 * least // geometry.nbytes) / 100
            raise BudgetError(
                f"memory={self.label!r}: below the ring through which experts are streamed; the least is "
                f"{percent:.2f}% of the experts" + (f" ({least} bytes)" if has_sizes else "")
            )


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
    segments: int = 1
    seed: int = 0
    is_queued: bool = False
    order: str = "resident"
    matcher: str = "virtual"  # of MATCHERS; predictors that are told the future take no time in any case
    chrome: ChromeTrace | None = None
    progress: Progress | None = None
    wants: set[Want] = field(init=False, default_factory=set)
    """What the predictors of systems that ran so far looked at."""
    _workload: Workload = field(init=False)
    _geometry: Geometry = field(init=False)
    _popularity: dict[int, int] = field(init=False)
    _training: Training = field(init=False)
    _next_uses: NextUses | None = field(init=False, default=None)
    _resident: _Outcome | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._workload = Workload(self.trace, self.schedule.test)
        layers = self.layers
        if layers is None:  # any size will do, if every P divides it
            layers = tuple(
                LayerGeometry(layer.num_experts, layer.top_k, 1, self.segments, 2, 1)
                for layer in self.trace.manifest.layers
            )
        self._geometry = Geometry(layers, self.segments)
        self._training = Training(self.trace, self.schedule.training)
        self._popularity = popularity(self.trace, self.schedule, self._geometry)
        if self.layers is not None:
            compute_model(self.hardware, self._geometry, self.dense)  # does it know this geometry?
        elif self.chrome is not None:
            raise ConfigError(
                "chrome_trace: the trace does not know its experts' sizes: no times; give a geometry, too"
            )

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    def results(self, systems: Sequence[str], memories: Sequence[Memory]) -> Iterator[dict[str, Any]]:
        """A row for each system and budget, those of BOUNDS behind the systems asked for.

        Raises ConfigError for a system that does not exist or a budget that cannot be, before anything runs.
        """
        asked = list({system.name: system for system in map(get_system, systems)}.values())
        bounds = [SYSTEMS[name] for name in BOUNDS if name not in {system.name for system in asked}]
        scopes = {system.scope for system in asked if not system.keeps_everything}
        if scopes == {"global"}:
            bounds = [replace(system, scope="global") if system.name == "belady" else system for system in bounds]
        budgets = [memory.budget(self._geometry, self.layers is not None) for memory in memories]
        for memory, budget in zip(memories, budgets, strict=True):
            outcomes: dict[str, _Outcome] = {}
            for system in (*asked, *bounds):
                outcomes[system.name] = self._outcome(system, memory, budget)
            floor = self._floor_tpot_s(outcomes["resident"], outcomes["belady-global"])
            for name, outcome in outcomes.items():
                if outcome.row["skipped"] is None:
                    outcome.row["floor_tpot_s"] = outcome.row["tpot_s"] if name == "resident" else floor
                yield outcome.row

    def row(self, system: System, memory: Memory) -> dict[str, Any]:
        """The row of one system and budget alone: nothing says how far from the best it is. Raises as `results`."""
        return self._outcome(system, memory, memory.budget(self._geometry, self.layers is not None)).row

    def _outcome(self, system: System, memory: Memory, budget: Budget) -> _Outcome:
        if not system.keeps_everything:
            return self._simulated(system, memory, budget)
        if self._resident is None:  # whatever memory is asked for
            budget = split_budget(self._geometry, self._geometry.nbytes)
            self._resident = self._simulated(system, memory, budget)
        return replace(self._resident, row=self._resident.row | {"memory": memory.label})

    def _simulated(self, system: System, memory: Memory, budget: Budget) -> _Outcome:
        row: dict[str, Any] = {
            "system": system.name,
            "scope": system.scope,
            "memory": memory.label,
            "memory_bytes": None,
            "segments": self.segments,
            **dict.fromkeys(RATES),
            **dict.fromkeys(("stall_share", "ttft_s", "tpot_s", "floor_tpot_s", "bytes_loaded")),
            **dict.fromkeys(("prefetched_bytes", "wasted_bytes")),
            **dict.fromkeys(("history", "predictor", "predictions_late", "contexts_dropped")),
            "skipped": self._missing(system),
            **dict.fromkeys(("latency_s", "accuracy_by_distance", "requests", "tokens", "hit_rate_by_request")),
        }
        if row["skipped"] is not None:
            return _Outcome(row)
        geometry = self._geometry
        simulator = self.simulate(system, budget, memory.label)
        metrics = simulator.metrics
        prefill, decode = PhaseCounters(), PhaseCounters()
        for counters in simulator.controller.counters:
            prefill.add(counters.prefill)
            decode.add(counters.decode)
        row |= decode.rates()
        row["requests"], row["tokens"] = metrics.num_requests, metrics.num_tokens
        row["hit_rate_by_request"] = [hits / num if num else None for hits, num in metrics.hits_by_request()]
        if simulator.predictor is not None:
            row["history"] = self._training.history_of(simulator.predictor)
            row["predictor"] = simulator.predictor.facts()
            row["predictions_late"], row["contexts_dropped"] = simulator.num_late, simulator.num_dropped
        if decode.by_distance:
            row["accuracy_by_distance"] = {
                str(distance): needed / predicted
                for distance, (predicted, needed) in sorted(decode.by_distance.items())
                if predicted
            }
        if self.layers is not None:
            row["memory_bytes"] = budget.kept_nbytes(geometry) + budget.ring_nbytes(geometry)
            row["bytes_loaded"] = prefill.loaded_nbytes + decode.loaded_nbytes
            row["prefetched_bytes"] = prefill.prefetched_nbytes + decode.prefetched_nbytes
            row["wasted_bytes"] = prefill.wasted_nbytes + decode.wasted_nbytes
            row["stall_share"] = metrics.stall_share
            row["ttft_s"], row["tpot_s"] = metrics.ttft_s(self.is_queued), metrics.tpot_s
            if self.is_queued:
                row["latency_s"] = _distribution(list(metrics.latencies_s()))
        return _Outcome(row, decode.loaded_nbytes, metrics.num_decode_iterations)

    def _missing(self, system: System) -> str | None:
        lacking = [name for name in system.needs if name != "future" and not self.trace.has(name)]
        if not lacking:
            return None
        has = ", ".join(self.trace.manifest.fields)
        return f"system {system.name!r} needs {', '.join(lacking)}, which this trace lacks (it has {has})"

    def simulate(self, system: System, budget: Budget, label: str = "") -> Simulator:
        """Run one system from an empty cache to the end. `label` names the budget in progress and timelines."""
        geometry, future = self._geometry, None
        hardware = self.hardware if self.layers is not None else _NO_TIME
        if "future" in system.needs:
            self._next_uses = self._next_uses or NextUses(self._workload)
            future = TraceFuture(self._workload, geometry, self._next_uses)
        known = Known(self._popularity, self.seed, future)
        controller = system.controller(geometry, budget, known, self.order)
        compute = compute_model(hardware, geometry, self.dense)
        clock = Clock()
        name = system.name if system.keeps_everything else f"{system.name}, {label}"
        run = None if self.chrome is None else self.chrome.begin_run(name)
        link = VirtualLink(clock, hardware, geometry, compute.load_ns, run, compute.submit_ns)
        tell = self.progress
        learning = None if tell is None else partial(tell, f"learning, {system.name}")
        predictor = self._training.predictor(system, geometry, known, learning)
        if predictor is not None:
            self.wants |= predictor.wants
        costs = hardware.predictor if self.matcher == "virtual" and future is None else None
        simulator = Simulator(
            controller, compute, clock, link, predictor=predictor, costs=costs, future=future, watcher=run
        )
        if system.keeps_everything:
            simulator.preload()
        total = self._workload.num_rows
        iterations = self._workload.iterations() if future is None else future.iterations()
        simulator.run(iterations, None if tell is None else lambda done: tell(name, done, total))
        return simulator

    def _floor_tpot_s(self, resident: _Outcome, belady: _Outcome) -> float | None:
        """What no system can beat in decode: computing alone, and the bytes of the best replacement over the link."""
        if resident.row["tpot_s"] is None or not belady.num_decode_iterations:
            return None
        loading = belady.decode_nbytes / belady.num_decode_iterations / self.hardware.link.nbytes_per_s
        return float(max(resident.row["tpot_s"], loading))


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A row of the results, and what the floor is made of."""

    row: dict[str, Any]
    decode_nbytes: int = 0  # loaded
    num_decode_iterations: int = 0


def popularity(trace: Trace, schedule: Schedule, geometry: Geometry) -> dict[int, int]:
    """Tokens that each expert served in the training part; empty without one."""
    no_expert = max_experts(trace.manifest.layers)
    counts = np.zeros((geometry.num_layers, no_expert + 1), dtype=np.int64)
    offsets = (np.arange(geometry.num_layers) * (no_expert + 1))[:, None]
    for span in schedule.training:
        for block in trace.blocks(("experts",), span.first_row, span.first_row + span.num_rows):
            ids = block.columns["experts"].astype(np.int64)
            ids[ids == NO_EXPERT] = no_expert
            counts += np.bincount((ids + offsets).reshape(-1), minlength=counts.size).reshape(counts.shape)
    return {
        geometry.expert_id(layer, expert): int(counts[layer, expert])
        for layer in range(geometry.num_layers)
        for expert in range(geometry.layers[layer].num_experts)
        if counts[layer, expert]
    }


def _distribution(rising: list[float]) -> dict[str, Any]:
    return {
        "mean": sum(rising) / len(rising) if rising else None,
        **{f"p{share}": percentile(rising, share) for share in (50, 90, 95, 99)},
        "max": rising[-1] if rising else None,
        "sorted": rising,
    }
