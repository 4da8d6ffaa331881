"""An answer in parts: the same however the text comes, in each family's format."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from typing import Any

import pytest
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
from transformers.utils.chat_parsing import parse_response

from expertly.model.answer_formats import FORMATS, HERMES, format_of
from expertly.model.answers import AnswerFormat, AnswerPart
from tests.model.formats import ARGUMENTS, CLOCK, FAMILIES, KIMI, WEATHER, Family

TOOLS = [WEATHER, CLOCK]
CALL = '<tool_call>{"name": "clock", "arguments": {"city": "Oslo"}}</tool_call>'
CALLED = [["call", "clock"], ["arguments", '{"city": "Oslo"}']]
LINES = "\n" * 1000
WRONG = "<tool_call>no JSON</tool_call>"


def joined(parts: list[AnswerPart]) -> list[list[str]]:
    """Kinds and texts; neighbours of a kind as one, except calls."""
    result: list[list[str]] = []
    for part in parts:
        if result and result[-1][0] == part.kind != "call":
            result[-1][1] += part.text
        else:
            result.append([part.kind, part.text])
    return result


def read(form: AnswerFormat, text: str, prompt: str = "", tools: Any = TOOLS, **how: bool) -> list[list[str]]:
    """The parts, the same whole, in letters and in pieces of several sizes."""
    draw, results = random.Random(5), []
    for most in (len(text), 1, 4, 20, 20, 60):
        reader = form.reader(prompt, tools, **how)
        assert reader is not None
        left, parts = text, []
        while left:
            size = most if most in (len(text), 1) else draw.randint(1, most)
            parts += reader.add(left[:size])
            left = left[size:]
        results.append(joined(parts + reader.end()))
    assert results == [results[0]] * len(results)
    return results[0]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_family_is_found_by_its_template_or_vocabulary_and_its_answers_are_read(family: Family) -> None:
    result = format_of(family.template, ())
    assert result in FORMATS and (result is not HERMES) == (family.name != "qwen3")
    if family.name not in ("qwen3-coder", "deepseek-v3", "deepseek-v3.2", "minimax-m2"):  # one of another template
        assert format_of("{{ tools }}", {*family.special, *family.plain}) is result
    form = AnswerFormat(result)
    can_think, prompt = "reasoning" in family.answer, "<think>" if family.name == "deepseek-v3.1" else ""
    calls = [("get-weather", ARGUMENTS), ("clock", {})]
    said = {"content": "I look."} if family.name != "llama-3" else {}
    thought = {"reasoning": "Oslo is far."} if can_think else {}
    for is_whole in (False, True):
        got = read(form, family.written(calls=calls, **said, **thought), prompt, is_whole=is_whole)
        head = [["reasoning", "Oslo is far."]] * can_think + [["content", "I look."]] * bool(said)
        message = [[kind, text.strip()] for kind, text in got]
        assert message[: len(head)] == head
        assert [text for kind, text in got if kind == "call"] == ["get-weather", "clock"]
        arguments = [json.loads(text) for kind, text in got if kind == "arguments"]
        assert arguments == [ARGUMENTS, {}]
        assert len(got) == len(head) + 4
    single = read(form, family.written(calls=calls, **said), is_single=True)
    assert [text for kind, text in single if kind == "call"] == ["get-weather"]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_arguments_come_as_they_are_written(family: Family) -> None:
    """A long text is told before it ends; Python's syntax and numbers are told when they are complete."""
    text = family.written(calls=[("get-weather", {"city": "a" * 400})])
    reader = AnswerFormat(format_of(family.template, ())).reader("", TOOLS)
    assert reader is not None
    parts = [part for letter in text[: text.index("a" * 400) + 300] for part in reader.add(letter)]
    assert [part.text for part in parts if part.kind == "call"] == ["get-weather"]
    assert "".join(part.text for part in parts if part.kind == "arguments").count("a") >= 290


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Take a coat.", [["content", "Take a coat."]]),
        ("<think>Far.</think>Near.", [["reasoning", "Far."], ["content", "Near."]]),
        (f"<think>{CALL}</think>Near.", [["reasoning", CALL], ["content", "Near."]]),
        ("Say <think> to me", [["content", "Say <think> to me"]]),
        (f"I look. {WRONG} and more", [["content", f"I look. {WRONG} and more"]]),
        (f"{CALL}then {WRONG}{CALL}", [*CALLED, ["content", f"then {WRONG}{CALL}"]]),
        ("I look. <tool_call>{", [["content", "I look. <tool_call>{"]]),
        ("I look. <tool_call>", [["content", "I look. <tool_call>"]]),
        (f"I look.{LINES}{CALL}{LINES}Yes.{LINES}", [["content", "I look."], *CALLED, ["content", f"Yes.{LINES}"]]),
        ('<tool_call>{"arguments": {"city": "Oslo"}, "name": "clock"}</tool_call>', CALLED),
        ('<tool_call>{"name": "clock"}</tool_call>', [["call", "clock"], ["arguments", "{}"]]),
        ('<tool_call>{"name": "clock", "arguments": "{}"}</tool_call>', [["call", "clock"], ["arguments", "{}"]]),
    ],
)  # fmt: skip
def test_parts_are_the_same_however_the_text_comes(text: str, expected: list[list[str]]) -> None:
    assert read(AnswerFormat(), text) == expected
    assert read(AnswerFormat(), text, is_whole=True) == expected


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("<think>\n", "Far.</think>\n\nNear.", [["reasoning", "Far."], ["content", "Near."]]),
        ("<think>\n\n</think>\n\n", "\nNear.", [["content", "Near."]]),
        ("<think></think>", "<think>Far.</think>Near.", [["reasoning", "Far."], ["content", "Near."]]),
        ("<think>", f"Far. {CALL}", [["reasoning", f"Far. {CALL}"]]),
    ],
)
def test_reasoning_that_the_prompt_begins_or_ends(prompt: str, text: str, expected: list[list[str]]) -> None:
    assert read(AnswerFormat(), text, "user: <think>?\nassistant: " + prompt) == expected


@pytest.mark.parametrize(
    ("arguments", "streamed"),
    [
        ('{"city": oops}}</tool_call> and more', '{"city": oops}and more'),
        ('{"city": "Oslo"', '{"city": "Oslo"'),
        ('{"city": "Oslo"}</tool_call>', '{"city": "Oslo"}</tool_call>'),
        ('{"city": "Oslo"}} or not</tool_call>', '{"city": "Oslo"}} or not</tool_call>'),
    ],
)
def test_a_whole_answer_has_no_wrong_call_and_a_stream_loses_none_of_its_text(arguments: str, streamed: str) -> None:
    text = '<tool_call>{"name": "clock", "arguments": ' + arguments
    assert read(AnswerFormat(), text, is_whole=True) == [["content", text]]
    assert "".join(part[1] for part in read(AnswerFormat(), text)) == "clock" + streamed


@pytest.mark.parametrize(
    ("sign", "text", "calls", "content"),
    [
        ("<tool_call>", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>\\u00e5}{"}}</tool_call>', ["f"], ""),
        ("<tool_call>", '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g"}', ["f", "g"], ""),
        ("<tool_call>", '<tool_call>{"name": "f", "arguments": {}, "id": "1"}{"name": "g"}', ["f", "g"], ""),
        ("<tool_call>", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', [], None),
        ("<tool_call>", '<tool_call>{"name": "f", "arguments": "a"}</tool_call>', [], None),
        ("<tool_call>", '<tool_call>{"name": "f", "argumets": {"a": 1}}</tool_call>', [], None),
        ("<tool_call>", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', [], None),
        ("<tool_call>", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', [], None),
        ("<tool_call>", '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}</tool_call>', [], None),
        ("<tool_call>", '<tool_call>{"name": "\\ud800"}</tool_call>', [], None),
        ("<tool_call>", '<tool_call>{"name": "f", "arguments": {"a"}, b"}</tool_call>', [], None),
        ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "1"b"}, {"name": "g"}]', [], None),
        ("<arg_key>", "<tool_call>f\n and more</tool_call>", [], None),
        ("<arg_key>", "<tool_call>f\na</arg_key>\n<arg_value>x</arg_value>\n</tool_call>", [], None),
        ("<arg_key>", "<tool_call>f<tool_call>g\n</tool_call>", ["f", "g"], ""),
        ("<|tool_calls_section_begin|>", f"{KIMI[0]}{KIMI[1]}f:0{KIMI[2]}{{}}{KIMI[3]}{KIMI[1]}g:1{KIMI[2]}{{]", ["f"],
         f"{KIMI[1]}g:1{KIMI[2]}{{]"),
        ("<|channel|>", "<|channel|>commentary to=functions.f json<|message|><|call|>", [], None),
        ("<|channel|>", "<|channel|>commentary to=functions.f json<|message|>[1]<|call|>", [], None),
        ("<|channel|>", "<|channel|>commentary to=f json<|message|>{}<|call|>", ["f"], ""),
        ("<|header_start|>", "<|python_start|>[clock()]<|python_end|> and more", ["clock"], "and more"),
        ("<|header_start|>", "[clock(), clock(), other()]", [], None),
        ("<|header_start|>", "[clock()] is what I call", [], None),
    ],
)  # fmt: skip
def test_what_is_nearly_a_call_is_one_or_text(sign: str, text: str, calls: list[str], content: str | None) -> None:
    """None: all of it is text. In a stream, what was told of a call stays told; the rest is text."""
    form = AnswerFormat(format_of(sign, ()))
    whole = read(form, text, is_whole=True)
    assert [said for kind, said in whole if kind == "call"] == calls
    assert "".join(said for kind, said in whole if kind == "content") == (text if content is None else content)
    assert read(form, text, is_whole=False)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_no_word_is_lost_of_an_answer_that_is_cut_doubled_or_has_marks_at_any_place(family: Family) -> None:
    draw, form = random.Random(family.name), AnswerFormat(format_of(family.template, ()))
    arguments = {"city": "w1w } {", "x": [1, {"w2w": "w3w</tool_call>"}]}
    said = family.written(content="w5w", reasoning="w6w", calls=[("get-weather", arguments), ("clock", {"w4w": ""})])
    for _ in range(12):
        text = said
        for _ in range(draw.randint(1, 3)):
            begin = draw.randint(0, len(text))
            end, mark = begin + draw.choice([1, 5, 20, len(text)]), draw.choice([*family.words, *'{}"[],:\\', "\n"])
            text = draw.choice(
                [text[:begin] + text[end:], text[:end] + text[begin:], text[:begin] + mark + text[begin:]]
            )
        words = re.findall(r"w\dw", re.sub(r"<\|channel\|>[^<]*<\|message\|>", "", text))  # a head is no text
        for is_whole in (False, True):
            told = read(form, text, "<think>" if family.name == "deepseek-v3.1" else "", is_whole=is_whole)
            assert not Counter(words) - Counter(re.findall(r"w\dw", json.dumps(told))), text
            made = "".join("\0" if kind == "call" else said * (kind == "arguments") for kind, said in told)
            assert not is_whole or all(isinstance(json.loads(each), dict) for each in made.split("\0")[1:]), text


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_malformed_calls_of_each_family_stay_content(family: Family) -> None:
    written = family.written(content="", calls=[("get-weather", {"city": "Oslo"})])
    form = AnswerFormat(format_of(family.template, ()))
    for how in ({"is_whole": False}, {"is_whole": True}):
        (part,) = read(form, written.replace("get-weather", ""), **how)
        assert part[0] == "content" and "Oslo" in part[1]


def test_python_calls_of_llama() -> None:
    form = AnswerFormat(format_of("<|header_start|>", ()))
    text = "[clock(), get-weather(city='Oslo', days=3)]"
    assert read(form, text) == [
        ["call", "clock"], ["arguments", "{}"], ["call", "get-weather"], ["arguments", '{"city": "Oslo", "days": 3}'],
    ]  # fmt: skip
    for content in ("[1](a link)", "[other(a=1)]", '{"name": "Oslo", "parameters": {}}', '{"a": 1}'):
        assert read(form, content) == [["content", content]]


@pytest.mark.parametrize(
    ("sign", "text"),
    [
        ("<function=", "<function=clock>\n</function>\n</tool_call>"),
        ("<function=", "<tool_call><function=clock></function></tool_call>"),
        ("<tool_call>", '<tool_call>{"type": "function", "name": "clock", "parameters": {}, "id": "1"}</tool_call>'),
        ("<tool_call>", '<tool_call>\n{"name": "clock", "arguments": {}}'),
        ("<arg_key>", "<tool_call>clock</tool_call>"),
        ("<start_header_id> <|python_tag|> <|header_start|>", '<|python_tag|>{"name": "clock", "parameters": {}}'),
        ("<|header_start|>", "<|python_start|>[clock()]<|python_end|>"),
        ("[TOOL_CALLS] [ARGS]", "[TOOL_CALLS]clock{}"),
        ("[TOOL_CALLS] [ARGS]", "[TOOL_CALLS]clock[CALL_ID]abcdefghi[ARGS]{}"),
        ("[TOOL_CALLS]", '[TOOL_CALLS] [{"name": "clock", "arguments": {}}]'),
        ("<｜tool▁sep｜>", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}"),
        ("<|channel|>", " to=functions.clock<|channel|>commentary json<|message|>{}"),
        ("<|channel|>", "<|channel|>analysis to=functions.clock code<|message|>{}<|call|>"),
        ("<|tool_call>call:", "<|tool_call>call:clock{}<tool_call|>"),
    ],
)
def test_what_models_write_beside_their_templates(sign: str, text: str) -> None:
    for is_whole in (False, True):
        assert read(AnswerFormat(format_of(sign, ())), text, is_whole=is_whole) == [
            ["call", "clock"],
            ["arguments", "{}"],
        ]


@pytest.mark.parametrize(("channel", "kind"), [("analysis", "reasoning"), ("final", "content")])
def test_a_text_before_the_mark_of_a_message_is_told_and_its_type_is_not(channel: str, kind: str) -> None:
    form = AnswerFormat(format_of("<|channel|>", ()))
    text = f"<|channel|>{channel} It rains.<|message|>Take a coat.<|end|>"
    assert read(form, text) == [[kind, "It rains.\nTake a coat."]]
    assert read(form, text.replace("It rains.", "text")) == [[kind, "Take a coat."]]


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "integer"}, "5", 5),
        ({"type": "number"}, "5", 5),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5a", "5a"),
        ({"type": "boolean"}, "True", True),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"$ref": "#/$defs/text"}, "5", "5"),
        ({}, "5", 5),
        ({}, "a: b", "a: b"),
        ({"type": "object"}, '{"a": "b"}', {"a": "b"}),
        ({"type": "string"}, '{"a": "b"}', '{"a": "b"}'),
    ],
)
def test_values_without_quotes_have_the_types_of_the_schema(schema: Any, value: str, expected: Any) -> None:
    parameters = {"properties": {"x": schema}, "$defs": {"text": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"
    (_, arguments) = read(AnswerFormat(format_of("<function=", ())), text, tools=[tool])
    assert json.loads(arguments[1]) == {"x": expected}


NAMED = {"name": "{name}", "arguments": "{content}"}


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        ({"open": ["<c>"], "close": "</c>", "transform": {"function": "{content}"}}, f"<c>{CALL[11:-12]}</c>"),
        (
            {"open_pattern": r"\s*<c\|(?P<name>\w+)>\s*", "transform": {"function": NAMED}},
            '<c|clock>{"city": "Oslo"}',
        ),
        ({"open": "<c>", "content": "xml-inline", "transform": {"function": "{content}"}}, CALL),
        ({"open_pattern": "<[cd]>", "transform": {"function": "{content}"}}, CALL),
        ({"open": "<c>", "transform": {"function": "{content.call}"}}, CALL),
    ],
)  # fmt: skip
def test_a_response_template_of_json_between_marks_says_the_format(calls: dict[str, Any], text: str) -> None:
    """Not one of another kind, nor where the chat template shows the format."""
    fields = {"thinking": {"open": "[T]", "close": "[/T]"}, "tool_calls": {"content": "json", **calls}}
    assert read(AnswerFormat(format_of("", (), {"fields": fields})), f"I look. {text}")[1:] == CALLED
    assert format_of("<function=", (), {"fields": fields}).name == "qwen3-coder"


def test_where_the_parser_of_transformers_is_not_right() -> None:
    """It drops the indentation of a Qwen3-Coder's value, and knows no dash in a name of Gemma's."""
    by_type = {model: template for models, template in _RESPONSE_TEMPLATE_FALLBACKS.items() for model in models}
    families = {family.name: family for family in FAMILIES}
    indented = families["qwen3-coder"].written(calls=[("get-weather", {"city": "  Oslo"})])
    (call,) = parse_response(indented, by_type["qwen3_5_moe"], prefix="")["tool_calls"]
    assert call["function"]["arguments"] == {"city": "Oslo"}
    assert json.loads(read(AnswerFormat(format_of("<function=", ())), indented)[1][1]) == {"city": "  Oslo"}
    dashed = families["gemma-4"].written(calls=[("get-weather", {})])
    with pytest.raises(ValueError):
        parse_response(dashed, by_type["gemma4"], prefix="")
    assert read(AnswerFormat(format_of("<|tool_call>call:", ())), dashed)[0] == ["call", "get-weather"]
