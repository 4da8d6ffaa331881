"""Who gets how many slots, in an engine: quotas move to where misses are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import expertly
from expertly.api import handle
from expertly.model.hooks import experts_modules
from expertly.scheduler.decisions import replay_file
from tests.engine.conftest import Cases
from tests.engine.observe import loaded
from tests.families import HIDDEN_SIZE, NUM_EXPERTS


def feed(model: Any, num_tokens: int) -> None:
    """Layer 1 chooses among all its experts, the others among three."""
    engine, modules = handle(model).engine, experts_modules(model)
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_tokens):
        for layer, module in enumerate(modules):
            few = NUM_EXPERTS if layer == 1 else 3
            chosen = torch.rand(1, few, generator=generator).topk(2).indices
            engine.forward_experts(module, layer, torch.zeros(1, HIDDEN_SIZE), chosen, torch.full((1, 2), 0.5))


def test_quotas_move_to_the_layer_that_misses_and_are_replayed(cases: Cases, tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    with loaded(
        cases["mixtral"].store, memory="60%", system="lru:allocation=adapmoe", segments=4, decisions=path
    ) as model:
        before = expertly.stats(model).as_dict()["allocation"]
        feed(model, 255)
        assert expertly.stats(model).as_dict()["allocation"]["experts"] == before["experts"]
        evicted = [expertly.stats(model).phase("decode", layer).evicted_nbytes for layer in range(3)]
        misses = expertly.stats(model).phase("decode", 1).misses
        feed(model, 260)
        handle(model).engine.scheduler.check()
        stats = expertly.stats(model).as_dict()
        after = stats["allocation"]
        assert sum(after["experts"]) == sum(before["experts"]) and after["experts"][1] > before["experts"][1]
        assert after["name"] == "adapmoe" and after["moves"] == 1
        assert stats["layers"][0]["decode"]["evicted_bytes"] > evicted[0] or stats["layers"][0]["decode"]["misses"] == 3
        assert expertly.stats(model).phase("decode", 1).misses - misses < misses, "it was worth it"
    replayed = replay_file(path)[1]
    assert replayed.difference is None and replayed.num_layers == 515 * 3


def test_a_systems_own_segments_are_those_that_its_experts_can_be_cut_into(cases: Cases) -> None:
    for system, segments, expected in (("lru", None, 1), ("lru:segments=4", None, 4), ("lru:segments=4", 2, 2)):
        with loaded(cases["mixtral"].store, memory="50%", system=system, segments=segments) as model:
            assert expertly.stats(model).as_dict()["segments"] == expected
    with loaded(cases["mixtral"].store, memory="50%", system="lru:segments=5") as model:
        assert expertly.stats(model).as_dict()["segments"] in (2, 3, 4), "5 divides no width of the test models"
