"""transformers' prompt lookup on a loaded model: the unmodified model's tokens, counted, and only where it pays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import expertly
from expertly.api import handle
from expertly.core.errors import ConfigError
from expertly.model.generation import generate as generate_one
from expertly.model.generation import generation_config
from expertly.model.speculation import NUM_DRAFTED
from tests.engine.conftest import Cases
from tests.engine.observe import assert_streamed, loaded
from tests.families import generate

SAID = [5, 61, 7, 80, 23, 90, 11, 42, 3, 77, 34, 56, 19, 68, 100, 28]
PROMPT = SAID * 2
NUM_NEW = 90


class Repeats(LogitsProcessor):
    """Of twelve tokens nine are what the prompt says again, and three are the model's own."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        at = input_ids.shape[1]
        if at % 12 < 9:
            scores = scores.clone()  # type: ignore[assignment]
            scores[:, SAID[at % len(SAID)]] += 100
        return scores


def written(model: Any, **settings: Any) -> list[list[int]]:
    return generate(model, [PROMPT], NUM_NEW, logits_processor=LogitsProcessorList([Repeats()]), **settings)


class PassClock:
    """Passes take what `pass_ns` says for their rows."""

    def __init__(self, model: Any, pass_ns: Callable[[int], int]) -> None:
        self._engine, self._pass_ns = handle(model).engine, pass_ns
        self._now_ns, self._num_rows = 0, self._engine.num_decode_tokens
        model._expertly_speculation.clock_ns = self

    def __call__(self) -> int:
        before, self._num_rows = self._num_rows, self._engine.num_decode_tokens
        if self._num_rows > before:
            self._now_ns += self._pass_ns(self._num_rows - before)
        return self._now_ns


def in_memory(num_rows: int) -> int:
    return 500 + 100 * num_rows


def from_disk(num_rows: int) -> int:
    return 1000 * num_rows * (2 if num_rows > 1 else 1)


def looked_up(model: Any, **settings: Any) -> list[list[int]]:
    return written(model, prompt_lookup_num_tokens=NUM_DRAFTED, **settings)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_moe", {"system": "expertly", "segments": 4}),
        ("mixtral", {"system": "lru"}),
        ("gpt_oss", {"system": "fmoe", "memory": "50%"}),
        ("deepseek_v3", {"system": "lru", "segments": 4}),
        ("glm4_moe", {"system": "resident", "memory": "100%"}),
    ],
)
def test_tokens_are_those_of_the_unmodified_model_in_fewer_passes(
    family: str, settings: dict[str, Any], cases: Cases
) -> None:
    case = cases[family]
    expected = written(case.reference)
    with loaded(case.store, **settings) as model:
        assert written(model) == expected
        assert expertly.stats(model).as_dict()["speculation"] is None, "nobody asked for it"
        before = expertly.stats(model).as_dict()["phases"]
        PassClock(model, in_memory)
        assert looked_up(model) == expected
        told = expertly.stats(model).as_dict()
        if settings["system"] != "resident":
            assert_streamed(model)
    found, phases = told["speculation"], told["phases"]
    assert found["accepted"] > 0 and found["state"] in found["says"]
    num_passes = found["passes"] + found["passes_without"]
    assert num_passes == phases["decode"]["iterations"] - before["decode"]["iterations"]
    assert num_passes + found["accepted"] == NUM_NEW - 1, "the first token came from the prompt's pass"
    rows = phases["decode"]["tokens"] - before["decode"]["tokens"]
    assert rows == num_passes + found["drafted"], "a verified token counts as decode"
    assert phases["prefill"]["tokens"] - before["prefill"]["tokens"] == len(PROMPT)
    assert found["experts_added_per_pass"] > 0, "several tokens need more experts than one"


def test_where_the_disk_is_the_limit_the_gate_turns_it_off(cases: Cases) -> None:
    """Drafts are right, but a row's experts take longer to read in a pass of several."""
    case = cases["qwen3_moe"]
    expected = written(case.reference)
    with loaded(case.store) as model:
        PassClock(model, from_disk)
        for _ in range(3):
            assert looked_up(model) == expected
        before = expertly.stats(model).as_dict()["speculation"]
        assert 0 < before["passes"] < 12 and before["accepted"] > 0, "it was tried"
        assert looked_up(model) == expected
        after = expertly.stats(model).as_dict()["speculation"]
        assert after["passes"] == before["passes"] and after["state"] == "off"
        PassClock(model, in_memory)
        num_on = 0
        for _ in range(30):
            looked_up(model)
            num_on = num_on + 1 if expertly.stats(model).as_dict()["speculation"]["state"] == "on" else 0
            if num_on == 3:
                break
        assert num_on == 3, "and back on behind a faster disk"


def test_sampled_tokens_come_from_the_same_distribution(cases: Cases) -> None:
    """A token that was drafted is kept where sampling gives it, as transformers does: over a vocabulary of one token
    that is certain, and over all the first of them is as likely as without.
    """
    case = cases["qwen3_moe"]
    with loaded(case.store) as model:
        PassClock(model, in_memory)
        torch.manual_seed(3)
        assert looked_up(model, do_sample=True, top_k=1) == written(case.reference)
        assert expertly.stats(model).as_dict()["speculation"]["accepted"] > 0


@pytest.mark.parametrize("family", ["qwen3_next", "jamba"])
def test_a_family_that_cannot_take_tokens_back_is_refused_by_name(family: str, cases: Cases) -> None:
    with loaded(cases[family].store) as model:
        config = generation_config(model, 8)
        config.prompt_lookup_num_tokens = NUM_DRAFTED
        with pytest.raises(ConfigError, match="speculate='prompt-lookup': transformers refuses it"):
            generate_one(model, PROMPT, config)
        assert generate(model, [PROMPT], 8) == generate(cases[family].reference, [PROMPT], 8), "it still runs"
