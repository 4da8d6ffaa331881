"""Whether a model's requests can share forward passes: tried, once, before anybody asks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from expertly.core.errors import ExpertlyError
from expertly.model.stepping import Batch, Entry, Limits

_PATIENCE_S = 600.0
_TOKENS = 2


class _Greedy:
    """Chooses what is likeliest, and says when there have been enough."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.error: BaseException | None = None
        self._num = 0

    def choose(self, names: Sequence[str], logits: torch.Tensor) -> list[int | None]:
        """See Chooser."""
        self._num += 1
        if self._num >= _TOKENS:
            self.is_over.set()
        return [None] * len(names)

    def failed(self, of_step: Sequence[str], others: Sequence[str], error: BaseException) -> None:
        self.error = error
        self.is_over.set()


def why_not_together(model: Any, page_tokens: int) -> str | None:
    """None where continuous batching runs this model; else the reason, for people. Two tokens are written to see.

    Raises ExpertlyError where the experts could not be brought: that says nothing of the family.
    """
    if model.config.is_encoder_decoder:
        return "it has an encoder"
    greedy = _Greedy()
    try:
        batch = Batch(model, Limits(page_tokens, 4, page_tokens, 2), greedy, greedy.failed)
    except Exception as error:  # whatever a family that it does not know makes upstream raise
        return _said(error)
    try:
        batch.submit(Entry("probe", [0, 1, 2], _TOKENS, []))
        if not greedy.is_over.wait(_PATIENCE_S):
            return f"it wrote no two tokens in {_PATIENCE_S:.0f} s"
    finally:
        batch.close()
    if isinstance(greedy.error, ExpertlyError):
        raise greedy.error
    return None if greedy.error is None else _said(greedy.error)


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"transformers' continuous batching does not run it ({type(error).__name__}: {text[:200]})"
