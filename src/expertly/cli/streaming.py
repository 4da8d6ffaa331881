"""Text as it is made: a streamer for transformers' `generate` (which only calls `put` and `end`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextStreamer:
    """Decodes one sequence token by token, never writing part of a character, and notes when each token came.

    Joined, what `write` got is what decoding all tokens at once gives. A token is decoded together with the ones
    before it back to the last boundary, because tokenizers drop or add a space at the start of what they decode.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        write: Callable[[str], None],
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._decode = decode
        self._write = write
        self._clock_ns = clock_ns
        self._is_prompt = True
        self._begin = 0  # tokens[begin:written] are context whose text is out
        self._written = 0
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
        self._advance(is_end=False)

    def end(self) -> None:
        """Write what was held back: the start of a character that never ended."""
        self._advance(is_end=True)

    def _advance(self, is_end: bool) -> None:
        before = self._decode(self.tokens[self._begin : self._written])
        text = self._decode(self.tokens[self._begin :])
        if len(text) <= len(before) or (text.endswith(_REPLACEMENT) and not is_end):
            return
        self._write(text[len(before) :])
        self._begin, self._written = self._written, len(self.tokens)
