"""Calls of tools, by the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from expertly.serve.memory import MemorySplit
from expertly.serve.prompts import Prompts
from expertly.serve.schema import Message
from expertly.serve.server import assemble
from expertly.serve.settings import ServerSettings
from tests.serve.conftest import Serving, room_for, running
from tests.serve.scripted import scripted

TEMPLATE = (
    "{% if tools %}Tools: {% for tool in tools %}{{ tool | tojson }} {% endfor %}{{ '\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}"
    "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@contextmanager
def saying(demo: tuple[Any, Any], text: str) -> Iterator[Serving]:
    settings, room = ServerSettings(name="demo"), room_for()
    assembled = assemble(*demo, settings, room, MemorySplit(1, 1, 1, 1, room.num_pages), TEMPLATE)
    with running(scripted(assembled, text, demo[1]), settings) as serving:
        yield serving


def ask(serving: Serving, **more: Any) -> Any:
    return serving.client().chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
        temperature=0,
        max_tokens=100,
        **({"tools": [WEATHER]} | more),
    )


@pytest.mark.parametrize(("before", "behind"), [("", ""), ("I look. ", ""), ("", "\n" + CALL.replace("Oslo", "Rome"))])
def test_calls_are_told_as_calls_streamed_or_not(demo: tuple[Any, Any], before: str, behind: str) -> None:
    cities = ["Oslo", "Rome"] if behind else ["Oslo"]
    with saying(demo, before + CALL + behind) as serving:
        whole = ask(serving).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert (whole.message.content or "").strip() == before.strip()
        assert [json.loads(call.function.arguments)["city"] for call in whole.message.tool_calls] == cities
        assert {call.function.name for call in whole.message.tool_calls} == {"weather"}
        assert len({call.id for call in whole.message.tool_calls}) == len(cities)
        content, calls, reason = "", {}, None
        for chunk in ask(serving, stream=True):
            type(chunk).model_validate(chunk.model_dump(), strict=True)
            delta = chunk.choices[0].delta
            content += delta.content or ""
            calls |= {call.index: json.loads(call.function.arguments)["city"] for call in delta.tool_calls or ()}
            reason = chunk.choices[0].finish_reason or reason
        assert (content.strip(), list(calls.values()), reason) == (before.strip(), cities, "tool_calls")


@pytest.mark.parametrize(
    "text", ["<tool_call>no JSON</tool_call>", "Nothing < to call", "<tool_call>[1]</tool_call> x"]
)
def test_what_is_no_call_stays_text(demo: tuple[Any, Any], text: str) -> None:
    with saying(demo, text) as serving:
        assert (ask(serving).choices[0].message.content, ask(serving).choices[0].finish_reason) == (text, "stop")
        chunks = list(ask(serving, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_without_tools_marks_are_text(demo: tuple[Any, Any]) -> None:
    with saying(demo, CALL) as serving:
        for more in ({"tools": []}, {"tool_choice": "none"}):
            got = ask(serving, **more).choices[0]
            assert (got.message.content, got.message.tool_calls, got.finish_reason) == (CALL, None, "stop")


def test_a_response_template_of_the_tokenizer_goes_first(demo: tuple[Any, Any], monkeypatch: Any) -> None:
    template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "assistant: ",
        "fields": {
            "tool_calls": {
                "open_pattern": r"\s*CALL",
                "close": "END",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": r"\s*<\|endoftext\|>", "content": "text"},
        },
    }
    monkeypatch.setattr(demo[1], "response_template", template, raising=False)
    with saying(demo, 'I look. CALL{"name": "weather", "arguments": {"city": "Oslo"}}END') as serving:
        got = ask(serving).choices[0]
        assert got.message.content == "I look."
        assert got.finish_reason == "tool_calls"
        assert json.loads(got.message.tool_calls[0].function.arguments) == {"city": "Oslo"}


def test_the_template_sees_the_conversation(demo: tuple[Any, Any]) -> None:
    import asyncio

    prompts = Prompts(demo[1], 8192, TEMPLATE)
    said = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": [{"type": "text", "text": "Oslo"}, {"type": "text", "text": "?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    tokens = asyncio.run(prompts.of_messages([Message.model_validate(one) for one in said], []))
    prompts.close()
    expected = "system: Be brief\nuser: Oslo?\nassistant: [weather Oslo]\ntool: rain\nassistant: "
    assert demo[1].decode(tokens) == expected


def test_a_choice_that_cannot_be_kept_is_refused(demo: tuple[Any, Any]) -> None:
    import openai

    with saying(demo, "x") as serving:
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            with pytest.raises(openai.BadRequestError, match="tool_choice"):
                ask(serving, tool_choice=choice)
