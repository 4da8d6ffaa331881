"""What `generate` is asked for is checked before anything runs; what other code raises stays what it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from expertly.core.errors import CheckpointError, ConfigError
from expertly.model.generation import KeptCache, check_tokens, generate, generation_config
from expertly.model.hooks import CACHE
from expertly.model.playing import answer
from tests import every_family
from tests.families import make_model
from tests.model.conftest import Toys


def test_tokens_that_are_none_of_the_models_are_named() -> None:
    check_tokens([0, 9], 10)
    for tokens, message in (([], "gives no token"), ([3, -1], "token -1; accepted: 0 to 9"), ([10, 2], "token 10; ")):
        with pytest.raises(ConfigError, match=f"^prompt: {message}"):
            check_tokens(tokens, 10)


@pytest.mark.parametrize(
    ("of_model", "asked", "expected"),  # temperature, top_p, top_k; what is not asked for is the model's of_model
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": -1}, (None, None), (True, 0.6, 0.9, 0)),
        ({"do_sample": True, "temperature": 0.0, "top_k": 5}, (None, None), (False, None, None, None)),
        ({"do_sample": True, "temperature": 0.6, "top_k": 5}, (0.0, 1.0), (False, None, None, None)),
        ({"top_k": 5}, (0.7, None), (True, 0.7, 1.0, 0)),
    ],
)
def test_tokens_are_chosen_as_was_asked(
    of_model: dict[str, Any], asked: tuple[float | None, float | None], expected: tuple[Any, ...]
) -> None:
    model = SimpleNamespace(generation_config=GenerationConfig(**of_model, num_beams=3, eos_token_id=[7, 8]))
    made = generation_config(model, 12, *asked)
    assert (made.do_sample, made.temperature, made.top_p, made.top_k) == expected
    assert (made.max_new_tokens, made.num_beams, made.pad_token_id) == (12, 1, 7)


def test_a_greedy_answer_token_by_token_is_that_of_generate(toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = toys["qwen3_moe"].model, [5, 9, 2, 7]
    expected = tuple(model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, 4:].tolist())
    tokens, played = answer(model, prompt, 6)
    assert tokens == expected
    assert len(played.steps_s) == 5 and min(played.ttft_s, *played.steps_s) > 0
    assert played.tpot_s is not None and played.seconds == pytest.approx(played.ttft_s + 5 * played.tpot_s)
    assert answer(model, prompt, 1)[1].tpot_s is None
    for ends in (expected[2], [127, expected[2]]):
        monkeypatch.setattr(model.generation_config, "eos_token_id", ends)
        assert answer(model, prompt, 6)[0] == expected[: expected.index(expected[2]) + 1]


def test_only_what_transformers_refuses_is_the_checkpoints_fault() -> None:
    model = make_model("mixtral")
    config = generation_config(model, 3)
    refused = generation_config(model, 3, 0.7)
    refused.temperature = -1.0
    with pytest.raises(CheckpointError, match=r"generation_config\.json: transformers refuses it: .*temperature"):
        generate(model, [5, 6], refused)

    def broken(*args: Any) -> None:
        raise RuntimeError("a bug of ours")

    model.lm_head.register_forward_hook(broken)
    with pytest.raises(RuntimeError, match="a bug of ours"), torch.no_grad():
        generate(model, [5, 6], config)


@pytest.mark.parametrize(
    ("family", "counts"),
    [
        ("deepseek_v3", (9, 9, 7, 34)),
        ("deepseek_v4", (9, 0, 0, 34)),
        ("minimax", (0, 0, 0, 0)),
        ("unlimited_ocr", (0, 0, 0, 0)),
    ],
)
def test_a_kept_cache_changes_no_answer(family: str, counts: tuple[int, ...]) -> None:
    """Where an answer goes on, and where what was said ends otherwise; of states that are no keys and values, too."""
    model, words = every_family.make_model(family).eval(), list(range(4, 100))
    kept, answered = KeptCache(model), list[int]()

    def ask(tokens: list[int]) -> int:
        ids, (cache, num_cached) = torch.tensor([tokens]), kept.take(tokens)
        how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
        made, expected = (
            model.generate(ids, return_dict_in_generate=True, output_logits=True, **{CACHE: each}, **how)
            for each in (cache, None)
        )
        torch.testing.assert_close(made.logits, expected.logits, rtol=1e-3, atol=1e-3)
        kept.keep(made)
        answered[:] = made.sequences[0].tolist()
        return num_cached

    ask(words[:5])
    first = ask([*answered, *words[50:53]])
    second, third = ask([*answered[:9], *words[60:63]]), ask([*words[:5], *answered[5:7], 90])
    ask(words[:30])
    assert (first, second, third, ask([*answered, *words[40:44]])) == counts
