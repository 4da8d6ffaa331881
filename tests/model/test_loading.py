"""A loaded model computes what the unmodified one does, from dense weights and whatever its runtime does."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from expertly.core.errors import CheckpointError, StoreError
from expertly.model.loading import load_dense, load_tokenizer
from tests.families import FAMILIES, generate, logits_of, make_checkpoint, make_model, make_prompts, make_tokenizer
from tests.model.conftest import Toys
from tests.model.toy import Toy


@pytest.mark.parametrize("family", FAMILIES)
def test_expert_weights_are_absent_and_the_rest_is_that_of_the_checkpoint(family: str, toys: Toys) -> None:
    toy = toys[family]
    reference = toy.reference.state_dict()
    mine = toy.model.state_dict()
    absent = set(reference) - set(mine)
    assert not set(mine) - set(reference)
    sites = tuple(f"{site}." for site in toy.manifest.sites)
    assert absent and all(name.startswith(sites) and "bias" not in name for name in absent)
    for name, tensor in mine.items():
        assert torch.equal(tensor, reference[name]), name
    experts_nbytes = sum(layer.nbytes for layer in toy.manifest.layers)
    assert sum(reference[name].nbytes for name in absent) == experts_nbytes


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "ernie4_5_moe"])
def test_bfloat16_keeps_the_dtypes_that_the_reference_has(family: str, toys: Toys) -> None:
    toy = toys.fresh(family, dtype=torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in toy.reference.state_dict().items()}
    assert torch.bfloat16 in dtypes.values()
    assert all(dtypes[name] == tensor.dtype for name, tensor in toy.model.state_dict().items())


def test_two_models_of_one_family_and_a_plain_one_do_not_mix(toys: Toys, tmp_path: Path) -> None:
    first, prompts = toys["qwen3_moe"], make_prompts(2)
    second = Toy.make(make_checkpoint("qwen3_moe", tmp_path / "other", seed=5), tmp_path / "other-store").model
    plain = make_model("qwen3_moe", seed=5)
    assert generate(second, prompts) == generate(plain, prompts)
    assert generate(first.model, prompts) == generate(first.reference, prompts)
    assert generate(second, prompts) != generate(first.model, prompts)
    assert plain.config._experts_implementation == "grouped_mm"
    of_its_config = AutoModelForCausalLM.from_config(first.model.config)
    assert torch.isfinite(logits_of(of_its_config, prompts)).all()


def test_the_class_looks_like_the_familys_own(toys: Toys) -> None:
    model = toys["mixtral"].model
    plain = make_model("mixtral")
    assert isinstance(model, type(plain)) and type(model).__name__ == "MixtralForCausalLM"
    assert type(model).__module__ == type(plain).__module__
    assert isinstance(model.model, type(plain.model)) and type(model.model).__name__ == "MixtralModel"
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert "expertly" in ALL_EXPERTS_FUNCTIONS


def _spoil(store: Path, change: object) -> None:
    tensors = load_file(store / "dense.safetensors")
    change(tensors)  # type: ignore[operator]
    save_file(tensors, store / "dense.safetensors", metadata={"format": "pt"})


def test_missing_and_mismatched_tensors_are_named_and_others_are_no_concern(
    toys: Toys, capfd: pytest.CaptureFixture[str]
) -> None:
    for change, named in (
        (lambda tensors: tensors.pop("model.layers.1.self_attn.q_proj.weight"), r"layers\.1\.self_attn\.q_proj"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}), r"shape of model\.norm\.weight"),
        (lambda tensors: tensors.update({"model.mtp.weight": torch.ones(7)}), None),
    ):
        toy = toys.fresh("qwen3_moe")
        _spoil(toy.store, change)
        capfd.readouterr()
        refused = contextlib.nullcontext() if named is None else pytest.raises(CheckpointError, match=named)
        with refused:
            load_dense(toy.store, toy.manifest, torch.float32, "cpu", toy.runtime)
    captured = capfd.readouterr()
    assert "mtp" not in captured.out + captured.err


def test_a_store_of_another_model_or_a_damaged_one_is_refused(toys: Toys) -> None:
    toy = toys.fresh("qwen3_moe")
    with pytest.raises(StoreError, match="pack it again"):
        load_dense(toy.store, toys["dots1"].manifest, torch.float32, "cpu", toy.runtime)
    config = json.loads((toy.store / "config.json").read_text())
    (toy.store / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 32}))
    with pytest.raises(StoreError, match="intermediate_size=32"):
        load_dense(toy.store, toy.manifest, torch.float32, "cpu", toy.runtime)
    (toy.store / "config.json").write_text(json.dumps(config))
    dense = toy.store / "dense.safetensors"
    dense.write_bytes(dense.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_dense(toy.store, toy.manifest, torch.float32, "cpu", toy.runtime)


def test_tokenizer_or_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer("Once upon")["input_ids"]) == "Once upon"
