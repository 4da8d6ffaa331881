"""System `auto`: what was remembered for this machine and memory runs, and says so; where there is none the default."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import expertly
from expertly.cli.main import main
from expertly.core.errors import StoreError
from expertly.core.units import format_nbytes
from expertly.engine.remembered import (
    FastestSystem,
    read_remembered,
    remember,
    remembered_path,
    this_machine,
)
from expertly.model.packing import pack_cached
from expertly.scheduler import systems
from expertly.store.packed import PackedStore
from tests.families import make_checkpoint

FORMAT = "expertly-fastest"
HERE = this_machine(torch.device("cpu"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("models") / "tiny", seed=5, tokenizer=True)


@pytest.fixture
def store(model: Path) -> Iterator[PackedStore]:
    packed = pack_cached(str(model))
    yield packed
    remembered_path(packed).unlink(missing_ok=True)


def entry(store: PackedStore, system: str, share: float, **changes: Any) -> FastestSystem:
    return FastestSystem(system, int(share * store.experts_nbytes), 0.8, replace(HERE, **changes))


def loaded(model: Path, memory: str = "25%", **others: Any) -> dict[str, Any]:
    """The statistics of the model as system `auto`, the default, after a pass."""
    run, _ = expertly.load(str(model), memory=memory, learned=None, **others)
    try:
        with torch.no_grad():
            run(torch.tensor([[1, 2, 3]]))
        return expertly.stats(run).as_dict()
    finally:
        expertly.unload(run)


DEFAULT = "expertly"  # for tiny experts
FOUND_ELSEWHERE = ("the fastest was found on another machine",)
LFU = ("lfu", 0.25, {})
LCP = ("lcp", 0.75, {})

CASES: dict[str, tuple[Any, str, str, tuple[str, ...]]] = {
    "nothing is remembered": ((), "25%", DEFAULT, ("the default", "`expertly bench --save` finds the fastest")),
    "the memory": ((LFU, LCP), "25%", "lfu", ("the fastest here in", "0.80x the time of lru")),
    "nearly the memory": ((LFU, LCP), "30%", "lfu", ("the fastest here in",)),
    "the other is nearer": ((LFU, LCP), "80%", "lcp", ("the fastest here in",)),
    "none is near": ((LFU, LCP), "45%", DEFAULT, ("not measured in",)),
    "too little for all": ((("resident", 1.0, {}), ("lfu", 0.85, {})), "90%", "lfu", ()),
    "enough for all": ((("resident", 1.0, {}), ("lfu", 0.85, {})), "100%", "resident", ()),
    "its weights are gone": ((("promoe", 0.25, {}),), "25%", DEFAULT, ("not measured in",)),
    "another device": ((("lfu", 0.25, {"device": "a card"}),), "25%", DEFAULT, FOUND_ELSEWHERE),
    "another processor": ((("lfu", 0.25, {"cpu": "another one"}),), "25%", DEFAULT, FOUND_ELSEWHERE),
}
"""What is remembered, the memory, and the system that runs with what is said of it."""


@pytest.mark.parametrize("case", CASES)
def test_what_is_remembered_for_this_machine_and_memory_runs(model: Path, store: PackedStore, case: str) -> None:
    entries, memory, system, said = CASES[case]
    for name, share, changes in entries:
        remember(store, entry(store, name, share, **changes))
    stats = loaded(model, memory)
    assert stats["system"] == system
    assert all(words in stats["system_reason"] for words in said), stats["system_reason"]


def test_the_size_of_experts_decides_where_nothing_is_remembered(
    model: Path, store: PackedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = format_nbytes(store.experts_nbytes / sum(layer.num_experts for layer in store.manifest.layers))
    monkeypatch.setattr(systems, "LEAST_NBYTES", 1)
    large = loaded(model)
    assert large["system"] == "expertly-ahead" and f"the default for experts of {size}" in large["system_reason"]


def test_a_new_measurement_replaces_one_of_about_the_same_memory_and_machine(store: PackedStore) -> None:
    elsewhere, other, old, new = (
        entry(store, "lfu", 0.25, cpu="another one"),
        entry(store, "lcp", 0.30),
        entry(store, "lru", 0.25),
        entry(store, "expertly", 0.251),
    )
    for one in (elsewhere, other, old, new):
        remember(store, one)
    assert read_remembered(store) == [elsewhere, other, new]


def test_only_the_newest_are_kept(store: PackedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expertly.engine.remembered.MAX_ENTRIES", 2)
    for share in (0.2, 0.4, 0.6):
        remember(store, entry(store, "lru", share))
    assert read_remembered(store) == [entry(store, "lru", 0.4), entry(store, "lru", 0.6)]


# -- a file that somebody else wrote -----------------------------------------------------------------------------------


Spoil = Callable[[dict[str, Any]], object]

HOSTILE: dict[str, tuple[Spoil | str, str]] = {
    "no JSON": ("{", "not JSON"),
    "too long": (" " * (1 << 19), "bytes; accepted"),
    "another format": (lambda raw: raw.update(format="x"), "format='x': must be 'expertly-fastest'"),
    "another model": (lambda raw: raw.update(identity="0" * 64), "identity='0000"),
    "no entries": (lambda raw: raw.pop("entries"), "entries: Field required"),
    "a field too few": (lambda raw: raw["entries"][0].pop("machine"), "entries[0].machine: Field required"),
    "no bytes": (lambda raw: raw["entries"][0].update(memory_nbytes=0), "entries[0].memory_nbytes=0"),
    "infinite": (lambda raw: raw["entries"][0].update(ratio=float("inf")), "entries[0].ratio=inf"),
    "no system": (lambda raw: raw["entries"][0].update(system="best"), "entries[0].system='best': unknown"),
    "of simulations": (lambda raw: raw["entries"][0].update(system="lru:loop=by-id"), "loop=by-id is for simulation"),
    "code": (lambda raw: raw["entries"][0].update(system="lru:eviction=hostile_code.X"), "names code"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_named_and_the_default_runs(
    model: Path, store: PackedStore, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile_code.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    spoil, said = HOSTILE[case]
    path = remember(store, entry(store, "lfu", 0.25))
    if isinstance(spoil, str):
        path.write_text(spoil)
    else:
        raw = json.loads(path.read_text())
        spoil(raw)
        path.write_text(json.dumps(raw))
    stats = loaded(model)
    assert stats["system"] == DEFAULT and "hostile_code" not in sys.modules
    reason = stats["system_reason"]
    assert f"what was remembered cannot be used: {path}: " in reason and said in reason and reason.count("\n") == 0
    if "expertly-fastest" not in path.read_text():
        with pytest.raises(StoreError, match="not expertly's: it stays"):
            remember(store, entry(store, "lcp", 0.25))
    else:
        remember(store, entry(store, "lcp", 0.25))
        assert loaded(model)["system"] == "lcp", "a new measurement replaces it"


def test_a_pipe_in_its_place_is_not_waited_for(model: Path, store: PackedStore) -> None:
    os.mkfifo(remembered_path(store))
    stats = loaded(model)
    assert stats["system"] == DEFAULT and "a pipe; must be a file" in stats["system_reason"]


def test_a_file_of_many_entries_is_read(model: Path, store: PackedStore) -> None:
    path = remember(store, entry(store, "lfu", 0.25))
    raw = json.loads(path.read_text())
    raw["entries"] = [asdict(entry(store, "lcp", 0.5))] * 500 + raw["entries"]
    path.write_text(json.dumps(raw))
    assert loaded(model)["system"] == "lfu"


def test_removing_the_store_removes_what_is_remembered(tmp_path: Path) -> None:
    other = make_checkpoint("qwen3_moe", tmp_path / "other", seed=6, tokenizer=True)
    packed = pack_cached(str(other))
    path = remember(packed, entry(packed, "lfu", 0.25))
    assert main(["pack", "--remove", packed.folder.name]) == 0
    assert not path.exists()
