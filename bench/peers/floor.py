"""What no cache of the same size could have done better: bytes that global Belady loads a token, on the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Floor:
    """Global Belady on a recorded trace, by the budget."""

    def __init__(self, folder: Path, layers: Any) -> None:
        from expertly_lab.sim.hardware import Hardware
        from expertly_lab.sim.schedule import Schedule
        from expertly_lab.sim.study import Study
        from expertly_lab.sim.workload import RowRange
        from expertly_lab.trace.reader import Trace

        trace = Trace.open(folder)
        spans = [RowRange(None, 0, trace.num_rows)]
        self._study = Study(trace, Schedule([], spans), Hardware.read("infinite"), tuple(layers), None, segments=1)
        self._found: dict[int, float] = {}

    def nbytes_a_token(self, memory_nbytes: int) -> float:
        """Of decode, over all requests, the cache empty at first."""
        if memory_nbytes not in self._found:
            from expertly.scheduler.systems import get_system
            from expertly_lab.sim.study import Memory

            budget = Memory(str(memory_nbytes)).budget(self._study.geometry)
            simulator = self._study.simulate(get_system("belady-global"), budget)
            loaded = sum(one.decode.loaded_nbytes for one in simulator.scheduler.counters)
            self._found[memory_nbytes] = loaded / simulator.metrics.num_decode_iterations
        return self._found[memory_nbytes]
