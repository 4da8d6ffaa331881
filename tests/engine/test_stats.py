"""The counters say what happened: held against the reference's routing and against the bytes that were read."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from typing import Any
from unittest.mock import Mock

import pytest

import expertly
from tests.engine.conftest import Cases
from tests.engine.disk import Preads
from tests.engine.observe import COUNTS, loaded, recording
from tests.engine.streams import Accelerator, Link, put_in_place
from tests.families import FAMILIES, generate, load_reference, make_prompts

SUMMED = (*COUNTS, "demanded_bytes", "hit_bytes", "bytes_loaded", "evicted_bytes", "stall_s", "experts_s", "compute_s")


@pytest.mark.parametrize(("family", "segments"), [("qwen3_moe", 4), ("deepseek_v3", 1), ("jamba", 4)])
def test_hits_partial_hits_and_misses_are_what_the_routing_demanded(family: str, segments: int, cases: Cases) -> None:
    case = cases[family]
    prompt = make_prompts(1, length=11, seed=2)
    reference = load_reference(case.folder)
    with recording(reference) as recorder:
        expected = generate(reference, prompt, 10)
    with loaded(case.store, segments=segments, memory="40%") as model:
        assert generate(model, prompt, 10) == expected
        stats = expertly.stats(model).as_dict()
    prefill, decode = stats["phases"]["prefill"], stats["phases"]["decode"]
    assert (prefill["iterations"], decode["iterations"]) == (1, 9)
    assert (prefill["tokens"], decode["tokens"]) == (11, 9)
    assert sum(prefill[name] for name in COUNTS) == recorder.num_demands(lambda call: len(call.index) == 11)
    assert sum(decode[name] for name in COUNTS) == 9 * FAMILIES[family].num_moe_layers * FAMILIES[family].top_k
    for layer in range(FAMILIES[family].num_moe_layers):
        demands = recorder.num_demands(lambda call, layer=layer: call.layer == layer)  # type: ignore[misc]
        counted = stats["layers"][layer]
        assert sum(counted[phase][name] for phase in ("prefill", "decode") for name in COUNTS) == demands
    expert_nbytes = stats["expert_bytes"] // (8 * FAMILIES[family].num_moe_layers)
    for phase in (prefill, decode):
        assert phase["demanded_bytes"] == expert_nbytes * sum(phase[name] for name in COUNTS)
        assert phase["bytes_loaded"] == phase["demanded_bytes"] - phase["hit_bytes"], "what was absent, and no more"
        assert phase["hit_rate"] == phase["hits"] / sum(phase[name] for name in COUNTS)
        assert phase["byte_hit_rate"] == phase["hit_bytes"] / phase["demanded_bytes"]
    if segments == 1:
        assert not prefill["partial_hits"] and not decode["partial_hits"]


@pytest.mark.parametrize(("system", "segments"), [("on-demand", 4), ("lru", 1), ("static", 4)])
def test_bytes_loaded_are_the_bytes_read_from_the_files(
    system: str, segments: int, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases["qwen3_moe"]
    lock, read = threading.Lock(), {"nbytes": 0, "direct": 0}

    def counting(file: int, buffer: memoryview, offset: int) -> int:
        nbytes = os.preadv(file, [buffer], offset)
        with lock:
            read["nbytes"] += nbytes
            read["direct"] += nbytes * bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)
        return nbytes

    Preads(monkeypatch, counting)
    # A check at first reading reads a block of which a segment is a part, as a whole.
    with loaded(case.store, system=system, segments=segments, memory="35%", verify="never") as model:
        for _ in range(2):
            assert generate(model, case.prompts) == case.tokens
        stats = expertly.stats(model).as_dict()
    assert stats["bytes_loaded"] == stats["bytes_disk"] == read["nbytes"] > 0
    assert stats["bytes_buffered"] == read["nbytes"] - read["direct"]


@pytest.mark.parametrize(("family", "place"), [("qwen3_moe", {}), ("qwen3_moe", {"workers": 1})])
@pytest.mark.usefixtures("peers")
def test_layers_sum_to_the_totals_and_json_takes_them(family: str, place: dict[str, Any], cases: Cases) -> None:
    case = cases[family]
    with loaded(case.store, segments=4, memory="40%", **place) as model:
        generate(model, case.prompts)
        stats = expertly.stats(model)
        result = json.loads(json.dumps(stats.as_dict(), allow_nan=False))
        assert result == stats.as_dict()
        for phase in ("prefill", "decode"):
            for name in SUMMED:
                total = sum(layer[phase][name] for layer in result["layers"])
                assert result["phases"][phase][name] == pytest.approx(total, rel=1e-9), (phase, name)
            for part in [result["phases"], *result["layers"]]:
                item = part[phase]
                assert 0 <= item["stall_s"] <= item["experts_s"]
                assert item["compute_s"] == pytest.approx(item["experts_s"] - item["stall_s"])
        assert result["bytes_loaded"] == sum(each["bytes_loaded"] for each in result["phases"].values())
        assert result["stall_s"] == pytest.approx(sum(each["stall_s"] for each in result["phases"].values()))
        most = 0.4 * len(result["devices"]) * result["expert_bytes"]
        assert result["kept_bytes"] + result["ring_bytes"] == result["memory_bytes"] <= most
        for each in result["devices"]:
            assert 0 < each["resident_bytes"] <= each["kept_bytes"] < each["memory_bytes"]


def test_times_of_an_accelerator_are_its_own(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels take 5 ms an expert, its link 6 ms: on its clock, which stands still while this test runs."""
    case = cases["qwen3_moe"]
    for system, memory in (("resident", "100%"), ("on-demand", "25%")):
        link = Link(1e6, 0)
        put_in_place(monkeypatch, make=lambda link=link: Accelerator(link, kernel_ns=5_000_000))  # type: ignore[misc]
        with loaded(case.store, system=system, memory=memory) as model:
            assert generate(model, case.prompts) == case.tokens
            decode = expertly.stats(model).as_dict()["phases"]["decode"]
        num_used, copied_s = decode["hits"] + decode["misses"], decode["bytes_loaded"] / 1e6
        assert decode["experts_s"] >= 0.005 * num_used
        assert decode["stall_s"] == pytest.approx(max(0.0, copied_s - 0.005 * num_used), abs=0.5 * copied_s)


def test_a_failed_pass_is_no_iteration(cases: Cases) -> None:
    case = cases["qwen3_moe"]
    with loaded(case.store) as model:
        hook = model.model.layers[1].register_forward_hook(Mock(side_effect=RuntimeError("stop")))
        with pytest.raises(RuntimeError, match="stop"):
            generate(model, case.prompts)
        hook.remove()
        phases = expertly.stats(model).as_dict()["phases"]
        assert phases["prefill"]["iterations"] == phases["prefill"]["tokens"] == 0
        assert phases["prefill"]["misses"] > 0, "but what it loaded was loaded"
        generate(model, case.prompts, 3)
        assert expertly.stats(model).as_dict()["phases"]["prefill"]["iterations"] == 1
