"""With a link that takes no time, the simulator counts what the engine counted, over the engine's own recording."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from expertly.control.counters import LayerCounters
from expertly.engine.api import handle
from expertly.engine.recording import record
from expertly.models.packing import pack
from expertly.sim.hardware import Hardware
from expertly.sim.schedule import Selection, make_schedule
from expertly.sim.study import Study
from expertly.systems import SYSTEMS, runnable_systems
from expertly.trace.reader import Trace
from tests.engine.observe import loaded
from tests.families import generate, make_checkpoint, make_prompts

COUNTED = ("hits", "partial_hits", "misses", "demanded_nbytes", "hit_nbytes", "loaded_nbytes", "evicted_nbytes")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("agreement")
    made = {}
    for family in ("qwen3_moe", "jamba", "switch_transformers"):
        make_checkpoint(family, folder / family / "checkpoint")
        pack(folder / family / "checkpoint", folder / family / "store")
        made[family] = folder / family / "store"
    return made


def counted(counters: list[LayerCounters]) -> list[dict[str, dict[str, int]]]:
    """Of each layer, by phase."""
    layers = [{"prefill": asdict(one.prefill), "decode": asdict(one.decode)} for one in counters]
    return [{phase: {name: one[phase][name] for name in COUNTED} for phase in one} for one in layers]


def run_engine(model: Any, folder: Path, *, batch: bool = False) -> None:
    """Three requests one after the other, or a batch of two, recorded. The two are of one length: what an engine loads
    for pads is in no trace."""
    prompts = make_prompts(3, length=13, seed=4)
    with record(model, folder) as recorder:
        if batch:
            recorder.begin_batch([recorder.begin_request() for _ in range(2)])
            generate(model, [prompts[0], prompts[0][::-1]], 8)
            return
        for prompt in prompts:
            recorder.begin_request(num_prompt_tokens=len(prompt))
            generate(model, [prompt], 8)


def simulated(trace: Trace, system: str, model: Any, order: str = "resident") -> list[LayerCounters]:
    """The same system and budget on a machine without a link."""
    engine = handle(model).engine.controller
    study = Study(
        trace,
        make_schedule(trace, Selection()),
        Hardware.read("infinite"),
        engine.geometry.layers,
        trace.manifest.dense,
        segments=engine.geometry.segments_per_expert,
        order=order,
    )
    return study.simulate(SYSTEMS[system], engine.budget).controller.counters


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("memory", ["10%", "25%", "50%"])
@pytest.mark.parametrize("system", runnable_systems())
def test_engine_and_simulator_count_the_same(
    system: str, memory: str, segments: int, stores: dict[str, Path], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"memory": "100%" if SYSTEMS[system].keeps_everything else memory}
    if memory == "10%" and system != "resident":
        settings["ring"] = 2  # the default one is more than that of these tiny models
    with loaded(stores["qwen3_moe"], system=system, segments=segments, **settings) as model:
        run_engine(model, tmp_path / "trace")
        expected = counted(handle(model).engine.controller.counters)
        trace = Trace.open(tmp_path / "trace")
        found = counted(simulated(trace, system, model))
    assert found == expected
    decode = [layer["decode"] for layer in expected]
    assert all(one["hits"] + one["partial_hits"] + one["misses"] == 3 * 7 * 3 for one in decode), "it was a real run"
    if system != "resident":
        assert sum(one["loaded_nbytes"] for one in decode) > 0


@pytest.mark.parametrize("family", ["qwen3_moe", "jamba", "switch_transformers"])
def test_batches_and_other_families_agree(family: str, stores: dict[str, Path], tmp_path: Path) -> None:
    with loaded(stores[family], system="lru", memory="40%", segments=4) as model:
        run_engine(model, tmp_path / "trace", batch=True)
        expected = counted(handle(model).engine.controller.counters)
        assert counted(simulated(Trace.open(tmp_path / "trace"), "lru", model)) == expected


def test_experts_one_at_a_time_by_id_agree(stores: dict[str, Path], tmp_path: Path) -> None:
    with loaded(stores["qwen3_moe"], system="lru", memory="40%", segments=2, order="id") as model:
        run_engine(model, tmp_path / "trace")
        expected = counted(handle(model).engine.controller.counters)
        assert counted(simulated(Trace.open(tmp_path / "trace"), "lru", model, order="id")) == expected
