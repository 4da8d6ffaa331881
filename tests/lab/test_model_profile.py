"""What is measured of a tiny model: everything is there, makes sense, and is a hardware file afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import expertly
from expertly.api import handle
from expertly.core.errors import ConfigError, ModelUseError
from expertly.core.messages import Span
from expertly.engine.compute import LayerCall
from expertly.engine.observe import Collector
from expertly.lab.model_profile import TOKENS, ModelProfile, measure_model
from expertly.lab.planning import Planning
from expertly.model.hooks import experts_modules
from expertly.model.packing import pack
from expertly.policies.eviction.reuse import ReuseModel
from expertly.policies.predictor.lookahead import Lookahead
from tests.engine.conftest import Cases
from tests.families import FAMILIES, make_checkpoint


def measured(store: Path, **kwargs: object) -> ModelProfile:
    model, _ = expertly.load(str(store), device="cpu", system="lru", **({"memory": "60%"} | kwargs))
    try:
        return measure_model(model, seconds=2.0)
    finally:
        expertly.unload(model)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> ModelProfile:
    """Of experts large enough that their arithmetic costs more than what is around it."""
    folder = tmp_path_factory.mktemp("profile")
    family = replace(
        FAMILIES["mixtral"], config=FAMILIES["mixtral"].config | {"hidden_size": 256, "intermediate_size": 512}
    )
    pack(make_checkpoint(family, folder / "checkpoint"), folder / "store")
    return measured(folder / "store", segments=4)


@pytest.mark.alone
def test_all_costs_are_there(profile: ModelProfile):
    compute = profile.compute
    assert compute.num_layers == 3 and compute.layer.num_experts == 8 and compute.dtype == "float32"
    assert compute.tokens == TOKENS
    for times_ns in (compute.dense_ns, compute.head_ns, compute.expert_ns, compute.parts_ns):
        assert len(times_ns) == len(TOKENS) and all(1_000 < ns < 10**9 for ns in times_ns), times_ns
    assert all(ns >= 0 for ns in compute.part_ns) and min(compute.submit_ns, compute.load_ns) >= 0
    assert 1 <= compute.slowdown_while_loading < 100
    link, one = profile.link, next(layer for layer in profile.layers if layer.num_absent == 1)
    # Noise may leave a latency of 0, as the fit has no negative numbers.
    load_ns = link.latency_ns + compute.layer.expert_nbytes / link.nbytes_per_s * 1e9
    assert one.total_ns / 10 < load_ns < 2 * one.total_ns, "a layer that loads one expert waits for most of that"
    assert profile.link.prefetch_latency_ns > 0 and profile.link.prefetch_read_nbytes == 1 << 20


@pytest.mark.alone
def test_more_tokens_cost_more(profile: ModelProfile):
    assert profile.compute.expert_ns[-1] > 2 * profile.compute.expert_ns[0]
    assert profile.compute.parts_ns[-1] > 2 * profile.compute.parts_ns[0]


def test_decode_steps_of_one_token_alone(cases: Cases):
    """All that a configurator needs, in a fraction of the time."""
    model, _ = expertly.load(str(cases["mixtral"].store), device="cpu", memory="60%", system="lru", segments=4)
    found = measure_model(model, seconds=0, tokens=(1,))
    expertly.unload(model)
    assert found.compute.tokens == (1,)
    for times_ns in (found.compute.dense_ns, found.compute.head_ns, found.compute.expert_ns):
        assert len(times_ns) == 1 and times_ns[0] > 0
    assert found.link.nbytes_per_s > 0 and found.compute.slowdown_while_loading >= 1


def test_the_model_still_works_and_is_consistent(cases: Cases):
    case = cases["qwen2_moe"]
    model, _ = expertly.load(str(case.store), device="cpu", memory="60%", system="lfu")
    measure_model(model, seconds=0.1)
    prompt = torch.tensor([case.prompts[0]])
    out = model.generate(prompt, max_new_tokens=4, do_sample=False)
    assert out[0, prompt.shape[1] :].tolist() == case.tokens[0][:4]
    expertly.unload(model)


def test_what_a_load_leaves_behind_is_its_cost_and_not_that_of_every_layer(cases: Cases):
    """After a layer that loaded, the model is slow for 3 ms, as a processor with cold caches is for less."""
    model, _ = expertly.load(str(cases["mixtral"].store), device="cpu", memory="60%", system="lru")
    counters, loaded = handle(model).engine.scheduler.counters, dict[int, int]()

    def slow(layer: int, *_: object) -> None:
        before, loaded[layer] = loaded.get(layer, 0), counters[layer].decode.loaded_nbytes
        if loaded[layer] > before:
            time.sleep(0.003)

    for layer, module in enumerate(experts_modules(model)):
        module.register_forward_hook(partial(slow, layer))
    compute = measure_model(model, seconds=0.5, tokens=(1,)).compute
    expertly.unload(model)
    assert compute.submit_ns > 2_000_000 > compute.dense_ns[0] + compute.head_ns[0] / compute.num_layers


@pytest.mark.alone
def test_what_observers_and_policies_take_of_a_pass_is_measured(cases: Cases, monkeypatch: pytest.MonkeyPatch):
    def slow(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (time.sleep(seconds), function(*args))[1]

    def in_proportion(spans: Sequence[Span]) -> None:
        together.add(len(spans))
        time.sleep(0.003 + 0.002 * len(spans))
        original(spans)

    def decided(planning: Planning, layer: int, num_guessed: int) -> tuple[int, int]:
        planned.add(num_guessed)
        return num_guessed * planning._geometry.segments_per_expert, 10_000_000 + 20_000_000 * num_guessed

    planned, together = set[int](), set[int]()
    monkeypatch.setattr(Planning, "ran", decided)
    monkeypatch.setattr(Collector, "routed", slow(0.002, Collector.routed))
    monkeypatch.setattr(Lookahead, "router_ran", slow(0.005, Lookahead.router_ran))
    monkeypatch.setattr(ReuseModel, "observe", slow(0.006, ReuseModel.observe))
    model, _ = expertly.load(str(cases["mixtral"].store), device="cpu", memory="60%", system="lru")
    device = handle(model).engine.device
    original = device.prefetch
    monkeypatch.setattr(device, "prefetch", in_proportion)
    found = measure_model(model, seconds=0.5, tokens=(1,))
    expertly.unload(model)
    compute, link, most = found.compute, found.link, max(together)
    assert link.prefetches_when_called == device.prefetches_when_called
    num_latencies = -(-most // 4) if link.arrive_together else most  # small ones begin four at a time
    assert link.prefetch_latency_ns * num_latencies == pytest.approx(3e6 + 2e6 * most + link.latency_ns, rel=0.2)
    assert planned == {1, 2}, "one expert, and as many as a layer needs"
    assert 1_500_000 < compute.observe_ns < 3_500_000 and compute.decide_ns > 5_500_000
    assert compute.plan_ns == 10_000_000
    assert 2_500_000 < compute.prefetch_ns < 4_500_000
    assert 21_000_000 < compute.prefetch_each_ns < 23_000_000, "2 ms each, and 20 to decide about them"
    assert found.predictor.inline_ns is not None
    assert 5_000_000 < found.predictor.call_ns < 7_000_000 < found.predictor.inline_ns < 10_000_000
    assert found.predictor.light_ns is not None and compute.observe_light_ns is not None
    assert found.predictor.light_ns < 2_000_000 and compute.observe_light_ns < 3_500_000, "by counts alone"
    assert found.predictor.inline_light_ns is not None
    assert 1_500_000 < found.predictor.inline_light_ns < 3_500_000, "with showing the router"


def test_a_part_of_an_expert_costs_a_call_of_its_own(cases: Cases, monkeypatch: pytest.MonkeyPatch):
    compute = LayerCall.compute
    monkeypatch.setattr(LayerCall, "compute", lambda *args: (time.sleep(0.003), compute(*args))[1])
    model, _ = expertly.load(str(cases["mixtral"].store), device="cpu", memory="60%", system="lru", segments=4)
    found = measure_model(model, seconds=0, tokens=(1,)).compute
    expertly.unload(model)
    assert found.part_ns[0] > 2_500_000


def test_spans_that_are_loaded_together_have_places_of_their_own(cases: Cases, monkeypatch: pytest.MonkeyPatch):
    """A first read is compared with its checksum: two in one place would be told as damage."""
    model, _ = expertly.load(str(cases["mixtral"].store), device="cpu", memory="60%", system="lru", staging_slots=3)
    device, together = handle(model).engine.device, list[int]()

    def submit(spans: Sequence[Span]) -> None:
        together.append(len(spans))
        assert len({span.slot for span in spans}) == len(spans)
        original(spans)

    original = device.submit
    monkeypatch.setattr(device, "submit", submit)
    profile = measure_model(model, seconds=0.2, tokens=(1,))
    expertly.unload(model)
    assert max(together) > 1 and profile.link.nbytes_per_s > 0


@pytest.mark.parametrize("together", [False, True])
def test_whether_spans_arrive_together_is_measured(
    together: bool, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all take their time before the first is there, and where each does."""
    model, _ = expertly.load(str(cases["mixtral"].store), device="cpu", memory="60%", system="lru", staging_slots=3)
    device = handle(model).engine.device
    submit, wait = device.submit, device.wait

    def slow_submit(spans: Sequence[Span]) -> None:
        time.sleep(0.03 * len(spans) * together)
        submit(spans)

    def slow_wait() -> Span:
        time.sleep(0.03 * (not together))
        return wait()

    monkeypatch.setattr(device, "submit", slow_submit)
    monkeypatch.setattr(device, "wait", slow_wait)
    profile = measure_model(model, seconds=0, tokens=(1,))
    expertly.unload(model)
    assert profile.link.arrive_together == together


@pytest.mark.parametrize(
    ("family", "memory", "error", "said"),
    [
        ("mixtral", "100%", ConfigError, "memory="),
        ("mixtral", "9%", ConfigError, "memory="),
        ("switch_transformers", "60%", ModelUseError, "encoder-decoder"),
    ],
)
def test_what_cannot_be_measured(cases: Cases, family: str, memory: str, error: type[Exception], said: str):
    with pytest.raises(error, match=said):
        measured(cases[family].store, memory=memory)
