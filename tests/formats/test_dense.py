"""Layers that keep the checkpoint's bytes: the numbers of the dequantised model, in the memory of the format."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import expertly
from expertly.cli.main import main
from expertly.core.errors import CheckpointError, ExpertlyError, ModelUseError
from expertly.engine.memory import beside_experts
from expertly.formats import FORMATS
from expertly.formats.fp8 import Fp8Layout
from expertly.model.needs import needs_of
from expertly.model.packing import pack
from expertly.model.tiled import TiledEmbedding, TiledLayer
from expertly.native.kernels import VARIABLE
from expertly.store.manifest import MANIFEST_NAME
from tests.engine.observe import loaded
from tests.families import generate, logits_of, make_prompts
from tests.formats.gguf_files import make_gguf
from tests.formats.references import Packed, assert_computes, library_checkpoint, reference_of
from tests.model.checkpoints import (
    change,
    load_dequantised,
    make_fp8_checkpoint,
    make_int4_checkpoint,
    read_tensors,
    refused,
    set_config,
    spread_blocks,
    write_checkpoint,
)


def fp8(family: str, folder: Path, dtype: torch.dtype) -> Path:
    return make_fp8_checkpoint(family, folder, dtype, 128, hidden_size=128, moe_intermediate_size=128)


def gguf(folder: Path, dtype: torch.dtype, architecture: str, dense: str, is_tied: bool = False) -> Path:
    """In float32, as transformers has them."""
    others: dict[str, str | None] = {"token_embd.weight": dense} | ({"output.weight": None} if is_tied else {})
    others |= {f"blk.{n}.ffn_{one}_shexp.weight": dense for n in range(3) for one in ("gate", "up", "down")}
    path = folder.with_name(f"{folder.name}.gguf")
    return make_gguf(path, "Q8_0", dense=dense, architecture=architecture, others=others)


CHECKPOINTS: dict[str, tuple[Callable[[Path, torch.dtype], Path], set[str]]] = {
    "fp8 qwen3_moe": (partial(fp8, "qwen3_moe"), {"q_proj", "k_proj", "v_proj"}),
    "fp8 deepseek_v3": (partial(fp8, "deepseek_v3"), {"q_a_proj", "gate_proj", "up_proj", "down_proj"}),
    "int4_g32 qwen3_moe": (make_int4_checkpoint, {"q_proj", "k_proj", "v_proj", "o_proj"}),
    "int4_g32_zeros_f16 autoawq": (partial(library_checkpoint, name="autoawq"), {"q_proj", "k_proj", "v_proj"}),
    "q4_k qwen3moe": (
        partial(gguf, architecture="qwen3moe", dense="Q4_K"),
        {"embed_tokens", "q_proj", "k_proj", "v_proj", "lm_head"},
    ),
    "q6_k qwen3moe": (  # whose head is the table
        partial(gguf, architecture="qwen3moe", dense="Q6_K", is_tied=True),
        {"embed_tokens", "q_proj", "k_proj", "v_proj", "lm_head"},
    ),
    "bf16 qwen3moe": (
        partial(gguf, architecture="qwen3moe", dense="BF16", is_tied=True),
        {"embed_tokens", "q_proj", "k_proj", "v_proj", "lm_head"},
    ),
    "f16 qwen3moe": (
        partial(gguf, architecture="qwen3moe", dense="F16"),
        {"embed_tokens", "q_proj", "k_proj", "v_proj", "lm_head"},
    ),
    "q8_0 qwen2moe": (  # whose projections have biases
        partial(gguf, architecture="qwen2moe", dense="Q8_0"),
        {"embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"},
    ),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return Packed(tmp_path_factory.mktemp("dense"), {name: make for name, (make, _) in CHECKPOINTS.items()})


def tiled(model: nn.Module) -> dict[str, TiledLayer]:
    return {path: module for path, module in model.named_modules() if isinstance(module, TiledLayer)}


def nbytes_of(model: nn.Module) -> int:
    """Of all tensors that it holds, once each."""
    return sum(one.nbytes for one in {one.data_ptr(): one for one in model.state_dict().values()}.values())


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_dequantised_models_numbers_in_the_memory_of_the_format(name: str, sources: Packed) -> None:
    (source, store), form = sources(name), FORMATS[name.split()[0]]
    reference = reference_of(source)
    with loaded(store.folder, memory="50%") as model:
        layers = tiled(model)
        assert {path.rpartition(".")[2] for path in layers} >= CHECKPOINTS[name][1]
        for path, layer in layers.items():
            assert torch.equal(layer.weight, reference.get_submodule(path).weight), path
        for length in (1, 5, 16, 17, 40):  # a token, some, and prompts, whose weights are decoded in between
            prompts = make_prompts(1, length=length)
            logits = logits_of(reference, prompts)
            torch.testing.assert_close(logits_of(model, prompts), logits, rtol=1e-4, atol=2e-5 * logits.abs().max())
        prompts = make_prompts(2, length=14)
        assert generate(model, prompts) == generate(reference, prompts)

        dense = expertly.stats(model).as_dict()["dense"]
        assert nbytes_of(model) == dense["bytes"] == store.dense_nbytes
        assert dense["formats"] == store.dense_by_format()
        kept, once = dense["formats"][form.name], {one.tiles.data_ptr(): one for one in layers.values()}.values()
        weights = sum(layer.weight.numel() for layer in once)
        assert kept == sum(one.tiles.nbytes for one in once if one._expertly_format is form)
        if form.name in ("int4_g32", "int4_g32_zeros_f16", "q4_k", "q6_k"):
            assert sum(one.tiles.nbytes for one in once) < weights * 2 / 2, "half of bfloat16"
        needs = needs_of(store.folder)
        assert (needs.dense_nbytes, needs.dense_by_format) == (store.dense_nbytes, dense["formats"])
        assert beside_experts(store, 4, torch.device("cpu")).dense_nbytes == store.dense_nbytes


def test_of_fp8_a_config_alone_says_as_much(sources: Packed) -> None:
    source, store = sources("fp8 qwen3_moe", torch.bfloat16)
    of_config, of_headers = needs_of(str(source / "config.json")), needs_of(str(source))
    assert of_config.dense_by_format == of_headers.dense_by_format == store.dense_by_format()
    assert (of_config.dense, of_config.layers) == (of_headers.dense, of_headers.layers)
    assert of_config.decoded_dense_nbytes == of_headers.decoded_dense_nbytes > of_config.dense_nbytes


@pytest.mark.parametrize("name", ["fp8 qwen3_moe", "q8_0 qwen2moe", "q6_k qwen3moe"])
def test_without_compiled_products_they_are_decoded_at_loading(
    name: str, sources: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "torch")
    source, store = sources(name)
    reference, prompts = reference_of(source), make_prompts(1, length=14)
    with loaded(store.folder, memory="50%") as model:
        assert not tiled(model) and generate(model, prompts) == generate(reference, prompts)
        decoded = expertly.stats(model).as_dict()["dense"]
        assert decoded["bytes"] == nbytes_of(model) > store.dense_nbytes
        assert beside_experts(store, 4, torch.device("cpu")).dense_nbytes == decoded["bytes"]


@pytest.mark.parametrize("name", ["fp8 qwen3_moe", "int4_g32 qwen3_moe"])
def test_models_in_bfloat16(name: str, sources: Packed) -> None:
    """Weights to the bit, their products rounded once; attention stays the kernels'."""
    source, store = sources(name, torch.bfloat16)
    reference, prompts = reference_of(source), make_prompts(2, length=14)
    with loaded(store.folder, memory="50%") as model:
        layers = tiled(model)
        assert {path.rpartition(".")[2] for path in layers} >= CHECKPOINTS[name][1]
        for path, layer in layers.items():
            weight = reference.get_submodule(path).weight
            assert torch.equal(layer.weight, weight)
            x = torch.randn(3, weight.shape[1], dtype=torch.bfloat16)
            with torch.no_grad():
                exact = x.double() @ weight.double().T
                assert bool(((layer(x).double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5 * exact.abs().max()).all())
        tokens = generate(model, prompts)
        assert name.startswith("int4") or tokens == generate(reference, prompts)  # those of int4 are near to others
        assert expertly.stats(model).as_dict()["kernels"]["attention"] > 0


def test_what_people_do_with_a_model(sources: Packed) -> None:
    _, store = sources("fp8 qwen3_moe")
    with loaded(store.folder, memory="50%") as model:
        path, layer = next(iter(tiled(model).items()))
        state = model.state_dict()
        assert state[f"{path}.tiles"].dtype == torch.uint8 and f"{path}.weight" not in state
        model.load_state_dict(state)
        assert "Linear(in_features=128" in repr(layer) and "format=fp8" in repr(layer)
        assert model.dtype == torch.float32 and model.to("cpu") is model
        for refused in (partial(model.save_pretrained, "nowhere"), model.half, partial(copy.deepcopy, model)):
            with pytest.raises(ModelUseError, match="experts are not in it"):
                refused()
        with pytest.raises(ModelUseError, match=r"keeps its bytes in fp8 .*dtype='float32'"):
            layer.weight = nn.Parameter(torch.zeros(32, 128))
        x = torch.randn(2, 128, requires_grad=True)
        (gradient,) = torch.autograd.grad(layer(x).sum(), x)
        torch.testing.assert_close(gradient, layer.weight.sum(0).expand(2, -1))
        assert layer(x[:0]).shape == (0, len(layer.weight))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            layer(x[:, :64])


def test_a_table_of_embeddings(sources: Packed) -> None:
    _, store = sources("q4_k qwen3moe")
    with loaded(store.folder, memory="50%") as model:
        table = model.get_input_embeddings()
        assert isinstance(table, TiledEmbedding)
        weight = table.weight
        ids = torch.tensor([[5, 127, 0, 5], [16, 77, 111, 33]])
        for some in (ids, ids[:, :1], ids[0], ids.int(), ids[:, :0], torch.tensor(9)):
            assert torch.equal(table(some), nn.functional.embedding(some, weight))
        for wrong in (-1, 128, 1 << 40):
            with pytest.raises(IndexError, match="index out of range"):
                table(torch.tensor([wrong]))


def test_a_table_that_is_the_head_stays_it(sources: Packed) -> None:
    """Whatever transformers' own methods do with embeddings; nobody can give it more rows."""
    source, store = sources("q6_k qwen3moe")
    expected = generate(reference_of(source), prompts := make_prompts(1))
    with loaded(store.folder, memory="50%") as model:
        model.tie_weights()
        assert model.resize_token_embeddings(128) is model.get_input_embeddings()
        for size in ({"new_num_tokens": 160}, {"new_num_tokens": 112}, {"pad_to_multiple_of": 96}):
            with pytest.raises(ModelUseError, match=r"resize_token_embeddings: .* in q6_k and .*dtype='float32'"):
                model.resize_token_embeddings(**size)
        model.load_state_dict(model.state_dict())
        assert torch.equal(model.get_output_embeddings().weight, model.get_input_embeddings().weight)
        assert generate(model, prompts) == expected


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('.q_proj": "fp8"', '.q_proj": "fp5"', r"dense_formats='fp5': accepted: mxfp4, fp8"),
        ("0.self_attn.q_proj", "9.self_attn.q_proj", r"another dense part: model.layers.9.self_attn.q_proj: .*pack it"),
        ("0.self_attn.q_proj", "0.input_layernorm", r"input_layernorm: a Qwen3MoeRMSNorm, not a linear layer or table"),
        ('.q_proj": "fp8"', '.q_proj": "q8_0"', r"the config asks for another shape of model.layers.0.*q_proj.tiles"),
    ],
)
def test_a_manifest_that_lies_is_refused(old: str, new: str, message: str, sources: Packed) -> None:
    _, store = sources("fp8 qwen3_moe")
    manifest = store.folder / MANIFEST_NAME
    text = manifest.read_text()
    try:
        manifest.write_text(text.replace(old, new, 1))
        with pytest.raises(ExpertlyError, match=message):
            expertly.load(store.folder, memory="50%", device="cpu")
    finally:
        manifest.write_text(text)


OUTPUTS = {"hidden_size": 192, "moe_intermediate_size": 320, "shared_expert_intermediate_size": 448, "head_dim": 40}
KEPT = {"hidden_size": 128, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 448, "head_dim": 48}
IN_BLOCKS: dict[str, tuple[str, Any, str, dict[str, Any], str | None]] = {
    "rows of 192, 320 and 448": ("qwen2_moe", 128, "weight_scale_inv", OUTPUTS, "float32"),
    "no squares, DeepSeek-V4's name": ("qwen3_moe", (64, 96), "scale", OUTPUTS, None),
    "a scale for each 32 of a row": ("qwen3_moe", (1, 32), "weight_scale_inv", OUTPUTS, None),
    "small layers": ("deepseek_v3", 48, "weight_scale_inv", {"hidden_size": 72, "moe_intermediate_size": 40}, None),
    "kept, by the other name": ("qwen2_moe", 128, "weight_scale", KEPT, None),
}
"""Of each case the family, the block, the end of the scales' names, sizes, and the dtype that is asked for."""


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_blocks_of_fp8_are_as_large_as_the_config_says(name: str, tmp_path: Path) -> None:
    """Rows and columns need not be whole blocks; transformers divides them evenly, so the reference is decoded here."""
    family, block, scale, sizes, dtype = IN_BLOCKS[name]
    source = make_fp8_checkpoint(family, tmp_path / "source", torch.float32, block, scale, **sizes)
    tensors, size = read_tensors(source), block if isinstance(block, tuple) else (block, block)
    decoded = {key: tensor for key, tensor in tensors.items() if not key.endswith(scale)}
    for key in [key for key, tensor in decoded.items() if tensor.dtype == torch.float8_e4m3fn]:
        scales = tensors[key.removesuffix("weight") + scale]
        decoded[key] = decoded[key].float() * spread_blocks(scales, size, *decoded[key].shape)
    store = pack(source, tmp_path / "store", dtype)
    assert store.manifest.stored_as == ("fp8" if "kept" in name else "float32")
    plain = write_checkpoint(tmp_path / "decoded", decoded, source, quantization_config=None)
    assert_computes(store.folder, load_dequantised(plain), [("lru", "50%", 1), ("lru", "50%", 4)])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (48,), (48, 1)])
def test_a_scale_of_a_whole_matrix_or_row(shape: tuple[int, ...]) -> None:
    """As AutoFP8 and others write them."""
    codes = torch.randn(48, 80).to(torch.float8_e4m3fn)
    scales, layout = torch.rand(shape) + 0.5, Fp8Layout({"weight_block_size": None}, "float32")
    layout.check("x", {".weight": ("F8_E4M3", (48, 80)), ".weight_scale_inv": ("F32", shape)})
    weight = layout.weight({".weight": codes, ".weight_scale_inv": scales})
    assert torch.equal(weight, codes.float() * scales.reshape(-1, 1))


@pytest.mark.parametrize(
    ("block", "scales", "message"),
    [
        ([128, 128], (2, 1), r"F32 \[2, 1\]: must be \[2, 2\] for \[160, 192\] weights"),
        ([128, 128], (1, 1), r"F32 \[1, 1\]: must be \[2, 2\]"),
        (None, (2, 2), r"F32 \[2, 3\]: must be \[192, 1\] or \[\] or"),
        ([128], (2, 2), r"weight_block_size=\[128\]: must be two whole numbers above 0, or null"),
        ([0, 128], (2, 2), r"weight_block_size=\[0, 128\]: must be two whole"),
        ([True, 128.0], (2, 2), r"weight_block_size=\[True, 128.0\]: must be two whole"),
    ],
)
def test_scales_that_are_not_those_of_the_blocks_are_refused(
    block: Any, scales: tuple[int, int], message: str, tmp_path: Path
) -> None:
    source = make_fp8_checkpoint("qwen3_moe", tmp_path / "source", torch.float32, 128, **OUTPUTS)

    def reshaped(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.ones(scales) if name.endswith("0.self_attn.q_proj.weight_scale_inv") else tensor

    change(source, reshaped)
    quantization = {"quant_method": "fp8", "weight_block_size": block}
    set_config(source, quantization_config=quantization)
    refused(source, CheckpointError, message, "float32")


def test_pack_says_what_it_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_int4_checkpoint(tmp_path / "source")
    asked = ["pack", str(source), "--out", str(tmp_path / "store")]
    assert main(asked) == 0
    assert re.search(r"; the rest .* with layers in int4_g32 \(.* in bfloat16\)", capsys.readouterr().err)
    assert main([*asked, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["dense_formats"].keys() == {"bfloat16", "int4_g32"}
    assert facts["dense_bytes"] == sum(facts["dense_formats"].values())
