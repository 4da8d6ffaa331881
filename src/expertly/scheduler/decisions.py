"""A file of every decision an engine took, and its replay (control.journal): the proof that nothing else decides.

Each line ends with a checksum of itself and of all lines before it, the last line says that it is the last: a file that
was changed or cut is never taken for what an engine did.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from expertly.core.errors import ConfigError, TraceError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.policies.allocation.moepic import SplitPlan
from expertly.policies.known import Known
from expertly.scheduler.budget import Budget
from expertly.scheduler.journal import JournaledScheduler, Replayed, read_header, replay
from expertly.scheduler.presets import get_system, paths_in
from expertly.scheduler.system import System

_SEALED = re.compile(r'(.*),(?:"crc32":)?"[0-9a-f]{8}"([\]}])\n', re.DOTALL)
_END = '["end",null,null]'
_MAX_SEGMENTS = 1 << 24
"""Of a model that a file says was run: what is made for it before anything is replayed takes memory by their number."""
_UNTIL_THERE = "all decisions up to there are the same"


def header_of(
    system: System, geometry: Geometry, budget: Budget, order: str, plan: SplitPlan | None = None
) -> dict[str, Any]:
    """How a scheduler is made, as the first line of its journal."""
    return {
        "system": system.name,
        "order": order,
        "segments": geometry.segments_per_expert,
        "layers": [asdict(layer) for layer in geometry.layers],
        "budget": asdict(budget),
        **({} if plan is None else {"plan": plan.to_dict()}),
    }


class DecisionsFile:
    """Takes the decisions of one engine. Raises ConfigError where the file cannot be written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._crc = 0
        self._process = os.getpid()
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise self._problem(error) from None

    def write(self, line: str) -> None:
        """One line of a journal, without its end."""
        self._crc, sealed = _sealed(line, self._crc)
        try:
            self._file.write(sealed + "\n")
        except OSError as error:
            raise self._problem(error) from None

    def close(self) -> None:
        """Idempotent. In a forked child the file is let go as it is: the parent writes it."""
        if self._file.closed:
            return
        if os.getpid() != self._process:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._file.fileno())  # where goes what the child has in the file's buffer
            self._file.close()
            return
        try:
            self.write(_END)
        finally:
            try:
                self._file.close()
            except OSError as error:
                raise self._problem(error) from None

    def _problem(self, error: OSError) -> ConfigError:
        return ConfigError(f"decisions={str(self._path)!r}: cannot be written ({error.strerror})")


def replay_file(path: Path, *, may_import: bool = False) -> tuple[dict[str, Any], Replayed]:
    """The header, and what a new scheduler makes of the observations. `may_import`: whether the file may name parts of
    the system by their dotted paths, whose modules are imported, which runs their code.

    Raises TraceError naming file, line and field where it cannot be read, was changed, ends too early, or names a part
    by its path and may not.
    """
    try:
        with path.open("rb") as file:
            lines = _unsealed(file, str(path))
            header = read_header(next(lines, ""), str(path))
            return header, replay(lines, _scheduler(header, f"{path}, line 1", may_import), str(path))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from None


def _sealed(line: str, crc: int) -> tuple[int, str]:
    """The checksum of a line and all before it, and the line (a JSON list or object) with it as last entry."""
    crc = zlib.crc32(line.encode(), crc)
    key = '"crc32":' if line.startswith("{") else ""
    return crc, f'{line[:-1]},{key}"{crc:08x}"{line[-1]}'


def _unsealed(lines: Iterator[bytes], where: str) -> Iterator[str]:
    """The lines of a journal, without checksums. Raises TraceError at the first line that is not as it was written."""
    crc, number = 0, 0
    for number, raw in enumerate(lines, start=1):
        try:
            sealed = raw.decode()
        except UnicodeDecodeError as error:
            raise TraceError(f"{where}, line {number}: not UTF-8 ({error.reason})") from None
        if not sealed.endswith("\n"):
            raise TraceError(f"{where}, line {number}: cut off; {_UNTIL_THERE}")
        match = _SEALED.fullmatch(sealed)
        line = match[1] + match[2] if match else sealed
        if number == 1:
            read_header(line, where)  # of another format or version there is more to say than that it differs
        crc, expected = _sealed(line, crc)
        if expected + "\n" != sealed:
            raise TraceError(
                f"{where}, line {number}: checksum: the line was changed after it was written, or one before it is gone"
            )
        if line == _END:
            if next(lines, None) is not None:
                raise TraceError(f"{where}, line {number + 1}: something follows the end of the journal")
            return
        yield line
    raise TraceError(f"{where}, line {number + 1}: missing: the file was cut, or its writer killed; {_UNTIL_THERE}")


def _scheduler(header: Mapping[str, Any], where: str, may_import: bool) -> JournaledScheduler:
    try:
        spec = header["system"]
        if not isinstance(spec, str):
            raise TraceError(f"{where}: field 'system': {spec!r:.80}: must be a text")
        if not may_import and (paths := paths_in(spec)):
            raise TraceError(
                f"{where}: field 'system': {', '.join(paths):.200}: a file does not say which code to run; accepted: "
                f"parts that are installed, or any with --allow-imports, for who trusts that module"
            )
        system = get_system(spec)
        layers = tuple(LayerGeometry(**layer) for layer in header["layers"])
        if not isinstance(header["segments"], int):
            raise TraceError(f"{where}: field 'segments': {header['segments']!r:.80}: must be a whole number")
        most = sum(layer.num_experts for layer in layers) * header["segments"]
        if not most <= _MAX_SEGMENTS:
            raise TraceError(f"{where}: fields 'layers', 'segments': {most} segments; accepted: up to {_MAX_SEGMENTS}")
        geometry = Geometry(layers, header["segments"])
        raw = header["budget"]
        budget = Budget(
            raw["memory_nbytes"], *(tuple(raw[key]) for key in ("ring_slots", "kept_slots", "layer_shares"))
        )
        if (len(budget.ring_slots), len(budget.kept_slots), len(budget.layer_shares)) != (
            geometry.num_size_classes,
            geometry.num_size_classes,
            geometry.num_layers,
        ):
            raise TraceError(f"{where}: field 'budget': not of as many layers and sizes of experts as 'layers'")
        if not all(0 <= slots <= most for slots in (*budget.ring_slots, *budget.kept_slots)):
            raise TraceError(f"{where}: field 'budget': {raw!r:.200}: accepted: 0 to {most} slots, all segments")
        plan = SplitPlan.from_dict(header["plan"]) if "plan" in header else None
        if plan is not None:
            plan.check_fits(geometry)
        return system.journaled_scheduler(geometry, budget, Known(plan=plan), header["order"])
    except KeyError as error:
        raise TraceError(f"{where}: field {error}: missing") from None
    except (TypeError, ValueError, LookupError, OverflowError, ConfigError) as error:
        raise TraceError(f"{where}: {error}") from None
