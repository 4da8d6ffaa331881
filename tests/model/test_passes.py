"""What the runtime is told about each forward pass, for the ways in which people run a model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from expertly.core.observation import IterationInfo
from expertly.model.hooks import RoomyLayer, describe_pass
from tests.families import FAMILIES, generate, logits_of, make_prompts, pad_left
from tests.model.conftest import Toys
from tests.model.toy import Iteration, Toy


def record(toy: Toy, run: Callable[[Any], Any], wants_token_ids: bool = False) -> list[Iteration]:
    start = len(toy.runtime.iterations)
    toy.runtime.wants_token_ids = wants_token_ids
    try:
        with torch.no_grad():
            run(toy.model)
    finally:
        toy.runtime.wants_token_ids = False
    return toy.runtime.iterations[start:]


def summary(iterations: list[Iteration]) -> list[tuple[str, int, int, int]]:
    """(phase, rows, pads, requests) of each."""
    infos = [iteration.info for iteration in iterations]
    pads = [0 if info.is_pad is None else int(info.is_pad.sum()) for info in infos]
    return [(info.phase, len(info.is_prefill), num, info.num_requests) for info, num in zip(infos, pads, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_is_one_prefill_and_then_decode(family: str, toys: Toys) -> None:
    """Two prompts of 9 and 6 tokens, padded on the left, four new tokens each; every layer ran in every pass."""
    toy = toys[family]
    seen = record(toy, lambda model: generate(model, make_prompts(2, length=9), max_new_tokens=4))
    assert summary(seen) == [("prefill", 18, 3, 2), *[("decode", 2, 0, 2)] * 3]
    assert seen[0].info.is_pad is not None
    assert seen[0].info.is_pad.tolist() == [False] * 9 + [True] * 3 + [False] * 6
    layers = range(len(toy.manifest.layers))
    for each in seen:
        assert each.ok and each.info.token_ids is None and each.info.sequences is None, "nobody asked"
        assert each.layer_rows == [(layer, len(each.info.is_prefill)) for layer in layers]


def test_inputs_embeds_calls_without_a_cache_and_with_a_given_one(toys: Toys) -> None:
    toy = toys["qwen3_moe"]
    ids, mask = pad_left(make_prompts(2, length=9))
    embeds = toy.model.get_input_embeddings()(ids)
    cache = DynamicCache(config=toy.model.config)
    calls = [ids[:, :6], ids[:, 6:7], ids[:, 7:]]
    for run, expected in (
        (lambda model: model(inputs_embeds=embeds, attention_mask=mask), [("prefill", 18, 3, 2)]),
        (lambda model: model(ids, use_cache=False), [("prefill", 18, 0, 2)]),
        (lambda model: model.model(ids, mask), [("prefill", 18, 3, 2)]),  # the base model, by position
        (
            lambda model: [model(call, past_key_values=cache) for call in calls],
            [("prefill", 12, 0, 2), ("decode", 2, 0, 2), ("decode", 4, 0, 2)],
        ),
    ):
        assert summary(record(toy, run)) == expected
    assert {type(layer) for layer in cache.layers} == {RoomyLayer}, "a token is written beside the others"


# -- sequences side by side in one row, as continuous batching has them ------------------------------------------------


def packed(bounds: list[int], ids: list[int], **more: Any) -> IterationInfo:
    inputs = {"input_ids": torch.tensor([ids]), "cu_seq_lens_q": torch.tensor(bounds, dtype=torch.int32)}
    info = describe_pass(inputs | more, True)
    assert info is not None and info.is_pad is not None
    return info


def test_packed_sequences_with_a_phase_each() -> None:
    """Requests: 3 new tokens; 1 token on a past of 7; none; 1 token and no past; then two rows of padding."""
    bounds, ids, positions = [0, 3, 4, 4, 5], [7, 8, 9, 5, 6, 0, 0], torch.tensor([[0, 1, 2, 7, 0, 0, 0]])
    info = packed(bounds, ids, position_ids=positions)
    assert info.is_prefill.tolist() == [True, True, True, False, True, False, False]
    assert info.is_pad is not None and info.is_pad.tolist() == [False] * 5 + [True] * 2
    assert (info.num_requests, info.phase) == (3, "prefill")
    assert info.token_ids is not None and info.token_ids.tolist() == ids
    assert info.sequences is not None and info.sequences[:5].tolist() == [0, 0, 0, 1, 3]
    assert info.starts is not None and info.starts[[0, 1, 3]].tolist() == [0, 7, 0]
    assert packed(bounds, ids).starts is None, "no positions"


# -- which token of which sequence each row is, for a runtime that wants to know ---------------------------------------


def told(toy: Toy, run: Callable[[Any], Any]) -> list[tuple[list[int] | None, list[int]]]:
    """(token ids, sequences) of each pass."""
    infos = [each.info for each in record(toy, run, wants_token_ids=True)]
    assert all(info.sequences is not None for info in infos)
    return [
        (None if info.token_ids is None else info.token_ids.tolist(), info.sequences.tolist())  # type: ignore[union-attr]
        for info in infos
    ]


def test_tokens_of_a_batch_with_pads(toys: Toys) -> None:
    prompts = make_prompts(2, length=9)
    new: list[list[int]] = []
    seen = told(toys["qwen3_moe"], lambda model: new.extend(generate(model, prompts, max_new_tokens=3)))
    assert seen[0] == (prompts[0] + [0] * 3 + prompts[1], [0] * 9 + [1] * 9)
    assert seen[1:] == [([new[0][i], new[1][i]], [0, 1]) for i in range(2)]


def test_embeddings_are_told_instead_of_tokens(toys: Toys) -> None:
    toy = toys["qwen3_moe"]
    embedded = toy.model.get_input_embeddings()(torch.tensor([[5, 6, 7]]))
    (iteration,) = record(toy, lambda model: model(inputs_embeds=embedded), wants_token_ids=True)
    info = iteration.info
    assert info.token_ids is None and info.sequences is not None and info.sequences.tolist() == [0, 0, 0]
    assert info.embeddings is not None and info.embeddings.dtype == "float16"
    assert torch.equal(torch.tensor(info.embeddings), embedded[0].half())


# -- passes that fail, and threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failed_pass_ends_and_the_next_one_works(error: type[BaseException], toys: Toys) -> None:
    toy, prompts = toys.fresh("mixtral"), make_prompts(1)
    expected = logits_of(toy.model, prompts)
    toy.runtime.fail_at_call, toy.runtime.failure = toy.runtime.num_calls + 2, error("the disk said no")
    with pytest.raises(error, match="the disk said no"):
        logits_of(toy.model, prompts)
    assert toy.runtime.iterations[-1].ok is False
    assert torch.equal(logits_of(toy.model, prompts), expected)
    with pytest.raises(ValueError), torch.no_grad():  # transformers' own complaint about no inputs at all
        toy.model()
    other = threading.Thread(target=logits_of, args=(toy.model, prompts), daemon=True)
    other.start()
    other.join(30)
    assert not other.is_alive(), "the lock was left behind"
