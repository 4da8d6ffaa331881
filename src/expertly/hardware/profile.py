"""What a machine can do, as `expertly doctor` measured it: plain data in a JSON file."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from expertly.core.errors import ConfigError
from expertly.core.files import json_bytes, write_atomic
from expertly.core.untrusted import OWN_FILE, read_as


@dataclass(frozen=True, slots=True)
class DiskProfile:
    """Random reads: the rate of 4 MiB each, several in flight, and the time of one of 64 KiB alone."""

    folder: str
    free_nbytes: int
    nbytes_per_s: float
    latency_ns: int
    write_nbytes_per_s: float
    is_direct: bool  # False: through the page cache, which the file system forced


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """An accelerator. Rates of pinned host memory to it, and of its weights in products with one vector."""

    device: str
    name: str
    memory_nbytes: int
    link_nbytes_per_s: float
    link_latency_ns: int  # of 64 KiB, from the call until the host knows that it is there
    weights_nbytes_per_s: float


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """All measurements. `disk` is None where no file could be written."""

    __pydantic_config__: ClassVar[Any] = OWN_FILE

    created: str  # ISO 8601, UTC
    cpu: str
    num_cpus: int  # that this process may use
    memory_nbytes: int
    available_nbytes: int  # to this process, control groups included
    versions: dict[str, str]
    disk: DiskProfile | None
    weights_nbytes_per_s: float  # bfloat16 in RAM, in products with one vector
    devices: tuple[DeviceProfile, ...]
    format_version: Literal[4] = 4

    @property
    def storage(self) -> DiskProfile:
        """Raises ConfigError where the disk was not measured."""
        if self.disk is None:
            raise ConfigError("machine profile: no disk was measured; run `expertly doctor`")
        return self.disk

    def write(self, path: Path) -> None:
        """Replace `path` atomically. Raises ConfigError where it cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json_bytes(asdict(self)), b'"format_version"')
        except OSError as error:
            raise ConfigError(f"machine profile {path}: cannot be written ({error.strerror})") from error

    @classmethod
    def read(cls, path: Path) -> MachineProfile:
        """Raises ConfigError where the file is missing, or a field is missing or of another type."""
        return read_as(cls, path, ConfigError, "; run `expertly doctor`")
