"""What the training part of a trace shows before anything runs, each looked at once for all systems that share it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace

import numpy as np

from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction
from expertly.core.observation import History, Want
from expertly.policies.allocation import ALLOCATIONS
from expertly.policies.allocation.adapmoe import StackDistances
from expertly.policies.eviction.reuse import ReuseModel
from expertly.policies.known import Known, Usage
from expertly.policies.predictor import Predictor
from expertly.scheduler.system import System
from expertly.sim.schedule import first_rows
from expertly.sim.workload import RowRange, TraceWorkload, read_rows
from expertly.trace.reader import Trace
from expertly.trace.schema import NO_EXPERT, max_experts

MOST_ROWS_OF_REUSE = 8192
"""Of the training part, its first, from which reuse is learned: more teach little, and take seconds."""

_BLOCK_ROWS = 1024
_NUM_KEPT = 8

_Key = tuple[object, ...]


class TrainingPart:
    """These rows of a trace. Without any, predictors begin empty and policies are told nothing."""

    def __init__(self, trace: Trace, spans: Sequence[RowRange]) -> None:
        self.num_requests = len({span.request for span in spans})
        self._trace = trace
        self._spans = list(spans)
        self._filled: dict[_Key, Predictor] = {}  # as they are before a run
        self._usage: dict[_Key, Usage] = {}
        self._reuse: ReuseModel | None = None

    def predictor(
        self, system: System, geometry: Geometry, known: Known, progress: Callable[[int, int], None] | None = None
    ) -> Predictor | None:
        """The predictor of a system, filled where it learns, None where it has none; `progress(rows learned from, in
        all)`.
        """
        predictor = system.predictor(geometry, known)
        if predictor is None or not self._spans or not predictor.is_taught():
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
        return deepcopy(self._filled[key])

    def history_of(self, predictor: Predictor | None) -> str | None:
        """What a predictor begins with, in words; None where a training part makes no difference to it."""
        if predictor is None or not predictor.is_taught():
            return None
        return f"filled from {self.num_requests} requests" if self._spans else "empty"

    def usage(self, system: System, geometry: Geometry, known: Known) -> Usage | None:
        """Of each layer's decode: the misses of every cache size, and what the system's predictor names. None without a
        training part, or where the system's allocation makes nothing of it.
        """
        if not self._spans or system.keeps_everything or not ALLOCATIONS[system.allocation].takes_usage:
            return None
        key = _prediction_key(system)
        if key not in self._usage:
            self._usage[key] = self._look(system, geometry, known)
        return self._usage[key]

    def reuse(self, system: System, geometry: Geometry) -> ReuseModel | None:
        """What is used again soon. None without a training part, or where the system's eviction makes nothing of it."""
        if not self._spans or system.keeps_everything or system.eviction_learns != ReuseModel.kind:
            return None
        if self._reuse is None:
            self._reuse = ReuseModel(geometry)
            teach(self._reuse, self._trace, self._spans)
        return self._reuse

    def _look(self, system: System, geometry: Geometry, known: Known) -> Usage:
        """Its predictor runs beside the training part as it will beside the rest, cold: what a predictor has learned
        from it would be right too often.
        """
        predictor = None if "future" in system.needs else system.predictor(geometry, replace(known, future=None))
        seen = [StackDistances(layer.num_experts) for layer in geometry.layers]
        newest: dict[int, Sequence[int]] = {}  # prediction of each layer
        num_needed, num_named = [0] * geometry.num_layers, [0] * geometry.num_layers

        def note(predictions: Iterable[Prediction]) -> None:
            newest.update((prediction.layer, prediction.experts) for prediction in predictions)

        for iteration in TraceWorkload(self._trace, self._spans).iterations():
            if predictor is not None:
                note(predictor.begin_iteration(iteration.began(predictor.wants)))
            for router in iteration.layers:
                every = zip(router.num_tokens, router.experts, router.is_decode, strict=True)
                decoding = [(num, expert) for num, expert, is_decode in every if num and is_decode]
                seen[router.layer].add(decoding)
                needed = {expert for _, expert in decoding}
                num_needed[router.layer] += len(needed)
                num_named[router.layer] += len(needed.intersection(newest.pop(router.layer, ())))
                if predictor is not None:
                    note(predictor.router_ran(iteration.routed(router, predictor.wants)))
            if predictor is not None:
                predictor.end_iteration(True)
        recall = tuple(named / max(1, needed) for named, needed in zip(num_named, num_needed, strict=True))
        origin = f"{self.num_requests} requests"
        if predictor is None and system.prediction != "none":
            origin += "; what is predicted is not known of them, and counts as nothing"
        return Usage(tuple(one.misses() for one in seen), recall, origin)


def popularity(trace: Trace, spans: Sequence[RowRange], geometry: Geometry) -> dict[int, int]:
    """Tokens that each expert served in these rows, of those that served any."""
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


def histories(trace: Trace, spans: Sequence[RowRange], wants: Collection[Want]) -> Iterator[History]:
    """The rows of a training part, a block at a time, in the order of `spans`."""
    for span in spans:
        for rows in read_rows(trace, span.first_row, span.num_rows, _BLOCK_ROWS):
            yield rows.history(wants)


def teach(model: ReuseModel, trace: Trace, spans: Sequence[RowRange]) -> None:
    """Let it see what these requests needed, the first MOST_ROWS_OF_REUSE of their rows. It is of the trace's model."""
    first = first_rows(list(spans), MOST_ROWS_OF_REUSE)
    if first:
        for iteration in TraceWorkload(trace, first).iterations():
            for router in iteration.layers:
                model.observe(router)


def _prediction_key(system: System) -> _Key:
    return (system.prediction, system.distance, *system.options_of("prediction").items())
