"""/v1/messages, Anthropic's API: a request as a chat, and its answer as content blocks and the events of a stream."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import from_json

from expertly.model.answers import AnswerReader
from expertly.serve.answers import Json, parts_of
from expertly.serve.errors import ApiError
from expertly.serve.prompts import Prompts
from expertly.serve.request import Delta, ServedRequest
from expertly.serve.responses import FORMAT, TextFormat
from expertly.serve.schema import AnyTool, Content, Count, Effort, Function, Message, Name, Stop, Strict, Tuning, joined

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


class Block(Strict):
    type: Name
    text: str | None = None
    thinking: str | None = None
    id: Annotated[Name, Field(min_length=1)] | None = None
    name: Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Annotated[Name, Field(min_length=1)] | None = None
    content: Content | None = None
    is_error: bool | None = None

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> Block:
        for name in NEEDED.get(self.type, ()):
            if getattr(self, name) is None:
                raise ValueError(f"{name}: required of a block of type {self.type}")
        return self


class InputTurn(Strict):
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

    def messages(self) -> Iterator[Message]:
        """One for each block. Results of tools go first, as templates want them right behind their calls."""
        for block in sorted(self.blocks, key=lambda block: block.type != "tool_result"):
            if block.type == "tool_result":
                result = [block.content] if isinstance(block.content, str) else [p.text for p in block.content or ()]
                text = "Error: " * bool(block.is_error) + "\n\n".join(result)
                yield Message(role="tool", tool_call_id=block.tool_use_id, content=text)
            elif block.type == "tool_use":
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                call = {"id": block.id, "type": "function", "function": function}
                yield Message.model_validate({"role": "assistant", "tool_calls": [call]})
            elif block.type != "redacted_thinking":
                yield Message(role=self.role, content=block.text or "", reasoning_content=block.thinking)


class ClientTool(Function):
    parameters: dict[str, Any] = Field(alias="input_schema")


Tools = Annotated[
    Annotated[ClientTool, Tag("item-client")] | Annotated[AnyTool, Tag("item-server")],
    Discriminator(lambda tool: f"item-{'client' if isinstance(tool, dict) and 'input_schema' in tool else 'server'}"),
]


class Choice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: Name = ""  # of type tool
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputConfig(Strict):
    effort: Effort | None = None
    format: TextFormat | None = None


class CountRequest(Tuning):
    """A conversation, of which only the tokens are asked for. Nothing is stored."""

    messages: Annotated[list[InputTurn], Field(min_length=1, max_length=2048, fail_fast=True)]
    system: Content | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    stop_sequences: Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = None
    tools: Annotated[list[Tools], Field(max_length=1024, fail_fast=True)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    of_chat: ClassVar[dict[str, str]] = dict.fromkeys(FORMAT, "output_config.format")
    cannot: ClassVar[dict[str, str]] = Tuning.cannot | {"mcp_servers": "this server calls no others"}

    def as_chat(self) -> Json:
        """The same request for the chat API."""
        choice, wish = self.tool_choice or Choice(type="auto"), self.output_config or OutputConfig()
        forced: Any = {"any": "required", "tool": {"type": "function", "function": {"name": choice.name}}}
        thinking, thinks = self.thinking and self.thinking.type, {"enable_thinking": True, "thinking": True}
        system = [self.system] if isinstance(self.system, str) else [part.text for part in self.system or ()]
        said = [Message(role="system", content=text) for text in system if not text.startswith(BILLING)]
        messages = joined([*said, *(message for turn in self.messages for message in turn.messages())])
        return {
            **{name: getattr(self, name) for name in Tuning.model_fields},
            "messages": messages,
            "continue_final_message": any(m.role == "assistant" and m.text and not m.tool_calls for m in messages[-1:]),
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences or self.stop,
            "tools": [
                {"type": "function", "function": tool} for tool in self.tools or () if isinstance(tool, Function)
            ],
            "tool_choice": forced.get(choice.type, choice.type),
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
            "reasoning_effort": "none" if thinking == "disabled" else wish.effort,
            "chat_template_kwargs": None if thinking in (None, "disabled") else thinks,
            "response_format": wish.format and wish.format.as_chat(),
        }


class MessagesRequest(CountRequest):
    max_tokens: Count


class MessagesAnswer:
    """One answer as content blocks: what was thought, its text, each tool call."""

    done = b""

    def __init__(
        self, asked: MessagesRequest, prompts: Prompts, request: ServedRequest, readers: Mapping[int, AnswerReader]
    ) -> None:
        self.request = request
        self._prompts = prompts
        self._readers = readers
        self._max_tokens, self._sequences = asked.max_tokens, asked.stop_sequences or []
        self._message: Json = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        self._message |= {"model": asked.model, "content": [], "stop_reason": None, "stop_sequence": None}
        self._blocks: list[Json] = []
        self._arguments = ""  # of the last block, a call
        self._is_open = False  # the last block

    @staticmethod
    def failure(error: ApiError) -> Json:
        """An error as Anthropic's clients get it. Claude Code shortens a conversation by the first words."""
        first = "prompt is too long: " if error.code == "context_length_exceeded" else ""
        kind = ERRORS.get(error.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": first + error.message}}

    def chunks(self, delta: Delta) -> list[Json]:
        """The events for `delta`."""
        events: list[Json] = []
        if "usage" not in self._message:
            self._message["usage"] = self._usage()
            events += [{"type": "message_start", "message": dict(self._message)}, {"type": "ping"}]
        for part in parts_of(self._readers, delta):
            if part.kind == "call":
                events += self._begun({"type": "tool_use", "id": part.id, "name": part.text, "input": {}})
            elif part.kind == "arguments":
                self._arguments += part.text
                events.append(self._of_block("delta", delta={"type": "input_json_delta", "partial_json": part.text}))
            else:
                kind = "thinking" if part.kind == "reasoning" else "text"
                if not self._is_open or self._blocks[-1]["type"] != kind:
                    events += self._begun({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
                self._blocks[-1][kind] += part.text
                events.append(self._of_block("delta", delta={"type": f"{kind}_delta", kind: part.text}))
        if delta.reason is not None:
            events += self._ended()
            self._message |= self._why_stopped(delta.reason)
            self._message |= {"content": self._blocks, "usage": self._usage()}
        return events

    def last_chunks(self) -> list[Json]:
        stop = {name: self._message[name] for name in ("stop_reason", "stop_sequence")}
        return [{"type": "message_delta", "delta": stop, "usage": self._usage()}, {"type": "message_stop"}]

    def whole(self, deltas: Sequence[Delta]) -> Json:
        for delta in deltas:
            self.chunks(delta)
        return self._message

    def _begun(self, block: Json) -> list[Json]:
        events = self._ended()
        self._is_open, self._arguments = True, ""
        self._blocks.append(block)
        return [*events, self._of_block("start", content_block=dict(block))]

    def _ended(self) -> list[Json]:
        """The events that end the open block; none where none is open."""
        if not self._is_open:
            return []
        self._is_open, block, events = False, self._blocks[-1], []
        if block["type"] == "tool_use":
            with suppress(ValueError):
                block["input"] = from_json(self._arguments)
        elif block["type"] == "thinking":  # clients send back only what is signed
            block["signature"] = self._message["id"]
            signed = {"type": "signature_delta", "signature": block["signature"]}
            events.append(self._of_block("delta", delta=signed))
        return [*events, self._of_block("stop")]

    def _of_block(self, step: str, **more: Any) -> Json:
        return {"type": f"content_block_{step}", "index": len(self._blocks) - 1, **more}

    def _why_stopped(self, reason: str) -> Json:
        text = self.request.texts[0]
        end = text.stops.matched or self._prompts.text(text.tokens[-1:], special=True)
        if reason == "stop" and end in self._sequences:
            return {"stop_reason": "stop_sequence", "stop_sequence": end}
        if reason == "length":  # before max_tokens where the context ends
            is_full = len(text.tokens) < self._max_tokens
            return {"stop_reason": "model_context_window_exceeded" if is_full else "max_tokens"}
        return {"stop_reason": "tool_use" if any(b["type"] == "tool_use" for b in self._blocks) else "end_turn"}

    def _usage(self) -> Json:
        request, num_cached = self.request, self.request.num_cached_tokens
        read = {"input_tokens": request.num_prompt_tokens - num_cached, "cache_read_input_tokens": num_cached}
        return {**read, "output_tokens": request.num_tokens}
