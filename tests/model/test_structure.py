"""Experts are found and measured without a table; what cannot run is refused by name and reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from expertly.core.errors import UnsupportedModelError
from expertly.model.structure import build_meta_model, dense_shape, find_experts
from tests.families import FAMILIES, HIDDEN_SIZE
from tests.model.conftest import Toys


def test_experts_without_a_gate() -> None:
    """nemotron_h, where this transformers has it."""
    config = AutoConfig.for_model("nemotron_h", vocab_size=64, hidden_size=HIDDEN_SIZE, moe_intermediate_size=24)
    [site, *_] = find_experts(build_meta_model(config), 4)
    assert not site.has_gate and site.weight_names == ("up_proj", "down_proj")
    assert (site.geometry.num_matrices, site.geometry.intermediate_size) == (2, 24)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("dbrx", "not on transformers' experts interface"),
        ("jetmoe", "not on transformers' experts interface"),
        ("nllb-moe", "no generating model"),
        ("llama", "not a Mixture-of-Experts model"),
        ("vit", "no generating model"),
    ],
)
def test_families_that_do_not_run_are_refused_with_the_reason(model_type: str, reason: str) -> None:
    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "vocab_size": 32}
    config = AutoConfig.for_model(model_type, **(small if model_type == "llama" else {}))
    with pytest.raises(UnsupportedModelError, match=rf"{model_type}.*{reason}"):
        find_experts(build_meta_model(config), 2)


def test_experts_that_slots_cannot_compute_are_refused() -> None:
    meta = build_meta_model(FAMILIES["mixtral"].make_config())
    experts: Any = meta.model.layers[1].mlp.experts
    experts.down_proj = torch.nn.Parameter(torch.empty(8, 40, 16, device="meta"))
    with pytest.raises(UnsupportedModelError, match=r"\(8, 40, 16\).*one width"):
        find_experts(meta, 2)


MIXTRAL = FAMILIES["mixtral"].make_config().to_dict()


_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
_LONG |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.1, 2.2, 2.3]}


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("mixtral", {"rope_parameters": _LONG, "head_dim": 8}),
        ("mixtral", {"per_layer_config": {}}),
        ("nemotron_h", {"time_step_limit": [0.0, {"__float__": "Infinity"}]}),
    ],
)
def test_configs_as_transformers_writes_them(tmp_path: Path, model_type: str, fields: dict[str, Any]) -> None:
    config = MIXTRAL if model_type == "mixtral" else {"model_type": model_type, "hidden_size": 64, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    assert find_experts(build_meta_model(tmp_path), 2)


@pytest.mark.parametrize("named", ["MixtralForCausalLM", "MixtralModel", "SomebodysOwnForCausalLM"])
def test_the_class_built_generates(tmp_path: Path, named: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL | {"architectures": [named]}))
    assert type(build_meta_model(tmp_path)).__name__ == "MixtralForCausalLM"


def test_a_family_whose_code_comes_with_it_is_the_architecture_that_it_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As Kimi-K2, which is a DeepSeek-V3."""
    config = FAMILIES["deepseek_v3"].make_config().to_dict() | {"model_type": "kimi_k2"}
    config["architectures"] = ["DeepseekV3ForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"kimi_k2.*not a family"):
        build_meta_model(tmp_path)
    code = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"auto_map": code}))
    model = build_meta_model(tmp_path)
    assert type(model).__name__ == "DeepseekV3ForCausalLM" and model.config.model_type == "deepseek_v3"
    assert "runs as deepseek_v3" in caplog.text


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_bytes_of_the_dense_part_by_hand(family: str, toys: Toys) -> None:
    toy = toys[family]
    nbytes = {name: weight.nbytes for name, weight in toy.model.named_parameters()}
    rest = 32 * 4 + nbytes["model.norm.weight"] + nbytes["lm_head.weight"]  # a row of the table
    blocks = [f"model.layers.{layer}." for layer in range(3)]
    if family == "deepseek_v3":  # whose first layer has no experts
        first = blocks.pop(0)
        rest += sum(size for name, size in nbytes.items() if name.startswith(first))
    in_blocks = sum(size for name, size in nbytes.items() if name.startswith(tuple(blocks)))
    result = dense_shape(toy.model)
    assert (result.layer_nbytes, result.head_nbytes) == (in_blocks // len(blocks), rest)
