"""Predictors that have seen the training part before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from copy import deepcopy

from expertly.core.geometry import Geometry
from expertly.core.observation import History, Want
from expertly.policies.known import Known
from expertly.policies.predictor import Predictor
from expertly.scheduler.system import System
from expertly.sim.rows import read_rows
from expertly.sim.workload import RowRange
from expertly.trace.reader import Trace

_BLOCK_ROWS = 1024
_NUM_KEPT = 8

_Key = tuple[str, int, tuple[tuple[str, str], ...]]


class Training:
    """Makes predictors, filled where they learn; systems that differ in something else share what was learned."""

    def __init__(self, trace: Trace, spans: Sequence[RowRange]) -> None:
        self._trace = trace
        self._spans = list(spans)
        self._filled: dict[_Key, Predictor] = {}  # as they are before a run

    def predictor(
        self,
        system: System,
        geometry: Geometry,
        known: Known,
        progress: Callable[[int, int], None] | None = None,
    ) -> Predictor | None:
        """The predictor of a system, None where it has none; `progress(rows learned from, in all)`."""
        predictor = system.predictor(geometry, known)
        if predictor is None or not self._spans or not learns(predictor):
            return predictor
        key = (system.prediction, system.distance, tuple(system.options_of("prediction").items()))
        if key not in self._filled:
            total = sum(span.num_rows for span in self._spans)
            num_rows = 0
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
        """Whether a predictor begins with what the training part shows; None where it would make no difference."""
        if predictor is None or not learns(predictor):
            return None
        num_requests = len({span.request for span in self._spans})
        return f"filled from {num_requests} requests" if num_requests else "empty"


def learns(predictor: Predictor) -> bool:
    """Whether it makes anything of a training part."""
    return type(predictor).learn is not Predictor.learn


def histories(trace: Trace, spans: Sequence[RowRange], wants: Collection[Want]) -> Iterator[History]:
    """The rows of a training part, a block at a time, in the order of `spans`."""
    for span in spans:
        for rows in read_rows(trace, span.first_row, span.num_rows, _BLOCK_ROWS):
            yield rows.history(wants)
