"""Every observation of a scheduler and every decision it made, line by line, and the replay that proves them.

The first line says how the scheduler was made. Then a line a call: `[name, observation, decision]`, in JSON. Fed to a
new scheduler, the observations must give the same decisions, byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

from expertly.core.errors import TraceError
from expertly.core.messages import Plan, Prediction, RouterRan, Span
from expertly.policies.moepic.plan import LayerSplit, SplitPlan
from expertly.scheduler.gate import Moment
from expertly.scheduler.scheduler import Scheduler

FORMAT = "expertly-decisions"
VERSION = 1

_PASS_ENDED = "pass ended"
"""In journals up to November 2026, a moment that a gate is no longer told of: no decision went by it."""


class JournaledScheduler(Scheduler):
    """Writes down what is said to it and what it answers, from `start_journal` on.

    What `write` raises reaches the driver: no decision goes unwritten.
    """

    _write: Callable[[str], object] | None = None

    def start_journal(self, header: Mapping[str, Any], write: Callable[[str], object]) -> None:
        """`write` takes one line without its end; the first says how this scheduler was made."""
        self._write = write
        write(_line({"format": FORMAT, "version": VERSION, **header}))

    def begin_layer(self, router: RouterRan, withdrawn: Sequence[Span] = ()) -> Plan:
        step = super().begin_layer(router, withdrawn)
        self._note("begin_layer", [_router(router), list(withdrawn)], _step(step))
        return step

    def loaded(self, span: Span) -> bool:
        is_awaited = super().loaded(span)
        self._note("loaded", span, is_awaited)
        return is_awaited

    def computed(self, span: Span) -> Plan | None:
        step = super().computed(span)
        self._note("computed", span, _step(step))
        return step

    def promote(self, spans: Sequence[Span]) -> None:
        super().promote(spans)
        self._note("promote", list(spans), None)

    def end_layer(self, withdrawn: Sequence[Span] = ()) -> None:
        super().end_layer(withdrawn)
        self._note("end_layer", list(withdrawn) or None, None)

    def predict(self, prediction: Prediction) -> None:
        super().predict(prediction)
        self._note("predict", _prediction(prediction), None)

    def at(self, moment: Moment, now_ns: int) -> None:
        super().at(moment, now_ns)
        self._note("at", [moment.value, now_ns], None)

    def foresee(self, prediction: Prediction) -> None:
        super().foresee(prediction)
        self._note("foresee", _prediction(prediction), None)

    def load_ahead(self) -> list[Span]:
        spans = super().load_ahead()
        self._note("load_ahead", None, spans)
        return spans

    def preload(self, layer: int, expert: int) -> list[Span]:
        spans = super().preload(layer, expert)
        self._note("preload", [layer, expert], spans)
        return spans

    def configure(self, plan: SplitPlan) -> None:
        super().configure(plan)
        self._note("configure", [astuple(layer) for layer in plan.layers], None)

    def abandon(self) -> None:
        super().abandon()
        self._note("abandon", None, None)

    def _note(self, name: str, observation: Any, decision: Any) -> None:
        if self._write is not None:
            self._write(_line([name, observation, decision]))


@dataclass(frozen=True, slots=True)
class Replayed:
    """How much was replayed; `difference` is the first line that came out otherwise, with what was recorded."""

    num_layers: int
    num_calls: int
    nbytes: int
    difference: tuple[int, str, str] | None = None  # line number from 1, recorded, replayed


def read_header(line: str, where: str) -> dict[str, Any]:
    """How the scheduler was made. Raises TraceError naming the field."""
    header = _parsed(line, f"{where}, line 1")
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise TraceError(f"{where}, line 1: field 'format': must be {FORMAT!r}")
    if header.get("version") != VERSION:
        raise TraceError(f"{where}, line 1: field 'version': {header.get('version')!r}; accepted: {VERSION}")
    return header


def replay(lines: Iterable[str], scheduler: JournaledScheduler, where: str) -> Replayed:
    """Say to `scheduler` what was said and compare what it answers. `lines` begin behind the header.

    Stops at the first difference. Raises TraceError naming the line where one cannot be read.
    """
    num_calls = num_layers = nbytes = 0
    made: list[str] = []
    scheduler.start_journal({}, made.append)
    for number, line in enumerate(lines, start=2):
        recorded = line.rstrip("\n")
        made.clear()
        replayed = _answer(scheduler, recorded, made, f"{where}, line {number}")
        if replayed != recorded:
            return Replayed(num_layers, num_calls, nbytes, (number, recorded, replayed))
        num_calls += 1
        num_layers += recorded.startswith('["end_layer"')
        nbytes += len(recorded) + 1
    return Replayed(num_layers, num_calls, nbytes)


def _answer(scheduler: JournaledScheduler, line: str, made: list[str], where: str) -> str:
    """The line that this scheduler makes of the observation of a line; it writes to `made`."""
    call = _parsed(line, where)
    span = partial(_span, scheduler.geometry.segments_per_expert)
    try:
        name, observation, _ = call
        if name == "begin_layer":
            router, withdrawn = observation
            scheduler.begin_layer(RouterRan(*router), list(map(span, withdrawn)))
        elif name in ("loaded", "computed"):
            getattr(scheduler, name)(span(observation))
        elif name in ("predict", "foresee"):
            getattr(scheduler, name)(Prediction(*observation))
        elif name == "configure":
            scheduler.configure(SplitPlan(scheduler.geometry, tuple(LayerSplit(*layer) for layer in observation)))
        elif name == "preload":
            scheduler.preload(*observation)
        elif name == "at":
            moment, now_ns = observation
            if moment == _PASS_ENDED:
                return line
            scheduler.at(Moment(moment), now_ns)
        elif name == "promote":
            scheduler.promote(list(map(span, observation)))
        elif name == "end_layer":
            scheduler.end_layer(list(map(span, observation or ())))
        elif name in ("load_ahead", "abandon"):
            getattr(scheduler, name)()
        else:
            raise TraceError(f"{where}: call {name!r}: unknown")
    except (TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"{where}: {line:.80}: not a call of a scheduler ({error})") from None
    except (AssertionError, LookupError) as error:
        return _line([name, observation, f"impossible: {type(error).__name__}: {error}"])
    return made[0]


def _span(num_segments: int, values: Sequence[int]) -> Span:
    span = Span(*values)
    if not 0 <= span.segment < span.segment + span.num_segments <= num_segments:
        raise ValueError(f"{span}: of an expert of {num_segments} segments")
    return span


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: not JSON ({error})") from None


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _router(router: RouterRan) -> list[Any]:
    return [router.layer, router.experts, router.num_tokens, list(map(bool, router.is_decode)), router.batch_tokens]


def _prediction(prediction: Prediction) -> list[Any]:
    said: list[Any] = [prediction.layer, prediction.experts, prediction.scores, prediction.distance]
    rest = [prediction.confidence, prediction.probabilities, prediction.outlook]
    while rest and rest[-1] is None:
        del rest[-1]
    return [*said, *rest]


def _step(step: Plan | None) -> Any:
    if step is None:
        return None
    return [step.ready, step.loads, step.joined, *([list(step.asked)] if step.asked else [])]
