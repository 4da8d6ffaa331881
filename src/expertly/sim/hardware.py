"""Machines and models as a simulation knows them: strict TOML files that ship, that users wrote or that `doctor`
wrote.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, cast, get_args, get_type_hints

from expertly.core.costs import CodecCosts, HostCompute, Link, MeasuredCompute
from expertly.core.errors import ConfigError, HardwareError
from expertly.core.files import write_atomic
from expertly.core.geometry import DenseShape, LayerGeometry
from expertly.core.untrusted import PROFILE, read_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HARDWARE_NAMES = (
    *("rtx3090", "rtx4090", "rtx4090-8core", "rtx4090-16core", "a5000", "a6000", "a100", "h100-pcie", "h200"),
    *("laptop-nvme", "infinite"),
)
"""The shipped machines."""

GEOMETRY_NAMES = (
    *("gpt-oss-20b", "gpt-oss-20b-mxfp4", "qwen3-30b-a3b-fp8", "qwen3-30b-a3b-int4", "deepseek-v3-fp8"),
    *("deepseek-v2-lite", "qwen1.5-moe", "mixtral-8x7b", "phi-3.5-moe"),
)
"""The shipped shapes of published models."""

NETWORK_NAMES = ("1GbE", "10GbE", "100GbE")
"""The shipped networks."""

_MAX_NUMBER = 10**18
_MAX_LAYERS = 10_000

_FROM_ONE = {
    *("host_memory_nbytes", "num_threads", "num_layers", "tokens", "threads"),
    *("num_experts", "top_k", "hidden_size", "intermediate_size", "num_matrices", "itemsize"),
}
"""Keys of whole numbers that cannot be 0."""

_FACTORS = {
    "efficiency": (0, 1),
    "ratio": (0, 2),
    "read_processors": (0, _MAX_NUMBER),
    "slowdown_while_loading": (1, 1000),
    "link_slowdown": (1, 1000),
}
"""The least and most of numbers that are no rates. Only `read_processors` may be 0."""

_DEFAULTED = {
    *("predictor", "prefetch_latency_ns", "prefetch_read_nbytes", "prefetches_when_called"),
    *("arrive_together", "prefetch_ns", "prefetch_each_ns"),
    *("observe_ns", "plan_ns", "decide_ns"),
    *("send_ns", "take_ns", "wake_ns", "threads_beside", "read_processors", "format", "block_size", "block_nbytes"),
}
"""Keys that may be missing, for fields that always have a value."""

_DATA = Path(__file__).resolve().parent.parent / "data"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PredictorCosts:
    """The host's time for predicting: one time for each observation, and the larger of reading and computing.

    The defaults are rounded from measurements of fMoE on one core of an Intel Xeon (docs/benchmarks.md): with 1000 maps
    42 us a layer of a decode row (41 by these), 0.42 ms a semantic search (0.70), for 512 rows 3.1 ms a layer and 79 ms
    an update (3.3 and 85); with 32000 maps 0.99 ms a layer (0.70).
    """

    call_ns: int = 20_000
    read_nbytes_per_s: float = 12e9
    flops_per_s: float = 20e9
    inline_ns: int | None = None  # where the pass itself predicts, for `call_ns` and `observe_ns`; None: `call_ns`
    light_ns: int | None = None  # in place of `call_ns` for what goes by counts alone; None: the same
    inline_light_ns: int | None = None  # in place of `inline_ns` for it; None: the same

    def work_ns(self, read_nbytes: int, flops: int) -> int:
        """The time for so many bytes read from memory and so many operations."""
        return round(max(read_nbytes / self.read_nbytes_per_s, flops / self.flops_per_s) * 1e9)


@dataclass(frozen=True, slots=True)
class Hardware:
    """One machine: a device that computes from its memory, the link that fills it, what lies behind that, and the
    host.
    """

    name: str
    memory_nbytes_per_s: float  # weights streamed by the computing device
    flops_per_s: float  # peak, dense, of the weights' 16-bit type
    efficiency: float  # of both, above 0 to 1: what kernels reach
    launch_ns: int  # fixed cost of computing one span of an expert
    layer_ns: int  # fixed cost of one layer: its kernels' launches, router, control plane
    iteration_ns: int  # fixed cost of one iteration
    link: Link  # into the device's memory: PCIe, or the disk where that memory is RAM
    disk: Link | None  # behind the host tier; None: nothing is, or everything fits
    host_memory_nbytes: int | None  # of the host tier, for experts; None: everything fits
    compute: MeasuredCompute | None
    predictor: PredictorCosts = PredictorCosts()
    codec: CodecCosts | None = None  # of the experts on disk; None: nobody measured it here
    host: HostCompute | None = None  # that computes missing experts beside the device; None: it does not
    format_nbytes_per_s: float | None = (
        None  # of experts in a weight format, decoded in products; None: as other weights
    )

    @classmethod
    def read(cls, name_or_file: str) -> Hardware:
        """A shipped machine by its name, else a TOML file by its path.

        Raises HardwareError naming the file, the key, its value and what is accepted.
        """
        return _read("hardware", "profile", HARDWARE_NAMES, name_or_file, cls)

    def write(self, path: Path, comments: Sequence[str] = ()) -> None:
        """Replace `path` atomically by what `read` reads back. Raises HardwareError where it cannot be written."""
        head = "".join(f"# {' '.join(line.split())}\n" for line in comments)
        text = head + "\n".join(_toml_lines(self.as_dict(), "")) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text.encode())
        except OSError as error:
            raise HardwareError(f"{path}: cannot be written ({error.strerror})") from None

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        if self.compute is not None:
            found["compute"]["layer"] = self.compute.layer.as_dict()
        return found

    def with_model(self, link: Link, compute: MeasuredCompute, predictor: PredictorCosts) -> Hardware:
        """The same machine with measurements of one model."""
        return replace(self, link=link, compute=compute, predictor=predictor)

    def with_disk(self, disk: Link) -> Hardware:
        """The same machine with another disk, which is the link where the weights are in RAM."""
        return replace(self, link=disk) if self.disk is None else replace(self, disk=disk)


@dataclass(frozen=True, slots=True)
class ClusterNetwork:
    """Between machines. Each has one link to all others, as fast in one direction as in the other."""

    name: str
    nbytes_per_s: float  # of a link, in one direction
    latency_ns: int  # one way, from the last byte sent until the other side has it
    call_ns: int  # of a call to a worker and its answer, beside the network; calls to several workers overlap
    send_ns: int = 0  # of these, until the next call can be made, and the local machine computes
    take_ns: int = 0  # of these, the local machine's for the answer, once it has computed its own part
    wake_ns: int = 0  # what the local machine takes longer after it has waited for an answer: it slept, caches are cold

    @classmethod
    def read(cls, name_or_file: str) -> ClusterNetwork:
        """A shipped network by its name, else a TOML file by its path. Raises HardwareError as `Hardware.read`."""
        return _read("network", "network", NETWORK_NAMES, name_or_file, cls)

    def takes_ns(self, nbytes: int) -> int:
        """How long so many bytes occupy a link."""
        return round(nbytes / self.nbytes_per_s * 1e9)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What a simulation needs to know of a model besides its routing, where the trace does not have it."""

    name: str
    num_layers: int
    layer: LayerGeometry
    dense: DenseShape | None

    @property
    def layers(self) -> tuple[LayerGeometry, ...]:
        return (self.layer,) * self.num_layers


def read_geometry(name_or_file: str) -> ModelSizes:
    """A shipped geometry by its name, else a TOML file by its path. Raises HardwareError as `Hardware.read`."""
    return _read("geometry", "geometry", GEOMETRY_NAMES, name_or_file, ModelSizes)


def _read(folder: str, what: str, names: Sequence[str], name_or_file: str, kind: type[_T]) -> _T:
    """`folder` is also the name of the option."""
    path = _DATA / folder / f"{name_or_file}.toml" if name_or_file in names else Path(name_or_file)
    if not os.path.exists(path):
        accepted = f"{', '.join(names)}, or a TOML file"
        raise HardwareError(f"{folder}={name_or_file!r}: no such {what} and no such file; accepted: {accepted}")
    text = read_text(path, PROFILE, HardwareError)
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError
        raise HardwareError(f"{path}: not TOML ({error})") from None
    return _parsed(kind, raw, str(path), "")


def _parsed(kind: type[_T], raw: Mapping[str, Any], where: str, prefix: str) -> _T:
    """The dataclass that a table describes: a key a field, checked by the field's type and name.

    Raises HardwareError naming the file, the key (with its tables, `prefix`), its value and what is accepted.
    """

    def refused(key: str, accepted: str) -> HardwareError:
        return HardwareError(f"{where}: {prefix}{key}={raw.get(key)!r:.80}: {accepted}")

    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, hint in hints.items():
        is_optional = NoneType in get_args(hint)
        hint = get_args(hint)[0] if is_optional else hint
        if key not in raw:
            if is_optional:
                values[key] = None
            elif key not in _DEFAULTED:
                raise HardwareError(f"{where}: lacks {prefix}{key}")
            continue
        value = raw[key]
        accepted, is_accepted = _accepted(hint, key)
        if not is_accepted(value):
            raise refused(key, accepted)
        if is_dataclass(hint):
            value = _parsed(cast(type, hint), value, where, f"{prefix}{key}.")
        values[key] = tuple(value) if isinstance(value, list) else float(value) if hint is float else value
    for key in raw:
        if key not in hints:
            raise refused(key, f"unknown key; accepted: {', '.join(hints)}")
    if kind is CodecCosts:
        values.setdefault("threads_beside", max(1, values["threads"] - 1))
    try:
        found = kind(**values)
    except ConfigError as error:
        raise HardwareError(f"{where}: {error}") from None
    if (problem := _contradiction(found)) is not None:
        raise refused(*problem)
    return found


def _accepted(hint: Any, key: str) -> tuple[str, Callable[[Any], bool]]:
    """What a value under this key, of a field of this type, must be: in words, and whether it is."""
    if hint is str:
        words = "must be a string of one line that is not empty"
        return words, lambda value: isinstance(value, str) and bool(value.strip()) and value.isprintable()
    if hint is bool:
        return "must be true or false", lambda value: isinstance(value, bool)
    if is_dataclass(hint):
        return "must be a table", lambda value: isinstance(value, dict)
    if hint is float and key in _FACTORS:
        low, high = _FACTORS[key]
        is_above = low == 0 and key != "read_processors"
        return (
            f"must be a number {'above' if is_above else 'from'} {low} to {high:g}",
            lambda value: type(value) in (int, float) and low <= value <= high and not (is_above and value == 0),
        )
    if hint is float:
        return (
            f"must be a number from 1 to {_MAX_NUMBER:.0e} or inf",
            lambda value: type(value) in (int, float) and (1 <= value <= _MAX_NUMBER or value == math.inf),
        )
    least = int(key in _FROM_ONE)
    numbers = "a whole number" if hint is int else "a list of whole numbers"

    def is_whole(value: Any) -> bool:
        return type(value) is int and least <= value <= _MAX_NUMBER

    return (
        f"must be {numbers} from {least} to {_MAX_NUMBER:.0e}",
        is_whole
        if hint is int
        else lambda value: isinstance(value, list) and value != [] and all(map(is_whole, value)),
    )


def _contradiction(found: object) -> tuple[str, str] | None:
    """The first key that contradicts another one, and what is accepted."""
    if isinstance(found, Hardware) and found.host_memory_nbytes is not None and found.disk is None:
        return "host_memory_nbytes", "a host tier that does not hold everything needs a [disk] behind it"
    if isinstance(found, Hardware) and found.host is not None and found.disk is None:
        return "host", "computes beside an accelerator, behind whose host memory is a [disk]"
    if isinstance(found, CodecCosts):
        if found.threads_beside > found.threads:
            return "threads_beside", f"at most the {found.threads} threads"
        if found.read_processors > found.threads:
            return "read_processors", f"must be a number from 0 to {found.threads}"
    if isinstance(found, ClusterNetwork) and found.take_ns > found.call_ns:
        return "take_ns", f"a part of call_ns={found.call_ns}"
    if isinstance(found, ModelSizes) and found.num_layers > _MAX_LAYERS:
        return "num_layers", f"must be at most {_MAX_LAYERS}"
    if isinstance(found, MeasuredCompute):
        if list(found.tokens) != sorted(set(found.tokens)):
            return "tokens", "must rise"
        for key in ("dense_ns", "head_ns", "expert_ns", "parts_ns", "part_ns"):
            if (num := len(getattr(found, key))) != len(found.tokens):
                return key, f"must have {len(found.tokens)} numbers, has {num}"
    return None


def _toml_lines(values: Mapping[str, Any], prefix: str) -> list[str]:
    """Strings, numbers, lists of them and tables; None is left out."""
    here = {key: value for key, value in values.items() if value is not None}
    lines = [f"{key} = {_literal(value)}" for key, value in here.items() if not isinstance(value, Mapping)]
    for key, value in here.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{prefix}{key}]", *_toml_lines(value, f"{prefix}{key}.")]
    return lines


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("", "\u007f")  # the escapes of JSON are TOML's
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(_literal, value))}]" if isinstance(value, Sequence) else repr(value)
