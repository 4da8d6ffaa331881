"""Parses a model's answer into reasoning, content and tool calls as the text comes, with transformers' parser."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

_NO_CALL = (TypeError, ValueError, LookupError, AttributeError, RecursionError)
"""What the parser raises at the end of a text that is marked as a call but is not one."""

CALL_MARKS = ("<tool_call>", "</tool_call>")
"""Around a call as JSON in most chat templates; used where transformers has no response template for a model."""

_REASONING = ("reasoning_content", "thinking", "reasoning")  # its names in response templates

_THINK = {"open": "<think>", "close": "</think>", "content": "text"}
_CALLS = {
    "open_pattern": r"\s*<tool_call>",
    "close": CALL_MARKS[1],
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of an answer: text of its reasoning or content, the name and id of a call that begins, or text of the
    arguments (JSON) of the call that began last.
    """

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str = ""
    id: str = ""


def known_template(tokenizer: Any, model: Any) -> dict[str, Any] | None:
    """The response template of this model, from its tokenizer or transformers; None where neither has one."""
    from transformers.cli.serving.utils import get_response_template

    template: dict[str, Any] | None = get_response_template(tokenizer, model)
    return template


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model's answers are parsed: by `template` if the prompt begins an answer as the template says, else by the
    marks of most chat templates (`<think>` only if `thinks`).
    """

    template: dict[str, Any] | None
    thinks: bool

    def fits(self, prompt: str) -> bool:
        """Whether `template` is used for this prompt. It needs the answer's special tokens, too."""
        if self.template is None:
            return False
        return load_response_template(self.template).start_anchor_re.search(prompt) is not None

    def reader(
        self, prompt: str, tools: Sequence[dict[str, Any]], *, is_forced: bool = False, is_single: bool = False
    ) -> AnswerReader | None:
        """A reader of an answer to `prompt`, which may call `tools`; None: all of it is content. `is_forced`: the
        answer is one call between CALL_MARKS. `is_single`: only the first call is returned.
        """
        if is_forced:
            return AnswerReader(_template({"tool_calls": _CALLS}), "", tools, is_single)
        if self.template is not None and self.fits(prompt):
            known = self.template["fields"].items()
            fields = {name: {**field, "optional": True} for name, field in known if tools or name != "tool_calls"}
            return AnswerReader({**self.template, "fields": fields}, prompt, tools, is_single)
        fields = {"reasoning_content": _THINK} if self.thinks else {}
        if tools:
            fields["tool_calls"] = _CALLS
        begun = "<think>" if self.thinks and prompt.rstrip().endswith("<think>") else ""
        return AnswerReader(_template(fields), begun, tools, is_single) if fields else None

    def begins_thinking(self, prompt: str) -> bool:
        reader = self.reader(prompt, ())
        return reader is not None and reader.is_thinking


def _template(fields: dict[str, Any]) -> dict[str, Any]:
    return {"start_anchor_pattern": r"\A", "fields": {**fields, "content": {"content": "text"}}}


class AnswerReader:
    """Parses an answer as it comes. Text that is marked as a call but is none is content, and so is all behind it."""

    def __init__(self, template: dict[str, Any], prompt: str, tools: Sequence[dict[str, Any]], is_single: bool) -> None:
        loaded = load_response_template(template)
        begun = loaded.truncate_past_last_anchor(prompt)
        self._make = lambda: ResponseParser(loaded, prefix=prompt, tools=list(tools))
        self._parser: ResponseParser | None = self._make()
        calls = loaded.fields.get("tool_calls")
        self._opens = None if calls is None else calls.open_re
        self._is_single = is_single
        self._text = ""  # all that came
        self._told: set[str] = set()  # kinds of the parts that were returned
        self._is_begun = bool(begun)
        self._is_behind_call = False
        self.is_thinking = False  # at the start
        for event in self._parser.initial_events:  # of the part that the prompt begins
            self.is_thinking = event["field"] in _REASONING and event["type"] != "region_close"

    def add(self, text: str) -> list[AnswerPart]:
        self._text += text
        return self._parts(lambda parser: parser.feed(text), text)

    def end(self) -> list[AnswerPart]:
        return self._parts(lambda parser: parser.finalize()[1], "")

    def _parts(self, advance: Callable[[ResponseParser], Any], text: str) -> list[AnswerPart]:
        if self._parser is None:
            return self._shown("content", text)
        try:
            return self._events(advance(self._parser))
        except _NO_CALL:
            return self._given_up(text)

    def _given_up(self, text: str) -> list[AnswerPart]:
        """In the last `text` something ended that is marked as a call but is none: from its mark on all is content."""
        self._parser = None
        done = len(self._text) - len(text)
        again, parts = self._make(), []
        again.feed(self._text[:done])
        for letter in text:
            done += 1
            try:
                parts += self._events(again.feed(letter))
            except _NO_CALL:
                break
        opened = [] if self._opens is None else list(self._opens.finditer(self._text, 0, done))
        return parts + self._shown("content", self._text[opened[-1].start() :] if opened else "")

    def _events(self, events: list[dict[str, Any]]) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for event in events:
            name = event.get("field")
            if event["type"] == "region_chunk" and not event.get("dirty"):
                if name in _REASONING:
                    parts += self._shown("reasoning", event["text"])
                elif name == "content":
                    parts += self._shown("content", event["text"])
            elif event["type"] == "region_close" and name == "tool_calls":
                value = event["value"]
                for said in value if isinstance(value, list) else [value]:
                    call = _call(said["function"])
                    if not (self._is_single and "call" in self._told):
                        parts += call
                        self._told.add("call")
                        self._is_behind_call = True
        return parts

    def _shown(self, kind: Literal["reasoning", "content"], text: str) -> list[AnswerPart]:
        """A part without the blank lines that templates put between marks and text."""
        is_first = kind not in self._told and (kind == "reasoning" or "reasoning" in self._told or self._is_begun)
        if is_first or self._is_behind_call:
            text = text.lstrip()
        if not text:
            return []
        self._told.add(kind)
        self._is_behind_call = False
        return [AnswerPart(kind, text)]


def _call(said: Any) -> list[AnswerPart]:
    """Raises TypeError where it is not a call."""
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        raise TypeError(said)
    arguments = said.get("arguments", said.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return [AnswerPart("call", said["name"], f"call_{uuid.uuid4().hex[:24]}"), AnswerPart("arguments", text)]
