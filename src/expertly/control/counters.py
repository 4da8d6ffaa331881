"""What happened, counted a layer and a phase (docs/conventions.md, Hit)."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from expertly.core.messages import Phase, RouterRan


@dataclass(slots=True)
class PhaseCounters:
    """One layer in one phase. Hits and misses are counted per (iteration, distinct expert)."""

    hits: int = 0
    partial_hits: int = 0
    misses: int = 0
    demanded_nbytes: int = 0
    hit_nbytes: int = 0
    loaded_nbytes: int = 0
    evicted_nbytes: int = 0
    stall_ns: int = 0
    expert_ns: int = 0  # the whole experts function, stalls included

    def add(self, other: PhaseCounters) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def demands(self) -> int:
        return self.hits + self.partial_hits + self.misses

    def rates(self) -> dict[str, float | None]:
        """Shares of the demands; None where nothing was demanded."""
        total, nbytes = self.demands, self.demanded_nbytes
        return {
            "hit_rate": self.hits / total if total else None,
            "partial_hit_rate": self.partial_hits / total if total else None,
            "byte_hit_rate": self.hit_nbytes / nbytes if nbytes else None,
        }


class LayerCounters:
    """The counters of one layer, by phase."""

    __slots__ = ("decode", "prefill")

    def __init__(self) -> None:
        self.prefill = PhaseCounters()
        self.decode = PhaseCounters()

    def of(self, phase: Phase) -> PhaseCounters:
        return self.decode if phase is Phase.DECODE else self.prefill

    def count_demand(
        self, router: RouterRan, missing: list[int], segments_here: list[int], expert_nbytes: int, num_segments: int
    ) -> None:
        """Count what real tokens demand, before anything is admitted.

        `missing`: positions in the router's list that are not wholly resident, `segments_here` of each how many
        segments are. Experts that only pad tokens chose do not count.
        """
        experts, decode = router.experts, sum(router.is_decode)
        if 0 < decode < len(experts) or not router.batch_tokens or 0 in router.num_tokens:
            here = dict(zip(missing, segments_here, strict=True))
            for position, num in enumerate(router.num_tokens):
                if num and router.batch_tokens:
                    phase = self.decode if router.is_decode[position] else self.prefill
                    _count(phase, 1, [here[position]] if position in here else [], expert_nbytes, num_segments)
        else:
            _count(self.decode if decode else self.prefill, len(experts), segments_here, expert_nbytes, num_segments)


def _count(phase: PhaseCounters, num: int, segments_here: list[int], expert_nbytes: int, num_segments: int) -> None:
    """`num` demands, of which those that are no hit have `segments_here` resident segments each."""
    phase.demanded_nbytes += num * expert_nbytes
    hits = num - len(segments_here)
    phase.hits += hits
    phase.hit_nbytes += hits * expert_nbytes
    for here in segments_here:
        if here:
            phase.partial_hits += 1
            phase.hit_nbytes += here * expert_nbytes // num_segments
        else:
            phase.misses += 1
