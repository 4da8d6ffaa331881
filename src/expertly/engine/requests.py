"""Which request each row of a forward pass is of, as far as a model shows it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from expertly.core.observation import IterationInfo

Ids = npt.NDArray[np.int64]


class RequestNumbers:
    """Numbers requests as they come; no two have the same.

    A sequence in prefill is a new request. One that decodes goes on with the number it had in the pass before: it has
    the same place in a batch of as many, or, where sequences lie side by side (continuous batching), the next position;
    a prompt that comes in parts is known by it, too. Where neither says, it has a new number.
    """

    def __init__(self) -> None:
        self._next = 0
        self._numbers: Ids = np.empty(0, np.int64)  # of the sequences of the last pass
        self._following: dict[int, list[int]] = {}  # position that would come next -> requests, in order

    def of_rows(self, info: IterationInfo) -> Ids:
        """[T], pads included: theirs mean nothing. Needs the `sequences` of the pass; to be called once a pass."""
        assert info.sequences is not None, "the engine asks for them"
        sequences = info.sequences
        if info.starts is not None:
            return self._side_by_side(info, sequences, info.starts.tolist())
        num_sequences = int(sequences[-1]) + 1
        if info.phase == "prefill" or len(self._numbers) != num_sequences:
            self._numbers = np.arange(self._next, self._next + num_sequences)
            self._next += num_sequences
        return self._numbers[sequences]

    def _side_by_side(self, info: IterationInfo, sequences: npt.NDArray[np.int32], starts: list[int]) -> Ids:
        is_real = slice(None) if info.is_pad is None else ~info.is_pad
        lengths = np.bincount(sequences[is_real], minlength=len(starts))
        following: dict[int, list[int]] = {}
        numbers = np.full(len(starts), -1)
        for sequence, (start, length) in enumerate(zip(starts, lengths.tolist(), strict=True)):
            if not length:
                continue
            known = self._following.get(start) if start else None
            if known:
                numbers[sequence] = known.pop(0)
            else:
                numbers[sequence] = self._next
                self._next += 1
            following.setdefault(start + length, []).append(int(numbers[sequence]))
        self._numbers, self._following = numbers, following
        return numbers[sequences]
