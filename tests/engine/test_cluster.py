"""A device and workers as one: the tokens of the unmodified model, counts of its routing, one predictor for all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import expertly
from expertly.api import handle
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import RouterRan
from expertly.core.observation import Began, Routed
from expertly.core.placement import Placement
from expertly.engine.cluster import ChannelOfShare
from expertly.engine.wire import Kind
from expertly.scheduler.loop import InlineChannel
from tests.engine import predictors
from tests.engine.conftest import Cases
from tests.engine.observe import counts, loaded
from tests.engine.peers import ThreadPeer
from tests.engine.predictors import Diary, Everything
from tests.engine.test_batching import run_batch
from tests.families import generate, load_reference, logits_of, make_prompts

pytestmark = pytest.mark.timeout(120)

ONE_OR_MORE: tuple[dict[str, Any], ...] = (
    {},
    {"workers": 1, "worker_memory": "60%"},
    {"workers": 2, "worker_memory": "60%"},
)


def of_devices(model: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = expertly.stats(model).as_dict()["devices"]
    return found


# -- the same tokens -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize(
    "system",
    [
        *("expertly-ahead", "fmoe", "moe-infinity", "lru:prediction=lookahead:distance=2"),
        *("lcp:prediction=eam:ahead=staging", "moepic", "static", "resident"),
    ],
)
def test_every_kind_of_system_is_lossless(system: str, cases: Cases) -> None:
    case, is_resident = cases["qwen3_moe"], system == "resident"
    memory, segments = ("100%", None) if is_resident else ("25%", 4)
    own: dict[str, Any] = {"workers": 2, "worker_memory": memory, "segments": segments}
    with loaded(case.store, system=system, memory=memory, **own) as model:
        for _ in range(2):
            assert generate(model, case.prompts) == case.tokens
        assert not any(one["worker"] and one["worker"]["drops"] for one in of_devices(model))


@pytest.mark.usefixtures("peers")
def test_bfloat16_is_bit_for_bit_what_it_is_without_workers(cases: Cases) -> None:
    """The same products in the same order: who computes them changes nothing."""
    case, found = cases["qwen3_moe"], []
    for where in ONE_OR_MORE:
        with loaded(case.folder, dtype="bfloat16", memory="60%", **where) as model:
            found.append(logits_of(model, case.prompts))
    assert all(torch.equal(one, found[0]) for one in found)


def test_continuous_batching_and_inference_mode(cases: Cases, peers: list[ThreadPeer]) -> None:
    """Several requests of different lengths share a call; a worker gets the rows that it needs, not all."""
    case = cases["qwen3_moe"]
    prompts = [*make_prompts(2, length=5, seed=2), *make_prompts(1, length=20, seed=3)]
    expected = [generate(load_reference(case.folder), [prompt], 6)[0] for prompt in prompts]
    with loaded(case.store, system="fmoe", segments=4, workers=4, worker_memory="25%") as model:
        for _ in range(2):
            assert run_batch(model, prompts) == expected
        engine = handle(model).engine
        num_passes = sum(engine.num_passes.values())
        assert num_passes < 2 * 6 * len(prompts), "requests share passes"
        for peer in peers:
            most = num_passes * engine.executor.geometry.num_layers
            assert peer.kinds.count(Kind.LAYER) <= most, "one call a layer and pass"
        with torch.inference_mode():
            torch.testing.assert_close(logits_of(model, case.prompts), case.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("peers")
def test_counts_are_those_of_the_routing_whoever_computes(cases: Cases) -> None:
    """What is needed is split, none of it is lost or counted twice; without evictions the hits are the same."""
    case, found = cases["qwen3_moe"], []
    for where in ({}, *({"workers": num, "worker_memory": "100%"} for num in (1, 3))):
        with loaded(case.store, memory="100%", **where) as model:
            generate(model, case.prompts)
            phases = expertly.stats(model).as_dict()["phases"]
            found.append([(*counts(model, phase), phases[phase]["demanded_bytes"]) for phase in phases])
            per_device = [[one[phase]["hits"] for phase in phases] for one in of_devices(model)]
            assert [sum(column) for column in zip(*per_device, strict=True)] == [counts(model, p)[0] for p in phases]
    assert all(one == found[0] for one in found)


# -- predictions -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("peers")
def test_this_device_prefetches_of_its_share(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case, system = cases["qwen3_moe"], predictors.put(monkeypatch, Everything)
    with loaded(case.store, system=system, workers=1, memory="30%", worker_memory="30%", segments=2) as model:
        assert generate(model, case.prompts) == case.tokens
        here, away = of_devices(model)
        assert here["decode"]["predicted"] > 0 < here["decode"]["prefetched"]
        assert away["decode"]["predicted"] == away["decode"]["prefetched"] == 0 < away["decode"]["misses"]


@pytest.mark.usefixtures("peers")
def test_what_a_pass_shows_is_published_once(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case, diary = cases["qwen3_moe"], Diary("experts", "embedding")
    system = predictors.put(monkeypatch, lambda geometry: diary)
    with loaded(case.store, workers=2, worker_memory="100%", system=system, memory="100%") as model:
        generate(model, case.prompts, 5)
        assert len(diary.began) == len(diary.ends) == 5
        assert [[one.layer for one in routed] for routed in diary.routed] == [[0, 1, 2]] * 5
        assert all(max(one.router.experts) > 2 for one in diary.routed[0]), "experts by their numbers in the model"


# -- the channel of a share --------------------------------------------------------------------------------------------

SHAPE = Geometry((LayerGeometry(6, 2, 8, 4, 3, 2),) * 3)


def test_it_hears_of_its_own_experts() -> None:
    share = Placement(SHAPE, [1, 1]).shares[0]
    channel = ChannelOfShare(InlineChannel(Everything(SHAPE)), share)
    predictions = list(channel.begin_iteration(lambda: Began(np.zeros(1, np.int64), np.zeros(1, np.bool_))))
    assert [prediction.layer for prediction in predictions] == [0, 1, 2]
    predictions += channel.router_ran(lambda: Routed(RouterRan(0, [0], [1], [True], 1)))
    assert [prediction.layer for prediction in predictions[3:]] == [1, 2]
    assert all(sorted(prediction.experts) == list(range(len(share.experts[0]))) for prediction in predictions)
