"""Prompts from files: what is read, and what a user is told of a bad line."""

from __future__ import annotations

import io
from pathlib import Path
from typing import ClassVar

import pytest

from expertly.core.errors import ConfigError
from expertly.model.prompts import Prompt, asked, read_prompts

LINES = (
    b'\xef\xbb\xbf{"prompt": "one", "category": "a"}\n\n  \n'
    b'{"prompt": "\xc3\xbc", "id": 7}\n{"prompt": "3", "category": null}'
)
PROMPTS = [Prompt(1, "one", "a"), Prompt(4, "ü", None), Prompt(5, "3", None)]


def test_files_and_stdin_with_blank_lines_other_keys_and_a_byte_order_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(LINES + b"\nnonsense\n")  # which is not looked at
    assert read_prompts(str(path), limit=3) == PROMPTS
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(LINES)))
    assert read_prompts("-") == PROMPTS


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "not JSON"),
        (b'["a prompt"]', "['a prompt']: must be an object"),
        (b'{"text": "a prompt"}', "must have a prompt or messages"),
        (b'{"prompt": 3}', "prompt=3"),
        (b'{"prompt": ""}', "prompt=''"),
        (b'{"prompt": "a", "category": 3}', "category=3"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "\\ud800"}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}', "one of them"),
        (b'{"messages": []}', "messages=[]"),
        (b'{"messages": [{"role": "judge", "content": "a"}]}', "messages[0].role='judge'"),
        (b'{"messages": [{"role": "user", "content": [1]}]}', "messages[0].content="),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}', "none of a user"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not JSON"),
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


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("nowhere.jsonl", None, "cannot be read"),
        (".", None, "cannot be read"),
        ("empty.jsonl", b"", "holds no prompt; accepted"),
        ("blank.jsonl", b"\n \n", "holds no prompt; accepted"),
    ],
)
def test_files_without_prompts(name: str, content: bytes | None, problem: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        read_prompts(str(tmp_path / name))


class Tokenizer:
    """A letter a token; a template that shows roles."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    special_tokens_map: ClassVar[dict[str, str]] = {"bos_token": "<s>"}

    def get_chat_template(self, *_: object) -> str:
        refusal = ""
        if self.chat_template == "no system":
            refusal = (
                "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
            )
        return refusal + "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}<assistant>"


CHAT = b"""{"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"},
 {"role": "assistant", "content": "hello"}], "category": "small talk"}""".replace(b"\n", b"")


def given(path: Path, tokenizer: Tokenizer, **how: object) -> list[str]:
    return ["".join(map(chr, each.tokens)) for each in asked(read_prompts(str(path)), tokenizer, **how)[0]]


def test_chats_and_prompts_are_put_by_the_models_template(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(CHAT + b'\n{"prompt": "one"}\n')
    chat = read_prompts(str(path))[0]
    assert (chat.text, chat.category) == ("be brief\n\nhi", "small talk")
    wanted = ["<system>be brief<user>hi<assistant>", "<user>one<assistant>"]
    assert given(path, Tokenizer("any")) == wanted, "the answer at the end is what is asked for"
    for tokenizer, how, problem in (
        (Tokenizer(None), {}, "line 1: holds messages, and the model has no chat template"),
        (Tokenizer("any"), {"is_raw": True}, "line 1: holds messages, with --raw"),
        (Tokenizer("no system"), {}, "the model's chat template refuses them: System role not supported"),
    ):
        with pytest.raises(ConfigError, match=problem):
            given(path, tokenizer, **how)


def test_without_a_template_and_raw_a_prompt_is_text(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "a longer one"}\n')
    assert given(path, Tokenizer(None)) == given(path, Tokenizer("any"), is_raw=True) == ["one", "a longer one"]
    result, left_out = asked(read_prompts(str(path)), Tokenizer(None), most=5)
    assert [each.prompt.text for each in result] == ["one"]
    assert left_out == ["the prompt in line 2 has 12 tokens; the model takes at most 5"]
    with pytest.raises(ConfigError, match="has no tokenizer"):
        asked(read_prompts(str(path)), None)
