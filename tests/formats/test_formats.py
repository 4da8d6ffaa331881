"""Every weight format: what is packed decodes to what transformers makes of it, by the reference and by each kernel."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import expertly
from expertly.core.errors import CheckpointError, ConfigError, StoreError
from expertly.core.geometry import LayerGeometry
from expertly.formats import FORMATS, ExpertFormat, check_format, expert_format, tiles
from expertly.formats.gguf import GGUF_FORMATS
from expertly.lab.model_profile import measure_model
from expertly.lab.tune.search import Space
from expertly.model.packing import pack
from expertly.native.kernels import NO_DOWN, TASK_TOKENS, VARIABLE, Kernels, libraries
from expertly.sim.hardware import Hardware, read_geometry
from expertly.store.manifest import MANIFEST_NAME
from expertly.store.packed import PackedStore
from expertly.store.reader import ExpertFile
from tests.engine.observe import loaded
from tests.families import generate, logits_of, make_prompts
from tests.formats.gguf_files import gguf_blocks, make_gguf
from tests.formats.gptq_files import library_checkpoint
from tests.formats.references import reference_of
from tests.model.checkpoints import (
    assert_holds_what_transformers_loads,
    change,
    make_fp8_checkpoint,
    make_int4_checkpoint,
    make_mxfp4_checkpoint,
    refused,
    set_config,
)
from tests.native.between import with_biases
from tests.tables import IS_FULL, pairs

AVAILABLE, WHY = libraries()


def name_of(value: Any) -> str:
    return getattr(value, "name", str(value))


SIZES = [(1, 1, 3), (2, 3, 3), (4, 5, 2), (1, 90, 3)]  # groups of I, groups of H, M
MOST_HIDDEN = 2880
Matrix = tuple[tuple[torch.Tensor, ...], torch.Tensor]
"""The tensors of one matrix of a checkpoint, and its weights [rows, columns] as transformers has them."""


def mxfp4_matrix(dice: torch.Generator, rows: int, columns: int) -> Matrix:
    codes = torch.randint(0, 256, (rows, columns // 32, 16), generator=dice, dtype=torch.uint8)
    scales = torch.randint(110, 130, (rows, columns // 32), generator=dice, dtype=torch.uint8)
    scales[0, 0] = 0  # 2^-127 is no normal number
    return (codes, scales), convert_moe_packed_tensors(codes[None], scales[None], dtype=torch.float32)[0].T


def fp8_matrix(dice: torch.Generator, rows: int, columns: int) -> Matrix:
    codes = torch.randint(0, 256, (rows, columns), generator=dice, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0x80  # no number; -0
    scales = 2.0 ** (torch.rand(rows // 128, columns // 128, generator=dice) * 8 - 12)
    if scales.numel() > 3:  # zero, beyond normal numbers, negative
        scales.view(-1)[-3:] = torch.tensor([0.0, 1e-39, -0.011])
    weights = codes.view(torch.float8_e4m3fn)
    return (weights, scales), Fp8Dequantize(None)._dequantize_one(weights, scales, torch.float32)


def int4_matrix(dice: torch.Generator, rows: int, columns: int, group: int, dtype: torch.dtype) -> Matrix:
    """Every number with many scales: as compressed-tensors' formula has it, codes from 8 below."""
    codes = torch.randint(0, 256, (rows, columns // 2), generator=dice, dtype=torch.uint8)
    scales = torch.randn(rows, columns // group, generator=dice).to(dtype) * 0.02
    scales[0, 0] = 2**-24  # no normal number in float16
    numbers = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1).to(dtype) - 8
    weights = numbers * scales.repeat_interleave(group, 1)
    return (codes.view(torch.int32), scales, torch.tensor([rows, columns])), weights.float()


def awq_matrix(dice: torch.Generator, rows: int, columns: int, group: int, dtype: torch.dtype) -> Matrix:
    """Every number with every zero point. A word has 8 outputs, those at even places first."""
    sizes = columns, columns // group
    codes, zeros = (torch.randint(0, 16, (size, rows), generator=dice) for size in sizes)
    scales = (torch.randn(columns // group, rows, generator=dice) * 0.02).half()
    scales[0, 0] = 2**-24  # no normal number
    apart = (one.unflatten(1, (-1, 4, 2)).transpose(2, 3).flatten(2) for one in (codes, zeros))
    words, points = ((one << torch.arange(0, 32, 4)).sum(dim=-1).to(torch.int32) for one in apart)
    weights = (codes - zeros.repeat_interleave(group, 0)) * scales.to(dtype).repeat_interleave(group, 0)
    return (words, scales, points), weights.T.float()


def gguf_matrix(dice: torch.Generator, rows: int, columns: int, kind: str) -> Matrix:
    blocks = gguf_blocks(kind, (rows, columns), np.random.default_rng(dice.initial_seed()), std=0.01)
    weights = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    return (torch.from_numpy(blocks),), torch.from_numpy(weights)


MATRICES: dict[str, Callable[[torch.Generator, int, int], Matrix]] = {
    "mxfp4": mxfp4_matrix,
    "fp8": fp8_matrix,
    "int4_g32": partial(int4_matrix, group=32, dtype=torch.bfloat16),
    "int4_g128": partial(int4_matrix, group=128, dtype=torch.bfloat16),
    "int4_g32_f16": partial(int4_matrix, group=32, dtype=torch.float16),
    "int4_g128_f16": partial(int4_matrix, group=128, dtype=torch.float16),
    "int4_g32_zeros": partial(awq_matrix, group=32, dtype=torch.bfloat16),
    "int4_g128_zeros": partial(awq_matrix, group=128, dtype=torch.bfloat16),
    "int4_g32_zeros_f16": partial(awq_matrix, group=32, dtype=torch.float16),
    "int4_g128_zeros_f16": partial(awq_matrix, group=128, dtype=torch.float16),
    **{one.name: partial(gguf_matrix, kind=one.type) for one in GGUF_FORMATS},
}


def test_every_format_is_tested() -> None:
    assert set(MATRICES) == set(FORMATS)


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> ExpertFormat:
    return expert_format(request.param)


@pytest.fixture
def padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks have padding, although they are small."""
    monkeypatch.setattr(tiles, "_LEAST_SHARE", 1)


@lru_cache(maxsize=4)  # what several tests ask one after the other
def made(form: ExpertFormat, width: int, hidden: int, num_matrices: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An expert's blocks, and its weights [I, M, H]; sizes are in groups."""
    group = form.inner.group
    width, hidden = width * form.down.group, min(hidden, MOST_HIDDEN // group) * group
    dice = torch.Generator().manual_seed(width)
    shapes = [(width, hidden)] * (num_matrices - 1) + [(hidden, width)]
    forms = [form.inner] * (num_matrices - 1) + [form.down]
    matrices = [MATRICES[one.name](dice, *shape) for one, shape in zip(forms, shapes, strict=True)]
    *inner, down = (
        one.parts_of(tensors, *shape) for one, (tensors, _), shape in zip(forms, matrices, shapes, strict=True)
    )
    *weights, last = (weight for _, weight in matrices)
    return torch.from_numpy(np.concatenate(list(form.pack(inner, down)))), torch.stack([*weights, last.T], dim=1)


@pytest.mark.usefixtures("padding")
@pytest.mark.parametrize(("width", "hidden", "num_matrices"), SIZES)
def test_packed_is_what_transformers_loads(form: ExpertFormat, width: int, hidden: int, num_matrices: int) -> None:
    blocks, weights = made(form, width, hidden, num_matrices)
    width, _, hidden = weights.shape
    layer = form.geometry(LayerGeometry(8, 2, hidden, width, num_matrices, 2))
    assert blocks.shape == (width // layer.block_size, layer.block_nbytes) and blocks.nbytes == layer.expert_nbytes
    assert torch.equal(form.decode(blocks, num_matrices, hidden), weights)
    part = form.decode(blocks[-1:], num_matrices, hidden)  # a segment is a run of blocks
    assert torch.equal(part, weights[-layer.block_size :])
    assert form.decode(blocks.to("meta"), num_matrices, hidden).is_meta, "where the blocks are"


@pytest.mark.usefixtures("padding")
@pytest.mark.skipif(not AVAILABLE, reason=f"no compiled products: {WHY}")
@pytest.mark.parametrize(
    ("form", "library", "sizes"), sorted(pairs([*FORMATS], AVAILABLE, SIZES), key=str), indirect=["form"], ids=name_of
)
def test_kernels(form: ExpertFormat, library: Any, sizes: tuple[int, int, int]) -> None:
    """Decoded weights to the bit; products within what sums in float32 may lose. Threads and the other experts of a
    call change nothing.
    """
    kernels = Kernels(library, "for a test")
    blocks, weights = made(form, *sizes)
    blocks = torch.cat((blocks, blocks.flip(0)))  # a second expert behind it
    for dtype in (torch.float32,) if form.inner in GGUF_FORMATS else kernels.dtypes:  # that GGUF files are computed in
        if form.name.endswith("_f16") and dtype == torch.bfloat16:
            continue  # such experts are converted
        assert_decoded(kernels, form, blocks, weights.to(dtype))
        for n in (*range(1, TASK_TOKENS + 1), 17, 61):
            assert_products(kernels, form, blocks, weights.to(dtype), n)


def assert_decoded(kernels: Kernels, form: ExpertFormat, blocks: torch.Tensor, weights: torch.Tensor) -> None:
    """Tokens that have one number each find the weights, to the bit; denormal ones may count as 0."""
    (width, num_matrices, hidden), dtype, address = weights.shape, weights.dtype, blocks.data_ptr()
    inner, down = torch.empty(num_matrices - 1, hidden, width, dtype=dtype), torch.empty(width, hidden, dtype=dtype)
    kernels.tile_dots(form.kernels, blocks.shape[1], (address, 0, hidden, 0), torch.eye(hidden, dtype=dtype), inner)
    kernels.tile_sums(
        form.kernels, blocks.shape[1], (address, 0, width, 0), torch.eye(width, dtype=dtype), down, num_matrices - 1
    )
    found = torch.cat((inner.permute(2, 0, 1), down[:, None]), dim=1)
    assert bool(((found == weights) | (weights.abs() < torch.finfo(dtype).tiny) & (found == 0)).all())


def assert_products(kernels: Kernels, form: ExpertFormat, blocks: torch.Tensor, weights: torch.Tensor, n: int) -> None:
    """Of n of several prepared tokens: of few another expert has some in the same call, of a prompt's one has all."""
    (width, num_matrices, hidden), dtype = weights.shape, weights.dtype
    dice, exact, address = torch.Generator().manual_seed(n), weights.double(), blocks.data_ptr()
    x, h = (torch.randn(n + 3, size, generator=dice).to(dtype) for size in (hidden, width))
    inner = torch.full((num_matrices - 1, 2 * n + 1, width), 7.0, dtype=dtype)
    down, added = torch.full((2 * n + 1, hidden), 7.0, dtype=dtype), torch.full((n + 1, hidden), 7.0)
    task = (address, 2, n, 1)
    tasks = (*task, address + blocks.nbytes // 2, 0, n, n + 1) if n <= TASK_TOKENS else task
    kernels.tile_dots(form.kernels, blocks.shape[1], tasks, x, inner)
    kernels.tile_sums(form.kernels, blocks.shape[1], tasks, h, down, num_matrices - 1)
    kernels.tile_sums(form.kernels, blocks.shape[1], task, h, added, num_matrices - 1, adds=True)
    wanted_inner = torch.einsum("nh,imh->mni", x[2 : n + 2].double(), exact[:, :-1])
    wanted_down, most = h[2 : n + 2].double() @ exact[:, -1], float(exact.abs().max())
    for found, wanted, magnitude in (
        (inner, wanted_inner, hidden),
        (down, wanted_down, width),
        (added, 7 + wanted_down, width),
    ):
        before, found = found[..., 0, :], found[..., 1 : n + 1, :]
        bound = torch.finfo(found.dtype).eps * wanted.abs() + 2**-22 * magnitude * most
        assert bool((before == 7).all()) and bool(((found.double() - wanted).abs() <= bound).all())
    other, threads = torch.empty(n, hidden, dtype=dtype), torch.get_num_threads()
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        kernels.tile_sums(form.kernels, blocks.shape[1], (address, 2, n, 0), h, other, num_matrices - 1)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(other, down[1 : n + 1]), "however many threads"
    assert_one_call(kernels, form, blocks, x[2 : n + 2], (width, hidden, num_matrices))


def assert_one_call(
    kernels: Kernels, form: ExpertFormat, blocks: torch.Tensor, x: torch.Tensor, shape: tuple[int, int, int]
) -> None:
    """An expert in one call is its two products, with biases, and torch between them: to the bit in 16 bits, where the
    activation is a table; in float32 within what silu may differ by.
    """
    (width, hidden, num_matrices), n, address = shape, len(x), blocks.data_ptr()
    layer = with_biases(x.dtype, num_matrices - 1, hidden, width, form.kernels, (blocks.shape[1], 0))
    inner, expected = x.new_empty(num_matrices - 1, n, width), x.new_empty(n, hidden)
    kernels.tile_dots(form.kernels, blocks.shape[1], (address, 0, n, 0), x, inner)
    kernels.tile_sums(
        form.kernels, blocks.shape[1], (address, 0, n, 0), layer.between(inner), expected, num_matrices - 1
    )
    out = torch.full_like(expected, torch.nan)
    kernels.experts(layer.products, (address, n, 1), range(n), range(n), x, out, width, 0, adds=False)
    layer.assert_same(out, expected + layer.down_bias)
    added = torch.ones(n, hidden)
    kernels.experts(layer.products, (address, n, 1), range(n), range(n), x, added, width, 0, adds=True)
    off = (added - 1 - expected).abs() > 2**-6 * (1 + expected.abs())
    assert not bool((off & expected.isfinite()).any()), "no bias, not rounded"


@pytest.mark.skipif(not AVAILABLE, reason=f"no compiled products: {WHY}")
@pytest.mark.parametrize("library", AVAILABLE, ids=lambda library: library.name)
def test_a_matrix_by_itself(form: ExpertFormat, library: Any) -> None:
    """Of a linear layer: decoded to the bit, multiplied with its bias added before the product is rounded."""
    kernels, one = Kernels(library, "for a test"), form.inner
    rows, columns = 3 * one.group, 2 * one.group
    tensors, weights = MATRICES[one.name](torch.Generator().manual_seed(1), rows, columns)
    blocks = torch.from_numpy(one.pack(one.parts_of(tensors, rows, columns)))
    assert blocks.shape == (rows // 16, one.block_nbytes_of(rows, columns))
    assert torch.equal(one.decode(blocks), weights)
    formats, dice = (one.kernel, NO_DOWN), torch.Generator().manual_seed(0)
    for dtype in (torch.float32,) if one in GGUF_FORMATS else kernels.dtypes:
        if one.name.endswith("_f16") and dtype == torch.bfloat16:
            continue
        part = torch.full((rows - 16, columns), torch.nan, dtype=dtype)
        kernels.tile_decode(one.kernel, blocks[1:].data_ptr(), part)
        assert torch.equal(part, weights[16:].to(dtype))
        bias, address = torch.randn(rows, generator=dice).to(dtype), blocks.data_ptr()
        cases = (2, (address, 0, 1, 0, address, 1, 1, 1)), (100, (address, 0, 100, 0))
        for added, (num_tokens, tasks) in itertools.product((None, bias), cases):
            x = torch.randn(num_tokens, columns, generator=dice).to(dtype)
            out = torch.full((1, num_tokens, rows), torch.nan, dtype=dtype)
            kernels.tile_dots(formats, blocks.shape[1], tasks, x, out, added)
            exact = weights.to(dtype).double()
            wanted = x.double() @ exact.T + (0 if added is None else added.double())
            bound = torch.finfo(dtype).eps / 2 * wanted.abs() + 2**-21 * columns * exact.abs().max()
            assert bool(((out[0].double() - wanted).abs() <= bound).all())


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
}
SYSTEMS = [("lru", "25%", 1), ("expertly", "25%", 4)]
MORE = [("expertly", "60%", 1), ("moepic", "50%", 4), ("resident", "100%", 1)]  # one of them for each, in turn


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, torch.dtype], Path]:
    folder, made = tmp_path_factory.mktemp("formats"), {}

    def checkpoint(name: str, dtype: torch.dtype) -> Path:
        if name.startswith("fp8"):
            pytest.importorskip("accelerate", reason="transformers' own reading of it needs accelerate")
        key = f"{name}-{dtype}"
        if key not in made:
            made[key] = CHECKPOINTS[name](folder / key, dtype)
            pack(made[key], Path(f"{made[key]}-store"))
        return made[key]

    return checkpoint


@pytest.mark.parametrize(("number", "name"), enumerate(CHECKPOINTS))
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_tokens_and_logits_are_those_of_the_dequantised_model(
    number: int, name: str, kernels: str, checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "native" and not AVAILABLE:
        pytest.skip(WHY)
    monkeypatch.setenv(VARIABLE, kernels)
    source = checkpoints(name, torch.float32)
    reference, prompts = reference_of(source), make_prompts(2, length=14)
    tokens, logits = generate(reference, prompts), logits_of(reference, prompts)
    more = MORE if IS_FULL else [MORE[number % 3]]
    for system, memory, segments in [*SYSTEMS, *more] if kernels == "native" else SYSTEMS[1:]:
        with loaded(Path(f"{source}-store"), memory=memory, system=system, segments=segments) as model:
            assert generate(model, prompts) == tokens, f"{system} {memory} P={segments}"
            assert generate(model, prompts[:1]) == tokens[:1]
            torch.testing.assert_close(logits_of(model, prompts), logits, rtol=1e-4, atol=1e-5 * logits.abs().max())
            stats = expertly.stats(model).as_dict()
        assert stats["kernels"]["name"].split()[0] == kernels
        assert (stats["kernels"]["native"] > 0) == (kernels == "native")
        assert system == "resident" or stats["phases"]["decode"]["bytes_loaded"] > 0


@pytest.mark.parametrize("is_padded", [True, False])
@pytest.mark.parametrize("name", ["mxfp4 gpt_oss", "fp8 qwen3_moe", "q8_0 qwen3moe"])
def test_blocks_are_padded_so_that_reads_go_past_the_page_cache(
    name: str, is_padded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a store from before that, without padding, gives the same tokens."""
    source = CHECKPOINTS[name](tmp_path / "model", torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(tiles, "_LEAST_SHARE", 1 if is_padded else 1 << 40)
        store = pack(source, tmp_path / "store")
    monkeypatch.setattr(tiles, "_LEAST_SHARE", 1)
    layer = store.manifest.layers[0]
    padded = expert_format(layer.format).geometry(layer)
    assert padded.expert_nbytes % 4096 == 0 and (layer == padded) == is_padded
    assert layer.block_nbytes >= expert_format(layer.format).least_nbytes(layer.num_matrices, layer.hidden_size)
    reference, prompts = reference_of(source), make_prompts(2, length=14)
    with loaded(store.folder, memory="25%", system="lru") as model:
        assert generate(model, prompts) == generate(reference, prompts)
        stats = expertly.stats(model).as_dict()
    with contextlib.closing(ExpertFile(store.layer_file(0).path)) as file:
        if file.is_direct and is_padded:
            assert stats["bytes_disk"] > 0 == stats["bytes_buffered"]


def usual_dtype(name: str) -> torch.dtype:
    """Float32 of GGUF files, which have no other, and of int4, whose tokens are near to others in bfloat16."""
    return torch.float32 if name.startswith(("int4", "q")) else torch.bfloat16


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_experts_keep_their_bytes_unless_a_dtype_is_named(name: str, checkpoints: Any, tmp_path: Path) -> None:
    source, form = checkpoints(name, usual_dtype(name)), expert_format(name.split()[0])
    dtype, other = ("float32", "bfloat16") if usual_dtype(name) == torch.float32 else ("bfloat16", "float32")
    kept, converted = PackedStore.open(Path(f"{source}-store")), pack(source, tmp_path / "converted", dtype)
    assert (kept.manifest.stored_as, kept.manifest.dtype) == (form.name, dtype)
    assert converted.manifest.stored_as == dtype
    assert kept.experts_nbytes * 1.99 < converted.experts_nbytes
    kept.verify(full=True)
    reference = reference_of(source)
    if source.is_dir():
        assert_holds_what_transformers_loads(converted, source, reference)
    prompts = make_prompts(1, length=14)
    tokens = generate(reference, prompts)
    for store in (kept, converted):
        with loaded(store.folder, memory="50%") as model:
            assert generate(model, prompts) == tokens
    with pytest.raises(ConfigError, match=rf"dtype='{other}': the packed store .* holds"):
        expertly.load(kept.folder, dtype=other)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_bad_input_is_named(name: str, checkpoints: Any, tmp_path: Path) -> None:
    source = checkpoints(name, usual_dtype(name))
    layer = PackedStore.open(Path(f"{source}-store")).manifest.layers[0]
    form = expert_format(layer.format)
    size, nbytes, width = layer.block_size, layer.block_nbytes, layer.intermediate_size
    with pytest.raises(
        ConfigError, match=rf"segments=8: .*{width}, in blocks of {size} \({form.name}\); accepted up to 64: 1, 2, 4$"
    ):
        expertly.load(Path(f"{source}-store"), segments=8)
    with pytest.raises(ConfigError, match=f"codec='planes': experts in {form.name} are not compressed"):
        pack(source, tmp_path / "planes", codec="planes")
    manifest = Path(f"{source}-store") / MANIFEST_NAME
    for old, new, message in (
        (f'"format": "{form.name}"', '"format": "fp5"', "format='fp5': unknown; accepted: mxfp4, fp8, "),
        (
            f'"block_size": {size}',
            '"block_size": 64',
            f"block_size=64, block_nbytes={nbytes}: must be {size} and {nbytes} in {form.name}",
        ),
        (f'"block_nbytes": {nbytes}', '"block_nbytes": true', "block_nbytes=True: must be a whole number"),
    ):
        text = manifest.read_text()
        try:
            manifest.write_text(text.replace(old, new, 1))
            with pytest.raises(StoreError, match=message):
                PackedStore.open(manifest.parent)
        finally:
            manifest.write_text(text)


DAMAGE = [
    ("mxfp4 gpt_oss", "0.mlp.experts.gate_up_proj_scales", lambda tensor: None, "gate_up_proj"),
    ("mxfp4 gpt_oss", "down_proj_scales", lambda tensor: tensor[:, :, :1], r"_scales: U8 .*must be U8"),
    ("mxfp4 gpt_oss", "down_proj_scales", lambda tensor: tensor.fill_(255), "a scale of 255: must be at most 252"),
    ("mxfp4 gpt_oss", "down_proj_blocks", lambda tensor: tensor[..., :8], r"_blocks: U8 .*must be U8"),
    ("mxfp4 gpt_oss", "down_proj_blocks", lambda tensor: tensor.float(), r"_blocks: F32 .*must be U8"),
    ("fp8 qwen3_moe", "up_proj.weight_scale_inv", lambda tensor: None, r"there is no .*\.0\.up_proj\.weight_scale_inv"),
    ("fp8 qwen3_moe", "2.gate_proj.weight_scale_inv", lambda tensor: None, r"there is no .*\.2\.gate_proj\.weight_sca"),
    (
        "fp8 qwen3_moe",
        "2.gate_proj.weight",
        lambda tensor: None,
        "has 7 experts, but config.json says 8",
    ),
    (
        "fp8 qwen3_moe",
        "down_proj.weight_scale_inv",
        lambda tensor: tensor[:, :2],
        r"down_proj.weight_scale_inv': shape \[1, 2\]: must be \[1, 4\] for \[128, 512\] weights, as config.json",
    ),
    (
        "fp8 qwen3_moe",
        "down_proj.weight",
        lambda tensor: tensor.float().to(torch.float8_e5m2),
        "down_proj.weight: F8_E5M2 .* must be F8_E4M3",
    ),
    (
        "fp8 qwen3_moe",
        "3.up_proj.weight",
        lambda tensor: tensor.view(torch.uint8).index_fill(1, torch.tensor([7]), 0xFF).view(tensor.dtype),
        r"expert 3 of .*experts\.3\.up_proj\.weight, .*: a weight is 0x7f or 0xff",
    ),
    (
        "fp8 qwen3_moe",
        "5.down_proj.weight_scale_inv",
        lambda tensor: tensor.fill_(torch.inf),
        r"expert 5 of .*experts\.5\.down_proj\.weight_scale_inv: a scale is inf: must be finite",
    ),
]


@pytest.mark.parametrize(("name", "part", "spoil", "message"), DAMAGE)
def test_a_damaged_checkpoint_is_refused(name: str, part: str, spoil: Any, message: str, tmp_path: Path) -> None:
    source = CHECKPOINTS[name](tmp_path / "source", torch.bfloat16)
    change(source, lambda key, tensor: spoil(tensor) if key.endswith(part) and "self_attn" not in key else tensor)
    refused(source, CheckpointError, message)
    if "U8" in message:
        refused(source, CheckpointError, message, "float32")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8])
def test_scales_of_fp8_are_read_as_transformers_reads_them(dtype: torch.dtype) -> None:
    form, dice = FORMATS["fp8"], torch.Generator().manual_seed(5)
    weights = torch.randn(128, 256, generator=dice).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.0123, 0.5]])
    scales = torch.tensor([[117, 131]], dtype=torch.uint8) if dtype == torch.uint8 else scales.to(dtype)
    tiles = torch.from_numpy(
        form.tiles([part[:16].swapaxes(0, 1) for part in form.parts_of((weights, scales), 128, 256)])
    )
    wanted = Fp8Dequantize(None)._dequantize_one(weights, scales, torch.float32)[:16]
    assert torch.equal(form.decode_tiles(tiles).transpose(0, 1).flatten(1), wanted)


def test_sizes_that_are_no_whole_blocks_are_refused_by_field(tmp_path: Path) -> None:
    for name, group in (("mxfp4", 32), ("fp8", 128)):
        with pytest.raises(ConfigError, match=f"intermediate_size=48: {name} needs a multiple of {group}"):
            expert_format(name).geometry(LayerGeometry(8, 2, 128, 48, 3, 2))
    source = make_mxfp4_checkpoint(tmp_path / "source")
    set_config(source, intermediate_size=48)
    refused(source, CheckpointError, "intermediate_size=48: mxfp4 needs a multiple of 32")


@pytest.mark.parametrize("num_blocks", [1, 6])
def test_a_model_whose_blocks_do_not_make_four_parts_is_measured(num_blocks: int, tmp_path: Path) -> None:
    """As those of gpt-oss do not, though its neurons do."""
    pack(make_mxfp4_checkpoint(tmp_path / "source", intermediate=32 * num_blocks), tmp_path / "store")
    with loaded(tmp_path / "store", memory="60%", system="lru") as model:
        measured = measure_model(model, seconds=0.2, tokens=(1, 4, 64))
    assert measured.compute.layer.format == "mxfp4" and min(measured.compute.expert_ns) > 0
    measured_on = Hardware.read("infinite").with_model(measured.link, measured.compute, measured.predictor)
    measured_on.write(tmp_path / "here.toml")
    assert Hardware.read(str(tmp_path / "here.toml")) == measured_on


def test_tuning_tries_no_number_of_segments_that_blocks_do_not_make() -> None:
    layer = expert_format("mxfp4").geometry(LayerGeometry(8, 2, 64, 192, 3, 2))
    for layers, expected in (((layer,), {1, 2}), ((layer.unquantised(),), {1, 2, 4, 8})):
        space = Space(layers, 1 << 30)
        found = {one.system.segments for one in space.variations(space.named("lru"))}
        assert found == expected


def test_experts_that_are_not_quantised_stay_as_they_are_beside_dense_layers_in_fp8(tmp_path: Path) -> None:
    source = fp8_checkpoint("qwen3_moe", tmp_path / "source")

    def undone(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if ".experts." not in name:
            return tensor
        return None if name.endswith("scale_inv") else tensor.bfloat16()

    change(source, undone)
    assert pack(source, tmp_path / "store").manifest.stored_as == "bfloat16"


@pytest.mark.parametrize("name", ["gpt-oss-20b-mxfp4", "qwen3-30b-a3b-fp8", "qwen3-30b-a3b-int4", "deepseek-v3-fp8"])
def test_the_shipped_geometry_is_the_formats(name: str) -> None:
    for layer in read_geometry(name).layers:
        check_format(layer)
        assert layer.format.startswith(name.rpartition("-")[2])


def test_blocks_of_random_bytes_decode_alike(form: ExpertFormat) -> None:
    """The kernels decode whatever bytes a slot holds as the reference does."""
    if not AVAILABLE:
        pytest.skip(WHY)
    dice, one = np.random.default_rng(3), form.inner
    width = 2 * one.group
    shape = 16, one.block_nbytes_of(256, width)
    blocks = torch.from_numpy(dice.integers(0, 0xF6, shape, np.uint8))  # without NaN as a weight
    if form.name.startswith("int4"):  # whose scales are checked when they are packed: here below 2
        blocks.view(16, -1, one.tile_nbytes)[..., 8 * one.group + 1 :: 2] &= 0xBF
    wanted = one.decode(blocks)
    for library in AVAILABLE:
        decoded = torch.empty(256, width)
        Kernels(library, "for a test").tile_decode(one.kernel, blocks.data_ptr(), decoded)
        torch.testing.assert_close(decoded, wanted, rtol=0, atol=0, equal_nan=True)
