"""What else than text is in an answer: calls of tools, and what was thought. By the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from expertly.serve.prompts import Prompts
from expertly.serve.responses import ResponsesRequest
from expertly.serve.schema import Message
from tests.serve.conftest import Serving, assembled_for, running, served
from tests.serve.scripted import scripted

TEMPLATE = (
    "{% if tools %}Tools: {% for tool in tools %}{{ tool | tojson }} {% endfor %}{{ '\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}"
    "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "of a city", "parameters": PARAMETERS}
WEATHER: dict[str, Any] = {"type": "function", "function": FUNCTION}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@contextmanager
def saying(demo: tuple[Any, Any], text: str, template: str = TEMPLATE) -> Iterator[Serving]:
    assembled = assembled_for(*demo, template=template)
    with running(scripted(assembled, text, demo[1])) as serving:
        yield serving


def ask(serving: Serving, **more: Any) -> Any:
    return serving.chat("What is the weather in Oslo?", 100, **({"tools": [WEATHER]} | more))


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("<tool_call>no JSON</tool_call>", {}),
        ("<tool_call>[1]</tool_call> x", {}),
        (CALL, {"tool_choice": "none"}),
    ],
)
def test_what_is_no_call_stays_text(demo: tuple[Any, Any], text: str, more: dict[str, Any]) -> None:
    with saying(demo, text) as serving:
        got = ask(serving, **more).choices[0]
        assert (got.message.content, got.message.tool_calls, got.finish_reason) == (text, None, "stop")
        assert told(ask(serving, **more, stream=True)) == (text, "", [], "stop")


def told(chunks: Any) -> tuple[str, str, list[Any], str | None]:
    """Content, what was thought, calls and the end of a stream."""
    content, thought, calls, reason = "", "", [], None
    for chunk in chunks:
        type(chunk).model_validate(chunk.model_dump(), strict=True)
        delta = chunk.choices[0].delta
        content += delta.content or ""
        thought += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or ():
            if call.index == len(calls):  # a call begins
                calls.append(call)
            else:
                calls[call.index].function.arguments += call.function.arguments
        reason = chunk.choices[0].finish_reason or reason
    return content, thought, calls, reason


THINKING = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant: ",
    "fields": {
        "thinking": {"open": "[THINK]", "close": "[/THINK]", "content": "text"},
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


def test_a_response_template_says_the_format_where_the_chat_template_shows_none(
    demo: tuple[Any, Any], monkeypatch: Any
) -> None:
    monkeypatch.setattr(demo[1], "response_template", THINKING, raising=False)
    call = 'CALL{"name": "weather", "arguments": {"city": "Oslo"}}END'
    with saying(demo, f"[THINK]Oslo is far.[/THINK]\n\nI look. {call}{call}") as serving:
        got = ask(serving).choices[0]
        assert (got.message.content, got.message.reasoning_content) == ("I look.", "Oslo is far.")
        assert got.finish_reason == "tool_calls" and len(got.message.tool_calls) == 2
        assert json.loads(got.message.tool_calls[0].function.arguments) == {"city": "Oslo"}
        chunks = list(ask(serving, stream=True))
        content, thought, calls, reason = told(chunks)
        assert (content, thought, reason) == ("I look.", "Oslo is far.", "tool_calls")
        assert [call.index for call in calls] == [0, 1]
        assert sum(bool(chunk.choices[0].delta.tool_calls) for chunk in chunks) > 6, "arguments as they are written"
        assert sum(bool(getattr(chunk.choices[0].delta, "reasoning_content", None)) for chunk in chunks) > 2
        assert len(ask(serving, parallel_tool_calls=False).choices[0].message.tool_calls) == 1


THINKS_FIRST = TEMPLATE + "{% if add_generation_prompt and enable_thinking | default(true) %}<think>{% endif %}"


def test_what_is_thought_is_apart_where_the_template_begins_it(demo: tuple[Any, Any]) -> None:
    with saying(demo, "It is cold.\n</think>\n\nTake a coat.", THINKS_FIRST) as serving:
        got = ask(serving, tools=[]).choices[0].message
        assert (got.content, got.reasoning_content) == ("Take a coat.", "It is cold.\n")
        assert told(ask(serving, tools=[], stream=True))[:2] == ("Take a coat.", "It is cold.\n")
    for more in ({"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}):
        with saying(demo, "Take a coat.", THINKS_FIRST) as serving:
            got = ask(serving, tools=[], **more).choices[0].message
            assert got.content == "Take a coat." and not hasattr(got, "reasoning_content")
    with saying(demo, "x") as serving, pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
        ask(serving, extra_body={"chat_template_kwargs": {"chat_template": "x"}})


def test_the_template_sees_the_conversation(demo: tuple[Any, Any]) -> None:
    prompts, called = Prompts(demo[1], 8192, TEMPLATE), {"name": "weather", "arguments": '{"city": "Oslo"}'}
    said = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": [{"type": "text", "text": "Oslo"}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": called}]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    tokens, text = asyncio.run(prompts.of_messages([Message.model_validate(one) for one in said], [], {}))
    joined = "{% for c in m.tool_calls or [] %}{{ '>' + c['function']['arguments'] + '<' }}{% endfor %}"
    others = Prompts(demo[1], 8192, "{% for m in messages %}{{ m.thinking }}" + joined + "{% endfor %}")
    for name in ("reasoning_content", "reasoning"):
        thought = Message.model_validate(said[2] | {name: "Far."})
        as_text = asyncio.run(others.of_messages([thought], [], {}))[1]
        assert as_text == 'Far.>{"city": "Oslo"}<', "as DeepSeek's, gpt-oss's"
    others.close()
    prompts.close()
    expected = "system: Be brief\nuser: Oslo?\nassistant: [weather Oslo]\ntool: rain\nassistant: "
    assert demo[1].decode(tokens) == text == expected


def test_a_call_can_be_forced(demo: tuple[Any, Any]) -> None:
    """By the demo model itself, which never saw a call."""
    strict = {"required": ["city"], "additionalProperties": False}
    parameters = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, **strict}
    weather = {"type": "function", "function": FUNCTION | {"parameters": parameters}}
    with served(*demo, template=TEMPLATE) as serving:
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            got = ask(serving, tools=[weather], tool_choice=choice).choices[0]
            assert got.finish_reason == "tool_calls"
            assert json.loads(got.message.tool_calls[0].function.arguments)["city"] in ("Oslo", "Rome")
        for wrong in ("forced", {"type": "function", "function": {"name": "other"}}):
            with pytest.raises(openai.BadRequestError, match="tool_choice"):
                ask(serving, tools=[weather], tool_choice=wrong)


def test_responses_are_the_same_as_items(demo: tuple[Any, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(demo[1], "response_template", THINKING, raising=False)
    asked: dict[str, Any] = {
        "model": "demo",
        "instructions": "Be brief",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Oslo?"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Oslo"}'},
            {"type": "function_call_output", "call_id": "1", "output": "rain"},
        ],
        "tools": [{"type": "function", **WEATHER["function"]}],
        "temperature": 0,
    }
    says = '[THINK]Far.[/THINK]I look. CALL{"name": "weather", "arguments": {"city": "Oslo"}}END'
    with saying(demo, says) as serving:
        client = serving.client
        whole = client.responses.create(**asked)
        assert whole.output_text == "I look." and whole.status == "completed"
        assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
        assert json.loads(whole.output[2].arguments) == {"city": "Oslo"}
        num_thought, num_all = (len(demo[1].encode(text)) for text in ("[THINK]Far.", says))
        assert whole.usage is not None and whole.usage.output_tokens == num_all + 1
        assert whole.usage.output_tokens_details.reasoning_tokens == num_thought
        with client.responses.stream(**asked) as stream:
            events = list(stream)
            final = stream.get_final_response()
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
        assert final.output_text == "I look."
        assert [event.sequence_number for event in events] == sorted({event.sequence_number for event in events})
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "I look."
        cut = client.responses.create(**(asked | {"max_output_tokens": 3}))
        assert cut.status == "incomplete" and cut.incomplete_details is not None
        for wrong in (
            {"extra_body": {"response_format": {"type": "json_object"}}},
            {"previous_response_id": "resp_1"},
            {"input": [{"type": "item_reference", "id": "x"}]},
            {"tools": [{"name": "weather"}]},
        ):
            with pytest.raises(openai.BadRequestError):
                client.responses.create(**(asked | wrong))


def test_items_are_the_messages_of_a_chat() -> None:
    """What an assistant says and calls in one turn is one message, as templates want it."""
    call = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    request = ResponsesRequest.model_validate({"model": "demo", "input": [said, call, {**call, "call_id": "2"}]})
    (message,) = request.as_chat()["messages"]
    assert message.text == "I look."
    assert [call.id for call in message.tool_calls] == ["1", "2"]
