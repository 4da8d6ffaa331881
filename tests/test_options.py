"""What a user can say of loading a model is said once: `load`, its help and the command line agree."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

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


def test_the_reference_has_every_option():
    page = (Path(__file__).parent.parent / "docs" / "reference.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.*) \|$", page, re.MULTILINE)
    assert [(name, help) for name, _, help in rows] == [(n, o.metadata["option"].help) for n, o in LOAD_OPTIONS.items()]


def test_the_command_line_has_the_same_names_and_defaults():
    for command in ("run", "serve"):
        values = parse([command])
        for name, each in LOAD_OPTIONS.items():
            assert values[name] == each.default


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float32, "float32"), ("float32", "float32"), ("torch.bfloat16", "bfloat16"), (None, None)],
)
def test_a_dtype_is_a_name_or_what_torch_has(dtype: object, name: str | None):
    assert LoadOptions(dtype=dtype).dtype == name


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"verify": "soon"}, "verify='soon'.*sampled, always, never"),
        ({"memory": "25%", "total_memory": "8GiB"}, "memory='25%' and total_memory='8GiB'.*one of the two"),
        ({"context": 0}, "context=0.*from 1"),
        ({"context": True}, "context=True.*from 1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, object], says: str):
    with pytest.raises(ConfigError, match=says):
        LoadOptions(**options)


def test_an_option_that_there_is_not():
    with pytest.raises(TypeError, match=r"load\(\) takes no option 'memry'; accepted: memory, total_memory, "):
        expertly.load(memry="25%")
