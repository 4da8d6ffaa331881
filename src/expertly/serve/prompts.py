"""From messages and texts to tokens, and back: the model's chat template and tokenizer."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from expertly.core.errors import ConfigError
from expertly.model.answers import AnswerFormat
from expertly.model.generation import check_tokens
from expertly.model.loading import tokenizer_errors
from expertly.model.sandbox import SlowError
from expertly.model.templates import RENDER_NBYTES, Renderer, TooLongError
from expertly.model.text import bytes_of
from expertly.serve.errors import ApiError, invalid
from expertly.serve.schema import Message, Tool

MAX_CONTEXT = 1 << 20

# Processor time to render a conversation, for which others wait: 400 messages with tools take 0.01 s, and compiling a
# template of 13 KB, as the first request does, 0.1 s; a slow processor takes several times as long. What takes more
# is refused only after a while, or who sends it again and again would keep others waiting.
RENDER_CPU_S, SLOW_S = 1.0, 1.0

# Memory to render a conversation, and for each character of the longest that may be: a text is held five times, in up
# to four bytes a character.
LEAST_RENDER_NBYTES, RENDER_NBYTES_OF_CHARACTER = 32 << 20, 32

LEAST_LONGEST_TOKEN = 64
"""Characters of a token, for a tokenizer that drops or joins some: runs of spaces, characters it does not know."""

# Characters of a prompt that are tokenized at a time to find out whether the whole is too long. Longer prompts wait
# for each other, and not shorter ones for them.
PIECE = 1 << 16

_PIECE_SLACK = 64
"""Tokens by which a piece may have more than its part of the whole: its ends are in the middle of words."""

PLAIN_TEMPLATE = "{%- for message in messages -%}{{ message['content'] | trim }}\n\n{% endfor -%}"
"""For a model without a chat template: it continues the text of the messages."""

_LANES = ("templates", "prompts", "long-prompts")
"""What waits in one thread for others of its kind, and for nothing else."""

Result = TypeVar("Result")

log = logging.getLogger("expertly.serve")


class Prompts:
    """Makes tokens of prompts with one tokenizer, and text of tokens with another, so that neither waits for the other.

    Chat templates are rendered in processes, prompts tokenized in threads. `template` replaces the model's own;
    `context`: the longest text in tokens. A prompt that is longer in any case, by its characters, is not tokenized.
    """

    def __init__(
        self, tokenizer: Any, vocabulary: int, template: str | None = None, context: int = MAX_CONTEXT
    ) -> None:
        if tokenizer is None:
            raise ConfigError("the model has no tokenizer, so there is no text to serve")
        self.tokenizer = tokenizer  # it makes text
        self._reader_lock = threading.Lock()
        self._writer = copy.deepcopy(tokenizer)
        with tokenizer_errors("the model's tokenizer cannot read a text", ConfigError):
            self._writer.encode("a")  # sets its state; two threads may use it from now on
        self._context = context
        self.max_characters = context * max(LEAST_LONGEST_TOKEN, *map(len, tokenizer.get_vocab()))
        self._threads = {name: ThreadPoolExecutor(1, f"expertly-serve-{name}") for name in _LANES}
        nbytes = min(RENDER_NBYTES, LEAST_RENDER_NBYTES + RENDER_NBYTES_OF_CHARACTER * self.max_characters)
        self._renderer = Renderer(RENDER_CPU_S, nbytes=nbytes)
        self.vocabulary = vocabulary
        self.special_tokens = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        added = {}
        with suppress(AttributeError, NotImplementedError):  # of a tokenizer that is none of transformers' own
            added = tokenizer.added_tokens_decoder
        self.special_tokens |= {word.content: token for token, word in added.items() if word.special}
        of_model = getattr(tokenizer, "chat_template", None)
        is_plain = self._is_plain = template is None and not of_model
        self.template_name = "none: messages are joined" if is_plain else "the model's" if template is None else "given"
        self._template = PLAIN_TEMPLATE if is_plain else template
        source = self._template or (of_model if isinstance(of_model, str) else json.dumps(of_model))
        self._takes_tools = "tools" in source
        self._joins_arguments = re.search(r"arguments(?:['\"]\])?\s*\+", source) is not None
        words = {*self.special_tokens, *(word.content for word in added.values())}
        self.answers = AnswerFormat(thinks=False) if is_plain else AnswerFormat.of(tokenizer, source, words)

    async def of_messages(
        self, messages: Sequence[Message], tools: Sequence[Tool], variables: dict[str, Any]
    ) -> tuple[list[int], str]:
        """The tokens of a chat, and their text. `variables`: for the template. Raises ApiError if it refuses."""
        if tools and not self._takes_tools:
            raise invalid("tools: this model's chat template knows none; accepted: no tools", "tools")
        self._check_length(sum(len(message.text) for message in messages), "messages")

        def render() -> str:
            seen = [as_template_sees(message, self._joins_arguments) for message in messages]
            functions = as_told(tools) or None
            return self._renderer.render(self._writer, seen, self._template, functions, variables, self.max_characters)

        try:
            text = await self._in("templates", render)
        except TooLongError as error:
            raise self._too_long(error.length, "messages") from None
        except ConfigError as error:
            if isinstance(error, SlowError):
                await asyncio.sleep(SLOW_S)
            raise invalid(str(error), "messages") from None
        return await self._encoded(text, "messages", add_special_tokens=self._is_plain), text

    async def of_text(self, prompt: str | list[int], special: bool = True) -> list[int]:
        """The tokens of a text, with those put before it (`special`), or tokens as they are. Raises ApiError."""
        if isinstance(prompt, str):
            return await self._encoded(prompt, "prompt", add_special_tokens=special)
        self.check_tokens(prompt, "prompt")
        return prompt

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raises ApiError where one is not in the vocabulary."""
        try:
            check_tokens(tokens or [0], self.vocabulary, param)
        except ConfigError as error:
            raise invalid(str(error), param) from None

    def decoder(self, marks: str | None) -> Callable[[Sequence[int]], str]:
        """Makes text of tokens, of the special ones only of those in `marks`; None: of all."""
        dropped = {token for name, token in self.special_tokens.items() if marks is not None and name not in marks}
        return lambda tokens: self.text([token for token in tokens if token not in dropped], special=True)

    def text(self, tokens: Sequence[int], special: bool = False) -> str:
        """The text of tokens; `special`: with special tokens. Raises ConfigError where the tokenizer fails at them."""
        with tokenizer_errors("the model's tokenizer cannot write these tokens", ConfigError), self._reader_lock:
            options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
            return str(self.tokenizer.decode(list(tokens), **options))

    async def text_of(self, tokens: list[int]) -> str:
        """The text of any number of tokens, special ones too. No answer waits for it."""
        self.check_tokens(tokens, "tokens")
        decode = partial(self._writer.decode, tokens, clean_up_tokenization_spaces=False)
        with tokenizer_errors("the model's tokenizer cannot write these tokens", ConfigError):
            return await self._in("long-prompts", decode)

    def piece(self, token: int) -> tuple[str, bytes]:
        """One token alone: its text, and its bytes, which may be a part of a character."""
        text = self.text([token], special=True)
        return text, bytes_of(self.tokenizer, token, text)

    def close(self) -> None:
        self._renderer.sandbox.close()
        for threads in self._threads.values():
            threads.shutdown(cancel_futures=True)

    async def _encoded(self, text: str, param: str, **options: bool) -> list[int]:
        self._check_length(len(text), param)
        lane = "prompts" if len(text) <= PIECE else "long-prompts"
        return await self._in(lane, partial(self._encode, text, param, options))

    def _encode(self, text: str, param: str, options: dict[str, bool]) -> list[int]:
        def tokens_of(part: str) -> list[int]:
            with tokenizer_errors("the model's tokenizer cannot read it", ConfigError):
                return list(self._writer.encode(part, **options))

        least = 0
        try:
            for begin in range(0, len(text), PIECE) if len(text) > PIECE else ():
                least += len(tokens_of(text[begin : begin + PIECE])) - _PIECE_SLACK
                if least > self._context:
                    raise self._too_long(len(text), param)
            tokens = tokens_of(text)
        except ConfigError as error:
            log.warning("the tokenizer failed at a prompt of %d characters: %s", len(text), error)
            raise invalid(f"{param}: {error}", param) from None
        self.check_tokens(tokens, param)
        return tokens

    async def _in(self, lane: str, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads[lane], work)

    def _check_length(self, length: int, param: str) -> None:
        if length > self.max_characters:
            raise self._too_long(length, param)

    def _too_long(self, length: int, param: str) -> ApiError:
        sentence = f"{param}: {length} characters are more than {self._context} tokens"
        accepted = f"accepted: {self._context} together with those to write"
        return invalid(f"{sentence}; {accepted}", param, "context_length_exceeded")


def as_told(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as templates and parsers expect them."""
    return [tool.model_dump(exclude_none=True) for tool in tools]


_CALLS_SEEN = {"__all__": {"id": True, "type": True, "function": {"name", "arguments"}}}
_SEEN: Any = dict.fromkeys(("reasoning_content", "name", "tool_call_id"), True) | {"tool_calls": _CALLS_SEEN}


def as_template_sees(message: Message, as_text: bool = False) -> dict[str, Any]:
    """A message as templates expect it: text in one piece, arguments of calls as objects. `as_text`: as text, for
    DeepSeek's, which join them to others. gpt-oss's names what was thought otherwise.
    """
    role = "system" if message.role == "developer" else message.role
    seen = {"role": role, "content": message.text, **message.model_dump(include=_SEEN, exclude_none=True)}
    if message.reasoning_content and not message.text:
        seen["thinking"] = message.reasoning_content
    for call in () if as_text else seen.get("tool_calls", ()):
        with suppress(ValueError, RecursionError):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
    return seen
