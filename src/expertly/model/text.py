"""From tokens to text, character by character."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_MOST_HELD = 8
"""Tokens that may make one character: it has at most four bytes in UTF-8, and a token one or more."""

Decode = Callable[[list[int]], str]


class Decoder:
    """Decodes tokens as they come. The texts of `add` and `end` together are the text of all tokens decoded at once,
    and none ends within a character.

    A token is decoded together with those before it back to the last boundary, because tokenizers drop or add a space
    at the start.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []  # the text of the first `_written` has been returned
        self._written = 0

    def add(self, tokens: Sequence[int]) -> str:
        self._tokens += tokens
        return self._advance(is_end=False)

    def end(self) -> str:
        """The text that was held back: the beginning of a character without an end."""
        return self._advance(is_end=True)

    def _advance(self, is_end: bool) -> str:
        before = self._decode(self._tokens[: self._written])
        text = self._decode(self._tokens)
        num_sure = len(self._tokens)
        if text.endswith(REPLACEMENT) and not is_end:
            if num_sure - self._written <= _MOST_HELD:
                return ""
            num_sure -= _MOST_HELD // 2  # these are no character, except perhaps the last tokens
            sure = self._decode(self._tokens[:num_sure])
            text = sure if text.startswith(sure) else ""
        if len(text) <= len(before):
            return ""
        self._tokens = self._tokens[self._written :]
        self._written = num_sure - self._written
        return text[len(before) :]


def bytes_of(tokenizer: Any, token: int, text: str) -> bytes:
    """The bytes of one token, whose text by itself is `text`. They may be a part of a character."""
    if REPLACEMENT not in text:
        return text.encode()
    raw: str = tokenizer.convert_ids_to_tokens(token)
    if re.fullmatch(r"<0x[0-9A-F]{2}>", raw):  # as sentencepiece writes a byte
        return bytes([int(raw[3:5], 16)])
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}  # as byte-level BPE does
    return bytes(byte_of[letter] for letter in raw) if byte_of.keys() >= set(raw) else text.encode()


class TextStreamer:
    """A streamer for transformers' `generate`, which calls `put` and `end`. Writes the text of a sequence as it comes,
    and notes the time of each token.
    """

    def __init__(
        self,
        decode: Decode = lambda tokens: "",
        write: Callable[[str], None] = lambda text: None,
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
        self._show(self._decoder.end())

    def _show(self, text: str) -> None:
        if text:
            self._write(text)
