"""transformers' prompt lookup on a loaded model: the unmodified model's tokens, in fewer passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import expertly
from expertly.core.errors import ConfigError
from expertly.model.generation import NUM_DRAFTED, generation_config
from expertly.model.generation import generate as generate_one
from tests.engine.conftest import Cases
from tests.engine.observe import loaded
from tests.families import generate

SAID = [5, 61, 7, 80, 23, 90, 11, 42, 3, 77, 34, 56, 19, 68, 100, 28]
PROMPT = SAID * 2
NUM_NEW = 40


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


def looked_up(model: Any, **settings: Any) -> list[list[int]]:
    return written(model, prompt_lookup_num_tokens=NUM_DRAFTED, **settings)


@pytest.mark.parametrize("system", ["fmoe", "resident"])
def test_tokens_are_those_of_the_unmodified_model_in_fewer_passes(system: str, cases: Cases) -> None:
    case = cases["gpt_oss"]
    expected = written(case.reference)
    with loaded(case.store, system=system, memory="100%" if system == "resident" else "50%") as model:
        assert written(model) == expected
        before = expertly.stats(model).as_dict()["phases"]["decode"]
        assert looked_up(model) == expected
        decode = expertly.stats(model).as_dict()["phases"]["decode"]
    num_passes, num_rows = (decode[name] - before[name] for name in ("iterations", "tokens"))
    assert num_passes < NUM_NEW * 3 // 4, "some drafted tokens were accepted"
    assert num_rows > NUM_NEW, "a verified token counts as decode"


def test_sampled_tokens_come_from_the_same_distribution(cases: Cases) -> None:
    """A token that was drafted is kept where sampling gives it, as transformers does: over a vocabulary of one token
    that is certain, and over all the first of them is as likely as without.
    """
    case = cases["qwen3_moe"]
    with loaded(case.store) as model:
        torch.manual_seed(3)
        assert looked_up(model, do_sample=True, top_k=1) == written(case.reference)
        assert expertly.stats(model).as_dict()["phases"]["decode"]["iterations"] < NUM_NEW


@pytest.mark.parametrize("family", ["qwen3_next", "jamba"])
def test_a_family_that_cannot_take_tokens_back_is_refused_by_name(family: str, cases: Cases) -> None:
    with loaded(cases[family].store) as model:
        config = generation_config(model, 8)
        config.prompt_lookup_num_tokens = NUM_DRAFTED
        with pytest.raises(ConfigError, match="speculate='prompt-lookup': transformers refuses it"):
            generate_one(model, PROMPT, config)
        assert generate(model, [PROMPT], 8) == generate(cases[family].reference, [PROMPT], 8), "it still runs"
