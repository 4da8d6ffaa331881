"""Calls, reasoning and grammars in each family's format, with the tokens of its vocabulary, by the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import openai
import pytest

import expertly
from tests.model.formats import ARGUMENTS, CLOCK, FAMILIES, MESSAGES, WEATHER, Family, scripts_of
from tests.scripts import make_scripted
from tests.serve.conftest import Serving, assembled_for, room_for, running, served
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


@pytest.fixture(scope="module")
def model(demo: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """One that says what each family writes for each of MESSAGES, a quarter of its experts in memory."""
    folder = make_scripted(tmp_path_factory.mktemp("scripted") / "model", demo[1], scripts_of(FAMILIES))
    model, tokenizer = expertly.load(str(folder), memory="25%", dtype="float32", device="cpu", system="lru")
    yield model, tokenizer
    stats = model._expertly_handle.stats.as_dict()
    assert stats["bytes_loaded"] > stats["expert_bytes"], "they are loaded again and again"
    expertly.unload(model)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_a_model_writes_is_told_as_calls_text_and_reasoning(model: tuple[Any, Any], family: Family) -> None:
    """Streamed and whole, one call of two where that is asked for, and a call that is forced, whatever it would say."""

    def answered(name: str, is_stream: bool, more: dict[str, Any]) -> tuple[Any, int]:
        body = {"chat_template_kwargs": {"thinking": "reasoning" in MESSAGES[name]}}
        more = {"tools": [WEATHER, CLOCK], "extra_body": body, "stream": is_stream, **more}
        got = serving.chat(f"Oslo? @{family.name} {name}@", 400, **more)
        if is_stream:
            chunks = list(got)
            return told(chunks), sum(bool(chunk.choices[0].delta.tool_calls) for chunk in chunks)
        (choice,) = got.choices
        thought = getattr(choice.message, "reasoning_content", "")
        return (choice.message.content or "", thought, choice.message.tool_calls or [], choice.finish_reason), 0

    named = {"type": "function", "function": {"name": "get-weather"}}
    forced = [{"tools": [FORCED], "tool_choice": choice} for choice in ("required", named)]
    asked: list[tuple[str, bool, dict[str, Any]]] = [(name, way, {}) for name in MESSAGES for way in (False, True)]
    asked += [("two", True, {"parallel_tool_calls": False})]
    asked += [("answer", how is forced[0], how) for how in forced]
    with served(*model, room_for(2048), family.template) as serving, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda way: answered(*way), asked))
    for (name, is_stream, more), ((content, reasoning, calls, reason), num_deltas) in zip(asked, answers, strict=True):
        made = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
        if "tool_choice" in more:
            ((called, arguments),) = made
            assert called == "get-weather" and arguments["city"] in ("Oslo", "Rome") and arguments["days"] in (1, 2)
            continue
        message = {"reasoning": "", "content": "", "calls": [], **MESSAGES[name]}
        if family.name == "llama-3" and name == "says":  # nothing marks its calls: they are all of an answer
            message |= {"content": family.written(**message), "calls": []}
        is_single = more or family.name == "gpt-oss"  # which waits for each
        assert made == message["calls"][: 1 if is_single else 2]
        assert content.strip() == message["content"]
        assert reasoning.strip() == (message["reasoning"] if "reasoning" in family.answer else "")
        assert reason == ("tool_calls" if made else "stop")
        assert len({call.id for call in calls}) == len(calls)
        assert family.name != "mistral" or all(call.id.isalnum() and len(call.id) == 9 for call in calls)
        assert family.name != "kimi-k2" or [call.id for call in calls] == [
            f"functions.{called}:{number}" for number, (called, _) in enumerate(made)
        ]
        if is_stream and ("get-weather", ARGUMENTS) in made:
            assert num_deltas > 6, "as they are written"


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
