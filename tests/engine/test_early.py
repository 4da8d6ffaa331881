"""Layers that begin before the host knows which experts are chosen, on a simulated accelerator."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import expertly
from expertly.api import handle
from expertly.engine import shard
from expertly.model.hooks import experts_modules
from tests.engine.conftest import Cases
from tests.engine.observe import loaded
from tests.engine.slot_kernels import put_slot_kernels
from tests.engine.streams import Accelerator, Link, OnDevice, put_in_place
from tests.engine.test_compute import relative_error
from tests.families import HIDDEN_SIZE, NUM_EXPERTS, generate

pytestmark = pytest.mark.timeout(120)

COUNTS = ("hits", "partial_hits", "misses", "bytes_loaded", "evicted_bytes", "demanded_bytes", "hit_bytes")


def random_call(dice: torch.Generator, num_tokens: int, top_k: int = 3) -> Sequence[torch.Tensor]:
    """Hidden states, ids and weights; some ids are no experts, and some chosen twice."""
    hidden, weights = (torch.randn(num_tokens, size, generator=dice) for size in (HIDDEN_SIZE, top_k))
    return hidden, torch.randint(0, NUM_EXPERTS + 1, (num_tokens, top_k), generator=dice), weights.abs()


def put_early(patch: pytest.MonkeyPatch, link: float, span_ns: int, host_share: int = 100, **more: int) -> Any:
    """Kernels over slots on an accelerator whose link has so many bytes a second; its devices, when they are made."""
    accelerator = Accelerator(Link(link, 0), **more)
    devices = put_in_place(patch, host_share, lambda: accelerator)
    return accelerator, put_slot_kernels(patch, accelerator, span_ns=span_ns), devices


# -- what does not change ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "memory", "segments", "share"),
    [
        ("lru", "25%", 1, 100),
        ("lru", "45%", 4, 25),
        ("expertly", "30%", 1, 100),
        ("lfu:admission=best", "30%", 4, 100),
        ("expertly-ahead", "45%", 4, 100),
        ("moe-infinity", "60%", 1, 100),
        ("resident", "100%", 1, 100),
        ("lru", "100%", 4, 100),
    ],
)
def test_tokens_and_decisions_are_the_same(
    system: str, memory: str, segments: int, share: int, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels that take much longer than copies: an eviction overwrites nothing that a queued kernel reads, which
    the accelerator checks.
    """
    case, result, predicts = cases["qwen3_moe"], [], system in ("expertly-ahead", "moe-infinity")
    for most_tokens in (4, 0):
        monkeypatch.setattr(shard, "EARLY_TOKENS", most_tokens)
        _, _, made = put_early(monkeypatch, 1e10, 50_000, share, host_ns=100)
        with loaded(case.store, memory=memory, system=system, segments=segments) as model:
            for _ in range(2):
                assert generate(model, case.prompts) == case.tokens
            made[0].tier.check()
            stats = expertly.stats(model).as_dict()
        kernels, phases = stats["kernels"], stats["phases"]
        result.append([{name: phases[phase][name] for name in COUNTS} for phase in ("prefill", "decode")])
        assert (kernels["early"] > 0) == (most_tokens > 0) and kernels["torch"] == 0
        assert kernels["early"] <= phases["decode"]["hits"]
        if segments == 1 and not predicts:
            assert kernels["early"] == phases["decode"]["hits"] * (most_tokens > 0), "whatever is there"
    assert result[0] == result[1] or predicts, "when a prefetch arrives depends on the disk"


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_random_choices_are_computed_as_without_an_accelerator(
    family: str, segments: int, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice, luck = torch.Generator().manual_seed(5), random.Random(5)
    calls = [random_call(dice, luck.choice([1, 1, 1, 2, 4, 5])) for _ in range(60)]
    outputs: list[list[torch.Tensor]] = []
    for share in (0, 25, 45, 100):
        with monkeypatch.context() as patch:
            if share:
                _, kernels, _ = put_early(patch, 1e10, 50_000, host_ns=100)
            memory = f"{share or 100}%"
            with loaded(cases[family].store, memory=memory, segments=segments, system="lru") as model:
                modules, of_run = experts_modules(model), []
                for number, call in enumerate(calls):
                    layer = number % len(modules)
                    values = [each.as_subclass(OnDevice) if share else each for each in call]
                    of_run.append(handle(model).engine.forward_experts(modules[layer], layer, *values))
                outputs.append([each.as_subclass(torch.Tensor) for each in of_run])
            assert not share or kernels.counts.early > 20
    for of_run in outputs[1:]:
        for result, expected in zip(of_run, outputs[0], strict=True):
            assert relative_error(result, expected) < 1e-5


# -- what is gained ----------------------------------------------------------------------------------------------------


def test_what_is_resident_is_computed_while_the_host_decides(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host decides for 50 us; three experts take 30, and end at the same time wherever it sleeps."""
    for most_tokens, expected_ns in ((4, 50_000), (0, 80_000)):
        with monkeypatch.context() as patch:
            patch.setattr(shard, "EARLY_TOKENS", most_tokens)
            accelerator, _, _ = put_early(patch, 1e9, 10_000)
            with loaded(cases["qwen3_moe"].store, system="resident", memory="100%") as model:
                engine, begin_layer = handle(model).engine, handle(model).engine.scheduler.begin_layer

                def decide(*router: Any, accelerator: Any = accelerator, begin_layer: Any = begin_layer) -> Any:
                    accelerator.sleep(50_000)
                    return begin_layer(*router)

                patch.setattr(engine.scheduler, "begin_layer", decide)
                accelerator.join()
                begin_ns = accelerator.now_ns
                ids, hidden = torch.tensor([[1, 4, 6]]), torch.randn(1, HIDDEN_SIZE)
                engine.forward_experts(experts_modules(model)[0], 0, hidden, ids, torch.ones(1, 3))
                assert accelerator.stamp() - begin_ns == expected_ns


def test_the_host_waits_for_no_layer_where_everything_is_resident(
    cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, made = cases["qwen3_moe"], put_in_place(monkeypatch)
    put_slot_kernels(monkeypatch)
    with loaded(case.store, system="resident", memory="100%") as model:
        num_layers = len(experts_modules(model))
        generate(model, case.prompts, max_new_tokens=1)
        stats = expertly.stats(model).as_dict()
        assert stats["synchronisations_per_pass"] == num_layers + 2, "a prompt of many tokens"
        before = made[0].stats()["synchronisations"]
        assert generate(model, case.prompts) == case.tokens
        stats, num_decode = expertly.stats(model).as_dict(), len(case.tokens[0]) - 1
        assert stats["phases"]["decode"]["iterations"] == num_decode
        of_decode = made[0].stats()["synchronisations"] - before - (num_layers + 2)
        assert of_decode == 2 * num_decode, "the checks for NaN in stack and head"


def test_a_layer_outside_of_a_pass_counts_and_a_pass_that_fails_counts_what_ran(
    cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three layers; the next pass works."""
    case = cases["qwen3_moe"]
    put_in_place(monkeypatch)
    put_slot_kernels(monkeypatch)
    with loaded(case.store, system="resident", memory="100%") as model:
        (first, _, last), ids = experts_modules(model), torch.tensor([[5]])
        with torch.no_grad():
            model(ids)
            failing = last.register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(ids)
            failing.remove()
        counted = handle(model).engine.scheduler.counters
        assert [each.prefill.hits + each.decode.hits for each in counted] == [6, 6, 3]
        before, token = counted[0].decode.demands, (torch.randn(1, HIDDEN_SIZE), torch.tensor([[1, 4, 6]]))
        handle(model).engine.forward_experts(first, 0, *token, torch.ones(1, 3))
        assert counted[0].decode.demands == before + 3
        assert generate(model, case.prompts) == case.tokens
