"""How experts lie on disk, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass

from expertly.core.costs import CODECS, CodecCosts
from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.sim.coded import Coding
from expertly.sim.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Storage:
    """A codec of CODECS."""

    codec: str = "none"

    def check(self, hardware: Hardware, has_sizes: bool) -> None:
        """Raises ConfigError for what is unknown or would do nothing."""
        if self.codec not in CODECS:
            raise ConfigError(f"codec={self.codec!r}: unknown; accepted: {', '.join(CODECS)}")
        if self.codec == "none":
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

    def coding(self, hardware: Hardware) -> Coding | None:
        """None where nothing is compressed."""
        return None if self.codec == "none" else Coding(self.costs(hardware))


def has_host_tier(hardware: Hardware, geometry: Geometry) -> bool:
    """Whether a disk lies behind a host tier that does not hold everything."""
    return hardware.host_memory_nbytes is not None and hardware.host_memory_nbytes < geometry.nbytes
