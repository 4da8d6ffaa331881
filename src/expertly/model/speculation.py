"""Speculative decoding by transformers' own `generate`, counted.

With `prompt_lookup_num_tokens`, `generate` drafts a continuation that stands earlier in the text, and one pass verifies
it. The pass needs the experts of all drafted tokens: it pays where drafts are right, and loses elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

NUM_DRAFTED = 7
"""Tokens of a draft where the user does not say how many: with the token before it a pass has 8 rows."""


class Speculation:
    """What a loaded model's calls of `generate` draft."""

    def __init__(self) -> None:
        self._num_plain = 0  # passes without drafted tokens
        self._num_verifying = 0  # passes with some
        self._num_drafted = self._num_accepted = 0  # tokens

    def watch(self, generator: Any) -> Any:
        """Count what one of transformers' candidate generators drafts. A text's first pass reads the prompt; nothing is
        looked up for it.
        """
        draft, learn = generator.get_candidates, generator.update_candidate_strategy
        looks_up = isinstance(generator, PromptLookupCandidateGenerator)
        if looks_up and not generator.logits_processor:
            generator.logits_processor = None  # it would ask an empty list about each token: 0.2 ms a draft
        num_drafted: list[int] = []  # of each pass

        def get_candidates(input_ids: torch.Tensor, **more: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
            """The text so far [1, S] with drafted tokens behind it, and their logits."""
            candidates, logits = input_ids, None
            if num_drafted or not looks_up:
                candidates, logits = draft(input_ids, **more)
            num_drafted.append(candidates.shape[1] - input_ids.shape[1])
            return candidates, logits

        def update_candidate_strategy(input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
            learn(input_ids, scores, num_matches)
            if len(num_drafted) > 1:
                self._num_verifying += num_drafted[-1] > 0
                self._num_plain += num_drafted[-1] == 0
                self._num_drafted += num_drafted[-1]
                self._num_accepted += int(num_matches)

        generator.get_candidates = get_candidates
        generator.update_candidate_strategy = update_candidate_strategy
        return generator

    def facts(self) -> dict[str, Any] | None:
        """As plain data; None where no call of `generate` could draft."""
        if not self._num_plain + self._num_verifying:
            return None
        return {
            "passes": self._num_verifying,
            "passes_without": self._num_plain,
            "drafted": self._num_drafted,
            "accepted": self._num_accepted,
            "says": f"{self._num_accepted} of {self._num_drafted} drafted tokens accepted",
        }
