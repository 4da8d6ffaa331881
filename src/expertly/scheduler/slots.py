"""The free slots of one size class, handed out so that an expert's segments end up side by side."""

from __future__ import annotations


class SlotPool:
    """`num_slots` equal slots. P neighbouring slots that start at a multiple of P are a *frame*: a whole expert
    gets a frame where one is free, so that its segments are computed as one. What is left over of other frames is
    *loose*, and serves single segments.
    """

    def __init__(self, num_slots: int, segments_per_expert: int) -> None:
        self.num_slots = num_slots
        self.num_free = num_slots
        self._size = size = segments_per_expert
        num_frames = num_slots // size
        self._frames = list(range(num_frames - 1, -1, -1))  # wholly free, lowest on top
        self._free_in_frame = [size] * num_frames
        self._loose: dict[int, None] = dict.fromkeys(range(num_frames * size, num_slots))

    def take_frame(self) -> int | None:
        """First slot of a free frame, or None."""
        if not self._frames:
            return None
        frame = self._frames.pop()
        self._free_in_frame[frame] = 0
        self.num_free -= self._size
        return frame * self._size

    def take(self, wanted: int | None) -> int:
        """One slot: `wanted` if it is loose, else any. The caller has checked `num_free`."""
        loose = self._loose
        if wanted is None or wanted not in loose:
            if not loose:
                self._break_frame()
            wanted = next(iter(loose)) if wanted is None or wanted not in loose else wanted
        del loose[wanted]
        self.num_free -= 1
        frame = wanted // self._size
        if frame < len(self._free_in_frame):
            self._free_in_frame[frame] -= 1
        return wanted

    def _break_frame(self) -> None:
        frame = self._frames.pop()
        self._loose.update(dict.fromkeys(range(frame * self._size, (frame + 1) * self._size)))

    def give_frame(self, slot: int) -> None:
        """Return a frame taken with `take_frame`."""
        frame = slot // self._size
        self._frames.append(frame)
        self._free_in_frame[frame] = self._size
        self.num_free += self._size

    def give(self, slot: int) -> None:
        """Return one slot; a frame that is whole again is a frame again."""
        self.num_free += 1
        frame = slot // self._size
        if frame >= len(self._free_in_frame):
            self._loose[slot] = None
            return
        self._free_in_frame[frame] += 1
        if self._free_in_frame[frame] < self._size:
            self._loose[slot] = None
            return
        for other in range(frame * self._size, (frame + 1) * self._size):
            if other != slot:
                del self._loose[other]
        self._frames.append(frame)

    def free_slots(self) -> list[int]:
        """All free slots, for checks."""
        framed = [frame * self._size + i for frame in self._frames for i in range(self._size)]
        return sorted([*framed, *self._loose])
