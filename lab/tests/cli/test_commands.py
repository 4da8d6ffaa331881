"""The lab's commands as expertly shows them."""

from __future__ import annotations

from expertly.options import LOAD_OPTIONS
from tests.command_lines import command_of, parse


def test_all_are_there() -> None:
    group, _ = command_of(["lab"])
    assert list(group.commands) == ["simulate", "compare", "reproduce", "train", "machine", "trace"]


def test_a_recording_loads_a_model_as_run_does() -> None:
    values = parse(["lab", "trace", "record", "--prompts", "x", "--out", "y"])
    assert [name for name, each in LOAD_OPTIONS.items() if values[name] != each.default] == []
