"""With compressed experts, too, the simulator decides what the engine decided."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expertly.api import handle
from expertly.core.costs import CodecCosts
from expertly.model.packing import pack
from expertly.scheduler.presets import get_system
from expertly.sim.hardware import Hardware
from expertly.sim.schedule import Selection, make_schedule
from expertly.sim.storage import Storage
from expertly.sim.study import Study
from expertly.trace.reader import Trace
from tests.engine.observe import loaded
from tests.families import HIDDEN_SIZE, make_checkpoint
from tests.sim.test_engine_agreement import COUNTED, OF_PREDICTIONS, counted, make_instant, run_engine
from tests.weights import random_weights

NO_TIME = CodecCosts(0.5, float("inf"), 1)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agreement")
    make_checkpoint("qwen3_moe", folder / "checkpoint")
    pack(folder / "checkpoint", folder / "store", codec="planes")
    return folder / "store"


@pytest.mark.parametrize(
    ("system", "segments"), [("lru", 1), ("lru", 4), ("lcp", 1), ("fmoe", 2), ("moepic:allocation=split", 4)]
)
def test_engine_and_simulator_count_the_same(system: str, segments: int, store: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"memory": "60%", "ring": 3 * segments}
    if get_system(system).prediction != "none":
        settings["matcher"] = "inline"
    with loaded(store, system=system, segments=segments, **settings) as model:
        engine = handle(model).engine
        make_instant(engine.device)
        run_engine(model, tmp_path / "trace", full=True)
        names = COUNTED + OF_PREDICTIONS
        expected = counted(engine.scheduler.counters, names)
        trace = Trace.open(tmp_path / "trace")
        study = Study(
            trace,
            make_schedule(trace, Selection()),
            replace(Hardware.read("infinite"), codec=NO_TIME),
            engine.scheduler.geometry.layers,
            trace.manifest.dense,
            segments=segments,
            matcher="inline",
            learned=random_weights(engine.scheduler.geometry.layers, HIDDEN_SIZE),
            storage=Storage("planes"),
        )
        simulator = study.simulate(get_system(system), engine.scheduler.budget)
        simulator._link.busy_until_ns()  # begins what was asked for last, ahead of a token that did not come
        assert simulator.coded is not None
        assert counted(simulator.scheduler.counters, names) == expected
