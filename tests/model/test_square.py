"""Experts whose matrices are square, so that no shape says which way they lie in a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from expertly.core.errors import CheckpointError
from expertly.model.packing import pack
from tests.engine.observe import loaded
from tests.families import FAMILIES, HIDDEN_SIZE, INTERMEDIATE_SIZE, logits_of, make_checkpoint, make_prompts
from tests.formats.gguf_models import CASES, make_model
from tests.model.checkpoints import assert_holds_what_transformers_loads, change, load_reference, refused

TURNED = ("experts.gate_up_proj", "experts.down_proj")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_square_checkpoint_holds_what_transformers_loads(family: str, tmp_path: Path) -> None:
    """Down is square here; gate and up together are in all other tests, where hidden is twice as wide as an expert."""
    known = FAMILIES[family]
    widths = {key: HIDDEN_SIZE for key, value in known.config.items() if value == INTERMEDIATE_SIZE and "inter" in key}
    assert widths and HIDDEN_SIZE == 2 * INTERMEDIATE_SIZE
    source = make_checkpoint(replace(known, config=known.config | widths), tmp_path / "source")
    store = pack(source, tmp_path / "store")
    assert {layer.intermediate_size for layer in store.manifest.layers} == {HIDDEN_SIZE}
    assert_holds_what_transformers_loads(store, source, load_reference(source))


@pytest.mark.parametrize(("intermediate", "square"), [(48, ""), (32, "gate_up_proj"), (64, "down_proj")])
def test_a_family_whose_experts_lie_in_two_ways(intermediate: int, square: str, tmp_path: Path) -> None:
    """Of qwen3_vl_moe: as transformers saves them, and turned, as they were released. It turns a matrix back where its
    shape says so; a square one it takes as it is.
    """
    case = CASES["qwen3vl"]
    model = make_model(replace(case, fields=case.fields | {"moe_intermediate_size": intermediate}))
    prompts = make_prompts(1, length=10)
    logits = logits_of(model, prompts)
    source = tmp_path / "source"
    model.save_pretrained(source)
    for is_turned in (False, True):
        if is_turned:
            change(source, lambda name, tensor: tensor.mT.contiguous() if name.endswith(TURNED) else tensor)
        if is_turned and square:
            refused(
                source, CheckpointError, rf"layers\.0\.mlp\.experts\.{square}' is square and lies \[inputs, outputs\]"
            )
            continue
        with loaded(pack(source, tmp_path / f"store-{is_turned}").folder, memory="50%") as packed:
            torch.testing.assert_close(logits_of(packed, prompts), logits, rtol=1e-4, atol=1e-5)
