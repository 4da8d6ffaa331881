"""Options as a user writes them; which prediction is loaded first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from expertly.core.errors import ConfigError
from expertly.policies.base import PolicyOptions, option, option_names, option_text, parse_options
from expertly.policies.prefetch import PREFETCHES, ByProximity
from expertly.testing import check_prefetch


@dataclass(frozen=True, slots=True)
class Some:
    is_on: bool = False
    count: int = 3
    share: float = 0.5
    kind: Literal["delta", "top-k"] = "delta"
    width: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ConfigError(f"share={self.share}: must be from 0 to 1")


@dataclass(frozen=True)
class Bounded(PolicyOptions):
    share: float = option(0.5, "of all", least=0, most=1)
    quota: float = option(0.5, "of that", above=0, most=1)
    count: int | None = option(None, "how many", least=1)
    text: str = option("a", "any text")
    file: Path | None = option(None, "where it is")


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("share", "1.5", "share=1.5: must be from 0 to 1"),
        ("share", "nan", "share=nan: must be from 0 to 1"),
        ("quota", "0", "quota=0.0: must be above 0, up to 1"),
        ("count", "0", "count=0: must be at least 1"),
    ],
)
def test_bounds_hold_however_options_are_made(key: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"part 'p': {message}"):
        parse_options(Bounded, {key: text}, "part 'p'")
    with pytest.raises(ConfigError, match=message):
        Bounded(**{key: int(text) if key == "count" else float(text)})


def test_texts_and_paths() -> None:
    found = parse_options(Bounded, {"text": "b c", "file": "~/x.bin"}, "x")
    assert (found.text, found.file) == ("b c", Path("~/x.bin")) and option_text(found.file) == "~/x.bin"
    assert found.count is None, "None is a default that has no bounds"


def test_options_that_are_not_given_have_their_defaults() -> None:
    assert parse_options(Some, {}, "x") == Some()
    assert parse_options(Some, {"count": "-7"}, "x") == Some(count=-7)


def test_every_kind_of_field() -> None:
    given = {"is_on": "yes", "count": "12", "share": "1e-1", "kind": "top-k", "width": "4"}
    assert parse_options(Some, given, "x") == Some(True, 12, 0.1, "top-k", 4)


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("is_on", "1", r"part 'p': is_on='1': accepted: yes, true, on, no, false, off"),
        ("count", "1.5", r"part 'p': count='1.5': must be a whole number"),
        ("count", "", r"count='': must be a whole number"),
        ("count", "٣", r"must be a whole number"),
        ("count", "9" * 30, r"must be a whole number"),
        ("width", "none", r"width='none': must be a whole number"),
        ("share", "half", r"share='half': must be a number"),
        ("share", "7", r"part 'p': share=7.0: must be from 0 to 1"),
        ("share", "nan", r"share=nan: must be from 0 to 1"),
        ("kind", "other", r"kind='other': unknown; accepted: delta, top-k"),
        ("colour", "red", r"part 'p': option 'colour': unknown; accepted: is_on, count, share, kind, width"),
    ],
)
def test_an_error_names_the_problem_and_what_is_accepted(key: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_options(Some, {key: text}, "part 'p'")


def test_a_kind_without_options_says_so() -> None:
    @dataclass(frozen=True)
    class Nothing:
        pass

    assert option_names(Nothing) == []
    with pytest.raises(ConfigError, match="option 'a': unknown; there are none"):
        parse_options(Nothing, {"a": "1"}, "x")


@pytest.mark.parametrize("name", PREFETCHES)
def test_conformance(name: str) -> None:
    """A new priority inherits this by being in PREFETCHES."""
    check_prefetch(PREFETCHES[name])


def test_by_proximity_is_the_papers_formula() -> None:
    """p / (l - l_now) (fMoE, section 4.5)."""
    assert ByProximity().priority(0.6, 3) == pytest.approx(0.2)
    assert ByProximity().priority(0.25, 1) > ByProximity().priority(0.6, 3)
