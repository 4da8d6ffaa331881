"""Speculative decoding by transformers' own `generate`, as far as it pays.

With `prompt_lookup_num_tokens`, `generate` drafts a continuation that stands earlier in the text, and one pass verifies
it. The pass needs the experts of all drafted tokens. It pays where drafts are right, and loses elsewhere, most where
experts come from a disk. So a loaded model verifies of each draft as many tokens as give most tokens per second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

NUM_DRAFTED = 7
"""Tokens of a draft where the user does not say how many: with the token before it a pass has 8 rows."""

_CONTEXTS = ("none", "some", "all")
"""How many tokens of the draft before were right. After a right one another is likely: text is copied in runs."""

_NUM_DRAFTS, _NUM_PASSES = 32, 8
"""Over which it is averaged how many tokens are right, and how long passes take."""
_WRONG_BEFORE = 2
"""Drafts that count as wrong before the first, so that a few which are right by chance do not decide."""
_LEAST_PASSES = 2
"""Passes of a size after which its time counts; before, a drafted token is held to add _ADDED of a pass."""
_ADDED = 0.4
_LONGEST = 2.0
"""A pass counts as at most so many average ones, so that a pause of the machine does not decide."""
_FADING = 0.998
"""By which the known time of a size of pass shrinks with each other pass, so that it is tried again at some time."""
_OLD = 64
"""Passes after which a new time weighs as much as all before it."""
_LEAST_GAIN = 1.05
"""By which verifying must be faster than not."""
_MOST_SKIPPED = 8
"""Passes without a draft behind drafts that were wrong and not verified: as many as those, at most so many."""


class DraftGate:
    """Chooses how many tokens of a draft to verify. It is told what the text became, and how long passes took; it reads
    no clock. Drafts are compared with the text even where none of their tokens is verified, which costs nothing.
    """

    def __init__(self) -> None:
        self._right: dict[str, list[list[float]]] = {context: [] for context in _CONTEXTS}
        """By context: for each i how many drafts had a token i, and the share of them that was right until there."""
        self._times: dict[int, _PassTime] = {}  # by `_size`
        self._num_passes = 0

    @property
    def is_open(self) -> bool:
        """Whether a draft would be verified, at least behind one that was right."""
        return any(self.num_verified(context, len(right)) for context, right in self._right.items())

    def num_verified(self, context: str, num_drafted: int) -> int:
        """How many of so many drafted tokens to verify."""
        now, plain = self._num_passes, self._times.get(0)
        if plain is None or plain.num < _LEAST_PASSES:
            return 0
        plain_ns = plain.at(now)
        best, best_rate = 0, _LEAST_GAIN / plain_ns
        expected, right = 1.0, self._right[context]
        for num in range(1, min(num_drafted, len(right)) + 1):
            expected += right[num - 1][1]
            known = self._times.get(_size(num))
            is_new = known is None or known.num < _LEAST_PASSES
            time_ns = plain_ns * (1 + _ADDED * num) if known is None or is_new else known.at(now)
            if expected / time_ns > best_rate:
                best, best_rate = num, expected / time_ns
        return best

    def settled(self, context: str, num_drafted: int, num_right: int) -> str:
        """Of a draft, made in a context, so many tokens were right. Returns the context of the next."""
        right = self._right[context]
        for i in range(num_drafted):
            if i == len(right):
                right.append([float(_WRONG_BEFORE), 0.0])
            right[i][0] += 1
            right[i][1] += ((i < num_right) - right[i][1]) / min(right[i][0], _NUM_DRAFTS)
        return "none" if not num_right else "all" if num_right == num_drafted else "some"

    def passed(self, num_verified: int, taken_ns: float) -> None:
        """A pass verified so many drafted tokens."""
        self._num_passes += 1
        known = self._times.setdefault(_size(num_verified), _PassTime())
        known.add(float(taken_ns), self._num_passes)


@dataclass(slots=True)
class _PassTime:
    """Of passes of alike size: how many there were, their average time, and the number of the last one."""

    num: int = 0
    average_ns: float = 0.0
    last: int = 0

    def add(self, taken_ns: float, now: int) -> None:
        self.num += 1
        if self.num > _LEAST_PASSES:
            taken_ns = min(taken_ns, _LONGEST * self.average_ns)
        weight = 1 / min(self.num, _NUM_PASSES)
        if now - self.last > _OLD:
            weight = max(weight, 0.5)
        self.average_ns += (taken_ns - self.average_ns) * weight
        self.last = now

    def at(self, now: int) -> float:
        return self.average_ns * _FADING ** (now - self.last)


def _size(num_verified: int) -> int:
    """Sizes of pass that count as alike: of 1, 2, 3 to 4, 5 to 8, 9 to 16 rows and so on."""
    return num_verified.bit_length()


@dataclass(slots=True)
class _Total:
    """Over passes: how many, their drafted tokens and the accepted ones, experts needed, bytes loaded."""

    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    experts: int = 0
    nbytes: int = 0


class Speculation:
    """What a loaded model's calls of `generate` draft, and its gate."""

    def __init__(
        self, counted: Callable[[], tuple[int, int]], clock_ns: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        """`counted`: experts that decoding has needed so far, and bytes that it loaded."""
        self.gate = DraftGate()
        self.counted = counted
        self.clock_ns = clock_ns
        self._totals = _Total(), _Total()  # of passes without drafted tokens, and with

    def watch(self, generator: Any) -> Any:
        """Gate one of transformers' candidate generators where it looks up; of any other count what it drafts."""
        watched = _Watched(self, generator)
        generator.get_candidates = watched.get_candidates
        generator.update_candidate_strategy = watched.update_candidate_strategy
        return generator

    def add(self, num_verified: int, num_accepted: int, num_experts: int, nbytes: int) -> None:
        """A pass verified so many drafted tokens, and needed so many experts."""
        total = self._totals[num_verified > 0]
        total.passes += 1
        total.drafted += num_verified
        total.accepted += num_accepted
        total.experts += num_experts
        total.nbytes += nbytes

    def facts(self) -> dict[str, Any] | None:
        """As plain data; None where no call of `generate` could draft."""
        plain, verify = self._totals
        if not plain.passes + verify.passes:
            return None
        added = None
        if plain.passes and verify.passes:
            added = verify.experts / verify.passes - plain.experts / plain.passes
        state = "on" if self.gate.is_open else "off"
        accepted = f"{verify.accepted} of {verify.drafted} drafted tokens accepted"
        return {
            "state": state,
            "passes": verify.passes,
            "passes_without": plain.passes,
            "drafted": verify.drafted,
            "accepted": verify.accepted,
            "experts_added_per_pass": added,
            "bytes_per_token": verify.nbytes / (verify.passes + verify.accepted) if verify.passes else None,
            "bytes_per_token_without": plain.nbytes / plain.passes if plain.passes else None,
            "says": f"{state}, {accepted}" + ("" if added is None else f", {added:.1f} experts added a pass"),
        }


class _Watched:
    """One call of `generate`: what its generator drafts. The text's first pass reads the prompt and verifies nothing
    that was looked up.
    """

    def __init__(self, speculation: Speculation, generator: Any) -> None:
        self._speculation = speculation
        self._draft, self._learn = generator.get_candidates, generator.update_candidate_strategy
        self._is_gated = isinstance(generator, PromptLookupCandidateGenerator)
        if self._is_gated and not generator.logits_processor:
            generator.logits_processor = None  # it would ask an empty list about each token: 0.2 ms a draft
        self._context = "none"
        self._open: tuple[int, list[int]] | None = None  # a draft that the text has to show right or wrong, and where
        self._verifies = False  # the latest draft, at least in part
        self._num_wrong = self._num_skipped = 0  # drafts in a row; passes before the next look
        self._num_verified: int | None = None  # of the running pass; None: it is the first
        self._is_first, self._began_ns = True, 0
        self._before = 0, 0  # see Speculation.counted

    def get_candidates(self, input_ids: torch.Tensor, **more: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the generator's: the text so far [1, S] with drafted tokens behind it, and their logits."""
        self._began_ns = self._speculation.clock_ns()
        is_first, self._is_first = self._is_first, False
        candidates, logits = input_ids, None
        if not self._is_gated:
            candidates, logits = self._draft(input_ids, **more)
        elif not is_first and self._looks(input_ids):
            candidates, _ = self._draft(input_ids, **more)
            candidates = candidates[:, : input_ids.shape[1] + self._gated(input_ids.shape[1], candidates)]
        self._num_verified = None if is_first else candidates.shape[1] - input_ids.shape[1]
        self._before = self._speculation.counted()
        return candidates, logits

    def _looks(self, input_ids: torch.Tensor) -> bool:
        """Whether to look up in this pass. Judges the open draft by the text. Drafts are judged one after the other, as
        if all were verified.
        """
        if self._open is None:
            self._num_skipped -= 1
            return self._num_skipped < 0
        at, expected = self._open
        text = input_ids[0, at : at + len(expected)].tolist()
        num_right = next((i for i, one in enumerate(text) if one != expected[i]), len(text))
        if num_right == len(text) < len(expected):
            return self._verifies  # it is right so far
        self._open = None
        self._context = self._speculation.gate.settled(self._context, len(expected), num_right)
        self._num_wrong = 0 if num_right or self._verifies else min(self._num_wrong + 1, _MOST_SKIPPED)
        self._num_skipped = self._num_wrong - 1
        return self._num_skipped < 0

    def _gated(self, length: int, candidates: torch.Tensor) -> int:
        """How many of the tokens behind a text of this length to verify."""
        drafted = candidates[0, length:].tolist()
        if not drafted:
            return 0
        if self._open is None:
            self._open = length, drafted
        num = self._speculation.gate.num_verified(self._context, len(drafted))
        self._verifies = num > 0
        return num

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """As the generator's: the pass has ended, and so many drafted tokens were right."""
        self._learn(input_ids, scores, num_matches)
        if self._num_verified is None:
            return
        speculation = self._speculation
        if self._is_gated:
            speculation.gate.passed(self._num_verified, speculation.clock_ns() - self._began_ns)
        num_experts, nbytes = (now - was for now, was in zip(speculation.counted(), self._before, strict=True))
        speculation.add(self._num_verified, int(num_matches), num_experts, nbytes)
