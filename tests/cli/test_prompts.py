"""Prompts from files: what is read, and what a user is told of a bad line."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import pytest

from expertly.cli.prompts import Prompt, read_prompts
from expertly.core.errors import ConfigError

LINES = (
    b'\xef\xbb\xbf{"prompt": "one", "category": "a"}\n\n  \n'
    b'{"prompt": "\xc3\xbc", "id": 7}\n{"prompt": "3", "category": null}'
)
PROMPTS = [Prompt(1, "one", "a"), Prompt(4, "ü", None), Prompt(5, "3", None)]


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.jsonl.gz"])
def test_files_with_blank_lines_other_keys_and_a_byte_order_mark(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(LINES) if name.endswith("gz") else LINES)
    assert read_prompts(str(path)) == PROMPTS
    assert read_prompts(str(path), limit=2) == PROMPTS[:2]


def test_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(LINES)))
    assert read_prompts("-") == PROMPTS


def test_lines_after_the_limit_are_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "one"}\nnonsense\n')
    assert read_prompts(str(tmp_path / "p.jsonl"), limit=1) == [Prompt(1, "one", None)]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "not JSON"),
        (b'{"prompt": "cut', "not JSON"),
        (b'["a prompt"]', "['a prompt'] is no object"),
        (b'"a prompt"', "is no object"),
        (b'{"text": "a prompt"}', "no prompt"),
        (b'{"prompt": 3}', "prompt=3"),
        (b'{"prompt": ""}', "prompt=''"),
        (b'{"prompt": null}', "prompt=None"),
        (b'{"prompt": "a", "category": 3}', "category=3"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "\\ud800"}', "prompt: holds half of a surrogate pair"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_is_named(line: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n' + line + b"\n")
    with pytest.raises(ConfigError) as caught:
        read_prompts(str(path))
    message = str(caught.value)
    assert message.startswith(f"prompts {path}, line 2: ") and problem in message
    assert 'accepted: {"prompt": "text"}' in message
    assert len(message) < 400


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_a_file_without_prompts(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match="holds no prompt; accepted"):
        read_prompts(str(tmp_path / "p.jsonl"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "cut.gz").write_bytes(gzip.compress(LINES)[:-12])
    (tmp_path / "no.gz").write_bytes(LINES)
    for name in ("nowhere.jsonl", ".", "cut.gz", "no.gz"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_prompts(str(tmp_path / name))
