"""Every GGUF architecture is the model that transformers has for it, decode steps through the cache included.

The files are written as llama.cpp's converter writes them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from expertly.core.errors import CheckpointError
from expertly.model.gguf_architectures import ARCHITECTURES
from expertly.model.packing import pack
from tests.formats import gguf_files
from tests.formats.gguf_files import WORDS, make_gguf
from tests.formats.gguf_models import CASES, make_model, write_model
from tests.formats.references import assert_is_the_same
from tests.golden.llama_cpp import RECORDED, UNLIKE
from tests.model.checkpoints import refused

SMALL = {"hidden": 64, "intermediate": 32}


@pytest.mark.parametrize("name", CASES)
def test_an_architecture_is_the_model_of_transformers_and_of_llama_cpp(name: str, tmp_path: Path) -> None:
    model = make_model(CASES[name])
    path = write_model(tmp_path / "model.gguf", model, CASES[name], "Q8_0")
    tokens = assert_is_the_same(path, model, tmp_path / "store")
    assert name in UNLIKE or tokens == json.loads(RECORDED.read_text())[name]


@pytest.mark.parametrize("name", ["mixtral", "deepseek v3", "granitemoe, shared"])
def test_so_it_is_without_quantisation(name: str, tmp_path: Path) -> None:
    model = make_model(CASES[name])
    assert_is_the_same(write_model(tmp_path / "model.gguf", model, CASES[name]), model, tmp_path / "store")


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("deepseek-v3", ["ab", "123", "4", "!cd"]),
        ("glm4", ["ab", "123", "4", "!cd"]),
        ("hunyuan", ["ab", "1", "2", "3", "4", "!cd"]),
        ("refact", ["ab", "1", "2", "3", "4", "!", "cd"]),
        ("olmo", ["ab", "1234", "!", "cd"]),
        ("exaone-moe", ["ab", "1", "2", "3", "4", "!cd"]),
        ("kimi-k2", ["ab", "123", "4", "!cd"]),
        ("deepseek-llm", ["ab", "1234", "!", "cd"]),
    ],
)
def test_text_is_split_as_the_file_says(pre: str, pieces: list[str], tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "model.gguf", words=WORDS, metadata={"tokenizer.ggml.pre": pre}, **SMALL)
    tokenizer = AutoTokenizer.from_pretrained(pack(path, tmp_path / "store").folder)
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("ab1234!cd")
    assert [piece for piece, _ in split] == pieces


def test_gemma4_has_its_tokenizer(tmp_path: Path) -> None:
    lists = {"model": "gemma4", "tokens": WORDS, "merges": ["a b"], "scores": [0.0] * len(WORDS)}
    words = {f"tokenizer.ggml.{name}": value for name, value in lists.items()}
    path = write_model(tmp_path / "model.gguf", make_model(CASES["gemma4"]), CASES["gemma4"], metadata=words)
    tokenizer = AutoTokenizer.from_pretrained(pack(path, tmp_path / "store").folder)
    assert tokenizer("ab", add_special_tokens=False)["input_ids"] == [WORDS.index("ab")]


@pytest.mark.parametrize(
    ("name", "key", "changed"),
    [("gemma4", "final_logit_softcapping", {"final_logit_softcapping": None}), ("mimo", "rope.freq_base_swa", {})],
)
def test_what_a_file_does_not_say_is_as_in_llama_cpp(
    name: str, key: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    model = make_model(CASES[name])
    path = write_model(tmp_path / "model.gguf", model, CASES[name], metadata={key: None})
    model.config.update(changed)
    assert_is_the_same(path, model, tmp_path / "store")


@pytest.mark.parametrize(
    ("name", "key", "value", "accepted"),
    [
        ("gpt-oss", "rope.scaling.type", "linear", "'yarn'"),
        ("gpt-oss", "rope.scaling.factor", None, "a number above 0"),
        ("nemotron", "expert_feed_forward_length", None, "a whole number"),
        ("mistral 4", "attention.temperature_length", 12, "24"),
        ("qwen3vl", "rope.dimension_sections", [2, 2, 2, 2], "numbers, the fourth 0"),
    ],
)
def test_metadata_of_an_architecture_is_checked(name: str, key: str, value: Any, accepted: str, tmp_path: Path) -> None:
    case = CASES[name]
    path = write_model(tmp_path / "model.gguf", make_model(case), case, metadata={key: value})
    said = f"a list of {len(value)} numbers" if isinstance(value, list) else repr(value)
    refused(path, CheckpointError, rf"{case.architecture}\.{key}={said}: must be {accepted}")


def test_heads_that_are_no_parts_of_a_tensor_are_refused(tmp_path: Path) -> None:
    case = CASES["qwen3.5"]
    path = write_model(tmp_path / "model.gguf", make_model(case), case, metadata={"ssm.group_count": 3})
    refused(path, CheckpointError, r"tensors blk\.0\.\S+: .*cannot be taken apart as the metadata says")


def test_a_text_that_nobody_can_split_is_refused(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "model.gguf", words=WORDS, metadata={"tokenizer.ggml.pre": "afmoe"}, **SMALL)
    refused(path, CheckpointError, r"tokenizer\.ggml\.pre='afmoe': accepted: .*deepseek-v3")


def test_every_architecture_has_such_a_file() -> None:
    of_files = {case.architecture for case in CASES.values()} | {*gguf_files.ARCHITECTURES.values()}
    assert set(ARCHITECTURES) == of_files
