"""/v1/responses, OpenAI's newer API: a request as a chat, and its answer as items and the events of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, Discriminator, Field, Tag

from expertly.model.answers import AnswerPart, AnswerReader
from expertly.serve.answers import Json, parts_of, usage
from expertly.serve.errors import ApiError
from expertly.serve.request import Delta, ServedRequest
from expertly.serve.schema import (
    AnyTool,
    Choice,
    Content,
    Effort,
    FormatType,
    Function,
    Limit,
    Message,
    Name,
    Strict,
    Tuning,
    Variables,
    joined,
)


class InputMessage(Message):
    type: Literal["message"] = "message"


class InputCall(Strict):
    """`custom_tool_call`: of a tool that is none of this server's, from the time when another one answered."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: Name
    name: Name
    arguments: str = Field(validation_alias=AliasChoices("arguments", "input"))


class InputResult(Strict):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Annotated[Name, Field(min_length=1)]
    output: Content


class InputThought(Strict):
    type: Literal["reasoning"]  # which the model is not told again


def _kind(value: Any, default: str) -> str:
    return str(value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default))


def _type_of(item: Any) -> str:
    """The tag of an item: "item-" and its type, or "item-other" of what tools of other servers did."""
    kind = _kind(item, "message").replace("custom_tool_call", "function_call")
    is_other = kind.endswith(("_call", "_output", "_tools")) and not kind.startswith("function_call")
    return "item-other" if is_other else f"item-{kind}"


Item = Annotated[
    Annotated[InputMessage, Tag("item-message")]
    | Annotated[InputCall, Tag("item-function_call")]
    | Annotated[InputResult, Tag("item-function_call_output")]
    | Annotated[InputThought, Tag("item-reasoning")]
    | Annotated[AnyTool, Tag("item-other")],
    Discriminator(
        _type_of,
        custom_error_type="item_type",
        custom_error_message="accepted: items of type message or reasoning, calls of tools and their outputs",
    ),
]


class FlatTool(Function):
    type: Literal["function"]


Tools = Annotated[
    Annotated[FlatTool, Tag("item-function")] | Annotated[AnyTool, Tag("item-other")],
    Discriminator(lambda tool: f"item-{'function' if _kind(tool, 'function') == 'function' else 'other'}"),
]


class ReasoningWish(Strict):
    effort: Effort | None = None


FORMAT = ("response_format.json_schema", "response_format")
"""Where the chat API has a TextFormat."""


class TextFormat(Strict):
    type: FormatType
    name: Name | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")

    def as_chat(self) -> dict[str, Any]:
        schema = self.model_dump(include={"name", "schema_"}, by_alias=True, exclude_none=True)
        return {"type": self.type} | ({"json_schema": schema} if schema else {})


class TextWish(Strict):
    format: TextFormat | None = None


class ResponsesRequest(Tuning):
    """Nothing is stored: each request brings the whole conversation."""

    input: str | Annotated[list[Item], Field(min_length=1, max_length=2048, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Limit = None
    tools: Annotated[list[Tools], Field(max_length=1024, fail_fast=True)] | None = None
    tool_choice: Choice | AnyTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningWish | None = None
    text: TextWish | None = None
    chat_template_kwargs: Variables | None = None
    of_chat: ClassVar[dict[str, str]] = {"messages": "input"} | dict.fromkeys(FORMAT, "text.format")
    """Fields of the chat request that it becomes, and their names in this one."""
    cannot: ClassVar[dict[str, str]] = Tuning.cannot | {
        **dict.fromkeys(("response_format", "structured_outputs"), "use text.format"),
        "previous_response_id": "nothing is stored; send what was said",
        "conversation": "nothing is stored; send what was said",
        "background": "nothing is stored",
        "prompt": "no prompts are stored; use input",
    }

    def as_chat(self) -> dict[str, Any]:
        """The same request for the chat API."""
        choice: Any = self.tool_choice
        if isinstance(choice, AnyTool):
            choice = {"type": "function", "function": {"name": choice.label}}
        wish = self.text.format if self.text else None
        shared = (*Tuning.model_fields, "parallel_tool_calls", "chat_template_kwargs")
        return {
            **{name: getattr(self, name) for name in shared},
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [
                {"type": "function", "function": tool} for tool in self.tools or () if isinstance(tool, FlatTool)
            ],
            "tool_choice": choice,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "response_format": wish and wish.as_chat(),
        }

    def _messages(self) -> list[Message]:
        messages = [Message(role="system", content=self.instructions)] if self.instructions is not None else []
        items = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for item in items:
            if isinstance(item, InputMessage):
                messages.append(item)
            elif isinstance(item, InputResult):
                messages.append(Message(role="tool", tool_call_id=item.call_id, content=item.output))
            elif isinstance(item, InputCall):
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                messages.append(Message.model_validate({"role": "assistant", "tool_calls": [call]}))
        return joined(messages)


ECHOED: Json = {"instructions": None, "max_output_tokens": None, "temperature": 1.0, "top_p": 1.0, "metadata": {}}
ECHOED |= {"tools": [], "tool_choice": "auto", "text": {"format": {"type": "text"}}}
"""What an answer says of its request, and of one that does not have these fields."""


class ResponsesAnswer:
    """One answer as items: its reasoning, its text, each tool call."""

    done = b""

    def __init__(self, asked: ResponsesRequest, request: ServedRequest, readers: Mapping[int, AnswerReader]) -> None:
        self.request = request
        self._readers = readers
        echo = asked.model_dump(include={"model", *ECHOED}, by_alias=True, exclude_none=True)
        self._head = {**ECHOED, **echo, "parallel_tool_calls": asked.parallel_tool_calls is not False}
        self._head |= {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time())}
        self._items: list[Json] = []
        self._open: str | None = None  # "output", "reasoning" or "call": the last item, while text comes to it
        self._is_cut = False
        self._number = 0  # of the next event
        self._num_thought = 0  # tokens of what was thought, with its marks
        self._num_untold = 0  # tokens since the last that made a part

    def chunks(self, delta: Delta) -> list[Json]:
        """The events for `delta`."""
        events: list[Json] = []
        if self._number == 0:
            for name in ("created", "in_progress"):
                events.append(self._event(name, response=self._object("in_progress")))
        self._num_untold += 1  # a delta is one token
        parts = parts_of(self._readers, delta)
        if any(part.kind == "reasoning" for part in parts):
            self._num_thought += self._num_untold
        if parts:
            self._num_untold = 0
        for part in parts:
            if part.kind == "call":
                events += self._closed() + self._called(part)
            elif part.kind == "arguments":
                self._items[-1]["arguments"] += part.text
                events.append(self._of_item("function_call_arguments.delta", delta=part.text))
            else:
                events += self._said("reasoning" if part.kind == "reasoning" else "output", part.text)
        if delta.reason is not None:
            events += self._closed()
            self._is_cut = delta.reason == "length"
        return events

    def last_chunks(self) -> list[Json]:
        status = self._status()
        return [self._event(status, response=self._object(status))]

    def failure(self, error: ApiError) -> Json:
        """The last event of a stream that failed."""
        failed = self._object("failed") | {"error": {"code": "server_error", "message": error.message}}
        return self._event("failed", response=failed)

    def whole(self, deltas: Sequence[Delta]) -> Json:
        for delta in deltas:
            self.chunks(delta)
        return self._object(self._status())

    def _said(self, kind: str, text: str) -> list[Json]:
        """The events for more text of one kind."""
        events = []
        if self._open != kind:
            events = self._closed()
            self._open = kind
            content: Json = {"type": f"{kind}_text", "text": ""}
            if kind == "reasoning":
                item: Json = {"type": "reasoning", "id": f"rs_{uuid.uuid4().hex}", "summary": []}
            else:
                item = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant"}
                content |= {"annotations": [], "logprobs": []}
            events.append(self._added(item | {"status": "in_progress", "content": []}))
            events.append(self._of_item("content_part.added", content_index=0, part=dict(content)))
            self._items[-1]["content"] = [content]
        self._items[-1]["content"][0]["text"] += text
        return [*events, self._of_text(kind, "delta", delta=text)]

    def _closed(self) -> list[Json]:
        """The events that end the open item; none where no item is open."""
        kind, self._open = self._open, None
        item = self._items[-1] if self._items else {}
        if kind is None:
            return []
        if kind == "call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            return [self._of_item("function_call_arguments.done", **done), self._ended()]
        content = item["content"][0]
        text = self._of_text(kind, "done", text=content["text"])
        return [text, self._of_item("content_part.done", content_index=0, part=content), self._ended()]

    def _called(self, part: AnswerPart) -> list[Json]:
        self._open = "call"
        item = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": part.id, "name": part.text}
        return [self._added({**item, "arguments": "", "status": "in_progress"})]

    def _added(self, item: Json) -> Json:
        self._items.append(item)
        return self._event("output_item.added", output_index=len(self._items) - 1, item=dict(item))

    def _ended(self) -> Json:
        self._items[-1]["status"] = "completed"
        return self._event("output_item.done", output_index=len(self._items) - 1, item=self._items[-1])

    def _of_text(self, kind: str, step: str, **more: Any) -> Json:
        more |= {"logprobs": []} if kind == "output" else {}
        return self._of_item(f"{kind}_text.{step}", content_index=0, **more)

    def _of_item(self, kind: str, **more: Any) -> Json:
        """An event about the last item."""
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **more)

    def _event(self, kind: str, **more: Any) -> Json:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number - 1, **more}

    def _status(self) -> str:
        return "incomplete" if self._is_cut else "completed"

    def _object(self, status: str) -> Json:
        is_over, used = status not in ("in_progress", "failed"), usage(self.request)
        counts = {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": used["prompt_tokens_details"],
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._num_thought},
            "total_tokens": used["total_tokens"],
        }
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self._items) if is_over else [],
            "usage": counts if is_over else None,
        }
