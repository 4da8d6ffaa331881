"""GGUF files as models: several types in a layer, split files, tokenizers, and what is refused by name."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, modeling_gguf_pytorch_utils

import expertly
from expertly.core.errors import CheckpointError, StoreError
from expertly.formats.gguf import OF_GGUF_TYPE, SCALED_NVFP4
from expertly.formats.matrix import Matrix
from expertly.model import gguf as model_gguf
from expertly.model import packing
from expertly.model.batching import end_tokens
from expertly.model.gguf import open_checkpoint
from expertly.model.needs import needs_of
from expertly.model.packing import pack, pack_cached
from expertly.native.kernels import VARIABLE, Kernels, libraries
from tests.engine.observe import loaded
from tests.families import NUM_EXPERTS, VOCAB_SIZE, generate, make_prompts
from tests.formats.gguf_files import SCALES, WORDS, load_gguf, make_gguf, set_scales
from tests.formats.references import Packed, assert_computes, assert_is_the_same, reference_of
from tests.model.checkpoints import refused
from tests.tables import pairs

SMALL = {"hidden": 64, "intermediate": 128}
DOWN = "blk.1.ffn_down_exps.weight"


MIXES: dict[str, tuple[str, str, str, str]] = {
    "i-quants": ("IQ2_XXS IQ2_XS IQ2_S", "IQ3_XXS IQ3_S IQ1_S", "IQ1_M IQ3_S IQ2_XS", "IQ2_S"),
    "beside 16 bits": ("Q4_K BF16 F16", "Q5_K F16 BF16", "BF16 Q6_K F16", "BF16"),
    "k-quants": ("Q2_K Q3_K IQ4_XS", "Q4_K Q2_K Q3_K", "Q3_K IQ4_XS Q6_K", "Q2_K"),
    "the first ones": ("Q4_0 Q4_1 MXFP4", "Q5_0 Q5_1 Q8_0", "Q5_K Q4_K Q6_K", "Q5_0"),
    "ternary": ("TQ1_0 TQ2_0 IQ4_NL", "Q8_0 IQ4_NL TQ1_0", "NVFP4 TQ2_0 Q5_1", "IQ4_XS"),
}
"""Types of gate, up and down in each layer, and of the dense part."""


def mixed(folder: Path, dtype: torch.dtype, name: str) -> Path:
    *inner, dense = MIXES[name]
    others: dict[str, str | None] = {
        f"blk.{layer}.ffn_{matrix}_exps.weight": kind
        for matrix, kinds in zip(("gate", "up", "down"), inner, strict=True)
        for layer, kind in enumerate(kinds.split())
    }
    others["token_embd.weight"] = dense
    return make_gguf(folder.with_suffix(".gguf"), dense=dense, others=others, intermediate=1024, std=0.05)


@pytest.fixture(scope="module")
def mixes(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return Packed(tmp_path_factory.mktemp("mixes"), {name: partial(mixed, name=name) for name in MIXES})


@pytest.mark.parametrize(
    ("name", "kernels"),
    [*((name, "auto") for name in MIXES), ("the first ones", "generic"), ("the first ones", "torch")],
)
def test_types_may_differ_between_layers_and_matrices(
    name: str, kernels: str, mixes: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, kernels)
    *inner, dense = MIXES[name]
    kinds = [kinds.split() for kinds in inner]
    path, store = mixes(name)
    store.verify()
    assert [layer.format for layer in store.manifest.layers] == [
        "+".join(OF_GGUF_TYPE[kind].name for kind in of) for of in zip(*kinds, strict=True)
    ]
    in_file = sum(ref.nbytes for name, ref in open_checkpoint(path).tensors.items() if "_exps" in name)
    assert in_file <= store.experts_nbytes <= 1.005 * in_file, "but for padding"
    assert set(store.manifest.dense_formats.values()) == {dense.lower(), "q8_0"}
    usages = [*pairs(("lru", "expertly-ahead"), ("25%", "100%"), (1, 2, 4)), ("moepic", "50%", 4)]
    few = usages if kernels == "auto" else [("expertly-ahead", "25%", 4)]
    assert_computes(store.folder, reference_of(path), few, near=1e-5)


def test_every_type_is_in_a_mix() -> None:
    assert {kind for kinds in MIXES.values() for kind in " ".join(kinds).split()} == OF_GGUF_TYPE.keys() - {
        SCALED_NVFP4
    }


def test_rows_need_not_be_whole_blocks_of_the_inner_matrices(tmp_path: Path) -> None:
    """As llama.cpp has them: down has smaller blocks."""
    others: dict[str, str | None] = {f"blk.{layer}.ffn_down_exps.weight": "Q5_0" for layer in range(3)}
    store = pack(make_gguf(tmp_path / "model.gguf", "Q4_K", others=others, intermediate=96), tmp_path / "store")
    assert store.manifest.stored_as == "q4_k+q5_0"
    assert_computes(store.folder, load_gguf(tmp_path / "model.gguf"), [("expertly", "30%", 1)], near=1e-5)


EXTREMES = (65504, -65504, 2**-24, -(2**-24), 0, -0.0, 2**-14, 1023 * 2**-24)
"""The largest float16 numbers, the smallest, and the smallest normal one."""


@pytest.mark.parametrize("kind", [kind for kind in OF_GGUF_TYPE if kind not in (SCALED_NVFP4, "BF16", "F16")])
def test_every_type_decodes_to_the_packages_numbers(kind: str) -> None:
    """To the bit, by each instruction set: random blocks, all bits 0 or 1, extreme scales."""
    form, dice, ggml = OF_GGUF_TYPE[kind], np.random.default_rng(3), gguf.GGMLQuantizationType[kind]
    size, nbytes = gguf.GGML_QUANT_SIZES[ggml]
    rows, columns = 48, 16 * size
    blocks = dice.integers(0, 256, (rows, 16, nbytes), dtype=np.uint8)
    blocks[:4] = np.array([0, 255, 127, 128])[:, None, None]
    if kind == "MXFP4":
        blocks[..., 0] = dice.integers(0, 253, (rows, 16))
    if kind == "NVFP4":
        blocks[..., :4] &= 127  # a scale whose top bit is set is refused
    for place in SCALES.get(kind, {}):
        set_scales(blocks, kind, place, dice.choice(EXTREMES, (rows, 16, 1)))
    tensor = torch.from_numpy(blocks.reshape(rows, -1))
    wanted = torch.from_numpy(gguf.quants.dequantize(tensor.numpy(), ggml))
    packed = torch.from_numpy(form.pack(form.parts_of(Matrix(tensor, tensor))))
    assert tensor.nbytes <= packed.nbytes <= 1.01 * tensor.nbytes, "but for NVFP4's scale of the matrix"
    assert torch.equal(form.decode(packed), wanted)
    for library in libraries():
        decoded = torch.empty(rows, columns)
        Kernels(library, "").tile_decode(form.kernel, packed.data_ptr(), decoded)
        assert torch.equal(decoded.view(torch.int32), wanted.view(torch.int32)), library.name
    for place in SCALES.get(kind, {}):
        for number in (np.inf, -np.inf, np.nan):
            spoilt = blocks.copy()
            set_scales(spoilt[7:8, 3], kind, place, np.array([[number]]))
            with pytest.raises(CheckpointError, match=f"a scale that is no finite number, in a block of {kind}"):
                form.parts_of(Matrix(torch.from_numpy(spoilt.reshape(rows, -1)), tensor))


@pytest.mark.parametrize("kind", ["BF16", "F16"])
def test_every_number_of_16_bits(kind: str) -> None:
    """NaN and infinity, too: it may be that no token uses the rows that hold them."""
    form, dtype = OF_GGUF_TYPE[kind], {"BF16": torch.bfloat16, "F16": torch.float16}[kind]
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)
    packed = torch.from_numpy(form.pack(form.parts_of(Matrix(numbers, numbers))))
    decoded = [numbers.float(), form.decode(packed)]
    for library in libraries():
        decoded.append(torch.empty(256, 256))
        Kernels(library, "").tile_decode(form.kernel, packed.data_ptr(), decoded[-1])
    expected, *made = [torch.where(each.isnan(), 0.5, each).view(torch.int32) for each in decoded]
    assert all(torch.equal(each, expected) for each in made)


NAMES = {"attn_q": "self_attn.q_proj.weight", "ffn_down_exps": "mlp.experts.down_proj"}
NAMES |= dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), "mlp.experts.gate_up_proj")


def test_scales_of_nvfp4_in_tensors_of_their_own(tmp_path: Path) -> None:
    """As llama.cpp's converter writes them, one for each expert; not where all are 1, as of gate in the first layer."""
    names = [f"blk.{layer}.{name}" for layer in range(3) for name in NAMES]
    names.remove("blk.0.ffn_gate_exps")
    more = {f"{name}.scale": (NUM_EXPERTS if "exps" in name else 1,) for name in names}
    more |= {f"{name}.input_scale": (1,) for name in names}
    others: dict[str, str | None] = {f"blk.{layer}.attn_q.weight": "NVFP4" for layer in range(3)}
    intermediate = 192
    sizes = {"hidden": 128, "intermediate": intermediate}
    path = make_gguf(tmp_path / "model.gguf", "NVFP4", others=others, more=more, **sizes)
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    reference = load_gguf(path)
    for name in names:
        _, layer, matrix = name.split(".")
        weight = reference.get_parameter(f"model.layers.{layer}.{NAMES[matrix]}").data
        half = {"ffn_gate_exps": slice(intermediate), "ffn_up_exps": slice(intermediate, None)}.get(matrix, slice(None))
        scales = torch.tensor(tensors[f"{name}.scale"]).view(-1, *(1,) * (weight.dim() - 1))
        (weight[:, half] if weight.dim() > 2 else weight).mul_(scales)
    store = pack(path, tmp_path / "store")
    assert [layer.format for layer in store.manifest.layers] == ["nvfp4_global"] * 3
    assert store.manifest.dense_formats["model.layers.1.self_attn.q_proj"] == "nvfp4_global"
    assert_computes(store.folder, reference, [("lru", "25%", 1), ("expertly", "100%", 1)])
    changed = {**more, "blk.1.ffn_up_exps.scale": (NUM_EXPERTS - 1,)}
    spoilt = make_gguf(tmp_path / "spoilt.gguf", "NVFP4", others=others, more=changed, **sizes)
    refused(spoilt, CheckpointError, r"'blk\.1\.ffn_up_exps\.scale': \[7\]: must be one for each matrix")
    refused(
        make_gguf(tmp_path / "q8.gguf", others={"blk.0.attn_q.weight": "Q8_0"}, more=more, **sizes),
        CheckpointError,
        r"blk\.0\.attn_q\.input_scale': is of no part",
    )


def test_a_layer_with_a_matrix_in_float32_is_decoded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One in 16 bits is kept beside quantised ones."""
    others: dict[str, str | None] = {DOWN: "F16", "blk.0.ffn_up_exps.weight": "F32"}
    path = make_gguf(tmp_path / "model.gguf", "Q8_0", others=others, **SMALL)
    store = pack(path, tmp_path / "store")
    assert [layer.format for layer in store.manifest.layers] == ["", "q8_0+f16", "q8_0"]
    assert "quantised experts of 1 layers are decoded" in caplog.text
    assert_computes(store.folder, load_gguf(path), [("lru", "50%", 1)])


@pytest.mark.parametrize(("experts", "dtype"), [("BF16", "bfloat16"), ("F16", "float16"), ("F32", "float32")])
def test_experts_that_are_not_quantised_keep_their_dtype(
    experts: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is beside them: the store has the experts' bytes, and the tokens are transformers' in that dtype."""
    monkeypatch.setenv(VARIABLE, "torch")
    path = make_gguf(tmp_path / "model.gguf", experts, dense="Q8_0", **SMALL)
    store = pack(path, tmp_path / "store")
    assert (store.manifest.stored_as, store.manifest.dtype) == (dtype, dtype)
    files = open_checkpoint(path)
    of_file = sum(ref.nbytes for name, ref in files.tensors.items() if name.endswith("_exps.weight"))
    assert store.experts_nbytes == of_file and needs_of(str(path)).dtype == dtype
    prompts = make_prompts(1, length=14)
    with loaded(store.folder, memory="50%") as model:
        assert generate(model, prompts) == generate(load_gguf(path, getattr(torch, dtype)), prompts)


def test_split_files_are_one_model(tmp_path: Path) -> None:
    whole = make_gguf(tmp_path / "whole.gguf", **SMALL)
    first = make_gguf(tmp_path / "model.gguf", split=14, **SMALL)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert len(parts) == 3 and first == parts[0]
    tokens = generate(load_gguf(whole), make_prompts(1, length=14))
    store = pack(parts[1], tmp_path / "store")
    assert store.manifest.source == str(first)
    with loaded(store.folder, memory="50%") as model:
        assert generate(model, make_prompts(1, length=14)) == tokens
    assert needs_of(str(first)).experts_nbytes == store.experts_nbytes


def test_load_takes_a_file_with_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path / "cache"))
    path = make_gguf(tmp_path / "model.gguf", words=WORDS, **SMALL)
    model, tokenizer = expertly.load(str(path), memory="50%")
    try:
        upstream = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
        ids = tokenizer("abc!")["input_ids"]
        assert ids == upstream("abc!")["input_ids"] and WORDS.index("ab") in ids
        assert tokenizer.decode(ids) == "abc!" and model.config.eos_token_id == VOCAB_SIZE - 1
    finally:
        expertly.unload(model)


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 24}
YARNED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
LINEAR = {"rope_type": "linear", "factor": 3.0}
ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "yarn": (YARN, YARNED),
    "yarn of its own scale": (
        YARN | {"rope.scaling.attn_factor": 1.5, "rope.scaling.yarn_ext_factor": 1.0},
        YARNED | {"attention_factor": 1.5 * (1 + 0.1 * math.log(4))},
    ),
    "yarn of its own range": (
        YARN | {"rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0},
        YARNED | {"beta_fast": 8.0, "beta_slow": 2.0},
    ),
    "yarn of the context": (
        YARN | {"rope.scaling.original_context_length": None},
        YARNED | {"original_max_position_embeddings": 512},
    ),
    "linear": ({"rope.scaling.type": "linear", "rope.scaling.factor": 3.0}, LINEAR),
    "linear, which nobody says": ({"rope.scaling.factor": 3.0}, LINEAR),
    "linear by the old name": ({"rope.scale_linear": 3.0}, LINEAR),
    "none": ({"rope.scaling.type": "none", "rope.scaling.factor": 3.0}, {}),
    "another base": ({"rope.freq_base": 500000.0}, {}),
    "the usual base": ({"rope.freq_base": None}, {"rope_theta": 10000.0}),
}
"""Metadata, and the rope_parameters of transformers for llama.cpp's rules."""


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        *(("qwen3moe", name) for name in ROPES),
        *((architecture, name) for architecture in ("qwen2moe", "minimax-m2") for name in ("yarn", "linear")),
    ],
)
def test_a_scaled_rope_is_that_of_the_metadata(architecture: str, name: str, tmp_path: Path) -> None:
    if architecture == "minimax-m2" and architecture not in modeling_gguf_pytorch_utils.TENSOR_PROCESSORS:
        pytest.skip("transformers has it since 5.24")
    metadata, rope = ROPES[name]
    path = make_gguf(tmp_path / "model.gguf", architecture=architecture, metadata=metadata, **SMALL)
    assert_is_the_same(path, load_gguf(path, **rope), tmp_path / "store", near=1e-5)


def test_weights_of_chosen_experts_are_normalised_where_the_file_says_so(tmp_path: Path) -> None:
    for architecture, usual in (("qwen2moe", False), ("qwen3moe", True)):
        for said in (None, True, False):
            metadata = {"expert_weights_norm": said}
            path = make_gguf(tmp_path / "model.gguf", architecture=architecture, metadata=metadata, **SMALL)
            assert open_checkpoint(path).config["norm_topk_prob"] == (usual if said is None else said)


# -- ends of answers ---------------------------------------------------------------------------------------------------

EOS = VOCAB_SIZE - 1

ENDS: dict[str, tuple[dict[int, str], dict[str, int], Any]] = {
    "only eos": ({}, {}, EOS),
    "eot and eom": ({}, {"eot": 5, "eom": 7}, [EOS, 5, 7]),
    "eot is eos": ({}, {"eot": EOS}, EOS),
    "chatml": ({5: "<|im_end|>", 6: "<|im_start|>", 9: "<|endoftext|>"}, {}, [EOS, 5, 9]),
    "llama 3": ({5: "<|eot_id|>", 6: "<|eom_id|>", 7: "<|end_of_text|>"}, {}, [EOS, 5, 6, 7]),
    "gpt-oss": ({5: "<|return|>", 6: "<|call|>", 7: "<|end|>", 9: "<|endoftext|>"}, {}, [EOS, 5, 6, 9]),
    "phi": ({7: "<|end|>"}, {}, [EOS, 7]),
    "gemma": ({5: "<end_of_turn>", 6: "<start_of_turn>"}, {}, [EOS, 5]),
    "another family's": ({5: "[EOT]", 6: "[EOS]", 7: "</s>"}, {}, [EOS, 5, 6, 7]),
}
"""Of each case the texts of control tokens, the ids in the metadata, and all ends."""


@pytest.mark.parametrize("name", ENDS)
def test_all_ends_of_an_answer_are_known(name: str, tmp_path: Path) -> None:
    control, ids, ends = ENDS[name]
    words = [control.get(number, word) for number, word in enumerate(WORDS)]
    metadata: dict[str, Any] = {f"tokenizer.ggml.{kind}_token_id": number for kind, number in ids.items()}
    for is_control in (True, False):
        kinds = [3 if is_control and number in control else 1 for number in range(VOCAB_SIZE)]
        metadata["tokenizer.ggml.token_type"] = kinds
        path = make_gguf(tmp_path / "model.gguf", words=words, metadata=metadata, **SMALL)
        found = open_checkpoint(path).config["eos_token_id"]
        assert (sorted(found) if isinstance(found, list) else found) == (
            (sorted(ends) if isinstance(ends, list) else ends) if is_control or not control else EOS
        )


def test_an_answer_ends_at_any_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path / "cache"))
    prompt = torch.tensor([[WORDS.index(letter) for letter in "abcdefg"]])

    def answer(words: list[str], control: int | None) -> list[int]:
        kinds = [3 if number == control else 1 for number in range(VOCAB_SIZE)]
        path = make_gguf(tmp_path / "model.gguf", words=words, metadata={"tokenizer.ggml.token_type": kinds}, **SMALL)
        model, tokenizer = expertly.load(str(path), memory="50%")
        try:
            ends = set(end_tokens(model))
            assert ends == {EOS, control} - {None} and tokenizer.eos_token_id == EOS
            output: list[int] = model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :].tolist()
            return output
        finally:
            expertly.unload(model)

    whole = answer(WORDS, None)
    called = whole[3]
    words = ["<|call|>" if number == called else word for number, word in enumerate(WORDS)]
    assert answer(words, called) == whole[: whole.index(called) + 1]


def test_a_store_of_another_reading_is_packed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that an older version made, which did not know YaRN."""
    monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path / "cache"))
    path = make_gguf(tmp_path / "model.gguf", metadata=YARN, **SMALL)
    named, cached = pack(path, tmp_path / "store"), pack_cached(path)
    assert pack(path, tmp_path / "store").folder == named.folder and pack_cached(path).folder == cached.folder
    read, checkpoint = model_gguf.open_checkpoint, open_checkpoint(path)
    rope = {"rope_type": "default"}
    older = replace(checkpoint, config={**checkpoint.config, "rope_parameters": rope}, reading=json.dumps(rope))
    monkeypatch.setattr(packing, "open_checkpoint", lambda path: older)
    with pytest.raises(StoreError, match=r"another checkpoint .*model\.gguf.*changed since"):
        pack(path, tmp_path / "store")
    assert pack_cached(path).config["rope_parameters"]["rope_type"] == "default"
    monkeypatch.setattr(packing, "open_checkpoint", read)
    assert pack_cached(path).config["rope_parameters"]["rope_type"] == "yarn"


# -- tensors that do not fit (tests/hostile has the rest) --------------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({DOWN: None}, r"no tensor for model\.layers\.1\.mlp\.experts\.down_proj"),
        ({"blk.0.attn_q.weight": None}, r"no tensor for model\.layers\.0\.self_attn\.q_proj"),
        ({"blk.0.ffn_up_exps.weight": "Q8_1"}, r"blk\.0\.ffn_up_exps\.weight': Q8_1 .*: must be BF16 or F16 .*Q8_0"),
    ],
)
def test_missing_and_mixed_tensors_are_refused(others: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "model.gguf", others=others, **SMALL)
    refused(path, CheckpointError, message)
