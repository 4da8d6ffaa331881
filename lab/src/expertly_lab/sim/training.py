"""Lets predictors and policies learn from the training part of a trace, once for all systems."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import deepcopy

import numpy as np

from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.core.observation import History, Want
from expertly.policies.known import Known, RoutingObserver
from expertly.policies.prediction import Predictor
from expertly.policies.registry import ALLOCATIONS, EVICTIONS
from expertly.scheduler.systems import System
from expertly_lab.baselines.adapmoe import UsageTraining
from expertly_lab.sim.schedule import first_rows
from expertly_lab.sim.workload import RowRange, TraceWorkload, read_rows
from expertly_lab.trace.reader import Trace
from expertly_lab.trace.schema import NO_EXPERT, max_experts

_BLOCK_ROWS = 1024
_NUM_KEPT = 8

_Key = tuple[object, ...]


class TrainingPart:
    """The training part of a trace. Where it is empty, predictors start empty and policies are told nothing."""

    def __init__(self, trace: Trace, spans: Sequence[RowRange]) -> None:
        self.num_requests = len({span.request for span in spans})
        self._trace = trace
        self._spans = list(spans)
        self._filled: dict[_Key, Predictor] = {}  # as they are before a run
        self._taught: dict[_Key, object] = {}  # by a policy's training

    def predictor(
        self, system: System, geometry: Geometry, known: Known, progress: Callable[[int, int], None] | None = None
    ) -> Predictor | None:
        """The predictor of a system, taught by this part. `progress(rows learned from, rows in all)`."""
        predictor = system.predictor(geometry, known)
        if predictor is None or not self._spans or not _learns(predictor):
            return predictor
        key = _prediction_key(system)
        if key not in self._filled:
            total, num_rows = sum(span.num_rows for span in self._spans), 0
            for history in histories(self._trace, self._spans, predictor.wants):
                predictor.learn(history)
                num_rows += len(history.requests)
                if progress is not None:
                    progress(num_rows, total)
            if len(self._filled) >= _NUM_KEPT:
                del self._filled[next(iter(self._filled))]
            self._filled[key] = predictor
        self._filled[key] = self._filled.pop(key)  # the one that was asked for last goes last
        return deepcopy(self._filled[key])

    def history_of(self, predictor: Predictor | None) -> str | None:
        """What a predictor starts with, in words; None where a training part makes no difference to it."""
        if predictor is None or not _learns(predictor):
            return None
        return f"filled from {self.num_requests} requests" if self._spans else "empty"

    def known(self, system: System, geometry: Geometry, known: Known) -> Known:
        if not self._spans or system.keeps_everything:
            return known
        for policy in (EVICTIONS[system.eviction], ALLOCATIONS[system.allocation]):
            training = policy.training(geometry)
            if training is None:
                continue
            key = (policy, *(_prediction_key(system) if isinstance(training, UsageTraining) else ()))
            if key not in self._taught:
                self._taught[key] = self._look(training, system, geometry, known)
            known = known.giving(self._taught[key])
        return known

    def _look(self, training: RoutingObserver, system: System, geometry: Geometry, known: Known) -> object:
        """Where predictions are needed, the system's predictor runs beside the training part as it will beside the
        rest, but cold: a predictor that had learned from this part would be right too often.
        """
        if not isinstance(training, UsageTraining):
            teach(training, self._trace, self._spans)
            return training
        predictor, origin = None, f"{self.num_requests} requests"
        if system.prediction != "none":
            if "future" in system.needs:
                origin += "; what is predicted is not known of them, and counts as nothing"
            else:
                predictor = system.predictor(geometry, known)
        teach(training, self._trace, self._spans, predictor, training.predicted)
        return training.found(origin)


def popularity(trace: Trace, spans: Sequence[RowRange], geometry: Geometry) -> dict[int, int]:
    """Tokens that each expert served in these rows, for experts that served any."""
    no_expert = max_experts(trace.manifest.layers)
    counts = np.zeros((geometry.num_layers, no_expert + 1), dtype=np.int64)
    offsets = (np.arange(geometry.num_layers) * (no_expert + 1))[:, None]
    for span in spans:
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


def _learns(predictor: Predictor) -> bool:
    """Whether it learns from passes, so that it must see them all."""
    return type(predictor).learn is not Predictor.learn


def histories(trace: Trace, spans: Sequence[RowRange], wants: Collection[Want]) -> Iterator[History]:
    """The rows of a training part, a block at a time, in the order of `spans`."""
    for span in spans:
        for rows in read_rows(trace, span.first_row, span.num_rows, _BLOCK_ROWS):
            yield rows.history(wants)


def teach(
    training: RoutingObserver,
    trace: Trace,
    spans: Sequence[RowRange],
    predictor: Predictor | None = None,
    predicted: Callable[[Iterable[Prediction]], object] = list,
) -> None:
    """Let it watch these requests, as far as it needs them, and `predicted` what the predictor says of them."""
    first = first_rows(list(spans), training.max_rows)
    if not first:
        return
    for iteration in TraceWorkload(trace, first).iterations():
        if predictor is not None:
            predicted(predictor.begin_iteration(iteration.began(predictor.wants)))
        for router in iteration.layers:
            training.observe(router)
            if predictor is not None:
                predicted(predictor.router_ran(iteration.routed(router, predictor.wants)))
        if predictor is not None:
            predictor.end_iteration(True)


def _prediction_key(system: System) -> _Key:
    return (system.prediction, system.distance, *system.options_of("prediction").items())
