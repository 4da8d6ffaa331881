"""Which devices, and how memory is divided over them: what is asked for, what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import expertly
from expertly.api import handle
from expertly.core.errors import BudgetError, ConfigError
from expertly.engine import cpu, cuda
from expertly.engine.device import choose_devices
from expertly.engine.group import choose_amounts
from tests.engine.conftest import Cases
from tests.engine.observe import loaded, reader_threads
from tests.engine.test_devices import THREE, TWO, of_devices
from tests.families import generate

pytestmark = pytest.mark.timeout(120)

# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["100%", "75%", "50%"])
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
    with pytest.raises(
        BudgetError, match=r"memory=\d+ bytes over 2 devices.*the least that works is \d+ bytes"
    ) as caught:
        expertly.load(store, memory="10%", devices=TWO)
    least = int(str(caught.value).split("the least that works is ")[1].split()[0])
    with pytest.raises(BudgetError):
        expertly.load(store, memory=least - 1, devices=TWO)
    with loaded(store, memory=least, devices=TWO) as model:
        assert generate(model, cases["qwen3_moe"].prompts) == cases["qwen3_moe"].tokens
    with pytest.raises(BudgetError, match="ring=0: must be at least 1 segment"):
        expertly.load(store, memory="60%", ring=0, devices=TWO)


def test_auto_takes_what_is_free_once(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logical devices share the machine's memory; the dense part is on the first only."""
    store = cases["qwen3_moe"].store
    with loaded(store) as model:
        whole = expertly.stats(model).as_dict()["expert_bytes"]
    free = (600 << 20) + (4 << 20) + whole * 3 // 4
    for kind in (cpu.KIND, cuda.KIND):
        monkeypatch.setattr(kind, "available_nbytes", lambda target: free)
    with loaded(store, devices=TWO, memory="auto", context=8) as model:
        stats = expertly.stats(model).as_dict()
        assert stats["memory_reason"].startswith("memory auto over 2 devices: cpu: ")
        assert stats["memory_bytes"] <= whole
    amounts, reason = choose_amounts(
        [torch.device("cuda:0"), torch.device("cuda:1")], [handle_geometry(store)] * 2, 1 << 20, 1 << 20, 8
    )
    assert amounts == [whole, whole] and "cuda:0: " in reason and "; cuda:1: " in reason
    monkeypatch.setattr(cuda.KIND, "available_nbytes", lambda target: (600 << 20) + (target.index + 1) * 30_000)
    amounts, _ = choose_amounts(
        [torch.device("cuda:0"), torch.device("cuda:1")], [handle_geometry(store)] * 2, 10_000, 5_000, 8
    )
    assert amounts == [15_000, 60_000], "each its own, the first after the dense part and the cache"


def handle_geometry(store: Path) -> Any:
    with loaded(store) as model:
        return handle(model).engine.executor.geometry


# -- what is asked for -----------------------------------------------------------------------------------------------

BAD = {
    "both": ({"device": "cpu", "devices": TWO}, r"device='cpu' and devices='cpu:0,cpu:1': accepted: one of the two"),
    "none": ({"devices": []}, r"devices=\[\]: accepted: cpu:0,cpu:1"),
    "unknown": ({"devices": "cpu:0,abacus"}, r"devices='abacus': unknown; accepted: cpu, cuda"),
    "empty": ({"devices": "cpu:0,"}, r"devices='': unknown; accepted: cpu, cuda"),
    "no backend": ({"devices": "meta"}, r"devices='meta': no backend for it; accepted: cpu"),
    "no number": ({"devices": "cpu,cpu:1"}, r"devices='cpu': which one\? accepted: cpu:N, as in cpu:0,cpu:1"),
    "too many": ({"devices": [f"cpu:{i}" for i in range(9)]}, r"devices: 9 of them.*only 8 experts; accepted: 1 to 8"),
    "decisions": ({"devices": TWO, "decisions": "x.jsonl"}, r"decisions='x.jsonl': 2 devices decide apart; accepted"),
    "host memory": ({"devices": TWO, "host_memory": "1GiB"}, r"host_memory='1GiB': there is no host tier"),
}


@pytest.mark.parametrize("what", BAD)
def test_devices_that_cannot_be_are_an_error(what: str, cases: Cases) -> None:
    arguments, message = BAD[what]
    with pytest.raises(ConfigError, match=message):
        expertly.load(str(cases["qwen3_moe"].store), memory="60%", **arguments)  # type: ignore[arg-type]
    assert not reader_threads() and not os.path.exists("x.jsonl")


def test_one_of_several_is_one(cases: Cases) -> None:
    case = cases["qwen3_moe"]
    with loaded(case.store, devices=["cpu"]) as model:
        assert generate(model, case.prompts) == case.tokens
        assert [one["device"] for one in of_devices(model)] == ["cpu"]
        assert not [thread for thread in reader_threads() if "device" in thread.name]


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
