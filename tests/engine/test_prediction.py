"""Systems that predict: the tokens of the unmodified model, whatever is predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import expertly
from tests.engine import predictors
from tests.engine.conftest import Cases
from tests.engine.observe import loaded, prediction
from tests.engine.predictors import Everything
from tests.families import generate, logits_of

pytestmark = pytest.mark.timeout(120)

LOOKAHEAD, SPECULATIVE = "lru:prediction=lookahead", "lru:prediction=speculative"

LOSSLESS = [  # beside test_lossless.py and test_random_specs.py: system, family, memory, segments
    ("fmoe", "mixtral", "50%", 4),
    ("fmoe", "gpt_oss", "50%", 4),
    ("fmoe", "switch_transformers", "50%", 4),
    ("moe-infinity", "switch_transformers", "90%", 4),
    ("moe-infinity:distance=2:width=3:admission=best:eviction=fmoe", "qwen3_moe", "50%", 1),
    (SPECULATIVE, "switch_transformers", "50%", 4),
    ("moepic", "mixtral", "50%", 1),
    ("expertly:prediction=fmoe:distance=1", "qwen3_moe", "50%", 4),
]


def of_phases(model: Any, name: str) -> int:
    """A counter, over both phases."""
    return sum(int(phase[name]) for phase in expertly.stats(model).as_dict()["phases"].values())


def assert_prefetched(model: Any) -> None:
    """It predicted, and prefetched something of it, in less memory than the experts take."""
    stats = expertly.stats(model).as_dict()
    assert stats["prediction"]["failed"] is None
    assert of_phases(model, "predicted") > 0 and of_phases(model, "prefetched") > 0
    assert of_phases(model, "prefetched_bytes") > 0
    assert stats["memory_bytes"] < stats["expert_bytes"]


# -- lossless --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("system", "family", "memory", "segments"), LOSSLESS)
def test_every_way_to_predict_is_lossless(system: str, family: str, memory: str, segments: int, cases: Cases) -> None:
    case = cases[family]
    with loaded(case.store, system=system, segments=segments, memory=memory) as model:
        for _ in range(2):  # the second finds what the first has taught
            assert generate(model, case.prompts) == case.tokens
        torch.testing.assert_close(logits_of(model, case.prompts), case.logits, rtol=1e-4, atol=1e-5)
        found = prediction(model)
        assert found["failed"] is None and of_phases(model, "predicted") > 0
        if memory != "90%":  # with so much what is predicted is here
            assert_prefetched(model)


@pytest.mark.parametrize(("family", "segments"), [("qwen3_moe", 1), ("gpt_oss", 4), ("switch_transformers", 4)])
def test_predicting_everything_all_the_time_is_lossless(
    family: str, segments: int, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases[family]
    system = predictors.put(monkeypatch, Everything)
    with loaded(case.store, system=system, segments=segments, memory="30%") as model:
        assert generate(model, case.prompts) == case.tokens
        assert generate(model, case.prompts[:1]) == case.tokens[:1]
        assert_prefetched(model)


# -- what is said ----------------------------------------------------------------------------------------------------


def test_stats_tell_accuracy_by_distance(cases: Cases) -> None:
    case = cases["qwen3_moe"]
    with loaded(case.store, system="lru:prediction=lookahead:distance=2") as model:
        generate(model, case.prompts)
        stats = expertly.stats(model).as_dict()
        decode = stats["phases"]["decode"]
        assert set(decode["accuracy_by_distance"]) == {"1", "2"}
        assert all(0 < share <= 1 for share in decode["accuracy_by_distance"].values())
        assert stats["prediction"]["maps_file"] is None
        assert stats["layers"][0]["decode"]["accuracy_by_distance"] is None, "nothing looks ahead to the first"
        last = stats["layers"][-1]["decode"]
        for k, goodpred in last["goodpred_by_distance"].items():
            assert goodpred == last["accuracy_by_distance"][k] * last["fetch_rate_by_distance"][k]
        assert last["goodpred"] == last["prediction_accuracy"] * last["fetch_rate"]
