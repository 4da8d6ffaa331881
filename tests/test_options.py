"""What a user can say of loading a model is said once: `load`, its help and the command line agree."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

import expertly
from expertly.core.errors import ConfigError
from expertly.options import LOAD_OPTIONS, LoadOptions, names_of_today
from tests.command_lines import parse


def test_load_shows_every_option_with_its_default():
    shown = inspect.signature(expertly.load).parameters
    assert {name: shown[name].default for name in LOAD_OPTIONS} == {name: o.default for name, o in LOAD_OPTIONS.items()}
    assert all(f"{name}:" in str(expertly.load.__doc__) for name in LOAD_OPTIONS)


def test_the_reference_has_every_option():
    page = (Path(__file__).parent.parent / "docs" / "reference.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.*) \|$", page, re.MULTILINE)
    assert [(name, help) for name, _, help in rows] == [(n, o.metadata["option"].help) for n, o in LOAD_OPTIONS.items()]


def test_the_command_line_has_the_same_names_and_defaults():
    for command in ("run", "serve", "lab trace record"):
        given = parse(command.split() + ["--prompts", "x", "--out", "y"] * ("record" in command))
        for name, one in LOAD_OPTIONS.items():
            assert given[name] == one.default or (command, name) == ("lab trace record", "learned")


@pytest.mark.parametrize(
    ("given", "name"),
    [(torch.float32, "float32"), ("float32", "float32"), ("torch.bfloat16", "bfloat16"), (None, None)],
)
def test_a_dtype_is_a_name_or_what_torch_has(given: object, name: str | None):
    assert LoadOptions(dtype=given).dtype == name


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"predict": "soon"}, "predict='soon'.*auto, thread, inline"),
        ({"memory": "25%", "total_memory": "8GiB"}, "memory='25%' and total_memory='8GiB'.*one of the two"),
        ({"segments": 0}, "segments=0.*from 1"),
        ({"segments": True}, "segments=True.*from 1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, object], says: str):
    with pytest.raises(ConfigError, match=says):
        LoadOptions(**options)


@pytest.mark.parametrize("value", ["30%", 0.3, "device", ""])
def test_an_option_that_has_gone_says_what_to_use(value: object):
    with pytest.raises(ConfigError, match=r"compressed=.*codec='planes'.*memory="):
        expertly.load("no-such-folder", compressed=value)


def test_options_are_taken_under_the_names_that_they_had():
    told = names_of_today({"maps": "off", "ring": 2, "matcher": "inline", "compressed": "auto", "memory": "25%"})
    options = LoadOptions(**told)
    assert (options.learned, options.staging_slots, options.predict, options.memory) == ("off", 2, "inline", "25%")
    given = parse(["run", "--maps", "off", "--ring=2", "--memory", "25%", "--matcher", "inline", "--compressed", "0"])
    assert {name: given[name] for name in told} == told
    with pytest.raises(ConfigError, match="maps='off': is called learned now"):
        names_of_today({"maps": "off", "learned": "auto"})


def test_an_option_that_there_is_not():
    with pytest.raises(TypeError, match=r"load\(\) takes no option 'memry'; accepted: memory, total_memory, "):
        expertly.load(memry="25%")
