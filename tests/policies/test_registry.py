"""Parts by name: what ships, what is installed, what can be imported."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from expertly.core.errors import ConfigError
from expertly.policies import registry
from expertly.policies.registry import EVICTIONS, OrNone, Registry
from expertly.scheduler.systems import get_system


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that can be imported in this test alone."""
    name = f"outside_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "from expertly.scheduler.systems import System\n"
        "from expertly.policies.registry import EVICTIONS\n"
        "NUMBER = 7\nTEXT = 'seven'\n"
        "from expertly.policies.allocation import Uniform\n"
        "class Fair(Uniform):\n    pass\n"
        "SYSTEM = System('as-it-likes', 'summary', eviction='lru', scope='layer')\n"
        "class Counted(EVICTIONS['lfu']):\n    pass\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    return name


def numbers(**built_in: int) -> Registry[int]:
    return Registry("number", "expertly.test.numbers", built_in, lambda value: isinstance(value, int), "a number")


def give(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> list[str]:
    """Install these entry points of no distribution; how often they were read."""
    reads: list[str] = []

    def read(group: str) -> list[EntryPoint]:
        reads.append(group)
        return [EntryPoint(name, value, group) for name, value in entries]

    monkeypatch.setattr(registry, "entry_points", read)
    return reads


def test_names_that_ship_need_no_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = give(monkeypatch)
    result = numbers(one=1, two=2)
    assert result["one"] == 1 and "two" in result and result.get("one") == 1
    assert reads == []
    assert list(result) == ["one", "two"] and len(result) == 2 and "three" not in result
    assert reads == ["expertly.test.numbers"], "read once"
    with pytest.raises(KeyError):
        result["three"]


def test_entry_points_come_behind_what_ships(monkeypatch: pytest.MonkeyPatch, outside: str) -> None:
    give(monkeypatch, ("seven", f"{outside}:NUMBER"), ("one", f"{outside}:NUMBER"), ("a=b", f"{outside}:NUMBER"))
    result = numbers(one=1)
    assert dict(result) == {"one": 1, "seven": 7}
    assert len(result.problems()) == 2
    assert "number='a=b'" in result.problems()[0] and "cannot hold blanks" in result.problems()[0]
    assert "number='one'" in result.problems()[1] and "which is used" in result.problems()[1]


def test_an_entry_point_that_fails_is_an_error_for_who_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, outside: str
) -> None:
    give(monkeypatch, ("lost", "nowhere.to_be:FOUND"), ("text", f"{outside}:TEXT"), ("seven", f"{outside}:NUMBER"))
    result = numbers(one=1)
    assert list(result) == ["one", "seven"]
    with pytest.raises(ConfigError, match=r"number='lost' \(nowhere.to_be:FOUND of .*cannot be loaded \(ModuleNot"):
        result["lost"]
    with pytest.raises(ConfigError, match=r"number='text' .*: is of type str; accepted: a number"):
        "text" in result  # noqa: B015 - asking is enough
    assert result["seven"] == 7


def test_metadata_that_cannot_be_read_hides_nothing_that_ships(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(group: str) -> list[EntryPoint]:
        raise ValueError("garbage")

    monkeypatch.setattr(registry, "entry_points", read)
    result = numbers(one=1)
    assert list(result) == ["one"] and "two" not in result
    assert result.problems() == ["entry points 'expertly.test.numbers': cannot be read (ValueError: garbage)"]


def test_a_dotted_path_is_imported(outside: str) -> None:
    assert numbers()[f"{outside}.NUMBER"] == 7
    assert list(numbers()) == [], "it is not listed"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{}.TEXT", "is of type str; accepted: a number"),
        ("{}.System", "is the class System; accepted: a number"),
        ("{}.OTHER", r"has no 'OTHER'; it has NUMBER"),
        ("{}.deeper.NUMBER", r"cannot be imported \(ModuleNotFoundError"),
        (
            "nowhere.to.be.FOUND",
            r"'nowhere.to.be' cannot be imported \(ModuleNotFoundError: No module named 'nowhere'\)",
        ),
    ],
)
def test_a_dotted_path_that_leads_nowhere_says_why(outside: str, path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        numbers()[path.format(outside)]
    assert str(caught.value).startswith(f"number='{path.format(outside)}': ")


def test_a_name_that_is_no_path_is_unknown() -> None:
    for name in ("", ".", "a.", ".b", "a..b", "1.5", "a b.c", "../a.b", "a-b.c", "x" * 10**5):
        assert name not in numbers(), name


@pytest.mark.parametrize("raises", ["raise ValueError('broken')", "import sys; sys.exit(1)", "def:", "1 / 0"])
def test_a_module_that_fails_is_an_error_of_the_name(tmp_path: Path, monkeypatch, raises: str) -> None:
    (tmp_path / "failing_outside.py").write_text(raises, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"eviction='failing_outside.X': 'failing_outside' cannot be imported \("):
        get_system("lru:eviction=failing_outside.X")


def test_none_stands_before_the_names_of_a_registry() -> None:
    names = OrNone(numbers(one=1))
    assert list(names) == ["none", "one"] and len(names) == 2 and "none" in names and "two" not in names


@pytest.mark.parametrize(
    ("options", "spec", "message"),
    [
        ("int", "", "is the class Mine; accepted: a class that extends Predictor, whose options are a dataclass"),
        ("Colours", ":names=red", r"names='red': an option of type .*list.*; accepted: bool, int, float"),
        ("Colours", ":scope=layer", "its option 'scope' is called as a part is"),
    ],
)
def test_options_that_could_not_be_written_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, spec: str, message: str
) -> None:
    name = f"options_{abs(hash((options, spec)))}"
    field = "scope: int = 1" if "scope" in spec else "names: list[str] = field(default_factory=list)"
    (tmp_path / f"{name}.py").write_text(
        "from dataclasses import dataclass, field\n"
        "from expertly.policies.prediction import Predictor\n"
        f"@dataclass(frozen=True)\nclass Colours:\n    {field}\n"
        f"class Mine(Predictor):\n    options = {options}\n    def router_ran(self, routed):\n        return ()\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=message):
        get_system(f"lru:prediction={name}.Mine{spec}")


def test_parts_from_outside_make_a_system(outside: str) -> None:
    spec = f"fmoe:eviction={outside}.Counted:allocation={outside}.Fair:admission=best"
    system = get_system(spec)
    assert system.name == spec and get_system(system.name) == system
    assert EVICTIONS[system.eviction].name == "lfu"
    with pytest.raises(ConfigError, match=r"allocation=.*NUMBER': is of type int; accepted: .*Allocation"):
        get_system(f"fmoe:allocation={outside}.NUMBER")
