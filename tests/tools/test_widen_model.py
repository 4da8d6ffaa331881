"""tools/widen_model.py: a larger model's shape, and what the model routes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).parents[2] / "tools"))  # scripts, which import each other

from inflate_model import InflateError, inflate
from widen_model import Shape, widen

SHAPE = Shape(512, 128, 64, 8, 16, 2, 128)
IDS = torch.arange(100, 140)[None]


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(IDS).logits[0]


def test_with_all_variants_of_its_experts_the_wide_model_is_the_model(tmp_path: Path) -> None:
    """Twice the experts, twice the top-k, no spread, norms that are halved: but for bfloat16's rounding the same."""
    inflate(tmp_path / "model", 0.01, num_layers=2)
    widen(tmp_path / "wide", SHAPE, num_layers=2, spread=0)
    expected, got = logits(tmp_path / "model"), logits(tmp_path / "wide")
    assert float((got - expected).abs().max()) < 0.02 * float(expected.abs().max())
    widen(tmp_path / "spread", SHAPE, num_layers=1, spread=1.0)
    assert float((logits(tmp_path / "spread") - expected).abs().max()) > 0.1 * float(expected.abs().max())


def test_a_shape_that_cannot_hold_the_model_is_named(tmp_path: Path) -> None:
    for field, value, accepted in (("hidden_size", 128, "at least the model's 256"), ("head_dim", 48, "multiples of")):
        with pytest.raises(InflateError, match=f"^{field}={value}: accepted: {accepted}"):
            widen(tmp_path / "out", Shape(**{field: value}))
    assert not (tmp_path / "out").exists()
