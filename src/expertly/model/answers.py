"""Parses a model's answer into reasoning, content and tool calls as the text comes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import regex
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.content_parsers import parse_content
from transformers.utils.chat_parsing.response_templates import load_response_template

from expertly.model.answer_formats import HERMES, CallFormat, flexible, format_of, typed, types_of

_FAILURES = (TypeError, ValueError, LookupError, AttributeError, RecursionError)
"""What transformers' parser raises at the end of a text that is marked as a call but is not one."""

_REASONING = ("reasoning_content", "thinking", "reasoning")  # its names in response templates

_IN_OBJECT = regex.compile(  # the beginning of a call in an object, in the usual order
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_OBJECT = regex.compile(r"[\s,]*(?=\{)")
_END_OF_OBJECT = regex.compile(r"\s*(?=[,}])")
_MORE = regex.compile(r"\s*(?=\S)")
_GEMMA = regex.compile(
    r'\s*(?:(?P<quote><\|"\|>)|(?P<mark>[{}\[\],:])|(?P<word>[^\s{}\[\],:<"]+)(?=\s*(?P<next>[:,\]}])))'
)
_GEMMA_QUOTE = regex.compile(r'<\|"\|>')
_MESSAGE = regex.compile(  # the head of one in harmony
    r"\s*(?:<\|start\|>)?(?:assistant)?\s*(?:to=(?P<to>[^\s<]+)\s*)?<\|channel\|>\s*(?P<channel>\w+)"
    r"(?:\s+to=(?P<to>[^\s<]+))?[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
_END_OF_MESSAGE = regex.compile(r"<\|(?:end|call|return)\|>|(?=<\|(?:start|channel)\|>)")

Stage = Literal["thinks", "may think", "thought", "content"]
"""Of an answer's reasoning: it has begun, may come first, is over, or there is none."""

Steps = Generator[None, None, Any]
"""Parses until the text ends, then yields until more has come."""


class _NoCallError(ValueError):
    """A text is marked as a call but is none."""


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of an answer: text of its reasoning or content, the name and id of a call that begins, or text of the
    arguments (JSON) of the call that began last.
    """

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str = ""
    id: str = ""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model's answers are parsed: by the response template that its tokenizer brings, if the prompt begins an
    answer as that says, else by the format that its chat template and vocabulary show. `thinks`: it may write
    reasoning.
    """

    template: dict[str, Any] | None = None
    calls: CallFormat = HERMES
    thinks: bool = True

    @classmethod
    def of(cls, tokenizer: Any, source: str) -> AnswerFormat:
        """`source`: the chat template."""
        added, template = tokenizer.get_added_vocab(), getattr(tokenizer, "response_template", None)
        calls = format_of(source, added)
        for name, known in (template or {"fields": {}})["fields"].items():
            if name in _REASONING and {type(known.get(mark)) for mark in ("open", "close")} == {str}:
                return cls(template, replace(calls, think=(known["open"], known["close"])))
        mark = calls.think[0].partition(">")[0]
        return cls(template, calls, mark in source or any(token.startswith(mark) for token in added))

    def reader(
        self,
        prompt: str,
        tools: Sequence[dict[str, Any]],
        *,
        stage: Stage | None = None,
        is_single: bool = False,
        is_whole: bool = False,
        is_constrained: bool = False,
    ) -> AnswerReader | None:
        """A reader of an answer to `prompt`, which may call `tools`; None: all of it is content. `stage`: where it is
        not what `stage(prompt)` says. `is_single`: only the first call is returned. `is_whole`: a call is returned when
        it is complete, and one that turns out wrong is content. `is_constrained`: the answer follows a grammar, and is
        calls in the format `calls` or content.
        """
        template = None if is_constrained else self.template
        if template is not None and load_response_template(template).start_anchor_re.search(prompt) is not None:
            known = template["fields"].items()
            fields = {name: {**field, "optional": True} for name, field in known if tools or name != "tool_calls"}
            return TemplateReader({**template, "fields": fields}, prompt, tools, is_single)
        if not (tools or self.thinks or self.calls.kind == "harmony"):
            return None
        return FormatReader(self.calls, stage or self.stage(prompt), tools, is_single, is_whole, is_constrained)

    def stage(self, prompt: str, prefill: str = "") -> Stage:
        """What `prompt` says of the reasoning of its answer. `prefill`: of the answer, which `prompt` ends with."""
        opening, closing = (mark.strip() for mark in self.calls.think)
        prompt = prompt.rstrip()
        if prefill:
            return "thinks" if prefill.rfind(opening) > prefill.rfind(closing) else "content"
        if self.thinks and prompt.endswith((opening, closing)):
            return "thinks" if prompt.endswith(opening) else "thought"
        return "may think" if self.thinks else "content"


class AnswerReader(Protocol):
    marks: str | None
    """Special tokens that the text must hold; None: all."""

    def add(self, text: str) -> list[AnswerPart]: ...

    def end(self) -> list[AnswerPart]:
        """The rest, behind the last text."""


class FormatReader:
    """Parses an answer by a format. A text that is marked as a call but is none is content, and so is all behind it.

    The text up to `_place` is parsed, and up to `_told` in parts.
    """

    def __init__(
        self,
        form: CallFormat,
        stage: str,
        tools: Sequence[dict[str, Any]],
        is_single: bool,
        is_whole: bool,
        is_constrained: bool,
    ) -> None:
        self.marks: str | None = form.text
        self._format = form
        self._tools = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        self._is_single, self._is_whole, self._is_constrained = is_single, is_whole, is_constrained
        self._text, self._place, self._told = "", 0, 0
        self._is_end = False
        self._parts: list[AnswerPart] = []
        self._held: list[AnswerPart] = []  # of a call that is not complete
        self._num_calls = 0
        self._trims = stage in ("thinks", "thought")  # the next text loses white space before it
        self._steps = self._answer(stage)

    def add(self, text: str) -> list[AnswerPart]:
        self._text = self._text[self._told :] + text
        self._place, self._told = self._place - self._told, 0
        next(self._steps, None)
        parts, self._parts = self._parts, []
        return parts

    def end(self) -> list[AnswerPart]:
        self._is_end = True
        return self.add("")

    def _answer(self, stage: str) -> Steps:
        try:
            yield from self._messages() if self._format.kind == "harmony" else self._sections(stage)
        except (ValueError, RecursionError):
            self._held, self._place = [], self._told
        while True:
            self._show("content", len(self._text))
            if self._is_end:
                return
            yield

    def _sections(self, stage: str) -> Steps:
        """Reasoning, then content and sections of calls."""
        opening, closing = map(flexible, self._format.think)
        if stage == "thinks" or (stage == "may think" and (yield from self._match(regex.compile(r"\s*" + opening)))):
            self._told, self._trims = self._place, True
            yield from self._until("reasoning", regex.compile(closing))
            self._told, self._trims = self._place, True
        is_first = self._is_constrained or not self._format.section[0]
        while self._tools:
            begins = self._match(self._format.open_re) if is_first else self._until("content", self._format.open_re)
            if (yield from begins) is None:
                return
            yield from self._calls()

    def _calls(self) -> Steps:
        """Those of a section, behind what opens it."""
        while True:
            yield from self._call()
            if not self._format.section[1] or (yield from self._match(self._format.close_re)):
                break
            if (yield from self._match(_MORE)) is None:
                break
        self._complete()

    def _call(self) -> Steps:
        form = self._format
        if form.kind == "object":
            return (yield from self._python() if self._text[self._place] == "[" else self._object())
        head = yield from self._match(form.head_re)
        if head is None:
            raise _NoCallError
        self._begin(head["name"], head.groupdict().get("id"))
        if form.kind == "parameters":
            yield from self._parameters(self._tools.get(head["name"], {}))
        else:
            yield from self._gemma() if form.kind == "gemma" else self._json()
        if (yield from self._match(form.tail_re)) is None and (yield from self._match(_MORE)):
            raise _NoCallError

    def _object(self) -> Steps:
        yield from self._match(_OBJECT)
        if head := (yield from self._match(_IN_OBJECT)):
            self._begin(head["name"])
            yield from self._json()
            if (yield from self._match(_END_OF_OBJECT)) is None:
                raise _NoCallError
            yield from self._json(is_told=False, depth=1)
            return
        call, arguments = _called(json.loads((yield from self._json(is_told=False))))
        self._begin(call.text)
        self._write(arguments.text)

    def _python(self) -> Steps:
        while not self._is_end:
            yield
        text = self._text[self._place :].partition("<|python_end|>")[0]
        for call in parse_content(text.strip(), "python-call-list", {}):
            self._begin(call["name"])
            self._write(_dumped(call["arguments"]))
        self._place = len(self._text)

    def _json(self, is_told: bool = True, depth: int = 0) -> Steps:
        """The text of one value in brackets, `depth` of which are open."""
        text, is_string, is_escaped = "", False, False
        while True:
            end = len(self._text)
            for place in range(self._place, end):
                letter = self._text[place]
                if is_escaped:
                    is_escaped = False
                elif letter == '"':
                    is_string = not is_string
                elif is_string:
                    is_escaped = letter == "\\"
                elif letter in "{[":
                    depth += 1
                elif letter in "}]":
                    depth -= 1
                    if depth == 0:
                        end = place + 1
                        break
            piece, self._place = self._text[self._place : end], end
            text += piece
            if is_told:
                self._write(piece)
            if depth == 0:
                return text
            if self._is_end:
                raise _NoCallError
            yield

    def _parameters(self, schema: dict[str, Any]) -> Steps:
        opening, closing = self._format.parameter_re
        self._write("{")
        comma = ""
        while head := (yield from self._match(opening)):
            is_text = head.groupdict().get("is_text")
            types = types_of(schema, head["key"]) if is_text is None else {"string"} if is_text == "true" else set()
            self._write(comma + _dumped(head["key"]) + ": ")
            value = yield from self._value(closing, is_told=types == {"string"}, trims=self._format.trims)
            self._write("" if types == {"string"} else typed(value, types))
            comma = ", "
        self._write("}")

    def _value(self, closing: regex.Pattern[str], is_told: bool, trims: bool = False) -> Steps:
        """Text up to `closing`, told as a string of JSON or returned."""
        text = ""
        self._write('"' if is_told else "")
        while True:
            match = closing.search(self._text, self._place, partial=not self._is_end)
            end = len(self._text) if match is None else match.start()
            piece, self._place = self._text[self._place : end], end
            if trims and piece:
                piece, trims = piece.removeprefix("\n"), False
            text += piece
            if is_told:
                self._write(_dumped(piece)[1:-1])
            if self._is_sure(match):
                self._place = match.end()
                self._write('"' if is_told else "")
                return text
            if self._is_end:
                raise _NoCallError
            yield

    def _gemma(self) -> Steps:
        """Arguments as Gemma writes them: names without quotes, strings between marks of their own."""
        depth = 0
        while match := (yield from self._match(_GEMMA)):
            if match["quote"]:
                yield from self._value(_GEMMA_QUOTE, is_told=True)
            elif match["word"]:
                word = match["word"]
                self._write(_dumped(word) if match["next"] == ":" else typed(word, set()))
            else:
                depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(match["mark"], 0)
                self._write(match["mark"] + (" " if match["mark"] in ":," else ""))
                if depth == 0:
                    return
        raise _NoCallError

    def _messages(self) -> Steps:
        """Harmony's: each has a channel, and a recipient where it is a call."""
        while head := (yield from self._until("content", _MESSAGE)):
            name = (head["to"] or "").removeprefix("functions.")
            is_call = self._tools and name not in ("", head["to"])
            if is_call and (yield from self._match(_OBJECT)):
                self._begin(name)
                yield from self._json()
                if (yield from self._match(_MORE)) and (yield from self._match(_END_OF_MESSAGE)) is None:
                    raise _NoCallError
                self._complete()
            else:
                self._trims = True
                yield from self._until("reasoning" if head["channel"] == "analysis" else "content", _END_OF_MESSAGE)
            self._told = self._place

    # -- text and its parts --------------------------------------------------------------------------------------------

    def _match(self, pattern: regex.Pattern[str]) -> Steps:
        """The match of `pattern` at this place, which is behind it then; None where there is none."""
        while True:
            match = pattern.match(self._text, self._place, partial=not self._is_end)
            if match is None or self._is_sure(match):
                self._place = self._place if match is None else match.end()
                return match
            yield

    def _until(self, kind: Literal["reasoning", "content"], pattern: regex.Pattern[str]) -> Steps:
        """Text of one kind up to `pattern`, whose match is returned; None where the answer ends before."""
        while True:
            match = pattern.search(self._text, self._place, partial=not self._is_end)
            self._show(kind, len(self._text) if match is None else match.start())
            if match is None and self._is_end:
                return None
            if self._is_sure(match):
                self._place = match.end()
                return match
            yield

    def _is_sure(self, match: Any) -> bool:
        """Whether it is the same match whatever comes."""
        return match is not None and not match.partial and (self._is_end or match.end() < len(self._text))

    def _show(self, kind: Literal["reasoning", "content"], end: int) -> None:
        text = self._text[self._place : end]
        self._place = self._told = end
        text = text.lstrip() if self._trims else text
        if text:
            self._parts.append(AnswerPart(kind, text))
            self._trims = False

    def _begin(self, name: str, id: str | None = None) -> None:
        """Begin a call. Where nothing marks one, it calls a tool that there is."""
        if not name or (name not in self._tools and not self._format.open_mark):
            raise _NoCallError
        if self._held:
            self._complete()
        self._num_calls += 1
        self._tell(AnswerPart("call", name, id or _new_id()[self._format.ids]))

    def _write(self, text: str) -> None:
        if text:
            self._tell(AnswerPart("arguments", text))

    def _tell(self, part: AnswerPart) -> None:
        if not (self._is_single and self._num_calls > 1):
            (self._held if self._is_whole else self._parts).append(part)
        if not self._is_whole:
            self._told = self._place

    def _complete(self) -> None:
        """The call that was begun is complete."""
        if self._held:
            json.loads("".join(part.text for part in self._held if part.kind == "arguments"))
        self._parts += self._held
        self._held, self._told, self._trims = [], self._place, True


class TemplateReader:
    """Parses an answer with transformers' parser, as a response template says; calls are told when they are complete.
    Text that is marked as a call but is none is content, and so is all behind it.
    """

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
        self.marks: str | None = None

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
        except _FAILURES:
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
            except _FAILURES:
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
                    call = _called(said["function"])
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


def _called(said: Any) -> list[AnswerPart]:
    """A call in an object, as parts. Raises ValueError where it is none."""
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        raise _NoCallError
    arguments = said.get("arguments", said.get("parameters")) or {}
    text = arguments if isinstance(arguments, str) else _dumped(arguments)
    return [AnswerPart("call", said["name"], _new_id()), AnswerPart("arguments", text)]


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
