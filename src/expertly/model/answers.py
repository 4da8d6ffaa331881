"""Parses a model's answer into reasoning, content and tool calls as the text comes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import regex
from transformers.utils.chat_parsing.content_parsers import parse_content

from expertly.model.answer_formats import HERMES, CallFormat, flexible, format_of, is_json, typed, types_of

_IN_OBJECT = regex.compile(  # the beginning of a call in an object, in the usual order
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_OBJECT = regex.compile(r"[\s,]*(?=\{)")
_END_OF_OBJECT = regex.compile(r"\s*(?=[,}])")
_END_OF_PYTHON = regex.compile(r"<\|python_end\|>")
_NEVER = regex.compile(r"(?!)")
_BRACKETS, _IN_STRING = regex.compile(r'["{}\[\]]'), regex.compile(r'\\.|"', regex.DOTALL)
_MORE = regex.compile(r"\s*(?=\S)")
_GEMMA = regex.compile(
    r'\s*(?:(?P<quote><\|"\|>)|(?P<mark>[{}\[\],:])|(?P<word>[^\s{}\[\],:<"]+)(?=\s*(?P<next>[:,\]}])))'
)
_GEMMA_QUOTE = regex.compile(r'<\|"\|>')
_MESSAGE = regex.compile(  # the head of one in harmony
    r"(?<!\s)\s*+(?:<\|start\|>)?(?:assistant)?\s*+(?:to=(?P<to>[^\s<]++)\s*)?<\|channel\|>\s*(?P<channel>\w+)"
    r"(?:\s+to=(?P<to>[^\s<]+))?(?P<words>[^<]*)(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
_END_OF_MESSAGE = regex.compile(r"<\|(?:end|call|return)\|>|(?=<\|(?:start|channel)\|>)")

Stage = Literal["thinks", "may think", "thought", "content"]
"""Of an answer's reasoning: it has begun, may come first, is over, or there is none."""

Steps = Generator[None, None, Any]
"""Parses until the text ends, then yields until more has come."""

Take = Callable[[str], None]


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
    """How a model's answers are parsed: by the format that its chat template shows, or a response template of its
    tokenizer, or its vocabulary. `thinks`: it may write reasoning; `is_asked_to`: the template shows how.
    """

    calls: CallFormat = HERMES
    thinks: bool = True
    is_asked_to: bool = True

    @classmethod
    def of(cls, tokenizer: Any, source: str, added: Collection[str]) -> AnswerFormat:
        """`source`: the chat template; `added`: tokens that are in the vocabulary as they are."""
        calls = format_of(source, added, getattr(tokenizer, "response_template", None))
        mark = calls.think[0].partition(">")[0]
        is_shown = mark in source or calls.name == "declared"
        return cls(calls, is_shown or any(token.startswith(mark) for token in added), is_shown)

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
        if not (tools or self.thinks or self.calls.kind == "harmony"):
            return None
        return AnswerReader(self.calls, stage or self.stage(prompt), tools, is_single, is_whole, is_constrained)

    def stage(self, prompt: str, prefill: str = "") -> Stage:
        """What `prompt` says of the reasoning of its answer. `prefill`: of the answer, which `prompt` ends with."""
        opening, closing = (mark.strip() for mark in self.calls.think)
        prompt = prompt.rstrip()
        if prefill:
            return "thinks" if prefill.rfind(opening) > prefill.rfind(closing) else "content"
        if self.thinks and prompt.endswith((opening, closing)):
            return "thinks" if prompt.endswith(opening) else "thought"
        return "may think" if self.thinks else "content"


@dataclass(eq=False)
class AnswerReader:
    """Parses an answer by a format. A text that is marked as a call but is none is content, and so is all behind it.

    The text up to `_place` is parsed, and up to `_sent` in parts.
    """

    form: CallFormat
    stage: Stage
    tools: Sequence[dict[str, Any]]
    is_single: bool
    is_whole: bool
    is_constrained: bool

    def __post_init__(self) -> None:
        self.marks = self.form.text  # the text must hold these special tokens
        self._tools = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}
        self._text, self._place, self._sent, self._is_end = "", 0, 0, False
        self._parts: list[AnswerPart] = []
        self._held: list[AnswerPart] = []  # of a call that is not complete
        self._num_calls = 0
        self._trims = self.stage in ("thinks", "thought")  # the next text loses white space before it
        self._steps = self._answer()

    def add(self, text: str) -> list[AnswerPart]:
        self._text = self._text[self._sent :] + text
        self._place, self._sent = self._place - self._sent, 0
        next(self._steps, None)
        parts, self._parts = self._parts, []
        return parts

    def end(self) -> list[AnswerPart]:
        self._is_end = True
        return self.add("")

    def _answer(self) -> Steps:
        try:
            yield from self._messages() if self.form.kind == "harmony" else self._sections()
        except (ValueError, RecursionError):
            self._held, self._place = [], self._sent
        yield from self._until(_NEVER, self._content)

    def _sections(self) -> Steps:
        """Reasoning, then content and sections of calls."""
        opening, closing = map(flexible, self.form.think)
        begins = self.stage in ("may think", "thought") and (yield from self._match(regex.compile(r"\s*" + opening)))
        if begins or self.stage == "thinks":
            self._sent, self._trims = self._place, True
            yield from self._until(regex.compile(closing), self._reasoning)
            self._sent, self._trims = self._place, True
        is_first = self.is_constrained or not self.form.open_mark
        opens = self.form.open_re
        while self._tools and (yield from self._match(opens) if is_first else self._until(opens, self._content)):
            while True:
                yield from self._call()
                if not self.form.section[1] or (yield from self._match(self.form.close_re)):
                    break
                if (yield from self._match(_MORE)) is None:
                    break
                # some begin a section without ending the last; what nothing marks is none
                if (yield from self._match(opens)) is None and self.form.call.startswith("{name}"):
                    raise _NoCallError
            self._complete()

    def _call(self) -> Steps:
        form = self.form
        if form.kind == "object":
            yield from self._python() if self._text.startswith("[", self._place) else self._object()
            return
        head = yield from self._match(form.head_re)
        if head is None:
            raise _NoCallError
        self._begin(head["name"], head[0], head.groupdict().get("id"))
        if form.kind == "parameters":
            yield from self._parameters(self._tools.get(head["name"], {}))
        else:
            yield from self._gemma() if form.kind == "gemma" else self._value(self._write)
        if (yield from self._match(form.tail_re)) is None and (yield from self._match(_MORE)):
            raise _NoCallError

    def _object(self) -> Steps:
        yield from self._match(_OBJECT)
        if head := (yield from self._match(_IN_OBJECT)):
            self._begin(head["name"], head[0])
            yield from self._value(self._write)
            rest: list[str] = []
            if (yield from self._match(_END_OF_OBJECT)) is None:
                raise _NoCallError
            yield from self._value(rest.append, depth=1)
            more = json.loads("".join(['{"": 0', *rest]))  # an id, perhaps
            if {"name", "arguments", "parameters"} & more.keys():
                raise _NoCallError
            return
        pieces: list[str] = []
        yield from self._value(pieces.append)
        call, arguments = _called(json.loads(text := "".join(pieces)))
        self._begin(call.text, text)
        self._write(arguments.text)

    def _python(self) -> Steps:
        pieces: list[str] = []
        yield from self._until(_END_OF_PYTHON, pieces.append)
        calls = parse_content("".join(pieces).strip(), "python-call-list", {})
        if not {call["name"] for call in calls} <= self._tools.keys():
            raise _NoCallError
        for call in calls:
            self._begin(call["name"])
            self._write(_dumped(call["arguments"]))

    def _value(self, take: Take, depth: int = 0) -> Steps:
        """JSON in brackets, `depth` of which are open."""
        is_string = False
        while mark := (yield from self._until(_IN_STRING if is_string else _BRACKETS, take)):
            take(mark[0])
            if mark[0] == '"':
                is_string = not is_string
            elif not is_string:
                depth += 1 if mark[0] in "{[" else -1
                if depth == 0:
                    return
        raise _NoCallError

    def _parameters(self, schema: dict[str, Any]) -> Steps:
        opening, closing = self.form.parameter_re
        begins = "{"
        while head := (yield from self._match(opening)):
            is_text = head.groupdict().get("is_text")
            types = types_of(schema, head["key"]) if is_text is None else {"string"} if is_text == "true" else set()
            self._write(begins + _dumped(head["key"]) + ": ")
            if types == {"string"}:
                yield from self._string(closing)
            else:
                pieces: list[str] = []
                if (yield from self._until(closing, pieces.append)) is None:
                    raise _NoCallError
                text = "".join(pieces)
                is_written = self.is_constrained or is_text == "false"  # as JSON: a text has its own quotes
                self._write(text.strip() if is_written and is_json(text) else typed(text, types))
            begins = ", "
        self._write("{}" if begins == "{" else "}")

    def _string(self, closing: regex.Pattern[str]) -> Steps:
        """Text up to `closing`, as a string of JSON."""
        self._write('"')
        if (yield from self._until(closing, lambda piece: self._write(_dumped(piece)[1:-1]))) is None:
            raise _NoCallError
        self._write('"')

    def _gemma(self) -> Steps:
        """Arguments as Gemma writes them: names without quotes, strings between marks of their own."""
        depth = 0
        while match := (yield from self._match(_GEMMA)):
            if match["quote"]:
                yield from self._string(_GEMMA_QUOTE)
            elif word := match["word"]:
                self._write(_dumped(word) if match["next"] == ":" else typed(word, set()))
            else:
                depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(match["mark"], 0)
                self._write(match["mark"] + (" " if match["mark"] in ":," else ""))
                if depth == 0:
                    return
        raise _NoCallError

    def _messages(self) -> Steps:
        """Harmony's: each has a channel, and a recipient where it is a call."""
        while head := (yield from self._until(_MESSAGE, self._content)):
            name = (head["to"] or "").removeprefix("functions.")
            if self._tools and name:
                if (yield from self._match(_OBJECT)) is None:
                    raise _NoCallError
                self._begin(name)
                yield from self._value(self._write)
                if (yield from self._match(_MORE)) and (yield from self._match(_END_OF_MESSAGE)) is None:
                    raise _NoCallError
                self._complete()
            else:
                self._trims = True
                take = self._reasoning if head["channel"] == "analysis" else self._content
                if len(head["words"].split()) > 1:  # one is a type, as json
                    take(f"{head['words']}\n")
                yield from self._until(_END_OF_MESSAGE, take)
            self._sent = self._place

    # -- text and its parts --------------------------------------------------------------------------------------------

    def _match(self, pattern: regex.Pattern[str]) -> Steps:
        """The match of `pattern` at this place, which is behind it then; None where there is none."""
        while True:
            match = pattern.match(self._text, self._place, partial=not self._is_end)
            if match is None or self._is_sure(match):
                self._place = self._place if match is None else match.end()
                return match
            yield

    def _until(self, pattern: regex.Pattern[str], take: Take) -> Steps:
        """Gives `take` the text up to `pattern`, whose match is returned; None where the answer ends before."""
        while True:
            match = pattern.search(self._text, self._place, partial=not self._is_end)
            begin, self._place = self._place, len(self._text) if match is None else match.start()
            take(self._text[begin : self._place])
            if match is None and self._is_end:
                return None
            if self._is_sure(match):
                self._place = match.end()
                return match
            yield

    def _is_sure(self, match: Any) -> bool:
        """Whether it is the same match whatever comes."""
        return match is not None and not match.partial and (self._is_end or match.end() < len(self._text))

    def _content(self, text: str) -> None:
        self._show("content", text)

    def _reasoning(self, text: str) -> None:
        self._show("reasoning", text)

    def _show(self, kind: Literal["reasoning", "content"], text: str) -> None:
        self._sent = self._place
        if text := (text.lstrip() if self._trims else text):
            self._parts.append(AnswerPart(kind, text))
            self._trims = False

    def _begin(self, name: str, head: str = "", id: str | None = None) -> None:
        """Begin a call, whose `head` was parsed. Where nothing marks one, it calls a tool that there is."""
        if not name or (name not in self._tools and not self.form.open_mark):
            raise _NoCallError
        if self._held:
            self._complete()
            self._sent -= len(head)
        self._num_calls += 1
        self._tell(AnswerPart("call", name, id or _new_id()[self.form.ids]))

    def _write(self, text: str) -> None:
        if text:
            self._tell(AnswerPart("arguments", text))

    def _tell(self, part: AnswerPart) -> None:
        if not (self.is_single and self._num_calls > 1):
            (self._held if self.is_whole else self._parts).append(part)
        if not self.is_whole:
            self._sent = self._place

    def _complete(self) -> None:
        """The call that was begun is complete."""
        if self._held:  # NaN or half a character is not JSON that all clients read
            arguments = json.loads("".join(part.text for part in self._held if part.kind == "arguments"))
            json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
        self._parts += self._held
        self._held, self._sent, self._trims = [], self._place, True


def _called(said: Any) -> list[AnswerPart]:
    """A call in an object, as parts. Raises ValueError where it is none."""
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        raise _NoCallError
    key = next((key for key in ("arguments", "parameters") if key in said), None)
    arguments = said.get(key, "")
    arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else {} if arguments is None else arguments
    if not isinstance(arguments, dict) or (key is None and said.keys() - {"name", "type", "id"}):
        raise _NoCallError
    text = _dumped(arguments)
    (said["name"] + text).encode()  # raises where it holds half a character
    return [AnswerPart("call", said["name"], _new_id()), AnswerPart("arguments", text)]


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
