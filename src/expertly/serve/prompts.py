"""From messages and texts to tokens, and back: the model's chat template and tokenizer."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jinja2

from expertly.core.errors import ConfigError
from expertly.model.generation import check_tokens
from expertly.serve.errors import invalid
from expertly.serve.schema import Message, Tool

PLAIN_TEMPLATE = "{%- for message in messages -%}{{ message['content'] | trim }}\n\n{% endfor -%}"
"""For a model that was never taught to chat: its messages are a text that it continues."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def _bytes_by_letter() -> dict[str, int]:
    """Of byte-level BPE (GPT-2): printable bytes are themselves, the others are letters from U+0100."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_BYTE_OF = _bytes_by_letter()

_BROKEN = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError)
"""What a template may raise over messages that it was not written for."""


class Prompts:
    """One tokenizer for writing prompts, in a thread of its own, and one for reading tokens: neither waits.

    `template` replaces the model's own.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, template: str | None = None) -> None:
        if tokenizer is None:
            raise ConfigError("the model has no tokenizer, so there is no text to serve")
        self._reader = tokenizer
        self._reader_lock = threading.Lock()
        self._writer = copy.deepcopy(tokenizer)
        self._thread = ThreadPoolExecutor(1, "expertly-serve-prompts")
        self.vocabulary = vocabulary
        own = getattr(tokenizer, "chat_template", None)
        self.is_plain = template is None and not own
        self._template = PLAIN_TEMPLATE if self.is_plain else template
        source = self._template or (own if isinstance(own, str) else json.dumps(own))
        self.takes_tools = "tools" in source

    async def of_messages(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Raises ApiError where the template refuses them."""
        return await self._write(self._of_messages, messages, tools)

    async def of_text(self, text: str) -> list[int]:
        """As the tokenizer begins a text. Raises ApiError where that is no token."""
        return await self._write(self._of_text, text)

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raises ApiError where one is not in the vocabulary."""
        try:
            check_tokens(tokens, self.vocabulary, param)
        except ConfigError as error:
            raise invalid(str(error), param) from None

    def text(self, tokens: Sequence[int], special: bool = False) -> str:
        """`special`: with the tokens that are no text."""
        with self._reader_lock:
            text: str = self._reader.decode(
                list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False
            )
        return text

    def piece(self, token: int) -> tuple[str, bytes]:
        """One token alone: as text, and its bytes, which may be a part of a character."""
        text = self.text([token], special=True)
        if _REPLACEMENT not in text:
            return text, text.encode()
        raw: str = self._reader.convert_ids_to_tokens(token)
        if re.fullmatch(r"<0x[0-9A-F]{2}>", raw):
            return text, bytes([int(raw[3:5], 16)])
        if all(letter in _BYTE_OF for letter in raw):
            return text, bytes(_BYTE_OF[letter] for letter in raw)
        return text, text.encode()

    @property
    def response_template(self) -> Any:
        """How the model writes tool calls, where its tokenizer says so."""
        return getattr(self._reader, "response_template", None)

    def parsed(self, prompt: Sequence[int], answer: Sequence[int], tools: Sequence[Tool]) -> dict[str, Any]:
        """A whole answer by the response template. Raises what it raises."""
        found: dict[str, Any] = self._reader.parse_response(
            self.text(answer, special=True),
            prefix=self.text(prompt, special=True),
            tools=[tool.model_dump(exclude_none=True) for tool in tools],
        )
        return found

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    async def _write(self, make: Any, *args: Any) -> list[int]:
        tokens: list[int] = await asyncio.get_running_loop().run_in_executor(self._thread, make, *args)
        return tokens

    def _of_messages(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        if tools and not self.takes_tools:
            raise invalid("tools: this model's chat template knows none; accepted: no tools", "tools")
        told: dict[str, Any] = {"tools": [tool.model_dump(exclude_none=True) for tool in tools]} if tools else {}
        if self._template is not None:
            told["chat_template"] = self._template
        try:
            text = self._writer.apply_chat_template(
                [as_template_sees(message) for message in messages], add_generation_prompt=True, tokenize=False, **told
            )
        except _BROKEN as error:
            raise invalid(f"messages: the model's chat template refuses them: {error}", "messages") from None
        tokens: list[int] = self._writer.encode(text, add_special_tokens=self.is_plain)
        self.check_tokens(tokens, "messages")
        return tokens

    def _of_text(self, text: str) -> list[int]:
        tokens: list[int] = self._writer.encode(text)
        self.check_tokens(tokens, "prompt")
        return tokens


def as_template_sees(message: Message) -> dict[str, Any]:
    """A message as templates expect it: text in one piece, arguments of calls as objects."""
    role = "system" if message.role == "developer" else message.role
    seen: dict[str, Any] = {"role": role, "content": message.text}
    if message.name is not None:
        seen["name"] = message.name
    if message.tool_call_id is not None:
        seen["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        calls = []
        for call in message.tool_calls:
            try:
                arguments = json.loads(call.function.arguments or "{}")
            except (ValueError, RecursionError):
                arguments = call.function.arguments
            function = {"name": call.function.name, "arguments": arguments}
            calls.append({"id": call.id, "type": "function", "function": function})
        seen["tool_calls"] = calls
    return seen
