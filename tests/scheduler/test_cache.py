"""What is admitted and evicted. Quotas change while layers run."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import RouterRan
from expertly.policies.lfu import LFU
from expertly.scheduler.budget import Budget
from expertly.scheduler.scheduler import Scheduler
from tests.scheduler.checked import CheckedScheduler
from tests.scheduler.drive import geometry, kept, made, one_token, prediction, run, run_layer, scheduler
from tests.scheduler.soak import LAYERS, RandomQuotas

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


@pytest.mark.parametrize(("is_predicted", "left"), [(False, 2), (True, 0)])
def test_victims_lose_their_last_segments_or_all_where_anything_is_predicted(is_predicted: bool, left: int) -> None:
    shape = geometry(layers=2, experts=8, top_k=2, segments=4)
    control = scheduler(shape, 10 / 16, "lru:prediction=lookahead" if is_predicted else "lru")
    for pair in ([0, 1], [2, 3]):
        run_layer(control, 0, pair)
    if is_predicted:
        control.predict(prediction(1, []))
    control.cache.resize([16 - 6, 16 + 6])
    control.cache.rearrange(set())
    assert control.cache.residency()[:4] == [0, left, 4, 4]
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


@pytest.mark.parametrize("is_predicted", [False, True])
def test_as_many_kept_experts_lose_to_others_of_their_layer_as_can_be_staged(is_predicted: bool) -> None:
    """0 and 1 are worth less than 2 and 3; all are needed. One can wait in the only free staging slot until it is
    computed, so the other stays, and 2 passes through that slot. A predicted expert of layer 1 may have another one.
    """
    shape, budget = geometry(layers=2, experts=8, top_k=4), Budget(0, (1 + is_predicted,), (2,), (2, 0))
    control = CheckedScheduler(shape, budget, lambda capacity, layers: LFU(), admission="best", ahead="staging")
    run_layer(control, 0, [0, 1])
    run(control, RouterRan(0, [2, 3], [5, 5], [True, True], 5))
    assert kept(control, 0) == {0, 1}, "nothing was known of 2 and 3"
    if is_predicted:
        control.predict(prediction(1, [5]))
        (span,) = control.prefetch()
        control.loaded(span)
    assert run_layer(control, 0, [0, 1, 2, 3]).computed.keys() == {0, 1, 2, 3}
    assert kept(control, 0) == {1, 3}


def test_nothing_is_evicted_where_that_makes_too_little_room() -> None:
    cache = four_kept_of_two_layers().cache
    assert cache.make_room(0, 2, {0, 1, 2}) == 0 and cache.residency()[:4] == [1] * 4
    assert cache.make_room(0, 2, {0, 1}) == 2 and cache.residency()[:4] == [1, 1, 0, 0]


def test_an_expert_that_only_pads_chose_evicts_nothing() -> None:
    control = scheduler(geometry(layers=1, experts=8, top_k=2), 4 / 8, "on-demand")
    run_layer(control, 0, [0, 1], decode=False)
    run(control, RouterRan(0, [2, 3], [0, 1], [False, False], 1))
    assert kept(control, 0) == {1, 3}, "the prompt's evicts"


def test_a_prompt_fills_no_more_than_its_layers_quota_of_a_shared_cache() -> None:
    control = made(geometry(layers=2, experts=8, top_k=2), [2, 2], 2, scope="global")
    run_layer(control, 0, [0, 1, 2, 3], tokens=[1, 2, 3, 4], decode=False)
    assert kept(control, 0) == {2, 3}, "the busiest; decode could have had the whole cache"
    run_layer(control, 0, [0])
    assert kept(control, 0) == {0, 2, 3}


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
