"""The preset `expertly` in the engine: the same tokens, and fewer experts loaded than LRU loads."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import expertly
from expertly.scheduler.decisions import replay_file
from tests.engine.conftest import Cases
from tests.engine.observe import counts, loaded
from tests.families import generate, load_reference, make_prompts


@pytest.mark.parametrize(("segments", "devices"), [(1, None), (4, None), (1, "cpu:0,cpu:1")])
def test_tokens_are_those_of_the_unmodified_model(segments: int, devices: str | None, cases: Cases) -> None:
    case, prompts = cases["qwen3_moe"], make_prompts(2, length=9)
    expected = generate(load_reference(case.folder), prompts, 12)
    settings = {"segments": segments} | ({} if devices is None else {"devices": devices, "memory": "40%"})
    with loaded(case.store, system="expertly", **settings) as model:
        assert generate(model, prompts, 12) == expected
        hits, partial, misses = counts(model, "decode")
        assert hits > 0 and misses + partial > 0, "experts were kept, and others passed"
        assert expertly.stats(model).as_dict()["phases"]["decode"]["bytes_loaded"] > 0


def test_what_it_learned_while_it_ran_is_learned_again_when_it_is_replayed(cases: Cases, tmp_path: Path) -> None:
    path, dice = tmp_path / "decisions.jsonl", random.Random(0)
    with loaded(cases["qwen3_moe"].store, system="expertly", memory="40%", decisions=path) as model:
        for seed in range(3):
            generate(model, make_prompts(1, length=dice.randint(4, 9)), 20 + seed)
    summary, result = replay_file(path)
    assert result.difference is None, summary
