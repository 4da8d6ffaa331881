"""Measures how long the parts of a decode step take on one device (MoEpic, section 3.4.1)."""

from __future__ import annotations

from collections import deque
from statistics import median

from expertly.core.geometry import Geometry
from expertly.policies.moepic import Timing

_RECENT = 64
"""Steps of which the median is taken, so that a few slow ones do not move it."""


class StepTimes:
    """Times of the parts of a decode step on one device:

    - attention: from the end of a layer's experts (or the beginning of the pass) to the next layer's experts;
    - head: from the end of the last experts to the beginning of the next decode step;
    - experts: a layer's experts, without waits for transfers;
    - loads, a segment: from the request to the last arrival, in layers that waited.

    They are device times (`Moments`), told in order, on an accelerator some time after the host was there.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        layers = range(geometry.num_layers)
        self._attention: list[deque[int]] = [deque(maxlen=_RECENT) for _ in layers]
        self._experts: list[deque[int]] = [deque(maxlen=_RECENT) for _ in layers]
        self._segment: list[deque[float]] = [deque(maxlen=_RECENT) for _ in layers]
        self._segment_at_most: list[deque[float]] = [deque(maxlen=_RECENT) for _ in layers]
        self._head: deque[int] = deque(maxlen=_RECENT)
        self._last_ns: int | None = None  # the end of the experts before, or the beginning of the pass
        self._head_ns: int | None = None  # of the step before this pass

    def begin(self, now_ns: int, *_: int) -> None:
        """A pass begins."""
        self._head_ns = None if self._last_ns is None else now_ns - self._last_ns
        self._last_ns = now_ns

    def loaded(self, layer: int, num_segments: int, elapsed_ns: int, *, has_waited: bool) -> None:
        """A layer needed `num_segments` that were not resident: `elapsed_ns` is the time from the request to the last
        arrival. Without a wait (`has_waited` False) that is an upper bound: it may have arrived earlier.
        """
        times = self._segment if has_waited else self._segment_at_most
        times[layer].append(elapsed_ns / num_segments)

    def ran(self, layer: int, is_decode: bool, stall_ns: int, expert_ns: int, end_ns: int) -> None:
        """A layer's experts ended at `end_ns` after `expert_ns`, of which `stall_ns` were waits for transfers."""
        if is_decode:
            if self._last_ns is not None:
                self._attention[layer].append(max(0, end_ns - expert_ns - self._last_ns))
            if self._head_ns is not None:
                self._head.append(self._head_ns)
            self._experts[layer].append(max(0, expert_ns - stall_ns))
        self._head_ns = None
        self._last_ns = end_ns if is_decode else None

    @property
    def is_known(self) -> bool:
        """Whether each part has been measured in some layer."""
        return bool(self._head and any(self._experts) and (any(self._segment) or any(self._segment_at_most)))

    def timing(self) -> Timing:
        """Times of a decode step. A layer without measurements (of an encoder, or one that never waited) takes the
        median of the others. Where no layer ever waited, loads have their upper bounds.
        """
        geometry, layers = self._geometry, range(self._geometry.num_layers)
        nbytes = [geometry.segment_nbytes(layer) for layer in layers]
        loads = self._segment if any(self._segment) else self._segment_at_most
        per_nbyte = median(median(times) / size for times, size in zip(loads, nbytes, strict=True) if times)
        each_ns = [median(times) if times else size * per_nbyte for times, size in zip(loads, nbytes, strict=True)]
        return Timing.of(
            geometry,
            attention_ns=_medians(self._attention),
            moe_ns=_medians(self._experts),
            load_ns=[round(segment_ns * geometry.segments_per_expert) for segment_ns in each_ns],
            head_ns=round(median(self._head)),
        )


def _medians(of_layers: list[deque[int]]) -> list[int]:
    """Each layer's median; a layer without times has the median of the others', 0 where there are none."""
    medians = [median(times) if times else None for times in of_layers]
    known = [time_ns for time_ns in medians if time_ns is not None]
    usual = median(known) if known else 0
    return [round(usual if time_ns is None else time_ns) for time_ns in medians]
