"""What a machine can do, as `expertly doctor` measured it: plain data in a JSON file."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from expertly.core.costs import HostCompute
from expertly.core.errors import ConfigError
from expertly.core.files import from_json, write_atomic
from expertly.core.untrusted import read_json_object

FORMAT_VERSION = 2


@dataclass(frozen=True, slots=True)
class DiskRate:
    """Sustained random reads of `read_nbytes`, `depth` reader threads at work."""

    read_nbytes: int
    depth: int
    nbytes_per_s: float
    is_direct: bool  # False: through the page cache, which the file system forced


@dataclass(frozen=True, slots=True)
class DiskProfile:
    folder: str
    free_nbytes: int
    file_nbytes: int  # size of the file that was read
    write_nbytes_per_s: float
    reads: tuple[DiskRate, ...]


@dataclass(frozen=True, slots=True)
class ThreadsRate:
    """Bytes a second of all threads together: copied from RAM to RAM (not read + written), or of weights decoded."""

    num_threads: int
    nbytes_per_s: float


@dataclass(frozen=True, slots=True)
class MatvecRate:
    """Bytes of weights a second in matrix-vector products over more weights than any cache holds."""

    dtype: str
    num_threads: int
    nbytes_per_s: float


@dataclass(frozen=True, slots=True)
class DecodeProfile:
    """The codec `planes` on bfloat16 weights distributed as trained ones."""

    ratio: float  # stored bytes / bytes of weights
    rates: tuple[ThreadsRate, ...]


@dataclass(frozen=True, slots=True)
class LinkRate:
    """Copies of `nbytes` between pinned host memory and a device."""

    nbytes: int
    to_device_nbytes_per_s: float
    from_device_nbytes_per_s: float
    to_device_ns: int  # one copy, from the call until the host knows that it is done


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    device: str
    name: str
    memory_nbytes: int
    link: tuple[LinkRate, ...]
    host: HostCompute | None  # bfloat16 products on the host while it copies to this device; None: not measured


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """All measurements. `disk` is None where no file could be written."""

    created: str  # ISO 8601, UTC
    platform: str
    cpu: str
    num_cpus: int  # that this process may use
    cache_nbytes: int  # of the last level; 0 where unknown
    memory_nbytes: int
    available_nbytes: int  # to this process, control groups included
    versions: dict[str, str]
    disk: DiskProfile | None
    copies: tuple[ThreadsRate, ...]
    matvec: tuple[MatvecRate, ...]
    decoding: DecodeProfile
    devices: tuple[DeviceProfile, ...]
    format_version: int = FORMAT_VERSION

    def disk_nbytes_per_s(self, read_nbytes: int, depth: int | None = None) -> float:
        """The read rate at a size, interpolated between measured sizes; `depth` None: the best depth of each size.

        Raises ConfigError where the disk was not measured, or not at that depth.
        """
        best: dict[int, float] = {}
        for rate in self.disk.reads if self.disk else ():
            if depth is None or rate.depth == depth:
                best[rate.read_nbytes] = max(rate.nbytes_per_s, best.get(rate.read_nbytes, 0.0))
        if not best:
            raise ConfigError(f"machine profile: no disk read was measured at depth={depth}; run `expertly doctor`")
        sizes = sorted(best)
        if read_nbytes <= sizes[0] or read_nbytes >= sizes[-1]:
            return best[sizes[0] if read_nbytes <= sizes[0] else sizes[-1]]
        above = next(size for size in sizes if size >= read_nbytes)
        below = max(size for size in sizes if size <= read_nbytes)
        if above == below:
            return best[above]
        share = math.log2(read_nbytes / below) / math.log2(above / below)
        return best[below] + share * (best[above] - best[below])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def write(self, path: Path) -> None:
        """Replace `path` atomically. Raises ConfigError where it cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, (json.dumps(self.as_dict(), indent=1) + "\n").encode(), b'"format_version"')
        except OSError as error:
            raise ConfigError(f"machine profile {path}: cannot be written ({error.strerror})") from error

    @classmethod
    def read(cls, path: Path) -> MachineProfile:
        """Raises ConfigError where the file is missing, or a field is missing or of another type."""
        try:
            raw = read_json_object(path, ConfigError)
        except ConfigError as error:
            raise ConfigError(f"machine profile {error}; run `expertly doctor`") from None
        try:
            version = raw.get("format_version")
            if version != FORMAT_VERSION:
                raise ConfigError(f"format_version={version!r}, accepted: {FORMAT_VERSION}")
            for device in raw["devices"] if isinstance(raw.get("devices"), list) else ():
                if isinstance(device, dict):
                    device.setdefault("host", None)  # files that were written before December 2026
            profile: MachineProfile = from_json(cls, raw, "machine", ConfigError)
        except ConfigError as error:
            raise ConfigError(f"machine profile {path}: {error}; run `expertly doctor`") from None
        return profile
