"""Measures how long the parts of a decode step take on one device (MoEpic, section 3.4.1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from expertly.core.geometry import Geometry
from expertly.policies.moepic import Timing

_RECENT = 64
"""Steps of which the median is taken, so that a few slow ones do not move it."""

_ENOUGH = 8
"""Spans of one size before their median is used."""

_STEPS = 16
"""After so many, spans of a second size are not waited for: they may never come."""


class StepTimes:
    """Times of the parts of a decode step on one device:

    - attention: from the end of a layer's experts (or the beginning of the pass) to the next layer's experts;
    - head: from the end of the last experts to the beginning of the next decode step;
    - experts: a layer's experts, without waits for transfers;
    - loads, a segment: from the request to the last arrival, in layers that waited;
    - a span's cost at size 0: by a straight line through the times of spans of several sizes.

    They are device times (`Moments`), told in order, on an accelerator some time after the host was there.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        layers = range(geometry.num_layers)
        self._attention: list[deque[int]] = [deque(maxlen=_RECENT) for _ in layers]
        self._experts: list[deque[int]] = [deque(maxlen=_RECENT) for _ in layers]
        self._segment: list[deque[float]] = [deque(maxlen=_RECENT) for _ in layers]
        self._segment_at_most: list[deque[float]] = [deque(maxlen=_RECENT) for _ in layers]
        self._asking: list[deque[int]] = [deque(maxlen=_RECENT) for _ in layers]
        self._spans: list[dict[int, deque[int]]] = [{} for _ in layers]  # by their number of segments
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

    def asked(self, layer: int, elapsed_ns: int) -> None:
        """Submitting a layer's loads took its thread this long."""
        self._asking[layer].append(elapsed_ns)

    def computed(self, layer: int, num_segments: int, elapsed_ns: int) -> None:
        """A span of `num_segments` of an expert was computed, for one token."""
        self._spans[layer].setdefault(num_segments, deque(maxlen=_RECENT)).append(elapsed_ns)

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

    @property
    def are_enough(self) -> bool:
        """Whether they are known, and what a span costs, too; after many steps nobody waits for that any more."""
        return self.is_known and (len(self._head) >= _STEPS or any(map(_knows_span, self._spans)))

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
            span_ns=_filled([_at_no_size(spans) for spans in self._spans]),
            ask_ns=_filled([median(times) if times else None for times in self._asking]),
        )


def _medians(of_layers: list[deque[int]]) -> list[int]:
    """Each layer's median; a layer without times has the median of the others'."""
    return _filled([median(times) if times else None for times in of_layers])


def _filled(of_layers: Sequence[float | None]) -> list[int]:
    """What is not known of a layer is the others' median; 0 where nothing is known of any."""
    known = [one for one in of_layers if one is not None]
    usual = median(known) if known else 0
    return [round(usual if one is None else one) for one in of_layers]


def _knows_span(spans: dict[int, deque[int]]) -> bool:
    return sum(len(times) >= _ENOUGH for times in spans.values()) > 1


def _at_no_size(spans: dict[int, deque[int]]) -> int | None:
    """The part of a span's time that does not depend on its size; None where fewer than two sizes are known."""
    if not _knows_span(spans):
        return None
    known = [(num, median(times), len(times)) for num, times in sorted(spans.items()) if len(times) >= _ENOUGH]
    weight = sum(num for _, _, num in known)
    mean_size = sum(size * num for size, _, num in known) / weight
    mean_ns = sum(time * num for _, time, num in known) / weight
    spread = sum(num * (size - mean_size) ** 2 for size, _, num in known)
    slope = sum(num * (size - mean_size) * (time - mean_ns) for size, time, num in known) / spread
    return max(0, round(mean_ns - slope * mean_size)) if slope > 0 else round(mean_ns)
