"""The formats in which models write calls of tools and reasoning, found by a model's chat template and vocabulary."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import regex

_SPACE = r"(?<!\s)\s*+"
"""All of it, so that a search does not begin anew at each of a thousand line breaks."""

_NAME = r"(?P<name>[\w.\-]+)"


@dataclass(frozen=True)
class CallFormat:
    """One format, as a model writes it. `signs`: a template or vocabulary with all words of one of them is this
    format's. `call` has a `{name}` and `{arguments}`, `parameter` a `{key}` and `{value}`; `section` is around one call
    or several. White space at their marks may differ. `head` is a pattern of a call up to its arguments where it is
    more than `call` says. `ends`: tokens that end an answer.

    `kind`: the arguments are JSON behind the name ("json"), in an object with the name ("object"), or each a
    parameter; or the format is that of one family.
    """

    name: str
    kind: Literal["json", "object", "parameters", "gemma", "harmony"]
    signs: tuple[str, ...]
    section: tuple[str, str]
    call: str
    parameter: str = ""
    head: str = ""
    think: tuple[str, str] = ("<think>", "</think>")
    ends: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """All marks."""
        return " ".join((*self.section, self.call, self.parameter, *self.think, *self.ends, *self.signs))

    @property
    def open_mark(self) -> str:
        """What a section or call begins with; nothing in a format whose calls look like content."""
        return self.section[0] or ("" if self.call.startswith("{") else self.call.partition("{")[0])

    @cached_property
    def open_re(self) -> regex.Pattern[str]:
        opening = flexible(self.section[0])
        if self.kind == "parameters" and (first := flexible(self.call.partition("{name}")[0])):
            return _compiled(rf"{_SPACE}(?:{opening}\s*)?(?={first})")  # some models leave the section's mark out
        if opening:
            return _compiled(_SPACE + opening)
        # nothing marks it: it is JSON, or Python
        start = r'\{\s*"(?:type|name|parameters|function)"' + rf"|\[\s*{_NAME}\("
        return _compiled(rf"[\s;,]*+(?:<\|python_(?:tag|start)\|>)?\s*+(?={start})")

    @cached_property
    def close_re(self) -> regex.Pattern[str]:
        return _compiled(r"\s*" + flexible(self.section[1]))

    @cached_property
    def head_re(self) -> regex.Pattern[str]:
        before, _, behind = self.call.partition("{arguments}")[0].partition("{name}")
        head = self.head or flexible(before) + _NAME + r"\s*" + flexible(behind)
        return _compiled(r"\s*" + head + ("" if self.kind == "parameters" else r"\s*(?=\{)"))

    @cached_property
    def tail_re(self) -> regex.Pattern[str]:
        return _compiled(r"\s*" + flexible(self.call.partition("{arguments}")[2]))

    @cached_property
    def parameter_re(self) -> tuple[regex.Pattern[str], regex.Pattern[str]]:
        """What opens a parameter, and what closes it: a mark with another parameter or the call's end behind it. A line
        break beside a value is none of it where the format has one there.
        """
        opening, _, closing = self.parameter.partition("{value}")
        before, _, behind_key = opening.partition("{key}")
        behind_key = flexible(behind_key).replace('string="true"', 'string="(?P<is_text>true|false)"')
        edge = "\n?" if closing.startswith("\n") else ""
        opening = r"\s*" + flexible(before) + r'(?P<key>[^<>"]+)' + behind_key + edge
        behind = self.call.partition("{arguments}")[2] or self.section[1]
        return _compiled(opening), _compiled(
            rf"{edge}{flexible(closing)}(?=\s*(?:{flexible(before)}|{flexible(behind)}))"
        )

    @property
    def ids(self) -> slice:
        """Of an id, what templates accept: Mistral's want nine letters and digits."""
        return slice(5, 14) if self.name.startswith("mistral") else slice(None)


def _compiled(pattern: str) -> regex.Pattern[str]:
    return regex.compile(pattern, regex.DOTALL)


def flexible(text: str) -> str:
    """A pattern of `text` with any white space between its words and marks."""
    words: list[str] = regex.findall(r"[^\s>\]]+[>\]]?|[>\]]", text)
    return r"\s*".join(regex.escape(word, special_only=True) for word in words)


_OBJECT = '{"name": "{name}", "arguments": {arguments}}'
_INVOKE = '<{0}invoke name="{name}">\n{arguments}</{0}invoke>\n'
_PARAMETER = '<{0}parameter name="{key}">{value}</{0}parameter>\n'
_DSML = (_INVOKE.replace("{0}", "｜DSML｜"), _PARAMETER.replace("{0}", "｜DSML｜").replace('">{', '" string="true">{'))
_KIMI_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")

_TURN_ENDS = ("<|eom_id|>", "<|eot_id|>", "<|eom|>", "<|eot|>")
_HARMONY = "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
_KIMI = "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
_KIMI_HEAD = rf"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?+{_NAME}:\d+)\s*<\|tool_call_argument_begin\|>"
_MISTRAL_HEAD = _NAME + r"(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?"
_MISTRAL_THINK = ("[THINK]", "[/THINK]")
_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
_V31 = "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
_GEMMA_SIGNS = ("<|tool_call>call:", "<|tool_call> <tool_call|>")
_QWEN = ("<function={name}>\n{arguments}</function>\n", "<parameter={key}>\n{value}\n</parameter>\n")
_GLM = ("{name}\n{arguments}", "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n")
_MINIMAX = (_INVOKE.replace("{0}", ""), _PARAMETER.replace("{0}", ""))


def _around(section: str) -> tuple[str, str]:
    return f"<{section}>\n", f"</{section}>"


# fmt: off
FORMATS = (
    CallFormat("harmony", "harmony", ("<|channel|>",), ("", ""), _HARMONY,
               think=("<|channel|>analysis<|message|>", "<|end|>"), ends=("<|return|>", "<|call|>")),
    CallFormat("gemma 4", "gemma", _GEMMA_SIGNS, ("<|tool_call>", "<tool_call|>"), "call:{name}{arguments}", '<|"|>',
               think=("<|channel>thought\n", "<channel|>"), ends=("<turn|>", "<|tool_response>")),
    CallFormat("minimax m2", "parameters", ("<minimax:tool_call>",), _around("minimax:tool_call"), *_MINIMAX),
    CallFormat("deepseek v3.2", "parameters", ("｜DSML｜ function_calls",), _around("｜DSML｜function_calls"), *_DSML),
    CallFormat("deepseek v4", "parameters", ("｜DSML｜",), _around("｜DSML｜tool_calls"), *_DSML),
    CallFormat("deepseek v3", "json", ("<｜tool▁sep｜> ```json",), _DEEPSEEK_SECTION, _V3),
    CallFormat("deepseek v3.1", "json", ("<｜tool▁sep｜>",), _DEEPSEEK_SECTION, _V31),
    CallFormat("kimi k2", "json", (_KIMI_SECTION[0],), _KIMI_SECTION, _KIMI, head=_KIMI_HEAD),
    CallFormat("glm 4", "parameters", ("<arg_key>",), ("<tool_call>", "</tool_call>"), *_GLM),
    CallFormat("qwen3-coder", "parameters", ("<function=",), _around("tool_call"), *_QWEN),
    CallFormat("hermes", "object", ("<tool_call>",), ("<tool_call>\n", "\n</tool_call>"), _OBJECT),
    CallFormat("mistral", "json", ("[TOOL_CALLS] [ARGS]",), ("[TOOL_CALLS]", ""), "{name}[ARGS]{arguments}",
               head=_MISTRAL_HEAD, think=_MISTRAL_THINK),
    CallFormat("mistral, list", "object", ("[TOOL_CALLS]",), ("[TOOL_CALLS][", "]"), _OBJECT, think=_MISTRAL_THINK),
    CallFormat("llama", "object", ("<|start_header_id|>", "<|header_start|>"), ("", ""),
               _OBJECT.replace("arguments", "parameters", 1), ends=_TURN_ENDS),
)
# fmt: on

HERMES = next(row for row in FORMATS if row.name == "hermes")
"""That of most models, and of those whose template and vocabulary say nothing of another."""


def format_of(source: str, added: Collection[str], template: dict[str, Any] | None = None) -> CallFormat:
    """The format of a chat template's source; where it shows none, of a response `template` of transformers, or of the
    `added` tokens.
    """

    def shown(words: str | Collection[str]) -> CallFormat | None:
        return next((row for row in FORMATS if any(all(w in words for w in sign.split()) for sign in row.signs)), None)

    return shown(source) or _declared((template or {}).get("fields", {})) or shown(added) or HERMES


def _declared(fields: dict[str, Any]) -> CallFormat | None:
    """The format of calls in JSON between marks, which the fields of a response template name; None for another."""

    def mark(field: dict[str, Any], side: str) -> str:
        if side in field:
            return str(field[side] if isinstance(field[side], str) else field[side][0])
        pattern = regex.sub(r"\\s[*+?]*", "", field.get(f"{side}_pattern", ""))
        pattern = regex.sub(r"\(\?P<name>[^()]*\)", "\0", pattern)
        is_plain = not regex.search(r"(?<!\\)[][(){}.*+?|^$]|\\\w", pattern)
        return regex.sub(r"\\(.)", r"\1", pattern) if is_plain else ""

    calls = fields.get("tool_calls", {})
    before, name, behind = mark(calls, "open").partition("\0")
    known = {"content", "content_args"} & calls.keys() == {"content"} and calls["content"] == "json"
    shape = {"name": "{name}", "arguments": "{content}"} if name else "{content}"
    if not before or not known or calls.get("transform", {}).get("function") != shape:
        return None
    thoughts = (fields[key] for key in ("reasoning_content", "thinking", "reasoning") if key in fields)
    think = next(((mark(field, "open"), mark(field, "close")) for field in thoughts), HERMES.think)
    if name:
        call = f"{{name}}{behind}{{arguments}}{mark(calls, 'close')}"
        return CallFormat("declared", "json", (), (before, ""), call, think=think)
    return CallFormat("declared", "object", (), (before, mark(calls, "close")), _OBJECT, think=think)


def types_of(schema: dict[str, Any], key: str) -> set[str]:
    """The JSON types of a property by its object's schema; none where that does not say."""

    def types(part: Any, depth: int = 8) -> set[str]:
        if depth == 0 or not isinstance(part, dict):
            return set()
        named = part.get("type", [])
        kinds = {named} if isinstance(named, str) else set(named)
        kinds |= {_kind(value) for name in ("enum", "const") if name in part for value in _list(part[name])}
        parts = [choice for name in ("anyOf", "oneOf", "allOf") for choice in part.get(name, ())]
        if "$ref" in part:
            place: Any = schema
            for name in part["$ref"].removeprefix("#/").split("/"):
                place = place[name]
            parts.append(place)
        return kinds.union(*(types(choice, depth - 1) for choice in parts))

    try:
        return types(schema["properties"][key])
    except (TypeError, LookupError, AttributeError):  # it is no schema
        return set()


def typed(text: str, types: set[str]) -> str:
    """A value that a model wrote without quotes, as JSON of one of `types`: text only where it can be nothing else."""
    raw = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip())
    try:
        kind = _kind(json.loads(raw, parse_constant=float.fromhex))
    except (ValueError, RecursionError):
        kind = "string"
    fits = kind in types or (kind == "integer" and "number" in types) or not types & {"string"}
    return raw if kind != "string" and fits else json.dumps(text, ensure_ascii=False)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _kind(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", type(None): "null"}
    return names.get(type(value), "object")
