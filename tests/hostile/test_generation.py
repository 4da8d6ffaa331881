"""generation_config.json of a checkpoint, edited: a run ends in one line that names the field, or in text."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.cases import edited
from tests.hostile.conftest import RunChanged

NAME = "generation_config.json"
NAN = float("nan")


def fields(**values: Any) -> Callable[[Path], None]:
    return edited(NAME, lambda config: config.update(values))


def in_config(**values: Any) -> Callable[[Path], None]:
    """Without a file of its own, they stand in config.json."""

    def apply(folder: Path) -> None:
        (folder / NAME).unlink()
        edited("config.json", lambda config: config.update(values))(folder)

    return apply


def pipe(folder: Path) -> None:
    (folder / NAME).unlink()
    os.mkfifo(folder / NAME)


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "10 000 stop strings": (fields(stop_strings=[str(at) for at in range(10**4)]), "stop_strings: 10000 entries"),
    "a stop string of 10^6": (fields(stop_strings="x" * 10**6), "stop_strings: 1000000 characters"),
    "a length of 2^70": (fields(max_length=2**70), "max_length=1180591620717411303424"),
    "temperature NaN": (fields(temperature=NAN), "temperature=nan"),
    "top_p of 5": (fields(top_p=5), "top_p=5: must be a number from 0 to 1"),
    "an end of text": (fields(eos_token_id=[1, "a"]), "eos_token_id=[1, 'a']"),
    "a suppressed token beyond": (fields(suppress_tokens=[10**6]), "suppress_tokens=[1000000]"),
    "a bias of a token": (fields(sequence_bias=[[5, 1.0]]), "sequence_bias=[[5, 1.0]]"),
    "a pipe": (pipe, f"{NAME}: a pipe"),
    "temperature NaN in config.json": (in_config(temperature=NAN), "config.json: temperature=nan"),
}

RUNS: dict[str, Callable[[Path], None]] = {
    "code, caches and models of a hub": fields(
        custom_generate="owner/it", trust_remote_code=True, cache_implementation="zzz", assistant_early_exit=1,
        compile_config={"backend": "x"}, penalty_alpha=0.6, constraints=[1], prompt_lookup_num_tokens=10**9,
        continuous_batching_config={"a": 1}, output_scores=True, return_dict_in_generate=True,
    ),
    "what nobody knows": fields(validate=5, to_dict=5, __class__="x", chat_format="chatml", _from_model_config=5),
    "an endless text, padded with nothing": fields(max_length=2**62, pad_token_id=-1, top_k=-1, eos_token_id=10**9),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_by_its_field(name: str, run_changed: RunChanged) -> None:
    change, sentence = REFUSED[name]
    run_changed(change).is_refused(sentence)


@pytest.mark.parametrize("name", RUNS)
def test_only_what_changes_a_text_is_read(name: str, run_changed: RunChanged) -> None:
    run_changed(RUNS[name]).is_answered()
