"""System `auto`: what was remembered for this machine and memory runs, and says so; else the default."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import expertly
from expertly.core.errors import StoreError
from expertly.engine.remembered import FastestSystem, read_remembered, remember, remembered_path, this_machine
from expertly.model.packing import pack_cached
from expertly.store.packed import PackedStore
from tests.families import make_checkpoint

HERE = this_machine(torch.device("cpu"))
DEFAULT = "expertly"  # for tiny experts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("models") / "tiny", seed=5, tokenizer=True)


@pytest.fixture
def store(model: Path) -> Iterator[PackedStore]:
    packed = pack_cached(str(model))
    yield packed
    remembered_path(packed).unlink(missing_ok=True)


def note(store: PackedStore, system: str, share: float, machine: str = HERE) -> None:
    remember(store, FastestSystem(system, int(share * store.experts_nbytes), machine))


def auto(model: Path, memory: str) -> tuple[str, str]:
    """The system that `auto` is, and why."""
    run, _ = expertly.load(str(model), memory=memory)
    try:
        stats = expertly.stats(run).as_dict()
    finally:
        expertly.unload(run)
    return stats["system"], stats["system_reason"]


LFU, LCP = ("lfu", 0.25), ("lcp", 0.75)
WHOLE = (("resident", 1.0), ("lfu", 0.85))

CASES: dict[str, tuple[tuple[Any, ...], str, str, str]] = {
    "nothing is remembered": ((), "25%", DEFAULT, "`expertly bench --save` finds the fastest"),
    "the memory": ((LFU, LCP), "25%", "lfu", "the fastest here in"),
    "nearly the memory": ((LFU, LCP), "30%", "lfu", "the fastest here in"),
    "the other is nearer": ((LFU, LCP), "80%", "lcp", "the fastest here in"),
    "none is near": ((LFU, LCP), "45%", DEFAULT, "not measured in"),
    "the newer of two": ((LFU, ("lcp", 0.25)), "25%", "lcp", "the fastest here in"),
    "too little for all": (WHOLE, "90%", "lfu", "the fastest here in"),
    "enough for all": (WHOLE, "100%", "resident", "the fastest here in"),
    "its weights are gone": ((("promoe", 0.25),), "25%", DEFAULT, "not measured in"),
    "another machine": ((("lfu", 0.25, "another one"),), "25%", DEFAULT, "finds the fastest"),
}
"""What is remembered, the memory, and the system that runs with what is said of it."""


@pytest.mark.parametrize("case", CASES)
def test_what_is_remembered_for_this_machine_and_memory_runs(model: Path, store: PackedStore, case: str) -> None:
    entries, memory, system, words = CASES[case]
    for entry in entries:
        note(store, *entry)
    name, reason = auto(model, memory)
    assert name == system and words in reason


def changed(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda entry: entry.update(changes)


DAMAGED = {
    "code": (changed(system="lru:eviction=os.system"), "system='lru:eviction=os.system'"),
    "too much memory": (changed(memory_nbytes=1 << 61), "memory_nbytes"),
    "a field too many": (changed(more=1), "more"),
}
"""What is done to an entry of the file, and what the error names."""


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_by_field_and_the_default_runs(model: Path, store: PackedStore, case: str) -> None:
    damage, words = DAMAGED[case]
    note(store, *LFU)
    path = remembered_path(store)
    raw = json.loads(path.read_bytes())
    damage(raw["entries"][0])
    path.write_text(json.dumps(raw))
    with pytest.raises(StoreError) as refused:
        read_remembered(store)
    assert str(path) in str(refused.value) and words in str(refused.value)
    name, reason = auto(model, "25%")
    assert name == DEFAULT and "cannot be used" in reason and words in reason
    note(store, *LFU)
    assert [entry.system for entry in read_remembered(store)] == ["lfu"], "what is damaged is replaced"
