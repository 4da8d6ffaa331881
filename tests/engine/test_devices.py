"""Several logical devices: the tokens of the unmodified model, experts apart, threads side by side."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import expertly
from expertly import api
from expertly.api import handle
from expertly.core.errors import ConfigError, EngineClosedError
from expertly.engine import backends
from expertly.engine.device_group import DeviceGroup
from expertly.engine.tiered import CudaDevice
from expertly.store.reader import ExpertFile
from tests.engine import predictors
from tests.engine.conftest import Cases
from tests.engine.observe import counts, loaded, open_files, reader_threads
from tests.engine.predictors import Diary, Everything
from tests.engine.test_batching import run_batch
from tests.engine.test_tiered import LateStreams
from tests.families import generate, load_reference, logits_of, make_prompts

pytestmark = pytest.mark.timeout(120)

TWO, THREE = "cpu:0,cpu:1", ["cpu:0", "cpu:1", "cpu:2"]


def group_of(model: Any) -> DeviceGroup:
    group = handle(model).engine.executor
    assert isinstance(group, DeviceGroup)
    return group


def of_devices(model: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = expertly.stats(model).as_dict()["devices"]
    return found


# -- the same tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("devices", [TWO, THREE])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "switch_transformers", "granitemoe"])
def test_tokens_and_logits_are_the_reference(family: str, devices: Any, segments: int, cases: Cases) -> None:
    case = cases[family]
    for system, memory in (("lru", "60%"), ("on-demand", "100%")):
        with loaded(case.store, devices=devices, segments=segments, system=system, memory=memory) as model:
            assert generate(model, case.prompts) == case.tokens, system
            torch.testing.assert_close(logits_of(model, case.prompts), case.logits, rtol=1e-4, atol=1e-5)
            stats = expertly.stats(model).as_dict()
            assert all(one["bytes_loaded"] > 0 for one in stats["devices"])
            assert stats["bytes_loaded"] == stats["bytes_disk"]
            if memory == "100%":
                assert stats["bytes_loaded"] <= stats["expert_bytes"], "each expert is loaded once, by one device"


@pytest.mark.parametrize(
    "system",
    [
        "fmoe",
        "moe-infinity",
        "lru:prediction=lookahead:distance=2",
        "lru:prediction=lookahead:transfer=synchronous",
        "lcp:prediction=popularity:ahead=ring",
        "static",
        "resident",
    ],
)
def test_every_kind_of_system_is_lossless(system: str, cases: Cases) -> None:
    case = cases["qwen3_moe"]
    for matcher in ("auto", "inline") if "prediction" in system or system == "fmoe" else ("auto",):
        memory = "100%" if system == "resident" else "60%"
        with loaded(case.store, devices=TWO, system=system, memory=memory, matcher=matcher, segments=4) as model:
            for _ in range(2):
                assert generate(model, case.prompts) == case.tokens


@pytest.mark.parametrize("order", ["resident", "id"])
def test_a_ring_of_one_segment_on_each(order: str, cases: Cases) -> None:
    case = cases["qwen3_moe"]
    with loaded(case.store, memory="100%") as model:
        segment = expertly.stats(model).as_dict()["expert_bytes"] // (24 * 4)
    with loaded(case.store, devices=TWO, memory=2 * segment, ring=1, segments=4, order=order) as model:
        assert generate(model, case.prompts) == case.tokens
        assert [one["memory_bytes"] for one in of_devices(model)] == [segment, segment]


def test_bfloat16_is_bit_for_bit_the_one_device(cases: Cases) -> None:
    """The same products in the same order: which device computes them changes nothing."""
    case, found = cases["qwen3_moe"], []
    for where in ({"device": "cpu"}, {"devices": TWO}):
        with loaded(case.folder, dtype="bfloat16", memory="60%", **where) as model:
            found.append(logits_of(model, case.prompts))
    assert torch.equal(*found)


def test_continuous_batching_and_inference_mode(cases: Cases) -> None:
    case = cases["qwen3_moe"]
    prompts = [*make_prompts(2, length=5, seed=2), *make_prompts(1, length=20, seed=3)]
    expected = [generate(load_reference(case.folder), [prompt], 6)[0] for prompt in prompts]
    with loaded(case.store, devices=TWO, system="fmoe", memory="60%", segments=4) as model:
        for _ in range(2):
            assert run_batch(model, prompts) == expected
        with torch.inference_mode():
            torch.testing.assert_close(logits_of(model, case.prompts), case.logits, rtol=1e-4, atol=1e-5)


def test_counts_are_those_of_the_routing_whatever_the_devices(cases: Cases) -> None:
    """Demands are split, none is lost or counted twice; a policy that evicts nothing has the same hits."""
    case, found = cases["qwen3_moe"], []
    for where in ({"device": "cpu"}, {"devices": TWO}, {"devices": THREE}):
        with loaded(case.store, memory="100%", **where) as model:
            generate(model, case.prompts)
            phases = expertly.stats(model).as_dict()["phases"]
            found.append([(*counts(model, phase), phases[phase]["demanded_bytes"]) for phase in phases])
            per_device = [[one[phase]["hits"] for phase in phases] for one in of_devices(model)]
            assert [sum(column) for column in zip(*per_device, strict=True)] == [counts(model, p)[0] for p in phases]
    assert found[0] == found[1] == found[2]


# -- experts and threads apart ---------------------------------------------------------------------------------------


def test_experts_are_apart_and_both_devices_read(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each device's threads read from the files are its experts; together they are all that was needed."""
    case, original = cases["qwen3_moe"], ExpertFile.read_into
    with loaded(case.store, devices=TWO, memory="60%") as model:
        group = group_of(model)
        extents = [handle(model).store.layer_extent(layer) for layer in range(3)]
        nbytes = group.geometry.layers[0].expert_nbytes
        lock, seen = threading.Lock(), []
        sources = [one.device._readers._source for one in group.devices]  # type: ignore[attr-defined]
        files = {id(file): number for number, source in enumerate(sources) for file in source._files}

        def noting(file: ExpertFile, offset: int, buffers: Sequence[memoryview]) -> bool:
            with lock:
                seen.append((files[id(file)], file.path, offset))
            return original(file, offset, buffers)

        monkeypatch.setattr(ExpertFile, "read_into", noting)
        assert generate(model, case.prompts) == case.tokens
        read: list[set[tuple[int, int]]] = [set(), set()]
        for device, path, offset in seen:
            layer = next(i for i, (file, _) in enumerate(extents) if file == path)
            read[device].add((layer, (offset - extents[layer][1]) // nbytes))
        assert read[0] and read[1] and not read[0] & read[1]
        for device, of_device in enumerate(read):
            assert {group.placement.device_of(layer, expert) for layer, expert in of_device} == {device}
        moved = [one["bytes_disk"] for one in of_devices(model)]
        assert all(moved) and sum(moved) == expertly.stats(model).as_dict()["bytes_loaded"]
        assert [one["experts"] for one in of_devices(model)] == [12, 12]


def test_devices_work_side_by_side(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's reads of one device are under way while the other's are."""
    case, original = cases["qwen3_moe"], ExpertFile.read_into
    with loaded(case.store, devices=TWO, memory="60%") as model:
        files = {
            id(file): number
            for number, device in enumerate(group_of(model).devices)
            for file in device.device._readers._source._files  # type: ignore[attr-defined]
        }
        lock, running, together = threading.Lock(), [0, 0], [0]

        def slow(file: ExpertFile, offset: int, buffers: Sequence[memoryview]) -> bool:
            number = files[id(file)]
            with lock:
                running[number] += 1
                together[0] += min(running) > 0
            time.sleep(0.01)
            try:
                return original(file, offset, buffers)
            finally:
                with lock:
                    running[number] -= 1

        monkeypatch.setattr(ExpertFile, "read_into", slow)
        assert generate(model, case.prompts, 6) == [tokens[:6] for tokens in case.tokens]
        assert together[0] > 10
        stats = expertly.stats(model).as_dict()
        stalls = [sum(one[phase]["stall_s"] for phase in ("prefill", "decode")) for one in stats["devices"]]
        assert 0 < stats["stall_s"] < sum(stalls), "the model waits for the device that ends last, not for each in turn"


def test_tiered_devices_copy_what_they_load(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of an accelerator, with copies that happen as late as they may."""
    case = cases["mixtral"]
    made: list[CudaDevice] = []

    def make_backend(device: Any, store: Any, geometry: Any, slots: Any, dtype: Any, *host: Any) -> CudaDevice:
        made.append(CudaDevice(torch.device("cpu"), LateStreams(), store, geometry, slots, dtype, geometry.nbytes))
        return made[-1]

    monkeypatch.setattr(api, "make_backend", make_backend)
    with loaded(case.store, devices=TWO, memory="60%", system="fmoe", segments=4) as model:
        for _ in range(2):
            assert generate(model, case.prompts) == case.tokens
        assert len(made) == 2 and all(one.stats()["copied_nbytes"] > 0 for one in made)
        assert expertly.stats(model).as_dict()["bytes_copied"] == sum(one.stats()["copied_nbytes"] for one in made)


# -- predictions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("matcher", ["thread", "inline"])
def test_predictions_are_split_and_loaded_ahead_on_both(
    matcher: str, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases["qwen3_moe"]
    system = predictors.put(monkeypatch, Everything)
    with loaded(case.store, devices=TWO, system=system, matcher=matcher, memory="60%", segments=2) as model:
        for _ in range(20):  # a matcher on a busy machine may be late for all of a short answer
            assert generate(model, case.prompts) == case.tokens
            devices = of_devices(model)
            decode = expertly.stats(model).as_dict()["phases"]["decode"]
            if decode["prefetched_needed"] and all(one["decode"]["prefetched"] for one in devices):
                break
        assert all(one["decode"]["prefetched"] > 0 and one["decode"]["predicted"] > 0 for one in devices)
        assert decode["predicted"] == sum(one["decode"]["predicted"] for one in devices)
        assert decode["prefetched_needed"] > 0 and decode["recall"] == 1.0, "everything was named on one of them"
        assert decode["similarity_correlation_trajectory"] is None, "a part of a prediction has no confidence"


def test_a_lookahead_counts_what_one_device_counts(cases: Cases) -> None:
    """Inline predictions are the same, so what they named and what was needed of it is, too."""
    case, found = cases["qwen3_moe"], []
    for where in ({"device": "cpu"}, {"devices": TWO}):
        with loaded(
            case.store, system="lru:prediction=lookahead:distance=2", matcher="inline", memory="60%", **where
        ) as model:
            generate(model, case.prompts)
            stats = expertly.stats(model).as_dict()
            assert stats["prediction"]["predictions_late"] == 0
            found.append(
                [stats["phases"]["decode"][name] for name in ("predicted", "predicted_needed", "predicted_of")]
            )
    assert found[0] == found[1] and found[0][1] > 0


def test_what_a_pass_shows_is_published_once(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case, made = cases["qwen3_moe"], []

    def make(geometry: Any) -> Diary:
        made.append(Diary("experts", "embedding"))
        return made[0]

    system = predictors.put(monkeypatch, make)
    with loaded(case.store, devices=THREE, system=system, matcher="inline", memory="100%") as model:
        generate(model, case.prompts, 5)
        (diary,) = made
        assert len(diary.began) == len(diary.ends) == 5
        assert [[one.layer for one in routed] for routed in diary.routed] == [[0, 1, 2]] * 5
        assert all(max(one.demand.experts) > 2 for one in diary.routed[0]), "experts by their numbers in the model"


def test_inline_runs_are_the_same_again(cases: Cases) -> None:
    case, found = cases["qwen3_moe"], []
    for _ in range(3):
        with loaded(case.store, devices=TWO, system="fmoe", matcher="inline", memory="60%") as model:
            for _ in range(2):
                generate(model, case.prompts)
            found.append(
                [
                    [one[phase][n] for n in ("hits", "predicted")]
                    for one in of_devices(model)
                    for phase in ("prefill", "decode")
                ]
            )
            assert expertly.stats(model).as_dict()["prediction"]["predictions_late"] == 0
    predicted = [[predicted for _, predicted in one] for one in found]
    assert predicted[0] == predicted[1] == predicted[2] and sum(predicted[0]) > 0


# -- the end ---------------------------------------------------------------------------------------------------------


def test_unload_ends_all_threads_and_files(cases: Cases) -> None:
    case = cases["qwen3_moe"]
    assert not reader_threads()
    model, _ = expertly.load(str(case.store), memory="60%", devices=TWO, system="fmoe", maps="off")
    names = sorted(thread.name for thread in reader_threads())
    assert [name for name in names if "device" in name] == ["expertly-device-0", "expertly-device-1"]
    assert len([name for name in names if "reader" in name]) == 8
    generate(model, case.prompts)
    before = of_devices(model)
    for _ in range(2):
        expertly.unload(model)
        assert not reader_threads() and not open_files(case.store)
    with pytest.raises(EngineClosedError, match=r"unloaded"):
        generate(model, case.prompts)
    assert of_devices(model) == before, "the counters stay to be read"


def test_a_model_that_is_dropped_ends_its_threads(cases: Cases) -> None:
    case = cases["gpt_oss"]
    model, _ = expertly.load(str(case.store), memory="60%", devices=TWO)
    generate(model, case.prompts)
    del model
    gc.collect()
    assert not reader_threads() and not open_files(case.store)


def test_a_load_that_fails_half_way_leaves_nothing(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def make_backend(*args: Any) -> Any:
        if made:
            raise ConfigError("no second one")
        made.append(backends.make_backend(*args))
        return made[0]

    monkeypatch.setattr(api, "make_backend", make_backend)
    with pytest.raises(ConfigError, match="no second one"):
        expertly.load(str(cases["qwen3_moe"].store), memory="60%", devices=TWO)
    assert made and not reader_threads() and not open_files(cases["qwen3_moe"].store)


def test_statistics_are_json(cases: Cases) -> None:
    with loaded(cases["qwen3_moe"].store, devices=TWO, memory="60%", system="fmoe") as model:
        generate(model, cases["qwen3_moe"].prompts)
        stats = expertly.stats(model).as_dict()
        assert json.loads(json.dumps(stats, allow_nan=False)) == stats
        for phase in ("prefill", "decode"):
            total = sum(layer[phase]["stall_s"] for layer in stats["layers"])
            assert stats["phases"][phase]["stall_s"] == pytest.approx(total)
            assert stats["phases"][phase]["stall_s"] <= stats["phases"][phase]["experts_s"]
