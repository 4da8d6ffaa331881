"""Which token comes next."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from expertly.core.errors import NanError
from expertly.serve.sampling import SampledToken, Sampler, Sampling

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -30.0]])


def choices(sampling: Sampling, num: int = 1, logits: torch.Tensor = LOGITS) -> list[SampledToken]:
    told: list[tuple[str, SampledToken]] = []
    sampler = Sampler(told.extend)
    sampler.add("a", sampling)
    for _ in range(num):
        sampler.choose(["a"], logits)
    return [choice for _, choice in told]


def draw(sampling: Sampling, num: int = 1, logits: torch.Tensor = LOGITS) -> list[int]:
    return [choice.token for choice in choices(sampling, num, logits)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, torch.softmax(LOGITS[0], -1)),
        *((greedy, torch.tensor([1.0])) for greedy in ({"temperature": 0}, {"top_k": 1}, {"temperature": 1e-9})),
        ({"temperature": 0.5}, torch.softmax(LOGITS[0] / 0.5, -1)),
        ({"top_k": 2}, torch.softmax(LOGITS[0, :2], -1)),
        ({"top_p": 0.7}, torch.softmax(LOGITS[0, :2], -1)),  # 0.64 and 0.24: the fewest that reach it
        ({"top_k": 3, "top_p": 0.6}, torch.tensor([1.0])),
        ({"bias": {3: 3.0}}, torch.softmax(torch.tensor([2.0, 1.0, 0.0, 2.0, -30.0]), -1)),
    ],
)
def test_shares_are_those_of_the_settings(settings: dict[str, Any], expected: torch.Tensor) -> None:
    counts = Counter(draw(Sampling(seed=5, **settings), 2000))
    for token in range(5):
        share = float(expected[token]) if token < len(expected) else 0.0
        assert counts[token] / 2000 == pytest.approx(share, abs=0.04)


def test_a_vocabulary_that_is_almost_flat_is_sorted_whole() -> None:
    logits = torch.linspace(0, 1e-3, 2000)[None]
    tokens = draw(Sampling(seed=1, top_p=0.5), 2000, logits)
    assert min(tokens) >= 990 and len(set(tokens)) > 500


def test_a_seed_is_the_same_in_any_company() -> None:
    alone = draw(Sampling(seed=9), 20)
    told: list[tuple[str, SampledToken]] = []
    sampler = Sampler(told.extend)
    for name, seed in (("x", 1), ("mine", 9), ("y", None)):
        sampler.add(name, Sampling(seed=seed))
    for step in range(20):
        names = ["mine", "x"] if step % 2 else ["y", "x", "mine"]
        sampler.choose(names, LOGITS.expand(len(names), -1))
    assert [choice.token for name, choice in told if name == "mine"] == alone


def test_nan_is_named() -> None:
    with pytest.raises(NanError, match="output layer gave NaN"):
        draw(Sampling(temperature=0), logits=torch.tensor([[0.0, torch.nan]]))


def test_penalties_count_what_was_written() -> None:
    assert draw(Sampling(temperature=0, presence_penalty=1.5), 3) == [0, 1, 0]
    assert draw(Sampling(temperature=0, frequency_penalty=0.6), 5) == [0, 0, 1, 0, 1]


def test_greedy_tokens_are_left_to_the_model_and_others_are_not() -> None:
    sampler = Sampler(lambda choices: None)
    sampler.add("greedy", Sampling(temperature=0))
    sampler.add("biased", Sampling(temperature=0, bias={4: 100.0}))
    assert sampler.choose(["greedy", "biased", "gone"], LOGITS.expand(3, -1)) == [None, 4, None]


def test_logprobs_are_before_any_setting() -> None:
    (choice,) = choices(Sampling(temperature=0, bias={3: 50.0}, logprobs=2))
    expected = torch.log_softmax(LOGITS[0], -1)
    assert choice.token == 3 and choice.logprob == pytest.approx(float(expected[3]))
    assert choice.top == [(0, pytest.approx(float(expected[0]))), (1, pytest.approx(float(expected[1])))]
