"""Every way of generating that transformers has gives the tokens of the unmodified model, through the pool."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import expertly
from expertly.core.errors import BudgetError, ConfigError
from expertly.engine import cpu
from expertly.engine import memory as engine_memory
from expertly.engine.compute import expert_nbytes_at_once
from expertly.engine.memory import BESIDE_NBYTES
from expertly.model.needs import kv_cache_nbytes, pass_nbytes
from expertly.store.packed import PackedStore
from tests.engine.conftest import Case, Cases
from tests.engine.observe import COUNTS, assert_streamed, loaded
from tests.families import generate, load_reference, make_checkpoint, make_model

Way = Callable[[Any, Case], list[list[int]]]


def beams(model: Any, case: Case) -> list[list[int]]:
    return generate(model, case.prompts, num_beams=3, num_return_sequences=2, max_new_tokens=8)


def sampled(model: Any, case: Case) -> list[list[int]]:
    torch.manual_seed(7)
    return generate(model, case.prompts, do_sample=True, temperature=0.9, top_k=20, top_p=0.95)


def looked_up(model: Any, case: Case) -> list[list[int]]:
    """In a prompt that repeats, so that there is something to look up."""
    return generate(model, [case.prompts[0][:8] * 3], prompt_lookup_num_tokens=4)


def assisted(model: Any, case: Case) -> list[list[int]]:
    return generate(model, case.prompts[:1], assistant_model=make_model("qwen3_moe", seed=5))


def embedded(model: Any, case: Case) -> list[list[int]]:
    embeds = model.get_input_embeddings()(torch.tensor(case.prompts[:1])).detach()
    tokens: list[list[int]] = model.generate(inputs_embeds=embeds, do_sample=False, max_new_tokens=10).tolist()
    return tokens


def with_static_cache(model: Any, case: Case) -> list[list[int]]:
    prompts = case.prompts
    return generate(model, prompts, cache_implementation="static")


def without_cache(model: Any, case: Case) -> list[list[int]]:
    return generate(model, case.prompts, use_cache=False)


ALL_WAYS = (beams, sampled, looked_up, assisted, embedded, with_static_cache, without_cache)


@pytest.mark.parametrize(
    ("family", "settings", "ways"),
    [
        ("qwen3_moe", {"system": "fmoe", "memory": "50%", "segments": 4}, ALL_WAYS),
        ("gpt_oss", {"segments": 4}, (beams, sampled, looked_up, with_static_cache)),
        ("deepseek_v3", {}, (beams, sampled)),
        ("jamba", {"segments": 4}, (beams, sampled)),
        ("mixtral", {}, (embedded, with_static_cache)),
        ("qwen3_next", {}, (embedded,)),
    ],
)
def test_ways_to_generate(family: str, settings: dict[str, Any], ways: tuple[Way, ...], cases: Cases) -> None:
    case = cases[family]
    with loaded(case.store, **settings) as model:
        for way in ways:
            assert way(model, case) == way(case.reference, case), way.__name__
        phases = expertly.stats(model).as_dict()["phases"]
        assert "system" not in settings or phases["decode"]["prefetched"] > 0
        assert_streamed(model)


def test_a_static_cache_counts_what_a_dynamic_one_does(cases: Cases) -> None:
    """Iterations, tokens and what is needed: phases do not depend on the kind of cache."""
    case, result = cases["gpt_oss"], []
    for settings in ({"cache_implementation": "static"}, {}):
        with loaded(case.store) as model:
            assert generate(model, case.prompts, **settings) == case.tokens
            phases = expertly.stats(model).as_dict()["phases"]
            result.append([phases[phase][name] for phase in phases for name in ("iterations", "tokens", *COUNTS)])
    assert result[0] == result[1]


def test_pipeline(tmp_path: Any) -> None:
    from transformers import AutoTokenizer, pipeline

    folder = make_checkpoint("qwen3_moe", tmp_path / "model", tokenizer=True)
    texts = ["Ask an expert.", "Segments of an expert"]
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = pipeline("text-generation", model=load_reference(folder), tokenizer=tokenizer)(texts, **settings)
    model, own_tokenizer = expertly.load(str(folder), memory="25%", device="cpu")
    assert own_tokenizer.encode(texts[0]) == tokenizer.encode(texts[0])
    assert pipeline("text-generation", model=model, tokenizer=own_tokenizer)(texts, **settings) == expected
    assert_streamed(model)
    expertly.unload(model)


# -- segments and budget ---------------------------------------------------------------------------------------------


def test_a_systems_own_segments_are_those_that_its_experts_can_be_cut_into(cases: Cases) -> None:
    store = cases["mixtral"].store
    for system, expected in (("lru", 1), ("lru:segments=4", 4)):
        with loaded(store, memory="50%", system=system) as model:
            assert expertly.stats(model).as_dict()["segments"] == expected
    with loaded(store, memory="50%", system="lru:segments=5") as model:
        assert expertly.stats(model).as_dict()["segments"] in (2, 3, 4), "5 divides no width of the test models"


def beside_nbytes(case: Case, num_tokens: int) -> int:
    """What a model takes beside its experts, with a prompt of so many tokens."""
    store, config = PackedStore.open(case.store), json.loads((case.folder / "config.json").read_text())
    working = BESIDE_NBYTES + expert_nbytes_at_once(store.manifest.layers[0]) + num_tokens * pass_nbytes(config, 4)
    return store.dense_nbytes + working + kv_cache_nbytes(config, num_tokens, 4)


def test_auto_takes_what_is_free_and_says_why(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["qwen3_moe"]
    store = str(case.store)
    with loaded(store, memory="auto") as model:
        stats = expertly.stats(model).as_dict()
        assert stats["memory_bytes"] == stats["expert_bytes"]
        assert "all experts fit" in stats["memory_reason"]
    expert_nbytes = stats["expert_bytes"]
    free = beside_nbytes(case, 100) + expert_nbytes // 2
    monkeypatch.setattr(cpu.KIND, "available_nbytes", lambda device: free)
    with loaded(store, memory=None, context=100) as model:
        stats = expertly.stats(model).as_dict()
        assert 0.4 * expert_nbytes < stats["memory_bytes"] <= 0.5 * expert_nbytes
        assert "50.0% of the experts" in stats["memory_reason"] and "KV cache of 100 tokens" in stats["memory_reason"]
        assert generate(model, case.prompts) == case.tokens
        assert_streamed(model)
        with pytest.raises(BudgetError, match=r"3000 tokens behind 0: .* are left .*context=3000"):
            model.generate(torch.ones(1, 3000, dtype=torch.long), max_new_tokens=1)
        assert generate(model, case.prompts) == case.tokens, "what was refused leaves nothing behind"
    monkeypatch.setattr(cpu.KIND, "available_nbytes", lambda device: 1 << 20)
    with pytest.raises(BudgetError, match=r"the least that works is .* memory auto: .* are free"):
        expertly.load(store, memory="auto", device="cpu")
    with pytest.raises(ConfigError, match="context=0"):
        expertly.load(store, context=0, device="cpu")
    with pytest.raises(BudgetError, match=r"memory 100%: takes .*iB, but .* are free.* the KV cache of 100 "):
        expertly.load(store, context=100, memory="100%", device="cpu")


def test_a_total_is_what_everything_takes(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["qwen3_moe"]
    with loaded(case.store) as model:
        expert_nbytes = expertly.stats(model).as_dict()["expert_bytes"]
    store = str(case.store)
    monkeypatch.setattr(engine_memory, "rss_nbytes", lambda: 300 << 20)
    total = (300 << 20) + beside_nbytes(case, 100) + expert_nbytes // 2
    with loaded(store, memory="auto", total_memory=total, context=lambda tokenizer: 100) as model:
        stats = expertly.stats(model).as_dict()
        assert 0.4 * expert_nbytes < stats["memory_bytes"] <= 0.5 * expert_nbytes
        assert "this process takes 300 MiB" in stats["memory_reason"] and "50.0% of the exp" in stats["memory_reason"]
        assert generate(model, case.prompts) == case.tokens
    message = r"total_memory='400MiB': the least that works is about \d+MiB; total memory 400MiB: .* this process takes"
    with pytest.raises(BudgetError, match=message) as refused:
        expertly.load(store, total_memory="400MiB", context=4096 << 4, device="cpu")
    least = int(re.findall(r"about (\d+)MiB", str(refused.value))[0])
    with loaded(store, memory=None, total_memory=f"{least}MiB", context=4096 << 4) as model:
        assert generate(model, case.prompts) == case.tokens
    with pytest.raises(BudgetError, match="the least that works"):
        expertly.load(store, total_memory=f"{least - 1}MiB", context=4096 << 4, device="cpu")
    with pytest.raises(BudgetError, match=r"system resident: all experts: takes .* but of .* this process takes"):
        expertly.load(store, total_memory=total, context=100, system="resident", device="cpu")
