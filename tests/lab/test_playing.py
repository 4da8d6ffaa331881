"""A request answered as `generate` answers it, and fed again as it was; and what a process of a comparison does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import expertly
from expertly.api import handle
from expertly.engine.learned import eviction_policies
from expertly.lab.compare.player import Player
from expertly.lab.playing import Played, answer, chooser, feed
from expertly.lab.prompts import Prompt
from expertly.sim.schedule import Selection
from tests.families import make_checkpoint

PROMPT = [5, 9, 2, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("models") / "tiny", seed=3, tokenizer=True)


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Any]:
    loaded, _ = expertly.load(str(folder), memory="50%", learned=None)
    yield loaded
    expertly.unload(loaded)


def answered(model: Any, num: int, temperature: float = 0.0, seed: int = 0, until: int = 99) -> list[int]:
    """What was chosen."""
    choose, written = chooser(temperature, seed), list[int]()

    def noted(logits: torch.Tensor) -> int:
        written.append(choose(logits))
        return written[-1]

    answer(model, PROMPT, num, noted, lambda so_far: so_far < until)
    return written


def test_the_greedy_answer_is_that_of_generate(model: Any) -> None:
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False)
    assert answered(model, 6) == out[0, len(PROMPT) :].tolist()
    assert answered(model, 6, until=3) == answered(model, 3), "it stops where it is told to"


def test_an_answer_ends_with_a_token_that_ends_it(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = answered(model, 6)
    for ends in (whole[2], [127, whole[2]]):
        monkeypatch.setattr(model.generation_config, "eos_token_id", ends)
        assert answered(model, 6) == whole[: whole.index(whole[2]) + 1]


def test_chance_repeats_with_its_seed(model: Any) -> None:
    first = answered(model, 8, 5.0, seed=1)
    assert answered(model, 8, 5.0, seed=1) == first != answered(model, 8, 5.0, seed=2)


def test_feeding_takes_a_pass_for_the_prompt_and_one_for_each_token_after_it(model: Any) -> None:
    before = expertly.stats(model).as_dict()["layers"][0]
    played = feed(model, [*PROMPT, 1, 2, 3], len(PROMPT))
    after = expertly.stats(model).as_dict()["layers"][0]

    def demands(phase: str) -> int:
        return sum(after[phase][name] - before[phase][name] for name in ("hits", "partial_hits", "misses"))

    assert len(played.steps_s) == 3 and demands("decode") == 3 * model.config.num_experts_per_tok
    assert demands("prefill") > 0
    assert played.seconds == pytest.approx(played.ttft_s + sum(played.steps_s)) and played.ttft_s > 0


def test_a_single_token_has_no_time_per_token() -> None:
    assert Played(0.5, ()).tpot_s is None and Played(0.5, ()).seconds == 0.5
    assert Played(0.5, (0.1, 0.3)).tpot_s == pytest.approx(0.2)


HOW = {"temperature": 0.8, "seed": 0, "name": "tiny", "created": "", "command": ""}
SPLIT = Selection(split=(1, 1), seed=0)


@pytest.fixture
def player() -> Iterator[Player]:
    made = Player()
    yield made
    made.unload()


def test_a_training_part_teaches_what_predicts_and_what_evicts(player: Player, folder: Path, tmp_path: Path) -> None:
    def load(system: str) -> None:
        player.load({"model": str(folder), "memory": "50%", "system": system})

    def num_maps() -> int:
        return int(expertly.stats(player._model).as_dict()["prediction"]["predictor"]["maps"])

    load("lru")
    texts = (*"abcd", "a b " * 5000)
    asked = player.tokens([Prompt(number, text, None) for number, text in enumerate(texts, 1)], 6, False)
    assert [one.prompt.text for one in asked] == list("abcd"), "one that is too long is left out"
    player.record(str(tmp_path / "trace"), asked, 6, HOW)
    load("fmoe")
    assert num_maps() == 0
    player.learn(str(tmp_path / "trace"), SPLIT)
    assert num_maps() == 2 * 6, "an iteration a map, of two of four requests"
    load("expertly")
    player.learn(str(tmp_path / "trace"), SPLIT)
    (policy,) = eviction_policies(handle(player._model).engine.executor)
    assert policy.learned is not None and policy.learned.num_learned > 0
