"""The text that a client gets: nothing after a stop string, and nothing yet that may begin one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on up to the first of `stops`, and holds back an end that may begin one of them."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.is_stopped = False

    def add(self, text: str) -> str:
        """The text that may be shown now; nothing once `is_stopped`."""
        if self.is_stopped or not self._stops:
            return "" if self.is_stopped else text
        text = self._held + text
        places = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if places:
            self.is_stopped, self._held = True, ""
            return text[: min(places)]
        num_held = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def end(self) -> str:
        """The text that was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, word: str) -> int:
    """The length of the longest proper prefix of `word` that `text` ends with."""
    for length in range(min(len(text), len(word) - 1), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0
