"""The numbers of the simulator's clock, in a TOML file that ships, that a user or `expertly lab machine` wrote."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from annotated_types import Ge, Gt, Le, MinLen, Predicate

from expertly.core.errors import ConfigError
from expertly.core.files import write_atomic
from expertly.core.untrusted import PROFILE, parse_as, read_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DESCRIPTION = {"extra": "forbid"}
"""The `__pydantic_config__` of what a TOML file describes."""

_DATA = Path(__file__).resolve().parent.parent / "data"
_T = TypeVar("_T")
_Nanoseconds = Annotated[int, Ge(0), Le(10**18)]


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
class Hardware:
    """One machine: a device that computes from its memory, the link that fills it, and the host."""

    __pydantic_config__: ClassVar[Any] = DESCRIPTION

    name: Annotated[str, MinLen(1), Predicate(str.isprintable)]
    link: Link  # into the device's memory: PCIe, or the disk where that memory is RAM
    expert_nbytes_per_s: Annotated[float, Gt(0)]  # weights, of experts and others, in a step of one token
    layer_ns: _Nanoseconds  # of one layer, beside its weights: launches, attention, router, control plane
    head_ns: _Nanoseconds  # of one step, beside what the head's weights take
    miss_ns: _Nanoseconds  # the host's time for each span that is loaded, beside the link's
    disk: Link | None = None  # into the host memory behind an accelerator, where that does not hold all experts

    @classmethod
    def read(cls, name_or_file: str) -> Hardware:
        """A shipped machine by its name, else a TOML file by its path. Raises ConfigError naming file and key."""
        again = "; `expertly lab machine MODEL --out FILE.toml` writes a new file"
        return read_toml("hardware", "profile", name_or_file, cls, again)

    def write(self, path: Path, comments: Sequence[str] = ()) -> None:
        """Replace `path` atomically by what `read` reads back. Raises ConfigError where it cannot be written."""
        import tomli_w

        head = "".join(f"# {' '.join(line.split())}\n" for line in comments)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, (head + tomli_w.dumps(self.as_dict())).encode())
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


def shipped(folder: str) -> dict[str, Path]:
    """The descriptions that ship, by name."""
    return {path.stem: path for path in sorted((_DATA / folder).glob("*.toml"))}


def read_toml(folder: str, noun: str, name_or_file: str, kind: type[_T], hint: str = "") -> _T:
    """What a shipped or another file describes; `folder` is also the name of the option. Raises as `Hardware.read`."""
    known = shipped(folder)
    path = known.get(name_or_file, Path(name_or_file))
    if not os.path.exists(path):
        accepted = f"{', '.join(known)}, or a TOML file"
        raise ConfigError(f"{folder}={name_or_file!r}: no such {noun} and no such file; accepted: {accepted}")
    text = read_text(path, PROFILE, ConfigError)
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError
        raise ConfigError(f"{path}: not TOML ({error})") from None
    return parse_as(kind, json.dumps(raw, default=str), str(path), ConfigError, hint)
