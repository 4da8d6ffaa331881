"""What moving experts costs on one machine."""

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
