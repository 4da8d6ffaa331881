"""Tokens to text as they come: whole characters, spaces between words, the time of each token. Chat templates."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from transformers import AutoTokenizer

from expertly.core.errors import ConfigError
from expertly.data import demo_folder
from expertly.lab.prompts import tokens_of
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
    found, clock = list[str](), iter(range(100))
    streamer = TextStreamer(decode, found.append, lambda: next(clock))
    for some in ([1, 2, 3], *([token] for token in tokens)):  # the prompt first
        streamer.put(torch.tensor([some]))
    streamer.end()
    assert found == written
    assert (streamer.tokens, streamer.times_ns) == (tokens, list(range(len(tokens))))


def test_what_is_no_character_is_not_held_for_ever() -> None:
    """Else each token would cost more than the last, in whoever waits for the text."""
    tokens = [*b"ab", *[0x9F] * 30, *"漢".encode()]
    decoder = Decoder(of_bytes)
    held = 0
    told = ""
    for number, token in enumerate(tokens, 1):
        told += decoder.add([token])
        held = max(held, len(of_bytes(tokens[:number])) - len(told))
    assert held <= 10
    assert told + decoder.end() == of_bytes(tokens)


@pytest.mark.parametrize(
    ("expression", "refusal"),
    [
        ("1 // 0", "by zero"),
        ("range(1000000000)", "Range too big"),
        ("'a' * 10000000000", "more than 1048576"),
        ("10000000000 * [0]", "more than 1048576"),
        ("(7 ** 100) ** 100000", "more than 1048576"),
        ("nothing.more", "nothing"),
        ("2 ** 10 * 3 * '-' | length", None),
        ("2.5 * 4 + 1.5 ** 2 + 2 ** -1", None),
    ],
)
def test_a_chat_template_that_cannot_be_computed_is_refused_at_once(expression: str, refusal: str | None) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    tokenizer.chat_template = "{{ %s }}" % expression  # noqa: UP031 - braces are the template's
    begin = time.monotonic()
    if refusal is None:
        assert tokens_of(tokenizer, [{"role": "user", "content": "Hi"}])
    else:
        with pytest.raises(ConfigError, match=f"^messages: the model's chat template refuses them: .*{refusal}"):
            tokens_of(tokenizer, [{"role": "user", "content": "Hi"}])
    assert time.monotonic() - begin < 5
