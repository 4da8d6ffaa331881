"""The cache folder: where it is, what is in it, and taking things out of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from expertly.core.errors import ConfigError, StoreError
from expertly.store.cache import LEARNED, entry_folder, learned_beside, list_entries, remove_entry, stores_folder
from expertly.store.writer import StoreWriter
from tests.store.builders import DENSE, PLAN, write_store

OTHER = replace(PLAN, identity="1" * 64, source="/elsewhere", dtype="float16")


def fill_cache(folder: Path) -> list[str]:
    names = []
    for plan in (PLAN, OTHER):
        target = entry_folder(plan.model_type, plan.identity, plan.dtype, folder)
        write_store(target, plan)
        names.append(target.name)
    return names


def test_what_was_learned_goes_with_its_store(tmp_path: Path) -> None:
    folder = write_store(entry_folder(PLAN.model_type, PLAN.identity, PLAN.dtype, tmp_path)).folder
    for kind in LEARNED:
        learned_beside(folder, kind).write_text(f'{{"format":"expertly-{kind}"}}')
    remove_entry(folder.name, tmp_path)
    assert list(stores_folder(tmp_path).iterdir()) == []


def test_lists_what_is_there(tmp_path: Path) -> None:
    assert list_entries(tmp_path) == []
    names = fill_cache(tmp_path)
    assert names == ["toy-0000000000000000-bfloat16", "toy-1111111111111111-float16"]
    entries = list_entries(tmp_path)
    assert [(e.name, e.dtype, e.source, e.problem) for e in entries] == [
        (names[0], "bfloat16", "/somewhere", None),
        (names[1], "float16", "/elsewhere", None),
    ]
    assert entries[0].nbytes == sum(path.stat().st_size for path in entries[0].folder.iterdir())


def test_lists_what_is_damaged_or_unfinished_as_such(tmp_path: Path) -> None:
    names = fill_cache(tmp_path)
    (stores_folder(tmp_path) / names[0] / "manifest.json").write_text("{")
    StoreWriter(stores_folder(tmp_path) / "toy-2-bfloat16", PLAN, DENSE, None).close()
    problems = {entry.name: entry.problem for entry in list_entries(tmp_path)}
    assert "not JSON" in (problems[names[0]] or "")
    assert problems["toy-2-bfloat16.partial"] == "unfinished: packing the model again starts over"
    for name in list(problems):
        remove_entry(name, tmp_path)
    assert list_entries(tmp_path) == []


@pytest.mark.parametrize("name", ["toy-1111111111111111-float16", "toy-11", "/elsewhere"])
def test_removes_what_is_named(tmp_path: Path, name: str) -> None:
    first, second = fill_cache(tmp_path)
    assert remove_entry(name, tmp_path).name == second
    assert [path.name for path in stores_folder(tmp_path).iterdir()] == [first]


@pytest.mark.parametrize("name", ["", "toy", "other", ".", "..", "../stores", "/", "toy-1111111111111111-float16/.."])
def test_removes_nothing_else(tmp_path: Path, name: str) -> None:
    names = fill_cache(tmp_path)
    with pytest.raises(ConfigError, match=rf"remove={name!r}: .*accepted: {names[0]}, {names[1]}"):
        remove_entry(name, tmp_path)
    assert [entry.name for entry in list_entries(tmp_path)] == names


def test_a_store_being_packed_is_not_removed(tmp_path: Path) -> None:
    folder = entry_folder("toy", PLAN.identity, "bfloat16", tmp_path)
    with StoreWriter(folder, PLAN, DENSE, None), pytest.raises(StoreError, match="another process is packing it"):
        remove_entry(f"{folder.name}.partial", tmp_path)
    remove_entry(f"{folder.name}.partial", tmp_path)
