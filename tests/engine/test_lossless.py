"""Every family, system, P and budget: the tokens and logits of the unmodified model (docs/conventions.md, Lossless)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import expertly
from expertly.core.errors import BudgetError
from expertly.native.kernels import VARIABLE, libraries
from tests.engine.conftest import Case, Cases
from tests.engine.observe import loaded
from tests.families import FAMILIES, generate, load_reference, logits_of
from tests.tables import pairs

LEAST = "least"
OURS = pairs((1, 4), ("expertly", "expertly-ahead"), (LEAST, "25%", "100%"))
OTHERS = [(1, "on-demand", LEAST), (1, "lru", "25%"), (4, "lfu", "25%"), (4, "lru", LEAST)]
NUM_TOKENS = 4


def least_memory(store: str) -> int:
    """The least budget of a store, from the error that names it."""
    with pytest.raises(BudgetError) as caught:
        expertly.load(store, memory=1, device="cpu")
    return int(str(caught.value).split("the least that works is ")[1].split()[0])


def assert_same_logits(model: Any, case: Case) -> None:
    torch.testing.assert_close(logits_of(model, case.prompts), case.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_tokens_and_logits_are_the_reference(family: str, cases: Cases) -> None:
    case, least = cases[family], least_memory(str(cases[family].store))
    begun = int(case.reference.config.is_encoder_decoder)  # the decoder's first token is given
    tokens = [one[: begun + NUM_TOKENS] for one in case.tokens]
    for segments, system, memory in OURS + OTHERS:
        budget = least if memory == LEAST else memory
        with loaded(case.store, memory=budget, system=system, segments=segments) as model:
            assert generate(model, case.prompts, NUM_TOKENS) == tokens, f"{system} {memory} P={segments}"
            assert_same_logits(model, case)
            stats = expertly.stats(model).as_dict()
            decode = stats["phases"]["decode"]
            assert decode["hits"] + decode["partial_hits"] + decode["misses"] > 0
            if memory == "100%":
                assert stats["bytes_loaded"] <= stats["expert_bytes"], "each expert is loaded at most once"
            else:
                assert stats["memory_bytes"] < stats["expert_bytes"]
                assert decode["bytes_loaded"] > 0, f"{system} {memory}: nothing was streamed"


@pytest.mark.parametrize(
    ("system", "segments"),
    [
        ("lcp", 1),
        ("random", 4),
        ("static", 1),
        ("resident", 4),
        ("fmoe", 1),
        ("fmoe", 4),
        ("promoe", 1),
        ("promoe", 4),
        ("deepspeed-index", 1),
        ("brainstorm", 4),
        ("mixtral-offloading", 1),
        ("moe-infinity-lfu", 4),
        ("lru:prediction=token-id", 1),
        ("moepic", 4),
        ("fmoe:scope=layer:allocation=split:theta=0.25", 4),
    ],
)
def test_the_other_systems_change_no_token_either(system: str, segments: int, cases: Cases) -> None:
    case = cases["qwen3_moe"]
    memory = "100%" if system == "resident" else "25%"
    with loaded(case.store, memory=memory, system=system, segments=segments) as model:
        assert generate(model, case.prompts) == case.tokens
        decode = expertly.stats(model).as_dict()["phases"]["decode"]
        assert decode["hit_rate"] == 1.0 if system == "resident" else decode["misses"] > 0


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
        with loaded(case.store, memory=memory, segments=segments) as model:
            assert generate(model, case.prompts[:1]) == case.tokens[:1]
            assert generate(model, case.prompts) == case.tokens
            assert_same_logits(model, case)
            told = expertly.stats(model).as_dict()["kernels"]
        assert told["name"].split()[0] == kernels
        assert (told["native"] > 0) == (kernels == "native"), "decode is theirs"
        assert told["torch"] > 0, "a prompt is torch's"


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_close_to_float32_as_transformers_own(family: str, cases: Cases) -> None:
    case = cases[family]
    ways = [{"experts_implementation": name} for name in ("grouped_mm", "batched_mm", "eager")]
    errors = []
    for way in [{}] if family == "switch_transformers" else ways:
        reference = load_reference(case.folder, dtype=torch.bfloat16, **way)
        errors.append((logits_of(reference, case.prompts).float() - case.logits).abs().max())
    settings = {"system": "fmoe", "predict": "inline"} if family in ("qwen3_moe", "gpt_oss") else {"system": "lru"}
    with loaded(case.folder, dtype="bfloat16", segments=4, **settings) as model:
        if settings["system"] == "fmoe":
            generate(model, case.prompts)  # it learns, and prefetches
            assert expertly.stats(model).as_dict()["phases"]["decode"]["prefetched"] > 0
        error = (logits_of(model, case.prompts).float() - case.logits).abs().max()
    assert error <= 1.5 * max(errors), f"{error} against {errors}"
