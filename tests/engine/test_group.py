"""Several logical devices: the tokens of the unmodified model, experts apart, threads side by side; memory divided."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import expertly
from expertly.api import handle
from expertly.core.errors import BudgetError, ConfigError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import RouterRan
from expertly.core.observation import Began, Routed
from expertly.core.placement import Placement
from expertly.engine import cpu, cuda
from expertly.engine.device import choose_devices
from expertly.engine.group import ShardGroup, SharedChannel
from expertly.engine.memory import WORKING_NBYTES, BesideExperts, choose_amounts
from expertly.engine.wire import Kind
from expertly.policies.predictor import Predictor
from expertly.scheduler.observations import InlineChannel
from expertly.store.reader import ExpertFile
from tests.engine import predictors
from tests.engine.conftest import Cases
from tests.engine.failing import raising, replace_reads
from tests.engine.observe import counts, loaded
from tests.engine.peers import ThreadPeer
from tests.engine.predictors import Diary, Everything
from tests.engine.streams import put_in_place
from tests.engine.test_batching import run_batch
from tests.families import generate, load_reference, logits_of, make_prompts

pytestmark = pytest.mark.timeout(120)

TWO, THREE = "cpu:0,cpu:1", ["cpu:0", "cpu:1", "cpu:2"]
WORKERS = {"workers": 2, "worker_memory": "60%"}
ONE_OR_MORE: tuple[dict[str, Any], ...] = ({"device": "cpu"}, {"devices": TWO}, WORKERS)


def group_of(model: Any) -> ShardGroup:
    group = handle(model).engine.executor
    assert isinstance(group, ShardGroup)
    return group


def of_devices(model: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = expertly.stats(model).as_dict()["devices"]
    return found


def owners_of_files(model: Any) -> dict[int, int]:
    """Identity of an open file -> the device whose threads read it."""
    shards: list[Any] = list(group_of(model).shards)
    return {id(file): number for number, one in enumerate(shards) for file in one.device._readers._source.files}


# -- the same tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "devices", "segments"),
    [
        ("qwen3_moe", THREE, 1),
        ("gpt_oss", TWO, 1),
        ("deepseek_v3", THREE, 4),
        ("switch_transformers", TWO, 4),
        ("granitemoe", TWO, 1),
    ],
)
def test_tokens_and_logits_are_the_reference(family: str, devices: Any, segments: int, cases: Cases) -> None:
    case = cases[family]
    for system, memory in (("lru", "60%"), ("on-demand", "100%")):
        settings = {"segments": segments, "system": system, "memory": memory, "verify": "never"}
        with loaded(case.store, devices=devices, **settings) as model:
            assert generate(model, case.prompts) == case.tokens, system
            torch.testing.assert_close(logits_of(model, case.prompts), case.logits, rtol=1e-4, atol=1e-5)
            stats = expertly.stats(model).as_dict()
            assert all(one["bytes_loaded"] > 0 for one in stats["devices"])
            assert stats["bytes_loaded"] == stats["bytes_disk"]
            if memory == "100%":
                assert stats["bytes_loaded"] <= stats["expert_bytes"], "each expert is loaded once, by one device"


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("where", [{"devices": TWO}, {"workers": 2}], ids=str)
@pytest.mark.parametrize(
    ("system", "predict"),
    [
        ("expertly-ahead", "auto"),
        ("fmoe", "auto"),
        ("moe-infinity", "inline"),
        ("lru:prediction=lookahead:distance=2", "inline"),
        ("lru:prediction=lookahead:transfer=synchronous", "auto"),
        ("lcp:prediction=popularity:ahead=staging", "auto"),
        ("moepic", "auto"),
        ("static", "auto"),
        ("resident", "auto"),
    ],
)
def test_every_kind_of_system_is_lossless(system: str, predict: str, where: dict[str, Any], cases: Cases) -> None:
    case, memory = cases["qwen3_moe"], "100%" if system == "resident" else "60%" if "devices" in where else "25%"
    own = {"worker_memory": memory} if "workers" in where else {}
    with loaded(case.store, system=system, memory=memory, predict=predict, segments=4, **where, **own) as model:
        for _ in range(2):
            assert generate(model, case.prompts) == case.tokens
        assert not any(one["worker"] and one["worker"]["drops"] for one in of_devices(model))


@pytest.mark.usefixtures("peers")
def test_bfloat16_is_bit_for_bit_the_one_device(cases: Cases) -> None:
    """The same products in the same order: which device computes them changes nothing."""
    case, found = cases["qwen3_moe"], []
    for where in ONE_OR_MORE:
        with loaded(case.folder, dtype="bfloat16", memory="60%", **where) as model:
            found.append(logits_of(model, case.prompts))
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize(
    "where", [{"devices": TWO, "memory": "60%"}, {"workers": 4, "memory": "25%", "worker_memory": "25%"}], ids=str
)
def test_continuous_batching_and_inference_mode(where: dict[str, Any], cases: Cases, peers: list[ThreadPeer]) -> None:
    """Several requests of different lengths share a call; a worker gets the rows that it needs, not all."""
    case = cases["qwen3_moe"]
    prompts = [*make_prompts(2, length=5, seed=2), *make_prompts(1, length=20, seed=3)]
    expected = [generate(load_reference(case.folder), [prompt], 6)[0] for prompt in prompts]
    with loaded(case.store, system="fmoe", segments=4, **where) as model:
        for _ in range(2):
            assert run_batch(model, prompts) == expected
        engine = handle(model).engine
        num_passes = engine.num_prefill_iterations + engine.num_decode_iterations
        assert num_passes < 2 * 6 * len(prompts), "requests share passes"
        for peer in peers:
            most = num_passes * engine.executor.geometry.num_layers
            assert peer.kinds.count(Kind.LAYER) <= most, "one call a layer and pass"
        with torch.inference_mode():
            torch.testing.assert_close(logits_of(model, case.prompts), case.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("peers")
def test_counts_are_those_of_the_routing_whatever_the_devices(cases: Cases) -> None:
    """What is needed is split, none of it is lost or counted twice; without evictions the hits are the same."""
    case, found = cases["qwen3_moe"], []
    for where in (
        *({"device": "cpu"}, {"devices": TWO}, {"devices": THREE}),
        *({"workers": num, "worker_memory": "100%"} for num in (1, 3)),
        {"workers": 2, "devices": TWO, "worker_memory": "100%"},
    ):
        with loaded(case.store, memory="100%", **where) as model:
            generate(model, case.prompts)
            phases = expertly.stats(model).as_dict()["phases"]
            found.append([(*counts(model, phase), phases[phase]["demanded_bytes"]) for phase in phases])
            per_device = [[one[phase]["hits"] for phase in phases] for one in of_devices(model)]
            assert [sum(column) for column in zip(*per_device, strict=True)] == [counts(model, p)[0] for p in phases]
    assert all(one == found[0] for one in found)


def test_accelerators_copy_what_they_load(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of an accelerator, with copies that happen as late as they may."""
    case, made = cases["mixtral"], put_in_place(monkeypatch)
    with loaded(case.store, devices=TWO, memory="60%", system="fmoe", segments=4) as model:
        for _ in range(2):
            assert generate(model, case.prompts) == case.tokens
        assert len(made) == 2 and all(one.stats()["copied_nbytes"] > 0 for one in made)
        assert expertly.stats(model).as_dict()["bytes_copied"] == sum(one.stats()["copied_nbytes"] for one in made)


# -- threads side by side ------------------------------------------------------------------------------------------


def test_devices_work_side_by_side(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's reads of one device are under way while the other's are."""
    case, original = cases["qwen3_moe"], ExpertFile.read_into
    with loaded(case.store, devices=TWO, memory="60%") as model:
        owners = owners_of_files(model)
        lock, running, together = threading.Lock(), [0, 0], [0]

        def slow(file: ExpertFile, offset: int, buffers: Sequence[memoryview]) -> bool:
            number = owners[id(file)]
            with lock:
                running[number] += 1
                together[0] += min(running) > 0
            time.sleep(0.01)
            try:
                return original(file, offset, buffers)
            finally:
                with lock:
                    running[number] -= 1

        replace_reads(monkeypatch, slow)
        assert generate(model, case.prompts, 6) == [tokens[:6] for tokens in case.tokens]
        assert together[0] > 10
        stats = expertly.stats(model).as_dict()
        stalls = [sum(one[phase]["stall_s"] for phase in ("prefill", "decode")) for one in stats["devices"]]
        assert 0 < stats["stall_s"] < sum(stalls), "the model waits for the device that ends last, not for each in turn"


# -- predictions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["thread", "inline"])
def test_predictions_are_split_and_prefetched_on_both(
    where: str, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, system = cases["qwen3_moe"], predictors.put(monkeypatch, Everything)
    expected = generate(case.reference, case.prompts, 12)
    with loaded(case.store, devices=TWO, system=system, predict=where, memory="60%", segments=2) as model:
        for _ in range(20):  # a predictor thread on a busy machine may be late for all of a short answer
            assert generate(model, case.prompts, 12) == expected
            devices = of_devices(model)
            decode = expertly.stats(model).as_dict()["phases"]["decode"]
            if decode["prefetched_needed"] and all(one["decode"]["prefetched"] for one in devices):
                break
        assert all(one["decode"]["prefetched"] > 0 and one["decode"]["predicted"] > 0 for one in devices)
        assert decode["predicted"] == sum(one["decode"]["predicted"] for one in devices)
        assert decode["prefetched_needed"] > 0 and decode["recall"] == 1.0, "everything was named on one of them"
        assert decode["similarity_correlation_trajectory"] is None, "a part of a prediction has no confidence"


@pytest.mark.usefixtures("peers")
def test_a_lookahead_counts_what_one_device_counts(cases: Cases) -> None:
    """Inline predictions are the same, so what they named and what was needed of it is, too."""
    case, found = cases["qwen3_moe"], []
    for where in ONE_OR_MORE:
        settings = {"system": "lru:prediction=lookahead:distance=2", "predict": "inline", "memory": "60%"}
        with loaded(case.store, **settings, **where) as model:
            generate(model, case.prompts)
            stats = expertly.stats(model).as_dict()
            assert stats["prediction"]["predictions_late"] == 0
            decode = stats["phases"]["decode"]
            found.append([decode[name] for name in ("predicted", "predicted_needed", "predicted_of")])
    assert found[0] == found[1] == found[2] and found[0][1] > 0


def test_what_a_pass_shows_is_published_once(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case, diary = cases["qwen3_moe"], Diary("experts", "embedding")
    system = predictors.put(monkeypatch, lambda geometry: diary)
    with loaded(case.store, devices=THREE, system=system, predict="inline", memory="100%") as model:
        generate(model, case.prompts, 5)
        assert len(diary.began) == len(diary.ends) == 5
        assert [[one.layer for one in routed] for routed in diary.routed] == [[0, 1, 2]] * 5
        assert all(max(one.router.experts) > 2 for one in diary.routed[0]), "experts by their numbers in the model"


# -- one observation queue for all -----------------------------------------------------------------------------------

SHAPE = Geometry((LayerGeometry(6, 2, 8, 4, 3, 2),) * 3)


def shared_by_two(predictor: Predictor) -> SharedChannel:
    return SharedChannel(InlineChannel(predictor), Placement(SHAPE, 2))


def shown(layer: int) -> Any:
    return lambda: Routed(RouterRan(layer, [0], [1], [True], 1))


def start() -> Began:
    return Began(np.zeros(1, np.int64), np.zeros(1, np.bool_))


def test_a_device_hears_of_its_experts_and_of_no_step_before_it_has_come_there() -> None:
    """One device is already at layer 0's router while the other has yet to see what came before."""
    fast, slow = shared_by_two(Everything(SHAPE)).of_shards
    for one in (fast, slow):
        one.begin_iteration(-1, start)
    fast.router_ran(0, shown(0))
    first, second = ([one.take() for _ in range(6)] for one in (fast, slow))
    assert [seen and seen.step for seen in first] == [-1, -1, -1, 0, 0, None], "of layers 0 to 2, then 1 and 2"
    assert [seen and seen.step for seen in second] == [-1, -1, -1, None, None, None], "it is not at step 0 yet"
    assert first[0] is not None and second[0] is not None
    held = [share.experts[0] for share in Placement(SHAPE, 2).shares]
    named = [held[number][e] for number, seen in enumerate((first[0], second[0])) for e in seen.prediction.experts]
    assert sorted(named) == list(range(6))
    slow.router_ran(0, shown(0))
    after = slow.take()
    assert after is not None and (after.step, after.prediction.layer) == (0, 1)


def test_an_end_is_told_once_and_a_failed_beginning_has_none() -> None:
    diary = Diary("experts")
    first, second = shared_by_two(diary).of_shards
    with pytest.raises(NotImplementedError):
        first.begin_iteration(-1, raising(NotImplementedError()))
    second.begin_iteration(-1, start)
    for one in (first, second):
        one.begin_iteration(2, start)
    for one in (second, first):
        one.end_iteration(False)
    assert len(diary.began) == 1 and diary.ends == [False]


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["100%", "50%"])
def test_memory_is_divided_in_proportion_to_experts(memory: str, cases: Cases) -> None:
    case = cases["qwen3_moe"]
    with loaded(case.store, devices=THREE, memory=memory, segments=4) as model:
        stats = expertly.stats(model).as_dict()
        for name in ("memory_bytes", "kept_bytes", "ring_bytes"):
            assert stats[name] == sum(one[name] for one in stats["devices"])
        assert stats["memory_bytes"] <= stats["expert_bytes"] * int(memory[:-1]) // 100
        assert stats["memory_reason"] == f"memory {memory} over 3 devices"
        for one in stats["devices"]:
            share = stats["expert_bytes"] * one["experts"] // 24
            assert one["memory_bytes"] <= share * int(memory[:-1]) // 100
            assert one["resident_bytes"] <= one["memory_bytes"]


def test_too_little_memory_names_the_least_that_works(cases: Cases) -> None:
    store = str(cases["qwen3_moe"].store)
    named = r"memory=\d+ bytes over 2 devices.*the least that works is \d+ bytes"
    with pytest.raises(BudgetError, match=named) as caught:
        expertly.load(store, memory="10%", devices=TWO)
    least = int(str(caught.value).split("the least that works is ")[1].split()[0])
    with pytest.raises(BudgetError):
        expertly.load(store, memory=least - 1, devices=TWO)
    with loaded(store, memory=least, devices=TWO) as model:
        assert generate(model, cases["qwen3_moe"].prompts) == cases["qwen3_moe"].tokens
    with pytest.raises(BudgetError, match="staging_slots=0: must be at least 1 segment"):
        expertly.load(store, memory="60%", staging_slots=0, devices=TWO)


def test_auto_takes_what_is_free_once(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logical devices share the machine's memory; the dense part is on the first only."""
    store = cases["qwen3_moe"].store
    with loaded(store) as model:
        whole, geometry = expertly.stats(model).as_dict()["expert_bytes"], handle(model).engine.executor.geometry
    free = (600 << 20) + (4 << 20) + whole * 3 // 4
    for kind in (cpu.KIND, cuda.KIND):
        monkeypatch.setattr(kind, "available_nbytes", lambda target: free)
    with loaded(store, devices=TWO, memory="auto", context=8) as model:
        stats = expertly.stats(model).as_dict()
        assert stats["memory_reason"].startswith("memory auto over 2 devices: cpu: ")
        assert stats["memory_bytes"] <= whole
    targets = [torch.device("cuda:0"), torch.device("cuda:1")]
    beside = BesideExperts(1 << 20, WORKING_NBYTES, 1 << 17)
    amounts, reason, _ = choose_amounts(targets, [geometry] * 2, beside, 8)
    assert amounts == [whole, whole] and "cuda:0: " in reason and "; cuda:1: " in reason
    monkeypatch.setattr(cuda.KIND, "available_nbytes", lambda target: (600 << 20) + (target.index + 1) * 30_000)
    amounts, _, _ = choose_amounts(targets, [geometry] * 2, BesideExperts(10_000, WORKING_NBYTES, 625), 8)
    assert amounts == [15_000, 60_000], "each its own, the first after the dense part and the cache"


# -- which devices ---------------------------------------------------------------------------------------------------


def test_devices_of_two_kinds_or_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert choose_devices(None, "cuda:0, cuda:1") == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert choose_devices(None, "cuda:0,cuda:0") == [torch.device("cuda:0")] * 2, "for tests on one"
    assert choose_devices(None, None) == [torch.device("cuda")]
    with pytest.raises(ConfigError, match=r"devices='cuda:0,cpu:0': accepted: devices of one kind"):
        choose_devices(None, "cuda:0,cpu:0")
    with pytest.raises(ConfigError, match=r"devices='cuda:2': there is no such device; accepted: cuda:0, cuda:1"):
        choose_devices(None, "cuda:0,cuda:2")
    with pytest.raises(ConfigError, match=r"device='cuda:9': there is no such device"):
        choose_devices("cuda:9", None)
