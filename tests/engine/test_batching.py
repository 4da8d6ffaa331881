"""Many rows at once: pads are computed and not counted, phases belong to requests, the pool may be far too small."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import ContinuousBatchingConfig

import expertly
from expertly.api import handle
from expertly.core.observation import IterationInfo
from expertly.store.packed import PackedStore
from tests.engine.conftest import Cases
from tests.engine.observe import assert_streamed, counts, loaded, recording
from tests.families import FAMILIES, generate, logits_of, make_prompts, pad_left


@pytest.mark.parametrize("family", ["deepseek_v3", "jamba", "qwen3_next"])
def test_pads_are_computed_and_not_counted(family: str, cases: Cases) -> None:
    """What is counted is what the real rows chose, and no more."""
    case = cases[family]
    prompts = [*make_prompts(1, length=3, seed=1), *make_prompts(1, length=20, seed=2)]  # 17 pads
    mask = pad_left(prompts)[1]
    reference = case.reference
    with recording(reference) as recorder:
        expected = logits_of(reference, prompts)
    is_pad = mask.reshape(-1) == 0
    real = recorder.num_demands(lambda call: True, is_pad)
    with loaded(case.store, segments=4) as model:
        scale = float(expected.abs().max())  # rounding is of the largest logits, also where one is near 0
        torch.testing.assert_close(logits_of(model, prompts), expected, rtol=1e-4, atol=1e-5 * max(1.0, scale))
        assert sum(counts(model, "prefill")) == real
        assert counts(model, "decode") == (0, 0, 0)
        assert expertly.stats(model).as_dict()["phases"]["prefill"]["tokens"] == 23
        assert recorder.num_demands(lambda call: True) >= real


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_prompt_that_needs_many_more_experts_than_the_pool_holds(family: str, cases: Cases) -> None:
    """Staging slots alone, every expert of every layer needed: each is read once a layer, in turn."""
    case = cases[family]
    prompt = [make_prompts(1, length=120, seed=9)[0]]
    reference = case.reference
    with recording(reference) as recorder:
        expected = generate(reference, prompt, 3)
    needed = recorder.num_demands(lambda call: len(call.index) == 120)
    num_layers = FAMILIES[family].num_moe_layers
    assert needed >= 7 * num_layers
    geometry = PackedStore.open(case.store).geometry()
    nbytes = geometry.nbytes
    for segments in (1, 4):
        slots = nbytes * geometry.layers[0].top_k // (8 * num_layers)
        with loaded(case.store, memory=slots, segments=segments) as model:
            assert generate(model, prompt, 3) == expected
            stats = expertly.stats(model).as_dict()
            assert stats["kept_bytes"] == 0
            assert stats["phases"]["prefill"]["misses"] == needed
            assert stats["phases"]["prefill"]["bytes_loaded"] == needed * nbytes // (8 * num_layers), "each once"


# -- continuous batching ---------------------------------------------------------------------------------------------


def run_batch(model: Any, prompts: list[list[int]], max_new_tokens: int = 6, **limits: int) -> list[list[int]]:
    config = ContinuousBatchingConfig(**({"num_blocks": 16, "max_batch_tokens": 8} | limits))
    outputs = model.generate_batch(
        inputs=prompts, max_new_tokens=max_new_tokens, continuous_batching_config=config, progress_bar=False
    )
    assert all(output.error is None for output in outputs.values())
    return [output.generated_tokens for output in outputs.values()]


@pytest.mark.parametrize(("family", "settings"), [("qwen3_moe", {"system": "fmoe", "memory": "50%"}), ("gpt_oss", {})])
def test_continuous_batching_mixes_phases(family: str, settings: dict[str, Any], cases: Cases) -> None:
    """Eight tokens a pass and prompts longer than that: some requests decode while others are still being read."""
    case = cases[family]
    prompts = [*make_prompts(2, length=5, seed=2), *make_prompts(1, length=20, seed=3)]
    reference = case.reference
    expected = [generate(reference, [prompt], 6)[0] for prompt in prompts]
    with loaded(case.store, segments=4, **settings) as model:
        engine = handle(model).engine
        seen: list[IterationInfo] = []
        begin = engine.begin_iteration

        def watch(info: IterationInfo) -> None:
            seen.append(info)
            begin(info)

        engine.begin_iteration = watch  # type: ignore[method-assign]
        assert run_batch(model, prompts) == expected
        real = [np.ones(len(i.is_prefill), bool) if i.is_pad is None else ~i.is_pad for i in seen]
        assert any((i.is_prefill & r).any() and (~i.is_prefill & r).any() for i, r in zip(seen, real, strict=True))
        phases = expertly.stats(model).as_dict()["phases"]
        prefill, decode = phases["prefill"]["tokens"], phases["decode"]["tokens"]
        assert prefill + decode == sum(map(len, prompts)) + len(prompts) * 5, "the first new token came from the prompt"
        # A phase belongs to a request, not to a pass. A prompt's last token, cut off alone, looks like decode.
        assert sum(map(len, prompts)) - 1 <= prefill <= sum(map(len, prompts))
        assert sum(counts(model, "prefill")) > 0 < sum(counts(model, "decode"))
        assert_streamed(model)
        assert (phases["decode"]["prefetched"] > 0) == bool(settings)
