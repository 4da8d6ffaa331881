"""Packing: the store holds, bit for bit, what transformers loads, and takes little memory to make."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, Qwen3VLMoeForConditionalGeneration

from expertly.core.errors import ConfigError, UnsupportedModelError
from expertly.model.packing import pack
from tests.families import FAMILIES, NUM_EXPERTS, make_checkpoint, make_model
from tests.model.checkpoints import (
    assert_holds_what_transformers_loads,
    change,
    make_fp8_checkpoint,
    make_fused_checkpoint,
    make_mxfp4_checkpoint,
    read_experts,
    read_tensors,
    refused,
    set_config,
    write_checkpoint,
)


@pytest.mark.parametrize(
    ("family", "max_shard_size"), [*((name, None) for name in FAMILIES), ("qwen3_moe", "20KB"), ("gpt_oss", "20KB")]
)
def test_holds_what_transformers_loads(tmp_path: Path, family: str, max_shard_size: str | None) -> None:
    source = make_checkpoint(family, tmp_path / "source", max_shard_size=max_shard_size)
    store = pack(source, tmp_path / "store")
    assert len(store.manifest.layers) == FAMILIES[family].num_moe_layers
    assert {layer.num_experts for layer in store.manifest.layers} == {NUM_EXPERTS}
    assert (store.manifest.model_type, store.manifest.dtype) == (family, "float32")
    store.verify(full=True)
    assert_holds_what_transformers_loads(store, source)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "granitemoe", "gpt_oss"])
def test_a_fused_checkpoint_makes_the_same_experts(tmp_path: Path, family: str) -> None:
    source = make_fused_checkpoint(family, tmp_path / "source")
    store = pack(source, tmp_path / "store")
    assert_holds_what_transformers_loads(store, source)
    other = pack(tmp_path / "source-source", tmp_path / "other")
    for layer in range(len(store.manifest.layers)):
        assert torch.equal(read_experts(store, layer), read_experts(other, layer))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_casts_as_transformers_does(tmp_path: Path, stored: torch.dtype) -> None:
    source = make_checkpoint("qwen3_moe", tmp_path / "source", dtype=stored)
    assert pack(source, tmp_path / "default").manifest.dtype == str(stored).removeprefix("torch.")
    for dtype in ("bfloat16", "float16", "float32"):
        store = pack(source, tmp_path / dtype, dtype)
        assert store.manifest.dtype == dtype
        assert_holds_what_transformers_loads(store, source, dtype=getattr(torch, dtype))


QUANTISED = {
    "mxfp4": make_mxfp4_checkpoint,
    "fp8 qwen3_moe": partial(make_fp8_checkpoint, "qwen3_moe"),
    "fp8 deepseek_v3": partial(make_fp8_checkpoint, "deepseek_v3"),
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantisation_is_undone_as_transformers_does(tmp_path: Path, kind: str) -> None:
    if kind.startswith("fp8"):
        pytest.importorskip("accelerate", reason="transformers' own reading of it needs accelerate")
    source = QUANTISED[kind](tmp_path / "source")
    for dtype in ("bfloat16" if kind == "mxfp4" else None, "float32", "float16"):  # mxfp4 is kept, unless it is said
        store = pack(source, tmp_path / str(dtype), dtype)
        assert store.manifest.dtype == (dtype or "bfloat16")
        assert "quantization_config" not in store.config
        assert {info.dtype for info in store.dense.values()} <= {"BF16", "F16", "F32"}
        assert not [name for name in store.dense if "scale" in name]
        wanted = {} if dtype is None else {"dtype": getattr(torch, dtype)}
        assert_holds_what_transformers_loads(store, source, **wanted)


def test_another_quantisation_is_refused_by_name(tmp_path: Path) -> None:
    source = make_checkpoint("qwen3_moe", tmp_path / "source")
    for method in ("hqq", "bitsandbytes", "unheard-of", None, 3):
        set_config(source, quantization_config={"quant_method": method, "bits": 4})
        refused(source, UnsupportedModelError, rf"quant_method={method!r}.*supported: none, fp8, mxfp4")


def test_float16_is_refused_where_a_weight_does_not_fit(tmp_path: Path) -> None:
    source = make_checkpoint("qwen3_moe", tmp_path / "source")
    change(
        source, lambda name, tensor: tensor.index_fill(0, torch.tensor([0]), 1e6) if "experts.2.up" in name else tensor
    )
    refused(source, ConfigError, r"dtype='float16': expert 2 of .*mlp\.experts holds 1e\+06, .* 65504", "float16")
    pack(source, tmp_path / "store", "bfloat16")


def test_nan_and_infinity_are_weights_like_others(tmp_path: Path) -> None:
    source = make_checkpoint("qwen3_moe", tmp_path / "source")
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])

    def damage(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if "experts.1.down" in name:
            tensor.view(-1)[:4] = values
        return tensor

    change(source, damage)
    assert_holds_what_transformers_loads(pack(source, tmp_path / "store"), source)
    assert read_experts(pack(source, tmp_path / "half", "float16"), 0).isnan().any()


def test_a_layout_that_only_shapes_tell_is_read(tmp_path: Path) -> None:
    """qwen3_vl_moe: transformers transposes where the checkpoint's shape is not the model's."""
    text = {
        "vocab_size": 128, "hidden_size": 32, "moe_intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": NUM_EXPERTS, "num_experts_per_tok": 2,
    }  # fmt: skip
    vision: dict[str, Any] = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    vision |= {"out_hidden_size": 32, "deepstack_visual_indexes": [0]}
    config = AutoConfig.for_model("qwen3_vl_moe", text_config=text, vision_config=vision)
    source = tmp_path / "source"
    Qwen3VLMoeForConditionalGeneration(config).save_pretrained(source)
    turned = {n: t.transpose(1, 2) if "experts" in n else t for n, t in read_tensors(source).items()}
    stores = [pack(source, tmp_path / "one"), pack(write_checkpoint(tmp_path / "b", turned, source), tmp_path / "two")]
    reference = Qwen3VLMoeForConditionalGeneration.from_pretrained(source)
    for store in stores:
        assert_holds_what_transformers_loads(store, source, reference)


def pack_and_tell(source: Path, folder: Path, warm: Path, how: dict[str, str]) -> None:
    """Writes beside the store by how many bytes this process has grown."""

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

    pack(warm, folder.with_name("warm"), codec="planes")  # all that is imported late, and all pages of a small model
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    pack(source, folder, **how)
    folder.with_name("grown").write_text(str(status("VmHWM") - before))


def test_packing_needs_little_memory(tmp_path: Path, imported: Any) -> None:
    """A dense tensor and a layer of experts larger than all the memory that packing may add."""
    model = make_model("qwen3_moe")
    config = model.config
    config.vocab_size, config.hidden_size, config.moe_intermediate_size = 30_000, 1024, 256
    config.num_hidden_layers, config.num_experts, config.dtype = 1, 48, "bfloat16"
    config.tie_word_embeddings = True
    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in type(model)(config).state_dict().items()}
    del shapes["lm_head.weight"]
    source = tmp_path / "source"
    config.save_pretrained(source)
    save_file(
        {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()},
        source / "model.safetensors",
        {"format": "pt"},
    )
    warm = make_checkpoint("qwen3_moe", tmp_path / "warm", dtype=torch.bfloat16)
    for how in ({"codec": "none"}, {"codec": "planes"}, {"codec": "auto"}, {"quantize": "mxfp4"}):
        (name,) = how.values()
        (tmp_path / name).mkdir()
        process = imported.Process(target=pack_and_tell, args=(source, tmp_path / name / "store", warm, how))
        process.start()
        process.join()
        assert process.exitcode == 0
        assert int((tmp_path / name / "grown").read_text()) < 40 << 20, how  # of 60 MB dense and 75 MB of experts
