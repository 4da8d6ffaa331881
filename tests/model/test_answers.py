"""An answer in parts: the same however the text comes."""

from __future__ import annotations

import json
import random

import pytest

from expertly.model.answers import AnswerFormat, AnswerPart, AnswerReader

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
WRONG = "<tool_call>no JSON</tool_call>"


def reader() -> AnswerReader:
    made = AnswerFormat(None, thinks=True).reader("user: Oslo?", TOOLS)
    assert made is not None
    return made


def parts(pieces: list[str]) -> list[tuple[str, str]]:
    """Kind and text, or the name that is called; neighbouring texts of a kind as one."""
    one, found = reader(), []
    for part in [part for piece in pieces for part in one.add(piece)] + one.end():
        if part.kind == "arguments":
            assert json.loads(part.text) == {"city": "Oslo"}
            continue
        found.append((part.kind, part.text))
        if len(found) > 1 and found[-2][0] == part.kind != "call":
            (kind, text), (_, more) = found[-2:]
            found[-2:] = [(kind, text + more)]
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Take a coat.", [("content", "Take a coat.")]),
        ("<think>Far.</think>Near.", [("reasoning", "Far."), ("content", "Near.")]),
        (f"I look. {CALL}", [("content", "I look."), ("call", "weather")]),
        (f"{CALL}{CALL}", [("call", "weather")] * 2),
        (f"I look. {WRONG} and more", [("content", f"I look. {WRONG} and more")]),
        (f"{CALL}then {WRONG}{CALL}", [("call", "weather"), ("content", f"then {WRONG}{CALL}")]),
        ("I look. <tool_call>{", [("content", "I look. <tool_call>{")]),
    ],
)
def test_parts_are_the_same_however_the_text_comes(text: str, expected: list[tuple[str, str]]) -> None:
    draw = random.Random(5)
    for most in (len(text), 1, 4, 20, 20, 60, 60):
        left, pieces = text, []
        while left:
            size = most if most in (len(text), 1) else draw.randint(1, most)
            pieces.append(left[:size])
            left = left[size:]
        assert parts(pieces) == expected, pieces


def test_only_the_first_call_where_one_was_asked_for() -> None:
    one = AnswerFormat(None, thinks=False).reader("", TOOLS, is_single=True)
    assert one is not None
    found: list[AnswerPart] = one.add(CALL + CALL) + one.end()
    assert [part.kind for part in found] == ["call", "arguments"]
