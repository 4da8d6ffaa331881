"""With compressed experts, too, the simulator decides what the engine decided: slots above, and copies below."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import expertly
from expertly.api import handle
from expertly.core.costs import CodecCosts
from expertly.core.geometry import Geometry
from expertly.model.packing import pack
from expertly.scheduler.budget import Budget
from expertly.scheduler.presets import get_system
from expertly.sim.coded import Coding
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


@dataclass(frozen=True)
class AsInTheEngine(Storage):
    """The engine's slots as they are, and as many places for copies: it holds whole pages, which the model has not."""

    num_copies: int = 0

    def divide(
        self, hardware: Hardware, geometry: Geometry, budget: Budget, share: float
    ) -> tuple[Budget, Coding | None]:
        (size,) = {geometry.segment_nbytes(layer) for layer in range(geometry.num_layers)}
        coding = Coding(NO_TIME)
        return budget, Coding(NO_TIME, self.num_copies * coding.stored_nbytes(size))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agreement")
    make_checkpoint("qwen3_moe", folder / "checkpoint")
    pack(folder / "checkpoint", folder / "store", codec="planes")
    return folder / "store"


@pytest.mark.parametrize("compressed", ["0", "0.3", "0.7"])
@pytest.mark.parametrize(
    ("system", "segments"), [("lru", 1), ("lru", 4), ("lcp", 1), ("fmoe", 2), ("moepic:allocation=split", 4)]
)
def test_engine_and_simulator_hold_the_same_copies(
    system: str, segments: int, compressed: str, store: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"memory": "60%", "ring": 3 * segments}
    if get_system(system).prediction != "none":
        settings["matcher"] = "inline"
    with loaded(store, system=system, segments=segments, compressed=compressed, **settings) as model:
        engine = handle(model).engine
        make_instant(engine.backend)
        run_engine(model, tmp_path / "trace", full=True)
        names = COUNTED + OF_PREDICTIONS
        expected = counted(engine.scheduler.counters, names)
        told = expertly.stats(model).as_dict()
        readers: Any = engine.backend
        pool = readers._readers._source._pool
        num_copies = 0 if pool is None else pool.tier.slots_per_class[0]
        trace = Trace.open(tmp_path / "trace")
        study = Study(
            trace,
            make_schedule(trace, Selection()),
            Hardware.read("infinite"),
            engine.scheduler.geometry.layers,
            trace.manifest.dense,
            segments=segments,
            matcher="inline",
            learned=random_weights(engine.scheduler.geometry.layers, HIDDEN_SIZE),
            storage=AsInTheEngine("planes", compressed, num_copies=num_copies),
        )
        simulator = study.simulate(get_system(system), engine.scheduler.budget)
        simulator._link.busy_until_ns()  # begins what was asked for last, ahead of a token that did not come
        coded = simulator.coded
        assert coded is not None
        assert counted(simulator.scheduler.counters, names) == expected
        assert coded.held_nbytes == told["bytes_compressed_hit"]
        if pool is not None:
            total = engine.scheduler.geometry.num_experts
            where = [engine.scheduler.geometry.layer_of_expert(eid) for eid in range(total)]
            keys = [
                (layer, eid - engine.scheduler.geometry.first_expert_id(layer), segment)
                for eid, layer in enumerate(where)
                for segment in range(segments)
            ]
            held = [[tier.holds(*key) for key in keys] for tier in (pool.tier, coded.tier)]
            assert held[0] == held[1] and sum(held[0]) > 0
        assert (coded.held_nbytes > 0) == (num_copies > 0)
