"""Between tokens and text: characters as they become whole, and what a chat template may raise."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jinja2

TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError)
"""What a chat template may raise over messages that it was not written for."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Decode = Callable[[list[int]], str]


class Decoder:
    """Joined, what `add` and `end` give is what decoding all tokens at once gives; never a part of a character.

    A token is decoded with the ones before it back to the last boundary: tokenizers drop or add a space at the start.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []  # the first `_written` are context whose text is out
        self._written = 0

    def add(self, tokens: Sequence[int]) -> str:
        """The text that is certain now and was not before."""
        self._tokens += tokens
        return self._advance(is_end=False)

    def end(self) -> str:
        """What was held back: the start of a character that never ended."""
        return self._advance(is_end=True)

    def _advance(self, is_end: bool) -> str:
        before = self._decode(self._tokens[: self._written])
        text = self._decode(self._tokens)
        if len(text) <= len(before) or (text.endswith(_REPLACEMENT) and not is_end):
            return ""
        self._tokens = self._tokens[self._written :]
        self._written = len(self._tokens)
        return text[len(before) :]


class TextStreamer:
    """A streamer for transformers' `generate`, which only calls `put` and `end`: writes the text of one sequence as it
    is made, and notes when each token came.
    """

    def __init__(
        self,
        decode: Decode,
        write: Callable[[str], None],
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._decoder = Decoder(decode)
        self._write = write
        self._clock_ns = clock_ns
        self._is_prompt = True
        self.tokens: list[int] = []
        self.times_ns: list[int] = []

    def put(self, value: Any) -> None:
        """Take a tensor of token ids. The first is the prompt, which is not repeated."""
        if self._is_prompt:
            self._is_prompt = False
            return
        ids: list[int] = value.reshape(-1).tolist()
        self.tokens += ids
        self.times_ns += [self._clock_ns()] * len(ids)
        self._show(self._decoder.add(ids))

    def end(self) -> None:
        """Write what was held back: the start of a character that never ended."""
        self._show(self._decoder.end())

    def _show(self, text: str) -> None:
        if text:
            self._write(text)
