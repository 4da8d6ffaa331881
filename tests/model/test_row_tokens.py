"""Which token of which sequence each row is, for a runtime that wants to know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from expertly.core.observation import IterationInfo
from expertly.model.hooks import describe_pass
from tests.families import generate, make_prompts
from tests.model.conftest import Toys
from tests.model.toy import Toy


@pytest.fixture
def toy(toys: Toys) -> Iterator[Toy]:
    """A model whose runtime wants token ids for the length of a test."""
    found = toys["qwen3_moe"]
    found.runtime.wants_token_ids = True
    yield found
    found.runtime.wants_token_ids = False


def infos(toy: Toy, run: Any) -> list[IterationInfo]:
    start = len(toy.runtime.iterations)
    with torch.no_grad():
        run(toy.model)
    return [one.info for one in toy.runtime.iterations[start:]]


def tokens(info: IterationInfo) -> list[int]:
    assert info.token_ids is not None
    return info.token_ids.tolist()


def sequences(info: IterationInfo) -> list[int]:
    assert info.sequences is not None
    return info.sequences.tolist()


def test_nobody_asked(toys: Toys) -> None:
    seen = infos(toys["mixtral"], lambda model: generate(model, make_prompts(1, length=5), 2))
    assert all(info.token_ids is None and info.sequences is None for info in seen)


def test_a_batch_with_pads(toy: Toy) -> None:
    prompts = make_prompts(2, length=9)
    new: list[list[int]] = []
    seen = infos(toy, lambda model: new.extend(generate(model, prompts, max_new_tokens=3)))
    assert tokens(seen[0]) == prompts[0] + [0] * 3 + prompts[1]
    assert sequences(seen[0]) == [0] * 9 + [1] * 9
    assert [tokens(info) for info in seen[1:]] == [[new[0][i], new[1][i]] for i in range(2)]
    assert [sequences(info) for info in seen[1:]] == [[0, 1], [0, 1]]
    assert all(info.phase == "decode" and info.num_requests == 2 for info in seen[1:])


def test_embeddings_have_no_token_ids(toy: Toy) -> None:
    embedded = toy.model.get_input_embeddings()(torch.tensor([[5, 6, 7]]))
    (info,) = infos(toy, lambda model: model(inputs_embeds=embedded))
    assert info.token_ids is None
    assert sequences(info) == [0, 0, 0]


def test_packed_sequences() -> None:
    bounds = torch.tensor([0, 3, 3, 4], dtype=torch.int32)  # three tokens, none, one; then two pads
    inputs = {"input_ids": torch.tensor([[7, 8, 9, 5, 0, 0]]), "cu_seq_lens_q": bounds}
    info = describe_pass("causal", inputs, range(3))
    assert info is not None and info.is_pad is not None
    assert tokens(info) == [7, 8, 9, 5, 0, 0]
    assert sequences(info)[:4] == [0, 0, 0, 2]
    assert info.is_pad.tolist() == [False] * 4 + [True] * 2


def test_the_encoder_and_the_decoder_have_their_own(toys: Toys) -> None:
    toy, prompt = toys["switch_transformers"], make_prompts(1, length=6)
    toy.runtime.wants_token_ids = True
    try:
        new: list[list[int]] = []
        seen = infos(toy, lambda model: new.extend(generate(model, prompt, max_new_tokens=3)))
    finally:
        toy.runtime.wants_token_ids = False
    assert tokens(seen[0]) == prompt[0]
    assert [tokens(info) for info in seen[1:]] == [[token] for token in new[0][:3]], "it starts with the start token"


def test_embeddings_that_are_fed_are_told(toy: Toy) -> None:
    embedded = toy.model.get_input_embeddings()(torch.tensor([[5, 6, 7]]))
    (info,) = infos(toy, lambda model: model(inputs_embeds=embedded))
    assert info.embeddings is not None and info.embeddings.dtype == "float16"
    assert torch.equal(torch.tensor(info.embeddings), embedded[0].half())


def test_which_layers_run(toys: Toys, toy: Toy) -> None:
    prompt = make_prompts(1, length=6)
    assert {info.layers for info in infos(toy, lambda model: generate(model, prompt, 2))} == {range(3)}
    both = toys["switch_transformers"]
    both.runtime.wants_token_ids = True
    try:
        seen = infos(both, lambda model: generate(model, prompt, max_new_tokens=3))
    finally:
        both.runtime.wants_token_ids = False
    num = len(both.manifest.layers)
    assert [info.layers for info in seen] == [range(num // 2)] + [range(num // 2, num)] * (len(seen) - 1)


def test_where_packed_sequences_start() -> None:
    bounds = torch.tensor([0, 3, 3, 4], dtype=torch.int32)
    inputs = {"input_ids": torch.tensor([[7, 8, 9, 5, 0, 0]]), "cu_seq_lens_q": bounds}
    info = describe_pass("causal", inputs | {"position_ids": torch.tensor([[4, 5, 6, 9, 0, 0]])}, range(3))
    assert info is not None and info.starts is not None
    assert info.starts.tolist()[::2] == [4, 9]
    unknown = describe_pass("causal", inputs, range(3))
    assert unknown is not None and unknown.starts is None
