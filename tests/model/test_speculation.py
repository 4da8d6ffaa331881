"""When drafted tokens are verified: as stories of passes that take a stated time."""

from __future__ import annotations

import random
from collections.abc import Callable

from expertly.model.speculation import DraftGate

NUM_DRAFTED = 7


class Text:
    """Some text, written by verifying drafts of it: `num_new` tokens of which each draft is wrong, then `num_copied` of
    which each is right, and so on.
    """

    def __init__(self, num_new: int, num_copied: int) -> None:
        self.gate = DraftGate()
        self._num_new, self._period = num_new, num_new + num_copied
        self._context = "none"
        self._at = self._judged = 0

    def write(self, num_tokens: int, pass_ns: Callable[[int], float]) -> tuple[float, int]:
        """The nanoseconds that so many tokens took, and how many drafted ones were verified. A pass over n rows takes
        `pass_ns(n)`.
        """
        total_ns, num_verified, end = 0.0, 0, self._at + num_tokens
        while self._at < end:
            place = self._at % self._period
            num_right = min(NUM_DRAFTED, self._period - place) if place >= self._num_new else 0
            num = self.gate.num_verified(self._context, NUM_DRAFTED)
            if self._at >= self._judged:
                self._context = self.gate.settled(self._context, NUM_DRAFTED, num_right)
                self._judged = self._at + num_right + 1
            self.gate.passed(num, pass_ns(1 + num))
            total_ns += pass_ns(1 + num)
            num_verified += num
            self._at += 1 + min(num, num_right)
        return total_ns, num_verified


def in_memory(num_rows: int) -> float:
    """Half of a token's pass is for the pass: the more rows, the less for each."""
    return 500 + 500 * num_rows


def from_disk(num_rows: int) -> float:
    """Each row's experts are other ones and must be read, and what is read evicts what the next pass needs."""
    return 1000 * num_rows * (1.5 if num_rows > 1 else 1)


def test_text_that_is_copied_is_verified_in_long_passes() -> None:
    nanoseconds, num_verified = Text(num_new=8, num_copied=40).write(960, in_memory)
    assert nanoseconds < 0.8 * 960 * in_memory(1)
    assert num_verified > 960 / 2


def test_text_that_is_new_is_not_verified() -> None:
    nanoseconds, num_verified = Text(num_new=1000, num_copied=0).write(1000, in_memory)
    assert (nanoseconds, num_verified) == (1000 * in_memory(1), 0), "comparing drafts with the text is enough to know"


def test_nothing_is_verified_where_the_disk_is_the_limit() -> None:
    """Not even text that is copied. It takes a few passes to know, and one now and then to know it still."""
    text = Text(num_new=8, num_copied=40)
    nanoseconds, num_verified = text.write(2000, from_disk)
    assert 0 < num_verified < 0.1 * 2000 and nanoseconds < 1.05 * 2000 * from_disk(1)
    assert text.write(2000, from_disk)[0] < 1.03 * 2000 * from_disk(1)


def test_a_disk_that_becomes_the_limit_and_is_none_any_more() -> None:
    text = Text(num_new=8, num_copied=40)
    text.write(960, in_memory)
    text.write(480, from_disk)
    assert text.write(960, from_disk)[0] < 1.1 * 960 * from_disk(1)
    text.write(4800, in_memory)
    assert text.write(960, in_memory)[0] < 0.8 * 960 * in_memory(1), "the slow passes are forgotten"


def test_a_pause_of_the_machine_does_not_decide() -> None:
    dice = random.Random(0)

    def paused(num_rows: int) -> float:
        return in_memory(num_rows) * (50 if dice.random() < 0.02 else 1)

    text = Text(num_new=8, num_copied=40)
    text.write(2000, paused)
    assert text.write(960, in_memory)[0] < 0.85 * 960 * in_memory(1)


def test_short_repeats_take_short_drafts() -> None:
    """Two tokens stand together earlier, then the text goes another way: longer drafts would be read for nothing."""
    text = Text(num_new=1, num_copied=2)
    text.write(300, in_memory)
    assert text.gate.num_verified("some", NUM_DRAFTED) <= 2
    nanoseconds, _ = text.write(300, in_memory)
    assert nanoseconds < 300 * in_memory(1)
