"""How many threads compute beside readers that decode on the same processors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from expertly.core.geometry import Geometry
from expertly.core.resources import computing_threads, granted_cpus
from expertly.engine.transfer import NUM_READERS

LEAST_DECODED = 0.25
"""Share of the experts that does not stay in memory: with less, decoding takes too little to leave it anything."""

MAX_TOKENS_PER_EXPERT = 130
"""On average, in passes that leave readers processors, where no expert stays in memory, and less in proportion. With
more, computing takes longer than decoding does: threads that it lacks cost more than those that wait for one another
(docs/codec.md).
"""


class ComputeThreads:
    """Of the passes of one model, on the thread that runs them.

    A product on several threads ends with the last of them. One that a decoder has put off its processor is late by
    what the decoder takes, so that two threads beside decoders on two processors are slower than one by itself.
    """

    def __init__(self, geometry: Geometry, held_nbytes: int) -> None:
        """`held_nbytes`: of experts that stay in memory, decoded."""
        self.num_beside = computing_threads(granted_cpus(), NUM_READERS)
        """Threads that compute beside decoders; torch's own number where that is less."""
        self.num_passes = 0
        """That ran with fewer threads than torch has."""
        decoded = 1 - held_nbytes / geometry.nbytes
        self.max_tokens_per_expert = MAX_TOKENS_PER_EXPERT * decoded if decoded > LEAST_DECODED else 0.0
        self._share = max(layer.top_k / layer.num_experts for layer in geometry.layers)
        self._before: int | None = None  # the threads of torch, while a pass runs with fewer

    def begin(self, num_tokens: int) -> None:
        """A pass of so many tokens begins."""
        before = torch.get_num_threads()
        if num_tokens * self._share <= self.max_tokens_per_expert and self.num_beside < before:
            self._before = before
            self.num_passes += 1
            torch.set_num_threads(self.num_beside)

    def end(self) -> None:
        """It ended: torch has as many as before."""
        before, self._before = self._before, None
        if before is not None:
            torch.set_num_threads(before)

    def facts(self) -> dict[str, int]:
        """For people and programs."""
        return {"beside_decoders": self.num_beside, "passes_with_fewer": self.num_passes}

    @contextmanager
    def of_pass(self, num_tokens: int) -> Iterator[None]:
        """As if the block were a pass."""
        self.begin(num_tokens)
        try:
            yield
        finally:
            self.end()
