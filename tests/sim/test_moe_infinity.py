"""MoE-Infinity, simulated: what it has learned is worth something, its work takes time, its cache is its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from expertly.policies.predictor.eam import EAM
from expertly.scheduler.presets import get_system
from expertly.sim.hardware import PredictorCosts
from expertly.sim.schedule import Schedule, Selection
from expertly.sim.study import Memory, Study
from expertly.trace.reader import Trace
from tests.sim.drive import Pass, make_study, make_trace, random_passes, results, sized, toy

LAYERS = sized(4, 12, 2)
SYSTEM = "moe-infinity"


def domains(folder: Path, num_requests: int = 24) -> Trace:
    """Requests of two domains, each of which has experts of its own; tokens draw from those of their request's."""
    dice, passes = np.random.default_rng(0), list[Pass]()
    for request in range(num_requests):
        own = range(6) if request % 2 else range(6, 12)
        favourites = np.array([dice.permutation(own)[:3] for _ in range(4)])
        for _ in range(8):
            passes.append((request, False, [[dice.permutation(row)[:2].tolist() for row in favourites]]))
    return make_trace(folder / "trace", passes, LAYERS, num_requests=num_requests)


def test_a_filled_collection_predicts_more_of_what_is_needed_than_an_empty_one(tmp_path: Path) -> None:
    """Held-out requests of two domains."""
    trace = domains(tmp_path)
    filled = make_study(trace, selection=Selection(split=(7, 3)), matcher="inline")
    empty = Study(trace, Schedule([], filled.schedule.test), toy(), filled.layers, None, matcher="inline")
    found = {}
    for name, study in (("filled", filled), ("empty", empty)):
        found[name] = study.row(get_system(SYSTEM), Memory("40%"))
    assert found["filled"]["history"].startswith("filled from") and found["empty"]["history"] == "empty"
    assert found["filled"]["recall"] > found["empty"]["recall"]
    assert found["filled"]["prediction_accuracy"] > 1.5 * 1 / 6, "half of the experts are the other domain's"
    assert found["filled"]["predictor"]["decode_matrices"] > found["empty"]["predictor"]["decode_matrices"] > 0


def test_its_cache_is_not_lrus(tmp_path: Path) -> None:
    """With the same predictions another eviction keeps other experts, and each is repeatable."""
    trace = domains(tmp_path)
    systems = (SYSTEM, f"{SYSTEM}:eviction=lru")
    once = results(make_study(trace, matcher="inline"), systems, "30%")
    assert once == results(make_study(trace, matcher="inline"), systems, "30%")
    assert once[SYSTEM]["bytes_loaded"] != once[systems[1]]["bytes_loaded"]
    assert once[SYSTEM]["prefetched_bytes"] > 0


def test_its_work_takes_time(tmp_path: Path) -> None:
    """A machine on which matching takes long knows what is needed too late."""
    passes = random_passes(8, LAYERS, 60, prompt=5, num_requests=6)
    trace = make_trace(tmp_path / "trace", passes, LAYERS, num_requests=6)
    found = {}
    for label, costs in (
        ("none", PredictorCosts(0, float("inf"), float("inf"))),
        ("long", PredictorCosts(call_ns=0, read_nbytes_per_s=1e3, flops_per_s=float("inf"))),
    ):
        found[label] = results(make_study(trace, toy(predictor=costs)), [SYSTEM], "40%")[SYSTEM]
    assert found["none"]["contexts_dropped"] == found["none"]["predictions_late"] == 0
    assert found["long"]["contexts_dropped"] > 0
    assert found["long"]["prefetched_bytes"] < found["none"]["prefetched_bytes"]


def test_facts_are_those_of_its_collections(tmp_path: Path) -> None:
    study = make_study(domains(tmp_path), matcher="inline")
    simulator = study.simulate(get_system(f"{SYSTEM}:capacity=5"), Memory("40%").budget(study.geometry))
    predictor = simulator.predictor
    assert isinstance(predictor, EAM)
    facts = predictor.facts()
    assert (facts["decode_matrices"], facts["prefill_matrices"], facts["capacity"]) == (5, 0, 5)
    assert facts["searches"] and 0 < facts["cosine"] <= 1
