"""Tops of experts kept beside every predictor and every policy that orders one layer: the parts go together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from expertly.core.messages import Plan, RouterRan, Span
from expertly.policies.allocation import ALLOCATIONS
from expertly.policies.eviction import EVICTIONS
from expertly.policies.predictor import PREDICTORS
from expertly.scheduler import system as parts
from expertly.scheduler.presets import get_system
from expertly.scheduler.scheduler import Scheduler
from expertly.sim.hardware import Link
from expertly.sim.study import Memory, Study
from tests.sim.drive import make_study, make_trace, random_passes, sized, toy

LAYERS = sized(3, 10, 2)
MEMORY = Memory("45%")
SPLITS = {"split": "", "moepic": ":tau=4"}
"""Allocations that keep parts of experts, and their options here."""


class Checking(Scheduler):
    """Checks itself after every event."""

    num_checks = 0

    def begin_layer(self, router: RouterRan, cancelled: Sequence[Span] = ()) -> Plan:
        step = super().begin_layer(router, cancelled)
        self.cache.check()
        return step

    def loaded(self, span: Span) -> bool:
        is_awaited = super().loaded(span)
        self.cache.check()
        return is_awaited

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.computed = self._computed

    def _computed(self, spans: Sequence[Span]) -> Plan | None:
        step = self._running.computed(spans)
        self.cache.check()
        return step

    def end_layer(self, cancelled: Sequence[Span] = ()) -> None:
        super().end_layer(cancelled)
        self.check()
        self.num_checks += 1

    def prefetch(self) -> list[Span]:
        spans = super().prefetch()
        self.cache.check()
        return spans


@pytest.fixture(scope="module")
def study(tmp_path_factory: Any) -> Study:
    folder: Path = tmp_path_factory.mktemp("trace") / "trace"
    passes = random_passes(8, LAYERS, 5, prompt=4, num_requests=2)
    trace = make_trace(folder, passes, LAYERS, num_requests=2, is_full=True)
    return make_study(trace, toy(link=Link(0.02e9, 7, 3)), segments=4, matcher="inline")


def of_one_layer(prediction: str) -> list[str]:
    """The policies that can order a layer whose share changes, beside this prediction, as parts of a system."""
    predicts = prediction != "none" and PREDICTORS[prediction].gives_probabilities
    found = []
    for name, one in EVICTIONS.items():
        if one.is_sized or (one.needs_probabilities and not predicts):
            continue
        if not one.needs_future and not one.needs_best:
            found.append(f"eviction={name}")
        if one.is_scored:
            found.append(f"eviction={name}:admission=best")
    return found


def test_they_are_all_that_split() -> None:
    assert list(SPLITS) == [name for name, one in ALLOCATIONS.items() if one.splits]


@pytest.mark.parametrize("allocation", SPLITS)
@pytest.mark.parametrize("prediction", ["none", *PREDICTORS])
def test_parts_of_experts_are_kept_beside_it(
    study: Study, prediction: str, allocation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "Scheduler", Checking)
    evictions = of_one_layer(prediction)
    assert len(evictions) >= 7
    for number, eviction in enumerate(evictions):
        ahead = "" if prediction == "none" else f":ahead={('cache', 'ring')[number % 2]}"
        spec = f"lru:scope=layer:prediction={prediction}{ahead}:{eviction}:allocation={allocation}{SPLITS[allocation]}"
        system = get_system(spec)
        simulator = study.simulate(system, MEMORY.budget(study.geometry))
        control = simulator.scheduler
        assert isinstance(control, Checking) and control.num_checks == 12 * len(LAYERS)
        decode = [counters.decode for counters in control.counters]
        assert sum(one.partial_hits for one in decode), f"{spec}: tops were here when the router asked"
        assert prediction == "none" or sum(one.predicted for one in decode), spec
        if allocation == "moepic":
            assert control.allocation.facts()["configurations"], spec
