"""The same truths on a CUDA device; skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import expertly
from expertly.api import handle
from expertly.model.packing import pack
from tests.engine.conftest import Cases
from tests.families import FAMILIES, generate, load_reference, logits_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("segments", [1, 4])
def test_float32_tokens_and_logits_are_the_reference(family: str, segments: int, cases: Cases) -> None:
    case = cases[family]
    reference = load_reference(case.folder).to("cuda")
    tokens, logits = generate(reference, case.prompts), logits_of(reference, case.prompts)
    for system in ("on-demand", "lru", "lfu"):
        for memory, host_memory in (("25%", "100%"), ("25%", "40%"), ("100%", "100%")):
            label = f"{family} {system} P={segments} {memory} host {host_memory}"
            model, _ = expertly.load(
                str(case.store), memory=memory, host_memory=host_memory, system=system, segments=segments, device="cuda"
            )
            assert generate(model, case.prompts) == tokens, label
            torch.testing.assert_close(logits_of(model, case.prompts), logits, rtol=1e-4, atol=1e-5, msg=label)
            moved = handle(model).engine.device.stats()
            assert moved["copied_nbytes"] == expertly.stats(model).as_dict()["bytes_loaded"] > 0, label
            handle(model).engine.scheduler.check()
            expertly.unload(model)


@pytest.mark.parametrize("segments", [1, 4])
def test_compressed_experts_change_no_token(segments: int, cases: Cases, tmp_path: Path) -> None:
    case = cases["qwen3_moe"]
    reference = load_reference(case.folder).to("cuda")
    tokens = generate(reference, case.prompts)
    pack(case.folder, tmp_path / "store", codec="planes")
    model, _ = expertly.load(
        str(tmp_path / "store"),
        memory="25%",
        host_memory="80%",
        segments=segments,
        device="cuda",
    )
    for _ in range(2):
        assert generate(model, case.prompts) == tokens
    stats = expertly.stats(model).as_dict()
    assert stats["bytes_decoded"] > 0
    expertly.unload(model)


def test_device_memory_is_the_budget_and_is_given_back(cases: Cases) -> None:
    case = cases["mixtral"]
    before = torch.cuda.memory_allocated()
    model, _ = expertly.load(str(case.store), memory="25%", device="cuda")
    stats = expertly.stats(model).as_dict()
    dense = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert torch.cuda.memory_allocated() - before <= 1.5 * dense + stats["memory_bytes"] + (1 << 20)
    expertly.unload(model)
    del model
    assert torch.cuda.memory_allocated() - before <= 1 << 20


def test_a_reused_slot_waits_for_the_kernels_that_read_it(cases: Cases) -> None:
    """A ring of one segment: each copy overwrites what the kernel before it reads."""
    case = cases["qwen3_moe"]
    reference = load_reference(case.folder).to("cuda")
    tokens = generate(reference, case.prompts, 40)
    model, _ = expertly.load(str(case.store), memory="6%", ring=1, segments=4, host_memory="100%", device="cuda")
    for _ in range(5):
        assert generate(model, case.prompts, 40) == tokens
    expertly.unload(model)


@pytest.mark.parametrize("segments", [1, 4])
def test_loading_ahead_changes_no_token(segments: int, cases: Cases) -> None:
    case = cases["qwen3_moe"]
    tokens = generate(load_reference(case.folder).to("cuda"), case.prompts, 40)
    for memory, host_memory in (("25%", "100%"), ("50%", "40%")):
        model, _ = expertly.load(
            str(case.store),
            memory=memory,
            host_memory=host_memory,
            system="fmoe",
            segments=segments,
            device="cuda",
            maps=None,
            matcher="inline",
        )
        for _ in range(2):
            assert generate(model, case.prompts, 40) == tokens, f"{memory} host {host_memory}"
        engine = handle(model).engine
        decode = [counters.decode for counters in engine.scheduler.counters]
        assert sum(phase.prefetched for phase in decode) > 0
        assert engine.device.stats()["copied_nbytes"] <= expertly.stats(model).as_dict()["bytes_loaded"]
        engine.scheduler.check()
        expertly.unload(model)


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("devices", ["cuda:0,cuda:0", "cuda:0,cuda:1"])
def test_several_devices_change_no_token(devices: str, segments: int, cases: Cases) -> None:
    """Also where the model runs on a stream of its own: what each thread queues is ordered by events alone."""
    if devices.endswith("1") and torch.cuda.device_count() < 2:
        pytest.skip("there is one device")
    for family in ("qwen3_moe", "gpt_oss"):
        case = cases[family]
        reference = load_reference(case.folder).to("cuda:0")
        tokens, logits = generate(reference, case.prompts, 40), logits_of(reference, case.prompts)
        for system in ("lru", "fmoe"):
            model, _ = expertly.load(
                str(case.store), memory="60%", system=system, segments=segments, devices=devices, maps=None
            )
            for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    assert generate(model, case.prompts, 40) == tokens, f"{family} {system}"
                    torch.testing.assert_close(logits_of(model, case.prompts), logits, rtol=1e-4, atol=1e-5)
            for device in handle(model).engine.executor.shards:
                assert device.device.stats()["copied_nbytes"] > 0
                device.scheduler.check()
            expertly.unload(model)
