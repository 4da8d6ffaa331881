"""GGUF files, their metadata or bytes changed: a run ends in one line that names file and key, or in text."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from expertly.core.errors import CheckpointError
from expertly.model.packing import pack
from tests.formats.gguf_files import WORDS, make_gguf, set_metadata, set_strings, write_file
from tests.hostile.cases import run_command

KIND = gguf.GGUFValueType
NAN, INF = math.nan, math.inf
WHOLE = "must be a whole number from 1 to 2147483647"
"""What is said of most sizes."""


def make(path: Path, **changes: Any) -> Path:
    return make_gguf(path, **{"hidden": 64, "intermediate": 32, "words": WORDS} | changes)


def refused(path: Path, sentence: str) -> None:
    """Packing it fails in one line that says `sentence`, or one of several between bars."""
    with pytest.raises(CheckpointError) as raised:
        pack(path, path.with_name("store"))
    said = str(raised.value)
    assert any(part in said for part in sentence.split("|")), f"expected: {sentence}\nsaid: {said}"
    assert "\n" not in said and len(said) < 900 and not list(path.parent.glob("store*"))


Metadata = dict[str, Any]

METADATA: dict[str, tuple[Metadata, str]] = {
    "yarn without a number": ({"rope.scaling.type": "yarn", "rope.scaling.factor": NAN}, "rope.scaling.factor=nan"),
    "an unknown scaling": ({"rope.scaling.type": "longrope"}, "qwen3moe.rope.scaling.type='longrope': must be 'none'"),
    "a negative factor": ({"rope.scaling.factor": -4.0}, "rope.scaling.factor=-4.0: must be a number above 0"),
    "attention scaled without yarn": ({"rope.scaling.attn_factor": 1.5}, "attn_factor=1.5: must be 1.0 with 'linear'"),
    "yarn mixed otherwise": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_ext_factor": 0.5},
        "yarn_ext_factor=0.5: must be 1.0",
    ),
    "yarn of a short length": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.original_context_length": 4},
        "original_context_length=4: must be longer",
    ),
    "half a rope": ({"rope.dimension_count": 8}, "rope.dimension_count=8: must be even, and 16, the width of a head"),
    "a rope in sections": ({"rope.dimension_sections": [8, 4, 4, 0]}, "rope.dimension_sections=a list of 4 numbers"),
    "two bases": ({"rope.freq_base_swa": 5000.0}, "rope.freq_base_swa=5000.0: must be 10000.0"),
    "an epsilon that is no number": ({"attention.layer_norm_rms_epsilon": NAN}, "layer_norm_rms_epsilon=nan: must be"),
    "a window": ({"attention.sliding_window": 16}, "attention.sliding_window=16: not supported; accepted: 0"),
    "scaled attention": ({"attention.scale": 0.5}, "attention.scale=0.5: must be 0.25"),
    "scaled experts": ({"expert_weights_scale": 2.5}, "expert_weights_scale=2.5: not supported; accepted: 0 or 1"),
    "experts by sigmoid": ({"expert_gating_func": 2}, "expert_gating_func=2: not supported"),
    "another layout": ({"tensor_data_layout": "Meta AI original pth"}, "tensor_data_layout='Meta AI original pth'"),
    "an unknown key": ({"attention.novel_bias": 1.0}, "qwen3moe.attention.novel_bias=1.0: a key that is not supported"),
    "a long unknown key": ({"k" * 60_000: 1.0}, "a key that is not supported"),
    "no heads": ({"attention.head_count": 0}, f"attention.head_count=0: {WHOLE}"),
    "heads that do not divide": ({"attention.head_count_kv": 3}, "attention.head_count_kv=3: must be a divisor of 4"),
    "a long context": ({"context_length": (1 << 60, KIND.UINT64)}, f"context_length=1152921504606846976: {WHOLE}"),
    "layers less": ({"block_count": 2}, ": is of no part of a qwen3moe model of 2 layers"),
    "layers more": ({"block_count": 4}, "no tensor for model.layers.3"),
    "a list of layers": ({"block_count": [3, 3, 3]}, "block_count=a list of 3 numbers"),
    "a width in words": ({"embedding_length": ["64"]}, "embedding_length=a list of 1 texts"),
    "more experts": ({"expert_count": 16}, "holds 8 experts, but its metadata says 16"),
    "wider experts": ({"expert_feed_forward_length": 64}, "of [32, 64] weights; must be [64, 64], as its metadata has"),
    "more used than there are": ({"expert_used_count": 9}, "expert_used_count=9: must be at most 8"),
    "a layer that is none for further tokens": ({"nextn_predict_layers": 1}, "layer 2 has no tensor blk.2.nextn.*"),
    "a part of a model": ({"split.count": 3, "split.no": 0}, "split.no=0, split.count=3: disagree with its name"),
    "an unknown architecture": ({"general.architecture": "plamo2"}, "general.architecture='plamo2': accepted"),
    # -- the vocabulary ------------------------------------------------------------------------------------------------
    "a negative end": ({"tokenizer.ggml.eot_token_id": (-1, KIND.INT32)}, "eot_token_id=-1: must be a token's number"),
    "another kind of words": ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model='rwkv': accepted: gpt2, llama"),
    "words split otherwise": ({"tokenizer.ggml.pre": "nonesuch"}, "tokenizer.ggml.pre='nonesuch': accepted: qwen2"),
    "no words": ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens=None: must be a list of texts"),
    "more words than rows": ({"tokenizer.ggml.tokens": [*WORDS, "more"]}, "129 tokens: must be 1 to 128"),
    "fewer types": ({"tokenizer.ggml.token_type": [1] * 9}, "tokenizer.ggml.token_type: 9 entries: must be 128"),
    "a great many merges": ({"tokenizer.ggml.merges": ["a b"] * 3000}, "merges: 3000 entries; accepted: 16 for each"),
    "merges of unknown words": ({"tokenizer.ggml.merges": ["xyz zyx"]}, "its tokenizer cannot be read"),
    "a long template": (
        {"tokenizer.chat_template": "x" * (1 << 20 | 1)},
        "a string of 1048577 bytes; accepted: 1048576",
    ),
    "adding yes": (
        {"tokenizer.ggml.add_bos_token": "yes"},
        "tokenizer.ggml.add_bos_token='yes': must be true or false",
    ),
}
"""Of each case the metadata that is changed, and what is said of it."""


BESIDE_MODELS: dict[str, tuple[str, Metadata, str]] = {
    "an encoder": ("clip", {"general.type": "mmproj"}, "general.type='mmproj': an encoder of images or sound"),
    "an imatrix": ("qwen3moe", {"general.type": "imatrix", "general.architecture": None}, "an importance matrix"),
    "an adapter": ("qwen3moe", {"general.type": "adapter"}, "an adapter (LoRA) for a model; merge it into that"),
    "git's pointer": ("", {}, "model.gguf: is a git-lfs pointer, not the file: run git lfs pull"),
}


@pytest.mark.parametrize("name", BESIDE_MODELS)
def test_what_is_beside_a_model_is_named_for_what_it_is(name: str, tmp_path: Path) -> None:
    architecture, metadata, sentence = BESIDE_MODELS[name]
    path = tmp_path / "model.gguf"
    if architecture:
        writer = gguf.GGUFWriter(path, architecture)
        set_metadata(writer, architecture, metadata)
        writer.add_tensor("blk.0.attn_q.weight", np.zeros((4, 4), np.float32))
        write_file(writer)
    else:
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 4976698672\n")
    refused(path, sentence)


@pytest.mark.parametrize("name", METADATA)
def test_metadata_that_cannot_be_is_refused_by_its_key(name: str, tmp_path: Path) -> None:
    metadata, sentence = METADATA[name]
    refused(make(tmp_path / "model.gguf", metadata=metadata), sentence)


@pytest.mark.parametrize("name", ["an unknown scaling", "merges of unknown words", "a long unknown key", "layers less"])
def test_a_command_says_so_in_one_line(name: str, imported: Any, tmp_path: Path) -> None:
    metadata, sentence = METADATA[name]
    path = make(tmp_path / "model.gguf", metadata=metadata)
    run_command(imported, tmp_path, "run", str(path), "abc", "--max-new-tokens", "2").is_refused(sentence)


def _instead(name: str, *shape: int) -> dict[str, Any]:
    """Changes that put another tensor in a tensor's place."""
    return {"others": {name: None}, "more": {name: shape}}


TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "frequencies of the rope": (
        {"more": {"rope_freqs.weight": (8,)}},
        "rope_freqs.weight: F32 [8]: not what such a model has",
    ),
    "a router's bias": ({"more": {"blk.1.exp_probs_b.bias": (8,)}}, "'blk.1.exp_probs_b.bias': is of no part"),
    "a table of one dimension": (_instead("token_embd.weight", 128 * 64), "no tensor token_embd.weight of two"),
    "a router that is turned": (
        _instead("blk.0.ffn_gate_inp.weight", 64, 8),
        "shape [64, 8], but its metadata makes it [8, 64]",
    ),
    "experts of two dimensions": (_instead("blk.0.ffn_down_exps.weight", 512, 32), "down_exps|down_proj"),
    "no table": ({"others": {"token_embd.weight": None}}, "no tensor token_embd.weight"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_no_part_of_the_model_are_refused_by_name(name: str, tmp_path: Path) -> None:
    changes, sentence = TENSORS[name]
    refused(make(tmp_path / "model.gguf", **changes), sentence)


# -- bytes -------------------------------------------------------------------------------------------------------------


def number(place: int, code: str, value: int) -> Callable[[bytearray], None]:
    return lambda data: struct.pack_into(f"<{code}", data, place, value)


def of(name: str, skip: int, code: str, value: int) -> Callable[[bytearray], None]:
    """A number behind the name of a field (type, value) or of a tensor (dimensions, sizes, type, offset)."""

    def change(data: bytearray) -> None:
        key = struct.pack("<Q", len(name)) + name.encode()
        struct.pack_into(f"<{code}", data, data.index(key) + len(key) + skip, value)

    return change


def offset_of(name: str, other: str) -> Callable[[bytearray], None]:
    """Give a matrix the offset of another."""

    def change(data: bytearray) -> None:
        places = [data.index(struct.pack("<Q", len(one)) + one.encode()) + 8 + len(one) + 24 for one in (name, other)]
        data[places[0] : places[0] + 8] = data[places[1] : places[1] + 8]

    return change


def replaced(before: bytes, after: bytes) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[:] = data.replace(before, after, 1)

    return change


def with_list(key: str, num: int, raw: bytes, kind: int = 8) -> Callable[[bytearray], None]:
    """A further list in the metadata, of `num` values whose bytes are `raw`; what follows stays aligned."""

    def change(data: bytearray) -> None:
        (fields,) = struct.unpack_from("<Q", data, 16)
        name = key + "_" * (-(24 + len(key) + len(raw)) % 32)
        entry = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<IIQ", 9, kind, num) + raw
        data[16:24] = struct.pack("<Q", fields + 1) + entry

    return change


Q, K, DOWN = "blk.0.attn_q.weight", "blk.1.attn_q.weight", "blk.1.ffn_down_exps.weight"

BYTES: dict[str, tuple[Callable[[bytearray], None], str]] = {
    "overlapping tensors": (offset_of(Q, K), "leaves unused bytes after what is before it"),
    "a tensor in another": (offset_of(K, Q), "overlaps what is before it"),
    "bytes behind the tensors": (lambda data: data.extend(b"\0" * 32), "32 bytes at the end belong to no tensor"),
    "big-endian": (lambda data: data.__setitem__(slice(4, 8), b"\0\0\0\3"), "in big-endian order, of version 3"),
    "millions of tensors": (number(8, "Q", 70_000), "tensor_count"),
    "millions of empty texts": (with_list("general.tags", 6_000_000, b"\0" * 48_000_000), "accepted: 2097152 in all"),
    "many texts": (
        with_list("qwen3moe.words", 2_000_000, b"\0" * 16_000_000),
        "=a list of 2000000 texts: a key that is",
    ),
    "a text of more than there is": (
        with_list("general.tags", 1, b"\xff" * 8),
        "a string of 18446744073709551615 bytes",
    ),
    "a long text of a list": (
        with_list("general.tags", 1, struct.pack("<Q", 2 << 20) + b"x" * (2 << 20)),
        "of 2097152",
    ),
    "lists in lists": (with_list("general.tags", 1, b"\0" * 64, 9), ": type=9: no number, string or list"),
    "a key of two lines": (replaced(b"qwen3moe.block_count", b"qwen3moe.block\ncount"), "must be printable"),
    "a key twice": (lambda data: [with_list("general.tags", 0, b"")(data) for _ in range(2)], "is there twice"),
    "a key that is another": (replaced(b"qwen3moe.expert_count", b"qwen3moe.expert_kount"), "expert_count=None"),
    "a word that is no text": (
        set_strings("tokenizer.ggml.tokens", 3, b"\xff"),
        "tokenizer.ggml.tokens: entry 3: is no",
    ),
    "many dimensions": (of(DOWN, 0, "I", 9), "9 dimensions: must be 1 to 4"),
    "rows of no whole blocks": (of(DOWN, 4, "Q", 130), "shape=[8, 64, 130]: must be whole blocks of 32 in Q8_0"),
    "an unknown type": (of(DOWN, 4 + 24, "I", 99), "type=99: unknown to the package gguf"),
    "a tensor far away": (of(DOWN, 4 + 24 + 4, "Q", 1 << 50), "offset=1125899906842624: its "),
    "a tensor between places": (of(DOWN, 4 + 24 + 4, "Q", 33), "bytes must begin at a multiple of 32 and end"),
    "a tensor twice": (replaced(Q.encode(), b"blk.0.attn_k.weight"), "is named twice"),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_that_contradict_themselves_are_refused(name: str, tmp_path: Path) -> None:
    change, sentence = BYTES[name]
    path = make(tmp_path / "model.gguf")
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    refused(path, sentence)


@pytest.mark.parametrize("name", ["millions of empty texts", "many texts"])
def test_long_lists_take_no_time(name: str, imported: Any, tmp_path: Path) -> None:
    change, sentence = BYTES[name]
    path = make(tmp_path / "model.gguf")
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    ended = run_command(imported, tmp_path, "run", str(path), "abc", "--max-new-tokens", "2")
    ended.is_refused(sentence)
    assert ended.cpu_s < 3  # a third of it is what every command takes


def test_a_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    path = make(tmp_path / "model.gguf")
    data = path.read_bytes()
    for twentieth in range(20):
        path.write_bytes(data[: len(data) * twentieth // 20])
        refused(path, "truncated|does not begin with GGUF")


def test_what_is_no_file_is_refused_at_once(imported: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "device.gguf").symlink_to("/dev/null")
    (tmp_path / "nothing.gguf").symlink_to(tmp_path / "nowhere")
    with (tmp_path / "sparse.gguf").open("wb") as file:
        file.truncate(1 << 40)
    for kind in ("pipe", "folder", "device", "nothing", "sparse"):
        run_command(imported, tmp_path, "run", f"./{kind}.gguf", "abc").is_refused(f"{kind}.gguf")


def test_parts_are_of_one_model(tmp_path: Path) -> None:
    """Not a part that is missing, there twice, or of another model."""
    first = make(tmp_path / "model.gguf", split=14)
    second, third = (first.with_name(f"model-0000{number}-of-00003.gguf") for number in (2, 3))
    split = {"split.no": 2, "split.count": 3}
    foreign = make(tmp_path / "other.gguf", architecture="qwen2moe", metadata=split).read_bytes()
    wider = make(tmp_path / "other.gguf", hidden=128, metadata=split).read_bytes()
    kept = third.read_bytes()
    for raw, sentence in (
        (second.read_bytes(), "split.no=1, split.count=3: disagree with its name"),
        (make(tmp_path / "whole.gguf").read_bytes(), "split.no=None"),
        (foreign, "general.architecture: is not that of the first part"),
        (wider, "qwen3moe.embedding_length: is not that of the first part"),
    ):
        third.write_bytes(raw)
        refused(first, sentence)
    third.unlink()
    refused(first, "00003-of-00003.gguf: missing: the model is split into 3 files")
    os.mkfifo(third)
    refused(first, "00003-of-00003.gguf: a pipe; must be a file")
    third.unlink()
    third.write_bytes(kept)
    pack(second, tmp_path / "store")


WORKING: dict[str, dict[str, Any]] = {
    "values that change nothing": {
        "metadata": {
            "attention.causal": True,
            "attention.value_length": 16,
            "rope.dimension_count": 16,
            "rope.scaling.type": "none",
            "rope.scaling.finetuned": False,
            "logit_scale": 1.0,
            "expert_gating_func": 1,
            "expert_weights_scale": 0.0,
            "quantize.imatrix.file": "x",
            "general.tags": ["a", "b"],
            "split.no": 0,
            "split.count": 0,  # as of parts that were merged
        }
    },
    "keys of another architecture": {"metadata": {"tokenizer.ggml.unused": 1, "general.name": "\n" * 500}},
    "fewer words than rows": {"words": WORDS[:100]},
    "layers for further tokens": {
        "metadata": {"block_count": 4, "nextn_predict_layers": 1},
        "more": {"blk.3.attn_norm.weight": (64,), "blk.3.nextn.eh_proj.weight": (64, 128)},
    },
}


@pytest.mark.parametrize("name", WORKING)
def test_what_changes_nothing_runs(name: str, tmp_path: Path) -> None:
    changed, plain = make(tmp_path / "model.gguf", **WORKING[name]), make(tmp_path / "plain.gguf")
    stores = [pack(path, path.with_suffix("")) for path in (changed, plain)]
    configs = [store.config | {"eos_token_id": None} for store in stores]
    assert configs[0] == configs[1]
    assert stores[0].manifest.layers == stores[1].manifest.layers


def test_a_file_without_a_vocabulary_is_refused_by_what_needs_one(imported: Any, tmp_path: Path) -> None:
    path = make(tmp_path / "model.gguf", words=())
    run_command(imported, tmp_path, "run", str(path), "abc", "--max-new-tokens", "2").is_refused("tokenizer")
