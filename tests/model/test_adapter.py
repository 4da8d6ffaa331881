"""Experts are found and measured without a table; what cannot run is refused by name and reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.core.geometry import LayerGeometry
from expertly.model.structure import build_meta_model, find_experts, read_config
from tests.families import FAMILIES, HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_EXPERTS, make_model

_GATELESS = {"switch_transformers"}


@pytest.mark.parametrize("family", FAMILIES)
def test_geometry_is_that_of_the_config(family: str) -> None:
    config = FAMILIES[family].make_config()
    meta = build_meta_model(config)
    assert all(parameter.is_meta for parameter in meta.parameters())
    sites = find_experts(meta, itemsize=2)
    num_matrices = 2 if family in _GATELESS else 3
    geometry = LayerGeometry(NUM_EXPERTS, FAMILIES[family].top_k, HIDDEN_SIZE, INTERMEDIATE_SIZE, num_matrices, 2)
    assert [site.geometry for site in sites] == [geometry] * FAMILIES[family].num_moe_layers
    for site in sites:
        assert meta.get_submodule(site.name) is not None
        for name in site.weight_names if site.is_fused else ():
            assert f"{site.name}.{name}" in dict(meta.named_parameters())


def test_layouts_of_gpt_oss_and_switch() -> None:
    [first, *_] = find_experts(build_meta_model(FAMILIES["gpt_oss"].make_config()), 2)
    assert (first.is_transposed, first.is_concatenated, first.has_gate, first.has_bias) == (True, False, True, True)
    sites = find_experts(build_meta_model(FAMILIES["switch_transformers"].make_config()), 2)
    assert ["encoder" in site.name.split(".") for site in sites] == [True, True, False, False]
    assert not sites[0].is_fused and not sites[0].has_gate
    names = dict(make_model("switch_transformers").named_parameters())
    for site in sites:
        for name, shape in zip(site.expert_weight_names(3), [(16, 32), (32, 16)], strict=True):
            assert tuple(names[name].shape) == shape


def test_experts_without_a_gate() -> None:
    """nemotron_h, where this transformers has it."""
    config = AutoConfig.for_model("nemotron_h", vocab_size=64, hidden_size=HIDDEN_SIZE, moe_intermediate_size=24)
    [site, *_] = find_experts(build_meta_model(config), 4)
    assert not site.has_gate and site.weight_names == ("up_proj", "down_proj")
    assert (site.geometry.num_matrices, site.geometry.intermediate_size) == (2, 24)


@pytest.mark.parametrize("model_type", ["dbrx", "jetmoe", "llama4", "longcat_flash"])
def test_families_outside_the_interface_are_refused(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"{model_type}.*not on transformers' experts interface"):
        find_experts(build_meta_model(AutoConfig.for_model(model_type)), 2)


def test_the_family_that_is_wrong_upstream_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedModelError, match=r"nllb-moe.*only experts 0 and 1 ever run"):
        build_meta_model(AutoConfig.for_model("nllb-moe"))


def test_a_dense_model_is_refused() -> None:
    config = AutoConfig.for_model("llama", hidden_size=32, intermediate_size=32, num_attention_heads=4, vocab_size=32)
    with pytest.raises(UnsupportedModelError, match=r"llama.*not a Mixture-of-Experts model"):
        find_experts(build_meta_model(config), 2)


def test_experts_that_slots_cannot_compute_are_refused() -> None:
    meta = build_meta_model(FAMILIES["mixtral"].make_config())
    experts: Any = meta.model.layers[1].mlp.experts
    experts.has_post_expert_norm = True
    with pytest.raises(
        UnsupportedModelError, match=r"mixtral.*layers\.1\.mlp\.experts normalises each expert's output"
    ):
        find_experts(meta, 2)
    experts.has_post_expert_norm = False
    experts.down_proj = torch.nn.Parameter(torch.empty(8, 40, 16, device="meta"))
    with pytest.raises(UnsupportedModelError, match=r"\(8, 40, 16\).*one width"):
        find_experts(meta, 2)


def _folder(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_configs_that_make_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(tmp_path)
    with pytest.raises(UnsupportedModelError, match="made_up"):
        read_config(_folder(tmp_path, model_type="made_up"))
    with pytest.raises(CheckpointError):
        read_config(_folder(tmp_path, model_type="mixtral", hidden_size="wide"))
    with pytest.raises(CheckpointError, match="MixtralForCausalLM cannot be built"):
        build_meta_model(_folder(tmp_path, model_type="mixtral", hidden_size=32, num_attention_heads=0, vocab_size=32))
    with pytest.raises(CheckpointError, match="how many experts a token chooses"):
        find_experts(build_meta_model(_small(tmp_path, num_experts_per_tok=9)), 2)
    with pytest.raises(UnsupportedModelError, match=r"vit .*no generating model|vit.*architectures"):
        build_meta_model(_folder(tmp_path, model_type="vit"))


def _small(folder: Path, **changes: Any) -> Path:
    return _folder(folder, **(FAMILIES["mixtral"].make_config().to_dict() | changes))


def test_the_architecture_in_the_config_is_the_class_built(tmp_path: Path) -> None:
    named = _small(tmp_path, architectures=["MixtralForCausalLM"])
    assert type(build_meta_model(named)).__name__ == "MixtralForCausalLM"
    headless = _small(tmp_path, architectures=["MixtralModel"])
    assert type(build_meta_model(headless)).__name__ == "MixtralForCausalLM"
    foreign = _small(tmp_path, architectures=["SomebodysOwnForCausalLM"])
    assert type(build_meta_model(foreign)).__name__ == "MixtralForCausalLM"
