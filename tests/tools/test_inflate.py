"""tools/inflate_model.py: wider experts, the same function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tools import inflate_model

MIB = 2.0**-10
WIDTH = 24


CONFIG = transformers.Qwen3MoeConfig(
    vocab_size=160,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=WIDTH,
    max_position_embeddings=64,
    bos_token_id=0,
    eos_token_id=None,
    pad_token_id=0,
)
PROMPT = torch.arange(1, 17)[None]


def load(folder: Path) -> transformers.PreTrainedModel:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["mismatched_keys"] and not info["unexpected_keys"]
    return model.eval()


@torch.no_grad()
def logits(model: transformers.PreTrainedModel) -> Tensor:
    return model(PROMPT).logits


def relative_distance(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """Random weights, large enough that experts decide the next token."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=0.3)
    model.save_pretrained(tmp_path / "original")
    return tmp_path / "original"


def test_same_function(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflate_model, "SHARD_NBYTES", 1 << 20)
    result = inflate_model.inflate(tmp_path / "big", 16 * MIB, original, "float32")
    before, after = load(original), load(tmp_path / "big")
    assert relative_distance(logits(after), logits(before)) < 1e-5
    generate = {"max_new_tokens": 24, "do_sample": False}
    assert torch.equal(after.generate(PROMPT, **generate), before.generate(PROMPT, **generate))
    experts = {name: p.detach() for name, p in after.named_parameters() if ".experts." in name}
    assert sum(p.nbytes for p in experts.values()) == result.experts_nbytes
    assert abs(result.experts_nbytes / 2**20 - 16) < 0.5
    assert result.width % 128 == 0 and after.config.moe_intermediate_size == result.width
    shards = [file.stat().st_size for file in (tmp_path / "big").glob("*.safetensors")]
    assert len(shards) == result.num_shards >= 8 and max(shards) <= (1 << 20) + 64 * 1024
    downs = [p for name, p in experts.items() if name.endswith("down_proj")]
    assert downs and all(bool(p.ne(0).float().mean() > 0.999) for p in downs)
    gate_up = next(p for name, p in experts.items() if name.endswith("gate_up_proj"))
    assert 0.25 < float(gate_up.std()) < 0.35 and not torch.equal(gate_up[0], gate_up[1]), "as real ones look"


def test_the_first_layers_alone(original: Path, tmp_path: Path) -> None:
    for dtype in ("bfloat16", "float32"):
        inflate_model.inflate(tmp_path / dtype, 8 * MIB, original, dtype, num_layers=1)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "bfloat16").dtype == torch.bfloat16
    before, after = load(original), load(tmp_path / "float32")
    assert after.config.num_hidden_layers == 1
    first, whole = (model(PROMPT, output_hidden_states=True).hidden_states for model in (after, before))
    final = before.base_model.norm(whole[1])  # the last hidden state of the cut model has passed the norm
    assert relative_distance(first[-1], final) < 1e-5


def test_every_quarter_matters(original: Path, tmp_path: Path) -> None:
    inflate_model.inflate(tmp_path / "big", 16 * MIB, original, "float32")
    expected = logits(load(original))
    for quarter in range(4):
        model = load(tmp_path / "big")
        for name, parameter in model.named_parameters():
            if name.endswith("experts.down_proj"):
                columns = parameter.data.chunk(4, dim=-1)[quarter]  # [E, H, I/4]
                assert (columns.abs() > 2.0**-60).any(dim=1).sum() == parameter.shape[0] * WIDTH // 4
                columns.zero_()
        assert relative_distance(logits(model), expected) > 1e-3


REFUSED: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "a dense model": ({"model_type": "llama"}, [], "model_type 'llama' is not supported"),
    "another width": ({"moe_intermediate_size": 40}, [], "expected 40"),
    "too many layers": ({}, ["--layers", "3"], "--layers 3: the model has 2; accepted: 1 to 2"),
}


def test_command_line(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(tmp_path / "big"), "--experts-gib", str(2 * MIB), "--model", str(original)]
    assert inflate_model.main(arguments) == 0
    assert "I = 896" in capsys.readouterr().out
    again = [f"{arguments[0]}-again", "--experts-gib", "0.00001", "--model", arguments[0]]
    for words, said in ((arguments, "exists already"), (again, "already are")):
        assert inflate_model.main(words) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_it_cannot_widen(
    name: str, original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, more, said = REFUSED[name]
    path = original / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    out = tmp_path / "big"
    assert inflate_model.main([str(out), "--experts-gib", str(2 * MIB), "--model", str(path.parent), *more]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["original"]
