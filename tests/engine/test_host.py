"""Experts that a device lacks and the host's processors compute, with a device that is RAM."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import expertly
from expertly.api import handle
from expertly.cli.stats_report import report
from expertly.core.costs import HostCompute, Link
from expertly.core.errors import ConfigError
from expertly.engine import cpu
from expertly.engine.host import measure_misses
from expertly.native.kernels import VARIABLE
from tests.engine.conftest import Cases
from tests.engine.failing import raising
from tests.engine.observe import loaded, recorded_decisions
from tests.engine.streams import put_in_place, run_random_layers
from tests.families import generate
from tests.model.checkpoints import make_mxfp4_checkpoint

pytestmark = pytest.mark.timeout(120)

EQUAL = Link(1e9, 0), HostCompute(1e9, 1e18, 0, 1.0)
"""A copy takes as long as computing on the host."""


def accelerator(monkeypatch: pytest.MonkeyPatch, costs: Any = EQUAL, **more: Any) -> list[Any]:
    """As `put_in_place`, with a host that may compute."""
    made = put_in_place(monkeypatch, **more)
    monkeypatch.setattr(cpu.KIND, "miss_costs", lambda device, dtype: costs)
    monkeypatch.setattr(cpu.KIND, "host_nbytes", lambda device, host_memory, nbytes: nbytes)
    return made


@pytest.mark.parametrize(
    ("system", "asked", "family", "segments", "kernels"),
    [
        ("lru", "auto", "qwen3_moe", 1, "auto"),
        ("lru", "always", "gpt_oss", 1, "torch"),
        ("expertly", "auto", "mixtral", 1, "torch"),
        ("expertly", "always", "qwen3_moe", 4, "auto"),
        ("expertly-ahead", "auto", "gpt_oss", 1, "auto"),
        ("expertly-ahead", "auto", "qwen3_moe", 4, "torch"),
        ("expertly-ahead", "always", "mixtral", 1, "auto"),
    ],
)
def test_tokens_do_not_depend_on_where_a_missing_expert_is_computed(
    system: str, asked: str, family: str, segments: int, kernels: str, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, kernels)
    case, made = cases[family], accelerator(monkeypatch)
    options = {"system": system, "segments": segments, "cpu_misses": asked}
    with recorded_decisions() as decisions, loaded(case.store, memory="60%", **options) as model:
        for _ in range(3):
            assert generate(model, case.prompts) == case.tokens
        made[0].tier.check()
        scheduler = handle(model).engine.scheduler
        scheduler.check()
        stats = expertly.stats(model).as_dict()
        decode = stats["phases"]["decode"]
        assert "of the misses were computed by the processor" in report(stats)
        assert 0 < decode["computed_on_host"] <= decode["misses"]
        if asked == "auto":
            assert decode["computed_on_host"] < decode["misses"], "the other half is copied"
        if system == "lru":
            assert decode["prefetched_bytes"] > 0, "it keeps all of them: they come afterwards"
    assert decisions.num("end_layer") > 10 and decisions.difference() is None


@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_the_forward_thread_waits_for_the_device_once_a_layer(
    num_rows: int, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "torch")
    made = accelerator(monkeypatch)
    with loaded(cases["qwen3_moe"].store, memory="45%", cpu_misses="always") as model:
        run_random_layers(model, num_rows)
        assert made[0].stats()["synchronisations"] == 6
        stats = expertly.stats(model).as_dict()["phases"]
        assert sum(stats[phase]["computed_on_host"] for phase in stats) > 0


def test_always_is_always(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a prompt so long that its hidden states are more bytes than an expert."""
    accelerator(monkeypatch)
    with loaded(cases["qwen3_moe"].store, memory="45%", cpu_misses="always") as model:
        model(torch.randint(0, 100, (1, 500)), use_cache=False)
        prefill = expertly.stats(model).as_dict()["phases"]["prefill"]
        assert prefill["computed_on_host"] == prefill["misses"] > 0


def test_a_host_that_does_not_pay_computes_nothing(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["qwen3_moe"]
    accelerator(monkeypatch, (Link(1e9, 0), HostCompute(1e8, 1e18, 0, 1.0)))
    with loaded(case.store, memory="45%") as model:
        assert generate(model, case.prompts) == case.tokens
        assert handle(model).engine.scheduler.split is None
    accelerator(monkeypatch)
    with loaded(case.store, memory="45%", cpu_misses="never") as model:
        assert handle(model).engine.scheduler.split is None


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_host_without_kernels_for_a_format_is_not_asked(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured are products of whole weights: torch decodes a format a hundred times as slowly."""
    monkeypatch.setenv(VARIABLE, kernels)
    folder = make_mxfp4_checkpoint(tmp_path / "checkpoint")
    accelerator(monkeypatch)
    with loaded(folder, memory="45%") as model:
        assert (handle(model).engine.scheduler.split is None) == (kernels == "torch")
    with loaded(folder, memory="45%", cpu_misses="always") as model:
        assert handle(model).engine.scheduler.split is not None


@pytest.mark.usefixtures("peers")
def test_where_no_host_can_compute_always_is_refused(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(why: str, **options: Any) -> None:
        with pytest.raises(ConfigError, match=rf"^cpu_misses='always': {why}.*; accepted: auto, never$"):
            expertly.load(str(cases["qwen3_moe"].store), cpu_misses="always", learned="off", **options)

    refused("there is no host tier behind cpu", device="cpu")
    with pytest.raises(ConfigError, match=r"^cpu_misses='mostly': unknown; accepted: auto, never, always$"):
        expertly.load(str(cases["qwen3_moe"].store), cpu_misses="mostly")
    accelerator(monkeypatch)
    refused("workers have experts", device="cpu", workers=1)
    for system in ("resident", "moepic"):
        refused(f"system '{system}' keeps parts of experts, or all of them", system=system)
    monkeypatch.setattr(cpu.KIND, "host_nbytes", lambda device, host_memory, nbytes: nbytes - 1)
    refused("the host tier does not hold all experts", device="cpu")


def test_a_host_that_fails_fails_the_pass_and_the_next_one_runs(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["qwen3_moe"]
    accelerator(monkeypatch)
    with loaded(case.store, memory="45%", cpu_misses="always") as model:
        host = handle(model).engine.executor.shard._host
        with monkeypatch.context() as patch:
            patch.setattr(host._device, "reach", raising(ZeroDivisionError()))
            with pytest.raises(ZeroDivisionError):
                generate(model, case.prompts)
        assert generate(model, case.prompts) == case.tokens


def test_what_is_measured_is_what_both_do_at_once() -> None:
    link, host = measure_misses(torch.bfloat16, lambda: time.sleep(0.002), 1 << 20, 0.02)
    assert 1e5 < link.nbytes_per_s <= (1 << 20) / 0.002
    assert 1e7 < host.nbytes_per_s < 1e13 and host.flops_per_s > host.nbytes_per_s
    assert 1.0 <= host.link_slowdown < 100
