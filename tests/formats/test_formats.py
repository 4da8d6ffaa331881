"""Every weight format: what is packed decodes to what transformers makes of it, by the reference and by each kernel."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import CompressedTensorsConfig, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import expertly
from expertly.core.errors import CheckpointError, ConfigError, StoreError, UnsupportedModelError
from expertly.core.geometry import LayerGeometry
from expertly.formats import FORMATS, ExpertFormat, check_format, expert_format
from expertly.lab.model_profile import measure_model
from expertly.lab.tune.search import Space
from expertly.model.packing import pack
from expertly.native.kernels import VARIABLE, Kernels, libraries
from expertly.sim.hardware import Hardware, read_geometry
from expertly.store.manifest import MANIFEST_NAME
from expertly.store.packed import PackedStore
from tests.engine.observe import loaded
from tests.families import generate, load_reference, logits_of, make_prompts
from tests.model.checkpoints import change, make_int4_checkpoint, make_mxfp4_checkpoint, read_tensors, set_config

AVAILABLE, WHY = libraries()
SIZES = [(1, 1, 3), (2, 3, 3), (4, 5, 2), (3, 23, 3)]  # I and H in groups, M
Matrix = tuple[tuple[torch.Tensor, ...], torch.Tensor]
"""The tensors of one matrix of a checkpoint, and its weights [rows, columns] as transformers has them."""


def mxfp4_matrix(dice: torch.Generator, rows: int, columns: int) -> Matrix:
    codes = torch.randint(0, 256, (rows, columns // 32, 16), generator=dice, dtype=torch.uint8)
    scales = torch.randint(110, 130, (rows, columns // 32), generator=dice, dtype=torch.uint8)
    scales[0, 0] = 0  # 2^-127 is no normal number
    return (codes, scales), convert_moe_packed_tensors(codes[None], scales[None], dtype=torch.float32)[0].T


def int4_matrix(dice: torch.Generator, rows: int, columns: int, group: int, dtype: torch.dtype) -> Matrix:
    """Every number with many scales: as compressed-tensors' formula has it, codes from 8 below."""
    codes = torch.randint(0, 256, (rows, columns // 2), generator=dice, dtype=torch.uint8)
    scales = torch.randn(rows, columns // group, generator=dice).to(dtype) * 0.02
    scales[0, 0] = 2**-24  # no normal number in float16
    numbers = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1).to(dtype) - 8
    weights = numbers * scales.repeat_interleave(group, 1)
    return (codes.view(torch.int32), scales, torch.tensor([rows, columns])), weights.float()


MATRICES: dict[str, Callable[[torch.Generator, int, int], Matrix]] = {
    "mxfp4": mxfp4_matrix,
    "int4_g32": partial(int4_matrix, group=32, dtype=torch.bfloat16),
    "int4_g128": partial(int4_matrix, group=128, dtype=torch.bfloat16),
    "int4_g32_f16": partial(int4_matrix, group=32, dtype=torch.float16),
    "int4_g128_f16": partial(int4_matrix, group=128, dtype=torch.float16),
}


def test_every_format_is_tested() -> None:
    assert set(MATRICES) == set(FORMATS)


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> ExpertFormat:
    return expert_format(request.param)


def made(form: ExpertFormat, width: int, hidden: int, num_matrices: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An expert's blocks, and its weights [I, M, H]."""
    dice = torch.Generator().manual_seed(width)
    shapes = [(width, hidden)] * (num_matrices - 1) + [(hidden, width)]
    forms = [form.inner] * (num_matrices - 1) + [form.down]
    matrices = [MATRICES[one.name](dice, *shape) for one, shape in zip(forms, shapes, strict=True)]
    *inner, down = (
        one.parts_of(tensors, *shape) for one, (tensors, _), shape in zip(forms, matrices, shapes, strict=True)
    )
    *weights, last = (weight for _, weight in matrices)
    return torch.from_numpy(form.pack(inner, down)), torch.stack([*weights, last.T], dim=1)


@pytest.mark.parametrize(("width", "hidden", "num_matrices"), SIZES)
def test_packed_is_what_transformers_loads(form: ExpertFormat, width: int, hidden: int, num_matrices: int) -> None:
    width, hidden = width * form.down.group, hidden * form.down.group
    blocks, weights = made(form, width, hidden, num_matrices)
    layer = form.geometry(LayerGeometry(8, 2, hidden, width, num_matrices, 2))
    assert blocks.shape == (width // layer.block_size, layer.block_nbytes) and blocks.nbytes == layer.expert_nbytes
    assert torch.equal(form.decode(blocks, num_matrices, hidden), weights)
    part = form.decode(blocks[-1:], num_matrices, hidden)  # a segment is a run of blocks
    assert torch.equal(part, weights[-layer.block_size :])


@pytest.mark.skipif(not AVAILABLE, reason=f"no compiled products: {WHY}")
@pytest.mark.parametrize("library", AVAILABLE, ids=lambda library: library.name)
@pytest.mark.parametrize(("width", "hidden", "num_matrices"), SIZES)
def test_kernels(form: ExpertFormat, library: Any, width: int, hidden: int, num_matrices: int) -> None:
    """Decoded weights to the bit; products within what sums in float32 may lose. Threads and the other experts of a
    call change nothing.
    """
    kernels = Kernels(library, "for a test")
    width, hidden = width * form.down.group, hidden * form.down.group
    blocks, weights = made(form, width, hidden, num_matrices)
    blocks = torch.cat((blocks, blocks.flip(0)))  # a second expert behind it
    address, dice = blocks.data_ptr(), torch.Generator().manual_seed(0)
    for dtype in kernels.dtypes:
        decoded = torch.full((width, num_matrices, hidden), torch.nan, dtype=dtype)
        kernels.tile_decode(form.kernels, address, decoded)
        assert torch.equal(decoded, weights.to(dtype))
        exact = weights.double()
        for n in (1, 2, 3, 4):
            x = torch.randn(n, hidden, generator=dice).to(dtype)
            h = torch.randn(n, width, generator=dice).to(dtype)
            inner = torch.full((num_matrices - 1, 2 * n, width), torch.nan, dtype=dtype)
            down = torch.full((2 * n, hidden), torch.nan, dtype=dtype)
            added = torch.ones(n, hidden)
            second = address + blocks.nbytes // 2
            kernels.tile_dots(form.kernels, (address, 0, n, n, second, 0, n, 0), x, inner)
            kernels.tile_sums(form.kernels, (address, 0, n, n, second, 0, n, 0), h, down, num_matrices - 1)
            kernels.tile_sums(form.kernels, (address, 0, n, 0), h, added, num_matrices - 1, adds=True)
            few = torch.finfo(dtype).eps
            for found, wanted, magnitude in (
                (inner[:, n:], torch.einsum("nh,imh->mni", x.double(), exact[:, :-1]), hidden),
                (down[n:], h.double() @ exact[:, -1], width),
                (added, 1 + h.double() @ exact[:, -1], width),
            ):
                eps = few if found.dtype == dtype else torch.finfo(found.dtype).eps
                bound = eps * wanted.abs() + 2**-22 * magnitude * exact.abs().max()
                assert bool(((found.double() - wanted).abs() <= bound).all())
            alone, threads = torch.empty(n, hidden, dtype=dtype), torch.get_num_threads()
            try:
                torch.set_num_threads(1)
                kernels.tile_sums(form.kernels, (address, 0, n, 0), h, alone, num_matrices - 1)
            finally:
                torch.set_num_threads(threads)
            assert torch.equal(alone, down[n:])


# -- whole models ------------------------------------------------------------------------------------------------------

CHECKPOINTS: dict[str, Callable[[Path, torch.dtype], Path]] = {
    "mxfp4": make_mxfp4_checkpoint,
    "int4_g32": partial(make_int4_checkpoint, group=32, scales=torch.bfloat16),
    "int4_g128": partial(make_int4_checkpoint, group=128, scales=torch.bfloat16),
    "int4_g32_f16": partial(make_int4_checkpoint, group=32, scales=torch.float16),
    "int4_g128_f16": partial(make_int4_checkpoint, group=128, scales=torch.float16),
}


def dequantised(form: ExpertFormat, source: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model that transformers makes of a checkpoint, all in the dtype of its config."""
    options = {}
    if form.name.startswith("int4"):
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    return load_reference(source, **options).to(dtype)  # experts stay in the dtype of their scales


SYSTEMS = [("lru", "25%"), ("expertly", "25%"), ("expertly", "60%"), ("moepic", "50%"), ("resident", "100%")]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, torch.dtype], Path]:
    folder, made = tmp_path_factory.mktemp("formats"), {}

    def checkpoint(name: str, dtype: torch.dtype) -> Path:
        key = f"{name}-{dtype}"
        if key not in made:
            made[key] = CHECKPOINTS[name](folder / key, dtype)
            pack(made[key], folder / f"{key}-store")
        return made[key]

    return checkpoint


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("segments", [1, 4])
def test_tokens_and_logits_are_those_of_the_dequantised_model(
    form: ExpertFormat, segments: int, kernels: str, checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "native" and not AVAILABLE:
        pytest.skip(WHY)
    monkeypatch.setenv(VARIABLE, kernels)
    source = checkpoints(form.name, torch.float32)
    reference, prompts = dequantised(form, source, torch.float32), make_prompts(2, length=14)
    tokens, logits = generate(reference, prompts), logits_of(reference, prompts)
    for system, memory in SYSTEMS if kernels == "native" else SYSTEMS[:1]:
        with loaded(Path(f"{source}-store"), memory=memory, system=system, segments=segments) as model:
            assert generate(model, prompts) == tokens, f"{system} {memory}"
            assert generate(model, prompts[:1]) == tokens[:1]
            torch.testing.assert_close(logits_of(model, prompts), logits, rtol=1e-4, atol=5e-5)
            stats = expertly.stats(model).as_dict()
        assert stats["kernels"]["name"].split()[0] == kernels
        assert (stats["kernels"]["native"] > 0) == (kernels == "native")
        assert system == "resident" or stats["phases"]["decode"]["bytes_loaded"] > 0


def test_experts_keep_their_bytes_unless_a_dtype_is_named(form: ExpertFormat, checkpoints: Any, tmp_path: Path) -> None:
    dtype = torch.float16 if form.name.endswith("f16") else torch.bfloat16
    name = str(dtype).removeprefix("torch.")
    kept = PackedStore.open(Path(f"{checkpoints(form.name, dtype)}-store"))
    assert (kept.manifest.stored_as, kept.manifest.dtype) == (form.name, name)
    kept.verify(full=True)
    source = checkpoints(form.name, torch.float32)
    converted = {one: pack(source, tmp_path / one, one) for one in (name, "float32")}
    assert [store.manifest.stored_as for store in converted.values()] == [name, "float32"]
    assert kept.experts_nbytes * 3 < converted[name].experts_nbytes
    prompts = make_prompts(1, length=14)
    with loaded(converted["float32"].folder, memory="50%") as model:
        assert generate(model, prompts) == generate(dequantised(form, source, torch.float32), prompts)
    with pytest.raises(ConfigError, match=r"dtype='float32': the packed store .* holds"):
        expertly.load(kept.folder, dtype="float32")


def test_bad_input_is_named(form: ExpertFormat, checkpoints: Any, tmp_path: Path) -> None:
    source = checkpoints(form.name, torch.float32)
    layer, name = PackedStore.open(Path(f"{source}-store")).manifest.layers[0], form.name
    blocks = rf"{layer.intermediate_size}, in blocks of {form.down.group} \({name}\)"
    with pytest.raises(ConfigError, match=f"segments=8: .*{blocks}; accepted up to 64: 1, 2, 4$"):
        expertly.load(Path(f"{source}-store"), segments=8)
    with pytest.raises(ConfigError, match=f"codec='planes': experts in {name} are not compressed"):
        pack(source, tmp_path / "planes", codec="planes")
    manifest = Path(f"{source}-store") / MANIFEST_NAME
    size, nbytes = layer.block_size, layer.block_nbytes
    must = f"must be {size} and {nbytes} in {name}"
    for old, new, message in (
        (f'"format": "{name}"', '"format": "mxfp5"', "format='mxfp5': unknown; accepted: mxfp4"),
        (
            f'"block_size": {size}',
            '"block_size": 64',
            f"=64, block_nbytes={nbytes}: {must}",
        ),
        (f'"block_nbytes": {nbytes}', '"block_nbytes": true', "block_nbytes=True: must be a whole number"),
    ):
        text = manifest.read_text()
        assert old in text
        try:
            manifest.write_text(text.replace(old, new, 1))
            with pytest.raises(StoreError, match=message):
                PackedStore.open(manifest.parent)
        finally:
            manifest.write_text(text)


@pytest.mark.parametrize(
    ("part", "spoil", "message"),
    [
        ("0.mlp.experts.gate_up_proj_scales", lambda tensor: None, "gate_up_proj"),
        ("down_proj_scales", lambda tensor: tensor[:, :, :1], r"_scales: U8 .*must be U8"),
        ("down_proj_scales", lambda tensor: tensor.fill_(255), "a scale of 255: must be at most 252"),
        ("down_proj_blocks", lambda tensor: tensor[..., :8], r"_blocks: U8 .*must be U8"),
        ("down_proj_blocks", lambda tensor: tensor.float(), r"_blocks: F32 .*must be U8"),
    ],
)
def test_a_damaged_checkpoint_is_refused(part: str, spoil: Any, message: str, tmp_path: Path) -> None:
    source = make_mxfp4_checkpoint(tmp_path / "source")
    change(source, lambda name, tensor: spoil(tensor) if name.endswith(part) else tensor)
    with pytest.raises(CheckpointError, match=message):
        pack(source, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def without(*endings: str) -> Any:
    return lambda name, tensor: None if name.endswith(endings) else tensor


def spoiled(ending: str, spoil: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return lambda name, tensor: spoil(tensor) if name.endswith(ending) else tensor


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("1.mlp.experts.3.up_proj.weight_scale"), r"experts\.3\.up_proj.*there is no .*up_proj\.weight_scale"),
        (without("self_attn.q_proj.weight_scale"), r"there is no .*self_attn\.q_proj\.weight_scale beside it"),
        (without("down_proj.weight_shape"), r"there is no .*down_proj\.weight_shape beside it"),
        (
            spoiled("down_proj.weight_scale", lambda one: one[:, :2]),
            r"BF16 \[64, 2\].*must be BF16 \[64, 4\]",
        ),
        (spoiled("down_proj.weight_scale", lambda one: one.float()), r"weight_scale.*F32 .*must be BF16"),
        (spoiled("0.down_proj.weight_scale", lambda one: one.half()), r"down_proj\.weight_scale.*unlike"),
        (
            spoiled("down_proj.weight_scale", lambda one: one * torch.nan),
            "a scale of nan in size: must be at most",
        ),
        (spoiled("down_proj.weight_scale", lambda one: one + 1e9), r"a scale of \S+e\+08 in size: must be at most"),
        (spoiled("up_proj.weight_packed", lambda one: one[:, :4]), r"weight_packed.*I32 .*must be I32 \[128, 8\]"),
        (spoiled("2.up_proj.weight_shape", lambda one: one * 2), r"a shape of \[256, 128\]: must be \[128, 64\]"),
    ],
)
def test_a_damaged_int4_checkpoint_is_refused(damage: Any, message: str, tmp_path: Path) -> None:
    source = make_int4_checkpoint(tmp_path / "source")
    change(source, damage)
    with pytest.raises(CheckpointError, match=message):
        pack(source, tmp_path / "store")
    assert not (tmp_path / "store" / MANIFEST_NAME).exists()


def test_other_tensors_of_an_int4_matrix_are_refused(tmp_path: Path) -> None:
    for ending, message in (
        ("weight_zero_point", "of asymmetric weights"),
        ("weight_g_idx", r"inputs in another order \(actorder 'group'\)"),
        ("weight_global_scale", "of NVFP4"),
    ):
        source = make_int4_checkpoint(tmp_path / ending)
        tensors = read_tensors(source)
        tensors[f"model.layers.0.mlp.experts.0.down_proj.{ending}"] = torch.zeros(4)
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=rf"down_proj\.{ending}': {message}.*accepted .*weight_scale"):
            pack(source, tmp_path / "store")
        assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("format", "nvfp4-pack-quantized", "'pack-quantized'"),
        ("format", "int-quantized", "'pack-quantized'"),
        ("config_groups", {}, "an object of one group"),
        ("config_groups.group_0.weights", None, "an object with `weights`"),
        ("config_groups.group_0.input_activations", {"num_bits": 8}, "None"),
        ("config_groups.group_0.weights.num_bits", 8, "4"),
        ("config_groups.group_0.weights.type", "float", "'int'"),
        ("config_groups.group_0.weights.strategy", "channel", "'group'"),
        ("config_groups.group_0.weights.group_size", 64, "32 or 128"),
        ("config_groups.group_0.weights.symmetric", False, "True"),
        ("config_groups.group_0.weights.actorder", "group", "None or .*'weight'"),
        ("transform_config", {"config_groups": {"u": {}}}, "None or {}"),
    ],
)
def test_other_schemes_of_compressed_tensors_are_refused(field: str, value: Any, accepted: str, tmp_path: Path) -> None:
    source = make_int4_checkpoint(tmp_path / "source")
    quantization = json.loads((source / "config.json").read_text())["quantization_config"]
    *parents, last = field.split(".")
    fields = quantization
    for name in parents:
        fields = fields[name]
    fields[last] = value
    set_config(source, quantization_config=quantization)
    for dtype in (None, "bfloat16"):
        with pytest.raises(UnsupportedModelError, match=rf"{last}.*must be {accepted}|group_0=.*must be {accepted}"):
            pack(source, tmp_path / "store", dtype)
    assert not (tmp_path / "store").exists()


def test_sizes_that_are_no_whole_blocks_are_refused_by_field(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="intermediate_size=48: mxfp4 needs a multiple of 32"):
        expert_format("mxfp4").geometry(LayerGeometry(8, 2, 64, 48, 3, 2))
    source = make_mxfp4_checkpoint(tmp_path / "source")
    set_config(source, intermediate_size=48)
    with pytest.raises(CheckpointError, match="intermediate_size=48: mxfp4 needs a multiple of 32"):
        pack(source, tmp_path / "store")


@pytest.mark.parametrize("num_blocks", [1, 6])
def test_a_model_whose_blocks_do_not_make_four_parts_is_measured(num_blocks: int, tmp_path: Path) -> None:
    """As those of gpt-oss do not, though its neurons do."""
    pack(make_mxfp4_checkpoint(tmp_path / "source", intermediate=32 * num_blocks), tmp_path / "store")
    with loaded(tmp_path / "store", memory="60%", system="lru") as model:
        measured = measure_model(model, seconds=0.2, tokens=(1, 4, 64))
    assert measured.compute.layer.format == "mxfp4" and min(measured.compute.expert_ns) > 0
    measured_on = Hardware.read("infinite").with_model(measured.link, measured.compute)
    measured_on.write(tmp_path / "here.toml")
    assert Hardware.read(str(tmp_path / "here.toml")) == measured_on


def test_tuning_tries_no_number_of_segments_that_blocks_do_not_make() -> None:
    layer = expert_format("mxfp4").geometry(LayerGeometry(8, 2, 64, 192, 3, 2))
    for layers, expected in (((layer,), {1, 2}), ((layer.unquantised(),), {1, 2, 4, 8})):
        space = Space(layers, 1 << 30)
        found = {one.system.segments for one in space.variations(space.named("lru"))}
        assert found == expected


def test_the_shipped_geometry_is_the_formats() -> None:
    for name, form in (("gpt-oss-20b-mxfp4", "mxfp4"), ("qwen3-30b-a3b-int4", "int4_g128")):
        for layer in read_geometry(name).layers:
            check_format(layer)
            assert layer.format == form


def test_blocks_of_random_bytes_decode_alike(form: ExpertFormat) -> None:
    """The kernels decode whatever bytes a slot holds as the reference does."""
    if not AVAILABLE:
        pytest.skip(WHY)
    dice = np.random.default_rng(3)
    size = 2 * form.down.group
    layer = form.geometry(LayerGeometry(1, 1, size, size, 3, 2))
    blocks = torch.from_numpy(dice.integers(0, 253, (2, layer.block_nbytes), np.uint8))
    if form.name.startswith("int4"):  # whose scales are checked when they are packed: here below 2
        tiles = blocks.view(2, -1, form.down.tile_nbytes)
        tiles[..., 16 * form.down.group // 2 + 1 :: 2] &= 0xBF
    wanted = form.decode(blocks, 3, size)
    for library in AVAILABLE:
        decoded = torch.empty(size, 3, size)
        Kernels(library, "for a test").tile_decode(form.kernels, blocks.data_ptr(), decoded)
        assert torch.equal(decoded, wanted)
