"""Every family, system, P and budget: the tokens and logits of the unmodified model (docs/conventions.md, Lossless)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import expertly
from expertly.api import handle
from expertly.core.errors import BudgetError, ConfigError
from expertly.native.kernels import VARIABLE, libraries
from tests.engine.conftest import Cases
from tests.families import FAMILIES, generate, logits_of

LEAST = "least"
CANNOT_LOOK_AHEAD: tuple[str, ...] = ()
"""Families whose routers need more than hidden states."""


def least_memory(store: str) -> int:
    """The least budget of a store, from the error that names it."""
    with pytest.raises(BudgetError) as caught:
        expertly.load(store, memory=1, device="cpu")
    return int(str(caught.value).split("the least that works is ")[1].split()[0])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("segments", [1, 4])
def test_float32_tokens_and_logits_are_the_reference(family: str, segments: int, cases: Cases) -> None:
    case = cases[family]
    for system in ("on-demand", "lru", "lfu", "expertly", "expertly-ahead"):
        for memory in (LEAST, "25%", "100%"):
            budget = least_memory(str(case.store)) if memory == LEAST else memory
            label = f"{family} {system} P={segments} {memory}"
            options: dict[str, Any] = {"system": system, "segments": segments, "device": "cpu", "maps": "off"}
            try:
                model, _ = expertly.load(str(case.store), memory=budget, **options)
            except ConfigError as error:
                assert system == "expertly-ahead" and "looks ahead" in str(error), label
                assert family in CANNOT_LOOK_AHEAD, label
                break
            try:
                assert generate(model, case.prompts) == case.tokens, label
                torch.testing.assert_close(logits_of(model, case.prompts), case.logits, rtol=1e-4, atol=1e-5, msg=label)
                stats = expertly.stats(model).as_dict()
                decode = stats["phases"]["decode"]
                assert decode["hits"] + decode["partial_hits"] + decode["misses"] > 0, label
                handle(model).engine.scheduler.check()
                if memory == "100%":
                    assert stats["bytes_loaded"] <= stats["expert_bytes"], "each expert is loaded at most once"
                else:
                    assert stats["memory_bytes"] < stats["expert_bytes"]
                    assert decode["bytes_loaded"] > 0, f"{label}: nothing was streamed"
            finally:
                expertly.unload(model)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "switch_transformers"])
def test_a_ring_of_one_segment_streams_a_whole_layer(family: str, cases: Cases) -> None:
    case = cases[family]
    full, _ = expertly.load(str(case.store), memory="100%", device="cpu")
    nbytes = expertly.stats(full).as_dict()["expert_bytes"]
    layers = len(expertly.stats(full).as_dict()["layers"])
    expertly.unload(full)
    one_segment = nbytes // (layers * 8 * 4)
    model, _ = expertly.load(str(case.store), memory=one_segment, ring=1, segments=4, device="cpu")
    assert generate(model, case.prompts) == case.tokens
    assert expertly.stats(model).as_dict()["memory_bytes"] == one_segment
    expertly.unload(model)


@pytest.mark.parametrize(
    "system",
    [
        *("lcp", "random", "static", "resident", "fmoe", "promoe", "deepspeed-index", "brainstorm"),
        *("mixtral-offloading", "moe-infinity-lfu", "lru:prediction=token-id", "moepic"),
        "fmoe:scope=layer:allocation=split:theta=0.25",
    ],
)
@pytest.mark.parametrize("segments", [1, 4])
def test_the_other_systems_change_no_token_either(system: str, segments: int, cases: Cases) -> None:
    case = cases["qwen3_moe"]
    memory = "100%" if system == "resident" else "25%"
    model, _ = expertly.load(str(case.store), memory=memory, system=system, segments=segments, device="cpu", maps="off")
    assert generate(model, case.prompts) == case.tokens
    decode = expertly.stats(model).as_dict()["phases"]["decode"]
    assert decode["hit_rate"] == 1.0 if system == "resident" else decode["misses"] > 0
    expertly.unload(model)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_with_either_kernels(family: str, kernels: str, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests run with what this machine has."""
    available, why = libraries()
    if kernels == "native" and not available:
        pytest.skip(why)
    monkeypatch.setenv(VARIABLE, kernels)
    case = cases[family]
    for segments, memory in ((1, "100%"), (4, "25%")):
        model, _ = expertly.load(str(case.store), memory=memory, segments=segments, device="cpu")
        assert generate(model, case.prompts[:1]) == case.tokens[:1]
        assert generate(model, case.prompts) == case.tokens
        torch.testing.assert_close(logits_of(model, case.prompts), case.logits, rtol=1e-4, atol=1e-5)
        told = expertly.stats(model).as_dict()["kernels"]
        expertly.unload(model)
        assert told["name"].split()[0] == kernels
        assert (told["native"] > 0) == (kernels == "native"), "decode is theirs"
        assert told["torch"] > 0, "a prompt is torch's"


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_close_to_float32_as_transformers_own(family: str, cases: Cases) -> None:
    from tests.families import load_reference

    case = cases[family]
    errors = []
    for implementation in ("grouped_mm", "batched_mm", "eager"):
        if family == "switch_transformers" and implementation != "grouped_mm":
            continue
        extra = {} if family == "switch_transformers" else {"experts_implementation": implementation}
        reference = load_reference(case.folder, dtype=torch.bfloat16, **extra)
        errors.append((logits_of(reference, case.prompts).float() - case.logits).abs().max())
    for system in ("lru", "fmoe"):
        settings: dict[str, Any] = {"memory": "25%", "system": system, "maps": "off"}
        settings |= {"matcher": "inline"} if system == "fmoe" else {}
        model, _ = expertly.load(str(case.folder), dtype="bfloat16", segments=4, device="cpu", **settings)
        if system == "fmoe":
            generate(model, case.prompts)  # it learns, and loads ahead
            assert expertly.stats(model).as_dict()["phases"]["decode"]["prefetched"] > 0, family
        error = (logits_of(model, case.prompts).float() - case.logits).abs().max()
        expertly.unload(model)
        assert error <= 1.5 * max(errors), f"{family} {system}: {error} against {errors}"
