"""Anthropic's own Python client, and the requests of an agent."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
from collections.abc import Callable, Iterator
from typing import Any, Literal

import anthropic
import httpx
import openai
import pydantic
import pytest

from expertly.serve.messages import CountRequest
from expertly.serve.prompts import Prompts
from expertly.serve.reading import check
from expertly.serve.responses import ResponsesRequest
from expertly.serve.scheduler import RequestScheduler
from expertly.serve.schema import ChatRequest
from tests.commands import RunningCommand
from tests.serve.conftest import KEY, Serving, room_for, served
from tests.serve.test_tools import CALL, THINKING, THINKS_FIRST, saying

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function | tojson }}{{ '\n' }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
WEATHER: Any = {"name": "weather", "description": "of a city", "input_schema": CITY}
OBJECT = {"type": "json_schema", "schema": CITY | {"additionalProperties": False}}
SEARCH: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
SAYS = '[THINK]Oslo is far.[/THINK]I look. CALL{"name": "weather", "arguments": {"city": "Oslo"}}END'


def client_of(serving: Serving, key: str = KEY) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=serving.url, api_key=key, max_retries=0, timeout=60)


def asked(said: Any = "What is the weather in Oslo?", **more: Any) -> dict[str, Any]:
    return {"model": "demo", "max_tokens": 100, "messages": [{"role": "user", "content": said}], **more}


@pytest.fixture
def thinking(demo: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    """A model that thinks, speaks and calls."""
    monkeypatch.setattr(demo[1], "response_template", THINKING, raising=False)
    with saying(
        demo, SAYS, "{% for m in messages %}{{ m.content }}{% endfor %}{{ (tools or [])[:0] }}assistant: "
    ) as s:
        yield s


def test_an_answer_is_its_thoughts_its_text_and_its_calls_streamed_or_not(thinking: Serving) -> None:
    messages, request = client_of(thinking).messages, asked(tools=[WEATHER])
    whole = messages.create(**request)
    thought, text, call = whole.content
    assert (thought.type, thought.thinking) == ("thinking", "Oslo is far.") and thought.signature
    assert (text.type, text.text) == ("text", "I look.")
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Oslo"})
    assert (whole.stop_reason, whole.role, whole.model) == ("tool_use", "assistant", "demo")
    assert whole.usage.output_tokens > 20
    assert (
        whole.usage.input_tokens == messages.count_tokens(**{k: request[k] for k in ("model", "messages")}).input_tokens
    )
    with messages.stream(**request) as stream:
        events = list(stream)
        last = stream.get_final_message()
    assert [block.model_dump(exclude={"id", "signature"}) for block in last.content] == [
        block.model_dump(exclude={"id", "signature"}) for block in whole.content
    ]
    assert (last.stop_reason, last.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)
    assert sum(event.type == "thinking" for event in events) > 1, "it came as it was written"
    names = [event.type for event in events]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    starts, stops = ([e.index for e in events if e.type == f"content_block_{step}"] for step in ("start", "stop"))
    assert starts == stops == [0, 1, 2]


@pytest.mark.parametrize(
    ("says", "more", "text", "stop"),
    [
        ("Hello there", {}, "Hello there", ("end_turn", None)),
        ("Hello there", {"max_tokens": 2}, None, ("max_tokens", None)),
        ("one, two, three", {"stop_sequences": ["three", ", two"]}, "one", ("stop_sequence", ", two")),
        ("Hello there", {"max_tokens": 100_000}, "Hello there", ("end_turn", None)),
        ("a " * 600, {"max_tokens": 100_000}, None, ("model_context_window_exceeded", None)),
        (CALL, {"tools": [WEATHER], "stop_sequences": ["weather"]}, None, ("stop_sequence", "weather")),
        (CALL + CALL, {"tools": [WEATHER], "tool_choice": {"type": "none"}}, CALL + CALL, ("end_turn", None)),
    ],
)
def test_why_an_answer_stopped(demo: tuple[Any, Any], says: str, more: Any, text: str | None, stop: Any) -> None:
    with saying(demo, says) as serving:
        got = client_of(serving).messages.create(**(asked() | more))
        assert (got.stop_reason, got.stop_sequence) == stop
        assert text is None or "".join(block.text for block in got.content if block.type == "text") == text
        with client_of(serving).messages.stream(**(asked() | more)) as stream:
            last = stream.get_final_message()
        assert (last.stop_reason, last.stop_sequence) == stop


@pytest.mark.parametrize("value", ["NaN", "1e999", '"\\ud800"'])
def test_arguments_that_not_every_client_can_read_are_text(demo: tuple[Any, Any], value: str) -> None:
    text = CALL.replace('"Oslo"', value)
    with saying(demo, text) as serving:
        (block,) = client_of(serving).messages.create(**asked(tools=[WEATHER])).content
        assert (block.type, block.text) == ("text", text)


def test_thinking_is_asked_for_and_forbidden(demo: tuple[Any, Any]) -> None:
    """Of a template that does not think by itself, and begins thoughts where it is told to."""
    template = THINKS_FIRST.replace("default(true)", "default(false)")
    for thinking, kinds in (
        ("enabled", ["thinking", "text"]),
        ("adaptive", ["thinking", "text"]),
        ("disabled", ["text"]),
    ):
        says = "Take a coat." if kinds == ["text"] else "It is cold.\n</think>\n\nTake a coat."
        with saying(demo, says, template) as serving:
            got = client_of(serving).messages.create(**asked(thinking={"type": thinking, "budget_tokens": 1024}))
            assert [block.type for block in got.content] == kinds and got.content[-1].text == "Take a coat."


def test_one_call_where_parallel_ones_are_disabled(demo: tuple[Any, Any]) -> None:
    with saying(demo, CALL + "\n" + CALL) as serving:
        for is_disabled, num_calls in ((True, 1), (False, 2)):
            choice = {"type": "auto", "disable_parallel_tool_use": is_disabled}
            request = asked(tools=[WEATHER], tool_choice=choice)
            got = client_of(serving).messages.create(**request)
            assert [block.type for block in got.content] == ["tool_use"] * num_calls
            with client_of(serving).messages.stream(**request) as stream:
                written = [event for event in stream if event.type == "input_json"]
            assert len(written) > 3 * num_calls, "arguments come as they are written"
            inputs = [block.input for block in stream.get_final_message().content if block.type == "tool_use"]
            assert inputs == [{"city": "Oslo"}] * num_calls


def rendered(demo: tuple[Any, Any], request: CountRequest | ResponsesRequest) -> str:
    prompts, chat = Prompts(demo[1], 8192, TEMPLATE), check(ChatRequest, request.as_chat())
    try:
        return asyncio.run(prompts.of_messages(chat.messages, chat.offered, chat.variables))[1]
    finally:
        prompts.close()


USE = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Oslo"}}
USED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
TEXT = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}


def result(**more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "1", "content": "rain", **more}


UNSEEN = "[image left out: this model reads only text]"


FOUND = {"type": "search_result", "title": "Oslo", "source": "https://a.no", "content": [TEXT | {"text": "Rain."}]}
NOTES = {"type": "document", "title": "Notes", "source": {"type": "text", "data": "It is wet."}}
PAGE = {"type": "web_search_result", "title": "Oslo", "url": "https://a.no", "encrypted_content": "eA=="}
FAILED = {"type": "web_search_tool_result_error", "error_code": "unavailable"}
SEARCHED = [
    {"type": "server_tool_use", "id": "2", "name": "web_search", "input": {"query": "Oslo"}},
    {"type": "web_search_tool_result", "tool_use_id": "2", "content": [PAGE]},
    {"type": "web_search_tool_result", "tool_use_id": "2", "content": FAILED},
    TEXT,
]


def turn(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


@pytest.mark.parametrize(
    ("system", "turns", "text"),
    [
        ("Be brief", [turn("user", TEXT)], "<system>Be brief\n<user>Hello\n"),
        ([TEXT, {"type": "text", "text": "x-anthropic-billing-header: 7"}, TEXT], [], "<system>Hello\n\nHello\n"),
        (None, [turn("system", TEXT), turn("user", TEXT)], "<system>Hello\n<user>Hello\n"),
        (None, [turn("user", TEXT), turn("user", TEXT)], "<user>Hello\n\nHello\n"),
        (
            "Be brief",
            [turn("user", TEXT), turn("system", TEXT), turn("system"), turn("assistant", TEXT)],
            "<system>Be brief\n<user>Hello\n\n<system-reminder>\nHello\n</system-reminder>\n<assistant>Hello",
        ),
        (
            None,
            [turn("assistant", {"type": "thinking", "thinking": "Far", "signature": ""}, TEXT, USE, USE)],
            f"<assistant>[Far]Hello{USED[:-1]}{USED}",
        ),
        (None, [turn("assistant", {"type": "redacted_thinking", "data": "x"}, USE)], f"<assistant>{USED}"),
        (None, [turn("user", TEXT, result(), result(is_error=True))], "<tool>rain\n<tool>Error: rain\n<user>Hello\n"),
        (None, [turn("user", result(content=[TEXT, TEXT]), result(content=None))], "<tool>Hello\n\nHello\n<tool>\n"),
        (None, [turn("user", result(content=[{"type": "image", "source": {}}]))], f"<tool>{UNSEEN}\n"),
        (None, [turn("user", result(content=[FOUND, TEXT]))], "<tool>Oslo\nhttps://a.no\nRain.\n\nHello\n"),
        (None, [turn("user", FOUND, NOTES)], "<user>Oslo\nhttps://a.no\nRain.\n\nNotes\nIt is wet.\n"),
        (
            None,
            [turn("user", TEXT), turn("assistant", *SEARCHED), turn("user", TEXT)],
            '<user>Hello\n<assistant>web_search: {"query": "Oslo"}\n\nOslo\nhttps://a.no\n\nunavailable\n\nHello\n'
            "<user>Hello\n",
        ),
    ],
)
def test_what_agents_send_is_a_chat(demo: tuple[Any, Any], system: Any, turns: Any, text: str) -> None:
    turns = turns or [turn("user")]
    request = CountRequest.model_validate({"model": "demo", "system": system, "messages": turns})
    assert rendered(demo, request) == text + ("<assistant>" if text.endswith("\n") else ""), "a last text goes on"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"max_tokens": None}, "max_tokens: "),
        ({"temperature": 1.5}, "temperature: .* 1"),
        ({"messages": [turn("user", {"type": "image", "source": {}})]}, "messages.0.content.0.type: 'image'.*accepted"),
        ({"messages": [turn("user", TEXT, USE)]}, "messages.0.content.1.type: 'tool_use'"),
        (
            {"messages": [turn("user", result(content=[{"type": "text"}]))]},
            "messages.0.content.0.content.0.text: required",
        ),
        ({"messages": [turn("assistant", {"type": "tool_use", "id": "1"})]}, "messages.0.content.0.name: required"),
        ({"messages": [turn("robot", TEXT)]}, "messages.0.role: "),
        (
            {"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
            "tool_choice: 'web_search' .*ignored",
        ),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice: 'required' .*ignored"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers: "),
        (
            {"messages": [turn("user", NOTES | {"title": None, "source": {"type": "base64", "data": "eA=="}})]},
            "document",
        ),
        ({"messages": [turn("user", TEXT), turn("assistant", TEXT)], "output_format": OBJECT}, "messages: .*no schema"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name: "),
        ({"messages": [turn("user", {"type": "text", "text": "far " * 2000})]}, "prompt is too long: "),
    ],
)
def test_an_error_names_the_field(serving: Serving, wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=named) as raised:
        client_of(serving).post("/v1/messages", body=asked() | wrong, cast_to=object)
    assert raised.value.type == "invalid_request_error"


def test_an_answer_follows_a_schema_by_each_of_its_names(demo: tuple[Any, Any]) -> None:
    class City(pydantic.BaseModel):
        city: Literal["Oslo", "Rome"]

    with saying(demo, "I do not know.") as serving:
        client = client_of(serving)
        for messages in (client.messages, client.beta.messages):
            parsed: Any = messages.parse(**asked(), output_format=City)
            assert parsed.parsed_output.city in ("Oslo", "Rome")
        for field in ({"output_format": OBJECT}, {"output_config": {"format": OBJECT}}):
            (text,) = client.messages.create(**asked(), extra_body=field).content
            assert json.loads(text.text)["city"] in ("Oslo", "Rome")


def test_errors_have_the_form_that_the_client_knows(demo: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with served(*demo, keys=(KEY,)) as serving:
        messages = client_of(serving).messages
        with pytest.raises(anthropic.AuthenticationError) as denied:
            client_of(serving, "wrong").messages.create(**asked())
        assert denied.value.type == "authentication_error"
        for name in ("x-api-key", "authorization"):
            headers = {name: f"Bearer {KEY}" if name == "authorization" else KEY, "anthropic-version": "2023-06-01"}
            got = httpx.post(
                f"{serving.url}/v1/messages?beta=true", json=asked(max_tokens=1), headers=headers, timeout=60
            )
            assert got.status_code == 200, name
        with pytest.raises(anthropic.NotFoundError) as missing:
            messages.create(**asked(model="claude"))
        assert missing.value.type == "not_found_error" and "'demo'" in missing.value.message
        monkeypatch.setattr(RequestScheduler, "submit", lambda self, request: request.deltas.put_nowait(1 // 0))
        with pytest.raises(anthropic.InternalServerError) as broken:
            messages.create(**asked())
        assert broken.value.type == "api_error" and "division" not in broken.value.message
        monkeypatch.setattr(RequestScheduler, "submit", lambda self, request: request.deltas.put_nowait(OSError("x")))
        with pytest.raises(anthropic.APIStatusError) as cut, client_of(serving).messages.stream(**asked()) as stream:
            list(stream)
        assert cut.value.type == "api_error"
        monkeypatch.undo()
        serving.scheduler.is_draining = True
        with pytest.raises(anthropic.OverloadedError) as full:
            messages.create(**asked())
        assert full.value.type == "overloaded_error"
        serving.scheduler.is_draining = False


def test_a_session_of_an_agent(demo: tuple[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    """As Claude Code sends it: each request brings all that was said, and the model reads only what is new."""
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=%d;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Look before you speak. " * 40, "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ]
    tools = [
        WEATHER,
        SEARCH,
        *({"name": f"mcp__server__{'x' * 60}{number}", "input_schema": {}} for number in range(14)),
    ]
    conversation: list[Any] = [turn("user", TEXT, TEXT), turn("system", TEXT)]
    more = {
        "tools": tools,
        "tool_choice": {"type": "tool", "name": "weather"},
        "metadata": {"user_id": "user_1"},
        "betas": ["claude-code-20250219", "interleaved-thinking-2025-05-14"],
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    with served(*demo, room_for(context=2048), template=TEMPLATE) as serving, caplog.at_level(logging.INFO):
        messages = client_of(serving).beta.messages
        usages, num_counted = [], []
        for number in range(3):
            said: Any = {"model": "demo", "messages": conversation, "system": [dict(block) for block in system]}
            said["system"][0]["text"] %= number
            count = messages.count_tokens(**said, tools=tools, betas=["token-counting-2024-11-01"])
            num_counted.append(count.input_tokens)
            with messages.stream(**said, **more, max_tokens=32_000, extra_body={"temperature": 0}) as stream:
                answer = stream.get_final_message()
            assert (answer.stop_reason, answer.content[-1].type) == ("tool_use", "tool_use")
            usages.append(answer.usage)
            of_tool = {**result(), "tool_use_id": answer.content[-1].id, "cache_control": {"type": "ephemeral"}}
            conversation += [{"role": "assistant", "content": answer.content}, turn("user", of_tool, TEXT)]
    for number, usage in enumerate(usages):
        assert usage.input_tokens + usage.cache_read_input_tokens == num_counted[number]
        if number:
            assert usage.cache_read_input_tokens > num_counted[number - 1] - 32, "all but a page of the turn before"
    for name in ("tools.web_search", "metadata", "context_management", "system.cache_control"):
        assert caplog.text.count(f"field '{name}':") == 1


@pytest.mark.slow
def test_the_variables_that_a_server_prints_are_what_clients_need(
    start: Callable[..., RunningCommand], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start("serve", "--port", "0", "--context", "256", "--memory", "50%", "--served-model-name", "my model")
    running.wait_until(lambda: "OPENAI_API_KEY" in running.out)
    lines = [line for line in running.out.splitlines() if line.strip().startswith("export ")]
    assert len(lines) <= 3
    printed = dict(word.split("=", 1) for line in lines for word in shlex.split(line)[1:])
    for name, value in printed.items():
        monkeypatch.setenv(name, value)
    request = {"messages": [{"role": "user", "content": "Hello"}], "model": printed["ANTHROPIC_MODEL"]}
    assert anthropic.Anthropic().messages.count_tokens(**request).input_tokens > 0  # type: ignore[arg-type]
    assert openai.OpenAI().models.list().data[0].id == "my model"
    assert printed["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "256"


CODEX = [
    {"type": "function", "name": "weather", "parameters": CITY, "strict": False},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
    {"type": "local_shell"},
    {"type": "web_search", "external_web_access": True},
    {"type": "tool_search", "name": "mcp"},
]
MAPS = [{"type": "namespace", "name": name, "description": "maps", "tools": CODEX[:1]} for name in ("mcp__maps__", "b")]


def test_responses_ignore_tools_that_are_not_here(demo: tuple[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    with saying(demo, CALL) as serving, caplog.at_level(logging.INFO):
        create: Any = serving.client.responses.create
        for _ in range(2):
            got = create(model="demo", input="Oslo?", tools=CODEX, store=False, include=["reasoning.encrypted_content"])
            assert [(item.type, item.name) for item in got.output] == [("function_call", "weather")]
        for choice in ({"type": "custom", "name": "apply_patch"}, {"type": "web_search"}):
            with pytest.raises(openai.BadRequestError, match=r"tool_choice: .*ignored.*weather"):
                create(model="demo", input="Oslo?", tools=CODEX, tool_choice=choice)
        with pytest.raises(openai.BadRequestError, match=r"tool_choice: .*ignored"):
            create(model="demo", input="Oslo?", tools=CODEX[1:], tool_choice="required")
    for name in ("apply_patch", "local_shell", "web_search", "mcp"):
        assert caplog.text.count(f"'tools.{name}'") == 1


def test_a_function_of_a_namespace_is_called_as_its_client_knows_it(demo: tuple[Any, Any]) -> None:
    """codex's form: the name beside the namespace. The model is told both in one, also of calls in the history."""
    call = CALL.replace("weather", "mcp__maps__weather")
    with saying(demo, call) as serving:
        create: Any = serving.client.responses.create
        item = create(model="demo", input="Oslo?", tools=MAPS).output[0].model_dump()
        assert (item["name"], item["namespace"], item["arguments"]) == ("weather", "mcp__maps__", '{"city": "Oslo"}')
        with serving.client.responses.stream(model="demo", input="Oslo?", tools=MAPS) as stream:  # type: ignore[arg-type]
            items = [event.item.model_dump() for event in stream if event.type.startswith("response.output_item.")]
        assert [(each["name"], each["namespace"]) for each in items] == [("weather", "mcp__maps__")] * 2
        forced = {"type": "function", "name": "weather", "namespace": "b"}
        with pytest.raises(openai.BadRequestError, match=r"tool_choice: .*mcp__maps__weather.*b__weather"):
            create(model="demo", input="Oslo?", tools=MAPS, tool_choice=forced | {"namespace": "c"})
        for alike in (MAPS[0] | {"name": "mcp__maps"}, CODEX[0] | {"name": "mcp__maps__weather"}):
            with pytest.raises(openai.BadRequestError, match=rf"tools: .*'mcp__maps__'.*{alike['name']}'.*same name"):
                create(model="demo", input="Oslo?", tools=[*MAPS, alike])
    said = [
        {"role": "user", "content": "Oslo?"},
        item,
        {"type": "function_call_output", "call_id": "1", "output": "rain"},
    ]
    request = ResponsesRequest.model_validate({"model": "demo", "input": said, "tools": MAPS, "tool_choice": forced})
    chat = check(ChatRequest, request.as_chat())
    assert [tool.function.name for tool in chat.offered] == ["mcp__maps__weather", "b__weather"]
    assert [tool.function.name for tool in chat.forced or ()] == ["b__weather"]
    assert '"name": "mcp__maps__weather"' in rendered(demo, request)


def test_responses_know_what_tools_of_other_servers_did(demo: tuple[Any, Any]) -> None:
    """What a client's tools did is told to the model; what servers did by themselves is left out."""
    said = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "Oslo?"}]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "Oslo"}},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "done"},
        {"type": "local_shell_call", "call_id": "2", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "a.txt"}]},
        {"type": "function_call_output", "call_id": "3", "output": [{"type": "input_image", "image_url": "data:"}]},
        {"type": "additional_tools", "role": "developer", "tools": []},
    ]
    request = ResponsesRequest.model_validate({"model": "demo", "instructions": "You are an agent.", "input": said})
    assert rendered(demo, request) == (
        "<system>You are an agent.\n\nBe brief\n<user>Oslo?\n"
        '<assistant><tool_call>\n{"name": "apply_patch", "arguments": "*** Begin"}\n</tool_call>\n'
        f"<tool>done\n<tool>a.txt\n<tool>{UNSEEN}\n<assistant>"
    )
