"""What a file from outside may be, and that nothing is built from one before that is known."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from expertly.core.errors import CheckpointError
from expertly.core.untrusted import VOCABULARY, Bounds, check_model_files, check_value, read_json_object

SMALL = Bounds(nbytes=1000, depth=3, items=4, text=8, long={"labels": 6})


def sparse(path: Path, nbytes: int = 4 << 30) -> None:
    with path.open("wb") as file:
        file.truncate(nbytes)


FILES: dict[str, tuple[Callable[[Path], Any] | bytes, str]] = {
    "a pipe": (os.mkfifo, "a pipe; must be a file"),
    "a folder": (Path.mkdir, "a folder; must be a file"),
    "a link to a device": (lambda path: path.symlink_to("/dev/zero"), "a device; must be a file"),
    "nothing": (lambda path: None, "no such file"),
    "a sparse file": (sparse, "4294967296 bytes; accepted: 1000"),
    "too many bytes": (b" " * 1001, "1001 bytes; accepted: 1000"),
    "another encoding": ('{"a": 1}'.encode("utf-16"), "no text in UTF-8"),
    "no JSON": (b"{", "not JSON"),
    "no object": (b"[1]", "holds a JSON list; must be an object"),
    "a long list": (b'{"a": {"b": [1, 2, 3, 4, 5]}}', "a.b: 5 entries; accepted: 4"),
    "a long object": (b'{"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}', ": 5 entries; accepted: 4"),
    "a long text": (b'{"a": "123456789"}', "a: 9 characters; accepted: 8"),
    "a long list that may be": (b'{"labels": [1, 2, 3, 4, 5, 6]}', ""),
    "a longer one": (b'{"labels": [1, 2, 3, 4, 5, 6, 7]}', "labels: 7 entries; accepted: 6"),
    "deep": (b'{"a": [[[[]]]]}', "a.0.0.0: nests deeper than 3 levels"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("case", FILES)
def test_what_is_not_the_kind_of_file_is_named_and_never_waited_for(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content, sentence = FILES[case]
    path = tmp_path / "config.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    if not sentence:
        read_json_object(path, CheckpointError, SMALL)
        return
    with pytest.raises(CheckpointError) as refused:
        read_json_object(path, CheckpointError, SMALL)
    assert f"{path}: " in str(refused.value) and sentence in str(refused.value)


def test_a_message_stays_short_and_a_link_to_a_file_is_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        check_value({"x" * 10_000: {"y" * 10_000: "z" * 9}}, "it", SMALL, CheckpointError)
    assert len(str(refused.value)) < 200
    (tmp_path / "blob").write_text('\ufeff{"a": 1}')
    (tmp_path / "config.json").symlink_to("blob")
    assert read_json_object(tmp_path / "config.json", CheckpointError) == {"a": 1}


def test_files_that_transformers_opens_are_checked_and_others_are_nobodys(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "tokenizer.json").write_text("not looked into, for it takes as long to parse as to use")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    for name in ("README.md", "preprocessor_config.json", "pytorch_model.bin.index.json"):
        os.mkfifo(tmp_path / name)
    sparse(tmp_path / "training_args.bin")
    sparse(tmp_path / "trainer_state.json")
    check_model_files(tmp_path, CheckpointError)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "added_tokens.json"),
        *("chat_template.jinja", "spiece.model", "vocab.txt", "tekken.json", "qwen.tiktoken", "tokenizer.1.0.json"),
        "additional_chat_templates/tools.jinja",
    ],
)
def test_each_of_them_is_checked(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="a pipe; must be a file"):
        check_model_files(tmp_path, CheckpointError)
    path.unlink()
    sparse(path)
    with pytest.raises(CheckpointError, match="4294967296 bytes; accepted"):
        check_model_files(tmp_path, CheckpointError)


def test_a_large_vocabulary_is_checked_within_a_second(tmp_path: Path) -> None:
    """As large as the largest of released models: 262 144 words and twice as many merges."""
    words = {f"word{number}": number for number in range(1 << 18)}
    merges = [["ab", str(number)] for number in range(1 << 19)]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": words, "merges": merges}}))
    begun = time.process_time()
    read_json_object(path, CheckpointError, VOCABULARY)
    assert time.process_time() - begun < 2  # on a slow machine
