"""The file of choices: what is saved comes back, one a memory, and a file of anybody's is refused with a sentence."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expertly.core.errors import StoreError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.engine.choice import Gain, TunedChoice, TunedOn, read_choices, save_choice
from expertly.policies.allocation.moepic import uniform_plan

MACHINE = TunedOn("cpu", "a processor", "a processor", 2, 2)
PLAN = uniform_plan(Geometry((LayerGeometry(8, 2, 32, 16, 3, 4),) * 3, 4), [48])
CHOICE = TunedChoice(
    system="moepic:distance=2",
    segments=4,
    memory_nbytes=1000,
    codec="planes",
    machine=MACHINE,
    plan=PLAN,
    predictor="/weights",
    gains=(Gain("lru", 0.8, 0.7, 0.9, 0.85, 12),),
    about={"created": "2026-01-01T00:00:00+00:00", "requests": 8},
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.choices"


def save(path: Path, *choices: TunedChoice) -> list[TunedChoice]:
    for choice in choices:
        save_choice(path, "abc", "bfloat16", choice)
    return read_choices(path, "abc", "bfloat16")


def test_what_is_saved_comes_back(path: Path) -> None:
    assert save(path, CHOICE) == [CHOICE]
    auto = replace(CHOICE, memory_nbytes=2000, plan=None, predictor=None, gains=())
    assert save(path, auto) == [CHOICE, auto]
    assert [one.name for one in path.parent.iterdir()] == [path.name], "nothing is left of writing it"


@pytest.mark.parametrize("former", [{"compressed": None}, {"compressed": 0}, {"budget_nbytes": 750}])
def test_a_file_with_fields_of_an_earlier_version_is_read(path: Path, former: dict[str, float | None]) -> None:
    save(path, CHOICE)
    raw = json.loads(path.read_text())
    raw["choices"][0].update(former)
    path.write_text(json.dumps(raw))
    assert read_choices(path, "abc", "bfloat16") == [CHOICE]


def test_there_is_one_for_each_memory_and_kind_of_device(path: Path) -> None:
    newer = replace(CHOICE, system="lru", plan=None)
    elsewhere = replace(newer, machine=replace(MACHINE, kind="cuda"))
    assert save(path, CHOICE, newer, elsewhere) == [newer, elsewhere]


def test_the_oldest_goes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expertly.engine.choice.MAX_CHOICES", 3)
    every = [replace(CHOICE, memory_nbytes=1000 + number, plan=None) for number in range(5)]
    assert save(path, *every) == every[2:]


def test_no_file_is_no_choice(path: Path) -> None:
    assert read_choices(path, "abc", "bfloat16") == []


def refused(path: Path, change: Any) -> str:
    """The sentence with which a file is refused after `change` of what it says."""
    save(path, CHOICE)
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(StoreError) as caught:
        read_choices(path, "abc", "bfloat16")
    assert str(path) in str(caught.value)
    return str(caught.value)


def of_choice(**values: Any) -> Any:
    return lambda raw: raw["choices"][0].update(values)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: raw.update(format_version=2), "format_version=2: accepted: 1; run `expertly tune` again"),
        (lambda raw: raw.update(format_version=True), "format_version=True"),
        (lambda raw: raw.update(format="zip"), "format='zip'"),
        (lambda raw: raw.update(identity="other"), "identity='other': accepted: 'abc'"),
        (lambda raw: raw.update(dtype="float32"), "dtype='float32'"),
        (lambda raw: raw.update(choices={}), "choices={}: must be a list"),
        (lambda raw: raw.update(choices=[1]), "choices[0]=1: must be an object"),
        (lambda raw: raw["choices"][0].pop("system"), "must be an object of system"),
        (of_choice(system="nothing"), "system='nothing': unknown"),
        (of_choice(system="belady"), "needs the demands to come"),
        (of_choice(system="lru:segments=0"), "segments"),
        (of_choice(system=7), "system=7: must be a string"),
        (of_choice(system="l" * 5000), "must be a string of at most 4096"),
        (of_choice(segments=1.5), "segments=1.5: must be a whole number"),
        (of_choice(memory_nbytes=-1), "memory_nbytes=-1: must be a whole number from 1"),
        (of_choice(compressed=0.3), "compressed=0.3: experts do not stay compressed in memory any more"),
        (of_choice(compressed="much"), "compressed='much'"),
        (of_choice(codec="lzma"), "codec='lzma': accepted: none, planes"),
        (of_choice(plan={"format": "other"}), "plan"),
        (of_choice(machine={"kind": "tpu"}), "machine"),
        (lambda raw: raw["choices"][0]["machine"].update(kind="tpu"), "kind='tpu': accepted: cpu, cuda"),
        (lambda raw: raw["choices"][0]["gains"][0].update(ratio="fast"), "ratio='fast': must be a number"),
        (of_choice(about={"x": [1]}), "about.x=[1]: must be a string"),
        (of_choice(gains=[{}] * 17), "gains"),
    ],
)
def test_hostile_files_are_refused(path: Path, change: Any, said: str) -> None:
    assert said in refused(path, change)


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"[" * 100_000, b'{"format": '])
def test_what_is_no_json_object_is_refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"model\.choices"):
        read_choices(path, "abc", "bfloat16")


def test_a_file_that_is_too_large_is_not_read(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(17 << 20)
    with pytest.raises(StoreError, match="accepted: "):
        read_choices(path, "abc", "bfloat16")


def test_nothing_that_it_names_is_imported(path: Path) -> None:
    said = refused(path, of_choice(system="lru:eviction=antigravity.LRU"))
    assert "names code by its path" in said and "antigravity" not in sys.modules


def test_a_damaged_file_is_replaced_and_none_of_another_kind(path: Path) -> None:
    save(path, CHOICE)
    path.write_text(path.read_text()[:-20])
    assert save(path, CHOICE) == [CHOICE]
    path.write_text("mine")
    with pytest.raises(StoreError, match="not expertly's: it stays"):
        save(path, CHOICE)
    assert path.read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="saving the choice"):
        save_choice(tmp_path / "file" / "model.choices", "abc", "bfloat16", CHOICE)
