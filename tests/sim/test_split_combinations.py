"""Tops of experts kept beside every predictor and every policy that orders one layer: the parts go together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.num_checks = 0
        for name in ("begin_layer", "loaded", "computed", "prefetch", "end_layer"):
            setattr(self, name, self.checked(getattr(self, name)))

    def checked(self, event: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            found = event(*args)
            self.check()
            self.num_checks += 1
            return found

        return run


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


@pytest.mark.parametrize(("place", "prediction"), enumerate(["none", *PREDICTORS]))
def test_parts_of_experts_are_kept_beside_it(
    study: Study, place: int, prediction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every eviction, which has one of the allocations beside one prediction and the other beside the next."""
    monkeypatch.setattr(parts, "Scheduler", Checking)
    evictions = of_one_layer(prediction)
    assert len(evictions) >= 7
    for number, eviction in enumerate(evictions):
        allocation = list(SPLITS)[(place + number) % 2]
        ahead = "" if prediction == "none" else f":ahead={('cache', 'ring')[number % 2]}"
        spec = f"lru:scope=layer:prediction={prediction}{ahead}:{eviction}:allocation={allocation}{SPLITS[allocation]}"
        system = get_system(spec)
        simulator = study.simulate(system, MEMORY.budget(study.geometry))
        control = simulator.scheduler
        assert isinstance(control, Checking) and control.num_checks >= 4 * 12 * len(LAYERS)
        decode = [counters.decode for counters in control.counters]
        assert sum(one.partial_hits for one in decode), f"{spec}: tops were here when the router asked"
        assert prediction == "none" or sum(one.predicted for one in decode), spec
        if allocation == "moepic":
            assert control.allocation.facts()["configurations"], spec
