"""config.json of a checkpoint, edited: a run ends in one line that names the field, or in text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.families import make_checkpoint
from tests.hostile.cases import edited, run_command

Change = Callable[[dict[str, Any]], Any]

REFUSED: dict[str, tuple[Change, str]] = {
    "no experts a token": (lambda config: config.update(num_experts_per_tok=0), "num_experts_per_tok"),
}
"""Of each case its change, and what is said of it."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_cannot_be_is_refused_by_its_field(name: str, imported: Any, tmp_path: Path) -> None:
    change, sentence = REFUSED[name]
    folder = make_checkpoint("qwen3_moe", tmp_path / "model", tokenizer=True)
    edited("config.json", change)(folder)
    run_command(imported, tmp_path, "run", str(folder), "hello", "--max-new-tokens", "4").is_refused(sentence)
