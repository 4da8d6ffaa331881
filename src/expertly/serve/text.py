"""Text as a client gets it: nothing behind a stop string, nothing that may begin one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first of `stops`; the end that may be the start of one waits."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.is_stopped = False

    def add(self, text: str) -> str:
        """What may be shown. Nothing once `is_stopped`."""
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
        """What was held back, and was no stop string after all."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` that is a beginning of `word`, and not all of it."""
    for length in range(min(len(text), len(word) - 1), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0
