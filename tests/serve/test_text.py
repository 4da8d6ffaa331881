"""Text as tokens come: whole characters, and nothing of a stop string."""

from __future__ import annotations

import random

import pytest

from expertly.serve.text import Decoder, StopStrings, overlap


def of_bytes(tokens: list[int]) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(tokens).decode("utf-8", "replace")


def with_spaces(tokens: list[int]) -> str:
    """One that drops the space at the start of what it decodes."""
    return "".join(f" {chr(token)}" for token in tokens).removeprefix(" ")


@pytest.mark.parametrize("text", ["plain", "schön — 日本語 🙂 end", "🙂", ""])
def test_characters_are_never_cut(text: str) -> None:
    decoder = Decoder(of_bytes)
    parts = [decoder.add(byte) for byte in text.encode()] + [decoder.end()]
    assert "".join(parts) == text
    assert all(part in text for part in parts if part)
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


def test_a_character_that_never_ends_comes_at_the_end() -> None:
    decoder = Decoder(of_bytes)
    assert [decoder.add(byte) for byte in b"a\xe6\x97"] == ["a", "", ""]
    assert decoder.end() == "\N{REPLACEMENT CHARACTER}"


def test_tokens_keep_the_spaces_between_them() -> None:
    decoder = Decoder(with_spaces)
    assert "".join(decoder.add(ord(letter)) for letter in "abcdef") == "a b c d e f"


def whole(text: str, stops: list[str]) -> tuple[str, bool]:
    """The first of them by place ends it."""
    places = [place for place in (text.find(stop) for stop in stops) if place >= 0]
    return (text[: min(places)], True) if places else (text, False)


def test_stop_strings_in_any_spans() -> None:
    draw = random.Random(3)
    for _ in range(2000):
        text = "".join(draw.choices("ab", k=draw.randint(0, 12)))
        stops = ["".join(draw.choices("ab", k=draw.randint(1, 4))) for _ in range(draw.randint(0, 2))]
        filter_, shown, left = StopStrings(stops), "", text
        while left and not filter_.is_stopped:
            size = draw.randint(1, 3)
            shown += filter_.add(left[:size])
            left = left[size:]
        if not filter_.is_stopped:
            shown += filter_.end()
        expected, is_stopped = whole(text, stops)
        assert filter_.is_stopped == is_stopped
        if len(stops) < 2:
            assert shown == expected
        else:  # a longer one that begins earlier may not have ended yet
            assert expected.startswith(shown) or shown.startswith(expected)


@pytest.mark.parametrize(
    ("text", "word", "length"), [("abc", "cde", 1), ("abc", "bcd", 2), ("abc", "abc", 0), ("", "a", 0)]
)
def test_overlap(text: str, word: str, length: int) -> None:
    assert overlap(text, word) == length
