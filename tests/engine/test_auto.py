"""System `auto`: the choice for the nearest memory runs, with all that it says, and where there is none the default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import expertly
from expertly.cli.main import main
from expertly.core.units import format_nbytes
from expertly.engine.choice import Gain, TunedChoice, choices_path, save_choice, this_machine
from expertly.model.packing import pack_cached
from expertly.policies.allocation.moepic import uniform_plan
from expertly.scheduler import presets as systems
from expertly.store.packed import PackedStore
from tests.families import make_checkpoint

HERE = this_machine(torch.device("cpu"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("models") / "tiny", seed=5, tokenizer=True)


@pytest.fixture
def store(model: Path) -> Iterator[PackedStore]:
    packed = pack_cached(str(model), codec="none")
    yield packed
    choices_path(packed).unlink(missing_ok=True)


def choice(store: PackedStore, system: str, share: float, **changes: Any) -> TunedChoice:
    nbytes = int(share * store.experts_nbytes)
    gains = (Gain("lru", 0.8, 0.7, 0.9, 0.8, 9),)
    made = TunedChoice(system, 1, nbytes, "none", HERE, gains=gains, about={"requests": 4})
    return replace(made, **changes)


def save(store: PackedStore, *choices: TunedChoice) -> None:
    for one in choices:
        save_choice(choices_path(store), store.manifest.identity, store.manifest.dtype, one)


def loaded(model: Path, memory: str = "25%", **others: Any) -> dict[str, Any]:
    """The statistics of the model as system `auto`, after a pass."""
    run, _ = expertly.load(str(model), memory=memory, system="auto", codec="none", learned=None, **others)
    try:
        with torch.no_grad():
            run(torch.tensor([[1, 2, 3]]))
        return expertly.stats(run).as_dict()
    finally:
        expertly.unload(run)


DEFAULT = "expertly"  # for tiny experts
ELSEWHERE = replace(HERE, kind="cuda", device="a card")
OTHER_CPU = replace(HERE, cpu="another one", num_cpus=64)
TWO = (("lfu", 0.25, {}), ("lcp", 0.75, {}))
ALL_AND_FEW = (("resident", 1.0, {}), ("lfu", 0.1, {}))

CASES: dict[str, tuple[Any, str, str, tuple[str, ...]]] = {
    "nothing was chosen": ((), "25%", DEFAULT, ("nothing has been tuned", "expertly tune")),
    "the memory": (TWO, "25%", "lfu", ("25.0% of the experts", "0.80x the time of lru")),
    "the nearest memory": (TWO, "30%", "lfu", ("25.0% of the experts", "the nearest to")),
    "the other is nearer": (TWO, "60%", "lcp", ("the nearest to",)),
    "too little for all": (ALL_AND_FEW, "90%", "lfu", ()),
    "enough for all": (ALL_AND_FEW, "100%", "resident", ()),
    "it cannot run": ((("promoe", 0.25, {}),), "25%", DEFAULT, ("cannot run",)),
    "another kind of device": ((("lfu", 0.25, {"machine": ELSEWHERE}),), "25%", DEFAULT, ("kind cpu",)),
    "another processor": ((("lfu", 0.25, {"machine": OTHER_CPU}),), "25%", "lfu", ("num_cpus 64 there",)),
}
"""Choices, the memory, and the system that runs with what is said of it."""


@pytest.mark.parametrize("case", CASES)
def test_the_choice_for_the_nearest_memory_runs_here(model: Path, store: PackedStore, case: str) -> None:
    choices, memory, system, said = CASES[case]
    save(store, *(choice(store, name, share, **changes) for name, share, changes in choices))
    stats = loaded(model, memory)
    assert stats["system"] == system
    assert all(one in stats["system_reason"] for one in said), stats["system_reason"]
    assert "the nearest" not in stats["system_reason"] or memory != "25%"


def test_unless_it_is_said_auto_is_asked_for(model: Path, store: PackedStore) -> None:
    save(store, choice(store, "lfu", 0.25))
    run, _ = expertly.load(str(model), memory="25%", codec="none", learned=None)
    try:
        assert expertly.stats(run).as_dict()["system"] == "lfu"
    finally:
        expertly.unload(run)


def test_without_a_choice_the_size_of_experts_decides(
    model: Path, store: PackedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = format_nbytes(store.experts_nbytes / sum(layer.num_experts for layer in store.manifest.layers))
    monkeypatch.setattr(systems, "LEAST_NBYTES", 1)
    large = loaded(model)
    assert large["system"] == "expertly-ahead" and f"the default for experts of {size}" in large["system_reason"]


def test_all_of_the_choice_is_used_but_what_is_given(model: Path, store: PackedStore) -> None:
    plan = uniform_plan(store.geometry(4), [32])
    save(store, choice(store, "moepic", 0.5, segments=4, plan=plan), choice(store, "lfu", 0.25, segments=2))
    stats = loaded(model, "50%")
    assert (stats["system"], stats["segments"]) == ("moepic", 4)
    assert [one["kept_experts"] for one in stats["allocation"]["split"]] and "plan" not in stats["system_reason"]
    assert (loaded(model)["segments"], loaded(model, segments=4)["segments"]) == (2, 4)


def test_a_plan_that_does_not_fit_is_left_out_and_named(model: Path, store: PackedStore) -> None:
    save(store, choice(store, "moepic", 1.0, segments=4, plan=uniform_plan(store.geometry(4), [96])))
    stats = loaded(model, "25%")
    assert stats["system"] == "moepic" and "plan does not fit" in stats["system_reason"]


@pytest.mark.parametrize("data", ["{", '{"format": "expertly-choices", "format_version": 0}', "[1]"])
def test_a_file_that_cannot_be_used_is_said_so(model: Path, store: PackedStore, data: str) -> None:
    choices_path(store).write_text(data)
    stats = loaded(model)
    assert stats["system"] == DEFAULT
    assert "cannot be used" in stats["system_reason"] and str(choices_path(store)) in stats["system_reason"]


def test_removing_the_store_removes_its_choices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = make_checkpoint("qwen3_moe", tmp_path / "other", seed=6, tokenizer=True)
    packed = pack_cached(str(other), codec="none")
    save(packed, choice(packed, "lfu", 0.25))
    assert main(["pack", "--remove", packed.folder.name]) == 0
    assert not choices_path(packed).exists()
