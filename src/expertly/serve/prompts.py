"""From messages and texts to tokens, and back: the model's chat template and tokenizer."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from expertly.core.errors import ConfigError
from expertly.model.answers import AnswerFormat, known_template
from expertly.model.generation import check_tokens
from expertly.model.loading import tokenizer_errors
from expertly.model.sandbox import PATIENT_NICE, SlowError
from expertly.model.templates import RENDER_NBYTES, Renderer, TooLongError
from expertly.model.text import bytes_of
from expertly.serve.errors import ApiError, invalid, too_long, unavailable
from expertly.serve.schema import Message, Tool

MAX_CONTEXT = 1 << 20

FIRST_RENDER_CPU_S = 0.15
"""Processor time of a conversation's first try, and FIRST_RENDER_S its time. 400 messages with tools take 0.01 s. One
that takes longer is rendered again by a process that such conversations share, so that they do not hold up others.
"""

FIRST_RENDER_S = 1.0

LEAST_RENDER_NBYTES = 32 << 20
"""Memory to render a conversation, and for each character of the longest that may be: a text is held five times, in up
to four bytes a character.
"""

RENDER_NBYTES_OF_CHARACTER = 32

MAX_SLOW = 4
"""Conversations that may wait for that process; more are refused."""

LEAST_LONGEST_TOKEN = 64
"""Characters of a token, for a tokenizer that drops or joins some: runs of spaces, characters it does not know."""

PIECE = 1 << 16
"""Characters of a prompt that are tokenized at a time to find out whether the whole is too long. Longer prompts wait
for each other, and not shorter ones for them.
"""

_PIECE_SLACK = 64
"""Tokens by which a piece may have more than its part of the whole: its ends are in the middle of words."""

PLAIN_TEMPLATE = "{%- for message in messages -%}{{ message['content'] | trim }}\n\n{% endfor -%}"
"""For a model without a chat template: it continues the text of the messages."""

_LANES = ("templates", "slow-templates", "prompts", "long-prompts")
"""What waits in one thread for others of its kind, and for nothing else."""

Result = TypeVar("Result")

log = logging.getLogger("expertly.serve")


class Prompts:
    """Makes tokens of prompts with one tokenizer, and text of tokens with another, so that neither waits for the other.

    Chat templates are rendered in processes, prompts tokenized in threads. `template` replaces the model's own;
    `context`: the longest text in tokens. A prompt that is longer in any case, by its characters, is not tokenized.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocabulary: int,
        template: str | None = None,
        model: Any = None,
        context: int = MAX_CONTEXT,
    ) -> None:
        if tokenizer is None:
            raise ConfigError("the model has no tokenizer, so there is no text to serve")
        self._reader = tokenizer
        self._reader_lock = threading.Lock()
        self.tokenizer = tokenizer
        self._writer = copy.deepcopy(tokenizer)
        with tokenizer_errors("the model's tokenizer cannot read a text", ConfigError):
            self._writer.encode("a")  # sets its state; two threads may use it from now on
        self._context = context
        self.max_characters = context * max(LEAST_LONGEST_TOKEN, *map(len, tokenizer.get_vocab()))
        self._threads = {name: ThreadPoolExecutor(1, f"expertly-serve-{name}") for name in _LANES}
        nbytes = min(RENDER_NBYTES, LEAST_RENDER_NBYTES + RENDER_NBYTES_OF_CHARACTER * self.max_characters)
        self.renderers = (
            Renderer(FIRST_RENDER_CPU_S, FIRST_RENDER_S, nbytes),
            Renderer(nbytes=nbytes, nice=PATIENT_NICE),
        )
        self._num_slow = 0
        self.vocabulary = vocabulary
        self.special_tokens = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        of_model = getattr(tokenizer, "chat_template", None)
        self.is_plain = template is None and not of_model
        self._template = PLAIN_TEMPLATE if self.is_plain else template
        source = self._template or (of_model if isinstance(of_model, str) else json.dumps(of_model))
        self._takes_tools = "tools" in source
        known = None if self.is_plain or model is None else known_template(tokenizer, model)
        self.answers = AnswerFormat(known, thinks="<think>" in source)
        self._own_names = set(inspect.signature(tokenizer.apply_chat_template).parameters)

    async def of_messages(
        self, messages: Sequence[Message], tools: Sequence[Tool], variables: dict[str, Any]
    ) -> tuple[list[int], str]:
        """The tokens of a chat, and their text. `variables`: more for the template. Raises ApiError where it refuses
        the messages or takes too much for them, and where they are too long.
        """
        for name in variables.keys() & self._own_names:
            raise invalid(f"chat_template_kwargs: {name!r} is not the template's; accepted: what the template reads")
        if tools and not self._takes_tools:
            raise invalid("tools: this model's chat template knows none; accepted: no tools", "tools")
        self._check_length(sum(len(message.text) for message in messages), "messages")

        def render(renderer: Renderer) -> str:
            seen, functions = [as_template_sees(message) for message in messages], as_told(tools) or None
            return renderer.render(self._writer, seen, self._template, functions, variables, self.max_characters)

        try:
            text = await self._rendered(render)
        except TooLongError as error:
            raise self._too_long(error.length, "messages") from None
        except ConfigError as error:
            raise invalid(str(error), "messages") from None
        return await self._encoded(text, "messages", add_special_tokens=self.is_plain), text

    async def of_text(self, text: str) -> list[int]:
        """The tokens of a text, with those that the tokenizer puts before it. Raises ApiError where there are none or
        too many.
        """
        return await self._encoded(text, "prompt")

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raises ApiError where one is not in the vocabulary."""
        try:
            check_tokens(tokens, self.vocabulary, param)
        except ConfigError as error:
            raise invalid(str(error), param) from None

    def text(self, tokens: Sequence[int], special: bool = False) -> str:
        """The text of tokens. `special`: with special tokens, which are no text. Raises ConfigError where the tokenizer
        fails at them.
        """
        with tokenizer_errors("the model's tokenizer cannot write these tokens", ConfigError), self._reader_lock:
            text: str = self._reader.decode(
                list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False
            )
        return text

    def piece(self, token: int) -> tuple[str, bytes]:
        """One token alone: its text, and its bytes, which may be a part of a character."""
        text = self.text([token], special=True)
        return text, bytes_of(self._reader, token, text)

    def close(self) -> None:
        for renderer in self.renderers:
            renderer.sandbox.close()
        for threads in self._threads.values():
            threads.shutdown(cancel_futures=True)

    async def _rendered(self, render: Callable[[Renderer], str]) -> str:
        """Raises ConfigError, and ApiError where too many conversations take long."""
        first, patient = self.renderers
        try:
            return await self._in("templates", partial(render, first))
        except SlowError:
            pass
        if self._num_slow >= MAX_SLOW:
            raise unavailable(f"{self._num_slow} conversations are being rendered that take long", "templates_busy")
        self._num_slow += 1
        try:
            return await self._in("slow-templates", partial(render, patient))
        finally:
            self._num_slow -= 1

    async def _encoded(self, text: str, param: str, **options: bool) -> list[int]:
        self._check_length(len(text), param)
        lane = "prompts" if len(text) <= PIECE else "long-prompts"
        return await self._in(lane, partial(self._encode, text, param, options))

    def _encode(self, text: str, param: str, options: dict[str, bool]) -> list[int]:
        begins = range(0, len(text), PIECE) if len(text) > PIECE else ()
        try:
            with tokenizer_errors("the model's tokenizer cannot read it", ConfigError):
                least = 0
                for begin in begins:
                    least += len(self._writer.encode(text[begin : begin + PIECE], **options)) - _PIECE_SLACK
                    if least > self._context:
                        break
                else:
                    tokens: list[int] = self._writer.encode(text, **options)
        except ConfigError as error:
            log.warning("the tokenizer failed at a prompt of %d characters: %s", len(text), error)
            raise invalid(f"{param}: {error}", param) from None
        if least > self._context:
            raise self._too_long(len(text), param)
        self.check_tokens(tokens, param)
        return tokens

    async def _in(self, lane: str, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads[lane], work)

    def _check_length(self, length: int, param: str) -> None:
        if length > self.max_characters:
            raise self._too_long(length, param)

    def _too_long(self, length: int, param: str) -> ApiError:
        sentence = f"{length} characters are more than {self._context} tokens"
        return too_long(f"{sentence}; accepted: {self._context} together with those to write", param)


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
