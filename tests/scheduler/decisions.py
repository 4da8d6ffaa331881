"""Records what a scheduler is asked and decides, and asks a new one the same: the proof that nothing else decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any, NamedTuple, TypeVar, cast

SchedulerT = TypeVar("SchedulerT")

CALLS = ("begin_layer", "loaded", "computed", "end_layer", "predict", "prefetch", "abandon", "preload", "configure")
"""The methods of a scheduler that decide, or that tell it what later decisions depend on."""


class Decision(NamedTuple):
    """A call of a scheduler, and what it returned."""

    name: str
    arguments: tuple[Any, ...]
    answer: Any


def record(scheduler: SchedulerT, note: Callable[[Decision], object]) -> SchedulerT:
    """The scheduler, which now gives `note` each call of CALLS. What `note` raises reaches the caller."""
    return cast(SchedulerT, _Recorder(scheduler, note))


def replay(calls: Iterable[Decision], scheduler: Any) -> str | None:
    """Repeat the calls; the first whose answer differs, with both answers. None: the scheduler decides the same."""
    for number, (name, arguments, recorded) in enumerate(calls):
        try:
            answer = getattr(scheduler, name)(*arguments)
        except (AssertionError, LookupError) as error:
            answer = f"impossible: {type(error).__name__}: {error}"
        if answer != recorded:
            return f"call {number}, {name}{arguments}: recorded {recorded}, replayed {answer}"
    return None


class _Recorder:
    """Passes everything on to a scheduler."""

    def __init__(self, scheduler: Any, note: Callable[[Decision], object]) -> None:
        self._scheduler = scheduler
        self._note = note

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._scheduler, name)
        if name not in CALLS:
            return method

        def call(*arguments: Any) -> Any:
            asked = deepcopy(arguments)
            answer = method(*arguments)
            self._note(Decision(name, asked, deepcopy(answer)))
            return answer

        setattr(self, name, call)
        return call
