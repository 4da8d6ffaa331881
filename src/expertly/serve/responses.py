"""/v1/responses, OpenAI's newer API: a request as a chat, and its answer as items and the events of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, Discriminator, Field, Tag, model_validator

from expertly.model.answers import AnswerPart
from expertly.serve import schema
from expertly.serve.answers import BlockAnswer, Json, usage
from expertly.serve.errors import ApiError
from expertly.serve.request import Delta, ServedRequest


class InputMessage(schema.Message):
    type: Literal["message"] = "message"


class InputCall(schema.Strict):
    """`custom_tool_call`: of a tool that is none of this server's, from the time when another one answered."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: schema.Name
    name: schema.Name
    namespace: schema.Name | None = None
    arguments: str = Field(validation_alias=AliasChoices("arguments", "input"))


class InputResult(schema.Strict):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Annotated[schema.Name, Field(min_length=1)]
    output: schema.Result


def _kind(value: Any, default: str) -> str:
    return str(value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default))


def _type_of(item: Any) -> str:
    """The tag of an item: "item-" and its type, or "item-other" of what the model is not told again: what it thought,
    and what tools of other servers did.
    """
    kind = _kind(item, "message").replace("custom_tool_call", "function_call")
    is_other = kind.endswith(("_call", "_output", "_tools", "reasoning")) and not kind.startswith("function_call")
    return "item-other" if is_other else f"item-{kind}"


Item = Annotated[
    Annotated[InputMessage, Tag("item-message")]
    | Annotated[InputCall, Tag("item-function_call")]
    | Annotated[InputResult, Tag("item-function_call_output")]
    | Annotated[schema.AnyTool, Tag("item-other")],
    Discriminator(
        _type_of,
        custom_error_type="item_type",
        custom_error_message="accepted: items of type message or reasoning, calls of tools and their outputs",
    ),
]


class FlatTool(schema.Function):
    type: Literal["function"]


class Namespace(schema.Strict):
    """Functions under a name, as codex groups those of an MCP server. The model knows each by both names in one."""

    type: Literal["namespace"]
    name: schema.FunctionLabel
    description: str | None = None
    tools: Annotated[list[FlatTool], Field(max_length=1024, fail_fast=True)]


def _joined(namespace: str | None, name: str) -> str:
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


Tools = Annotated[
    Annotated[FlatTool, Tag("item-function")]
    | Annotated[Namespace, Tag("item-namespace")]
    | Annotated[schema.AnyTool, Tag("item-other")],
    Discriminator(
        lambda tool: f"item-{kind if (kind := _kind(tool, 'function')) in ('function', 'namespace') else 'other'}"
    ),
]


class ResponsesRequest(schema.Tuning):
    """Nothing is stored: each request brings the whole conversation."""

    input: str | Annotated[list[Item], Field(min_length=1, max_length=2048, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: schema.Limit = None
    tools: Annotated[list[Tools], Field(max_length=1024, fail_fast=True)] | None = None
    tool_choice: schema.Choice | schema.AnyTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: schema.Wish | None = None
    text: schema.Wish | None = None
    chat_template_kwargs: schema.Variables | None = None
    of_chat: ClassVar[dict[str, str]] = {"messages": "input", "response_format": "text.format"}
    """Fields of the chat request that it becomes, and their names in this one."""

    @model_validator(mode="after")
    def _functions_differ(self) -> ResponsesRequest:
        callers: dict[str, Json] = {}
        for tool, caller in self.functions():
            if (other := callers.setdefault(tool.name, caller)) != caller:
                sentence = f"{other} and {caller} have the same name for the model"
                raise ValueError(f"tools: {sentence}, {tool.name!r}; accepted: names that differ")
        return self

    def as_chat(self) -> dict[str, Any]:
        """The same request for the chat API."""
        choice: Any = self.tool_choice
        if isinstance(choice, schema.AnyTool):
            name = _joined(choice.namespace, choice.label)
            choice = {"type": "function", "function": {"name": name}}
        shared = (*schema.Tuning.model_fields, "parallel_tool_calls", "chat_template_kwargs")
        return {
            **{name: getattr(self, name) for name in shared},
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "tools": schema.functions(tool for tool, _ in self.functions()),
            "tool_choice": choice,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "response_format": self.text and self.text.format,
        }

    def functions(self) -> Iterator[tuple[schema.Function, Json]]:
        """Those of its tools, as the model knows them; and how their client calls them."""
        for tool in self.tools or ():
            if isinstance(tool, FlatTool):
                yield tool, {"name": tool.name}
            for each in tool.tools if isinstance(tool, Namespace) else ():
                named = {"name": each.name, "namespace": tool.name}
                yield each.model_copy(update={"name": _joined(tool.name, each.name)}), named

    def _messages(self) -> list[schema.Message]:
        messages = [schema.Message(role="system", content=self.instructions)] if self.instructions is not None else []
        items = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for item in items:
            if isinstance(item, InputMessage):
                messages.append(item)
            elif isinstance(item, InputResult):
                output = "".join(schema.texts(item.output))
                messages.append(schema.Message(role="tool", tool_call_id=item.call_id, content=output))
            elif isinstance(item, InputCall):
                name = _joined(item.namespace, item.name)
                messages.append(schema.Message.calling(item.call_id, name, item.arguments))
        return schema.joined(messages)


ECHOED: Json = {"instructions": None, "max_output_tokens": None, "temperature": 1.0, "top_p": 1.0, "metadata": {}}
ECHOED |= {"tools": [], "tool_choice": "auto", "text": {"format": {"type": "text"}}}
"""What an answer says of its request, and of one that does not have these fields."""


class ResponsesAnswer(BlockAnswer):
    def __init__(self, asked: ResponsesRequest, request: ServedRequest) -> None:
        super().__init__(request)
        echo = asked.model_dump(include={"model", *ECHOED}, by_alias=True, exclude_none=True)
        self._head = {**ECHOED, **echo, "parallel_tool_calls": asked.parallel_tool_calls is not False}
        self._head |= {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time())}
        self._names = {tool.name: names for tool, names in asked.functions()}
        self._number = 0  # of the next event
        self._num_thought = 0  # tokens of what was thought, with its marks
        self._num_untold = 0  # tokens since the last that made a part

    def chunks(self, delta: Delta) -> list[Json]:
        names = ("created", "in_progress") if self._number == 0 else ()
        begun = [self._event(name, response=self._object("in_progress")) for name in names]
        self._num_untold += 1  # a delta is one token
        return begun + super().chunks(delta)

    def last_chunks(self) -> list[Json]:
        return [self._event(self._status, response=self._object(self._status))]

    def failure(self, error: ApiError) -> Json:
        """The last event of a stream that failed."""
        failed = self._object("failed") | {"error": {"code": "server_error", "message": error.message}}
        return self._event("failed", response=failed)

    async def whole(self) -> Json:
        async for delta in self.request:
            self.chunks(delta)
        return self._object(self._status)

    def _begun(self, part: AnswerPart) -> list[Json]:
        item: Json = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "content": []}
        if part.kind == "call":
            named = self._names.get(part.text, {"name": part.text})
            item = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": part.id, **named}
            item["arguments"], self._num_untold = "", 0
        elif part.kind == "reasoning":
            item = {"type": "reasoning", "id": f"rs_{uuid.uuid4().hex}", "summary": [], "content": []}
        item["status"] = "in_progress"
        self.blocks.append(item)
        events = [self._event("output_item.added", output_index=len(self.blocks) - 1, item=dict(item))]
        if part.kind != "call":
            is_text = part.kind == "content"
            more: Json = {"annotations": [], "logprobs": []} if is_text else {}
            item["content"] = [{"type": "output_text" if is_text else "reasoning_text", "text": "", **more}]
            events.append(self._of_item("content_part.added", content_index=0, part=dict(item["content"][0])))
        return events

    def _added(self, part: AnswerPart) -> Json:
        item = self.blocks[-1]
        self._num_thought += self._num_untold if part.kind == "reasoning" else 0
        self._num_untold = 0
        if part.kind == "arguments":
            item["arguments"] += part.text
            return self._of_item("function_call_arguments.delta", delta=part.text)
        item["content"][0]["text"] += part.text
        return self._of_text("delta", delta=part.text)

    def _ended(self) -> list[Json]:
        item = self.blocks[-1]
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            events = [self._of_item("function_call_arguments.done", **done)]
        else:
            part = item["content"][0]
            events = [self._of_text("done", text=part["text"])]
            events.append(self._of_item("content_part.done", content_index=0, part=part))
        item["status"] = "completed"
        return [*events, self._event("output_item.done", output_index=len(self.blocks) - 1, item=item)]

    def _of_text(self, step: str, **more: Any) -> Json:
        part = self.blocks[-1]["content"][0]
        more |= {"logprobs": []} if "logprobs" in part else {}
        return self._of_item(f"{part['type']}.{step}", content_index=0, **more)

    def _of_item(self, kind: str, **more: Any) -> Json:
        """An event about the last item."""
        return self._event(kind, item_id=self.blocks[-1]["id"], output_index=len(self.blocks) - 1, **more)

    def _event(self, kind: str, **more: Any) -> Json:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number - 1, **more}

    @property
    def _status(self) -> str:
        return "incomplete" if self.reason == "length" else "completed"

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
            "output": list(self.blocks) if is_over else [],
            "usage": counts if is_over else None,
        }
