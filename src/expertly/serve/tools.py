"""Calls of tools in what a model writes: by its tokenizer's response template, or between `<tool_call>` marks, which
most chat templates teach.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from expertly.serve.prompts import Prompts
from expertly.serve.schema import Tool
from expertly.serve.text import overlap

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Call:
    """`arguments` is JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolReader:
    """Parts the text of one answer to `prompt` from its calls, as it comes. What is marked as a call and is none stays
    text.
    """

    def __init__(self, prompts: Prompts, tools: Sequence[Tool], prompt: Sequence[int]) -> None:
        self._prompts = prompts
        self._tools = tools
        self._prompt = prompt
        self._has_template = prompts.response_template is not None
        self._held = ""
        self._is_open = False

    def add(self, text: str) -> str:
        """What is certainly no call."""
        self._held += text
        if self._is_open or self._has_template:
            return ""
        place = self._held.find(OPEN)
        if place < 0:
            place = len(self._held) - overlap(self._held, OPEN)
        else:
            self._is_open = True
        shown, self._held = self._held[:place], self._held[place:]
        return shown

    def end(self, tokens: Sequence[int]) -> tuple[str, list[Call]]:
        """The rest of the text, and the calls. `tokens` is the whole answer."""
        held, self._held = self._held, ""
        if self._has_template:
            found = self._by_template(tokens)
            return (held, []) if found is None else found
        return _between_marks(held)

    def _by_template(self, tokens: Sequence[int]) -> tuple[str, list[Call]] | None:
        try:
            parsed = self._prompts.parsed(self._prompt, tokens, self._tools)
            calls = [_call(entry.get("function", entry)) for entry in parsed.get("tool_calls") or ()]
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError):
            return None  # what a template does not match is text
        content = parsed.get("content")
        return (content if isinstance(content, str) else ""), [call for call in calls if call is not None]


def _between_marks(text: str) -> tuple[str, list[Call]]:
    rest, calls = "", []
    while (place := text.find(OPEN)) >= 0:
        rest, text = rest + text[:place], text[place + len(OPEN) :]
        inside, mark, behind = text.partition(CLOSE)
        call = None
        with contextlib.suppress(ValueError, RecursionError):
            call = _call(json.loads(inside))
        if call is None:
            rest += OPEN + inside + mark
        else:
            calls.append(call)
        text = behind
    rest += text
    return ("" if calls and not rest.strip() else rest), calls


def _call(said: Any) -> Call | None:
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return None
    arguments = said.get("arguments", said.get("parameters", {}))
    return Call(said["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
