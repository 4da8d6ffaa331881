"""How long the parts of a decode step take on one device, in the mean (MoEpic, section 3.4.1)."""

from __future__ import annotations

from expertly.policies.moepic import Timing
from expertly.scheduler.scheduler import Scheduler


class StepTimes:
    """Times of passes and what lies between them; those of experts and loads are in the scheduler's counters. They are
    device times (`Moments`), told in order, on an accelerator some time after the host was there.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._geometry = scheduler.geometry
        self._phases = [layer.decode for layer in scheduler.counters]
        self._num_steps = self._num_heads = 0
        self._steps_ns = self._heads_ns = 0
        self._last_ns: int | None = None  # the end of the pass before, if it decoded

    def passed(self, is_decode: bool, begin_ns: int, end_ns: int, _: int = 0) -> None:
        """A pass has run, head and sampling apart."""
        if is_decode:
            self._num_steps += 1
            self._steps_ns += end_ns - begin_ns
            if self._last_ns is not None:
                self._num_heads += 1
                self._heads_ns += begin_ns - self._last_ns
        self._last_ns = end_ns if is_decode else None

    @property
    def is_known(self) -> bool:
        """Whether steps followed each other, and some layer waited for a load."""
        return self._num_heads > 0 and self._waited_ns > 0 < self._awaited_nbytes

    @property
    def _waited_ns(self) -> int:
        return sum(phase.stall_ns for phase in self._phases)

    @property
    def _awaited_nbytes(self) -> int:
        return sum(phase.loaded_nbytes - phase.prefetched_nbytes for phase in self._phases)

    def timing(self) -> Timing:
        """Times of a decode step: experts without waits; loads by the time that was waited for a byte; what a layer
        takes before its experts is the same for all. A layer that never decoded (of an encoder) is as the others.
        """
        layers, phases = self._geometry.layers, self._phases
        experts_ns = [round((phase.expert_ns - phase.stall_ns) / self._num_steps) for phase in phases]
        num_running = sum(phase.expert_ns > 0 for phase in phases)
        usual = sum(experts_ns) // num_running
        dense_ns = max(0, self._steps_ns - sum(phase.expert_ns for phase in phases)) / self._num_steps
        per_nbyte = self._waited_ns / self._awaited_nbytes
        return Timing(
            [layer.top_k for layer in layers],
            attention_ns=[round(dense_ns / num_running)] * len(layers),
            moe_ns=[time_ns or usual for time_ns in experts_ns],
            load_ns=[round(per_nbyte * layer.expert_nbytes) for layer in layers],
            head_ns=self._heads_ns // self._num_heads,
        )
