"""Free slots of one size class where experts come and go in parts: who asks gets neighbours, where there are some."""

from __future__ import annotations


class RunPool:
    """`num_slots` equal slots; the free ones form runs. A request takes the shortest run that is long enough, else the
    longest and what it still needs from others: parts of experts that come and go in few sizes leave holes of these.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_free = 0
        self._length: dict[int, int] = {}  # first slot of a run -> its length
        self._first: dict[int, int] = {}  # last slot of a run -> its first
        self._of_length: dict[int, dict[int, None]] = {}  # length -> first slots of runs, the newest last
        if num_slots:
            self._add(0, num_slots)
            self.num_free = num_slots

    def take(self, num: int, wanted: int | None) -> list[int]:
        """So many slots, neighbours as far as can be: from `wanted` on where a run long enough begins there. The caller
        has checked `num_free`.
        """
        taken: list[int] = []
        while len(taken) < num:
            left = num - len(taken)
            first = wanted
            if first is None or self._length.get(first, 0) < left:
                fitting = [length for length in self._of_length if length >= left]
                length = min(fitting) if fitting else max(self._of_length)
                first = next(iter(self._of_length[length]))
            length = self._length[first]
            self._remove(first, length)
            if length > left:
                self._add(first + left, length - left)
                length = left
            taken += range(first, first + length)
        self.num_free -= num
        return taken

    def give(self, slot: int) -> None:
        """Return one slot; neighbours become one run."""
        self.num_free += 1
        first, length = slot, 1
        if slot - 1 in self._first:
            first = self._first[slot - 1]
            before = self._length[first]
            self._remove(first, before)
            length += before
        if slot + 1 in self._length:
            behind = self._length[slot + 1]
            self._remove(slot + 1, behind)
            length += behind
        self._add(first, length)

    def free_slots(self) -> list[int]:
        """All free slots, for checks."""
        return sorted(first + i for first, length in self._length.items() for i in range(length))

    def _add(self, first: int, length: int) -> None:
        self._length[first] = length
        self._first[first + length - 1] = first
        self._of_length.setdefault(length, {})[first] = None

    def _remove(self, first: int, length: int) -> None:
        del self._length[first]
        del self._first[first + length - 1]
        same = self._of_length[length]
        del same[first]
        if not same:
            del self._of_length[length]
