"""/v1/responses: OpenAI's newer way to ask. A request is turned into one for the next message of a chat; the answer
into items, and a stream into events of them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from expertly.model.answers import AnswerPart, AnswerReader
from expertly.serve.answers import Json, parts_of
from expertly.serve.errors import ApiError, invalid
from expertly.serve.request import Delta, ServedRequest
from expertly.serve.schema import ChatRequest, Count, Strict

Item = dict[str, Any]


class ReasoningWish(Strict):
    effort: str | None = None


class TextWish(Strict):
    format: dict[str, Any] | None = None


class ResponsesRequest(Strict):
    """What it says is checked as a chat's request is. Nothing is stored: each request brings all that was said."""

    model: str = Field(max_length=512)
    input: str | Annotated[list[Item], Field(min_length=1, max_length=2048)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    tools: Annotated[list[Item], Field(max_length=128)] | None = None
    tool_choice: str | Item | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningWish | None = None
    text: TextWish | None = None
    stream: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    cannot: ClassVar[dict[str, str]] = {
        "previous_response_id": "nothing is stored; send what was said",
        "conversation": "nothing is stored; send what was said",
        "background": "nothing is stored",
        "prompt": "no prompts are stored; use input",
    }

    def as_chat(self) -> Json:
        """The same as the body of a chat's request. Raises ApiError where an item has no place in one."""
        messages: list[Json] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            for number, item in enumerate(self.input):
                _add_item(messages, item, f"input.{number}")
        given = self.text.format if self.text is not None else None
        wish = None if given is None else {"type": given.get("type")}
        if wish is not None and given is not None and wish["type"] == "json_schema":
            wish["json_schema"] = {name: given[name] for name in ("name", "schema") if name in given}
        choice = self.tool_choice
        if isinstance(choice, dict):
            choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
        told = {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [_tool(one) for one in self.tools or ()],
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
            "response_format": wish,
            "chat_template_kwargs": self.chat_template_kwargs,
            "stream": self.stream,
        }
        tuning = {name: value for name, value in (self.model_extra or {}).items() if name in ChatRequest.model_fields}
        return {**tuning, **{name: value for name, value in told.items() if value is not None}}


def _add_item(messages: list[Json], item: Item, place: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        content = item.get("content")
        if isinstance(content, list):
            content = [_content_part(part, place) for part in content]
        messages.append({"role": item.get("role"), "content": content})
    elif kind == "function_call":
        call = {"name": item.get("name"), "arguments": item.get("arguments")}
        calls = [{"id": item.get("call_id"), "type": "function", "function": call}]
        if messages and messages[-1]["role"] == "assistant" and "tool_calls" in messages[-1]:
            messages[-1]["tool_calls"] += calls
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
    elif kind == "function_call_output":
        output = item.get("output")
        if isinstance(output, list):
            output = [_content_part(part, place) for part in output]
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind != "reasoning":  # what was thought is not told again
        raise invalid(
            f"{place}.type: {str(kind)[:80]!r}; accepted: message, function_call, function_call_output, reasoning",
            "input",
        )


def _content_part(part: Any, place: str) -> Json:
    if isinstance(part, dict) and part.get("type") in ("input_text", "output_text", "text"):
        return {"type": "text", "text": part.get("text")}
    raise invalid(f"{place}.content: accepted: parts of type input_text or output_text", "input")


def _tool(tool: Item) -> Json:
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": tool.get("type"), "function": function}


class ResponsesAnswer:
    """One answer as items: what was thought, what is said, each call."""

    def __init__(self, asked: ResponsesRequest, request: ServedRequest, readers: Mapping[int, AnswerReader]) -> None:
        self._asked = asked
        self._request = request
        self._readers = readers
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._items: list[Json] = []
        self._open: str | None = None  # the kind of the last item, while text comes to it
        self._reason: str | None = None
        self._number = 0  # of the next event
        self._is_begun = False

    def chunks(self, delta: Delta) -> list[Json]:
        """The events that tell of `delta`."""
        events: list[Json] = []
        if not self._is_begun:
            self._is_begun = True
            for name in ("created", "in_progress"):
                events.append(self._event(f"response.{name}", response=self._object("in_progress")))
        for part in parts_of(self._readers, delta):
            events += self._told(part)
        if delta.reason is not None:
            events += self._closed()
            self._reason = delta.reason
        return events

    def last_chunks(self) -> list[Json]:
        status = self._status()
        return [self._event(f"response.{status}", response=self._object(status))]

    def failure(self, error: ApiError) -> Json:
        """The last event of a stream that failed."""
        failed = self._object("failed") | {"error": {"code": "server_error", "message": error.message}}
        return self._event("response.failed", response=failed)

    def whole(self, deltas: Sequence[Delta]) -> Json:
        for delta in deltas:
            self.chunks(delta)
        return self._object(self._status())

    def _told(self, part: AnswerPart) -> list[Json]:
        events = []
        if self._open != part.kind:
            events += self._closed()
            events += self._opened(part)
        if part.call is not None:
            return events
        self._items[-1]["content"][0]["text"] += part.text
        name = "response.reasoning_text.delta" if part.kind == "reasoning" else "response.output_text.delta"
        return [
            *events,
            self._event(name, **self._place(), content_index=0, delta=part.text, **_no_logprobs(part.kind)),
        ]

    def _opened(self, part: AnswerPart) -> list[Json]:
        if part.call is not None:
            call = part.call
            item: Json = {
                "type": "function_call",
                "id": f"fc_{uuid.uuid4().hex}",
                "call_id": call.id,
                "name": call.name,
            }
            self._items.append({**item, "arguments": call.arguments, "status": "completed"})
            begun = {**item, "arguments": "", "status": "in_progress"}
            arguments = {**self._place(), "arguments": call.arguments, "name": call.name}
            return [
                self._event("response.output_item.added", output_index=len(self._items) - 1, item=begun),
                self._event("response.function_call_arguments.delta", **self._place(), delta=call.arguments),
                self._event("response.function_call_arguments.done", **arguments),
                self._event("response.output_item.done", output_index=len(self._items) - 1, item=self._items[-1]),
            ]
        self._open = part.kind
        if part.kind == "reasoning":
            item = {"type": "reasoning", "id": f"rs_{uuid.uuid4().hex}", "summary": [], "status": "in_progress"}
            content: Json = {"type": "reasoning_text", "text": ""}
        else:
            item = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "status": "in_progress"}
            content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._items.append({**item, "content": [content]})
        begun = {**item, "content": []}
        return [
            self._event("response.output_item.added", output_index=len(self._items) - 1, item=begun),
            self._event("response.content_part.added", **self._place(), content_index=0, part=dict(content)),
        ]

    def _closed(self) -> list[Json]:
        """The item that was open, if one was."""
        kind, self._open = self._open, None
        if kind is None:
            return []
        item = self._items[-1]
        item["status"] = "completed"
        content = item["content"][0]
        name = "response.reasoning_text.done" if kind == "reasoning" else "response.output_text.done"
        return [
            self._event(name, **self._place(), content_index=0, text=content["text"], **_no_logprobs(kind)),
            self._event("response.content_part.done", **self._place(), content_index=0, part=content),
            self._event("response.output_item.done", output_index=len(self._items) - 1, item=item),
        ]

    def _place(self) -> Json:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _event(self, kind: str, **more: Any) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **more}

    def _object(self, status: str) -> Json:
        asked, request = self._asked, self._request
        is_over = status not in ("in_progress", "failed")
        prompt, written = request.num_prompt_tokens, request.num_tokens
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "model": asked.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self._items) if is_over else [],
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": written,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + written,
            }
            if is_over
            else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "tools": asked.tools or [],
            "tool_choice": asked.tool_choice or "auto",
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "text": {"format": (asked.text and asked.text.format) or {"type": "text"}},
            "metadata": {},
        }


def _no_logprobs(kind: str) -> Json:
    return {"logprobs": []} if kind == "content" else {}
