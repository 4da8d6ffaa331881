"""What a simulation knows of machines and models: strict TOML files, shipped, of users, or written by `doctor`."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from expertly.core.costs import CodecCosts, Link, MeasuredCompute
from expertly.core.errors import ConfigError, HardwareError
from expertly.core.files import write_atomic
from expertly.core.geometry import DenseShape, LayerGeometry

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["GEOMETRY_NAMES", "HARDWARE_NAMES", "Hardware", "Link", "ModelSizes", "PredictorCosts", "read_geometry"]

HARDWARE_NAMES = ("rtx3090", "rtx4090", "a5000", "a6000", "a100", "h100-pcie", "h200", "laptop-nvme", "infinite")
"""The shipped machines."""

GEOMETRY_NAMES = ("gpt-oss-20b", "deepseek-v2-lite", "qwen1.5-moe", "mixtral-8x7b", "phi-3.5-moe")
"""The shipped shapes of published models."""

MAX_NUMBER = 10**18
MAX_FILE_NBYTES = 1 << 20
MAX_LAYERS = 10_000

_DATA = Path(__file__).resolve().parent.parent / "data"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PredictorCosts:
    """What the host takes to predict: a time for each thing it is told, and the larger of reading and computing.

    The defaults are rounded from what `bench/matcher.py` measures of fMoE on one core of an Intel Xeon: with 1000 maps
    42 us a layer of a decode row (41 by these), 0.42 ms a semantic search (0.70), for 512 rows 3.1 ms a layer and 79 ms
    an update (3.3 and 85); with 32000 maps 0.99 ms a layer (0.70).
    """

    call_ns: int = 20_000
    read_nbytes_per_s: float = 12e9
    flops_per_s: float = 20e9

    def work_ns(self, read_nbytes: int, flops: int) -> int:
        """Of so many bytes read from memory and so many operations."""
        return round(max(read_nbytes / self.read_nbytes_per_s, flops / self.flops_per_s) * 1e9)


@dataclass(frozen=True, slots=True)
class Hardware:
    """One machine: a device that computes from its memory, the link that fills it, what lies behind, and the host."""

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

    @property
    def experts_come_from_disk(self) -> bool:
        """Whether the disk is in the way at all: it is the link, or lies behind a host tier that does not hold them."""
        return self.disk is None or self.host_memory_nbytes is not None

    @classmethod
    def read(cls, name_or_file: str) -> Hardware:
        """A shipped machine by its name, else a TOML file by its path.

        Raises HardwareError naming the file, the key, its value and what is accepted.
        """
        return _read("hardware", "profile", HARDWARE_NAMES, name_or_file, _hardware)

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
        return asdict(self)

    def with_model(self, link: Link, compute: MeasuredCompute) -> Hardware:
        """The same machine with what was measured of one model."""
        return replace(self, link=link, compute=compute)

    def with_disk(self, disk: Link) -> Hardware:
        """The same machine with another disk, which is the link where the weights are in RAM."""
        return replace(self, link=disk) if self.disk is None else replace(self, disk=disk)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What a simulation needs to know of a model besides its routing, where the trace does not say it."""

    name: str
    layers: tuple[LayerGeometry, ...]
    dense: DenseShape | None


def read_geometry(name_or_file: str) -> ModelSizes:
    """A shipped geometry by its name, else a TOML file by its path. Raises HardwareError as `Hardware.read`."""
    return _read("geometry", "geometry", GEOMETRY_NAMES, name_or_file, _model_sizes)


def _read(folder: str, kind: str, names: Sequence[str], name_or_file: str, read: Callable[[TomlTable], _T]) -> _T:
    """`folder` is also the name of the option."""
    path = _DATA / folder / f"{name_or_file}.toml" if name_or_file in names else Path(name_or_file)
    if not os.path.exists(path):
        accepted = f"{', '.join(names)}, or a TOML file"
        raise HardwareError(f"{folder}={name_or_file!r}: no such {kind} and no such file; accepted: {accepted}")
    table = TomlTable.read(path)
    found = read(table)
    table.end()
    return found


def _hardware(table: TomlTable) -> Hardware:
    hardware = Hardware(
        name=table.text("name"),
        memory_nbytes_per_s=table.rate("memory_nbytes_per_s"),
        flops_per_s=table.rate("flops_per_s"),
        efficiency=table.factor("efficiency", 0, 1),
        launch_ns=table.whole("launch_ns"),
        layer_ns=table.whole("layer_ns"),
        iteration_ns=table.whole("iteration_ns"),
        host_memory_nbytes=table.whole("host_memory_nbytes", 1) if table.has("host_memory_nbytes") else None,
        link=table.table("link", _link),
        disk=table.table("disk", _link) if table.has("disk") else None,
        compute=table.table("compute", _compute) if table.has("compute") else None,
        predictor=table.table("predictor", _predictor) if table.has("predictor") else PredictorCosts(),
        codec=table.table("codec", _codec) if table.has("codec") else None,
    )
    if hardware.host_memory_nbytes is not None and hardware.disk is None:
        raise table.fail("host_memory_nbytes", "a host tier that does not hold everything needs a [disk] behind it")
    return hardware


def _link(table: TomlTable) -> Link:
    return Link(table.rate("nbytes_per_s"), table.whole("latency_ns"), table.whole("overhead_ns"))


def _predictor(table: TomlTable) -> PredictorCosts:
    return PredictorCosts(table.whole("call_ns"), table.rate("read_nbytes_per_s"), table.rate("flops_per_s"))


def _codec(table: TomlTable) -> CodecCosts:
    ratio, rate, threads = table.factor("ratio", 0, 2), table.rate("decode_nbytes_per_s"), table.whole("threads", 1)
    beside = table.whole("threads_beside") if table.has("threads_beside") else max(1, threads - 1)
    if beside > threads:
        raise table.fail("threads_beside", f"at most the {threads} threads")
    has_reads = table.has("read_processors")
    read_processors = table.factor("read_processors", 0, threads, can_be_zero=True) if has_reads else 0.0
    return CodecCosts(ratio, rate, threads, beside, read_processors)


def _compute(table: TomlTable) -> MeasuredCompute:
    tokens = table.wholes("tokens", least=1)
    if list(tokens) != sorted(set(tokens)):
        raise table.fail("tokens", "must rise")
    of_tokens = ("dense_ns", "head_ns", "expert_ns", "parts_ns", "part_ns")
    return MeasuredCompute(
        model=table.text("model"),
        dtype=table.text("dtype"),
        num_threads=table.whole("num_threads", 1),
        context=table.whole("context"),
        num_layers=table.whole("num_layers", 1),
        layer=table.table("layer", _layer),
        tokens=tokens,
        **{name: table.wholes(name, len(tokens)) for name in of_tokens},
        submit_ns=table.whole("submit_ns"),
        load_ns=table.whole("load_ns"),
        slowdown_while_loading=table.factor("slowdown_while_loading", 1, 1000),
    )


def _model_sizes(table: TomlTable) -> ModelSizes:
    name, num_layers = table.text("name"), table.whole("num_layers", 1)
    if num_layers > MAX_LAYERS:
        raise table.fail("num_layers", f"must be at most {MAX_LAYERS}")
    layers = (table.table("layer", _layer),) * num_layers
    return ModelSizes(name, layers, table.table("dense", _dense) if table.has("dense") else None)


def _layer(table: TomlTable) -> LayerGeometry:
    """`itemsize` is whole bytes a weight: of weights of fewer bits state the type computed in."""
    names = ("num_experts", "top_k", "hidden_size", "intermediate_size", "num_matrices", "itemsize")
    values = {name: table.whole(name, 1) for name in names}
    try:
        return LayerGeometry(**values)
    except ConfigError as error:
        raise HardwareError(f"{table.where}: {error}") from None


def _dense(table: TomlTable) -> DenseShape:
    return DenseShape(table.whole("layer_nbytes"), table.whole("head_nbytes"))


class TomlTable:
    """One table of a file. Keys are taken one by one; `end` refuses those that nobody took.

    All methods raise HardwareError naming the file, the key, its value and what is accepted.
    """

    def __init__(self, where: str, raw: Mapping[str, Any], prefix: str = "") -> None:
        self.where = where
        self._raw = raw
        self._prefix = prefix
        self._taken: list[str] = []

    @classmethod
    def read(cls, path: Path) -> TomlTable:
        try:
            with path.open("rb") as file:
                text = file.read(MAX_FILE_NBYTES + 1)
        except OSError as error:
            raise HardwareError(f"{path}: cannot be read ({error.strerror})") from None
        if len(text) > MAX_FILE_NBYTES:
            raise HardwareError(f"{path}: more than {MAX_FILE_NBYTES} bytes: not a description")
        try:
            return cls(str(path), tomllib.loads(text.decode()))
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError and TOMLDecodeError are ValueErrors
            raise HardwareError(f"{path}: not TOML ({error})") from None

    def fail(self, key: str, accepted: str) -> HardwareError:
        """The error of a key whose value was read."""
        return HardwareError(f"{self.where}: {self._prefix}{key}={self._raw.get(key)!r:.80}: {accepted}")

    def has(self, key: str) -> bool:
        return key in self._raw

    def text(self, key: str) -> str:
        value = self._take(key)
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise self.fail(key, "must be a string of one line that is not empty")
        return value

    def whole(self, key: str, least: int = 0) -> int:
        value = self._take(key)
        if not _is_whole(value, least):
            raise self.fail(key, f"must be a whole number from {least} to {MAX_NUMBER:.0e}")
        return int(value)

    def wholes(self, key: str, length: int | None = None, least: int = 0) -> tuple[int, ...]:
        """A list of whole numbers, at least one."""
        values = self._take(key)
        if not isinstance(values, list) or not values or not all(_is_whole(value, least) for value in values):
            raise self.fail(key, f"must be a list of whole numbers from {least} to {MAX_NUMBER:.0e}")
        if length is not None and len(values) != length:
            raise self.fail(key, f"must have {length} numbers, has {len(values)}")
        return tuple(values)

    def rate(self, key: str) -> float:
        """A number a second, from 1 to infinity."""
        value = self._take(key)
        if not _is_number(value) or not (1 <= value <= MAX_NUMBER or value == math.inf):
            raise self.fail(key, f"must be a number from 1 to {MAX_NUMBER:.0e} or inf")
        return float(value)

    def factor(self, key: str, least: float, most: float, can_be_zero: bool = False) -> float:
        """A number from `least` (0 left out, unless it `can_be_zero`) to `most`."""
        value = self._take(key)
        if not _is_number(value) or not least <= value <= most or not (value or can_be_zero):
            begin = f"from {least:g}" if least or can_be_zero else "above 0"
            raise self.fail(key, f"must be a number {begin} to {most:g}")
        return float(value)

    def table(self, key: str, read: Callable[[TomlTable], _T]) -> _T:
        """What `read` makes of a table in this one."""
        value = self._take(key)
        if not isinstance(value, dict):
            raise self.fail(key, "must be a table")
        table = TomlTable(self.where, value, f"{self._prefix}{key}.")
        found = read(table)
        table.end()
        return found

    def end(self) -> None:
        """Nothing else may be in this table."""
        unknown = [key for key in self._raw if key not in self._taken]
        if unknown:
            raise self.fail(unknown[0], f"unknown key; accepted: {', '.join(self._taken)}")

    def _take(self, key: str) -> Any:
        self._taken.append(key)
        if key not in self._raw:
            raise HardwareError(f"{self.where}: lacks {self._prefix}{key}")
        return self._raw[key]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_NUMBER


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
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # the escapes of JSON are TOML's
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_literal, value))}]"
    return repr(value)
