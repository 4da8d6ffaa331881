"""Which slots are free, so that an expert's units lie side by side where possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Pool:
    """The slots of one size class. P slots that begin at a multiple of P are a block: a whole expert gets one where
    one is free, so that it is loaded and computed as one span; parts of experts get what is left of other blocks, so
    that holes do not spread.
    """

    def __init__(self, num_kept: int, num_staging: int, num_parts: int) -> None:
        self.num_slots = self.num_free = num_kept + num_staging
        self.least_staging = num_staging
        self.staging = num_staging  # slots that belong to no quota
        self.num_kept = 0  # units that are kept
        self.block_size = num_parts
        num_blocks = self.num_slots // num_parts
        self.blocks = [block * num_parts for block in reversed(range(num_blocks))]  # first slots of free blocks
        self._loose = set(range(num_blocks * num_parts, self.num_slots))  # free slots of blocks that are not free

    @property
    def num_staged(self) -> int:
        """Units that have slots and are not kept."""
        return self.num_slots - self.num_free - self.num_kept

    def take(self, num: int, wanted: int | None = None) -> Sequence[int]:
        """So many slots, of which there are enough: those from `wanted` on if they are loose, else the shortest run of
        loose slots that is long enough, else a part of a block, else the longest runs there are.
        """
        self.num_free -= num
        taken: list[int] = []
        run = range(0) if wanted is None else range(wanted, wanted + num)
        while len(taken) < num:
            if not (run and self._loose.issuperset(run)):
                run = self._best_run(num - len(taken))
            self._loose.difference_update(run)
            taken += run
        return taken

    def give(self, slots: Sequence[int]) -> None:
        """Return slots; a block that is wholly free is a block again."""
        self.num_free += len(slots)
        self._loose.update(slots)
        for first in dict.fromkeys([slot - slot % self.block_size for slot in slots]):
            block = range(first, first + self.block_size)
            if self._loose.issuperset(block):
                self._loose.difference_update(block)
                self.blocks.append(first)

    def free_slots(self) -> list[int]:
        return sorted(
            [*self._loose, *(slot for first in self.blocks for slot in range(first, first + self.block_size))]
        )

    def check(self, used: Sequence[int]) -> None:
        """Assert that every slot is free or one of those used."""
        assert sorted([*used, *self.free_slots()]) == list(range(self.num_slots)), "a slot is lost or owned twice"
        assert self.num_free == self.num_slots - len(used), "free count is wrong"

    def _best_run(self, num: int) -> range:
        """Up to so many loose slots beside each other, see `take`."""
        loose = runs(sorted(self._loose))
        fitting = [run for run in loose if len(run) >= num]
        if not fitting and self.blocks:
            first = self.blocks.pop()
            fitting = [range(first, first + self.block_size)]
            self._loose.update(fitting[0])
        return min(fitting, key=len)[:num] if fitting else max(loose, key=len)


def runs(numbers: Iterable[int]) -> list[range]:
    """Rising numbers, as runs of neighbours."""
    joined: list[range] = []
    for number in numbers:
        if joined and joined[-1].stop == number:
            joined[-1] = range(joined[-1].start, number + 1)
        else:
            joined.append(range(number, number + 1))
    return joined
