"""What moving experts and computing them on the host cost on one machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt


@dataclass(frozen=True, slots=True)
class Link:
    """A serial server of transfers: n spans submitted together have arrived after one latency and the sum of the times
    that each occupies it. With an infinite rate and no latency it is infinitely fast.
    """

    nbytes_per_s: Annotated[float, Gt(0)]
    latency_ns: Annotated[int, Ge(0)]  # from a span's submission until it moves, at the least: a busy link hides it

    def occupies_ns(self, nbytes: int) -> int:
        """How long a span of so many bytes keeps the link from serving the next one."""
        return round(nbytes / self.nbytes_per_s * 1e9)


@dataclass(frozen=True, slots=True)
class HostCompute:
    """How fast a host's processors compute experts from its memory while a link copies others out of it, and how fast
    the link is then.
    """

    nbytes_per_s: float  # of weights
    flops_per_s: float
    call_ns: int  # once a layer: hidden states come to the host, outputs go back
    link_slowdown: float  # how many times longer a copy takes meanwhile; at least 1
