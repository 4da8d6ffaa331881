"""How experts lie on disk, and which share of the memory holds them so: as it was asked for, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass

from expertly.core.amounts import parse_share
from expertly.core.codecs import CODECS
from expertly.core.costs import CodecCosts
from expertly.core.errors import BudgetError, ConfigError
from expertly.core.geometry import Geometry
from expertly.scheduler.budget import Budget, class_segment_nbytes, least_nbytes, split_budget
from expertly.scheduler.compressed_share import REUSES, Reuse, ShareChoice, choose_share
from expertly.sim.coded import Coding
from expertly.sim.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Storage:
    """A codec of CODECS, and the share of the memory that holds experts as they are stored: "30%", 0 or "auto". The
    memory is the host tier's where there is one, else that of the slots.
    """

    codec: str = "none"
    compressed: str = "0"

    def check(self, hardware: Hardware, has_sizes: bool) -> None:
        """Raises ConfigError for what is unknown or would do nothing."""
        if self.codec not in CODECS:
            raise ConfigError(f"codec={self.codec!r}: unknown; accepted: {', '.join(CODECS)}")
        share = parse_share(self.compressed)
        if self.codec == "none":
            if share != 0:
                raise ConfigError(f"compressed={self.compressed!r}: only with codec='planes'; accepted: 0")
            return
        if not has_sizes:
            raise ConfigError(f"codec={self.codec!r}: the trace does not know its experts' sizes; give a geometry, too")
        if not hardware.experts_come_from_disk:
            raise ConfigError(
                f"codec={self.codec!r}: on hardware {hardware.name!r} all experts lie decoded in host memory; "
                "accepted: none, or a profile whose host_memory_nbytes is less or whose link is the disk"
            )

    def costs(self, hardware: Hardware) -> CodecCosts:
        """As the profile has them, or assumed."""
        return hardware.codec or CodecCosts()

    def choose(
        self, hardware: Hardware, geometry: Geometry, budget: Budget, reuse: Reuse | None = None
    ) -> ShareChoice | None:
        """The share, and why; None where nothing is compressed. `reuse`: of the model, where it is known. Raises
        ConfigError.
        """
        if self.codec == "none":
            return None
        if has_host_tier(hardware, geometry):
            assert hardware.host_memory_nbytes is not None and hardware.disk is not None
            memory, disk = hardware.host_memory_nbytes, hardware.disk
            least = sum(class_segment_nbytes(geometry))
        else:
            memory, disk, least = budget.memory_nbytes, hardware.link, least_nbytes(geometry)
        share = parse_share(self.compressed)
        if share is not None:
            return ShareChoice(share, "it was asked for", 0.0)
        reuses = REUSES if reuse is None else [reuse]
        return choose_share(geometry.nbytes, memory, least, disk.nbytes_per_s, self.costs(hardware), reuses)

    def divide(
        self, hardware: Hardware, geometry: Geometry, budget: Budget, share: float
    ) -> tuple[Budget, Coding | None]:
        """What of a budget is slots, and the rest of it or of the host memory. Raises BudgetError where that is too
        little.
        """
        if self.codec == "none":
            return budget, None
        costs = self.costs(hardware)
        if has_host_tier(hardware, geometry):
            assert hardware.host_memory_nbytes is not None
            return budget, Coding(costs, int(hardware.host_memory_nbytes * share))
        if not share:
            return budget, Coding(costs)
        tier_nbytes = int(budget.memory_nbytes * share)
        try:
            return split_budget(geometry, budget.memory_nbytes - tier_nbytes), Coding(costs, tier_nbytes)
        except BudgetError as error:
            taken = f"compressed={self.compressed!r}: {tier_nbytes} of {budget.memory_nbytes} bytes stay compressed"
            raise BudgetError(f"{taken}; {error}") from None


def has_host_tier(hardware: Hardware, geometry: Geometry) -> bool:
    """Whether a disk lies behind a host tier that does not hold everything."""
    return hardware.host_memory_nbytes is not None and hardware.host_memory_nbytes < geometry.nbytes
