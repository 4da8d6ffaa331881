"""A request answered by chance, and fed again as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import expertly
from expertly.model.playing import answer
from expertly_lab.playing import chooser, feed
from tests.families import make_checkpoint

PROMPT = [5, 9, 2, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("models") / "tiny", seed=3, tokenizer=True)


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Any]:
    loaded, _ = expertly.load(str(folder), memory="50%")
    yield loaded
    expertly.unload(loaded)


def test_chance_repeats_with_its_seed(model: Any) -> None:
    first, again, other = (answer(model, PROMPT, 8, chooser(5.0, seed))[0] for seed in (1, 1, 2))
    assert first == again != other


def test_feeding_takes_a_pass_for_the_prompt_and_one_for_each_token_after_it(model: Any) -> None:
    before = expertly.stats(model).as_dict()["layers"][0]
    played = feed(model, [*PROMPT, 1, 2, 3], len(PROMPT))
    after = expertly.stats(model).as_dict()["layers"][0]

    def demands(phase: str) -> int:
        return sum(after[phase][name] - before[phase][name] for name in ("hits", "partial_hits", "misses"))

    assert len(played.steps_s) == 3 and demands("decode") == 3 * model.config.num_experts_per_tok
    assert demands("prefill") > 0
    assert played.seconds == pytest.approx(played.ttft_s + sum(played.steps_s)) and played.ttft_s > 0
