"""Options as a user writes them; which prediction is loaded first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from expertly.core.errors import ConfigError
from expertly.policies.base import PolicyOptions, option, option_names, option_text, parse_options


@dataclass(frozen=True)
class Some(PolicyOptions):
    is_on: bool = False
    count: int = option(3, "how many", least=-9)
    share: float = option(0.5, "of all", least=0, most=1)
    quota: float = option(0.5, "of that", above=0, most=1)
    kind: Literal["delta", "top-k"] = "delta"
    width: int | None = option(None, "of a row", least=1)
    text: str = option("a", "any text")
    file: Path | None = option(None, "where it is")


def test_every_kind_of_field_has_its_default_or_what_was_given() -> None:
    values = {"is_on": "yes", "count": "-7", "share": "1e-1", "kind": "top-k", "width": "4", "text": "b c"}
    result = parse_options(Some, values | {"file": "~/x.bin"}, "x")
    assert result == Some(True, -7, 0.1, 0.5, "top-k", 4, "b c", Path("~/x.bin"))
    assert option_text(result.file) == "~/x.bin"
    assert parse_options(Some, {}, "x") == Some()


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("is_on", "1", r"is_on='1': accepted: yes, true, on, no, false, off"),
        ("count", "1.5", r"count='1.5': must be a whole number"),
        ("count", "", r"count='': must be a whole number"),
        ("count", "٣", r".* must be a whole number"),
        ("count", "9" * 30, r".* must be a whole number"),
        ("width", "none", r"width='none': must be a whole number"),
        ("width", "0", "width=0: must be at least 1"),
        ("share", "half", r"share='half': must be a number"),
        ("share", "1.5", r"share=1.5: must be from 0 to 1"),
        ("share", "nan", r"share=nan: must be from 0 to 1"),
        ("quota", "0", "quota=0.0: must be above 0, up to 1"),
        ("kind", "other", r"kind='other': unknown; accepted: delta, top-k"),
        ("colour", "red", r"option 'colour': unknown; accepted: is_on, count, share, quota, kind, width, text, file"),
    ],
)
def test_an_error_names_the_problem_and_what_is_accepted(key: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"part 'p': {message}"):
        parse_options(Some, {key: text}, "part 'p'")


def test_bounds_hold_however_options_are_made() -> None:
    with pytest.raises(ConfigError, match=r"share=1.5: must be from 0 to 1"):
        Some(share=1.5)


def test_a_kind_without_options_says_so() -> None:
    @dataclass(frozen=True)
    class Nothing:
        pass

    assert option_names(Nothing) == []
    with pytest.raises(ConfigError, match="option 'a': unknown; there are none"):
        parse_options(Nothing, {"a": "1"}, "x")
