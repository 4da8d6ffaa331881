"""Every family, system, P and budget: the tokens and logits of the unmodified model (docs/conventions.md, Lossless)."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import expertly
from expertly.api import handle
from expertly.core.errors import BudgetError
from expertly.model.hooks import experts_modules
from expertly.native.kernels import VARIABLE
from expertly.scheduler.systems import SYSTEMS, get_system
from tests.engine import predictors
from tests.engine.conftest import Case, Cases
from tests.engine.observe import loaded, recorded_decisions
from tests.engine.predictors import Everything
from tests.families import FAMILIES, HIDDEN_SIZE, NUM_EXPERTS, NUM_NEW_TOKENS, generate, load_reference, logits_of
from tests.tables import IS_FULL

LEAST = "least"
EVERYWHERE = ("lru", "expertly", "expertly-ahead")
PLACES = [*product((1, 4), (LEAST, "25%", "100%"))]
"""P and memory, one of them and one system for each family, in turn; all of them where all combinations are asked for.
"""
OTHERS = [("on-demand", 1, LEAST), ("lfu", 4, "25%")]
NUM_TOKENS = 4


def least_memory(store: str, system: str = "lru") -> int:
    """The least budget of a store, from the error that names it."""
    with pytest.raises(BudgetError) as caught:
        expertly.load(store, memory=1, system=system, device="cpu")
    return int(str(caught.value).split("the least that works is ")[1].split()[0])


def assert_same_logits(model: Any, case: Case) -> None:
    torch.testing.assert_close(logits_of(model, case.prompts), case.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("number", "family"), enumerate(FAMILIES))
def test_float32_tokens_and_logits_are_the_reference(number: int, family: str, cases: Cases) -> None:
    case, least = cases[family], least_memory(str(cases[family].store))
    tokens = [one[:NUM_TOKENS] for one in case.tokens]
    usual = [(EVERYWHERE[number % 3], *PLACES[(number // 3 + 2 * (number % 3)) % 6])]
    ours = [(system, *place) for system, place in product(EVERYWHERE, PLACES)] if IS_FULL else usual
    for system, segments, memory in ours + (OTHERS if family == "mixtral" else []):
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


OF_FAMILIES = [  # systems that predict, beside those below and test_random_specs.py: family, memory, segments
    ("fmoe", "mixtral", "50%", 4),
    ("fmoe", "gpt_oss", "50%", 4),
    ("moe-infinity", "granitemoe", "90%", 4),
    ("moe-infinity:distance=2:width=3:admission=best:eviction=fmoe", "qwen3_moe", "50%", 1),
    ("lru:prediction=speculative", "granitemoe", "50%", 4),
    ("moepic", "mixtral", "50%", 1),
    ("expertly:prediction=fmoe:distance=1", "qwen3_moe", "50%", 4),
    # of every layer that it needs all, all the time
    *(("everything", family, "30%", segments) for family, segments in (("qwen3_moe", 1), ("gpt_oss", 4))),
]


@pytest.mark.parametrize(("system", "family", "memory", "segments"), OF_FAMILIES)
def test_every_way_to_predict_is_lossless(
    system: str, family: str, memory: str, segments: int, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, system = cases[family], predictors.put(monkeypatch, Everything) if system == "everything" else system
    with loaded(case.store, system=system, segments=segments, memory=memory) as model:
        for _ in range(2):  # the second finds what the first has taught
            assert generate(model, case.prompts) == case.tokens
        assert_same_logits(model, case)
        stats = expertly.stats(model).as_dict()
        predicted, *prefetched = (
            sum(int(phase[name]) for phase in stats["phases"].values())
            for name in ("predicted", "prefetched", "prefetched_bytes")
        )
        assert stats["prediction"]["failed"] is None and predicted > 0
        assert stats["memory_bytes"] < stats["expert_bytes"]
        assert memory == "90%" or min(prefetched) > 0, "with so much what is predicted is here"


PARTS = (  # beside the presets
    "fmoe:scope=layer:allocation=split:theta=0.25",
    "lru:prediction=lookahead:distance=2:next_token=yes",
)


def feed(model: Any, num_iterations: int) -> None:
    """Random choices to the experts alone, all that a scheduler sees of a model: a prompt, then tokens one by one."""
    engine, modules = handle(model).engine, experts_modules(model)
    dice = torch.Generator().manual_seed(0)
    for step in range(num_iterations):
        num_tokens = 1 if step % 25 else 12
        hidden = torch.zeros(num_tokens, HIDDEN_SIZE)
        for layer, module in enumerate(modules):
            chosen = torch.rand(num_tokens, NUM_EXPERTS, generator=dice).topk(3).indices
            engine.forward_experts(module, layer, hidden, chosen, torch.full((num_tokens, 3), 0.5))


@pytest.mark.parametrize(("number", "system"), enumerate([*SYSTEMS.built_in, *PARTS]))
def test_no_system_changes_a_token_and_each_decides_the_same_again(number: int, system: str, cases: Cases) -> None:
    """What an engine decided, a new scheduler decides from what was told."""
    case, parts = cases["qwen3_moe"], get_system(system)
    memory, segments = "100%" if parts.keeps_everything else "25%" if number % 3 else "50%", (1, 4)[number % 2]
    num_fed = 80 if parts.prediction == "none" else 0
    with (
        recorded_decisions() as decisions,
        loaded(case.store, memory=memory, system=system, segments=segments) as model,
    ):
        for _ in range(2):
            assert generate(model, case.prompts) == case.tokens
        decode = expertly.stats(model).as_dict()["phases"]["decode"]
        assert decode["hit_rate"] == 1.0 if parts.keeps_everything else decode["misses"] + decode["partial_hits"] > 0
        feed(model, num_fed)
    assert decisions.difference() is None
    num_layers = decisions.num("end_layer")
    assert num_layers == (2 * NUM_NEW_TOKENS + num_fed) * 3
    assert parts.keeps_everything or decisions.num() > 4 * num_layers, "there were loads"


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_torch_alone_computes_the_same(family: str, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests run with the kernels of this machine."""
    monkeypatch.setenv(VARIABLE, "torch")
    case = cases[family]
    for segments, memory in ((1, "100%"), (4, "25%")):
        with loaded(case.store, memory=memory, segments=segments) as model:
            assert generate(model, case.prompts) == case.tokens
            assert_same_logits(model, case)
            kernels = expertly.stats(model).as_dict()["kernels"]
        assert kernels["name"] == "torch" and kernels["torch"] > 0 == kernels["native"]


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_close_to_float32_as_transformers_own(family: str, cases: Cases) -> None:
    case = cases[family]
    reference, errors = load_reference(case.folder, dtype=torch.bfloat16), []
    for way in ("grouped_mm", "batched_mm", "eager"):
        reference.set_experts_implementation(way)
        errors.append((logits_of(reference, case.prompts).float() - case.logits).abs().max())
    settings = {"system": "fmoe"} if family in ("qwen3_moe", "gpt_oss") else {"system": "lru"}
    with loaded(case.folder, dtype="bfloat16", segments=4, **settings) as model:
        if settings["system"] == "fmoe":
            generate(model, case.prompts)  # it learns, and prefetches
            assert expertly.stats(model).as_dict()["phases"]["decode"]["prefetched"] > 0
        error = (logits_of(model, case.prompts).float() - case.logits).abs().max()
    assert error <= 1.5 * max(errors), f"{error} against {errors}"
