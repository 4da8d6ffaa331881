"""What a process of a comparison does with its model: facts, prompts, recording, learning, playing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import expertly
from expertly.api import handle
from expertly.engine.learned import eviction_policies
from expertly.lab.compare.player import Player
from expertly.lab.playing import RecordedRequest
from expertly.lab.prompts import Prompt
from expertly.sim.schedule import Selection
from expertly.trace.reader import Trace
from tests.families import make_checkpoint

HOW = {"temperature": 0.8, "seed": 0, "name": "tiny", "created": "", "command": ""}
SPLIT = Selection(split=(1, 1), seed=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("models") / "tiny", seed=4, tokenizer=True)


@pytest.fixture
def player() -> Iterator[Player]:
    made = Player()
    yield made
    made.unload()


def load(player: Player, model: Path, system: str) -> dict[str, Any]:
    return player.load({"model": str(model), "memory": "50%", "system": system})


def recorded(player: Player, folder: Path) -> Path:
    """Four answers of six tokens."""
    asked = player.tokens([Prompt(number, text, None) for number, text in enumerate("abcd", 1)], 6, False)
    player.record(str(folder / "trace"), asked, 6, HOW)
    return folder / "trace"


def test_what_is_recorded_is_what_is_played(player: Player, model: Path, tmp_path: Path) -> None:
    facts = load(player, model, "lru")
    assert facts["system"] == "lru" and facts["memory_bytes"] > 0 and facts["threads"] >= 1
    trace = Trace.open(recorded(player, tmp_path))
    first = trace.requests[0]
    ids = trace.rows("token", 0, first.num_rows).tolist()
    played = player.play(RecordedRequest(tuple(ids), first.num_prompt_tokens))
    assert played["num_steps"] == first.num_rows - first.num_prompt_tokens == 5, "the last token is not fed"
    assert played["latency_s"] > played["ttft_s"] > 0 and played["tpot_s"] > 0
    demands = sum(played["decode"][name] for name in ("hits", "partial_hits", "misses"))
    assert demands == 5 * sum(layer.top_k for layer in trace.manifest.layers)


def test_a_training_part_teaches_what_predicts_and_what_evicts(player: Player, model: Path, tmp_path: Path) -> None:
    load(player, model, "lru")
    trace = recorded(player, tmp_path)
    load(player, model, "fmoe")
    prediction = expertly.stats(player._model).as_dict()["prediction"]
    assert prediction["predictor"]["maps"] == 0
    player.learn(str(trace), SPLIT)
    prediction = expertly.stats(player._model).as_dict()["prediction"]
    assert prediction["predictor"]["maps"] == 2 * 6, "an iteration a map, of two of four requests"
    load(player, model, "expertly")
    player.learn(str(trace), SPLIT)
    (policy,) = eviction_policies(handle(player._model).engine.executor)
    assert policy.learned is not None and policy.learned.num_learned > 0


def test_a_prompt_that_is_too_long_is_left_out(player: Player, model: Path) -> None:
    load(player, model, "lru")
    found = player.tokens([Prompt(1, "a", None), Prompt(2, "a b " * 5000, None)], 6, False)
    assert [one.prompt.line for one in found] == [1]
