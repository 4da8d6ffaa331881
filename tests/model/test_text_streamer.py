from __future__ import annotations

import torch

from expertly.model.text import Decoder, TextStreamer


class ByteTokenizer:
    """One byte a token, as a byte-level tokenizer does to what it has no word for."""

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


class SpaceDroppingTokenizer:
    """Drops the space before the first word, as sentencepiece does."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(f" {token}" for token in tokens)[1:]


def stream(decode, tokens: list[int], clock_ns=lambda: 0) -> tuple[list[str], TextStreamer]:
    written: list[str] = []
    streamer = TextStreamer(decode, written.append, clock_ns)
    streamer.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for token in tokens:
        streamer.put(torch.tensor([token]))
    streamer.end()
    return written, streamer


def test_never_writes_part_of_a_character():
    text = "aé漢🙂z"
    written, _ = stream(ByteTokenizer().decode, list(text.encode()))
    assert written == list(text)


def test_what_never_becomes_a_character_is_written_at_the_end():
    written, _ = stream(ByteTokenizer().decode, [*b"ab", 0xF0, 0x9F])
    assert "".join(written) == ByteTokenizer().decode([*b"ab", 0xF0, 0x9F])


def test_what_is_no_character_is_not_held_for_ever():
    """Else each token would cost more than the last, in whoever waits for the text."""
    tokens = [*b"ab", *[0x9F] * 30, *"漢".encode()]
    decoder, decode = Decoder(ByteTokenizer().decode), ByteTokenizer().decode
    held = 0
    told = ""
    for number, token in enumerate(tokens, 1):
        told += decoder.add([token])
        held = max(held, len(decode(tokens[:number])) - len(told))
    assert held <= 10
    assert told + decoder.end() == decode(tokens)


def test_spaces_between_tokens_survive():
    written, streamer = stream(SpaceDroppingTokenizer().decode, [10, 11, 12])
    assert "".join(written) == "10 11 12"
    assert streamer.tokens == [10, 11, 12]


def test_notes_when_each_token_came_but_not_the_prompt():
    clock = iter(range(100))
    _, streamer = stream(SpaceDroppingTokenizer().decode, [10, 11], lambda: next(clock))
    assert streamer.times_ns == [0, 1]


def test_no_tokens_write_nothing():
    assert stream(SpaceDroppingTokenizer().decode, [])[0] == []
