"""Every weight format: what is packed decodes to what transformers makes of it, and computes what that does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import expertly
from expertly.core.errors import CheckpointError, ConfigError, StoreError
from expertly.core.geometry import LayerGeometry
from expertly.formats import FORMATS, expert_format, tiles
from expertly.formats.fp8 import Fp8Layout
from expertly.model.packing import pack
from expertly.native.kernels import VARIABLE
from expertly.store.manifest import MANIFEST_NAME
from expertly.store.packed import PackedStore
from tests.engine.disk import can_bypass_the_page_cache
from tests.engine.observe import loaded
from tests.families import generate, make_prompts
from tests.formats.gguf_files import make_gguf
from tests.formats.matrices import MATRICES, SIZES, made
from tests.formats.references import Packed, assert_computes, library_checkpoint, reference_of
from tests.model.checkpoints import (
    assert_holds_what_transformers_loads,
    change,
    make_fp8_checkpoint,
    make_int4_checkpoint,
    make_mxfp4_checkpoint,
    refused,
    set_config,
)
from tests.tables import IS_FULL, crossed


def test_every_format_is_tested() -> None:
    assert set(MATRICES) == set(FORMATS)


EVERY = [*FORMATS, "q2_k+iq4_nl+q3_k", "q8_0+iq2_s+nvfp4_global"]


@pytest.mark.parametrize(("name", "sizes"), crossed(EVERY, SIZES[::2]) + crossed(EVERY, SIZES[1::2]))
def test_packed_is_what_transformers_loads(
    name: str, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native decoding of every size: native/test_tiles.py."""
    monkeypatch.setattr(tiles, "_LEAST_SHARE", 1)  # blocks have padding, although they are small
    form, num_matrices = expert_format(name), sizes[2]
    blocks, weights = made(form, *sizes)
    width, _, hidden = weights.shape
    layer = form.geometry(LayerGeometry(8, 2, hidden, width, num_matrices, 2))
    assert blocks.shape == (width // layer.block_size, layer.block_nbytes) and blocks.nbytes == layer.expert_nbytes
    assert torch.equal(form.decode(blocks, num_matrices, hidden), weights)
    part = form.decode(blocks[-1:], num_matrices, hidden)  # a segment is a run of blocks
    assert torch.equal(part, weights[-layer.block_size :])
    assert form.decode(blocks.to("meta"), num_matrices, hidden).is_meta, "where the blocks are"


# -- whole models ------------------------------------------------------------------------------------------------------


def fp8_checkpoint(family: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    return make_fp8_checkpoint(family, folder, dtype, 128, hidden_size=128, moe_intermediate_size=512)


def gguf_checkpoint(folder: Path, dtype: torch.dtype, kind: str, **sizes: int) -> Path:
    """Always in float32."""
    return make_gguf(folder.with_name(f"{folder.name}.gguf"), kind, **sizes)


CHECKPOINTS: dict[str, Callable[[Path, torch.dtype], Path]] = {  # by format and family; of four blocks an expert
    "mxfp4 gpt_oss": make_mxfp4_checkpoint,
    "fp8 qwen3_moe": partial(fp8_checkpoint, "qwen3_moe"),
    "fp8 deepseek_v3": partial(fp8_checkpoint, "deepseek_v3"),
    "int4_g32 qwen3_moe": make_int4_checkpoint,
    "int4_g128 qwen3_moe": partial(make_int4_checkpoint, group=128),
    "int4_g32_f16 gptq": library_checkpoint,
    "int4_g32_zeros_f16 gptq_v2": partial(library_checkpoint, name="gptq_v2"),
    "int4_g32_zeros_f16 autoawq": partial(library_checkpoint, name="autoawq"),
    "q8_0 qwen3moe": partial(gguf_checkpoint, kind="Q8_0", hidden=64, intermediate=128),
    "q4_k qwen3moe": partial(gguf_checkpoint, kind="Q4_K", hidden=256, intermediate=1024),
    "q2_k qwen3moe": partial(gguf_checkpoint, kind="Q2_K", hidden=256, intermediate=1024),
}
SYSTEMS = [("lru", "25%", 1), ("expertly", "25%", 4)]
MORE = [("expertly", "60%", 1), ("moepic", "50%", 4), ("resident", "100%", 1)]  # one of them for each, in turn


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return Packed(tmp_path_factory.mktemp("formats"), CHECKPOINTS)


@pytest.mark.parametrize(
    ("number", "name", "kernels"),
    [
        *((number, name, "auto") for number, name in enumerate(CHECKPOINTS)),
        *((0, name, "torch") for name in [*CHECKPOINTS][:: 1 if IS_FULL else 2]),
    ],
)
def test_tokens_and_logits_are_those_of_the_dequantised_model(
    number: int, name: str, kernels: str, checkpoints: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, kernels)
    source, store = checkpoints(name)
    more = MORE if IS_FULL else [MORE[number % 3]]
    usages = [*SYSTEMS, *more] if kernels == "auto" else SYSTEMS[1:]
    for stats in assert_computes(store.folder, reference_of(source), usages, near=1e-5):
        assert (stats["kernels"]["native"] > 0) == (kernels == "auto") == (stats["kernels"]["name"] != "torch")


@pytest.mark.parametrize("name", ["mxfp4 gpt_oss", "fp8 qwen3_moe", "q8_0 qwen3moe"])
def test_blocks_are_padded_so_that_reads_go_past_the_page_cache(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "_LEAST_SHARE", 1)
    source = CHECKPOINTS[name](tmp_path / "model", torch.float32)
    store = pack(source, tmp_path / "store")
    layer = store.manifest.layers[0]
    assert layer.expert_nbytes % 4096 == 0
    assert layer.block_nbytes > expert_format(layer.format).least_nbytes(layer.num_matrices, layer.hidden_size)
    (stats,) = assert_computes(store.folder, reference_of(source), [("lru", "25%", 1)])
    if can_bypass_the_page_cache(store.layer_file(0).path):
        assert stats["bytes_disk"] > 0 == stats["bytes_buffered"]


def usual_dtype(name: str) -> torch.dtype:
    """Float32 of GGUF files, which have no other, and of int4, whose tokens are near to others in bfloat16."""
    return torch.float32 if name.startswith(("int4", "q")) else torch.bfloat16


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_experts_keep_their_bytes_unless_a_dtype_is_named(name: str, checkpoints: Packed, tmp_path: Path) -> None:
    (source, kept), form = checkpoints(name, usual_dtype(name)), expert_format(name.split()[0])
    dtype, other = ("float32", "bfloat16") if usual_dtype(name) == torch.float32 else ("bfloat16", "float32")
    converted = pack(source, tmp_path / "converted", dtype)
    assert (kept.manifest.stored_as, kept.manifest.dtype) == (form.name, dtype)
    assert converted.manifest.stored_as == dtype
    assert kept.experts_nbytes * 1.99 < converted.experts_nbytes
    kept.verify()
    reference = reference_of(source)
    if source.is_dir():
        assert_holds_what_transformers_loads(converted, source, reference)
    prompts = make_prompts(1, length=14)
    with loaded(converted.folder, memory="50%") as model:
        assert generate(model, prompts) == generate(reference, prompts)
    with pytest.raises(ConfigError, match=rf"dtype='{other}': the packed store .* holds"):
        expertly.load(kept.folder, dtype=other)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_bad_input_is_named(name: str, checkpoints: Packed) -> None:
    _, store = checkpoints(name, usual_dtype(name))
    layer = store.manifest.layers[0]
    form = expert_format(layer.format)
    size, nbytes, width = layer.block_size, layer.block_nbytes, layer.intermediate_size
    with pytest.raises(
        ConfigError, match=rf"segments=8: .*{width}, in blocks of {size} \({form.name}\); accepted up to 64: 1, 2, 4$"
    ):
        store.geometry(8)
    manifest = store.folder / MANIFEST_NAME
    for old, new, message in (
        (f'"format": "{form.name}"', '"format": "fp5"', "format='fp5': unknown; accepted: mxfp4, fp8, "),
        (
            f'"block_size": {size}',
            '"block_size": 64',
            f"block_size=64, block_nbytes={nbytes}: must be {size} and {nbytes} in {form.name}",
        ),
        (f'"block_nbytes": {nbytes}', '"block_nbytes": true', "block_nbytes=True: must be a valid integer"),
    ):
        text = manifest.read_text()
        try:
            manifest.write_text(text.replace(old, new, 1))
            with pytest.raises(StoreError, match=message):
                PackedStore.open(manifest.parent)
        finally:
            manifest.write_text(text)


def without(tensor: torch.Tensor) -> None:
    return None


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).index_fill(1, torch.tensor([7]), 0xFF).view(tensor.dtype)


MX, FP = "mxfp4 gpt_oss", "fp8 qwen3_moe"
DAMAGE: list[tuple[str, str, Any, str]] = [
    (MX, "0.mlp.experts.gate_up_proj_scales", without, "gate_up_proj"),
    (MX, "down_proj_scales", lambda tensor: tensor[:, :, :1], r"_blocks': U8 .*must be \["),
    (MX, "down_proj_scales", lambda tensor: tensor.fill_(255), "a scale of 255: must be at most 252"),
    (MX, "down_proj_blocks", lambda tensor: tensor[..., :8], r"_blocks': U8 .*must be \["),
    (FP, "up_proj.weight_scale_inv", without, r"there is no .*\.0\.up_proj\.weight_scale_inv"),
    (
        FP,
        "down_proj.weight_scale_inv",
        lambda tensor: tensor[:, :2],
        r"F32 \[1, 2\]: must be \[1, 4\] for \[128, 512\] w",
    ),
    (FP, "3.up_proj.weight", with_nan, r"expert 3 of .*experts\.3\.up_proj\.weight, .*: a weight is 0x7f or 0xff"),
    (FP, "5.down_proj.weight_scale_inv", lambda tensor: tensor.fill_(torch.inf), r"expert 5 of .*: a scale is inf"),
    (FP, "1.self_attn.k_proj.weight_scale_inv", lambda tensor: tensor.fill_(torch.inf), r"k_proj\.weight.*is inf"),
]


@pytest.mark.parametrize(("name", "part", "spoil", "message"), DAMAGE)
def test_a_damaged_checkpoint_is_refused(name: str, part: str, spoil: Any, message: str, tmp_path: Path) -> None:
    source = CHECKPOINTS[name](tmp_path / "source", torch.bfloat16)
    change(
        source,
        lambda key, tensor: (
            spoil(tensor) if key.endswith(part) and ("self_attn" in part) >= ("self_attn" in key) else tensor
        ),
    )
    refused(source, CheckpointError, message)
    if "U8" in message:
        refused(source, CheckpointError, message, "float32")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8])
def test_scales_of_fp8_are_read_as_transformers_reads_them(dtype: torch.dtype) -> None:
    form, dice = FORMATS["fp8"], torch.Generator().manual_seed(5)
    weights = torch.randn(128, 256, generator=dice).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.0123, 0.5]])
    scales = torch.tensor([[117, 131]], dtype=torch.uint8) if dtype == torch.uint8 else scales.to(dtype)
    parts = form.parts_of(Fp8Layout({}, "float32").read({".weight": weights, ".weight_scale_inv": scales}))
    tiles = torch.from_numpy(form.tiles([part[:16].swapaxes(0, 1) for part in parts]))
    wanted = Fp8Dequantize(None)._dequantize_one(weights, scales, torch.float32)[:16]
    assert torch.equal(form.decode_tiles(tiles).transpose(0, 1).flatten(1), wanted)


def test_sizes_that_are_no_whole_blocks_are_refused_by_field(tmp_path: Path) -> None:
    source = make_mxfp4_checkpoint(tmp_path / "source")
    set_config(source, intermediate_size=48)
    refused(
        source, CheckpointError, r"gate_up_proj_blocks. is of \[256, 64\] weights; must be \[96, 64\], as config.json"
    )


def test_experts_that_are_not_quantised_stay_as_they_are_beside_dense_layers_in_fp8(tmp_path: Path) -> None:
    source = fp8_checkpoint("qwen3_moe", tmp_path / "source")

    def undone(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if ".experts." not in name:
            return tensor
        return None if name.endswith("scale_inv") else tensor.bfloat16()

    change(source, undone)
    assert pack(source, tmp_path / "store").manifest.stored_as == "bfloat16"
