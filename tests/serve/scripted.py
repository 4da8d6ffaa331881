"""A model that says what it is told to: everything around it is as it is served."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from expertly.model.batching import Entry
from expertly.serve.sampling import Sampler
from expertly.serve.server import Assembled


class Uncached:
    """What a Stepper says that keeps no pages."""

    def num_cached(self, name: str) -> int:
        return 0

    def free_share(self) -> float:
        return 1.0

    def num_preempted(self) -> int:
        return 0


class Scripted(Uncached):
    """See Stepper. Each request gets the tokens of `says`, one a step; where its own settings (a bias, a temperature)
    chose others, so that it did not end there, the last one again, as a model would go on.
    """

    def __init__(self, sampler: Sampler, says: Sequence[int], vocabulary: int) -> None:
        self._sampler = sampler
        self._says = says
        self._vocabulary = vocabulary
        self._entries: queue.Queue[Entry | None] = queue.Queue()
        self._cancelled: set[str] = set()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def submit(self, entry: Entry) -> None:
        self._entries.put(entry)

    def cancel(self, name: str) -> None:
        self._cancelled.add(name)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self._entries.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (entry := self._entries.get()) is not None:
            for step in range(entry.max_new_tokens):
                token = self._says[min(step, len(self._says) - 1)]
                logits = torch.zeros(1, self._vocabulary)
                logits[0, token] = 50
                (chosen,) = self._sampler.choose([entry.name], logits)
                if entry.name in self._cancelled or (token if chosen is None else chosen) in entry.end_tokens:
                    break


def scripted(assembled: Assembled, text: str, tokenizer: Any) -> Assembled:
    """The same, of a model that always answers with `text`."""
    tokens = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    vocabulary = assembled.service.prompts.vocabulary

    return replace(assembled, make=lambda sampler, failed: Scripted(sampler, tokens, vocabulary))
