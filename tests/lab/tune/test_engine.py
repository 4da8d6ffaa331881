"""What tuning asks of the engine: times of model and machine, and candidates that share the memory that is there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import expertly
from expertly import api
from expertly.engine import cpu
from expertly.engine.learned import eviction_policies
from expertly.lab.prompts import Prompt
from expertly.lab.tune.engine import EnginePlayer, TunedWorkload, measure_hardware, record_workload
from expertly.lab.tune.search import Candidate, Deadline
from expertly.scheduler.presets import get_system
from expertly.sim.hardware import Hardware
from tests.families import make_checkpoint

TEXTS = ("Once upon a time", "2 + 2 =", "def f(x):", "Dear Sir,")
PROMPTS = [Prompt(line, text, None) for line, text in enumerate(TEXTS, 1)]
STEPS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("models") / "tiny", seed=13, tokenizer=True)


@pytest.fixture(scope="module")
def workload(model: Path, tmp_path_factory: pytest.TempPathFactory) -> TunedWorkload:
    """Two requests to learn from, two to try."""
    loaded, tokenizer = expertly.load(str(model), memory="50%", learned=None)
    folder, deadline = tmp_path_factory.mktemp("workload") / "trace", Deadline.after(time.monotonic, 100.0)
    try:
        return record_workload(
            loaded, tokenizer, PROMPTS, folder, max_new_tokens=STEPS, seed=0, deadline=deadline, command=""
        )
    finally:
        expertly.unload(loaded)


@pytest.fixture
def player(model: Path, workload: TunedWorkload, tmp_path: Path) -> Iterator[EnginePlayer]:
    load = partial(api.load, str(model), predictor="off")
    nbytes = sum(layer.geometry().nbytes for layer in workload.trace.manifest.layers) // 2
    with EnginePlayer(workload, nbytes, lambda _: None, load, tmp_path) as made:
        yield made


def candidate(name: str) -> Candidate:
    return Candidate(get_system(name), "none")


def num_maps(player: EnginePlayer, one: Candidate) -> int:
    prediction: dict[str, Any] = expertly.stats(player._models[one]).as_dict()["prediction"]
    return int(prediction["predictor"]["maps"])


def test_half_of_the_requests_is_learned_from(workload: TunedWorkload) -> None:
    assert (workload.num_requests, len(workload.requests), len(workload.schedule.training)) == (4, 2, 2)
    assert all(len(request.tokens) - request.num_prompt == STEPS for request in workload.requests)


def test_what_learns_has_learned_from_the_training_part(player: EnginePlayer, workload: TunedWorkload) -> None:
    fmoe, ours = candidate("fmoe"), candidate("expertly")
    for one in (fmoe, ours):
        played = player.play(one, workload.requests[0])
        assert len(played.steps_s) == STEPS and played.ttft_s > 0
    of_training = sum(span.num_rows for span in workload.schedule.training)
    assert num_maps(player, fmoe) == of_training + 2 * len(workload.requests[0].tokens), "run to fill the caches, too"
    (policy,) = eviction_policies(api.handle(player._models[ours]).engine.executor)
    assert policy.learned is not None
    assert policy.learned.num_learned > 2 * sum(len(request.tokens) for request in workload.requests[:1]), (
        "beside what it ran"
    )


def test_where_memory_is_short_models_take_turns_and_go_on_with_what_they_learned(
    player: EnginePlayer, workload: TunedWorkload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu.KIND, "available_nbytes", lambda device: 0)
    fmoe, lru = candidate("fmoe"), candidate("lru")
    player.play(fmoe, workload.requests[1])
    learned = num_maps(player, fmoe)
    player.play(lru, workload.requests[1])
    assert list(player._models) == [lru], "one at a time"
    player.play(fmoe, workload.requests[1])
    assert list(player._models) == [fmoe] and num_maps(player, fmoe) > learned


def test_where_it_is_there_they_stay(player: EnginePlayer, workload: TunedWorkload) -> None:
    lru, lfu = candidate("lru"), candidate("lfu")
    for one in (lru, lfu, lru):
        player.play(one, workload.requests[0])
    assert list(player._models) == [lfu, lru]


# -- the machine as the simulator wants it, where all, hardly any or some experts stay -------------------------------


def measured(model: Path, memory: str, codec: str = "none", other: str = "50%") -> tuple[Hardware, str]:
    def load(memory: str):
        return expertly.load(str(model), memory=memory, codec=codec, device="cpu")[0]

    loaded = load(memory)
    store = api.handle(loaded).store
    try:
        return measure_hardware(loaded, lambda: load(other), {codec: store}, 0.1, lambda: Hardware.read("laptop-nvme"))
    finally:
        expertly.unload(loaded)


@pytest.mark.parametrize("memory", ["50%", "100%"])
def test_the_model_s_own_times_are_what_counts(model: Path, memory: str) -> None:
    hardware, about = measured(model, memory)
    assert hardware.compute is not None and hardware.compute.expert_ns[0] > 0
    assert 0 < hardware.link.nbytes_per_s < float("inf") and "measured here" in about


def test_a_compressed_store_has_the_rate_of_its_disk(model: Path) -> None:
    hardware, _ = measured(model, "50%", codec="planes")
    assert hardware.codec is not None and 0 < hardware.codec.ratio < 2
    assert 0 < hardware.link.nbytes_per_s < float("inf")


def test_where_they_cannot_be_measured_the_machine_is(model: Path) -> None:
    hardware, about = measured(model, "100%", other="100%")
    assert hardware.compute is None and "cannot be measured: memory=" in about
    assert hardware.link == Hardware.read("laptop-nvme").link
