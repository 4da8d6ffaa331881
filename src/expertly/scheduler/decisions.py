"""Records every decision of a scheduler in a file, and replays it: the proof that nothing else decides.

The first line says how the scheduler was made. Each later line is a call: `[name, observation, decision]`, in JSON. A
new scheduler that is given the observations must take the same decisions, byte for byte. Each line ends with a checksum
of itself and all lines before it, and the last line marks the end: a file that was changed or cut is always noticed.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, cast

from expertly.core.costs import HostCompute, Link
from expertly.core.errors import ConfigError, TraceError
from expertly.core.files import create
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Plan, Prediction, RouterRan, Span
from expertly.policies.allocation.moepic import LayerSplit, SplitPlan
from expertly.policies.known import Known
from expertly.scheduler.budget import Budget
from expertly.scheduler.misses import MissSplit
from expertly.scheduler.prefetch_gate import Moment
from expertly.scheduler.presets import get_system, paths_in
from expertly.scheduler.scheduler import Scheduler
from expertly.scheduler.system import System

FORMAT = "expertly-decisions"
VERSION = 2
_SEALED = re.compile(r'(.*),(?:"crc32":)?"[0-9a-f]{8}"([\]}])\n', re.DOTALL)
_END = '["end",null,null]'
_MAX_SEGMENTS = 1 << 24
"""Most segments of the model that a file names: a scheduler for it takes memory in proportion."""
_OLD_NAMES = {"ring_slots": "staging_slots", "layer_shares": "layer_quotas"}
"""Names of a budget's fields in files that were written before December 2026."""
_UNTIL_THERE = "all decisions up to there are the same"


def record(scheduler: Scheduler, write: Callable[[str], object]) -> Scheduler:
    """The scheduler, which now gives `write` a line (without line break) for each decision. What `write` raises
    reaches the driver, so that no decision goes unwritten.
    """
    return cast(Scheduler, DecisionRecorder(scheduler, write))


class DecisionRecorder:
    """Wraps a scheduler: passes everything on, and writes down the calls that decide."""

    def __init__(self, scheduler: Scheduler, write: Callable[[str], object]) -> None:
        self._scheduler = scheduler
        self._write = write

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._scheduler, name)
        if name not in _CALLS:
            return found

        def call(*arguments: Any) -> Any:
            answer = found(*arguments)
            self._write(_line([name, _CALLS[name].told(*arguments), _plain(answer)]))
            return answer

        setattr(self, name, call)
        return call


@dataclass(frozen=True, slots=True)
class _Call:
    """How a recorded call becomes plain data (`told`), and its arguments again (`heard`)."""

    told: Callable[..., Any]
    heard: Callable[[Geometry, Any], Sequence[Any]]


def _router(router: RouterRan) -> list[Any]:
    return [router.layer, router.experts, router.num_tokens, list(map(bool, router.is_decode)), router.batch_tokens]


def _prediction(prediction: Prediction) -> list[Any]:
    told: list[Any] = [prediction.layer, prediction.experts, prediction.scores, prediction.distance]
    rest = [prediction.confidence, prediction.probabilities, prediction.outlook]
    while rest and rest[-1] is None:
        del rest[-1]
    return [*told, *rest]


def _plain(answer: Any) -> Any:
    if isinstance(answer, Plan):
        told: list[Any] = [answer.ready, answer.loads, answer.in_flight]
        rest = [answer.requested, answer.on_host, answer.following]
        while rest and not rest[-1]:
            del rest[-1]
        return [*told, *rest]
    return answer


def _spans(geometry: Geometry, values: Sequence[Sequence[int]]) -> list[Span]:
    spans = [Span(*one) for one in values]
    for span in spans:
        if not 0 <= span.segment < span.segment + span.num_segments <= geometry.segments_per_expert:
            raise ValueError(f"{span}: of an expert of {geometry.segments_per_expert} segments")
    return spans


_OF_SPANS = _Call(lambda spans: list(spans), lambda geometry, spans: (_spans(geometry, spans),))
_OF_PREDICTION = _Call(_prediction, lambda geometry, prediction: (Prediction(*prediction),))
_OF_NOTHING = _Call(lambda: None, lambda geometry, nothing: ())
_CALLS = {
    "begin_layer": _Call(
        lambda router, cancelled=(): [_router(router), list(cancelled)],
        lambda geometry, told: (RouterRan(*told[0]), _spans(geometry, told[1])),
    ),
    "loaded": _Call(lambda span: span, lambda geometry, span: _spans(geometry, [span])),
    "computed": _OF_SPANS,
    "promote": _OF_SPANS,
    "end_layer": _Call(
        lambda cancelled=(): list(cancelled) or None, lambda geometry, spans: (_spans(geometry, spans or ()),)
    ),
    "predict": _OF_PREDICTION,
    "foresee": _OF_PREDICTION,
    "prefetch": _OF_NOTHING,
    "abandon": _OF_NOTHING,
    "at": _Call(lambda moment, now_ns: [moment.value, now_ns], lambda geometry, told: (Moment(told[0]), told[1])),
    "preload": _Call(lambda layer, expert: [layer, expert], lambda geometry, told: tuple(told)),
    "configure": _Call(
        lambda plan: [astuple(layer) for layer in plan.layers],
        lambda geometry, layers: (SplitPlan(geometry, tuple(LayerSplit(*layer) for layer in layers)),),
    ),
}


@dataclass(frozen=True, slots=True)
class Replayed:
    """How much was replayed, and the first line that differs from the recording, if any."""

    num_layers: int
    num_calls: int
    nbytes: int
    difference: tuple[int, str, str] | None = None  # line number from 1, recorded, replayed


def replay(lines: Iterable[str], scheduler: Scheduler, where: str) -> Replayed:
    """Repeat the recorded calls and compare the answers, up to the first difference. `lines` begin after the header.

    Raises TraceError naming a line that cannot be read.
    """
    num_calls = num_layers = nbytes = 0
    made: list[str] = []
    recorder = DecisionRecorder(scheduler, made.append)
    for number, line in enumerate(lines, start=2):
        recorded = line.rstrip("\n")
        made.clear()
        replayed = _answer(recorder, recorded, made, f"{where}, line {number}")
        if replayed != recorded:
            return Replayed(num_layers, num_calls, nbytes, (number, recorded, replayed))
        num_calls += 1
        num_layers += recorded.startswith('["end_layer"')
        nbytes += len(recorded) + 1
    return Replayed(num_layers, num_calls, nbytes)


def _answer(recorder: DecisionRecorder, line: str, made: list[str], where: str) -> str:
    """The line that this scheduler writes for the call of a recorded line."""
    call = _parsed(line, where)
    try:
        name, told, _ = call
        if name not in _CALLS:
            raise TraceError(f"{where}: call {name!r:.80}: unknown; accepted: {', '.join(_CALLS)}")
        getattr(recorder, name)(*_CALLS[name].heard(recorder.geometry, told))
    except (TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"{where}: {line:.80}: not a call of a scheduler ({error})") from None
    except (AssertionError, LookupError) as error:
        return _line([name, told, f"impossible: {type(error).__name__}: {error}"])
    return made[0]


def read_header(line: str, where: str) -> dict[str, Any]:
    """The first line: how the scheduler was made. Raises TraceError naming the field."""
    header = _parsed(line, f"{where}, line 1")
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise TraceError(f"{where}, line 1: field 'format': must be {FORMAT!r}")
    if header.get("version") != VERSION:
        raise TraceError(
            f"{where}, line 1: field 'version': {header.get('version')!r}; accepted: {VERSION}. Another version of "
            f"expertly recorded it: record it again, or replay it with that version"
        )
    return header


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: not JSON ({error})") from None


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def header_of(
    system: System,
    geometry: Geometry,
    budget: Budget,
    order: str,
    plan: SplitPlan | None = None,
    split: MissSplit | None = None,
) -> dict[str, Any]:
    """What the first line of a file says: how its scheduler was made."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "system": system.name,
        "order": order,
        "segments": geometry.segments_per_expert,
        "layers": [layer.as_dict() for layer in geometry.layers],
        "budget": asdict(budget),
        **({} if plan is None else {"plan": plan.to_dict()}),
        **({} if split is None else {"link": asdict(split.link), "host": asdict(split.host)}),
    }


class DecisionsFile:
    """The file that one scheduler writes; `header`: of `header_of`. Raises ConfigError where it cannot be written."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self._path = path
        self._crc = 0
        self._process = os.getpid()
        try:
            self._file = os.fdopen(create(path), "w", encoding="utf-8")
        except OSError as error:
            raise self._problem(error) from None
        try:
            self.write(_line(header))
        except BaseException:
            self._file.close()
            raise

    def write(self, line: str) -> None:
        """Write one line, given without its line break."""
        self._crc, sealed = _sealed(line, self._crc)
        try:
            self._file.write(sealed + "\n")
        except OSError as error:
            raise self._problem(error) from None

    def close(self) -> None:
        """Write the end; idempotent. In a forked child nothing is written: the file is the parent's."""
        if self._file.closed:
            return
        if os.getpid() != self._process:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._file.fileno())  # swallows what the child has buffered
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
    """Replay a file with a new scheduler; returns its header, too. `may_import`: whether the file may name parts of the
    system by dotted paths, whose modules are imported, which runs their code.

    Raises TraceError naming file, line and field where it cannot be read, was changed, is cut, or names a path that it
    may not.
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
    """The lines of a file, without checksums. Raises TraceError at the first line that was changed."""
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
            read_header(line, where)  # says more of another format or version than a wrong checksum would
        crc, expected = _sealed(line, crc)
        if expected + "\n" != sealed:
            raise TraceError(
                f"{where}, line {number}: checksum: the line was changed after it was written, or one before it is gone"
            )
        if line == _END:
            if next(lines, None) is not None:
                raise TraceError(f"{where}, line {number + 1}: something follows the end of the recording")
            return
        yield line
    raise TraceError(f"{where}, line {number + 1}: missing: the file was cut, or its writer killed; {_UNTIL_THERE}")


def _scheduler(header: Mapping[str, Any], where: str, may_import: bool) -> Scheduler:
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
        layers = tuple(map(LayerGeometry.from_dict, header["layers"]))
        if not isinstance(header["segments"], int):
            raise TraceError(f"{where}: field 'segments': {header['segments']!r:.80}: must be a whole number")
        most = sum(layer.num_experts for layer in layers) * header["segments"]
        if not most <= _MAX_SEGMENTS:
            raise TraceError(f"{where}: fields 'layers', 'segments': {most} segments; accepted: up to {_MAX_SEGMENTS}")
        geometry = Geometry(layers, header["segments"])
        raw = {_OLD_NAMES.get(key, key): value for key, value in dict(header["budget"]).items()}
        budget = Budget(
            raw["memory_nbytes"], *(tuple(raw[key]) for key in ("staging_slots", "kept_slots", "layer_quotas"))
        )
        if (len(budget.staging_slots), len(budget.kept_slots), len(budget.layer_quotas)) != (
            geometry.num_size_classes,
            geometry.num_size_classes,
            geometry.num_layers,
        ):
            raise TraceError(f"{where}: field 'budget': not of as many layers and sizes of experts as 'layers'")
        if not all(0 <= slots <= most for slots in (*budget.staging_slots, *budget.kept_slots)):
            raise TraceError(f"{where}: field 'budget': {raw!r:.200}: accepted: 0 to {most} slots, all segments")
        plan = SplitPlan.from_dict(header["plan"]) if "plan" in header else None
        if plan is not None:
            plan.check_fits(geometry)
        split = None
        if "host" in header:
            split = MissSplit(geometry, Link(**header["link"]), HostCompute(**header["host"]))
        return system.scheduler(geometry, budget, Known(given=(plan,)), header["order"], split)
    except KeyError as error:
        raise TraceError(f"{where}: field {error}: missing") from None
    except (TypeError, ValueError, LookupError, OverflowError, ConfigError) as error:
        raise TraceError(f"{where}: {error}") from None
