"""Checkpoints in the layouts and quantisations that hubs hold, made from tiny models; and what stores must hold."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from expertly.model.conversion import Conversion
from expertly.model.structure import ExpertsSite, build_meta_model, find_experts
from expertly.store.packed import PackedStore
from tests.families import NUM_EXPERTS, VOCAB_SIZE, Family, load_reference, make_checkpoint, make_model


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint that is one file."""
    return load_file(folder / "model.safetensors")


def write_checkpoint(folder: Path, tensors: Mapping[str, torch.Tensor], source: Path, **config: Any) -> Path:
    """One file of `tensors` beside the other files of `source`, with `config` changed (None removes a field)."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix == ".json" and not path.name.endswith("index.json"):
            shutil.copy(path, folder / path.name)
    merged = json.loads((source / "config.json").read_text()) | config
    merged = {key: value for key, value in merged.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(merged))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_fused_checkpoint(family: str, folder: Path) -> Path:
    """A checkpoint whose tensors have the names and shapes of the module's parameters."""
    source = make_checkpoint(family, folder.with_name(f"{folder.name}-source"))
    state = load_reference(source).state_dict()
    return write_checkpoint(folder, {name: tensor.clone() for name, tensor in state.items()}, source)


def make_mxfp4_checkpoint(folder: Path, dtype: torch.dtype = torch.bfloat16, intermediate: int = 128) -> Path:
    """gpt_oss as released: experts in blocks of 32 four-bit numbers with a scale each."""
    hidden = 64
    family = Family(
        "gpt_oss",
        3,
        config={
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_local_experts": NUM_EXPERTS,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 16,
        },
    )
    source = folder.with_name(f"{folder.name}-source")
    make_model(family, dtype=dtype).save_pretrained(source)
    tensors = read_tensors(source)
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        del tensors[name]
        rows, columns = (2 * intermediate, hidden) if "gate_up" in name else (hidden, intermediate)
        shape = (NUM_EXPERTS, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(116, 122, shape, generator=generator, dtype=torch.uint8)
    return write_checkpoint(folder, tensors, source, quantization_config={"quant_method": "mxfp4"})


def gguf_blocks(type_name: str, shape: tuple[int, ...], dice: np.random.Generator, std: float = 0.15) -> Any:
    """Random bytes [..., rows, blocks * nbytes] of a GGUF type whose weights are about `std` large; its python package
    quantises few.
    """
    import gguf

    size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    blocks = dice.integers(0, 256, (*shape[:-1], shape[-1] // size, nbytes), dtype=np.uint8)
    if type_name == "MXFP4":
        blocks[..., 0] = dice.integers(122, 125, blocks.shape[:-1])
    scales = {"Q8_0": {0: 70}, "Q4_0": {0: 4.6}, "Q4_K": {0: 200, 2: 27}, "Q5_K": {0: 400, 2: 27}, "Q6_K": {208: 1350}}
    for place, over in scales.get(type_name, {}).items():
        numbers = dice.uniform(0.5, 1.5, (*blocks.shape[:-1], 1)) * std / over
        blocks[..., place : place + 2] = numbers.astype(np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def make_gguf(
    path: Path,
    inner: str = "Q8_0",
    down: str | None = None,
    dense: str = "Q8_0",
    architecture: str = "qwen3moe",
    hidden: int = 256,
    intermediate: int = 512,
    **spoil: Any,
) -> Path:
    """A tiny model as llama.cpp has it, its experts in GGUF types, those of down of the last layer in `down`. `spoil`:
    tensors that are other than they should be (None: missing), by name.
    """
    import gguf

    kinds = gguf.GGMLQuantizationType
    path.parent.mkdir(parents=True, exist_ok=True)
    writer, dice = gguf.GGUFWriter(path, architecture), np.random.default_rng(1)
    writer.add_block_count(3)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_expert_count(NUM_EXPERTS)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(intermediate)
    writer.add_vocab_size(VOCAB_SIZE)
    writer.add_tokenizer_model("none")
    is_qwen2 = architecture == "qwen2moe"
    head = hidden // 4 if is_qwen2 else 16
    if is_qwen2:
        writer.add_expert_shared_feed_forward_length(64)

    def add(name: str, shape: tuple[int, ...], kind: str = "F32", std: float = 0.15, mean: float = 0.0) -> None:
        if name in spoil and spoil[name] is None:
            return
        if kind in ("F32", "F16"):
            numbers = (dice.standard_normal(shape) * std + mean).astype(np.float32 if kind == "F32" else np.float16)
            writer.add_tensor(name, spoil.get(name, numbers))
        else:
            writer.add_tensor(name, gguf_blocks(kind, shape, dice, std), raw_dtype=kinds[kind])

    add("token_embd.weight", (VOCAB_SIZE, hidden), "F16", 0.5)
    add("output_norm.weight", (hidden,), mean=1.0)
    add("output.weight", (VOCAB_SIZE, hidden), dense, 0.5)
    for layer in range(3):
        blk = f"blk.{layer}"
        add(f"{blk}.attn_norm.weight", (hidden,), mean=1.0)
        add(f"{blk}.ffn_norm.weight", (hidden,), mean=1.0)
        add(f"{blk}.attn_q.weight", (4 * head, hidden), dense)
        add(f"{blk}.attn_k.weight", (2 * head, hidden), dense)
        add(f"{blk}.attn_v.weight", (2 * head, hidden), dense)
        add(f"{blk}.attn_output.weight", (hidden, 4 * head), dense if 4 * head % 256 == 0 else "Q8_0")
        add(f"{blk}.ffn_gate_inp.weight", (NUM_EXPERTS, hidden), std=0.4)
        if is_qwen2:
            for one, size in (("q", 4), ("k", 2), ("v", 2)):
                add(f"{blk}.attn_{one}.bias", (size * head,), std=0.1)
            add(f"{blk}.ffn_gate_inp_shexp.weight", (hidden,))
            for one, shape in (("gate", (64, hidden)), ("up", (64, hidden)), ("down", (hidden, 64))):
                add(f"{blk}.ffn_{one}_shexp.weight", shape)
        else:
            add(f"{blk}.attn_q_norm.weight", (head,), mean=1.0)
            add(f"{blk}.attn_k_norm.weight", (head,), mean=1.0)
        of_down = down if down is not None and layer == 2 else inner
        add(f"{blk}.ffn_gate_exps.weight", (NUM_EXPERTS, intermediate, hidden), inner)
        add(f"{blk}.ffn_up_exps.weight", (NUM_EXPERTS, intermediate, hidden), inner)
        add(f"{blk}.ffn_down_exps.weight", (NUM_EXPERTS, hidden, intermediate), of_down)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load_gguf(path: Path, intermediate: int = 512) -> PreTrainedModel:
    """transformers' model of the file, in float32: with a config that has the experts' width, which it does not read."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    config.moe_intermediate_size = intermediate
    config.shared_expert_intermediate_size = 64
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, config=config, dtype=torch.float32
    ).eval()


def make_fp8_checkpoint(family: str, folder: Path, block: int = 8) -> Path:
    """Linear layers, those of experts too, in float8 with a scale a block, as DeepSeek-V3 is released."""
    source = make_checkpoint(family, folder.with_name(f"{folder.name}-source"), dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, tensor in read_tensors(source).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        rows, columns = tensor.shape
        scale = torch.rand(-(-rows // block), -(-columns // block), generator=generator) * 0.01 + 0.005
        spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
        tensors[name] = (tensor.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block]}
    return write_checkpoint(folder, tensors, source, quantization_config=quantization)


def set_config(source: Path, **fields: Any) -> None:
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change(source: Path, function: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
    """Rewrite each tensor of a one-file checkpoint; None drops it."""
    changed = {name: function(name, tensor) for name, tensor in read_tensors(source).items()}
    kept = {name: tensor.contiguous() for name, tensor in changed.items() if tensor is not None}
    save_file(kept, source / "model.safetensors", {"format": "pt"})


def canonical(site: ExpertsSite, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[E, I, M, H] from a loaded model's parameters, worked out apart from the packer."""
    if not site.is_fused:
        pairs = [site.expert_weight_names(expert) for expert in range(site.geometry.num_experts)]
        return torch.stack([torch.stack([state[up], state[down].T], dim=1) for up, down in pairs])
    up, down = (state[name] for name in site.expert_weight_names(0))
    if site.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    rows = [up]
    if site.has_gate:
        rows = list(up.chunk(2, dim=1)) if site.is_concatenated else [up[:, 0::2], up[:, 1::2]]
    return torch.stack([*rows, down.transpose(1, 2)], dim=2)


def read_experts(store: PackedStore, layer: int) -> torch.Tensor:
    with safe_open(store.layer_extent(layer)[0], "pt") as file:
        return file.get_tensor("experts")


def assert_holds_what_transformers_loads(
    store: PackedStore, source: Path, reference: PreTrainedModel | None = None, **load: Any
) -> None:
    """Experts and dense tensors, bit for bit; all parameters of the model are there."""
    reference = reference or load_reference(source, **load)
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
    experts = {name for s in sites for e in range(s.geometry.num_experts) for name in s.expert_weight_names(e)}
    tied = reference.all_tied_weights_keys
    made = {conversion.target(name)[0] for name in dense}
    assert {n for n, _ in reference.named_parameters()} - made - experts - set(tied) - set(tied.values()) == set()
