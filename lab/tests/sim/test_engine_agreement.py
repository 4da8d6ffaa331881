"""With a link that takes no time, the simulator counts what the engine counted, over the engine's own recording."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertly.api import handle
from expertly.model.packing import pack
from expertly.policies.fmoe import FMoE
from expertly.scheduler.counters import LayerCounters
from expertly.scheduler.systems import SYSTEMS, get_system, runnable_systems
from expertly_lab.recording import record
from expertly_lab.sim.hardware import Hardware
from expertly_lab.sim.schedule import Selection, make_schedule
from expertly_lab.sim.simulator import Simulator
from expertly_lab.sim.study import Study
from expertly_lab.trace.reader import Trace
from tests.engine.observe import loaded
from tests.families import HIDDEN_SIZE, generate, make_checkpoint, make_prompts
from tests.golden.engine import make_transfers_instant
from tests.weights import put_beside, random_weights

DEMAND_ONLY = [name for name in runnable_systems() if SYSTEMS[name].prediction == "none"]
PREDICTING = (
    "fmoe",
    "fmoe:scope=layer:semantic=no:select=top-k:distance=1",
    "fmoe:capacity=16",
    "lru:prediction=lookahead:distance=2",
    "lru:prediction=lookahead:distance=2:next_token=yes",
    "lru:prediction=speculative",
    "lcp:prediction=speculative:ahead=staging",
    "lfu:prediction=counts:distance=2",
    "lru:prediction=popularity",
    *("deepspeed-index", "brainstorm", "adapmoe", "pre-gated", "promoe"),
    "lru:prediction=learned:distance=1:width=3",
    "moepic",  # the other start comes when times are known, in the engine measured ones
    "moepic:allocation=split:prediction=random",
    "lru:allocation=split:prediction=lookahead:distance=2",
)

COUNTED = ("hits", "partial_hits", "misses", "demanded_nbytes", "hit_nbytes", "loaded_nbytes", "evicted_nbytes")
OF_PREDICTIONS = (
    *("prefetched_nbytes", "wasted_nbytes", "predicted", "predicted_needed", "predicted_resident", "prefetched"),
    *("prefetched_needed", "prefetched_in_time"),
)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("agreement")
    made = {}
    for family in ("qwen3_moe", "jamba"):
        make_checkpoint(family, folder / family / "checkpoint")
        pack(folder / family / "checkpoint", folder / family / "store")
        made[family] = folder / family / "store"
        put_beside(made[family], HIDDEN_SIZE)
    return made


def counted(counters: list[LayerCounters], names: tuple[str, ...] = COUNTED) -> list[dict[str, dict[str, Any]]]:
    """Of each layer, by phase."""
    layers = [{"prefill": asdict(counter.prefill), "decode": asdict(counter.decode)} for counter in counters]
    return [{phase: {name: layer[phase][name] for name in names} for phase in layer} for layer in layers]


def run_engine(model: Any, folder: Path, *, batch: bool = False, full: bool = False) -> None:
    """Two requests one after the other, or in a batch, recorded. Those are of one length: what an engine loads for pads
    is in no trace."""
    prompts = make_prompts(2, length=13, seed=4)
    with record(model, folder, full=full) as recorder:
        if batch:
            recorder.begin_batch([recorder.begin_request() for _ in range(2)])
            generate(model, [prompts[0], prompts[0][::-1]])
            return
        for prompt in prompts:
            recorder.begin_request(num_prompt_tokens=len(prompt))
            generate(model, [prompt])


def simulated(trace: Trace, system: str, model: Any) -> Simulator:
    """The same system and budget on a machine without a link."""
    engine = handle(model).engine.scheduler
    study = Study(
        trace,
        make_schedule(trace, Selection()),
        Hardware.read("infinite"),
        engine.geometry.layers,
        trace.manifest.dense,
        segments=engine.geometry.segments_per_expert,
        learned=random_weights(engine.geometry.layers, HIDDEN_SIZE),
    )
    return study.simulate(get_system(system), engine.budget)


BUDGETS = (("15%", 1), ("25%", 4), ("50%", 1), ("15%", 4), ("25%", 1), ("50%", 4))
"""Of memory and P: each system has one of them, "lru" all."""


@pytest.mark.parametrize(
    ("system", "memory", "segments"),
    [
        *(("lru", *budget) for budget in BUDGETS),
        *((name, *BUDGETS[i % 6]) for i, name in enumerate(DEMAND_ONLY) if name != "lru"),
    ],
)
def test_engine_and_simulator_count_the_same(
    system: str, memory: str, segments: int, stores: dict[str, Path], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"memory": "100%" if SYSTEMS[system].keeps_everything else memory}
    with loaded(stores["qwen3_moe"], system=system, segments=segments, **settings) as model:
        run_engine(model, tmp_path / "trace")
        expected = counted(handle(model).engine.scheduler.counters)
        trace = Trace.open(tmp_path / "trace")
        actual = counted(simulated(trace, system, model).scheduler.counters)
    assert actual == expected
    decode = [layer["decode"] for layer in expected]
    assert all(each["hits"] + each["partial_hits"] + each["misses"] == 2 * 6 * 3 for each in decode), (
        "it was a real run"
    )
    if system != "resident":
        assert sum(each["loaded_nbytes"] for each in decode) > 0


@pytest.mark.parametrize("family", ["qwen3_moe", "jamba"])
def test_batches_and_other_families_agree(family: str, stores: dict[str, Path], tmp_path: Path) -> None:
    with loaded(stores[family], system="lru", memory="40%", segments=4) as model:
        run_engine(model, tmp_path / "trace", batch=True)
        expected = counted(handle(model).engine.scheduler.counters)
        assert counted(simulated(Trace.open(tmp_path / "trace"), "lru", model).scheduler.counters) == expected


@pytest.mark.parametrize(
    ("system", "batch", "family"),
    [
        *((system, bool(i % 2), "qwen3_moe") for i, system in enumerate(PREDICTING)),
        ("fmoe", True, "qwen3_moe"),
        ("fmoe", False, "jamba"),
    ],
)
def test_predictions_and_what_comes_of_them_agree(
    system: str, batch: bool, family: str, stores: dict[str, Path], tmp_path: Path
) -> None:
    """Predicting within the pass, with transfers that take no time. The recording knows all that predictors see."""
    with loaded(stores[family], system=system, memory="45%", segments=2) as model:
        engine = handle(model).engine
        make_transfers_instant(model)
        run_engine(model, tmp_path / "trace", batch=batch, full=True)
        simulator = simulated(Trace.open(tmp_path / "trace"), system, model)
        names = COUNTED + OF_PREDICTIONS
        expected = counted(engine.scheduler.counters, names)
        assert counted(simulator.scheduler.counters, names) == expected
        predictor = engine.prefetching.predictor
    assert simulator.predictor is not None and simulator.predictor.facts() == predictor.facts()
    if isinstance(predictor, FMoE):
        assert isinstance(simulator.predictor, FMoE) and predictor.store.num_maps >= 4, "quotas of two requests"
        for name in ("born", "maps", "embeddings"):
            np.testing.assert_array_equal(getattr(simulator.predictor.store, name), getattr(predictor.store, name))
    decode = [layer["decode"] for layer in expected]
    assert sum(each["predicted"] for each in decode) > 0 and sum(each["prefetched_in_time"] for each in decode) > 0
