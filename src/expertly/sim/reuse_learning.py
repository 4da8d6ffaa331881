"""What a training part teaches about reuse, for an eviction policy that goes by it."""

from __future__ import annotations

from collections.abc import Sequence

from expertly.core.geometry import Geometry
from expertly.policies.eviction.reuse import ReuseModel
from expertly.scheduler.system import System
from expertly.sim.schedule import first_rows
from expertly.sim.workload import RowRange, Workload
from expertly.trace.reader import Trace

MOST_ROWS = 8192
"""Of the training part, its first: more teach little, and take seconds."""


class ReuseOfTraining:
    """Learned once for all systems."""

    def __init__(self, trace: Trace, spans: Sequence[RowRange]) -> None:
        self._trace = trace
        self._spans = spans
        self._found: ReuseModel | None = None

    def of(self, system: System, geometry: Geometry) -> ReuseModel | None:
        """None without a training part, or where the system's eviction makes nothing of it."""
        if not self._spans or system.keeps_everything or system.eviction_learns != ReuseModel.kind:
            return None
        if self._found is None:
            self._found = ReuseModel(geometry)
            teach(self._found, self._trace, self._spans)
        return self._found


def teach(model: ReuseModel, trace: Trace, spans: Sequence[RowRange]) -> None:
    """Let it see what these requests needed, the first MOST_ROWS of their rows. It is of the trace's model."""
    first = first_rows(list(spans), MOST_ROWS)
    if first:
        for iteration in Workload(trace, first).iterations():
            for router in iteration.layers:
                model.observe(router)
