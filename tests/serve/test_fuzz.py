"""Each value of a request, however deep, replaced by wrong ones: never a 500, and every error in one shape."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve.conftest import Serving, assembled_for, room_for, running
from tests.serve.scripted import scripted

TUNED = """ "model": "demo", "temperature": 1, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1,
    "seed": 1, "stop": ["a"], "stop_token_ids": [5], "presence_penalty": 1, "frequency_penalty": 1,
    "logit_bias": {"5": 1}, "stream": false """
SAID = """ "model": "demo", "messages": [{"role": "system", "content": [{"type": "text", "text": "a"}], "name": "b"},
    {"role": "assistant", "tool_calls":
        [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "1", "content": "c"}] """
ASKED = """ "model": "demo", "messages": [{"role": "user", "content": "a"}] """
FUNCTION = """ "name": "f", "description": "d", "parameters": {"properties": {"a": {"enum": [1]}}} """
RIGHT = [
    ("completions", f'{TUNED}, "prompt": ["a", "b"], "max_tokens": 1, "n": 1, "echo": true'),
    ("completions", '"model": "demo", "prompt": [[5]], "max_tokens": 1, "logprobs": 1, "stream_options": {}'),
    ("chat/completions", f'{TUNED}, {SAID}, "max_tokens": 1, "logprobs": true, "top_logprobs": 1'),
    (
        "chat/completions",
        f"""{ASKED}, "tools": [{{"type": "function", "function": {{{FUNCTION}}}}}], "parallel_tool_calls": false,
        "tool_choice": {{"type": "function", "function": {{"name": "f"}}}}, "reasoning_effort": "low",
        "chat_template_kwargs": {{"a": 1}}, "max_completion_tokens": 1""",
    ),
    (
        "chat/completions",
        f"""{ASKED}, "max_tokens": 1, "response_format":
        {{"type": "json_schema", "json_schema": {{"name": "a", "schema": {{"const": 1}}}}}}""",
    ),
    (
        "responses",
        f"""{TUNED}, "input": [{{"role": "user", "content": [{{"type": "input_text", "text": "a"}}]}},
        {{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{{}}"}}, {{"type": "reasoning"}},
        {{"type": "function_call_output", "call_id": "1", "output": "c"}}], "instructions": "a",
        "max_output_tokens": 1, "reasoning": {{"effort": "low"}}, "tools": [{{"type": "function", {FUNCTION}}}],
        "text": {{"format": {{"type": "text"}}}}""",
    ),
    (
        "messages",
        f"""{TUNED}, "max_tokens": 1, "system": [{{"type": "text", "text": "a"}}], "stop_sequences": ["a"],
        "messages": [{{"role": "user", "content": [{{"type": "text", "text": "a"}}]}}, {{"role": "assistant",
            "content": [{{"type": "thinking", "thinking": "b"}}, {{"type": "tool_use", "id": "1", "name": "f",
            "input": {{}}}}]}}, {{"role": "user", "content": [{{"type": "tool_result", "tool_use_id": "1",
            "content": [{{"type": "text", "text": "a"}}], "is_error": true}}]}}],
        "tools": [{{"name": "f", "input_schema": {{}}}}, {{"type": "bash_20250124", "name": "bash"}}],
        "tool_choice": {{"type": "auto"}}, "thinking": {{"type": "enabled"}}, "output_config": {{"effort": "low"}}""",
    ),
    (
        "messages",
        """ "model": "demo", "max_tokens": 1, "ignore_eos": true, "messages": [{"role": "user", "content": [{"type":
        "document", "title": "a", "source": {"type": "content", "content": [{"type": "text", "text": "b"}]}}]},
        {"role": "assistant", "content": [{"type": "server_tool_use", "id": "1", "name": "f", "input": {"a": 1}},
            {"type": "web_search_tool_result", "content": [{"type": "web_search_result", "url": "a"}]}]},
        {"role": "user", "content": [{"type": "search_result", "source": "a", "title": "b", "content": []}]}],
        "output_format": {"type": "text"} """,
    ),
]
"""Paths, and objects that are right, without their braces."""

WRONG = [None, True, -1, 1.5, 10**30, "", "x", "\u0000", [], [None], {}, {"a": {}}, [[]], [{"role": "user"}]]


@pytest.fixture(scope="module")
def small(demo: tuple[Any, Any]) -> Iterator[Serving]:
    """The model says what it is told to, so that what is right is answered soon."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ (tools or [])[:0] }}"
    assembled = assembled_for(*demo, room_for(context=64, max_running=16), template)
    with running(scripted(assembled, "Hello there", demo[1])) as serving:
        yield serving


def replaced(value: Any) -> Iterator[Any]:
    """Copies with one value in it, or all of it, replaced by each wrong one."""
    yield from WRONG
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        for wrong in replaced(value[key]):
            changed = copy.copy(value)
            changed[key] = wrong
            yield changed


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(RIGHT)))
def test_every_value_replaced_by_every_kind_of_value(small: Serving, number: int) -> None:
    path, right = f"/v1/{RIGHT[number][0]}", json.loads(f"{{{RIGHT[number][1]}}}")
    statuses = set()
    with small.http(headers={"content-type": "application/json"}) as client:
        got = client.post(path, json=right)
        assert got.status_code == 200, got.text
        for body in replaced(right):
            got = client.post(path, content=json.dumps(body))
            check(got)
            statuses.add(got.status_code)
        assert client.post(path, json=right).status_code == 200, "nothing that was refused stays"
    assert statuses == {200, 400, 404}
    assert not small.scheduler.running and not small.scheduler.waiting


def check(response: httpx.Response) -> None:
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error, is_anthropic = response.json()["error"], response.url.path == "/v1/messages"
        assert set(error) == {"message", "type"} | (set() if is_anthropic else {"param", "code"})
        assert isinstance(error["message"], str) and error["message"]
