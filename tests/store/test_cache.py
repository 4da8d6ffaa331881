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
    folder = stores_folder(tmp_path) / "toy-3"
    with StoreWriter(folder, PLAN, DENSE, None), pytest.raises(StoreError, match="another process is packing it"):
        remove_entry("toy-3.partial", tmp_path)
    for entry in list_entries(tmp_path):
        remove_entry(entry.name, tmp_path)
    assert list_entries(tmp_path) == []


@pytest.mark.parametrize("name", ["toy-1111111111111111-float16", "toy-11", "/elsewhere"])
def test_removes_what_is_named(tmp_path: Path, name: str) -> None:
    first, second = fill_cache(tmp_path)
    for kind in LEARNED:
        learned_beside(stores_folder(tmp_path) / second, kind).write_text(f'{{"format":"expertly-{kind}"}}')
    assert remove_entry(name, tmp_path).name == second
    assert [path.name for path in stores_folder(tmp_path).iterdir()] == [first]


def test_removes_nothing_else(tmp_path: Path) -> None:
    names = fill_cache(tmp_path)
    for name in ("", "toy", "other", ".", "..", "../stores", "/", "toy-1111111111111111-float16/.."):
        with pytest.raises(ConfigError, match=rf"remove={name!r}: .*accepted: {names[0]}, {names[1]}"):
            remove_entry(name, tmp_path)
    assert [entry.name for entry in list_entries(tmp_path)] == names
