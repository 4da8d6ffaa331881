"""Tokens to text as they come: whole characters, spaces between words, the time of each token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from expertly.model.text import Decoder, TextStreamer


def of_bytes(tokens: list[int]) -> str:
    """One byte a token, as a byte-level tokenizer does to what it has no word for."""
    return bytes(tokens).decode("utf-8", errors="replace")


def of_words(tokens: list[int]) -> str:
    """Without the space before the first word, as sentencepiece does."""
    return "".join(f" {token}" for token in tokens)[1:]


@pytest.mark.parametrize(
    ("decode", "tokens", "written"),
    [
        (of_bytes, list("aé漢🙂z".encode()), ["a", "é", "漢", "🙂", "z"]),
        (of_bytes, [*b"ab", 0xF0, 0x9F], ["a", "b", "\N{REPLACEMENT CHARACTER}"]),  # never a character: at the end
        (of_words, [10, 11, 12], ["10", " 11", " 12"]),
        (of_words, [], []),
    ],
)
def test_whole_characters_are_written_as_they_come(
    decode: Callable[[list[int]], str], tokens: list[int], written: list[str]
) -> None:
    result, clock = list[str](), iter(range(100))
    streamer = TextStreamer(decode, result.append, lambda: next(clock))
    for some in ([1, 2, 3], *([token] for token in tokens)):  # the prompt first
        streamer.put(torch.tensor([some]))
    streamer.end()
    assert result == written
    assert (streamer.tokens, streamer.times_ns) == (tokens, list(range(len(tokens))))


def test_what_is_no_character_is_not_held_for_ever() -> None:
    """Else each token would cost more than the last, in whoever waits for the text."""
    tokens = [*b"ab", *[0x9F] * 30, *"漢".encode()]
    decoder = Decoder(of_bytes)
    held = 0
    message = ""
    for number, token in enumerate(tokens, 1):
        message += decoder.add([token])
        held = max(held, len(of_bytes(tokens[:number])) - len(message))
    assert held <= 10
    assert message + decoder.end() == of_bytes(tokens)
