"""What the runtime is told about each forward pass, for the ways in which people run a model."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from expertly.model.hooks import describe_pass
from tests.families import FAMILIES, generate, logits_of, make_prompts, pad_left, reference_generate
from tests.model.conftest import Toys
from tests.model.toy import Iteration, Toy


def _record(toy: Toy, run: Any) -> list[Iteration]:
    start = len(toy.runtime.iterations)
    with torch.no_grad():
        run(toy.model)
    return toy.runtime.iterations[start:]


def _summary(iterations: list[Iteration]) -> list[tuple[str, int, int, int]]:
    """(phase, rows, pads, requests) of each."""
    return [
        (one.info.phase, len(one.info.is_prefill), int(0 if one.info.is_pad is None else one.info.is_pad.sum()),
         one.info.num_requests)
        for one in iterations
    ]  # fmt: skip


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "switch_transformers"])
def test_generate_is_one_prefill_and_then_decode(family: str, toys: Toys) -> None:
    """Two prompts of 9 and 6 tokens, padded on the left, four new tokens each; every layer ran in every pass."""
    toy = toys[family]
    seen = _record(toy, lambda model: generate(model, make_prompts(2, length=9), max_new_tokens=4))
    assert _summary(seen) == [("prefill", 18, 3, 2), *[("decode", 2, 0, 2)] * 3]
    assert seen[0].info.is_pad is not None
    assert seen[0].info.is_pad.tolist() == [False] * 9 + [True] * 3 + [False] * 6
    layers = range(len(toy.manifest.layers))
    for one in seen:
        assert one.ok
        assert one.layer_rows == [(layer, len(one.info.is_prefill)) for layer in layers]


def test_encoder_is_prefill_and_the_decoder_decodes(toys: Toys) -> None:
    toy = toys["switch_transformers"]
    seen = _record(toy, lambda model: generate(model, make_prompts(2, length=9), max_new_tokens=3))
    assert _summary(seen) == [("prefill", 18, 3, 2), *[("decode", 2, 0, 2)] * 3]
    assert seen[0].layer_rows == [(0, 18), (1, 18)]
    assert all(one.layer_rows == [(2, 2), (3, 2)] for one in seen[1:])
    seen = _record(toy, lambda model: logits_of(model, make_prompts(1, length=5)))
    assert _summary(seen) == [("prefill", 5, 0, 1), ("prefill", 5, 0, 1)]


def test_beam_search_and_sampling(toys: Toys) -> None:
    toy, prompts = toys["mixtral"], make_prompts(2, length=9)
    seen = _record(toy, lambda model: generate(model, prompts, 4, num_beams=3))
    assert _summary(seen)[0][0] == "prefill" and {one[0] for one in _summary(seen)[1:]} == {"decode"}
    assert _summary(seen)[1][1:] == (6, 0, 6)
    assert generate(toy.model, prompts, 6, num_beams=3) == reference_generate(toy.source, prompts, 6, num_beams=3)
    seen = _record(toy, lambda model: generate(model, prompts, 4, do_sample=True, num_return_sequences=2))
    assert [one[0] for one in _summary(seen)] == ["prefill", "decode", "decode", "decode"]


def test_prompt_lookup_verifies_several_tokens_in_decode(toys: Toys) -> None:
    toy, prompts = toys["mixtral"], [[5, 6, 7, 8] * 4]
    seen = _record(toy, lambda model: generate(model, prompts, 12, prompt_lookup_num_tokens=4))
    phases = [one.info.phase for one in seen]
    assert phases[0] == "prefill" and set(phases[1:]) == {"decode"}
    assert max(len(one.info.is_prefill) for one in seen[1:]) > 1
    actual = generate(toy.model, prompts, 12, prompt_lookup_num_tokens=4)
    assert actual == reference_generate(toy.source, prompts, 12)


def test_assisted_decoding_with_a_loaded_assistant(toys: Toys) -> None:
    toy, assistant = toys["mixtral"], toys["qwen3_moe"].model
    prompts = make_prompts(1)
    actual = generate(toy.model, prompts, 8, assistant_model=assistant)
    assert actual == reference_generate(toy.source, prompts, 8)


def test_inputs_embeds_calls_without_a_cache_and_with_a_given_one(toys: Toys) -> None:
    toy = toys["qwen3_moe"]
    ids, mask = pad_left(make_prompts(2, length=9))
    embeds = toy.model.get_input_embeddings()(ids)
    seen = _record(toy, lambda model: model(inputs_embeds=embeds, attention_mask=mask))
    assert _summary(seen) == [("prefill", 18, 3, 2)]
    seen = _record(toy, lambda model: model(ids, use_cache=False))
    assert _summary(seen) == [("prefill", 18, 0, 2)]
    seen = _record(toy, lambda model: model.model(ids, mask))  # the base model, by position
    assert _summary(seen) == [("prefill", 18, 3, 2)]
    cache = DynamicCache(config=toy.model.config)
    calls = [ids[:, :6], ids[:, 6:7], ids[:, 7:]]
    seen = _record(toy, lambda model: [model(call, past_key_values=cache) for call in calls])
    assert _summary(seen) == [("prefill", 12, 0, 2), ("decode", 2, 0, 2), ("decode", 4, 0, 2)]


def test_static_cache_runs_uncompiled(toys: Toys) -> None:
    toy, prompts = toys["qwen3_moe"], make_prompts(2, length=9)
    seen = _record(toy, lambda model: generate(model, prompts, 4, cache_implementation="static"))
    assert [one.info.phase for one in seen] == ["prefill", "decode", "decode", "decode"]
    actual = generate(toy.model, prompts, 6, cache_implementation="static")
    assert actual == reference_generate(toy.source, prompts, 6)


def _batch(model: Any, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    settings = model.generation_config
    settings.do_sample = False
    outputs = model.generate_batch(inputs=prompts, max_new_tokens=max_new_tokens, progress_bar=False)
    return [output.generated_tokens for output in outputs.values()]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "glm4_moe", "hunyuan_v1_moe"])
def test_continuous_batching_mixes_phases(family: str, toys: Toys) -> None:
    """Requests of different length: a phase each, pads counted, the tokens of one prompt at a time."""
    assert FAMILIES[family].runs_continuous_batching
    toy, prompts = toys.fresh(family), make_prompts(3, length=9)
    start = len(toy.runtime.iterations)
    actual = _batch(toy.model, prompts, 5)
    seen = [one for one in toy.runtime.iterations[start:] if one.ok]
    assert actual == [reference_generate(toy.source, [prompt], 5)[0] for prompt in prompts]
    real = [~one.info.is_pad if one.info.is_pad is not None else np.ones_like(one.info.is_prefill) for one in seen]
    num_prefill = sum(int((one.info.is_prefill & rows).sum()) for one, rows in zip(seen, real, strict=True))
    num_decode = sum(int((~one.info.is_prefill & rows).sum()) for one, rows in zip(seen, real, strict=True))
    assert num_prefill == sum(map(len, prompts))
    assert num_decode == 3 * 4  # the first new token of each came from its prefill
    assert all(one.layer_rows and one.layer_rows[0][1] == len(one.info.is_prefill) for one in seen)


def test_packed_sequences_with_a_phase_each() -> None:
    """Requests: 3 new tokens; 1 token on a past of 7; 1 token and no past; then two rows of padding."""
    bounds, keys = torch.tensor([0, 3, 4, 5]), torch.tensor([0, 3, 11, 12])
    ids = torch.zeros(1, 7, dtype=torch.long)
    positions = torch.tensor([[0, 1, 2, 7, 0, 0, 0]])
    for past in ({"cu_seq_lens_k": keys}, {"cu_seq_lens_k": {"full_attention": keys}}, {"position_ids": positions}):
        info = describe_pass("causal", {"input_ids": ids, "cu_seq_lens_q": bounds} | past, None)
        assert info is not None and info.is_pad is not None
        assert info.is_prefill.tolist() == [True, True, True, False, True, False, False]
        assert info.is_pad.tolist() == [False] * 5 + [True] * 2
        assert (info.num_requests, info.phase) == (3, "prefill")


def test_a_failed_pass_ends_and_the_next_one_works(toys: Toys) -> None:
    toy, prompts = toys.fresh("mixtral"), make_prompts(1)
    expected = logits_of(toy.model, prompts)
    toy.runtime.fail_at_call = toy.runtime.num_calls + 2
    with pytest.raises(OSError, match="the disk said no"):
        logits_of(toy.model, prompts)
    assert toy.runtime.iterations[-1].ok is False
    assert torch.equal(logits_of(toy.model, prompts), expected)
    with pytest.raises(ValueError), torch.no_grad():  # transformers' own complaint about no inputs at all
        toy.model()
    done = threading.Thread(target=logits_of, args=(toy.model, prompts), daemon=True)
    done.start()
    done.join(30)
    assert not done.is_alive(), "the lock was left behind"


def test_an_interrupt_leaves_no_lock_behind(toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    toy, prompts = toys.fresh("mixtral"), make_prompts(1)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(toy.runtime, "forward_experts", interrupt)
    with pytest.raises(KeyboardInterrupt):
        logits_of(toy.model, prompts)
    monkeypatch.undo()
    assert toy.runtime.iterations[-1].ok is False
    thread = threading.Thread(target=logits_of, args=(toy.model, prompts), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def test_two_threads_are_serialised(toys: Toys) -> None:
    """ToyRuntime asserts that no pass begins within another."""
    toy = toys.fresh("mixtral")
    prompts = [make_prompts(1, seed=seed) for seed in range(4)]
    expected = [reference_generate(toy.source, prompt) for prompt in prompts]
    results: dict[int, Any] = {}

    def run(index: int) -> None:
        results[index] = generate(toy.model, prompts[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results.get(index) for index in range(4)] == expected


def test_describing_a_decode_step_is_cheap(toys: Toys) -> None:
    """The bound is 30 us on one core (measured: 2); ten times that here, for a busy machine."""
    cache = DynamicCache(config=toys["mixtral"].model.config)
    with torch.no_grad():
        toys["mixtral"].model(torch.tensor(make_prompts(1)), past_key_values=cache)
    inputs = {"input_ids": torch.ones(1, 1, dtype=torch.long), "past_key_values": cache, "attention_mask": None}
    times = []
    for _ in range(200):
        start = time.perf_counter_ns()
        describe_pass("causal", inputs, None)
        times.append(time.perf_counter_ns() - start)
    assert sorted(times)[100] < 300_000
