"""Packing: the store holds, bit for bit, what transformers loads; and bad checkpoints are refused by name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from expertly.core.errors import CheckpointError, ConfigError, ExpertlyError, StoreError, UnsupportedModelError
from expertly.models.adapter import ExpertsSite, build_meta_model, find_experts
from expertly.models.conversion import Conversion
from expertly.models.packing import default_dtype, pack, pack_cached
from expertly.store.checkpoint import Checkpoint
from expertly.store.packed import PackedStore
from expertly.store.writer import partial_folder
from tests.families import FAMILIES, NUM_EXPERTS, load_reference, make_checkpoint
from tests.models.checkpoints import (
    make_fp8_checkpoint,
    make_fused_checkpoint,
    make_mxfp4_checkpoint,
    read_tensors,
    write_checkpoint,
)
from tests.store.builders import files_of, safetensors_bytes


def canonical(site: ExpertsSite, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """[E, I, M, H] from a loaded model's parameters, worked out apart from the packer."""
    if not site.is_fused:
        pairs = [site.expert_weight_names(expert) for expert in range(site.geometry.num_experts)]
        return torch.stack([torch.stack([state[up], state[down].T], dim=1) for up, down in pairs])
    up, down = (state[f"{site.name}.{name}"] for name in site.weight_names)
    if site.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    rows = [up]
    if site.has_gate:
        rows = list(up.chunk(2, dim=1)) if site.is_concatenated else [up[:, 0::2], up[:, 1::2]]
    return torch.stack([*rows, down.transpose(1, 2)], dim=2)


def read_experts(store: PackedStore, layer: int) -> torch.Tensor:
    with safe_open(store.layer_extent(layer)[0], "pt") as file:
        return file.get_tensor("experts")


def assert_holds_what_transformers_loads(store: PackedStore, source: Path, **load: Any) -> None:
    reference = load_reference(source, **load)
    state = reference.state_dict()
    sites = find_experts(reference, 1)
    assert store.manifest.sites == tuple(site.name for site in sites)
    for layer, site in enumerate(sites):
        stored = read_experts(store, layer)
        expected = canonical(site, state)
        assert torch.equal(stored.view(torch.uint8), expected.to(stored.dtype).contiguous().view(torch.uint8)), (
            site.name
        )
    conversion = Conversion(build_meta_model(store.folder))  # an unquantised model's names
    dense = load_file(store.folder / "dense.safetensors")
    for name, tensor in dense.items():
        target, pattern = conversion.target(name)
        if pattern is None:
            assert torch.equal(tensor.to(state[target].dtype), state[target]), name
    experts = {f"{site.name}.{name}" for site in sites for name in site.weight_names}
    experts |= {
        n for s in sites if not s.is_fused for e in range(s.geometry.num_experts) for n in s.expert_weight_names(e)
    }
    tied = reference.all_tied_weights_keys
    made = {conversion.target(name)[0] for name in dense}
    assert {n for n, _ in reference.named_parameters()} - made - experts - set(tied) - set(tied.values()) == set()


@pytest.mark.parametrize("max_shard_size", [None, "20KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("family", FAMILIES)
def test_holds_what_transformers_loads(tmp_path: Path, family: str, max_shard_size: str | None) -> None:
    source = make_checkpoint(family, tmp_path / "source", max_shard_size=max_shard_size)
    store = pack(source, tmp_path / "store")
    assert len(store.manifest.layers) == FAMILIES[family].num_moe_layers
    assert {layer.num_experts for layer in store.manifest.layers} == {NUM_EXPERTS}
    assert (store.manifest.model_type, store.manifest.dtype) == (family, "float32")
    store.verify(full=True)
    assert_holds_what_transformers_loads(store, source)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "granitemoe", "gpt_oss", "jamba"])
def test_a_fused_checkpoint_makes_the_same_experts(tmp_path: Path, family: str) -> None:
    source = make_fused_checkpoint(family, tmp_path / "source")
    store = pack(source, tmp_path / "store")
    assert_holds_what_transformers_loads(store, source)
    other = pack(tmp_path / "source-source", tmp_path / "other")
    for layer in range(len(store.manifest.layers)):
        assert torch.equal(read_experts(store, layer), read_experts(other, layer))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_casts_as_transformers_does(tmp_path: Path, stored: torch.dtype, dtype: str) -> None:
    source = make_checkpoint("qwen3_moe", tmp_path / "source", dtype=stored)
    assert pack(source, tmp_path / "default").manifest.dtype == str(stored).removeprefix("torch.")
    store = pack(source, tmp_path / "store", dtype)
    assert store.manifest.dtype == dtype
    assert_holds_what_transformers_loads(store, source, dtype=getattr(torch, dtype))


@pytest.mark.parametrize("dtype", [None, "float32", "float16"])
def test_mxfp4_is_undone_as_transformers_does(tmp_path: Path, dtype: str | None) -> None:
    source = make_mxfp4_checkpoint(tmp_path / "source")
    store = pack(source, tmp_path / "store", dtype)
    assert store.manifest.dtype == (dtype or "bfloat16")
    assert "quantization_config" not in store.config
    assert_holds_what_transformers_loads(store, source, **({} if dtype is None else {"dtype": getattr(torch, dtype)}))


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_fp8_is_undone_as_transformers_does(tmp_path: Path, family: str, dtype: str | None) -> None:
    pytest.importorskip("accelerate", reason="transformers' own reading of it needs accelerate")
    source = make_fp8_checkpoint(family, tmp_path / "source")
    store = pack(source, tmp_path / "store", dtype)
    assert "quantization_config" not in store.config
    assert {info.dtype for info in store.dense.values()} <= {"BF16", "F32"}
    assert not [name for name in store.dense if "scale" in name]
    assert_holds_what_transformers_loads(store, source, **({} if dtype is None else {"dtype": getattr(torch, dtype)}))


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "unheard-of", None, 3])
def test_another_quantisation_is_refused_by_name(tmp_path: Path, method: Any) -> None:
    source = make_checkpoint("qwen3_moe", tmp_path / "source")
    set_config(source, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(UnsupportedModelError, match=rf"quant_method={method!r}.*supported: none, fp8, mxfp4"):
        pack(source, tmp_path / "store")


def test_float16_is_refused_where_a_weight_does_not_fit(tmp_path: Path) -> None:
    source = make_checkpoint("qwen3_moe", tmp_path / "source")
    change(
        source, lambda name, tensor: tensor.index_fill(0, torch.tensor([0]), 1e6) if "experts.2.up" in name else tensor
    )
    with pytest.raises(ConfigError, match=r"dtype='float16': expert 2 of .*mlp\.experts holds 1e\+06, .* 65504"):
        pack(source, tmp_path / "store", "float16")
    assert not (tmp_path / "store").exists()
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


# Resuming and the cache folder.

SLOW_PACK = """
import sys, time
from expertly.models.packing import pack
pack(sys.argv[1], sys.argv[2], progress=lambda done, total: time.sleep(0.02))
"""


def test_a_killed_pack_is_resumed_to_the_same_store(tmp_path: Path) -> None:
    source, folder = make_checkpoint("qwen3_moe", tmp_path / "source", tokenizer=True), tmp_path / "store"
    process = subprocess.Popen([sys.executable, "-c", SLOW_PACK, str(source), str(folder)])
    deadline = time.monotonic() + 120
    while not (partial_folder(folder) / "experts-00001.safetensors").exists():
        assert process.poll() is None and time.monotonic() < deadline, "the packer ended early"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not folder.exists()
    with pytest.raises(ExpertlyError):  # what it left is no model
        pack_cached(partial_folder(folder))
    progress: list[int] = []
    pack(source, folder, progress=lambda done, total: progress.append(done)).verify(full=True)
    assert progress[0] > 0, "started from nothing"
    assert files_of(folder) == files_of(pack(source, tmp_path / "uninterrupted").folder)


def test_the_first_use_packs_and_the_next_opens(tmp_path: Path) -> None:
    source = make_checkpoint("mixtral", tmp_path / "source", tokenizer=True)
    seen: list[tuple[int, int]] = []
    store = pack_cached(str(source), cache_dir=tmp_path / "cache", progress=lambda *now: seen.append(now))
    assert store.folder.parent == tmp_path / "cache" / "stores"
    assert seen[-1][0] == seen[-1][1] > 0
    again = pack_cached(source, cache_dir=tmp_path / "cache", progress=lambda *now: pytest.fail("packed again"))
    assert again.folder == store.folder
    assert pack_cached(source, "bfloat16", tmp_path / "cache").folder != store.folder
    assert pack_cached(store.folder).folder == store.folder  # a store is a model too
    assert json.loads((store.folder / "tokenizer_config.json").read_text())


def test_the_cache_is_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path / "mine"))
    store = pack_cached(make_checkpoint("olmoe", tmp_path / "source"))
    assert store.folder.is_relative_to(tmp_path / "mine")


def test_a_changed_source_is_packed_anew_and_its_old_store_refused(tmp_path: Path) -> None:
    source = make_checkpoint("mixtral", tmp_path / "source")
    first = pack_cached(source, cache_dir=tmp_path / "cache")
    pack(source, tmp_path / "store")
    change(source, lambda name, tensor: tensor + 1)  # same names, shapes and sizes
    second = pack_cached(source, cache_dir=tmp_path / "cache")
    assert second.folder != first.folder
    assert not torch.equal(read_experts(first, 0), read_experts(second, 0))
    with pytest.raises(StoreError, match=r"another checkpoint .*changed since"):
        pack(source, tmp_path / "store")


def test_a_changed_tokenizer_is_brought_up_to_date(tmp_path: Path) -> None:
    source = make_checkpoint("mixtral", tmp_path / "source")
    store = pack(source, tmp_path / "store")
    (source / "generation_config.json").write_text('{"max_new_tokens": 7}')
    pack(source, tmp_path / "store", progress=lambda *now: pytest.fail("packed again")).verify(full=True)
    assert (store.folder / "generation_config.json").read_text() == '{"max_new_tokens": 7}'


def test_a_store_of_another_dtype_is_refused(tmp_path: Path) -> None:
    source = make_checkpoint("mixtral", tmp_path / "source")
    pack(source, tmp_path / "store")
    for attempt in (
        lambda: pack(source, tmp_path / "store", "bfloat16"),
        lambda: pack_cached(tmp_path / "store", "float16"),
    ):
        with pytest.raises(ConfigError, match=r"dtype='b?float16': the packed store .* holds float32"):
            attempt()
    with pytest.raises(CheckpointError, match="already a packed store"):
        pack(tmp_path / "store", tmp_path / "again")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    source = make_checkpoint("mixtral", tmp_path / "source")
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=str(tmp_path / "file")):
        pack_cached(source, cache_dir=tmp_path / "file" / "cache")


@pytest.mark.parametrize("model", ["./absent", "/absent/model", "a/b/c", "", "~/absent", "no spaces allowed", "-x-"])
def test_what_is_no_model_is_named(model: str) -> None:
    with pytest.raises(CheckpointError, match=rf"model={model!r}: no such folder"):
        pack_cached(model)


def test_a_hub_id_without_a_network_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"model='someone/something': no such folder here, and the hub cannot be"):
        pack_cached("someone/something")


# Bad checkpoints.


def set_config(source: Path, **fields: Any) -> None:
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change(source: Path, function: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
    """Rewrite each tensor of a one-file checkpoint; None drops it."""
    changed = {name: function(name, tensor) for name, tensor in read_tensors(source).items()}
    kept = {name: tensor.contiguous() for name, tensor in changed.items() if tensor is not None}
    save_file(kept, source / "model.safetensors", {"format": "pt"})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_checkpoint("qwen3_moe", tmp_path / "source")


def refused(source: Path, error: type[ExpertlyError], message: str) -> None:
    store = source.with_name("refused")
    with pytest.raises(error, match=message):
        pack(source, store)
    assert not store.exists() and not partial_folder(store).exists()


@pytest.mark.parametrize("value", ["NaN", "int8", "float64", 3])
def test_a_config_dtype_that_is_none_is_named(source: Path, value: Any) -> None:
    set_config(source, dtype=value)
    refused(source, CheckpointError, rf"config\.json: dtype='{value}': .*accepted: bfloat16, float16, float32")
    with pytest.raises(ConfigError, match="dtype='NaN'"):
        pack(source, source.with_name("refused"), "NaN")


def test_the_dtype_is_the_config_s_or_that_of_most_bytes(tmp_path: Path) -> None:
    source = make_checkpoint("qwen3_moe", tmp_path / "source", dtype=torch.bfloat16)
    assert default_dtype(Checkpoint.open(source)) == "bfloat16"
    for fields, expected in (
        ({"dtype": "float16"}, "float16"),
        ({"dtype": None, "torch_dtype": "torch.float32"}, "float32"),
        ({"dtype": None, "torch_dtype": None}, "bfloat16"),
        ({"torch_dtype": None, "text_config": {"dtype": "float16"}}, "float16"),
    ):
        set_config(source, **fields)
        assert default_dtype(Checkpoint.open(source)) == expected


@pytest.mark.parametrize("num_experts", [NUM_EXPERTS - 1, NUM_EXPERTS + 1])
@pytest.mark.parametrize("layout", ["per expert", "fused", "modules"])
def test_an_expert_count_that_disagrees_is_named(tmp_path: Path, layout: str, num_experts: int) -> None:
    family = "switch_transformers" if layout == "modules" else "qwen3_moe"
    make = make_fused_checkpoint if layout == "fused" else make_checkpoint
    source = make(family, tmp_path / "source")

    def cut_router(name: str, tensor: torch.Tensor) -> torch.Tensor:
        is_router = name.endswith(("gate.weight", "classifier.weight"))
        return tensor[:1].expand(num_experts, -1) if is_router else tensor

    change(source, cut_router)
    set_config(source, num_experts=num_experts)
    refused(source, CheckpointError, rf"config\.json says {num_experts} experts|but config\.json says {num_experts}")


def test_a_missing_expert_is_named(source: Path) -> None:
    change(source, lambda name, tensor: None if "layers.1.mlp.experts.3." in name else tensor)
    refused(source, CheckpointError, r"model\.layers\.1\.mlp\.experts: the checkpoint has 7 experts, but .* says 8")


def test_a_misnumbered_expert_is_named(source: Path) -> None:
    tensors = {name.replace("experts.3.", "experts.11."): tensor for name, tensor in read_tensors(source).items()}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    refused(source, CheckpointError, "the checkpoint has no expert 3")


def test_a_layer_without_experts_is_named(source: Path) -> None:
    change(source, lambda name, tensor: None if "layers.2.mlp.experts" in name else tensor)
    refused(source, CheckpointError, r"no tensor for model\.layers\.2\.mlp\.experts\.gate_up_proj")


def test_an_expert_of_another_shape_is_named(source: Path) -> None:
    change(source, lambda name, tensor: tensor[:-1] if "layers.0.mlp.experts.5.up_proj" in name else tensor)
    refused(source, CheckpointError, r"experts\.5\.up_proj\.weight.*\[15, 32\] is unlike that of other experts")


@pytest.mark.parametrize("layout", ["per expert", "fused", "modules"])
def test_experts_of_another_shape_than_the_config_s_are_named(tmp_path: Path, layout: str) -> None:
    family = "switch_transformers" if layout == "modules" else "qwen3_moe"
    make = make_fused_checkpoint if layout == "fused" else make_checkpoint
    source = make(family, tmp_path / "source")
    set_config(source, **({"d_ff": 24} if layout == "modules" else {"moe_intermediate_size": 24}))
    refused(source, CheckpointError, r"tensor '.*expert.*': makes .*expert.* of shape .* but config\.json says")


def test_gate_and_up_of_unlike_shapes_are_named(source: Path) -> None:
    change(source, lambda name, tensor: tensor[:, :-1] if "experts" in name and "up_proj" in name else tensor)
    refused(source, CheckpointError, r"cannot be made into model\.layers\.0\.mlp\.experts\.gate_up_proj")


def test_a_dense_tensor_of_another_shape_is_named(source: Path) -> None:
    change(source, lambda name, tensor: tensor[:-1] if name == "lm_head.weight" else tensor)
    refused(
        source, CheckpointError, r"tensor 'lm_head\.weight': shape \[127, 32\], but config\.json makes it \[128, 32\]"
    )


def test_a_missing_dense_tensor_is_named(source: Path) -> None:
    change(source, lambda name, tensor: None if name == "model.norm.weight" else tensor)
    refused(source, CheckpointError, r"no tensor for model\.norm\.weight")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_experts_of_another_dtype_are_named(source: Path, dtype: torch.dtype) -> None:
    change(source, lambda name, tensor: tensor.to(dtype) if "experts" in name else tensor)
    refused(source, CheckpointError, r"experts\.0\.gate_proj\.weight': dtype='(I8|F8_E4M3)': experts must be BF16")


def test_tensors_that_transformers_ignores_are_left_out(source: Path, tmp_path: Path) -> None:
    tensors = read_tensors(source) | {"model.layers.9.mlp.experts.0.up_proj.weight": torch.ones(16, 32)}
    extended = write_checkpoint(tmp_path / "extended", tensors, source)
    store = pack(extended, tmp_path / "store")
    assert not [name for name in store.dense if "layers.9" in name]
    assert_holds_what_transformers_loads(store, extended)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "source")
    refused(tmp_path / "source", UnsupportedModelError, "'llama': not a Mixture-of-Experts model")


def test_an_unknown_family_is_refused(source: Path) -> None:
    set_config(source, model_type="unheard_of", architectures=["UnheardOf"])
    refused(source, UnsupportedModelError, "unheard_of")


@pytest.mark.parametrize("fields", [{"hidden_size": -1}, {"hidden_size": "wide"}, {"num_hidden_layers": None}])
def test_a_config_that_makes_no_model_is_named(source: Path, fields: dict[str, Any]) -> None:
    set_config(source, **fields)
    refused(source, CheckpointError, r"config\.json|hidden_size|shape")


def test_a_truncated_checkpoint_is_named(source: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    refused(source, CheckpointError, rf"{path}: tensor .* beyond")


def test_a_lying_header_is_named(source: Path) -> None:
    path = source / "model.safetensors"
    raw = path.read_bytes()
    nbytes = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + nbytes])
    first, second = sorted(name for name in header if "layers.0" in name and "layernorm" in name)[:2]
    header[first]["data_offsets"] = header[second]["data_offsets"]
    path.write_bytes(safetensors_bytes(header, raw[8 + nbytes :]))
    refused(source, CheckpointError, "overlaps|unused bytes|hold")


def test_packing_needs_little_memory(tmp_path: Path) -> None:
    """A dense tensor and a layer of experts larger than all the memory that packing may add."""
    from tests.families import make_model

    model = make_model("qwen3_moe")
    config = model.config
    config.vocab_size, config.hidden_size, config.moe_intermediate_size = 30_000, 1024, 256
    config.num_hidden_layers, config.num_experts, config.dtype = 1, 48, "bfloat16"
    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in type(model)(config).state_dict().items()}
    source = tmp_path / "source"
    config.save_pretrained(source)
    save_file(
        {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()},
        source / "model.safetensors",
        {"format": "pt"},
    )
    script = """
import sys
from expertly.models.packing import pack
from expertly.models import adapter
def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))
pack(sys.argv[3], sys.argv[3] + "-store")  # all that is imported late
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
pack(sys.argv[1], sys.argv[2])
print(status("VmHWM") - before)
"""
    warm = make_checkpoint("qwen3_moe", tmp_path / "warm", dtype=torch.bfloat16)
    command = [sys.executable, "-c", script, str(source), str(tmp_path / "store"), str(warm)]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) << 10 < 40 << 20  # of 60 MB dense tensors and 75 MB of experts
