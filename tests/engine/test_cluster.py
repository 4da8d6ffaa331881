"""A device and workers as one: the tokens of the unmodified model, counts of its routing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import expertly
from expertly.api import handle
from expertly.engine.wire import Kind
from tests.engine.conftest import Cases
from tests.engine.observe import counts, loaded
from tests.engine.peers import ThreadPeer
from tests.engine.test_batching import run_batch
from tests.families import generate, load_reference, logits_of, make_prompts

pytestmark = pytest.mark.timeout(120)


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("system", ["expertly", "static", "resident"])
def test_every_kind_of_system_is_lossless(system: str, cases: Cases) -> None:
    case = cases["qwen3_moe"]
    memory, segments = ("100%", None) if system == "resident" else ("25%", 4)
    settings: dict[str, Any] = {"workers": 2, "worker_memory": memory, "segments": segments}
    with loaded(case.store, system=system, memory=memory, **settings) as model:
        for _ in range(2):
            assert generate(model, case.prompts) == case.tokens
        devices = expertly.stats(model).as_dict()["devices"]
        assert not any(device["worker"] and device["worker"]["drops"] for device in devices)


@pytest.mark.usefixtures("peers")
def test_bits_and_counts_are_those_without_workers(cases: Cases) -> None:
    """The same products in the same order, in bfloat16, too. What is needed is split, none of it is lost or counted
    twice; without evictions the hits are the same.
    """
    case, logits, demands = cases["qwen3_moe"], [], []
    for workers in ({}, *({"workers": num, "worker_memory": "100%"} for num in (1, 3))):
        with loaded(case.folder, dtype="bfloat16", memory="100%", **workers) as model:
            generate(model, case.prompts)
            logits.append(logits_of(model, case.prompts))
            stats = expertly.stats(model).as_dict()
            phases = stats["phases"]
            demands.append([(*counts(model, phase), phases[phase]["demanded_bytes"]) for phase in phases])
            per_device = [[device[phase]["hits"] for phase in phases] for device in stats["devices"]]
            assert [sum(column) for column in zip(*per_device, strict=True)] == [counts(model, p)[0] for p in phases]
    assert all(torch.equal(each, logits[0]) for each in logits)
    assert all(demand == demands[0] for demand in demands)


def test_continuous_batching_and_inference_mode(cases: Cases, peers: list[ThreadPeer]) -> None:
    """Several requests of different lengths share a call; a worker gets the rows that it needs, not all."""
    case = cases["qwen3_moe"]
    prompts = [*make_prompts(2, length=5, seed=2), *make_prompts(1, length=20, seed=3)]
    expected = [generate(load_reference(case.folder), [prompt], 6)[0] for prompt in prompts]
    with loaded(case.store, segments=4, workers=4, worker_memory="25%") as model:
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
