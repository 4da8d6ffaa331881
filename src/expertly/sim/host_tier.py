"""RAM between disk and link, as the engine keeps it: a least recently used cache of segments."""

from __future__ import annotations

from collections import OrderedDict

from expertly.core.geometry import Geometry
from expertly.core.messages import Span

_Key = tuple[int, int, int]  # layer, expert, segment


class HostTier:
    """Filled at the start, from the first layer on, for nothing. What is read can move on even where it cannot stay."""

    def __init__(self, geometry: Geometry, memory_nbytes: int) -> None:
        self._segment_nbytes = [geometry.segment_nbytes(layer) for layer in range(geometry.num_layers)]
        self._room = memory_nbytes
        self._held: OrderedDict[_Key, int] = OrderedDict()  # when it is there; oldest use first
        for layer, shape in enumerate(geometry.layers):
            nbytes = self._segment_nbytes[layer]
            for expert in range(shape.num_experts):
                for segment in range(geometry.segments_per_expert):
                    if nbytes > self._room:
                        return
                    self._held[layer, expert, segment] = 0
                    self._room -= nbytes

    def here_ns(self, span: Span, now_ns: int) -> int | None:
        """When all of a span is there, which is a use of it; None where something must be read."""
        if self.missing(span):
            return None
        return self._use(span, now_ns)

    def missing(self, span: Span) -> list[int]:
        """Segments to read."""
        return [key[2] for key in _keys(span) if key not in self._held]

    def read(self, span: Span, end_ns: int) -> int:
        """What was missing of a span has been read by then; when all of it is there."""
        for key in _keys(span):
            if key not in self._held:
                self._held[key] = end_ns
                self._room -= self._segment_nbytes[span.layer]
        here = self._use(span, end_ns)
        while self._room < 0:
            (layer, _, _), _ = self._held.popitem(last=False)
            self._room += self._segment_nbytes[layer]
        return here

    def _use(self, span: Span, now_ns: int) -> int:
        here = now_ns
        for key in _keys(span):
            self._held.move_to_end(key)
            here = max(here, self._held[key])
        return here


def segments_of(span: Span) -> range:
    """Those of an expert that a span is made of."""
    return range(span.segment, span.segment + span.num_segments)


def _keys(span: Span) -> list[_Key]:
    return [(span.layer, span.expert, segment) for segment in segments_of(span)]
