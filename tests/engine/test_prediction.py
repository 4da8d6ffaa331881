"""What is told of predictions."""

from __future__ import annotations

import expertly
from tests.engine.conftest import Cases
from tests.engine.observe import loaded
from tests.families import generate


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
