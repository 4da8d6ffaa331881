"""/v1/messages, Anthropic's API: a request as a chat, and its answer as content blocks and the events of a stream."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import from_json

from expertly.model.answers import AnswerPart
from expertly.serve import schema
from expertly.serve.answers import BlockAnswer, Json
from expertly.serve.errors import ApiError
from expertly.serve.prompts import Prompts
from expertly.serve.request import Delta, ServedRequest

NEEDED = {"text": ("text",), "thinking": ("thinking",), "tool_use": ("id", "name", "input")}
NEEDED |= {"tool_result": ("tool_use_id",)}
"""By type of block, the fields without which it says nothing."""

ACCEPTED = {"system": ("text",), "user": ("text", "tool_result")}
ACCEPTED |= {"assistant": ("text", "tool_use", "thinking", "redacted_thinking")}
"""By role, the types of blocks in its messages."""

BILLING = "x-anthropic-billing-header:"
"""Begins a text before Claude Code's system prompt that may differ in each request, so that no prefix is reused."""

ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error"}
ERRORS |= {413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error"}


class Block(schema.Strict):
    type: schema.Name
    text: str | None = None
    thinking: str | None = None
    id: Annotated[schema.Name, Field(min_length=1)] | None = None
    name: schema.Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Annotated[schema.Name, Field(min_length=1)] | None = None
    content: schema.Result | None = None
    is_error: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_text(cls, block: Any) -> Any:
        """Documents, and what an assistant's server did by itself, are text for the model."""
        kind = block.get("type") if isinstance(block, dict) else None
        of_server = isinstance(kind, str) and kind.endswith(("_tool_use", "_tool_result"))
        if not (of_server or kind in ("document", "search_result")):
            return block
        text = "\n".join(schema.shown(block))
        if not (of_server or text):
            raise ValueError(f"type: {kind!r} without text cannot be read by this server; accepted: text in it")
        return {"type": "text", "text": text}

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> Block:
        for name in NEEDED.get(self.type, ()):
            if getattr(self, name) is None:
                raise ValueError(f"{name}: required of a block of type {self.type}")
        return self


class InputTurn(schema.Strict):
    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[Block], Field(max_length=1024, fail_fast=True)]

    @property
    def blocks(self) -> list[Block]:
        return [Block(type="text", text=self.content)] if isinstance(self.content, str) else self.content

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> InputTurn:
        for number, block in enumerate(self.blocks):
            if block.type not in ACCEPTED[self.role]:
                accepted = f"accepted of role {self.role}: {', '.join(ACCEPTED[self.role])}"
                raise ValueError(f"content.{number}.type: {block.type!r} cannot be read by this server; {accepted}")
        return self

    def messages(self) -> Iterator[schema.Message]:
        """One for each block. Results of tools go first, as templates want them right behind their calls."""
        for block in sorted(self.blocks, key=lambda block: block.type != "tool_result"):
            if block.type == "tool_result":
                text = "Error: " * bool(block.is_error) + "\n\n".join(schema.texts(block.content))
                yield schema.Message(role="tool", tool_call_id=block.tool_use_id, content=text)
            elif block.type == "tool_use":
                arguments = json.dumps(block.input, ensure_ascii=False)
                yield schema.Message.calling(block.id or "", block.name or "", arguments)
            elif block.type != "redacted_thinking":
                yield schema.Message(role=self.role, content=block.text or "", reasoning_content=block.thinking)


class ClientTool(schema.Function):
    parameters: dict[str, Any] = Field(alias="input_schema")


Tools = Annotated[
    Annotated[ClientTool, Tag("item-client")] | Annotated[schema.AnyTool, Tag("item-server")],
    Discriminator(lambda tool: f"item-{'client' if isinstance(tool, dict) and 'input_schema' in tool else 'server'}"),
]


class Choice(schema.Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: schema.Name = ""  # of type tool
    disable_parallel_tool_use: bool | None = None


class Thinking(schema.Strict):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class CountRequest(schema.Tuning):
    """A conversation, of which only the tokens are asked for. Nothing is stored."""

    messages: Annotated[list[InputTurn], Field(min_length=1, max_length=2048, fail_fast=True)]
    system: schema.Content | None = None
    max_tokens: schema.Count | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    stop_sequences: Annotated[list[schema.Stop], Field(max_length=16, fail_fast=True)] | None = None
    tools: Annotated[list[Tools], Field(max_length=1024, fail_fast=True)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: schema.Wish | None = None
    output_format: schema.ResponseFormat | None = None  # the older place of output_config.format
    of_chat: ClassVar[dict[str, str]] = {
        "response_format": "output_config.format",
        "continue_final_message": "messages",
        "tool_choice.function.name": "tool_choice.name",
    }

    def as_chat(self) -> Json:
        """The same request for the chat API."""
        choice, wish = self.tool_choice or Choice(type="auto"), self.output_config or schema.Wish()
        forced: Any = {"any": "required", "tool": {"type": "function", "function": {"name": choice.name}}}
        thinking, thinks = self.thinking and self.thinking.type, {"enable_thinking": True, "thinking": True}
        system = [text for text in schema.texts(self.system) if not text.startswith(BILLING)]
        said = [schema.Message(role="system", content=text) for text in system]
        messages = schema.joined([*said, *(message for turn in self.messages for message in turn.messages())])
        return {
            **{name: getattr(self, name) for name in schema.Tuning.model_fields},
            "messages": messages,
            "continue_final_message": any(m.role == "assistant" and m.text and not m.tool_calls for m in messages[-1:]),
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences or self.stop,
            "tools": schema.functions(self.tools),
            "tool_choice": forced.get(choice.type, choice.type),
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
            "reasoning_effort": "none" if thinking == "disabled" else wish.effort,
            "chat_template_kwargs": None if thinking in (None, "disabled") else thinks,
            "response_format": wish.format or self.output_format,
        }


class MessagesRequest(CountRequest):
    max_tokens: schema.Count


class MessagesAnswer(BlockAnswer):
    def __init__(self, asked: MessagesRequest, prompts: Prompts, request: ServedRequest) -> None:
        super().__init__(request)
        self._prompts = prompts
        self._max_tokens, self._sequences = asked.max_tokens, asked.stop_sequences or []
        self._message: Json = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        self._message |= {"model": asked.model, "content": [], "stop_reason": None, "stop_sequence": None}
        self._arguments = ""  # of the last block, a call

    @staticmethod
    def failure(error: ApiError) -> Json:
        """An error as Anthropic's clients get it. Claude Code shortens a conversation by the first words."""
        first = "prompt is too long: " if error.code == "context_length_exceeded" else ""
        kind = ERRORS.get(error.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": first + error.message}}

    def chunks(self, delta: Delta) -> list[Json]:
        if "usage" in self._message:
            return super().chunks(delta)
        self._message["usage"] = self._usage()
        begun = {"type": "message_start", "message": dict(self._message)}
        return [begun, {"type": "ping"}, *super().chunks(delta)]

    def last_chunks(self) -> list[Json]:
        return [{"type": "message_delta", "delta": self._stop(), "usage": self._usage()}, {"type": "message_stop"}]

    async def whole(self) -> Json:
        async for delta in self.request:
            self.chunks(delta)
        return self._message | self._stop() | {"content": self.blocks, "usage": self._usage()}

    def _begun(self, part: AnswerPart) -> list[Json]:
        self._arguments = ""
        block: Json = {"type": "text", "text": ""}
        if part.kind == "call":
            block = {"type": "tool_use", "id": part.id, "name": part.text, "input": {}}
        elif part.kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        self.blocks.append(block)
        return [self._of_block("start", content_block=dict(block))]

    def _added(self, part: AnswerPart) -> Json:
        if part.kind == "arguments":
            self._arguments += part.text
            return self._of_block("delta", delta={"type": "input_json_delta", "partial_json": part.text})
        kind = self.blocks[-1]["type"]
        self.blocks[-1][kind] += part.text
        return self._of_block("delta", delta={"type": f"{kind}_delta", kind: part.text})

    def _ended(self) -> list[Json]:
        block, events = self.blocks[-1], []
        if block["type"] == "tool_use":
            with suppress(ValueError):
                block["input"] = from_json(self._arguments)
        elif block["type"] == "thinking":  # clients send back only what is signed
            block["signature"] = self._message["id"]
            signed = {"type": "signature_delta", "signature": block["signature"]}
            events.append(self._of_block("delta", delta=signed))
        return [*events, self._of_block("stop")]

    def _of_block(self, step: str, **more: Any) -> Json:
        return {"type": f"content_block_{step}", "index": len(self.blocks) - 1, **more}

    def _stop(self) -> Json:
        text = self.request.texts[0]
        end = text.stops.matched or self._prompts.text(text.tokens[-1:], special=True)
        if self.reason == "stop" and end in self._sequences:
            return {"stop_reason": "stop_sequence", "stop_sequence": end}
        reason = "tool_use" if any(block["type"] == "tool_use" for block in self.blocks) else "end_turn"
        if self.reason == "length":  # before max_tokens where the context ends
            reason = "model_context_window_exceeded" if len(text.tokens) < self._max_tokens else "max_tokens"
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> Json:
        request, num_cached = self.request, self.request.num_cached_tokens
        read = {"input_tokens": request.num_prompt_tokens - num_cached, "cache_read_input_tokens": num_cached}
        return {**read, "output_tokens": request.num_tokens}
