"""Reading a trace: rows are mapped, never all in memory, and checked when they are read."""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from expertly.core.errors import TraceError
from expertly.core.untrusted import Bounds, read_text
from expertly_lab.trace.manifest import read_manifest
from expertly_lab.trace.schema import DTYPES, REQUESTS_NAME, Array, ShardInfo, TraceManifest, ValueChecks
from expertly_lab.trace.shards import map_shard

TOKEN_VECTOR_SIZE = 64

_REQUESTS = Bounds(1 << 31)
_NUM_MAPPED = 4
_SCAN_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request and its rows, which are adjacent unless another request ran meanwhile."""

    number: int
    category: str | None
    prompt: str | None
    num_prompt_tokens: int  # 0 where unknown
    first_row: int = 0
    num_rows: int = 0
    has_own_iterations: bool = True  # no iteration holds rows of another request


@dataclass(frozen=True, slots=True)
class TraceBlock:
    """Adjacent rows. `columns` holds the fields asked for, [num_rows, ...] each, read-only."""

    first_row: int
    num_rows: int
    columns: dict[str, Array]


class Trace:
    """An opened trace. Rows are numbered from 0; those of one iteration lie next to each other."""

    def __init__(self, folder: Path, manifest: TraceManifest, requests: list[TraceRequest]) -> None:
        self.folder = folder
        self.manifest = manifest
        self._requests = requests
        self._checks = ValueChecks(manifest.layers)
        self._mapped: OrderedDict[int, dict[str, Array]] = OrderedDict()
        self._starts = [shard.first_row for shard in manifest.shards]

    @classmethod
    def open(cls, folder: Path) -> Trace:
        """Open a trace, or the shards that there are of a recording that did not end.

        Raises TraceError naming the file and the field: another format or version, a shard that is missing or
        truncated, shapes or dtypes that disagree with the manifest. Values are checked when they are read.
        """
        manifest = read_manifest(folder)
        requests = _read_requests(folder / REQUESTS_NAME)
        for shard in manifest.shards:
            map_shard(folder, shard, manifest.stored_fields)
        return cls(folder, manifest, requests)

    def __reduce__(self) -> tuple[Callable[[Path], Trace], tuple[Path]]:
        return Trace.open, (self.folder,)  # another process maps the files itself

    @property
    def is_complete(self) -> bool:
        return self.manifest.is_complete

    @property
    def num_rows(self) -> int:
        return self.manifest.num_rows

    @property
    def num_iterations(self) -> int:
        return self.manifest.num_iterations

    @property
    def fingerprint(self) -> str:
        """Identifies a recording, wherever its folder is."""
        manifest = self.manifest
        text = repr((manifest.model, manifest.created, manifest.command, self.num_rows, self.num_iterations))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def requests(self) -> list[TraceRequest]:
        """All requests, by number. Finding their rows reads two small fields of the whole trace, once."""
        num_requests = len(self._requests)
        first = np.zeros(num_requests, np.int64)
        count = np.zeros(num_requests, np.int64)
        is_alone = np.ones(num_requests, bool)
        for block in self.blocks(("request", "iteration"), max_rows=_SCAN_ROWS):
            request, iteration = block.columns["request"], block.columns["iteration"]
            numbers, places, counts = np.unique(request, return_index=True, return_counts=True)
            is_new = count[numbers] == 0
            first[numbers[is_new]] = block.first_row + places[is_new]
            count[numbers] += counts
            starts = np.flatnonzero(np.diff(iteration, prepend=-1))
            is_mixed = np.minimum.reduceat(request, starts) != np.maximum.reduceat(request, starts)
            if is_mixed.any():
                is_alone[request[np.repeat(is_mixed, np.diff(starts, append=len(request)))]] = False
        found_rows = zip(self._requests, first.tolist(), count.tolist(), is_alone.tolist(), strict=True)
        return [
            dataclasses.replace(request, first_row=row, num_rows=num, has_own_iterations=alone)
            for request, row, num, alone in found_rows
        ]

    def has(self, field: str) -> bool:
        return field in self.manifest.fields

    def is_real(self, field: str) -> bool:
        """Whether the trace has the field and none of it was made up."""
        return self.has(field) and self.manifest.fields[field].is_real

    def rows(self, field: str, start: int, stop: int) -> Array:
        """Rows `[start, stop)` of a field, [stop - start, ...], read-only; a view of the file within a shard.

        Raises TraceError naming file, field and row where a value cannot be: an expert that its layer does not have
        or that is chosen twice, a number that is not finite, iterations that do not count up by one.
        """
        if field not in self.manifest.fields:
            has = ", ".join(self.manifest.fields)
            raise TraceError(f"{self.folder}: field {field!r}: not in this trace, which has {has}")
        if not 0 <= start <= stop <= self.num_rows:
            raise TraceError(f"{self.folder}: rows {start} to {stop}: must lie in the {self.num_rows} rows")
        info = self.manifest.fields[field]
        if not info.is_stored:
            return _frozen(token_vectors(self.rows("token", start, stop), info.shape[0]))
        parts = []
        index = max(bisect.bisect_right(self._starts, start) - 1, 0)
        while start < stop:
            part = self.manifest.shards[index]
            end = min(stop, part.first_row + part.num_rows)
            parts.append(self._checked(field, index, start - part.first_row, end - part.first_row))
            start, index = end, index + 1
        if len(parts) == 1:
            return parts[0]
        return _frozen(np.concatenate(parts) if parts else np.empty((0, *info.shape), DTYPES[field]))

    def blocks(
        self, fields: Sequence[str], start: int = 0, stop: int | None = None, max_rows: int = 4096
    ) -> Iterator[TraceBlock]:
        """Rows `[start, stop)` in order, in blocks of about `max_rows`, which never split an iteration.

        An iteration of more rows than that is one block. `start` and `stop` themselves are taken as they are.
        """
        stop = self.num_rows if stop is None else stop
        while start < stop:
            end = self._block_end(start, stop, max_rows)
            yield TraceBlock(start, end - start, {field: self.rows(field, start, end) for field in fields})
            start = end

    def _block_end(self, start: int, stop: int, max_rows: int) -> int:
        part = self.manifest.shards[bisect.bisect_right(self._starts, start) - 1]
        stop = min(stop, part.first_row + part.num_rows)  # a shard holds whole iterations
        if start + max_rows >= stop:
            return stop
        iteration = self.rows("iteration", start, start + max_rows + 1)
        end = int(np.searchsorted(iteration, iteration[-1]))
        if end > 0:
            return start + end
        iteration = self.rows("iteration", start, stop)
        return start + int(np.searchsorted(iteration, iteration[0], "right"))

    def _checked(self, field: str, index: int, start: int, stop: int) -> Array:
        part = self.manifest.shards[index]
        values = self._column(field, index)[start:stop]
        if field == "iteration":
            problem = _iteration_problem(values, part, start)
        else:
            problem = self._checks.problem(field, values, len(self._requests))
        if problem is not None:
            row, said = problem
            place = f"row {start + row} of the file, {part.first_row + start + row} of the trace"
            raise TraceError(f"{self.folder / part.file}: field {field!r}: {place}: {said}")
        return values

    def _column(self, field: str, index: int) -> Array:
        if index not in self._mapped:
            if len(self._mapped) >= _NUM_MAPPED:  # mapped pages that were read count as memory of the process
                self._mapped.popitem(last=False)
            self._mapped[index] = map_shard(self.folder, self.manifest.shards[index], self.manifest.stored_fields)
        self._mapped.move_to_end(index)
        return self._mapped[index][field]


def _iteration_problem(values: npt.NDArray[np.int64], part: ShardInfo, start: int) -> tuple[int, str] | None:
    """Iterations must count up by one within a shard."""
    if len(values) == 0:
        return None
    first, last = part.first_iteration, part.first_iteration + part.num_iterations - 1
    is_wrong = (values < first) | (values > last)
    is_wrong[1:] |= (values[1:] != values[:-1]) & (values[1:] != values[:-1] + 1)
    is_wrong[0] |= start == 0 and values[0] != first
    is_wrong[-1] |= start + len(values) == part.num_rows and values[-1] != last
    if not is_wrong.any():
        return None
    row = int(np.argmax(is_wrong))
    return row, f"{values[row]}: must count up by one, from {first} to {last} in this file"


def _read_requests(path: Path) -> list[TraceRequest]:
    """Raises TraceError naming the file, the line and the field."""
    *lines, rest = read_text(path, _REQUESTS, TraceError).split("\n")
    if rest:
        raise TraceError(f"{path}: line {len(lines) + 1}: truncated")
    return [_parse_request(f"{path}: line {number + 1}", line, number) for number, line in enumerate(lines)]


def _parse_request(beginning: str, line: str, number: int) -> TraceRequest:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{beginning}: not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise TraceError(f"{beginning}: holds {raw!r:.80}; must be an object")
    request, num_tokens, category, prompt = map(raw.get, ("request", "num_prompt_tokens", "category", "prompt"))
    if type(request) is not int or request != number:
        raise TraceError(f"{beginning}: request={request!r:.80}: must be {number}, requests are numbered as they come")
    if not all(text is None or isinstance(text, str) for text in (category, prompt)):
        raise TraceError(f"{beginning}: category, prompt={(category, prompt)!r:.80}: must be strings or null")
    if type(num_tokens) is not int or not 0 <= num_tokens < 1 << 48:
        raise TraceError(f"{beginning}: num_prompt_tokens={num_tokens!r:.80}: must be a whole number from 0")
    return TraceRequest(number, category, prompt, num_tokens)


def _frozen(values: Array) -> Array:
    values.flags.writeable = False
    return values


def token_vectors(tokens: npt.NDArray[np.int32], size: int) -> npt.NDArray[np.float16]:
    """A fixed vector [T, size] of unit length for each token id, random in direction.

    The same id gives the same vector on every machine and in every version: the bits come from the splitmix64
    finaliser over (id, place), two of them make a normal number (Box-Muller), and the vector is then normalised.
    """
    distinct, places = np.unique(tokens, return_inverse=True)
    counter = distinct.astype(np.int64).astype(np.uint64)[:, None] * np.uint64(2 * size)
    counter = counter + np.arange(2 * size, dtype=np.uint64)
    uniform = ((_mixed(counter) >> np.uint64(11)).astype(np.float64) + 1) / 2.0**53  # in (0, 1]
    normal = np.sqrt(-2 * np.log(uniform[:, :size])) * np.cos(2 * np.pi * uniform[:, size:])
    vectors = normal / np.linalg.norm(normal, axis=1, keepdims=True)
    embeddings: npt.NDArray[np.float16] = vectors.astype(np.float16)[places.reshape(-1)]
    return embeddings


def _mixed(counter: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        bits = counter * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: npt.NDArray[np.uint64] = bits ^ (bits >> np.uint64(31))
    return mixed
