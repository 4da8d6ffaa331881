"""Calls, reasoning and grammars in each family's format, with the tokens of its vocabulary, by the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import openai
import pytest

from tests.model.formats import ARGUMENTS, CLOCK, FAMILIES, WEATHER, Family
from tests.serve.conftest import Serving, assembled_for, room_for, running
from tests.serve.scripted import scripted
from tests.serve.test_tools import told

SCHEMA = {
    "type": "object",
    "properties": {"place": {"const": "<tool_call> & <|im_end|>"}, "days": {"enum": [1, 2]}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
BY_NAME = {family.name: family for family in FAMILIES}


@cache
def tokenizer_of(tokenizer: Any, family: Family) -> Any:
    return family.tokenizer(tokenizer, 8192)


@contextmanager
def saying(demo: tuple[Any, Any], family: Family, text: str, template: str = "") -> Iterator[Serving]:
    tokenizer = tokenizer_of(demo[1], family)
    assembled = assembled_for(demo[0], tokenizer, room_for(2048), template or family.template)
    with running(scripted(assembled, text, tokenizer)) as serving:
        yield serving


def ask(serving: Serving, **more: Any) -> Any:
    return serving.chat("Oslo?", **({"max_tokens": 400, "tools": [WEATHER, CLOCK]} | more))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_calls_and_reasoning_are_told_streamed_and_whole(demo: tuple[Any, Any], family: Family) -> None:
    said = {"content": "I look."} if family.name != "llama-3" else {}
    thought = {"reasoning": "Oslo is far."} if "reasoning" in family.answer and family.name != "deepseek-v3.1" else {}
    calls = [("get-weather", ARGUMENTS), ("clock", {})][: 1 if family.name == "gpt-oss" else 2]  # which waits for each
    with saying(demo, family, family.written(calls=calls, **said, **thought)) as serving:
        whole = ask(serving).choices[0]
        assert whole.finish_reason == "tool_calls"
        functions = [call.function for call in whole.message.tool_calls]
        assert [(call.name, json.loads(call.arguments)) for call in functions] == calls
        assert len({call.id for call in whole.message.tool_calls}) == len(calls)
        assert (whole.message.content or "").strip() == said.get("content", "")
        assert getattr(whole.message, "reasoning_content", "").strip() == thought.get("reasoning", "")
        chunks = list(ask(serving, stream=True))
        content, reasoning, streamed, reason = told(chunks)
        assert [(call.function.name, call.function.arguments) for call in streamed] == [
            (call.name, call.arguments) for call in functions
        ]
        assert (content.strip(), reasoning.strip()) == (said.get("content", ""), thought.get("reasoning", ""))
        assert reason == "tool_calls"
        assert sum(bool(chunk.choices[0].delta.tool_calls) for chunk in chunks) > 10, "as they are written"
        single = ask(serving, parallel_tool_calls=False).choices[0].message
        assert [call.function.name for call in single.tool_calls] == ["get-weather"]


def test_ids_are_those_that_templates_accept(demo: tuple[Any, Any]) -> None:
    for name, accepted in (("kimi-k2", "functions.clock:0"), ("mistral", None)):
        family = BY_NAME[name]
        with saying(demo, family, family.written(calls=[("clock", {})])) as serving:
            (call,) = ask(serving).choices[0].message.tool_calls
            assert call.id == accepted if accepted else call.id.isalnum() and len(call.id) == 9


def test_channels_of_harmony(demo: tuple[Any, Any]) -> None:
    family = BY_NAME["gpt-oss"]
    said = family.written(reasoning="Far.", content="Take a coat.")
    with saying(demo, family, said + "<|return|><|start|>user") as serving:
        for tools in ([], [WEATHER]):
            got = ask(serving, tools=tools).choices[0].message
            assert (got.content, got.reasoning_content) == ("Take a coat.", "Far.")
            assert told(ask(serving, tools=tools, stream=True))[:2] == ("Take a coat.", "Far.")
    odd = " to=functions.clock<|channel|>commentary json<|message|>{}<|call|> more"
    with saying(demo, family, family.written(reasoning="I call.") + odd) as serving:
        got = ask(serving).choices[0]
        assert [call.function.name for call in got.message.tool_calls] == ["clock"]
        assert (got.message.content, got.finish_reason) == (None, "tool_calls")


STRICT = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORCED = {"type": "function", "function": {"name": "get-weather", "parameters": STRICT}}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_call_is_forced_in_each_format(demo: tuple[Any, Any], family: Family) -> None:
    """Whatever the model would like to say."""
    named = {"type": "function", "function": {"name": "get-weather"}}
    with saying(demo, family, family.written(reasoning="Hm.", content="Well, let us talk.")) as serving:
        for choice in ("required", named):
            for is_stream in (False, True):
                how = {"tools": [FORCED], "tool_choice": choice, "stream": is_stream}
                if not family.can_force:
                    with pytest.raises(openai.BadRequestError, match="accepted: tool_choice auto") as raised:
                        ask(serving, **how)
                    assert raised.value.param == "tool_choice"
                    continue
                answer = ask(serving, **how)
                calls = told(answer)[2] if is_stream else answer.choices[0].message.tool_calls
                assert [call.function.name for call in calls] == ["get-weather"]
                arguments = json.loads(calls[0].function.arguments)
                assert arguments["city"] in ("Oslo", "Rome") and arguments["days"] in (1, 2)


@pytest.mark.parametrize("name", ["qwen3-coder", "glm-4.6", "minimax-m2", "deepseek-v4"])
def test_arguments_may_be_text_or_null_and_hold_the_mark_that_ends_them(demo: tuple[Any, Any], name: str) -> None:
    """Of formats that write each by itself: a call is not lost, nor does a text get quotes of its own."""
    family, ending = BY_NAME[name], {"deepseek-v4": "</｜DSML｜parameter>", "glm-4.6": "</arg_value>"}
    text = f"close it with {ending.get(name, '</parameter>')}, then go"
    properties = {"text": {"type": "string"}, "unit": {"enum": ["C", "F", None]}}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    tool = {"type": "function", "function": {"name": "get-weather", "parameters": parameters}}
    with saying(demo, family, family.written(calls=[("get-weather", {"text": text, "unit": '"C"'})])) as serving:
        for choice in ("auto",) if name == "glm-4.6" else ("required", "auto"):  # GLM's mark is a token, which ends it
            (call,) = ask(serving, tools=[tool], tool_choice=choice).choices[0].message.tool_calls
            arguments = json.loads(call.function.arguments)
            assert arguments["text"] == text
            assert arguments["unit"] == "C" if choice == "required" else arguments["unit"] in ("C", '"C"')


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "deepseek-v3.1", "mistral", "llama-3"])
def test_a_schema_applies_behind_the_reasoning(demo: tuple[Any, Any], name: str) -> None:
    """Whether the model opens it, the template does, or there is none. A schema may hold a special token's text."""
    family = BY_NAME[name]
    opened = family.template.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
    )
    texts = [(family.written(content=""), family.template), (family.written(reasoning="Hm, {far}."), family.template)]
    texts += [("Hm, {far}.\n</think>\n\n", opened)] * (opened != family.template)
    for thought, template in texts:
        if name == "deepseek-v3.1" and thought:
            continue
        with saying(demo, family, thought + family.written(content="Well, no."), template) as serving:
            got = ask(serving, tools=[], response_format=AS_SCHEMA).choices[0]
            assert json.loads(got.message.content)["place"] == "<tool_call> & <|im_end|>"
            assert ("far" in getattr(got.message, "reasoning_content", "")) == ("far" in thought)
            assert got.finish_reason == "stop"
            streamed = told(ask(serving, tools=[], response_format=AS_SCHEMA, stream=True))
            assert streamed[0] == got.message.content
            if "far" in thought:
                forced = ask(serving, tools=[FORCED], tool_choice="required").choices[0].message
                assert [call.function.name for call in forced.tool_calls] == ["get-weather"]
                assert "far" in forced.reasoning_content


@pytest.mark.parametrize("name", ["qwen3", "qwen3-coder", "gpt-oss", "kimi-k2", "glm-4.6", "llama-3"])
def test_tools_with_a_schema_give_a_call_or_a_text_that_follows_it(demo: tuple[Any, Any], name: str) -> None:
    family = BY_NAME[name]
    call = family.written(calls=[("get-weather", {"city": "Rome", "days": 2})])
    with saying(demo, family, call) as serving:
        got = ask(serving, tools=[FORCED], response_format=AS_SCHEMA).choices[0]
        assert json.loads(got.message.tool_calls[0].function.arguments) == {"city": "Rome", "days": 2}
        assert got.message.content is None
    text = '{"place":"<tool_call> & <|im_end|>","days":2}'
    head = "<|channel|>final<|message|>" if name == "gpt-oss" else ""
    with saying(demo, family, head + text) as serving:
        got = ask(serving, tools=[FORCED], response_format=AS_SCHEMA).choices[0].message
        assert json.loads(got.content)["place"] == "<tool_call> & <|im_end|>" and got.tool_calls is None


@pytest.mark.parametrize(
    ("wish", "accepted"),
    [
        ({"regex": "Oslo/\\\n[a-c]"}, lambda text: text[:6] == "Oslo/\n" and len(text) == 7),
        ({"regex": r"(Oslo|Rome)/[0-9]{2}"}, lambda text: text[:5] in ("Oslo/", "Rome/") and len(text) == 7),
        ({"choice": ["yes", "no \"really\""]}, lambda text: text in ("yes", "no \"really\"")),
        ({"grammar": 'start: "a" b+\nb: <tool_call> | "b/" // one'}, lambda text: text.startswith("ab/")),
        ({"json": {"type": "array", "items": {"enum": [7]}, "minItems": 2}}, lambda text: text.startswith("[7,7")),
    ],
)  # fmt: skip
def test_other_grammars(demo: tuple[Any, Any], wish: Any, accepted: Any) -> None:
    family = BY_NAME["qwen3"]
    with saying(demo, family, "Oslo/") as serving:
        got = ask(serving, tools=[], extra_body={"structured_outputs": wish}, max_tokens=12).choices[0].message.content
        assert accepted(got), got
        text = serving.complete("Oslo", 12, extra_body={"structured_outputs": wish}).choices[0].text
        assert accepted(text), text


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "one of json, regex, choice and grammar"),
        ({"structured_outputs": {}}, "one of json, regex, choice and grammar"),
        ({"structured_outputs": {"structural_tag": "x"}}, "one of json, regex, choice and grammar"),
        ({"structured_outputs": {"regex": "a"}, "response_format": AS_SCHEMA}, "it or response_format"),
        ({"guided_regex": "a"}, "structured_outputs.regex"),
    ],
)
def test_wrong_grammars_are_refused(demo: tuple[Any, Any], wish: Any, said: str) -> None:
    with saying(demo, BY_NAME["qwen3"], "x") as serving, pytest.raises(openai.BadRequestError, match=said):
        ask(serving, tools=[], extra_body=wish)


def test_a_grammar_that_allows_nothing_is_an_error(demo: tuple[Any, Any]) -> None:
    """Not an answer that ends in the middle."""
    endless = {"$ref": "#/$defs/a"}
    names = "".join(f"{number}" for number in range(30))
    schema = {"type": "object", "properties": {names: endless}, "required": [names], "$defs": {"a": endless}}
    with saying(demo, BY_NAME["qwen3"], "x") as serving:
        for wrong in (endless | {"$defs": {"a": endless}}, schema):
            with pytest.raises(openai.APIStatusError, match=r"structured_outputs|grammar"):
                serving.complete("Oslo", 100, extra_body={"structured_outputs": {"json": wrong}})


def test_only_a_template_that_shows_reasoning_lets_it_come_before_a_forced_call(demo: tuple[Any, Any]) -> None:
    with saying(demo, BY_NAME["qwen3-coder"], "<think>\nHm.\n</think>\nYes.") as serving:
        free, forced = (ask(serving, tools=[FORCED], tool_choice=choice) for choice in ("auto", "required"))
        assert (free.choices[0].message.reasoning_content, free.choices[0].message.content) == ("Hm.\n", "Yes.")
        assert forced.choices[0].message.tool_calls and not hasattr(forced.choices[0].message, "reasoning_content")
