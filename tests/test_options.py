"""What a user can say of loading a model is said once: `load`, its help and the command line agree."""

from __future__ import annotations

import inspect

import pytest
import torch

import expertly
from expertly.core.errors import ConfigError
from expertly.options import LOAD_OPTIONS, LoadOptions
from tests.command_lines import parse


def test_load_shows_every_option_with_its_default():
    shown = inspect.signature(expertly.load).parameters
    assert {name: shown[name].default for name in LOAD_OPTIONS} == {name: o.default for name, o in LOAD_OPTIONS.items()}
    assert all(f"{name}:" in str(expertly.load.__doc__) for name in LOAD_OPTIONS)


def test_the_command_line_has_the_same_names_and_defaults():
    for command in ("run", "serve", "lab trace record"):
        given = parse(command.split() + ["--prompts", "x", "--out", "y"] * ("record" in command))
        for name, one in LOAD_OPTIONS.items():
            assert given[name] == one.default or (command, name) == ("lab trace record", "maps")


@pytest.mark.parametrize(
    ("given", "name"),
    [(torch.float32, "float32"), ("float32", "float32"), ("torch.bfloat16", "bfloat16"), (None, None)],
)
def test_a_dtype_is_a_name_or_what_torch_has(given: object, name: str | None):
    assert LoadOptions(dtype=given).dtype == name


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"matcher": "soon"}, "matcher='soon'.*auto, thread, inline"),
        ({"memory": "25%", "total_memory": "8GiB"}, "memory='25%' and total_memory='8GiB'.*one of the two"),
        ({"segments": 0}, "segments=0.*from 1"),
        ({"segments": True}, "segments=True.*from 1"),
        *(({"compressed": value}, "compressed=.*codec='planes'.*memory=") for value in ("30%", 0.3, "device", "")),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, object], says: str):
    with pytest.raises(ConfigError, match=says):
        LoadOptions(**options)


@pytest.mark.parametrize("value", [None, 0, "0", "auto"])
def test_not_asking_for_experts_compressed_in_memory_is_no_error(value: object):
    LoadOptions(compressed=value)


def test_an_option_that_there_is_not():
    with pytest.raises(TypeError, match="memry"):
        expertly.load(memry="25%")
