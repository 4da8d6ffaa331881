"""Systems that predict: the tokens of the unmodified model, whatever is predicted, late, dropped or fails."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import expertly
from expertly.api import handle
from tests.engine import predictors
from tests.engine.conftest import Case, Cases
from tests.engine.observe import loaded, prediction
from tests.engine.predictors import Everything, Slow
from tests.families import NUM_NEW_TOKENS, generate, logits_of

pytestmark = pytest.mark.timeout(120)

LOOKAHEAD, SPECULATIVE = "lru:prediction=lookahead", "lru:prediction=speculative"

LOSSLESS = [  # beside test_lossless.py and test_random_specs.py: system, family, memory, segments, where it predicts
    ("fmoe", "mixtral", "50%", 4, "thread"),
    ("fmoe", "gpt_oss", "50%", 4, "inline"),
    ("fmoe", "switch_transformers", "50%", 4, "thread"),
    ("fmoe:gate=measured", "mixtral", "50%", 1, "thread"),
    ("moe-infinity", "switch_transformers", "90%", 4, "inline"),
    ("moe-infinity:distance=2:width=3:admission=best:eviction=fmoe", "qwen3_moe", "50%", 1, "thread"),
    (SPECULATIVE, "switch_transformers", "50%", 4, "thread"),
    ("lru:allocation=none:prediction=lookahead:ahead=staging", "switch_transformers", "60%", 2, "thread"),
    ("moepic:gate=measured", "mixtral", "50%", 1, "inline"),
    ("expertly:prediction=fmoe:distance=1", "qwen3_moe", "50%", 4, "thread"),
]


def of_phases(model: Any, name: str) -> int:
    """A counter, over both phases."""
    return sum(int(phase[name]) for phase in expertly.stats(model).as_dict()["phases"].values())


def assert_prefetched(model: Any, case: Case) -> None:
    """It predicted, and prefetched something of it, in less memory than the experts take. A predictor thread on a busy
    machine may be late for all of several short answers, and what it predicts of an answer that was just given is here:
    there are more of them then, in turns.
    """
    for number in range(200):
        if of_phases(model, "prefetched"):
            break
        one = slice(number % len(case.prompts), number % len(case.prompts) + 1)
        assert generate(model, case.prompts[one]) == case.tokens[one]
    stats = expertly.stats(model).as_dict()
    assert stats["prediction"]["failed"] is None
    assert of_phases(model, "predicted") > 0 and of_phases(model, "prefetched") > 0
    assert of_phases(model, "prefetched_bytes") > 0
    assert stats["memory_bytes"] < stats["expert_bytes"]


# -- lossless --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("system", "family", "memory", "segments", "where"), LOSSLESS)
def test_every_way_to_predict_is_lossless(
    system: str, family: str, memory: str, segments: int, where: str, cases: Cases
) -> None:
    case = cases[family]
    with loaded(case.store, system=system, segments=segments, predict=where, memory=memory) as model:
        for _ in range(2):  # the second finds what the first has taught
            assert generate(model, case.prompts) == case.tokens
        torch.testing.assert_close(logits_of(model, case.prompts), case.logits, rtol=1e-4, atol=1e-5)
        found = prediction(model)
        assert found["failed"] is None and of_phases(model, "predicted") > 0
        if "gate" in system:
            assert found["gate"]["steps_with"] and found["gate"]["steps_without"]
        elif memory != "90%":  # with so much what is predicted is here
            assert_prefetched(model, case)


@pytest.mark.parametrize(
    ("family", "where", "segments"),
    [
        ("qwen3_moe", "thread", 1),
        ("qwen3_moe", "inline", 4),
        ("gpt_oss", "thread", 4),
        ("switch_transformers", "thread", 4),
        ("switch_transformers", "inline", 1),
    ],
)
def test_predicting_everything_all_the_time_is_lossless(
    family: str, where: str, segments: int, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases[family]
    system = predictors.put(monkeypatch, Everything)
    with loaded(case.store, system=system, segments=segments, predict=where, memory="30%") as model:
        assert generate(model, case.prompts) == case.tokens
        assert generate(model, case.prompts[:1]) == case.tokens[:1]
        assert_prefetched(model, case)


# -- late, dropped, failing ------------------------------------------------------------------------------------------


def test_a_slow_predictor_does_not_slow_the_model(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["qwen3_moe"]
    made: list[Slow] = []

    def make(geometry: Any) -> Slow:
        made.append(Slow(geometry, 0.5))
        return made[0]

    system = predictors.put(monkeypatch, make)
    with loaded(case.store, system=system) as model:
        assert generate(model, case.prompts) == case.tokens
        assert made[0].num_calls < 3 * NUM_NEW_TOKENS / 2, "in less than half of the time that predicting it all takes"
        stats = prediction(model)
        assert stats["contexts_dropped"] > 0
        assert made[0].num_calls + stats["contexts_dropped"] <= NUM_NEW_TOKENS * 4
        assert generate(model, case.prompts, 4) == [tokens[:4] for tokens in case.tokens]
        end = time.monotonic() + 60
        while not prediction(model)["predictions_late"]:
            assert time.monotonic() < end
            time.sleep(0.1)  # what is predicted meanwhile is of passes that are over
            generate(model, case.prompts[:1], 2)


# -- the prefetch gate ------------------------------------------------------------------------------------------------


def test_each_device_has_a_prefetch_gate(cases: Cases) -> None:
    case = cases["mixtral"]
    with loaded(case.store, system=f"{LOOKAHEAD}:gate=measured", memory="60%", devices="cpu:0,cpu:1") as model:
        for _ in range(2):
            assert generate(model, case.prompts) == case.tokens
        gates = [device.scheduler.gate for device in handle(model).engine.executor.shards]
        assert len(set(map(id, gates))) == 2 and None not in gates
        devices = expertly.stats(model).as_dict()["devices"]
        assert [one["gate"]["kind"] for one in devices] == ["measured"] * 2
        assert prediction(model)["gate"] == devices[0]["gate"]


# -- what is said ----------------------------------------------------------------------------------------------------


def test_stats_tell_accuracy_by_distance(cases: Cases) -> None:
    case = cases["qwen3_moe"]
    with loaded(case.store, system="lru:prediction=lookahead:distance=2", predict="inline") as model:
        generate(model, case.prompts)
        stats = expertly.stats(model).as_dict()
        decode = stats["phases"]["decode"]
        assert set(decode["accuracy_by_distance"]) == {"1", "2"}
        assert all(0 < share <= 1 for share in decode["accuracy_by_distance"].values())
        assert stats["prediction"]["collect_s"] > 0
        assert stats["prediction"]["maps_file"] is None
        assert stats["layers"][0]["decode"]["accuracy_by_distance"] is None, "nothing looks ahead to the first"
        last = stats["layers"][-1]["decode"]
        for k, goodpred in last["goodpred_by_distance"].items():
            assert goodpred == last["accuracy_by_distance"][k] * last["fetch_rate_by_distance"][k]
        assert last["goodpred"] == last["prediction_accuracy"] * last["fetch_rate"]
