"""What is admitted and evicted. Quotas change while layers run."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import RouterRan
from expertly.policies.admission import AdmitBest
from expertly.policies.base import PolicyOptions, option
from expertly.scheduler.budget import split_budget
from expertly.scheduler.prefetch_gate import PrefetchGate
from expertly.scheduler.presets import get_system
from expertly.scheduler.scheduler import Scheduler
from tests.scheduler.drive import geometry, kept, made, one_token, prediction, run, run_layer, scheduler
from tests.scheduler.soak import LAYERS, RandomQuotas


@dataclass(frozen=True)
class Bar(PolicyOptions):
    bar: float = option(0.0, "score that an expert needs above those it replaces", least=0)


class KeepsUnlessFarBetter(AdmitBest):
    """A user's admission."""

    options = Bar

    def __init__(self, options: Bar) -> None:
        self.bar = options.bar

    def worth(self, scores: Sequence[float], experts: Sequence[int], kept: Mapping[int, int]) -> list[float]:
        return [score - (0 if expert in kept else self.bar) for score, expert in zip(scores, experts, strict=True)]


@pytest.mark.parametrize(("bar", "stays"), [(0, {1, 4}), (1, {1, 4}), (2, {0, 1}), (9, {0, 1})])
def test_an_admission_from_outside_says_what_an_expert_must_be_worth(bar: float, stays: set[int]) -> None:
    """Two places; experts 0 and 1 were used once and twice, 4 comes for the third time and is worth 2 more than 0."""
    spec = f"lfu:admission={__name__}.KeepsUnlessFarBetter:bar={bar}"
    shape = geometry(layers=1, experts=8, top_k=2)
    control = get_system(spec).scheduler(shape, split_budget(shape, 4 * shape.layers[0].expert_nbytes))
    for experts in ([0, 1], [1], [4], [4], [4]):
        run(control, one_token(0, experts))
    assert set(kept(control, 0)) == stays


# -- quotas --------------------------------------------------------------------------------------------------------


def four_kept_of_two_layers() -> Scheduler:
    """0 to 3 are kept of both; two slots are for staging."""
    control = scheduler(geometry(layers=2, experts=8, top_k=2), 10 / 16)
    for layer in range(2):
        for pair in ([0, 1], [2, 3]):
            run_layer(control, layer, pair)
    return control


def test_protected_experts_are_no_victims() -> None:
    control = four_kept_of_two_layers()
    cache = control.cache
    cache.resize([1, 7])
    cache.rearrange({0, 2, 3})
    assert (cache.quotas, kept(control, 0), cache.targets) == ([3, 5], {0, 2, 3}, [1, 7])
    control.check()
    cache.rearrange({0})
    assert (cache.quotas, kept(control, 0), cache.targets) == ([1, 7], {0}, None)
    control.check()


@pytest.mark.parametrize(("is_predicted", "left"), [(False, 0b0011), (True, 0)])
def test_victims_lose_their_last_segments_or_all_where_anything_is_predicted(is_predicted: bool, left: int) -> None:
    shape = geometry(layers=2, experts=8, top_k=2, segments=4)
    control = scheduler(shape, 10 / 16)
    for pair in ([0, 1], [2, 3]):
        run_layer(control, 0, pair)
    if is_predicted:
        control.predict(prediction(1, []))
    control.cache.resize([16 - 6, 16 + 6])
    control.cache.rearrange(set())
    assert control.slots.resident[:4] == [0, left, 0b1111, 0b1111]
    control.check()


@pytest.mark.parametrize("quotas", [[4, 5], [3, 4], [-1, 9], [4], [9, -1]])
def test_quotas_of_another_sum_are_refused(quotas: list[int]) -> None:
    control = scheduler(geometry(layers=2, experts=8, top_k=2), 10 / 16)
    with pytest.raises(ConfigError, match="allocation: "):
        control.cache.resize(quotas)
    assert control.cache.targets is None


def test_size_classes_never_mix() -> None:
    shape = Geometry(LAYERS)
    control = scheduler(shape, 0.7)
    quotas = list(control.cache.quotas)
    quotas[0] -= 1
    quotas[1] += 1
    with pytest.raises(ConfigError, match="must have the sum of"):
        control.cache.resize(quotas)


class Listening(RandomQuotas):
    """Quotas stay; what it is told of the recall of layer 1 is noted."""

    def __init__(self) -> None:
        super().__init__(geometry(), random.Random(0))
        self.heard: list[float] = []

    def ran(self, demand: RouterRan, recall: Callable[[int], float]) -> list[int] | None:
        self.heard.append(recall(1))
        return None


def test_late_predictions_name_nothing() -> None:
    """Of 8 experts needed in layer 1, half the passes had a prediction, which was right: recall is a half."""
    listening = Listening()
    control = made(geometry(), [4, 4], 2, allocation=listening)
    for token in range(4):
        for layer in range(2):
            if layer and token % 2:
                control.predict(prediction(1, [token, token + 1]))
            run(control, one_token(layer, [token, token + 1]))
    assert listening.heard[-1] == 0.5


@pytest.mark.parametrize(("has_gate", "expected"), [(False, 0.8), (True, 0.25)])
def test_what_a_gate_did_not_prefetch_spared_nothing(has_gate: bool, expected: float) -> None:
    """8 of 10 needed were predicted; 2 were prefetched in time, 6 missed."""
    listening = Listening()
    gate = PrefetchGate() if has_gate else None
    control = made(geometry(), [4, 4], 2, allocation=listening, gate=gate)
    of_layer = control.counters[1].decode
    of_layer.predicted_needed, of_layer.predicted_of, of_layer.misses = 8, 10, 6
    of_layer.prefetched = of_layer.prefetched_needed = of_layer.prefetched_in_time = 2
    run(control, one_token(0, [0]))
    assert listening.heard == [expected]
