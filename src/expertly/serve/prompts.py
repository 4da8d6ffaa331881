"""From messages and texts to tokens, and back: the model's chat template and tokenizer."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from expertly.core.errors import ConfigError
from expertly.model.answers import AnswerFormat, known_template
from expertly.model.generation import check_tokens
from expertly.model.text import RENDER_S, bytes_of, rendered
from expertly.serve.errors import invalid
from expertly.serve.schema import Message, Tool

_MAX_RENDERED = 4
"""Conversations that are rendered at a time: templates that do not end must fill all of these threads before others
wait.
"""

PLAIN_TEMPLATE = "{%- for message in messages -%}{{ message['content'] | trim }}\n\n{% endfor -%}"
"""For a model without a chat template: it continues the text of the messages."""


class Prompts:
    """Makes tokens of prompts with one tokenizer, in a thread of its own, and text of tokens with another, so that
    neither waits for the other.

    Chat templates are rendered in other threads, each with a deadline. `template` replaces the model's own.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, template: str | None = None, model: Any = None) -> None:
        if tokenizer is None:
            raise ConfigError("the model has no tokenizer, so there is no text to serve")
        self._reader = tokenizer
        self._reader_lock = threading.Lock()
        self.tokenizer = tokenizer
        self._writer = copy.deepcopy(tokenizer)
        self._thread = ThreadPoolExecutor(1, "expertly-serve-prompts")
        self._renderers = ThreadPoolExecutor(_MAX_RENDERED, "expertly-serve-templates")
        self._render_s = RENDER_S
        self.vocabulary = vocabulary
        self.special_tokens = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        own = getattr(tokenizer, "chat_template", None)
        self.is_plain = template is None and not own
        self._template = PLAIN_TEMPLATE if self.is_plain else template
        source = self._template or (own if isinstance(own, str) else json.dumps(own))
        self._takes_tools = "tools" in source
        known = None if self.is_plain or model is None else known_template(tokenizer, model)
        self.answers = AnswerFormat(known, thinks="<think>" in source)
        self._own_names = set(inspect.signature(tokenizer.apply_chat_template).parameters)

    async def of_messages(
        self, messages: Sequence[Message], tools: Sequence[Tool], variables: dict[str, Any] | None = None
    ) -> list[int]:
        """The tokens of a chat. `variables`: more for the template. Raises ApiError where it refuses the messages, or
        does not end.
        """
        for name in variables or ():
            if name in self._own_names:
                raise invalid(
                    f"chat_template_kwargs: {name!r} is not the template's; accepted: what the template reads"
                )
        if tools and not self._takes_tools:
            raise invalid("tools: this model's chat template knows none; accepted: no tools", "tools")
        told = {**(variables or {}), "add_generation_prompt": True, "tokenize": False}
        if tools:
            told["tools"] = as_told(tools)
        if self._template is not None:
            told["chat_template"] = self._template
        seen = [as_template_sees(message) for message in messages]

        def render() -> str:
            try:
                return rendered(lambda: self._writer.apply_chat_template(seen, **told), self._render_s)
            except ConfigError as error:
                raise invalid(str(error), "messages") from None

        text = await asyncio.get_running_loop().run_in_executor(self._renderers, render)
        return await self._encoded(text, "messages", add_special_tokens=self.is_plain)

    async def of_text(self, text: str) -> list[int]:
        """The tokens of a text, with those that the tokenizer puts before one. Raises ApiError where there are none."""
        return await self._encoded(text, "prompt")

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raises ApiError where one is not in the vocabulary."""
        try:
            check_tokens(tokens, self.vocabulary, param)
        except ConfigError as error:
            raise invalid(str(error), param) from None

    def text(self, tokens: Sequence[int], special: bool = False) -> str:
        """The text of tokens. `special`: with special tokens, which are no text."""
        with self._reader_lock:
            text: str = self._reader.decode(
                list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False
            )
        return text

    def piece(self, token: int) -> tuple[str, bytes]:
        """One token alone: its text, and its bytes, which may be a part of a character."""
        text = self.text([token], special=True)
        return text, bytes_of(self._reader, token, text)

    def close(self) -> None:
        self._renderers.shutdown(cancel_futures=True)
        self._thread.shutdown(cancel_futures=True)

    async def _encoded(self, text: str, param: str, **how: bool) -> list[int]:
        def encode() -> list[int]:
            tokens: list[int] = self._writer.encode(text, **how)
            self.check_tokens(tokens, param)
            return tokens

        return await asyncio.get_running_loop().run_in_executor(self._thread, encode)


def as_told(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as templates and parsers expect them."""
    return [tool.model_dump(exclude_none=True) for tool in tools]


_CALLS_SEEN = {"__all__": {"id": True, "type": True, "function": {"name", "arguments"}}}
_SEEN: Any = dict.fromkeys(("reasoning_content", "name", "tool_call_id"), True) | {"tool_calls": _CALLS_SEEN}


def as_template_sees(message: Message) -> dict[str, Any]:
    """A message as templates expect it: text in one piece, arguments of calls as objects."""
    role = "system" if message.role == "developer" else message.role
    seen = {"role": role, "content": message.text, **message.model_dump(include=_SEEN, exclude_none=True)}
    for call in seen.get("tool_calls", ()):
        with suppress(ValueError, RecursionError):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
    return seen
