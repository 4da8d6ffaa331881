"""Text as tokens come: nothing of a stop string."""

from __future__ import annotations

import random

from expertly.serve.request import StopStrings


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
