"""Maps outlive the model that learned them: read when it is loaded, written while it runs and when it goes."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expertly
from expertly.api import handle
from expertly.core.errors import ConfigError, StoreError
from expertly.engine import prediction as prediction_module
from expertly.policies.learned import ModelShape, read_learned, save_learned
from expertly.policies.predictor.fmoe.store import MapStore
from expertly.store.cache import list_entries, remove_entry
from tests.engine.conftest import Case, Cases
from tests.engine.observe import loaded, prediction, reader_threads, run_python
from tests.families import generate
from tests.policies.learned_builders import load_maps
from tests.store.mounts import tiny_disk

pytestmark = pytest.mark.timeout(120)


def learn(store: Path, case: Case, **kwargs: Any) -> int:
    """Load, generate, unload; the maps that were read at the start."""
    with loaded(store, **({"system": "fmoe", "maps": "auto"} | kwargs)) as model:
        assert generate(model, case.prompts) == case.tokens
        return int(prediction(model)["maps_read"])


def test_auto_is_beside_the_store_and_is_found_again(own: tuple[Case, Path]) -> None:
    case, store = own
    path = store.with_name("store.maps")
    assert learn(store, case) == 0
    assert path.is_file()
    with loaded(store, system="fmoe", maps="auto") as model:
        stats = prediction(model)
        rows = 2 * 11 + sum(map(len, case.prompts))
        assert (stats["maps_read"], stats["history"], stats["maps_file"]) == (rows, "warm", str(path))
        assert stats["predictor"]["maps"] == stats["maps_read"]
        geometry = handle(model).engine.scheduler.geometry
        identity = handle(model).store.manifest.identity
    assert load_maps(path, identity, ModelShape.of(geometry)).num_maps == rows
    generation = path.stat().st_mtime_ns
    with loaded(store, system="fmoe", maps="auto"):
        pass
    assert path.stat().st_mtime_ns == generation, "nothing was learned: nothing is written"


def test_what_was_learned_before_is_known_at_the_first_token(own: tuple[Case, Path]) -> None:
    case, store = own
    searches = []
    for _ in range(2):
        with loaded(store, system="fmoe", maps="auto", matcher="inline") as model:
            generate(model, case.prompts, 1)
            searches.append(prediction(model)["predictor"]["trajectory_searches"])
    assert searches[0] == 0 < searches[1]


@pytest.mark.parametrize("maps", [None, "off"])
def test_off_writes_nothing(maps: str | None, own: tuple[Case, Path]) -> None:
    case, store = own
    assert learn(store, case, maps=maps) == 0
    assert os.listdir(store.parent) == ["store"]


def test_a_file_that_is_named(own: tuple[Case, Path], tmp_path: Path) -> None:
    case, store = own
    path = tmp_path / "my.maps"
    assert learn(store, case, maps=path) == 0
    assert learn(store, case, maps=str(path)) > 0
    assert not store.with_name("store.maps").exists()


def test_a_smaller_capacity_than_the_files(own: tuple[Case, Path]) -> None:
    case, store = own
    """It is read as far as it fits, and not replaced by less."""
    learn(store, case)
    path = store.with_name("store.maps")
    before = path.read_bytes()
    with (
        pytest.warns(UserWarning, match=r"store\.maps has \d+ maps, capacity=7: what is learned is not saved"),
        loaded(store, system="fmoe:capacity=7", maps="auto") as model,
    ):
        stats = prediction(model)["predictor"]
        assert 0 < stats["maps"] <= stats["capacity"] == 7
        assert generate(model, case.prompts) == case.tokens
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", ["truncated", "altered", "another model's", "no maps at all"])
def test_a_damaged_file(damage: str, own: tuple[Case, Path], cases: Cases) -> None:
    """Named, it is an error; else the model starts cold, says so, and replaces the file."""
    case, store = own
    path = store.with_name("store.maps")
    if damage == "another model's":
        with loaded(cases["gpt_oss"].store, system="fmoe", maps=path) as other:
            generate(other, cases["gpt_oss"].prompts)
    else:
        learn(store, case)
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes({"truncated": raw[:-5], "altered": raw, "no maps at all": b"hello"}[damage])
    with pytest.raises(StoreError, match=r"store\.maps"):
        learn(store, case, maps=path)
    assert not reader_threads()
    with (
        pytest.warns(UserWarning, match=r"starting without maps.*store\.maps"),
        loaded(store, system="fmoe", maps="auto") as model,
    ):
        stats = prediction(model)
        assert stats["history"] == "cold" and "store.maps" in stats["maps_problem"]
        assert generate(model, case.prompts) == case.tokens
    assert learn(store, case) > 0, "it was replaced"


def test_a_file_of_embeddings_of_another_width(own: tuple[Case, Path]) -> None:
    """As of a trace that made them up: they cannot be compared to what this model feeds."""
    case, store = own
    path = store.with_name("store.maps")
    learn(store, case)
    found = read_learned(path, MapStore)
    state = found.learned.state()
    hidden_size = state["embeddings"].shape[1]
    state["embeddings"] = np.pad(state["embeddings"], ((0, 0), (0, 3)))
    save_learned(path, MapStore.from_state(found.learned.shape, state), found.header.identity)
    message = rf"store\.maps: tensor 'embeddings': {hidden_size + 3} numbers each.*{hidden_size}"
    with pytest.raises(StoreError, match=message):
        learn(store, case, maps=path)
    assert not reader_threads()
    with pytest.warns(UserWarning, match=message):
        assert learn(store, case) == 0
    assert learn(store, case) > 0, "it was replaced"


def test_a_file_for_a_system_without_maps(own: tuple[Case, Path], tmp_path: Path) -> None:
    case, store = own
    with pytest.raises(ConfigError, match=r"my\.maps.*system 'lru' has no maps; accepted: auto, off"):
        expertly.load(str(store), system="lru", maps=tmp_path / "my.maps", device="cpu")
    for maps in ("auto", "off", None):
        with loaded(store, system="lru", maps=maps) as model:
            assert generate(model, case.prompts) == case.tokens
    assert os.listdir(store.parent) == ["store"]


def test_a_file_where_there_is_no_folder(own: tuple[Case, Path], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    bad: list[Any] = [
        tmp_path / "nowhere" / "my.maps",
        tmp_path,
        tmp_path / "pipe",
        "",
        "a\0b",
        tmp_path / ("x" * 300),
        "~nobody-here/a.maps",
        5,
    ]
    for path in bad:
        with pytest.raises(ConfigError, match="must be a file, in a folder that exists"):
            expertly.load(str(own[1]), system="fmoe", maps=path, device="cpu")


def test_a_file_in_a_folder_that_is_not_writable(own: tuple[Case, Path], tmp_path: Path) -> None:
    """Named: an error before anything runs."""
    with (
        tiny_disk(tmp_path, read_only=True) as disk,
        pytest.raises(ConfigError, match=r"my\.maps.*its folder is not writable"),
    ):
        expertly.load(str(own[1]), system="fmoe", maps=disk / "my.maps", device="cpu")


def test_maps_that_cannot_be_written(own: tuple[Case, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asked for them: a warning. Asked for by name: an error, when all else is done."""
    case, store = own

    def fail(*args: Any) -> None:
        raise StoreError("disk full")

    monkeypatch.setattr("expertly.engine.learned.save_learned", fail)
    with pytest.warns(UserWarning, match="not saved: disk full"):
        learn(store, case)
    model, _ = expertly.load(str(store), system="fmoe", maps=store.with_name("my.maps"), memory="50%", device="cpu")
    generate(model, case.prompts)
    with pytest.warns(UserWarning, match="not saved"), pytest.raises(StoreError, match=r"my\.maps.*disk full"):
        expertly.unload(model)
    assert not reader_threads(), "the rest was closed"
    stats = prediction(model)
    assert stats["maps_failed_writes"] == 1 and stats["maps_problem"] == "disk full"


def test_they_are_written_while_the_model_runs(own: tuple[Case, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    case, store = own
    monkeypatch.setattr(prediction_module, "SAVE_EVERY_S", 0.05)
    path = store.with_name("store.maps")
    with loaded(store, system="fmoe", maps="auto") as model:
        generate(model, case.prompts)
        end = time.monotonic() + 20
        while not path.exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        assert load_maps(path).num_maps > 0
        assert generate(model, case.prompts) == case.tokens


def test_they_are_written_when_the_process_ends(own: tuple[Case, Path]) -> None:
    store = own[1]
    code = """
import sys, expertly, torch
model, _ = expertly.load(sys.argv[1], system="fmoe", memory="50%", device="cpu")
model.generate(torch.tensor([[5, 6, 7, 8]]), do_sample=False, max_new_tokens=4)
"""
    done = run_python(code, str(store))
    assert done.returncode == 0, done.stderr
    assert load_maps(store.with_name("store.maps")).num_maps == 4 + 3


def test_a_cached_store_and_its_maps(cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The maps lie among the cached stores, and are none."""
    case = cases["qwen3_moe"]
    monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learn(case.folder, case)
        assert learn(case.folder, case) > 0
    names = sorted(os.listdir(tmp_path / "stores"))
    (entry,) = list_entries()
    assert names == [entry.name, f"{entry.name}.maps"]
    remove_entry(entry.name)
    assert not os.listdir(tmp_path / "stores"), "they go with it"
