"""Large tables of embeddings, which stay in the packed store: of each pass the rows are read that it looks up.

A third of some models' bytes are tables of which a token needs a few rows: embeddings of each layer, of n-grams, of a
large vocabulary. A module keeps its class and its forward; in place of a weight it has a StoredWeight.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import embedding
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.modeling_utils import str_to_torch_dtype

from expertly.core.errors import EngineClosedError, StoreError, TransferError
from expertly.core.geometry import PAGE_NBYTES, Geometry, LayerGeometry
from expertly.core.messages import Span
from expertly.formats import FORMATS
from expertly.formats.tiles import TILE_OUTPUTS, TiledFormat
from expertly.model.conversion import Conversion, Group
from expertly.model.hooks import CACHE, original_of
from expertly.model.structure import build_meta_model
from expertly.model.tiled import can_be_tiled, is_own
from expertly.store.manifest import IS_FLOAT, PACK_AGAIN
from expertly.store.packed import DENSE_NAME, LayerFile, PackedStore, tiles_name

TABLE_NBYTES = 256 << 20
"""A table of more is read by row."""

_IN_FLIGHT_NBYTES = 4 << 20
"""Most bytes of a look-up's reads under way at a time. Reads ahead of later look-ups have as much again."""

_NEAR_PAGES = 1
"""Rows with at most so many pages between them are one read."""

_BYTES = Geometry((LayerGeometry(1, 1, 1, 1, 2, 1, "bytes", 1, 1),))
"""To readers the file is one layer, whose "experts" and slots are single bytes."""


def _up(nbytes: int) -> int:
    """To whole pages."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


# -- which they are ----------------------------------------------------------------------------------------------------


def table_modules(model: PreTrainedModel) -> dict[str, Any]:
    """The large tables of a model on the meta device, by path: but for those that something else shares, as a head."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and module.weight.nbytes > TABLE_NBYTES
        and module.max_norm is None  # else looking up writes
        and is_own(model, path)
    }


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a packed store. Its units are rows, or blocks of 16 rows in a weight format."""

    path: str  # of its module
    names: tuple[str, ...]  # of the dense tensors that have its rows, one below another
    parts: tuple[Any, ...]  # these, as TensorInfo; as TensorSpec of a store that is planned
    format: TiledFormat | None
    num_columns: int
    scale_names: tuple[str, ...] = ()  # of parts in FP8
    scales: tuple[Any, ...] = ()  # one number for each part

    @property
    def rows_of_unit(self) -> int:
        return 1 if self.format is None else TILE_OUTPUTS

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def num_units(self) -> int:
        return sum(part.shape[0] for part in self.parts)

    @property
    def unit_nbytes(self) -> int:
        return self.nbytes // self.num_units

    @property
    def room_nbytes(self) -> int:
        """Most bytes of the buffer that a unit takes: its pages, and those between it and the unit before."""
        return (self.unit_nbytes // PAGE_NBYTES + 2 + _NEAR_PAGES) * PAGE_NBYTES

    def begins(self, units: Sequence[int]) -> list[int]:
        """Offsets of units in the file."""
        firsts, at = self._places(units)
        every = np.array([part.begin for part in self.parts])[at]
        return (every + (units - firsts[at]) * self.unit_nbytes).tolist()  # type: ignore[no-any-return]

    def _places(self, units: Sequence[int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The first unit of each part, and the part of each unit."""
        firsts = np.cumsum([0, *(part.shape[0] for part in self.parts[:-1])])
        return firsts, np.searchsorted(firsts, units, side="right") - 1

    def read_factors(self, path: Path) -> torch.Tensor | None:
        """The scale of each part in FP8 [parts], from the file. Raises OSError."""
        if not self.scales:
            return None
        with path.open("rb") as file:
            raw = [os.pread(file.fileno(), scale.nbytes, scale.begin) for scale in self.scales]
        dtypes = [str_to_torch_dtype[scale.dtype] for scale in self.scales]
        return torch.cat([torch.frombuffer(bytearray(r), dtype=d).float() for r, d in zip(raw, dtypes, strict=True)])

    def decode(
        self, read: np.ndarray[Any, Any], dtype: torch.dtype, units: Sequence[int], factors: torch.Tensor | None
    ) -> torch.Tensor:
        """Rows in `dtype` from the bytes of `units` [units, nbytes]. `factors`: see `read_factors`."""
        if self.format is not None:
            return self.format.decode(torch.from_numpy(read)).to(dtype)
        rows = torch.from_numpy(read).view(str_to_torch_dtype[self.parts[0].dtype])
        if factors is not None:
            rows = rows.float() * factors[torch.from_numpy(self._places(units)[1])].unsqueeze(1)
        return rows.to(dtype)


_FP8 = "F8_E4M3"

SCALES = (".weight_scale", ".weight_scale_inv")
"""Endings of the scale of a tensor in FP8."""


class TableRows(NamedTuple):
    """Names of the tensors that have a table's rows, one below another, and of the scales of those in FP8."""

    names: tuple[str, ...]
    scales: tuple[str, ...]


def find_rows(group: Group | None, tensors: Mapping[str, Any], module: Any) -> TableRows | None:
    """Those of a group of the plain conversion; None where they are no rows that can be read one by one."""
    if group is None or len(group.sources) != 1:
        return None
    names = tuple(group.names)
    parts, dtypes = [tensors[name] for name in names], {tensors[name].dtype for name in names}
    is_joined = [(type(step).__name__, getattr(step, "dim", None)) for step in group.operations]
    if (
        is_joined not in ([], [("Concatenate", 0)])
        or {part.shape[1:] for part in parts} != {(module.embedding_dim,)}
        or sum(part.shape[0] for part in parts) != module.num_embeddings
    ):
        return None
    if dtypes <= {*IS_FLOAT}:
        return TableRows(names, ())
    stems = [name.removesuffix(".weight") for name in names]
    scales = [next((stem + end for end in SCALES if stem + end in tensors), "") for stem in stems]
    is_scaled = all(math.prod(tensors[name].shape) == 1 and tensors[name].dtype in IS_FLOAT for name in scales if name)
    return TableRows(names, tuple(scales)) if dtypes == {_FP8} and all(scales) and is_scaled else None


def find_tables(model: PreTrainedModel, tensors: Mapping[str, Any], formats: Mapping[str, str]) -> list[Table]:
    """The tables of a model on the meta device among the dense tensors of its store, which has layers in `formats`."""
    if not (modules := table_modules(model)):
        return []
    tables, (groups, _) = list[Table](), Conversion(model).groups(tensors)
    for path, module in modules.items():
        tiles, group = tiles_name(path), groups.get(f"{path}.weight")
        if tiles in tensors:
            if tensors[tiles].nbytes > TABLE_NBYTES or not can_be_tiled(model, path):
                form = FORMATS[formats[path]]
                tables.append(Table(path, (tiles,), (tensors[tiles],), form, module.embedding_dim))
        elif (rows := find_rows(group, tensors, module)) is not None:
            parts, scales = (tuple(tensors[name] for name in names) for names in rows)
            tables.append(Table(path, rows.names, parts, None, module.embedding_dim, rows.scales, scales))
    return tables


def without(tables: Sequence[Table], tensors: Mapping[str, Any]) -> dict[str, Any]:
    inside = {name for table in tables for name in (*table.names, *table.scale_names)}
    return {name: tensor for name, tensor in tensors.items() if name not in inside}


def tables_of(store: PackedStore) -> tuple[list[Table], PackedStore]:
    """The tables of a store, and the store as one whose dense part is the rest, which is what memory holds."""
    if store.dense_nbytes <= TABLE_NBYTES and not any(tensor.dtype == _FP8 for tensor in store.dense.values()):
        return [], store
    model = build_meta_model(store.folder, getattr(torch, store.manifest.dtype))
    tables = find_tables(model, store.dense, store.manifest.dense_formats)
    rest = without(tables, store.dense)
    for name, tensor in rest.items():
        if tensor.dtype == _FP8:  # loading it would ignore its scale
            raise StoreError(
                f"{store.folder}: tensor {name!r:.200} in FP8 is of no table that is read by row{PACK_AGAIN}"
            )
    return tables, replace(store, dense=rest)


# -- in place of weights -----------------------------------------------------------------------------------------------

_ABOUT = {
    *(getattr(torch.Tensor, name).__get__ for name in ("dtype", "device", "shape", "ndim", "layout", "requires_grad")),
    *(getattr(torch.Tensor, name).__get__ for name in ("is_cpu", "is_cuda", "is_meta", "nbytes", "itemsize", "grad")),
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point, torch.Tensor.__len__),
}
"""Functions that need no numbers of a table."""


class StoredWeight(torch.Tensor):
    """A table [rows, columns] in the store. A look-up reads the rows that it needs. Any other operation reads the whole
    table, as a copy: changing that changes nothing.
    """

    _is_hf_initialized = True  # transformers gives it no random values
    _look_up: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def like(cls, weight: torch.Tensor, device: torch.device | None = None) -> StoredWeight:
        number = torch.empty(1, dtype=weight.dtype, device=device or weight.device)
        return number.expand(weight.shape).as_subclass(cls)  # type: ignore[no-any-return, attr-defined]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is embedding and isinstance(args[1], cls) and kwargs.get("max_norm") is None:
            return args[1]._look_up(args[0])
        if func not in _ABOUT:
            args, kwargs = tree_map_only(cls, cls._whole, (args, kwargs))
            return func(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    def _whole(self) -> torch.Tensor:
        return self._look_up(torch.arange(self.shape[0], device=self.device))


def leave_in_store(model: nn.Module, paths: Sequence[str]) -> None:
    """Have loading a model on the meta device read nothing of these tables."""
    for path in paths:
        module: Any = model.get_submodule(path)
        weight = module.weight
        del module.weight
        module.weight = StoredWeight.like(weight)


class _Unchanged:
    """A KV cache to read: its updates do nothing."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return (lambda *args, **kwargs: None) if name.startswith("update") else getattr(self._cache, name)


class _Reads:
    """Reads of one file into a buffer: of a span its bytes from `expert` on, to the buffer's from `slot` on."""

    def __init__(self, path: Path, nbytes: int, readers: Any, check: Any) -> None:
        self.buffer = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        self._path, self._new_readers, self._check = path, readers, check
        self._in_flight, self._is_closed = set[Span](), False
        self._open()

    def _open(self) -> None:
        self.about = self._path.stat()
        file = LayerFile(self._path, 0, None, range(self.about.st_size))
        self._readers = self._new_readers(lambda layer: file, _BYTES, lambda layer: self.buffer.data)

    def close(self) -> None:
        self._is_closed = True
        self.drain()
        self._readers.close()

    def begin(self, spans: set[Span]) -> None:
        if self._is_closed:
            raise EngineClosedError("this model was unloaded; call expertly.load again")
        if self._readers.num_in_flight > len(self._in_flight):  # of what was interrupted twice
            self._readers.drain()
        self._in_flight |= spans
        self._readers.submit(sorted(spans))

    def bring(self, new: set[Span], spans: set[Span]) -> None:
        """Read what is new, and wait for all of `spans`. Whatever it raises, afterwards nothing is in flight."""
        try:
            self.begin(new)
            while not self._in_flight.isdisjoint(spans):
                self._in_flight.discard(self._readers.wait())
            self._readers.waits.clear()
        except BaseException:  # also an interrupt: nothing writes into the buffer when it is used again
            self.drain()
            raise

    def drain(self) -> None:
        """End what is in flight."""
        if self._in_flight:
            self._in_flight.clear()
            self._readers.drain()

    def reopen(self) -> bool:
        """Open the file again if it was changed from outside, as by a copy of itself, and still has the bytes that it
        should have. Returns whether it was.
        """
        with contextlib.suppress(StoreError, OSError):
            if self._check is not None and self._path.stat().st_ctime_ns != self.about.st_ctime_ns:
                self._check()
                before = self._readers
                self._open()
                before.close()
                return True
        return False


class Tables:
    """The tables of one loaded model. Threads may look something up at the same time: their reads take turns."""

    def __init__(self, folder: Path, tables: Sequence[Table], readers: Any, check: Any, cache_nbytes: int = 0) -> None:
        """`readers`: the class of the readers. `check`: compares the file with its checksum, if it is to be compared,
        and raises StoreError. `cache_nbytes`: for rows that are kept, those that were used last.
        """
        self._tables, path = tables, folder / DENSE_NAME
        self._factors = [table.read_factors(path) for table in tables]
        self._most_nbytes = max(_IN_FLIGHT_NBYTES, *(table.room_nbytes for table in tables))  # of one batch of reads
        self._reads = _Reads(path, 2 * self._most_nbytes, readers, check)
        self._kept, self._kept_nbytes = OrderedDict[tuple[int, int], Any](), 0
        self._cache_nbytes = cache_nbytes
        self._hashing: list[Any] = []  # modules that look up what token ids and the KV cache say
        self._asking: int | None = None  # the thread in which these are asked before their turn
        self._ahead: dict[tuple[int, int], tuple[Span, int]] = {}  # units that they will look up, and where they are
        self._lock, self._process = threading.Lock(), os.getpid()

    def close(self) -> None:
        """End the threads and close the file. Idempotent."""
        if os.getpid() != self._process:  # a forked child, where somebody may hold the lock for ever
            return
        with self._lock:
            self._ahead.clear()
            self._reads.close()

    def bind(self, model: nn.Module, device: torch.device) -> None:
        """Let the modules of a model on `device` look up rows."""
        for number, table in enumerate(self._tables):
            module: Any = model.get_submodule(table.path)
            module.weight = weight = StoredWeight.like(module.weight, device)
            weight._look_up = partial(self.look_up, number, weight.dtype)
            holder = model.get_submodule(table.path.rpartition(".")[0])
            if [*inspect.signature(type(holder).forward).parameters][1:] == ["input_ids", CACHE]:
                self._hashing.append(holder)

    @contextlib.contextmanager
    def reading_ahead(self, token_ids: torch.Tensor | None, cache: Any) -> Iterator[None]:
        """While a pass over tokens [B, S] runs in the block, rows of n-grams are read from its begin, beside the layers
        before those that look them up; afterwards nothing is in flight.
        """
        try:
            if token_ids is not None:
                self._asking = threading.get_ident()
                for module in self._hashing:
                    original_of(type(module)).forward(module, token_ids, None if cache is None else _Unchanged(cache))
            self._asking = None
            yield
        finally:
            self._asking = None
            if os.getpid() == self._process:
                with self._lock:
                    self._ahead.clear()
                    self._reads.drain()

    def look_up(self, number: int, dtype: torch.dtype, ids: torch.Tensor) -> torch.Tensor:
        """Rows [..., columns] of a table for `ids` [...], on their device. Raises IndexError as torch, TransferError
        where they cannot be read.
        """
        if os.getpid() != self._process:
            raise EngineClosedError("this model was loaded before this process was forked; call expertly.load again")
        table, host = self._tables[number], ids.detach().cpu().reshape(-1)
        if host.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"ids of {ids.dtype}: must be int32 or int64")
        per = table.rows_of_unit
        # Of a size that depends on numbers: no program (model/programs.py) takes this for a part of it.
        units, places = torch.unique(host // per, return_inverse=True)
        if not len(host):
            return ids.new_empty(*ids.shape, table.num_columns, dtype=dtype)
        if int(units[0]) < 0 or int(units[-1]) >= table.num_units:
            raise IndexError("index out of range in self")  # torch's words
        if self._asking == threading.get_ident():
            with self._lock:
                self._read_ahead(number, units.tolist())
            return ids.new_empty(*ids.shape, table.num_columns, dtype=dtype)
        rows, first = places * per + host % per, 0
        out = torch.empty(len(host), table.num_columns, dtype=dtype)
        for some in units.split(self._most_nbytes // table.room_nbytes):
            with self._lock:
                read = self._read(number, some.tolist())
            is_in = (rows >= first) & (rows < first + per * len(some))
            out[is_in] = table.decode(read, dtype, some.tolist(), self._factors[number])[rows[is_in] - first]
            first += per * len(some)
        return out.view(*ids.shape, table.num_columns).to(ids.device)

    def _read_ahead(self, number: int, units: list[int]) -> None:
        """Begin to read as many of them as there is room for."""
        ends = (_up(span.slot + span.num_segments) for span, _ in self._ahead.values())
        first = max(ends, default=self._most_nbytes)
        room = (2 * self._most_nbytes - first) // self._tables[number].room_nbytes
        absent = [unit for unit in units if (number, unit) not in self._kept][:room]
        places = self._places(number, absent, first)
        self._ahead.update({(number, unit): place for unit, place in places.items()})
        self._reads.begin({span for span, _ in places.values()})

    def _read(self, number: int, units: list[int]) -> np.ndarray[Any, Any]:
        """Bytes [units, nbytes]: kept ones, those that are read ahead, and the rest in one batch of reads."""
        nbytes = self._tables[number].unit_nbytes
        made, absent = np.empty((len(units), nbytes), np.uint8), dict[int, int]()
        for row, unit in enumerate(units):
            if (kept := self._kept.get((number, unit))) is None:
                absent[unit] = row
            else:
                made[row] = kept
                self._kept.move_to_end((number, unit))
        ahead = {unit: self._ahead[number, unit] for unit in absent if (number, unit) in self._ahead}
        places = self._places(number, [unit for unit in absent if unit not in ahead], 0)
        new = {span for span, _ in places.values()}
        spans = new | {span for span, _ in ahead.values()}
        try:
            self._reads.bring(new, spans)
        except BaseException as error:
            self._ahead.clear()  # which came to nothing
            if not isinstance(error, TransferError) or not self._reads.reopen():
                raise
            self._reads.bring(spans, spans)
        for unit, (_, offset) in (places | ahead).items():
            made[absent[unit]] = self._reads.buffer[offset : offset + nbytes]
            self._keep((number, unit), made[absent[unit]])
        return made

    def _places(self, number: int, units: list[int], slot: int) -> dict[int, tuple[Span, int]]:
        """Of each unit, what is read into the buffer from a slot on, and at which byte of the buffer it begins."""
        spans, places = list[Span](), list[tuple[int, int]]()
        table = self._tables[number]
        for begin in table.begins(units):
            first = begin // PAGE_NBYTES * PAGE_NBYTES
            end = min(_up(begin + table.unit_nbytes), self._reads.about.st_size)
            last = spans[-1] if spans else None
            if last is not None and 0 <= first - last.expert <= last.num_segments + _NEAR_PAGES * PAGE_NBYTES:
                spans[-1] = last._replace(num_segments=end - last.expert)
            else:
                spans.append(Span(0, first, 0, end - first, slot))
            slot = spans[-1].slot + spans[-1].num_segments
            places.append((len(spans) - 1, slot - end + begin))
        return {unit: (spans[at], offset) for unit, (at, offset) in zip(units, places, strict=True)}

    def _keep(self, key: tuple[int, int], unit: np.ndarray[Any, Any]) -> None:
        if unit.nbytes <= self._cache_nbytes:
            self._kept[key], self._kept_nbytes = unit.copy(), self._kept_nbytes + unit.nbytes
        while self._kept_nbytes > self._cache_nbytes:
            self._kept_nbytes -= self._kept.popitem(last=False)[1].nbytes
